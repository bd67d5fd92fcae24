"""A picture of who has what: clients by classes as a self-contained SVG."""

from __future__ import annotations

import os
from html import escape

import numpy as np

from fedabml.data.federation import Federation
from fedabml.data.files import write_aside

INK, FAINT, PAPER, EMPTY, BAR = "#24292f", "#6e7781", "#ffffff", "#f6f7f9", "#8c959f"
RAMP = ((0xC6, 0xDB, 0xEF), (0x42, 0x92, 0xC6), (0x08, 0x30, 0x6B))  # from few samples to most
LEVELS = 16
MOST = 1000  # clients drawn: beyond that a row is thinner than a pixel
LEFT, TOP, BARS, GAP = 86, 92, 130, 26


def heat_map(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Writes an SVG with one row per client: the share of its training samples in each class, and how many it has.

    Validation samples count as training samples. For regression there are no classes, so only the sizes are drawn. Of
    more than a thousand clients the first thousand are shown, and the picture says so.
    """
    shown = min(federation.clients, MOST)
    counts = (federation.label_counts("train") + federation.label_counts("val"))[:shown]
    sizes = (federation.train.counts + federation.val.counts)[:shown]
    row = float(np.clip(600 / shown, 1, 18))
    column = float(np.clip(520 / max(federation.classes, 1), 5, 52)) if federation.classes else 0.0
    bars = LEFT + (column * federation.classes + GAP if federation.classes else 0)
    bar_width = BARS if federation.classes else 420
    bottom = TOP + row * shown
    width, height = max(bars + bar_width + 24, 440), bottom + (84 if federation.classes else 44)

    title = f"{federation.dataset}: {'who has which classes' if federation.classes else 'samples per client'}"
    head = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" fill="{INK}" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="11" {head}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        _text(LEFT, 28, title, size=16, weight=600),
        _text(LEFT, 46, _facts(federation, sizes, shown), fill=FAINT),
        *_client_axis(shown, row),
    ]
    if federation.classes:
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        top = float(share.max())
        parts += [*_cells(share, top, row, column), *_class_axis(federation.classes, column)]
        parts += _legend(top, bottom + 44)
    parts += _bars(sizes, row, bars, bar_width, bottom)
    parts.append("</svg>")
    with write_aside(path) as file:
        file.write("\n".join(parts).encode())


def _text(
    x: float, y: float, words: str, *, size: int = 11, weight: int = 400, fill: str = INK, at: str = "start"
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


def _client_axis(shown: int, row: float) -> list[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if s * row >= (13 if s == 1 else 24))
    labels = [_text(LEFT - 8, TOP + (i + 0.5) * row + 4, str(i), fill=FAINT, at="end") for i in range(0, shown, step)]
    middle = TOP + row * shown / 2
    side = f'<text transform="translate(30 {middle:.1f}) rotate(-90)" text-anchor="middle">client</text>'
    return [*labels, side if shown * row > 50 else _text(LEFT - 30, TOP + row * shown / 2 + 4, "client", at="end")]


def _class_axis(classes: int, column: float) -> list[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s * column >= 18)
    labels = [
        _text(LEFT + (c + 0.5) * column, TOP - 7, str(c), fill=FAINT, at="middle") for c in range(0, classes, step)
    ]
    return [_text(LEFT + column * classes / 2, TOP - 22, "class", at="middle"), *labels]


def _colour(level: float) -> str:
    stops = np.linspace(0, 1, len(RAMP))
    return "#" + "".join(f"{round(np.interp(level, stops, channel)):02x}" for channel in zip(*RAMP, strict=True))


def _cells(share: np.ndarray, top: float, row: float, column: float) -> list[str]:
    """The filled cells as one path per shade: a hundred thousand cells stay a small file."""
    clients, classes = share.shape
    level = np.where(share > 0, np.minimum((share / top * LEVELS).astype(int), LEVELS - 1), -1)
    gap = 1.0 if row >= 5 else 0.0
    back = f'<rect x="{LEFT}" y="{TOP}" width="{column * classes:.1f}" height="{row * clients:.1f}" fill="{EMPTY}"/>'
    paths = [back]
    for shade in range(LEVELS):
        where = np.argwhere(level == shade)
        if len(where):
            box = f"h{column - gap:.2f}v{row - gap:.2f}h{gap - column:.2f}z"
            moves = "".join(f"M{LEFT + c * column:.2f} {TOP + i * row:.2f}{box}" for i, c in where)
            # Without crisp edges, thin rows that touch would show seams.
            paths.append(f'<path fill="{_colour(shade / (LEVELS - 1))}" shape-rendering="crispEdges" d="{moves}"/>')
    return paths


def _legend(top: float, y: float) -> list[str]:
    cell = 12
    x = LEFT
    boxes = [
        f'<rect x="{x + i * cell}" y="{y - 9:.1f}" width="{cell}" height="{cell}" fill="{_colour(i / (LEVELS - 1))}"/>'
        for i in range(LEVELS)
    ]
    end = x + LEVELS * cell
    return [
        _text(x, y - 16, "share of the client's samples in the class"),
        *boxes,
        *(
            _text(a, y + 18, words, fill=FAINT, at=at)
            for a, words, at in ((x, "0", "start"), (end, f"{100 * top:.3g} %", "end"))
        ),
        f'<rect x="{end + 18}" y="{y - 9:.1f}" width="{cell}" height="{cell}" fill="{EMPTY}" stroke="#d0d7de"/>',
        _text(end + 36, y + 1, "none", fill=FAINT),
    ]


def _bars(sizes: np.ndarray, row: float, x: float, width: float, bottom: float) -> list[str]:
    most = max(int(sizes.max()), 1)
    gap = 1.0 if row >= 5 else 0.0
    moves = "".join(
        f"M{x:.1f} {TOP + i * row:.2f}h{n / most * width:.2f}v{row - gap:.2f}H{x:.1f}z" for i, n in enumerate(sizes)
    )
    return [
        _text(x, TOP - 22, "training samples"),
        _text(x, TOP - 7, "0", fill=FAINT),
        _text(x + width, TOP - 7, f"{most:,}", fill=FAINT, at="end"),
        f'<path fill="{BAR}" shape-rendering="crispEdges" d="{moves}"/>',
        f'<path d="M{x:.1f} {TOP}V{bottom:.1f}" stroke="{FAINT}"/>',
    ]
