"""The plain torch client of `drills.round_time`: its network, its data, and one round of its local work.

This file is also a module of the app that Flower's arm runs, so it imports nothing of this repository.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

FEATURES, CLASSES, HIDDEN = 100, 10, (200, 200)
EPOCHS, BATCH, RATE = 1, 50, 0.05


def network() -> nn.Module:
    """Return the network of both sides."""
    first, second = HIDDEN
    layers = [nn.Linear(FEATURES, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def load(path: str) -> tuple[Tensor, Tensor]:
    """Return a site's samples."""
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def train(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Train a model on a site's samples, and return the loss of the last minibatch."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=RATE), torch.zeros(())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
    return float(loss.detach())
