"""What the terminal shows: tables and errors. Progress displays are in `runs.progress` and `experiments.progress`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import shortened
from ..runs.progress import RunProgress, console, downloads, note, number, print_line

__all__ = [
    "RunProgress",
    "console",
    "downloads",
    "note",
    "number",
    "print_error",
    "print_line",
    "print_paragraph",
    "table",
]


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped at words."""
    console().print(text, markup=False)


def print_error(text: str, label: str = "Error: ") -> None:
    """Print an error to stderr, as one paragraph."""
    console(stderr=True).print(f"{label}{shortened(text, 4000)}", markup=False, soft_wrap=True, style="red")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None, numbers: bool = False) -> None:
    """Print a table; with `numbers` all columns except the first are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if title:
        console().print(title, style="bold", markup=False)
    grid = Table(box=box.SIMPLE_HEAD, show_header=any(head), show_edge=False, pad_edge=False)
    for i, word in enumerate(head):
        grid.add_column(Text(word), justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    console().print(grid)
    print_line()
