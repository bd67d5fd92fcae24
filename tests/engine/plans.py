"""Minibatches of clients by name, for tests that work a round out by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedabml import rng
from fedabml.engine.minibatches import minibatches, padded, steps_of


class Hosted(NamedTuple):
    rows: np.ndarray
    steps: np.ndarray


def plan_of(rows, names, epochs, batch, per_step, path):
    """The minibatches of clients, given their rows and names and (seed, purpose, round, phase)."""
    sizes = np.array([len(r) for r in rows])
    keys = rng.keys((*path, rng.SHUFFLE), names)
    plan = minibatches(torch.as_tensor(padded(rows)), torch.as_tensor(sizes), keys, epochs, batch, per_step)
    return Hosted(plan.numpy(), steps_of(sizes, epochs, min(batch, int(sizes.max())), per_step))
