"""The choice of the clients that a page shows of very many, so that it stays a few megabytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PER_RUN, PER_FIGURE = 2_000, 10_000  # clients of one run, and of all runs of a figure together


def room(runs: int) -> int:
    """Return how many clients of each run a figure shows, for a given number of runs."""
    return max(50, min(PER_RUN, PER_FIGURE // max(runs, 1)))


def sample(count: int, limit: int) -> list[int]:
    """Draw at most `limit` of the numbers 0 to `count` - 1, in ascending order; equal arguments give equal numbers."""
    if count <= limit:
        return list(range(count))
    return np.sort(np.random.default_rng(0).choice(count, limit, replace=False)).tolist()


def ranks(count: int, limit: int) -> list[int]:
    """Choose at most `limit` positions of a sorted list: a tenth at each end, the others in even steps between."""
    if count <= limit:
        return list(range(count))
    end = limit // 10
    middle = np.linspace(end, count - end - 1, limit - 2 * end).round().astype(int).tolist()
    return [*range(end), *middle, *range(count - end, count)]


def ends_and_sample(values: Sequence[float | None], limit: int) -> list[int]:
    """Choose at most `limit` positions: a quarter with the lowest values, a quarter with the highest, the others drawn.

    Positions without a value (`None`) are only drawn. Positions are returned in ascending order.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    ranked = sorted((v, i) for i, v in enumerate(values) if v is not None)
    end = min(limit // 4, len(ranked) // 2)
    chosen = {i for _, i in [*ranked[:end], *ranked[len(ranked) - end :]]}
    others = [i for i in range(len(values)) if i not in chosen]
    return sorted(chosen | {others[i] for i in sample(len(others), limit - len(chosen))})
