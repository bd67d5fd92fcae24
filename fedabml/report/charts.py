"""Line, scatter and bar charts as SVG text.

Charts are pure functions: the same numbers give the same bytes. A picture drawn with `LIGHT` or `DARK` stands alone (in
a README, on a slide). A picture drawn with `PAGE` takes its colours from the page around it and carries hover texts.
Values that are missing or not finite (`None`, NaN) are left out, never drawn as zero.

    svg = line_chart([Series("fedabml", [2.3, 1.1, 0.8])], title="Loss", x=Axis("round", "whole"), y=Axis("loss"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeVar

from .canvas import DARK, LIGHT, NUMBERS, PAGE, Axis, Frame, Span, Theme, finite, ticks

__all__ = ["DARK", "LIGHT", "PAGE", "Axis", "Series", "Theme", "bars", "histogram", "line_chart", "ranges", "scatter"]

T = TypeVar("T")
_HITS = 240  # at most this many hover columns in a chart
_ROW = 26  # height of a row of horizontal bars


@dataclass(frozen=True)
class Series:
    """A named row of values. `x` counts 1, 2, ... by default; `tips` and `sizes` (radii) belong to the points.

    `slot` selects the style, by default its number in the list. A given slot is also the number of the page's legend
    entry, which then names and hides the series; the picture itself draws no legend. `low` and `high` are the ends of a
    band around a line; a `thin` line is one of many, without hover texts. `members` are thin lines around a strong
    one, over the same x. `who` names the client of each point, or of each member; a page highlights a chosen client.
    """

    name: str
    y: Sequence[float | None]
    x: Sequence[float | None] = ()
    tips: Sequence[str] = ()
    sizes: Sequence[float] = ()
    slot: int | None = None
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    thin: bool = False
    members: Sequence[Sequence[float | None]] = ()
    who: Sequence[str] = ()

    def points(self) -> list[Span | None]:
        """Return (x, y) of every value, or `None` where one of them is missing."""
        xs = self.x if len(self.x) else range(1, len(self.y) + 1)
        pairs = ((finite(x), finite(y)) for x, y in zip(xs, self.y, strict=True))
        return [None if x is None or y is None else (x, y) for x, y in pairs]

    def bands(self) -> list[list[Span]]:
        """Return the closed outlines of the band's pieces; where an end is missing, the band has a gap."""
        low, high = [replace(self, y=values).points() if values else [] for values in (self.low, self.high)]
        ends = [(a, b) if a and b else None for a, b in zip(low, high, strict=True)]
        return [[a for a, _ in piece] + [b for _, b in piece[::-1]] for piece in _pieces(ends)]

    def lines(self) -> list[list[Span]]:
        """Return the points of every line of `members`."""
        return [[p for p in replace(self, y=row).points() if p] for row in self.members]


def line_chart(
    series: Sequence[Series], *, title: str, x: Axis = NUMBERS, y: Axis = NUMBERS, theme: Theme = LIGHT,
    diagonal: bool = False,
) -> str:  # fmt: skip
    """Draw lines over a common x. A missing value is a gap; a value without neighbours is a dot.

    `diagonal` draws y = x, for axes of the same range.
    """
    around = [line for s in series for line in (*s.bands(), *s.lines())]
    frame = _plane(series, [*(s.points() for s in series), *around], title, x, y, theme, diagonal)
    columns: dict[float, list[str]] = {}

    def parts(s: Series, slot: int, index: int) -> Iterable[str]:
        for outline in s.bands():
            yield frame.area(outline, slot)
        paler = min(0.5, max(0.14, 6 / max(len(s.members), 1)))  # the more thin lines there are
        for line, name in zip(s.lines(), s.who or [""] * len(s.members), strict=True):
            yield frame.path(line, slot, paler, f"{name}\n{s.name}".strip(), name) if line else ""
        for piece in _pieces(s.points()):
            if len(piece) == 1:
                yield frame.dot(*piece[0], slot, 3.5)
            else:
                yield frame.path(piece, slot, 0.4 if s.thin else 1, strong=bool(s.members))
            for x_value, y_value in () if s.thin or s.members else piece:
                columns.setdefault(x_value, []).append(f"{s.name}: {y.write(y_value)}")

    _draw(frame, series, parts)
    at = sorted(columns)[:: math.ceil(len(columns) / _HITS) or 1]
    edges = [frame.left, *(frame.x((a + b) / 2) for a, b in pairwise(at)), frame.right]
    for value, left, right in zip(at, edges, edges[1:], strict=False):
        tip = "\n".join([f"{x.label} {x.write(value)}".strip(), *columns[value]])
        frame.hover(left, frame.top, right - left, frame.bottom - frame.top, tip)
    return frame.svg()


def usual_radius(count: int) -> float:
    """Return the radius of a dot in a chart of `count` dots."""
    return 4.0 if count <= 60 else 3.0 if count <= 400 else 2.0


def scatter(
    series: Sequence[Series], *, title: str, x: Axis = NUMBERS, y: Axis = NUMBERS, theme: Theme = LIGHT,
    diagonal: bool = False, connect: bool = False, level: float | None = None,
) -> str:  # fmt: skip
    """Draw points; `diagonal` draws y = x and gives both axes one range, `connect` joins the points of a series.

    `level` draws a dashed line at that height.
    """
    points = [s.points() for s in series]
    frame = _plane(series, points, title, x, y, theme, diagonal, level)
    radius = usual_radius(sum(point is not None for row in points for point in row))

    def parts(s: Series, slot: int, index: int) -> Iterable[str]:
        if connect:
            yield from (frame.path(piece, slot) for piece in _pieces(points[index]) if len(piece) > 1)
        for i, point in enumerate(points[index]):
            if point:
                tip = s.tips[i] if s.tips else f"{s.name}: {x.write(point[0])}, {y.write(point[1])}"
                yield frame.dot(*point, slot, s.sizes[i] if s.sizes else radius, tip, s.who[i] if s.who else "")

    _draw(frame, series, parts)
    return frame.svg()


def _plane(
    series: Sequence[Series], points: Iterable[Sequence[Span | None]], title: str, x: Axis, y: Axis, theme: Theme,
    diagonal: bool, level: float | None = None,
) -> Frame:  # fmt: skip
    """Return a frame that holds all points, with its dashed lines."""
    drawn = [point for row in points for point in row if point]
    if diagonal:
        outer = ticks(*x.cover(v for point in drawn for v in point))
        x = replace(x, span=x.span or (outer[0], outer[-1]))
        y = replace(y, span=x.span)
    spans = x.cover(p[0] for p in drawn), y.cover([*(p[1] for p in drawn), level])
    frame = Frame(theme, title, x, y, spans, _legend(series))
    low, high = frame.x_span
    if diagonal:
        frame.dashed((low, low), (high, high))
    if level is not None:
        frame.dashed((low, level), (high, level))
    return frame


def bars(
    labels: Sequence[str], series: Sequence[Series], *, title: str, x: Axis = NUMBERS, theme: Theme = LIGHT
) -> str:
    """Draw horizontal bars from zero: a row per label with a bar per series. The picture grows with the rows."""
    span = x.cover([0.0, *(finite(v) for s in series for v in s.y)])

    def bar(frame: Frame, s: Series, i: int, slot: int, top: float, thick: float) -> tuple[str, str]:
        value = float(s.y[i] or 0)
        left, right = sorted((frame.x(max(span[0], 0.0)), frame.x(value)))
        return frame.box(left, top, right - left, thick - 1, slot), x.write(value)

    return _rows(labels, series, title, x, span, theme, bar)


def ranges(
    labels: Sequence[str], series: Sequence[Series], *, title: str, x: Axis = NUMBERS, theme: Theme = LIGHT
) -> str:
    """Draw horizontal lines from `low` to `high` with a dot at the value: a row per label with a line per series."""
    span = x.cover(finite(v) for s in series for part in (s.low, s.y, s.high) for v in part)

    def line(frame: Frame, s: Series, i: int, slot: int, top: float, thick: float) -> tuple[str, str]:
        low, middle, high = (finite(part[i]) for part in (s.low, s.y, s.high))
        middle = middle or 0.0
        low, high = middle if low is None else low, middle if high is None else high
        row = (top + thick / 2 - frame.top) / (frame.y(1) - frame.y(0))
        drawn = frame.path([(low, row), (high, row)], slot) + frame.dot(middle, row, slot, 3.5)
        return drawn, f"{x.write(middle)} ({x.write(low)} to {x.write(high)})"

    return _rows(labels, series, title, x, span, theme, line)


def _rows(
    labels: Sequence[str], series: Sequence[Series], title: str, x: Axis, span: Span, theme: Theme,
    mark: Callable[[Frame, Series, int, int, float, float], tuple[str, str]],
) -> str:  # fmt: skip
    """Draw a picture that grows with its rows, one per label, with a mark per series in each.

    `mark(frame, series, row, slot, top, height)` returns the mark of a value and the hover text.
    """
    theme = replace(theme, height=max(_ROW, 9 * len(series) + 8) * max(len(labels), 1) + 96)
    frame = Frame(theme, title, x, Axis(names=labels or ("",)), (span, (0.0, 1.0)), _legend(series))
    height = frame.y(1) - frame.y(0)
    thick = (height - 6) / max(len(series), 1)
    tips = [[label] for label in labels]

    def parts(s: Series, slot: int, index: int) -> Iterable[str]:
        for i, value in enumerate(s.y):
            if finite(value) is not None:
                drawn, tip = mark(frame, s, i, slot, frame.y(i) + 3 + index * thick, thick)
                tips[i].append(f"{s.name}: {tip}")
                yield drawn

    _draw(frame, series, parts)
    for i, lines in enumerate(tips):
        frame.hover(frame.left, frame.y(i), frame.right - frame.left, height, "\n".join(lines))
    return frame.svg()


def histogram(
    edges: Sequence[float], series: Sequence[Series], *, title: str, x: Axis = NUMBERS, y: Axis = NUMBERS,
    theme: Theme = LIGHT,
) -> str:  # fmt: skip
    """Draw vertical bars from zero, side by side in each bin between two neighbouring edges."""
    spans = (x.cover(edges), y.cover([0.0, *(finite(v) for s in series for v in s.y)]))
    frame = Frame(theme, title, x, y, spans, _legend(series))
    bins = [(low, high, [f"{x.label} {x.write(low)} to {x.write(high)}"]) for low, high in pairwise(edges)]

    def parts(s: Series, slot: int, index: int) -> Iterable[str]:
        for (low, high, tips), v in zip(bins, s.y, strict=True):
            width = (frame.x(high) - frame.x(low) - 2) / len(series)
            if (value := finite(v)) is not None:
                left = frame.x(low) + 1 + index * width
                tips.append(f"{s.name}: {y.write(value)}")
                yield frame.box(left, frame.y(value), width, frame.bottom - frame.y(value), slot)

    _draw(frame, series, parts)
    for low, high, tips in bins:
        frame.hover(frame.x(low), frame.top, frame.x(high) - frame.x(low), frame.bottom - frame.top, "\n".join(tips))
    return frame.svg()


def _legend(series: Sequence[Series]) -> list[str]:
    return [s.name for s in series] if all(s.slot is None for s in series) else []


def _pieces(row: Iterable[T | None]) -> list[list[T]]:
    """Split a row of points at its gaps."""
    return [[point for point in piece if point] for has_points, piece in groupby(row, bool) if has_points]


def _draw(frame: Frame, series: Sequence[Series], parts: Callable[[Series, int, int], Iterable[str]]) -> None:
    """Add every series as a group, which the page's legend or the picture's own hides.

    `parts(series, slot, index)` draws the series with the style of that slot; `index` is its number in the list.
    """
    for index, s in enumerate(series):
        entry = f' data-of="{index}"' if frame.keyed and frame.theme.embedded else ""
        group = entry if s.slot is None else f' data-run="{s.slot}"'
        drawn = "".join(parts(s, index if s.slot is None else s.slot, index))
        frame.parts.append(f"<g{group}>{drawn}</g>")
