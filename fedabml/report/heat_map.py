"""The heat map of a partition, drawn from its manifest: which classes each client holds, and how many samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import checks_arguments
from ..data import Federation
from ..files.paths import write
from .canvas import LIGHT, Axis, Frame, Theme

LEVELS = 16  # shades of a cell
MOST_ROWS, MOST_CELLS = 1000, 20_000  # drawn at most: thinner rows vanish, and a cell takes up to 31 bytes
NAMED_CLIENTS, NAMED_CLASSES, LONGEST = 40, 24, 18  # at most so many are named, if no name has more letters
BARS = 84.0  # width of the bars that show how many samples a client has


@dataclass(frozen=True)
class Partition:
    """The training samples of the first clients: `counts` [shown, classes] and `sizes` [shown], with validation."""

    dataset: str
    clients: int
    samples: int
    sizes: np.ndarray
    counts: np.ndarray
    names: Sequence[str]
    class_names: Sequence[str]

    @classmethod
    def read(cls, manifest: Mapping[str, Any]) -> Partition | None:
        """Read what a manifest lists; return `None` where it lists no clients, or lists that do not fit together."""
        try:
            counts, sizes, rows = (_by_split(manifest, key) for key in ("counts", "sizes", "rows"))
            classes = len(counts[0][0]) if counts and counts[0] else 0
            row_count = max(100, min(MOST_ROWS, MOST_CELLS // max(classes, 1)))
            sizes = sizes or [
                [len(client_rows) for client_rows in part] for part in rows
            ]  # older manifests list no sizes
            total = _sum(sizes, row_count) if sizes else _sum(counts, row_count).sum(1)
            table = _sum(counts, row_count) if classes else np.zeros((len(total), 0), np.int64)
            clients, samples = int(manifest["clients"]), sum(int(manifest["samples"][s]) for s in ("train", "val"))
            names = [str(name) for name in manifest.get("names") or ()]
            class_names = [str(name) for name in manifest.get("class_names") or ()]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        if (
            not 0 < len(total) == len(table) == min(clients, row_count)
            or total.min() < 0
            or (classes and table.min() < 0)
        ):
            return None
        return cls(str(manifest.get("dataset", "")), clients, samples, total, table, names, class_names)

    @property
    def headline(self) -> str:
        """How many clients and training samples there are, in a line."""
        smallest, median, largest = int(self.sizes.min()), float(np.median(self.sizes)), int(self.sizes.max())
        span = f", {largest:,} each"
        if smallest < largest:
            span = f", {smallest:,} to {largest:,} each, median {median:,.0f}"
        shortened = f" (the first {len(self.sizes):,} shown)" if len(self.sizes) < self.clients else ""
        clients = f"{self.clients:,} client{'s' * (self.clients != 1)}{shortened}"
        return f"{clients} · {self.samples:,} training samples{span if self.clients > 1 else ''}"

    @property
    def row_names(self) -> list[str]:
        """The clients' names where they are few and short, else their numbers."""
        numbers = [name.removeprefix("client-") for name in self.names]
        names = numbers if all(name.isdecimal() for name in numbers) else self.names
        return _names_or_numbers(names, len(self.sizes), NAMED_CLIENTS)


def _names_or_numbers(names: Sequence[str], count: int, limit: int) -> list[str]:
    fit = len(names) == count <= limit and all(len(name) <= LONGEST for name in names)
    return list(names) if fit else [str(i) for i in range(count)]


def _by_split(manifest: Mapping[str, Any], key: str) -> list[list[Any]]:
    """Return the lists of a manifest's entry for training and validation samples, as far as there are any."""
    part = manifest.get(key) or {}
    return [part[split] for split in ("train", "val") if split in part]


def _sum(parts: Sequence[Sequence[Any]], count: int) -> np.ndarray:
    """Add up the first `count` entries of each part."""
    return np.sum([np.array(part[:count], np.int64) for part in parts], 0)


@checks_arguments
def save_heat_map(federation: Federation, path: str | os.PathLike[str]) -> Path:
    """Write the heat map of a federation's partition as an SVG picture that stands alone; return its path."""
    partition = Partition.read(federation.manifest_rows(rows=False))
    assert partition is not None
    return write(Path(path), heat_map(partition))


def heat_map(partition: Partition, theme: Theme = LIGHT) -> str:
    """Draw one row per client: the share of its training samples in each class, and how many samples it has.

    A regression has no classes, so only the sizes are drawn.
    """
    row_count, classes = partition.counts.shape
    largest, row_names = max(int(partition.sizes.max()), 1), partition.row_names
    theme = replace(theme, height=round(float(np.clip(600 / row_count, 1, 18)) * row_count) + (150 if classes else 112))
    title = f"{partition.dataset}: {'who has which classes' if classes else 'samples per client'}"
    columns = Axis("class", names=_names_or_numbers(partition.class_names, classes, NAMED_CLASSES))
    x = columns if classes else Axis("training samples", "whole")
    frame = Frame(
        theme, title, x, Axis("client", names=row_names), ((0.0, float(largest)), (0.0, 1.0)),
        head=46.0 if classes else 20.0, aside=BARS + 16 if classes else 0.0,
    )  # fmt: skip
    frame.write(4, frame.head + 12, partition.headline)
    left, width = frame.left, frame.right - frame.left
    if classes:
        _cells(frame, partition.counts / np.maximum(partition.counts.sum(1, keepdims=True), 1))
        left, width = frame.right + 16, BARS
        frame.write(left, frame.top - 20, "training samples")
        frame.write(left, frame.top - 6, "0")
        frame.write(left + width, frame.top - 6, f"{largest:,}", anchor="end")
    row = frame.y(1) - frame.y(0)
    thick, lengths = row - 1 if row >= 5 else row, partition.sizes / largest * width
    bars = "".join(f"M{left:.1f} {frame.y(i):.2f}h{n:.2f}v{thick:.2f}H{left:.1f}z" for i, n in enumerate(lengths))
    frame.parts.append(f'<path fill="{theme.muted}" fill-opacity=".6"{_edges(thick)} d="{bars}"/>')
    for i, (name, size) in enumerate(zip(row_names, partition.sizes.tolist(), strict=True) if row_count <= 100 else ()):
        frame.hover(frame.left, frame.y(i), theme.width - 16 - frame.left, row, f"client {name}\n{size:,} samples")
    return frame.svg()


def _cells(frame: Frame, shares: np.ndarray) -> None:
    """Draw the filled cells as one path per shade, so that many cells stay a small file, and the legend of shades."""
    level = np.where(shares > 0, np.minimum((shares / max(shares.max(), 1e-9) * LEVELS).astype(int), LEVELS - 1), -1)
    column, row = frame.x(1) - frame.x(0), frame.y(1) - frame.y(0)
    width, height = (side - 1 if side >= 5 else side for side in (column, row))  # a gap where there is room
    box = f"h{width:.2f}v{height:.2f}h{-width:.2f}z"
    label, y, size = "share of the client's samples: 0%", frame.head + 24, 8
    x = 4 + 6.2 * len(label)
    frame.write(4, y + 10, label)
    for shade in range(LEVELS):
        fill = f'fill="{frame.theme.colours[0]}" fill-opacity="{0.12 + 0.88 * shade / (LEVELS - 1):.2f}"'
        frame.parts.append(f'<rect x="{x + size * shade:.1f}" y="{y}" width="{size}" height="11" {fill}/>')
        cells = np.argwhere(level == shade).tolist()
        moves = "".join(f"M{frame.x(c):.2f} {frame.y(i):.2f}{box}" for i, c in cells)
        if moves:
            edges = _edges(min(width, row))
            frame.parts.append(f'<path data-cells="{len(cells)}" {fill}{edges} d="{moves}"/>')
    frame.write(x + size * LEVELS + 6, y + 10, f"{shares.max():.0%}")


def _edges(size: float) -> str:
    """Return the rendering of shapes of this size: without crisp edges, thin rows that touch would show seams."""
    return "" if size >= 4 else ' shape-rendering="crispEdges"'
