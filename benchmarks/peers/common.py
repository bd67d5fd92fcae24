"""What the libraries' scripts share: the federation that `benchmarks.rivals` exported, its networks, and the answer.

Nothing of fedabml is imported here. A script is called with the folder of the federation and prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

BEGAN = time.perf_counter()


class Task:
    """Hold the clients, the cohort of every round, and the order in which each client sees its samples."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta = json.loads((self.folder / "task.json").read_text())
        read = lambda name: np.load(self.folder / f"{name}.npy", mmap_mode="r")  # noqa: E731
        self.x, self.y, self.cohort, self.order = (read(name) for name in ("x", "y", "cohort", "order"))
        self.shift, self.scale = (np.array(read(name)) for name in ("shift", "scale"))
        self.rounds, self.batch, self.lr = self.meta["rounds"], self.meta["batch"], self.meta["lr"]
        self.times: list[float] = []
        self.ready: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.aside = 0.0  # seconds that went into what is ready

    def weights(self) -> list[np.ndarray]:
        """Return the network's first weights, in torch's order."""
        return [np.load(self.folder / f"w{i}.npy") for i in range(self.meta["arrays"])]

    def samples(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's samples as the network sees them, and their labels."""
        x = (self.x[client].astype(np.float32) - self.shift) * (np.float32(1) / self.scale)
        return x.astype(np.float32), np.array(self.y[client])

    def prepare(self) -> Task:
        """Normalise and gather the samples of all rounds, before any of them begins."""
        start = time.perf_counter()
        for round, place in np.ndindex(self.rounds, self.cohort.shape[1]):
            x, y = self.samples(int(self.cohort[round, place]))
            order = self.order[round, place].reshape(-1)
            self.ready[round, place] = x[order], y[order]
        self.aside = time.perf_counter() - start
        return self

    def ordered(self, round: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all samples that the client at a place of a round's cohort will see, batch after batch."""
        return self.ready[round, place]

    def tick(self) -> None:
        """Note the end of a round."""
        self.times.append(time.perf_counter())

    def answer(self, weights: list[np.ndarray], **more: object) -> None:
        """Print how long the rounds took, without the preparation, and save the last weights for a comparison."""
        flat = np.concatenate([np.asarray(w, np.float32).reshape(-1) for w in weights])
        np.save(self.folder / f"last-{Path(sys.argv[0]).stem}.npy", flat)
        ends = [BEGAN + self.aside, *self.times]
        seconds = [b - a for a, b in pairwise(ends)]
        print(
            "ANSWER " + json.dumps({"first": seconds[0], "warm": seconds[1:], "aside": self.aside, **more}), flush=True
        )


def module(name: str, classes: int, dropout: bool = True):
    """Return the network as a torch module; without `dropout` its probabilities are 0."""
    from torch import nn

    flat = nn.Flatten()
    if name == "mlr":
        return nn.Sequential(flat, nn.Linear(784, classes))
    if name in ("mlp", "mlp100"):
        layers = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes))
        return nn.Sequential(flat, *layers)
    if name == "cnn":
        convolutions = (nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU())
        dense = (nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU(), nn.Linear(64, classes))
        return nn.Sequential(*convolutions, nn.MaxPool2d(2), flat, *dense)
    if name == "pfl":
        convolutions = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        dense = (nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5 * dropout), nn.Linear(128, classes))
        return nn.Sequential(*convolutions, nn.Dropout(0.25 * dropout), flat, *dense)
    if name == "resnet18":
        return resnet18(classes)
    raise SystemExit(f"SKIP there is no {name} for this library here")


def resnet18(classes: int):
    """Return a ResNet-18 with a 3×3 stem and GroupNorm."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, a: int, b: int, stride: int):
            super().__init__()
            self.body = nn.Sequential(*conv(a, b, 3, stride), nn.ReLU(), *conv(b, b, 3, 1))
            self.skip = nn.Sequential(*(conv(a, b, 1, stride) if (a, stride) != (b, 1) else ()))

        def forward(self, x):
            return torch.relu(self.body(x) + self.skip(x))

    def conv(a: int, b: int, size: int, stride: int):
        return nn.Conv2d(a, b, size, stride, size // 2, bias=False), nn.GroupNorm(32, b)

    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for a, b, stride in stages for block in (Block(a, b, stride), Block(b, b, 1))]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    return nn.Sequential(*conv(3, 64, 3, 1), nn.ReLU(), *blocks, *head)


def loaded(task: Task):
    """Return the task's network with its first weights."""
    import torch

    net = module(task.meta["model"], task.meta["classes"], task.meta["dropout"])
    with torch.no_grad():
        for p, w in zip(net.parameters(), task.weights(), strict=True):
            p.copy_(torch.from_numpy(w))
    return net


def arrays(net) -> list[np.ndarray]:
    """Return a module's weights as arrays."""
    return [p.detach().numpy() for p in net.parameters()]


@cache
def trainer(folder: str):
    """Return a worker process's prepared task, network and optimiser, made once per process."""
    import torch

    task = Task(folder).prepare()
    net = loaded(task).train()
    return task, net, torch.optim.SGD(net.parameters(), lr=task.lr, foreach=True)
