"""A study: what a cell trains and scores, where that is more than its configuration's own federation.

A study chooses the data and the network that are trained, the clients that are scored, what is recorded after the
rounds of the cell's `curve`, and what else is measured when training is done. `Study` itself is the plain case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..data import Dataset, Federation, load
from ..engine.client import initial_kept
from ..engine.lanes import Lanes
from ..engine.rounds import Simulation
from ..engine.setting import Cohort
from ..errors import TrainingError
from ..evaluation.scoring import Entry, evaluate_after
from ..runs.config import RunConfig, Table
from ..runs.prepare import resolve_split

WATCHED = ("accuracy", "rmse", "nll")  # recorded after a round of the curve


@dataclass(frozen=True)
class Study:
    """The plain case: a configuration's own federation, all clients scored. Fields are part of a cell's identity."""

    given: ClassVar[bool] = False  # whether the data are a caller's, and not the configuration's

    @property
    def identity(self) -> list[Any]:
        """The name and the fields of the study, as they are read back from JSON."""
        return [type(self).__name__, json.loads(json.dumps(asdict(self)))]

    def federation(self, config: RunConfig) -> Federation:
        """Return the federation that is trained."""
        return federation(config)

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        """Return the network that is trained, or its name."""
        return config.model

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        """Return the federations whose clients are personalised and scored in the end, by name."""
        return {"": fed}

    @property
    def scored(self) -> float:
        """The estimated number of scored clients per client that trains, for the remaining time."""
        return 1.0

    def watch(self, sims: Sequence[Simulation]) -> list[Table]:
        """Return what is recorded of runs side by side after a round of the curve."""
        split, epochs = resolve_split(sims[0].cohort.fed, "auto"), sims[0].cohort.algorithm.personal_epochs
        return [
            {"error": str(outcome)}
            if isinstance(outcome, TrainingError)
            else {name: outcome.summary[name] for name in WATCHED if name in outcome.summary}
            for outcome in evaluate_after((epochs,), [entry(sim, sim.cohort) for sim in sims], split)[0]
        ]

    def observe(self, sim: Simulation) -> Table:
        """Return what else is measured on a trained federation, ready for JSON."""
        return {}


@dataclass(frozen=True, eq=False, repr=False)
class Given(Study):
    """Data, and perhaps a network, that a caller has in Python: `make` returns the federation of a configuration.

    `data` identifies the data, as a hash does. The federation is made once for every configuration that differs.
    """

    make: Callable[[RunConfig], Federation]
    data: str
    module: nn.Module | None = None
    same_clients: bool | None = True  # whether they are the same with every seed; None: as the configuration says
    given: ClassVar[bool] = True

    @cached_property
    def identity(self) -> list[Any]:
        return ["Given", {"data": self.data, "module": self.module and fingerprint(self.module)}]

    def __repr__(self) -> str:
        return f"Given(data {self.data[:12]})"

    def federation(self, config: RunConfig) -> Federation:
        """Return the federation, its validation rows held out by the configuration's seed."""
        return self.make(config).hold_out(config.validation, config.seed)

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        return self.module or config.model


def fingerprint(module: nn.Module) -> str:
    """Return a hash of a module: its structure as it is printed, and its weights."""
    digest = hashlib.sha256(repr(module).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


PLAIN = Study()


def entry(sim: Simulation, cohort: Cohort) -> Entry:
    """Return a trained run to be scored: with its own clients, or with new ones, who have kept nothing yet."""
    if cohort.fed is sim.cohort.fed:
        return Entry(cohort, sim.theta, sim.kept_for, sim.round)
    keeps = cohort.algorithm.keeps

    def kept(clients: list[int]) -> dict[str, Tensor]:
        return initial_kept(Lanes.of(cohort, sim.theta, clients)) if keeps else {}

    return Entry(cohort, sim.theta, kept, sim.round)


@cache
def dataset(name: str, data_dir: str | None) -> Dataset:
    """Load a dataset once."""
    return load(name, data_dir)


def federation(config: RunConfig) -> Federation:
    """Return the federation of a configuration; partitions of one dataset share its samples."""
    return config.federation(dataset=None if config.data else dataset(config.dataset or "digits", config.data_dir))
