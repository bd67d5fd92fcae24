"""The basis of every chart: colours, axes, and the frame that places data in a picture."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Span = tuple[float, float]

# Six hues that stay apart for colour-blind readers, at least 4.5:1 against their paper. Four passes through them, each
# with dashes, a shape of its dots (around 0, of radius 1) and an opacity of its bars, make 24 series look different.
_ON_WHITE = ("#0067a5", "#c04a05", "#007a58", "#a03a7c", "#806000", "#4a5560")
_ON_BLACK = ("#5ab4f0", "#ff8f52", "#3ccfa0", "#e79ac8", "#e6c54a", "#b4bfcc")
_PASSES = (
    ("", "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", 1.0),
    ("7 4", "M0-1.3L1.3 0L0 1.3L-1.3 0z", 0.45),
    ("2 3", "M0-1.3L1.25 .9H-1.25z", 0.1),
    ("9 3 2 3", "M-1.3-.45h.85v-.85h.9v.85h.85v.9h-.85v.85h-.9v-.85h-.85z", 0.25),
)
CHARACTER = 6.6  # mean width of a character at 12 px; only margins and legends depend on it
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML does not allow


class Style(NamedTuple):
    """The style of a series: its colour, then its dashes, the shape of its dots and the opacity of its bars."""

    colour: str
    dashes: str
    shape: str
    opacity: float

    @property
    def solid(self) -> bool:
        """Whether the colour alone distinguishes the series."""
        return not self.dashes

    def stroke(self, width: float = 2, extra: str = "") -> str:
        """Return the attributes of the series' lines."""
        dashes = f' stroke-dasharray="{self.dashes}"' if self.dashes else ""
        return f'stroke="{self.colour}" stroke-width="{width:g}"{extra}{dashes}'

    def mark(self, x: float, y: float, radius: float, extra: str = "") -> str:
        """Draw a dot, or the shape that stands for one."""
        if self.solid:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{self.colour}"{extra}/>'
        moved = f'transform="translate({x:.1f} {y:.1f}) scale({radius:.1f})"'
        return f'<path d="{self.shape}" {moved} fill="{self.colour}"{extra}/>'

    def key(self, x: float, y: float) -> str:
        """Draw the series' mark in a legend, 20 pixels wide (11 where colour suffices) and 11 high."""
        if self.solid:
            return f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" rx="1.5" fill="{self.colour}"/>'
        line = f'<path d="M{x:.1f} {y + 5.5:.1f}h20" fill="none" {self.stroke()}/>'
        return line + self.mark(x + 10, y + 5.5, 4)


@dataclass(frozen=True)
class Theme:
    """The colours and size of a picture. `embedded`: the page around it gives the heading and shows hover texts."""

    ink: str = "#1c2128"
    muted: str = "#57606a"
    grid: str = "#dde2e8"
    paper: str = "#ffffff"
    colours: tuple[str, ...] = _ON_WHITE
    width: int = 460
    height: int = 290
    embedded: bool = False

    def style(self, slot: int) -> Style:
        """Return the style of the series with this number."""
        turn, hue = divmod(slot, len(self.colours))
        return Style(self.colours[hue], *_PASSES[turn % len(_PASSES)])


LIGHT = Theme()
DARK = Theme(ink="#e8ebef", muted="#a3adb8", grid="#333a44", paper="#171b21", colours=_ON_BLACK)
PAGE = Theme(
    ink="var(--ink)",
    muted="var(--muted)",
    grid="var(--grid)",
    paper="var(--paper)",
    colours=tuple(f"var(--c{i})" for i in range(len(_ON_WHITE))),
    embedded=True,
)


@dataclass(frozen=True)
class Axis:
    """An axis: its label, how its numbers are formatted, and its range (by default that of the data).

    A `power` axis is logarithmic: its numbers are exponents of ten. The numbers of a `mirror` axis are square roots,
    counted from zero in both directions, so that small values beside a peak can still be seen. An axis with `names`
    has one column or row per name; rows count from the top.
    """

    label: str = ""
    kind: Literal["number", "percent", "whole", "power", "mirror"] = "number"
    span: Span | None = None
    names: Sequence[str] = ()

    def write(self, value: float) -> str:
        """Format a value for a hover text."""
        if self.kind == "percent":
            return f"{value:.1%}"
        if self.kind == "power":
            return f"{10**value:.3g}"
        value = value**2 if self.kind == "mirror" else value
        return f"{value:.0f}" if self.kind == "whole" else f"{value:.4g}"

    def cover(self, values: Iterable[float | None]) -> Span:
        """Return the axis' own range, or that of the values; it is never empty."""
        numbers = [v for v in values if v is not None] or [0.0, 1.0]
        low, high = self.span or (min(numbers), max(numbers))
        if high - low > 1e-9 * max(abs(low), abs(high)):
            return low, high
        if self.kind == "percent":
            return max(low - 0.05, 0.0), min(high + 0.05, 1.0)
        pad = 1.0 if self.kind == "whole" else max(abs(low) * 0.1, 1e-6)
        return low - pad, high + pad

    def ticks(self, span: Span) -> list[tuple[float, str]]:
        """Return where labels stand on the axis, and the labels; of names all."""
        if self.names:
            return [(i + 0.5, name) for i, name in enumerate(self.names)]
        values = ticks(*span, integers=self.kind == "whole", count=8 if self.kind == "mirror" else 5)
        return list(zip(values, tick_labels(values, self.kind), strict=True))


NUMBERS = Axis()


def finite(value: object) -> float | None:
    """Return the value as a float, or `None` if it is not a number that can be drawn."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # isinstance(…, SupportsFloat) would take 20 µs
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < 1e200 else None


def text(value: object) -> str:
    """Return any value as text that is safe in SVG and inside a quoted attribute."""
    return html.escape(without_control_characters(str(value)), quote=True).replace("\n", "&#10;")


def without_control_characters(value: str) -> str:
    """Remove the characters that XML does not allow."""
    return _FORBIDDEN.sub("", value)


def ticks(low: float, high: float, integers: bool = False, count: int = 5) -> list[float]:
    """Return round numbers, 1, 2 or 5 times a power of ten apart, that cover [low, high]; low < high."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(m * power for m in (1, 2, 5, 10, 20) if (high - low) / (m * power) <= count + 1e-9)
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_labels(values: Sequence[float], kind: str) -> list[str]:
    """Format ticks with just the decimals that distinguish them."""
    step, largest = values[1] - values[0], max(map(abs, values))
    decimals = max(0, -math.floor(math.log10(step * (100 if kind == "percent" else 1)) + 1e-9))
    if kind == "power":
        return [f"{float(f'{10**v:.2g}'):g}" for v in values]
    if kind == "mirror":
        return [f"{v * v:.3g}" for v in values]
    form = f".{decimals}{'%' if kind == 'percent' else 'f'}"
    if kind != "percent" and (largest >= 1e6 or decimals > 5):
        form = f".{max(3, math.ceil(math.log10(largest / step)) + 1)}g"
    return [format(v, form) for v in values]


def _within(value: float, span: Span) -> bool:
    low, high = sorted(span)
    slack = 1e-9 * (high - low)  # a tick at the very end may be off by rounding
    return low - slack <= value <= high + slack


def _step(size: float, least: float) -> int:
    """Return how many rows or columns of this size share one label, so that labels are `least` pixels apart."""
    return next(s * p for p in (1, 10, 100, 1000, 10_000) for s in (1, 2, 5) if s * p * size >= least or p == 10_000)


class Frame:
    """A picture under construction: its scales, axes and legend, and the parts drawn so far.

    `y` ends at round numbers unless its axis fixes the range; `x` ends where the data do. `head` pixels above the plot
    and `aside` pixels to the right of it are left free for the caller; the free room above begins at the attribute
    `head`.
    """

    def __init__(
        self, theme: Theme, title: str, x: Axis, y: Axis, spans: tuple[Span, Span],
        legend: Sequence[str] = (), head: float = 0.0, aside: float = 0.0,
    ) -> None:  # fmt: skip
        """Lay out the margins and draw the axes; `spans` are the ranges of x and y, unless an axis has names."""
        self.theme, self.title, self.parts = theme, title, list[str]()
        rows = y.ticks(spans[1])
        self.x_span = (0.0, float(len(x.names))) if x.names else spans[0]
        self.y_span = spans[1] if y.span else (rows[0][0], rows[-1][0])
        self.y_span = (float(len(y.names)), 0.0) if y.names else self.y_span
        self.left = min(16 + CHARACTER * max(len(label) for _, label in rows), theme.width * 0.4)
        self.right = theme.width - 16.0 - aside
        self.top = 12.0
        if title and not theme.embedded:
            self.top += 25
            self.write(4, self.top - 15, title, theme.ink, 'font-size="15" font-weight="600"')
        self.keyed = len(legend) > 1
        if self.keyed:
            self._legend(legend)
        self.head = self.top - 12
        self.top += head
        if y.label:
            self.top += 14
            self.write(4, self.top - 11, y.label, extra='data-label="y"')
        self.bottom = self.theme.height - (42.0 if x.label else 24.0)
        self._x_labels(x)
        for value, label in rows[:: _step((self.bottom - self.top) / len(rows), 13) if y.names else 1]:
            if _within(value, self.y_span):
                if not y.names:
                    self.rule(self.y(value), theme.grid)
                self.write(self.left - 6, self.y(value) + 4, label, anchor="end")
        self.rule(self.bottom, theme.muted)
        if y.kind == "mirror":
            self.rule(self.y(0.0), theme.muted)
        self.write(
            (self.left + self.right) / 2, self.theme.height - 8, x.label, extra='data-label="x"', anchor="middle"
        )

    def _x_labels(self, x: Axis) -> None:
        """Draw the labels under the horizontal axis; names that are wider than their column stand upright."""
        columns, step, upright = x.ticks(self.x_span), 1, False
        if x.names:
            column, longest = self.x(1) - self.x(0), CHARACTER * max(map(len, x.names))
            step = _step(column, 13 if any(not name.isdecimal() for name in x.names) else longest + 6)
            upright = longest + 6 > column * step
            self.theme = replace(self.theme, height=self.theme.height + round(longest) * upright)
        for value, label in columns[::step]:
            if _within(value, self.x_span):
                across, down = self.x(value) + 4 * upright, self.bottom + (8 if upright else 16)
                turn = f'transform="rotate(-90 {across:.1f} {down:.1f})"' if upright else ""
                self.write(across, down, label, extra=turn, anchor="end" if upright else "middle")

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, in pixels."""
        low, high = self.x_span
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the vertical position of a value, in pixels."""
        low, high = self.y_span
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def _legend(self, names: Sequence[str]) -> None:
        """Draw the names of the series; on a page each is a button that hides its series in this picture.

        A further line of names makes the picture taller, not its plot smaller.
        """
        across = 4.0
        for i, name in enumerate(names):
            style = self.theme.style(i)
            key = 16 if style.solid else 25
            width = key + 24 + CHARACTER * len(name)
            if across > 4 and across + width > self.theme.width:
                across, self.top = 4.0, self.top + 17
                self.theme = replace(self.theme, height=self.theme.height + 17)
            if self.theme.embedded:
                attributes = (
                    f'role="button" tabindex="0" aria-pressed="true" aria-label="{text(name)}" data-series="{i}"'
                )
                box = f'x="{across - 3:.1f}" y="{self.top - 12:.1f}" width="{width - 10:.1f}" height="18"'
                self.parts.append(f'<g class="entry" {attributes}><rect {box} rx="4" fill="transparent"/>')
            self.parts.append(style.key(across, self.top - 8))
            self.write(across + key, self.top + 2, name)
            self.parts.append("</g>" if self.theme.embedded else "")
            across += width
        self.top += 16

    def write(self, x: float, y: float, label: str, fill: str = "", extra: str = "", anchor: str = "start") -> None:
        """Add a text."""
        if label:
            attributes = f'x="{x:.1f}" y="{y:.1f}" fill="{fill or self.theme.muted}" text-anchor="{anchor}"'
            self.parts.append(f"<text {attributes} {extra}>{text(label)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> None:
        """Add a straight line between two places, in pixels."""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {extra}/>')

    def rule(self, y: float, colour: str) -> None:
        """Add a horizontal line across the plot, at a height in pixels."""
        self.line(self.left, y, self.right, y, colour)

    def dashed(self, start: Span, end: Span) -> None:
        """Add a dashed line between two data points, as a reference."""
        ends = (self.x(start[0]), self.y(start[1]), self.x(end[0]), self.y(end[1]))
        self.line(*ends, self.theme.muted, 'stroke-dasharray="4 4"')

    def _steps(self, points: Iterable[Span]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def area(self, points: Sequence[Span], slot: int) -> str:
        """Draw a pale area with this outline, or a pale bar between two points."""
        steps, colour = self._steps(points), self.theme.style(slot).colour
        if len(points) == 2:
            return f'<path d="{steps}" stroke="{colour}" stroke-width="8" stroke-opacity=".18"/>'
        return f'<path d="{steps}Z" fill="{colour}" fill-opacity=".18"/>'

    def path(
        self, points: Iterable[Span], slot: int, opacity: float = 1, tip: str = "", who: str = "", strong: bool = False
    ) -> str:
        """Draw a line through data points. One that is not opaque is thin; a `strong` one stands out from others."""
        style, extra = self.theme.style(slot), f' stroke-opacity="{opacity:.2g}"' if opacity < 1 else ""
        strokes = [style._replace(colour=self.theme.paper).stroke(5)] if strong else []
        strokes.append(style.stroke(1 if opacity < 1 else 2, extra))
        line = f'<path d="{self._steps(points)}" fill="none"'
        return "".join(f'{line} {stroke} stroke-linejoin="round"{self._tip(tip, who)}/>' for stroke in strokes)

    def dot(self, x: float, y: float, slot: int, radius: float, tip: str = "", who: str = "") -> str:
        """Draw a data point."""
        return self.theme.style(slot).mark(self.x(x), self.y(y), radius, f' fill-opacity=".8"{self._tip(tip, who)}')

    def box(self, x: float, y: float, width: float, height: float, slot: int) -> str:
        """Draw a filled rectangle, such as a bar."""
        size = f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        style = self.theme.style(slot)
        edge = "" if style.solid else f' fill-opacity="{style.opacity:g}" {style.stroke(1)}'
        return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="1.5" fill="{style.colour}"{edge}/>'

    def hover(self, x: float, y: float, width: float, height: float, tip: str) -> None:
        """Add an invisible rectangle that shows `tip` while the pointer is over it."""
        if self.theme.embedded:
            size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 1):.1f}"'
            self.parts.append(f'<rect class="hit" {size}{self._tip(tip)}/>')

    def _tip(self, tip: str, who: str = "") -> str:
        """Return the attributes that the page's script reads: a mark's hover text, and the client it shows."""
        data = {"tip": tip, "client": who} if self.theme.embedded else {}
        return "".join(f' data-{key}="{text(value)}"' for key, value in data.items() if value)

    def svg(self) -> str:
        """Return the whole picture."""
        theme, plot, head = self.theme, "", f"<title>{text(self.title)}</title>"
        role = "group" if theme.embedded and self.keyed else "img"  # screen readers skip what is inside an image
        if theme.embedded:  # a <title> would show a second tooltip; the aria-label has the same words
            numbers = (self.left, self.top, self.right, self.bottom, *self.x_span, *self.y_span)
            plot, head = f' data-plot="{" ".join(f"{v:.6g}" for v in numbers)}"', ""
        else:
            head += f'<rect width="100%" height="100%" fill="{theme.paper}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {theme.width} {theme.height}" role="{role}"'
            f' aria-label="{text(self.title)}" font-family="system-ui, sans-serif" font-size="12"{plot}>'
            f"{head}{''.join(self.parts)}</svg>"
        )
