"""Which samples a client sees in which step: pure functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import rng

Sizes = TypeVar("Sizes", np.ndarray, Tensor)


def cohort_size(clients: int, participation: float) -> int:
    """τN, rounded, but at least one client."""
    return min(clients, max(1, int(participation * clients + 0.5)))


def sample(clients: int, participation: float, seed: int, round: int) -> list[int]:
    """The clients of a round, τN of them drawn uniformly without replacement, in ascending order."""
    size = cohort_size(clients, participation)
    drawn = rng.generator(seed, rng.SAMPLE, round).choice(clients, size, replace=False)
    return sorted(drawn.tolist())


def steps_of(sizes: Sizes, epochs: int, batch: int, per_step: int) -> Sizes:
    """How many steps clients of these sizes take, where each is made of so many batches: at least one."""
    return (epochs * ((sizes + batch - 1) // batch) // per_step).clip(1)


def minibatches(rows: Tensor, sizes: Tensor, keys: Tensor, epochs: int, batch: int, per_step: int) -> Tensor:
    """Sample numbers of every step of some lanes, [steps, batches of a step, lanes, batch]; −1 is padding.

    `rows` are the lanes' sample numbers [lanes, longest], the first `sizes` of each its own. An epoch is a permutation
    of them, a function of the lane's key and the epoch, cut into batches, the last one possibly short. Where a step
    takes several batches and a lane's number of batches is not a multiple, the rest is left out (but never the only
    step).
    """
    lanes, longest = rows.shape
    width = min(batch, longest)
    most = -(-longest // width)  # batches of an epoch
    own = (sizes + width - 1) // width
    block = max(1, _BLOCK // rows.numel())
    shuffled = torch.cat([_shuffled(rows, keys, e, min(e + block, epochs)) for e in range(0, epochs, block)], 1)
    stream = torch.nn.functional.pad(shuffled, (0, most * width - longest), value=-1).view(lanes, -1, width)
    # A lane's s-th batch is batch s mod c of epoch s div c, c its own count: an epoch has room for the largest count.
    s = torch.arange(max(1, epochs * most // per_step) * per_step, device=rows.device).unsqueeze(-1)
    turn = s % (epochs * own)
    place = turn // own * most + turn % own
    found = stream[torch.arange(lanes, device=rows.device), place]
    mine = (s // per_step < steps_of(sizes, epochs, width, per_step)).unsqueeze(-1)
    return torch.where(mine, found, -1).view(-1, per_step, lanes, width)


_BLOCK = 1 << 24  # sample numbers that are shuffled at once


def _shuffled(rows: Tensor, keys: Tensor, first: int, last: int) -> Tensor:
    """Epochs of shuffled rows, [lanes, epochs, longest], the padding last."""
    each = rng.folds(keys, last - first, first)
    dice = rng.folds(each, rows.shape[1])
    padding = rows.unsqueeze(1) < 0
    order = dice.masked_fill(padding, torch.iinfo(dice.dtype).max).argsort(dim=-1, stable=True)
    return rows.unsqueeze(1).expand_as(order).gather(-1, order)


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Ragged rows as one array [lanes, longest], padded with −1."""
    out = np.full((len(rows), max(1, max(len(r) for r in rows))), -1, np.int64)
    for i, own in enumerate(rows):
        out[i, : len(own)] = own
    return out
