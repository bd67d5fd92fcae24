"""Which samples a client sees in which step: functions of (seed, purpose, round, client, step) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import rng

Sizes = TypeVar("Sizes", np.ndarray, Tensor)


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; a single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def steps_of(sizes: Sizes, epochs: int, batch: int, per_step: int) -> Sizes:
    """Return how many steps clients of these sizes take, at least one, where a step takes `per_step` batches."""
    return (epochs * ((sizes + batch - 1) // batch) // per_step).clip(1)


def minibatches(
    rows: Tensor, sizes: Tensor, keys: Tensor, epochs: int, batch: int, per_step: int, least: int = 1
) -> Tensor:
    """Return the sample numbers of every step of some lanes, [steps, batches of a step, lanes, batch]; −1 is padding.

    `rows` are the lanes' sample numbers [lanes, longest], the first `sizes` of each its own. An epoch is a permutation
    of them, a function of the lane's key and the epoch, cut into batches, the last one possibly short. Where a step
    takes several batches and a lane's number of batches is not a multiple, the rest is left out (but never the only
    step). No lane has fewer samples than `least`; where all lanes therefore have equally many batches, there is less
    to compute.
    """
    lanes, longest = rows.shape
    width = min(batch, longest)
    batches_per_epoch = -(-longest // width)  # batches of an epoch
    block = max(1, _BLOCK // rows.numel())
    full = least == longest
    stream = cat([_shuffled(rows, keys, e, min(e + block, epochs), full) for e in range(0, epochs, block)], 1)
    if longest % width:
        stream = torch.nn.functional.pad(stream, (0, batches_per_epoch * width - longest), value=-1)
    stream = stream.view(lanes, -1, width)
    count = max(1, epochs * batches_per_epoch // per_step) * per_step
    if -(-least // width) == batches_per_epoch and count <= epochs * batches_per_epoch:
        return stream[:, :count].transpose(0, 1).contiguous().view(-1, per_step, lanes, width)
    # A lane's s-th batch is batch s mod c of epoch s div c, c its own count: an epoch has room for the largest count.
    per_epoch = (sizes + width - 1) // width
    s = torch.arange(count, device=rows.device).unsqueeze(-1)
    epoch, number = s % (epochs * per_epoch) // per_epoch, s % per_epoch
    batches = stream[torch.arange(lanes, device=rows.device), epoch * batches_per_epoch + number]
    is_taken = (s // per_step < steps_of(sizes, epochs, width, per_step)).unsqueeze(-1)
    return torch.where(is_taken, batches, -1).view(-1, per_step, lanes, width)


_BLOCK = 1 << 24  # sample numbers that are shuffled at once


def _shuffled(rows: Tensor, keys: Tensor, first: int, last: int, full: bool) -> Tensor:
    """Return epochs of shuffled rows, [lanes, epochs, longest], the padding last; if they are `full`, there is none."""
    sort_keys = rng.folds(rng.folds(keys, last - first, first), rows.shape[1])
    if not full:
        sort_keys = sort_keys.masked_fill(rows.unsqueeze(1) < 0, torch.iinfo(sort_keys.dtype).max)
    order = sort_keys.argsort(dim=-1, stable=True)
    return rows.unsqueeze(1).expand_as(order).gather(-1, order)


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return ragged rows as one array [lanes, longest], padded with −1."""
    out = np.full((len(rows), max(1, max(len(r) for r in rows))), -1, np.int64)
    for line, numbers in zip(out, rows, strict=True):
        line[: len(numbers)] = numbers
    return out
