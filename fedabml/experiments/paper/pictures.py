"""What the experiments' pictures share: a chart with its file and caption, and means with bands as series."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...report.canvas import Look
from ...report.charts import Series
from ..statistics import mean

Mean = tuple[float, float | None]  # with half of its 95% interval


@dataclass(frozen=True)
class Picture:
    """A chart of an experiment: the name of its file, its heading and caption, and a function that draws it."""

    name: str
    heading: str
    caption: str
    draw: Callable[[Look], str]


def picture(
    name: str,
    heading: str,
    caption: str,
    chart: Callable[..., str],
    series: Sequence[Series],
    *,
    title: str = "",
    height: int | None = None,
    **options: Any,
) -> Picture:
    """Make a picture of a chart of `fedabml.report.charts`, whose axes and other options are passed on.

    `title` is the chart's own, by default the heading.
    """

    def draw(look: Look) -> str:
        own = look if height is None else replace(look, height=height)
        return chart(series, title=title or heading, look=own, **options)

    return Picture(name, heading, caption, draw)


def power(value: float | None) -> float | None:
    """Return a number as a `power` axis takes it, its decimal logarithm; None where it has none."""
    return None if value is None or not value > 0 else math.log10(value)


def banded(
    name: str, x: Sequence[float | None], rows: Sequence[Sequence[float]], log: bool = False, most: float = math.inf
) -> Series:
    """Return the mean of several curves with its 95% interval as a band; fewer than three curves have no band.

    `rows` are the curves, over the same `x`. No value is negative or above `most`, and the band ends there.
    """
    means = [mean(column) for column in zip(*rows, strict=True)]
    scale = power if log else (lambda value: value)
    middle = [scale(m) for m, _ in means]
    if not means or means[0][1] is None:
        return Series(name, middle, x)
    least = 1e-3 if log else 0.0  # of the mean: a logarithm needs more than zero
    low = [scale(max(m - (half or 0), least * m)) for m, half in means]
    return Series(name, middle, x, low=low, high=[scale(min(m + (half or 0), most)) for m, half in means])


def banded_means(name: str, x: Sequence[float], means: Sequence[Mean]) -> Series:
    """Return known means, which may be negative, with their bands; a missing mean or interval leaves a gap."""
    low, high = ([None if half is None else m + sign * half for m, half in means] for sign in (-1, 1))
    return Series(name, [m for m, _ in means], x, low=low, high=high)
