"""What the experiments' pictures share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...report.canvas import Series
from ..statistics import mean
from .columns import COLUMNS
from .experiment import Done
from .findings import Mean


def power(value: float | None) -> float | None:
    """A number as a `power` axis takes it."""
    return None if value is None or not value > 0 else math.log10(value)


def banded(
    name: str, x: Sequence[float], rows: Sequence[Sequence[float]], log: bool = False, most: float = math.inf
) -> Series:
    """The mean of several curves with its 95% interval as a band; of fewer than three alone.

    No value is negative or above `most`, and no band goes further.
    """
    known = [mean(column) for column in zip(*rows, strict=True)]
    put = power if log else (lambda value: value)
    middle = [put(m) for m, _ in known]
    if not known or known[0][1] is None:
        return Series(name, middle, x)
    least = 1e-3 if log else 0.0  # of the mean: nothing drawn here is below zero, and a logarithm needs more than that
    low = [put(max(m - (half or 0), least * m)) for m, half in known]
    return Series(name, middle, x, low=low, high=[put(min(m + (half or 0), most)) for m, half in known])


def banded_means(name: str, x: Sequence[float], known: Sequence[Mean]) -> Series:
    """The same of means that are at hand and may be negative; a gap where one, or its interval, is missing."""
    low, high = ([None if half is None else m + sign * half for m, half in known] for sign in (-1, 1))
    return Series(name, [m for m, _ in known], x, low=low, high=high)


def over_rounds(name: str, own: Sequence[Done], key: str, log: bool = False) -> Series:
    """What was noted in the rounds of the curve, over seeds."""
    rounds = [line["round"] for line in own[0].result.curve]
    rows = [[line.get(key, math.nan) for line in done.result.curve] for done in own]
    return banded(name, rounds, [row for row in rows if len(row) == len(rounds)], log)


def person(column: str, client: int) -> str:
    """A client's name: the same in all figures of a page, and of nobody else there."""
    return f"client {client}, {COLUMNS[column].title}"


def by_label(done: Sequence[Done]) -> dict[str, list[Done]]:
    """The finished cells of every seed, by label."""
    found: dict[str, list[Done]] = {}
    for each in done:
        found.setdefault(each.cell.label, []).append(each)
    return found
