"""Combine the updates of a round by the weighted mean, or by a rule that tolerates some false updates.

    mean           Σ w_i u_i, exactly as the simulator sums
    trimmed-mean   in every coordinate the plain mean without the k lowest and the k highest values, k = ⌊trim · n⌋
    median         in every coordinate the median, for an even number the mean of the two in the middle
    krum           the one update whose n − f − 2 nearest others are nearest in all (squared distances), f = ⌊trim · n⌋

Reference: Yin et al. 2018 (trimmed mean, median), Blanchard et al. 2017 (Krum). All but the mean weigh sites alike and
depend on no order; where two updates are equally near, Krum takes the first one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..algorithms.base import State
from ..engine.server import weighted_sum
from ..errors import InputError, nearest

RULES = ("mean", "trimmed-mean", "median", "krum")


def aggregate(rule: str, weights: Tensor, updates: State, trim: float = 0.2) -> State:
    """Return one update from those of n sites, which lie along the first axis of every tensor.

    `weights` [n] sum to 1 and count for the mean alone. `trim`, in [0, 0.5), is the share of sites that may be false.
    """
    if rule not in RULES:
        raise InputError(f"There is no rule of aggregation '{rule}'.{nearest(rule, RULES)}")
    if not 0 <= trim < 0.5:
        raise InputError(f"trim is {trim}; it must be at least 0 and below 0.5.")
    if rule == "mean" or not updates:
        return weighted_sum(weights, updates)
    false = math.floor(trim * len(weights) + 1e-9)  # 0.29 · 100 is 28.999…
    if rule == "krum":
        best = krum(updates, false)
        return {name: value[best].clone() for name, value in updates.items()}
    return {name: _middle(value, false if rule == "trimmed-mean" else None) for name, value in updates.items()}


def _middle(values: Tensor, cut: int | None) -> Tensor:
    """Return the mean of the sorted values without `cut` at each end. With None it is the median."""
    count = len(values)
    cut = (count - 1) // 2 if cut is None else cut
    return values.sort(0).values[cut : count - cut].mean(0)


def krum(updates: State, false: int) -> int:
    """Return the index of the update that Krum chooses, if at most `false` of them are false."""
    distances = squared_distances(updates)
    count = len(distances)
    if count == 1:
        return 0
    neighbours = min(count - 1, max(1, count - false - 2))
    distances.fill_diagonal_(math.inf)
    return int(distances.sort(1).values[:, :neighbours].sum(1).argmin())


def squared_distances(updates: State) -> Tensor:
    """Return the squared Euclidean distances between updates, over all their tensors, float64 [n, n]."""
    rows = [value.reshape(len(value), -1).double() for value in updates.values()]
    joined = torch.cat(rows, 1)
    return torch.stack([((joined - row) ** 2).sum(1) for row in joined])
