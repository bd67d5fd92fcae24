"""The federations that speed is measured on: shapes of published experiments, samples of random bytes.

Speed does not depend on the values, so nothing is downloaded, and every side gets the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from .. import models, rng
from ..data import Federation
from ..errors import InputError, nearest


@dataclass(frozen=True)
class Workload:
    """Describes a federation of equal clients, a network, and the local work of a round."""

    name: str
    layers: str  # of the network, in words
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int  # clients of a round
    samples: int  # per client
    batch: int = 50
    epochs: int = 5
    lr: float = 0.03

    @property
    def steps(self) -> int:
        """Return how many local steps a client takes in a round."""
        return self.epochs * -(-self.samples // self.batch)

    @property
    def description(self) -> str:
        """Return the workload in one line of text."""
        return (
            f"{self.layers}; {self.clients} clients × {self.samples} samples, {self.cohort} a round, "
            f"{self.epochs} epoch(s), batch {self.batch}: {self.steps} steps a round"
        )

    def federation(self) -> Federation:
        """Return the data: random bytes with random labels, the same on every machine."""
        draw = rng.generator(0)
        x = draw.integers(0, 256, (self.clients, self.samples, *self.shape), np.uint8)
        y = draw.integers(0, self.classes, (self.clients, self.samples))
        pairs = list(zip(x, y, strict=True))
        return Federation.from_arrays(pairs, classes=self.classes, dataset=f"random bytes as {self.name}")

    def network(self) -> nn.Module:
        """Return the network, always with the same weights."""
        if self.model in models.MODELS:
            return models.build(self.model, self.shape, self.classes)
        with models.Seeded(0):
            return pfl_cnn(self.shape, self.classes)


def pfl_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return the network of pfl-research's CIFAR-10 benchmark: two 3×3 convolutions, pooling, dropout, 12544→128→10."""
    width = 64 * ((shape[1] - 4) // 2) * ((shape[2] - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, outputs)),
    )


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlr", "logistic regression 784→10", "mlr", GREY, 10, 200, 20, 300),
        Workload("mlp", "MLP 784→200→200→62", "mlp", GREY, 62, 150, 15, 300),
        Workload("cnn", "CNN, two 5×5 convolutions, 307,842 weights", "cnn", COLOUR, 10, 100, 10, 500),
        Workload("resnet18", "ResNet-18 with GroupNorm, 11.2 M weights", "resnet18", COLOUR, 10, 20, 10, 500, epochs=1),
        Workload("pfl", "pfl-research's CIFAR-10 CNN", "pfl", COLOUR, 10, 1000, 50, 50, batch=10, epochs=1, lr=0.1),
        Workload("mlp100", "MLP 784→200→200→10", "mlp", GREY, 10, 100, 10, 300),
    )
}
# What every suite changes: `cpu` and `short` take fewer steps of the same networks and batches, for two cores. `short`
# is for `fedabml bench`: two to three minutes, with more than one step in a round.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {},
    "cpu": {"cnn": {"epochs": 1}, "resnet18": {"cohort": 2, "samples": 50}},
    "quick": {
        **{"mlr": {"epochs": 2}, "mlp": {"epochs": 1}, "mlp100": {"epochs": 1}, "cnn": {"samples": 100, "epochs": 1}},
        **{"resnet18": {"cohort": 2, "samples": 20, "batch": 10}, "pfl": {"clients": 100, "cohort": 10}},
    },
    "short": {"mlr": {"epochs": 2}, "mlp": {"epochs": 1}, "cnn": {"cohort": 5, "samples": 150, "epochs": 1}},
}
SUITES = {
    suite: {name: replace(work, **changes.get(name, {})) for name, work in WORKLOADS.items()}
    for suite, changes in CHANGES.items()
}


def workload(name: str, suite: str = "gpu") -> Workload:
    """Return a workload by its name and suite; raises InputError for an unknown name."""
    if name not in WORKLOADS:
        raise InputError(f"There is no workload '{name}'.{nearest(name, WORKLOADS)}")
    return SUITES[suite][name]
