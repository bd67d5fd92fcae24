"""Which samples a client sees in which step: pure functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import rng


class Plan(NamedTuple):
    """Sample numbers of every step of a cohort; −1 is padding."""

    rows: np.ndarray  # int64 [steps, batches per step, lanes, batch]
    steps: np.ndarray  # int64 [lanes]: how many of the steps are a lane's own


def cohort_size(clients: int, participation: float) -> int:
    """τN, rounded, but at least one client."""
    return min(clients, max(1, int(participation * clients + 0.5)))


def sample(clients: int, participation: float, seed: int, round: int) -> list[int]:
    """The clients of a round, τN of them drawn uniformly without replacement, in ascending order."""
    size = cohort_size(clients, participation)
    drawn = rng.generator(seed, rng.SAMPLE, round).choice(clients, size, replace=False)
    return sorted(drawn.tolist())


def minibatches(
    rows: Sequence[np.ndarray], names: Sequence[int], epochs: int, batch: int, per_step: int, path: Sequence[int]
) -> Plan:
    """Every lane's shuffled minibatches, `per_step` of them to a step.

    An epoch is a permutation of the client's samples cut into batches, the last one possibly short. Where a step takes
    several batches and a lane's number of batches is not a multiple, the rest is left out (but never the only step).
    """
    lanes = []
    width = min(batch, max(len(r) for r in rows))
    for own, name in zip(rows, names, strict=True):
        size = min(batch, len(own))
        count = -(-len(own) // size)
        block = np.full((epochs, count, width), -1, np.int64)
        for epoch in range(epochs):
            order = rng.generator(*path, rng.SHUFFLE, name, epoch).permutation(len(own))
            padded = np.full(count * size, -1, np.int64)
            padded[: len(own)] = own[order]
            block[epoch, :, :size] = padded.reshape(count, size)
        stream = block.reshape(epochs * count, width)
        steps = max(1, len(stream) // per_step)
        lanes.append(np.resize(stream, (steps * per_step, width)).reshape(steps, per_step, width))
    own_steps = np.array([len(lane) for lane in lanes])
    index = np.full((int(own_steps.max()), per_step, len(lanes), width), -1, np.int64)
    for i, lane in enumerate(lanes):
        index[: len(lane), :, i] = lane
    return Plan(index, own_steps)


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Ragged rows as one array [lanes, longest], padded with −1."""
    out = np.full((len(rows), max(1, max(len(r) for r in rows))), -1, np.int64)
    for i, own in enumerate(rows):
        out[i, : len(own)] = own
    return out
