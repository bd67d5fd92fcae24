"""A picture of who has what: clients by classes as a self-contained SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ..arguments import checks_arguments
from ..files.paths import write_aside
from .federation import Federation

INK, FAINT, PAPER, EMPTY, BAR, LINE = "#24292f", "#6e7781", "#ffffff", "#f6f7f9", "#8c959f", "#d0d7de"
RAMP = ((0xC6, 0xDB, 0xEF), (0x42, 0x92, 0xC6), (0x08, 0x30, 0x6B))  # from few samples to most
LEVELS = 16
MOST = 1000  # clients drawn: beyond that a row is thinner than a pixel
CELLS = 20_000  # clients drawn times classes: a cell takes up to 31 bytes
EDGE, BARS, GAP = 8, 104, 20
LETTER = 6.6  # mean width of a letter at 12 px
NAMED, LONGEST = 40, 18  # so many clients are named, if no name has more letters


@dataclass(frozen=True)
class Grid:
    """Where the cells lie, and what is written beside rows and above columns; no words: numbers."""

    left: float
    top: float
    row: float
    column: float
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    upright: bool  # the words above the columns

    @property
    def edges(self) -> str:
        """Without crisp edges thin rows that touch would show seams; with them gaps come and go when scaled."""
        return "" if min(self.row, self.column or self.row) >= 5 else ' shape-rendering="crispEdges"'

    @classmethod
    def of(cls, federation: Federation, shown: int) -> Grid:
        """Rows and columns as large as there is room for."""
        rows, columns = _row_names(federation), _column_names(federation)
        wide = LETTER * max(map(len, columns), default=0) + 10
        column = float(np.clip(300 / federation.classes, 0.5, np.clip(wide, 36, 110))) if federation.classes else 0.0
        if columns and wide > column and column < 13:
            columns = ()
        upright = bool(columns) and wide > column
        return cls(
            left=EDGE + 26 + max(LETTER * max(map(len, rows), default=0), 4 * LETTER),
            top=92 + (wide - 18 if upright else 0),
            row=float(np.clip(600 / shown, 1, 18)),
            column=column,
            rows=rows,
            columns=columns,
            upright=upright,
        )


def _row_names(federation: Federation) -> tuple[str, ...]:
    """The clients' names where they are few and short; of names that only number the clients, the numbers."""
    names = tuple(name.removeprefix("client-") for name in federation.names)
    if not all(name.isdecimal() for name in names):
        names = federation.names
    return names if len(names) <= NAMED and max(map(len, names)) <= LONGEST else ()


def _column_names(federation: Federation) -> tuple[str, ...]:
    names = federation.recipe.class_names if federation.recipe else ()
    fit = len(names) == federation.classes and max(map(len, names), default=0) <= LONGEST
    return tuple(names) if fit else ()


@checks_arguments
def heat_map(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Writes the picture that `drawn` makes."""
    with write_aside(path) as file:
        file.write(drawn(federation).encode())


def drawn(federation: Federation) -> str:
    """An SVG with one row per client: the share of its training samples in each class, and how many it has.

    Validation samples count as training samples. For regression there are no classes, so only the sizes are drawn. Of
    more than a thousand clients the first thousand are shown (fewer, if classes are many), and the picture says so. Few
    clients are named, and so are the classes of a table.
    """
    shown = min(federation.clients, MOST, max(100, CELLS // max(federation.classes, 1)))
    counts = (federation.label_counts("train") + federation.label_counts("val"))[:shown]
    sizes = (federation.train.counts + federation.val.counts)[:shown]
    grid = Grid.of(federation, shown)
    bars = grid.left + (grid.column * federation.classes + GAP if federation.classes else 0)
    bar_width = BARS if federation.classes else 300
    bottom = grid.top + grid.row * shown
    facts = _facts(federation, sizes, shown)
    width = max(bars + bar_width + EDGE, 2 * EDGE + LETTER * len(facts), 400)
    height = bottom + (84 if federation.classes else 24)

    title = f"{federation.dataset}: {'who has which classes' if federation.classes else 'samples per client'}"
    head = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" fill="{INK}" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12" {head}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        _text(EDGE, 28, _cut(title, int((width - 2 * EDGE) / 9)), size=16, weight=600),
        _text(EDGE, 46, facts, fill=FAINT),
        *_client_axis(shown, grid),
    ]
    if federation.classes:
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        top = float(share.max())
        parts += [*_cells(share, top, grid), *_class_axis(federation.classes, grid)]
        parts += _legend(top, grid.left, bottom + 44)
    parts += _bars(sizes, grid, bars, bar_width, bottom)
    return "\n".join([*parts, "</svg>"])


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _text(
    x: float, y: float, words: str, *, size: int = 12, weight: int = 400, fill: str = INK, at: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{at}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _facts(federation: Federation, sizes: np.ndarray, shown: int) -> str:
    least, middle, most = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
    span = f", {most:,} each" if least == most else f", {least:,} to {most:,} each, median {middle:,.0f}"
    clients = f"{federation.clients:,} client{'s' * (federation.clients != 1)}"
    if shown < federation.clients:
        clients += f" (the first {shown:,} shown)"
    total = len(federation.train.index) + len(federation.val.index)
    return f"{clients} · {total:,} training samples{span if len(sizes) > 1 else ''}"


def _client_axis(shown: int, grid: Grid) -> list[str]:
    row, middle = grid.row, grid.top + grid.row * shown / 2
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if s * row >= (13 if s == 1 else 24))
    words = grid.rows or tuple(str(i) for i in range(shown))
    labels = [
        _text(grid.left - 8, grid.top + (i + 0.5) * row + 4, words[i], fill=FAINT, at="end")
        for i in range(0, shown, step)
    ]
    side = f'<text transform="translate({EDGE + 8} {middle:.1f}) rotate(-90)" text-anchor="middle">client</text>'
    return [*labels, side if shown * row > 34 else _text(grid.left - 8, grid.top - 7, "client", at="end")]


def _class_axis(classes: int, grid: Grid) -> list[str]:
    least = 0 if grid.columns else 18
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100) if s * grid.column >= least), 1000)
    words = grid.columns or tuple(str(c) for c in range(classes))
    labels, y = [], grid.top - 7
    for c in range(0, classes, step):
        x = grid.left + (c + 0.5) * grid.column
        if grid.upright:
            turn = f'transform="translate({x + 4:.1f} {y:.1f}) rotate(-90)"'
            labels.append(f'<text {turn} fill="{FAINT}">{escape(words[c])}</text>')
        else:
            labels.append(_text(x, y, words[c], fill=FAINT, at="middle"))
    return [_text(grid.left, 70, "class"), *labels]


def shades(ramp: Sequence[tuple[int, int, int]]) -> list[str]:
    """The colours of the levels."""
    stops, channels = np.linspace(0, 1, len(ramp)), [*zip(*ramp, strict=True)]
    levels = np.linspace(0, 1, LEVELS)
    return ["#" + "".join(f"{round(np.interp(level, stops, c)):02x}" for c in channels) for level in levels]


def _cells(share: np.ndarray, top: float, grid: Grid) -> list[str]:
    """The filled cells as one path per shade: a hundred thousand cells stay a small file."""
    clients, classes = share.shape
    level = np.where(share > 0, np.minimum((share / top * LEVELS).astype(int), LEVELS - 1), -1)
    width, height = (side - 1 if side >= 5 else side for side in (grid.column, grid.row))  # a gap where there is room
    size = f'width="{grid.column * classes:.1f}" height="{grid.row * clients:.1f}"'
    paths = [f'<rect x="{grid.left:.1f}" y="{grid.top:.1f}" {size} fill="{EMPTY}"/>']
    for shade, colour in enumerate(shades(RAMP)):
        where = np.argwhere(level == shade)
        if len(where):
            box = f"h{width:.2f}v{height:.2f}h{-width:.2f}z"
            moves = "".join(f"M{grid.left + c * grid.column:.2f} {grid.top + i * grid.row:.2f}{box}" for i, c in where)
            paths.append(f'<path fill="{colour}"{grid.edges} d="{moves}"/>')
    return paths


def _legend(top: float, x: float, y: float) -> list[str]:
    cell = 12
    size = f'y="{y - 9:.1f}" width="{cell}" height="{cell}"'
    boxes = [f'<rect x="{x + i * cell:.1f}" {size} fill="{colour}"/>' for i, colour in enumerate(shades(RAMP))]
    end = x + LEVELS * cell
    return [
        _text(x, y - 16, "share of the client's samples in the class"),
        *boxes,
        *(
            _text(a, y + 18, words, fill=FAINT, at=at)
            for a, words, at in ((x, "0", "start"), (end, f"{100 * top:.3g} %", "end"))
        ),
        f'<rect x="{end + 18:.1f}" {size} fill="{EMPTY}" stroke="{LINE}"/>',
        _text(end + 36, y + 1, "none", fill=FAINT),
    ]


def _bars(sizes: np.ndarray, grid: Grid, x: float, width: float, bottom: float) -> list[str]:
    most, top = max(int(sizes.max()), 1), grid.top
    thick = grid.row - 1 if grid.row >= 5 else grid.row
    moves = "".join(
        f"M{x:.1f} {top + i * grid.row:.2f}h{n / most * width:.2f}v{thick:.2f}H{x:.1f}z" for i, n in enumerate(sizes)
    )
    return [
        _text(x, top - 22, "training samples"),
        _text(x, top - 7, "0", fill=FAINT),
        _text(x + width, top - 7, f"{most:,}", fill=FAINT, at="end"),
        f'<path fill="{BAR}"{grid.edges} d="{moves}"/>',
        f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{FAINT}"/>',
    ]
