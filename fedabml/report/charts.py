"""Line, scatter and bar charts as SVG text.

Charts are pure functions: the same numbers give the same bytes. A picture drawn with `LIGHT` or `DARK` stands alone (in
a README, on a slide). A picture drawn with `PAGE` takes its colours from the page around it and carries hover texts.
Values that are missing or not finite (`None`, NaN) are left out, never drawn as zero.

    svg = line_chart([Series("fedabml", [2.3, 1.1, 0.8])], title="Loss", x=Axis("round", "whole"), y=Axis("loss"))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from .canvas import DARK, LIGHT, PAGE, Axis, Frame, Look, Span, finite, ticks

__all__ = ["DARK", "LIGHT", "PAGE", "Axis", "Look", "Series", "bars", "histogram", "line_chart", "ranges", "scatter"]

T = TypeVar("T")
_HITS = 240  # at most this many hover columns in a chart
_ROW = 26  # height of a row of horizontal bars


@dataclass(frozen=True)
class Series:
    """A named row of values. `x` counts 1, 2, ... by default; `tips` and `sizes` (radii) belong to the points.

    `slot` selects the style, by default the place in the list. A given slot is also the number of the page's legend
    entry, which then names and hides the series; the picture itself draws no legend. `low` and `high` are the ends of a
    band around a line; a `thin` line is one of many, without hover texts. `many` are thin lines around a strong one,
    over the same x. `who` names the client of each point, or of each line of `many`; a page highlights a chosen client.
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
    many: Sequence[Sequence[float | None]] = ()
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
        """Return the points of every line of `many`."""
        return [[p for p in replace(self, y=row).points() if p] for row in self.many]


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    look: Look = LIGHT,
    diagonal: bool = False,
) -> str:
    """Draw lines over a common x. A missing value is a gap; a value without neighbours is a dot.

    `diagonal` draws y = x, for axes of the same range.
    """
    x, y, points = x or Axis(), y or Axis(), [s.points() for s in series]
    known = [p for row in points for p in row if p] + [
        p for s in series for line in (*s.bands(), *s.lines()) for p in line
    ]
    frame = Frame(look, title, x, y, (x.cover(p[0] for p in known), y.cover(p[1] for p in known)), _legend(series))
    if diagonal:
        frame.diagonal()
    columns: dict[float, list[str]] = {}
    for place, (s, row) in enumerate(zip(series, points, strict=True)):
        slot = place if s.slot is None else s.slot
        parts = [frame.area(outline, slot) for outline in s.bands()]
        parts += _around(frame, s, slot)
        draw = frame.strong if s.many else partial(frame.path, opacity=0.4 if s.thin else 1)
        parts += [draw(p, slot) if len(p) > 1 else frame.dot(*p[0], slot, 3.5) for p in _pieces(row)]
        _group(frame, s, place, parts)
        for point in filter(None, () if s.thin or s.many else row):
            columns.setdefault(point[0], []).append(f"{s.name}: {y.write(point[1])}")
    at = sorted(columns)[:: math.ceil(len(columns) / _HITS) or 1]
    edges = [frame.left, *(frame.x((a + b) / 2) for a, b in pairwise(at)), frame.right]
    for value, left, right in zip(at, edges, edges[1:], strict=False):
        tip = "\n".join([f"{x.label} {x.write(value)}".strip(), *columns[value]])
        frame.hit(left, frame.top, right - left, frame.bottom - frame.top, tip)
    return frame.svg()


def _around(frame: Frame, series: Series, slot: int) -> list[str]:
    """Draw the thin lines around a strong one; the more there are, the paler they are."""
    opacity = min(0.5, max(0.14, 6 / max(len(series.many), 1)))
    names = series.who or [""] * len(series.many)
    return [
        frame.path(line, slot, opacity, f"{name}\n{series.name}".strip(), name)
        for line, name in zip(series.lines(), names, strict=True)
        if line
    ]


def usual_radius(count: int) -> float:
    """Return the radius of a dot in a chart of `count` dots."""
    return 4.0 if count <= 60 else 3.0 if count <= 400 else 2.0


def scatter(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    look: Look = LIGHT,
    diagonal: bool = False,
    connect: bool = False,
    level: float | None = None,
) -> str:
    """Draw points; `diagonal` draws y = x and gives both axes one range, `connect` joins the points of a series.

    `level` draws a dashed line at that height.
    """
    x, y, points = x or Axis(), y or Axis(), [s.points() for s in series]
    known = [p for row in points for p in row if p]
    if diagonal:
        outer = ticks(*x.cover(v for p in known for v in p))
        span = x.span or (outer[0], outer[-1])
        x, y = replace(x, span=span), replace(y, span=span)
    heights = [p[1] for p in known] + ([] if level is None else [level])
    frame = Frame(look, title, x, y, (x.cover(p[0] for p in known), y.cover(heights)), _legend(series))
    if diagonal:
        frame.diagonal()
    if level is not None:
        frame.dashed((frame.left, frame.y(level)), (frame.right, frame.y(level)))
    radius = usual_radius(len(known))
    for place, (s, row) in enumerate(zip(series, points, strict=True)):
        slot = place if s.slot is None else s.slot
        parts = [frame.path(p, slot) for p in _pieces(row) if len(p) > 1] if connect else []
        for i, point in enumerate(row):
            if point:
                tip = s.tips[i] if s.tips else f"{s.name}: {x.write(point[0])}, {y.write(point[1])}"
                who = s.who[i] if s.who else ""
                parts.append(frame.dot(*point, slot, s.sizes[i] if s.sizes else radius, tip, who))
        _group(frame, s, place, parts)
    return frame.svg()


def bars(
    labels: Sequence[str], series: Sequence[Series], *, title: str, x: Axis | None = None, look: Look = LIGHT
) -> str:
    """Draw horizontal bars from zero: a row per label with a bar per series. The picture grows with the rows."""
    values = [[finite(v) for v in s.y] for s in series]
    x = x or Axis()
    low, high = x.cover([0.0, *(v for row in values for v in row)])
    frame, thick = _rows(labels, series, title, x, (low, high), look)
    for place, (s, row) in enumerate(zip(series, values, strict=True)):
        parts, slot = [], place if s.slot is None else s.slot
        for i, value in enumerate(row):
            if value is not None:
                left, right = sorted((frame.x(max(low, 0.0)), frame.x(value)))
                parts.append(frame.box(left, frame.y(i) + 3 + place * thick, right - left, thick - 1, slot))
        _group(frame, s, place, parts)
    for i, label in enumerate(labels):
        tips = [f"{s.name}: {x.write(v)}" for s, row in zip(series, values, strict=True) if (v := row[i]) is not None]
        _row_hit(frame, i, label, tips)
    return frame.svg()


def ranges(
    labels: Sequence[str], series: Sequence[Series], *, title: str, x: Axis | None = None, look: Look = LIGHT
) -> str:
    """Draw horizontal lines from `low` to `high` with a dot at the value: a row per label with a line per series."""
    x = x or Axis()
    values = [[[finite(v) for v in part] for part in (s.low, s.y, s.high)] for s in series]
    frame, thick = _rows(labels, series, title, x, x.cover(v for s in values for part in s for v in part), look)
    tips: list[list[str]] = [[] for _ in labels]
    for place, (s, columns) in enumerate(zip(series, values, strict=True)):
        parts, slot = [], place if s.slot is None else s.slot
        for i, (low, middle, high) in enumerate(zip(*columns, strict=True)):
            if middle is None:
                continue
            down = (3 + (place + 0.5) * thick) / (frame.y(1) - frame.y(0))  # in rows
            ends = [middle if low is None else low, middle if high is None else high]
            parts += [frame.path([(v, i + down) for v in ends], slot), frame.dot(middle, i + down, slot, 3.5)]
            tips[i].append(f"{s.name}: {x.write(middle)} ({x.write(ends[0])} to {x.write(ends[1])})")
        _group(frame, s, place, parts)
    for i, label in enumerate(labels):
        _row_hit(frame, i, label, tips[i])
    return frame.svg()


def _rows(
    labels: Sequence[str], series: Sequence[Series], title: str, x: Axis, span: Span, look: Look
) -> tuple[Frame, float]:
    """Return a frame that grows with its rows, one per label, and the height of each series within a row."""
    look = replace(look, height=max(_ROW, 9 * len(series) + 8) * max(len(labels), 1) + 96)
    frame = Frame(look, title, x, Axis(), (span, (0.0, 1.0)), _legend(series), y_names=labels or ("",))
    return frame, (frame.y(1) - frame.y(0) - 6) / max(len(series), 1)


def _row_hit(frame: Frame, row: int, label: str, tips: Iterable[str]) -> None:
    """Add the hover text of a row."""
    height = frame.y(1) - frame.y(0)
    frame.hit(frame.left, frame.y(row), frame.right - frame.left, height, "\n".join([label, *tips]))


def histogram(
    edges: Sequence[float],
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    look: Look = LIGHT,
) -> str:
    """Draw vertical bars from zero, side by side in each bin between two neighbouring edges."""
    x, y, values = x or Axis(), y or Axis(), [[finite(v) for v in s.y] for s in series]
    spans = (x.cover(edges), y.cover([0.0, *(v for row in values for v in row)]))
    frame = Frame(look, title, x, y, spans, _legend(series))
    for place, (s, row) in enumerate(zip(series, values, strict=True)):
        parts, slot = [], place if s.slot is None else s.slot
        for (low, high), value in zip(pairwise(edges), row, strict=True):
            width = (frame.x(high) - frame.x(low) - 2) / len(series)
            if value is not None:
                left = frame.x(low) + 1 + place * width
                parts.append(frame.box(left, frame.y(value), width, frame.bottom - frame.y(value), slot))
        _group(frame, s, place, parts)
    for i, (low, high) in enumerate(pairwise(edges)):
        tips = [f"{s.name}: {y.write(v)}" for s, row in zip(series, values, strict=True) if (v := row[i]) is not None]
        tip = "\n".join([f"{x.label} {x.write(low)} to {x.write(high)}", *tips])
        frame.hit(frame.x(low), frame.top, frame.x(high) - frame.x(low), frame.bottom - frame.top, tip)
    return frame.svg()


def _legend(series: Sequence[Series]) -> list[str]:
    return [s.name for s in series] if all(s.slot is None for s in series) else []


def _pieces(row: Iterable[T | None]) -> list[list[T]]:
    """Split a row of points at its gaps."""
    pieces: list[list[T]] = [[]]
    for point in row:
        if point:
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _group(frame: Frame, series: Series, place: int, parts: Iterable[str]) -> None:
    """Add the parts of a series as a group, which the page's legend or the picture's own hides."""
    own = f' data-of="{place}"' if frame.keyed and frame.look.embedded else ""
    run = own if series.slot is None else f' data-run="{series.slot}"'
    frame.parts.append(f"<g{run}>{''.join(parts)}</g>")
