"""What an experiment has found: records, and the sentences, tables and pictures that are views of them.

`publish` writes all of them: table.csv has the records; table.md and report.html have everything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.paths import write
from ...files.sheets import csv_records, markdown_table
from ...report import page as layout
from ...report.canvas import LIGHT, PAGE
from ...runs.config import Table
from ...version import __version__
from ..statistics import SEEDS_TO_TEST
from .pictures import Mean, Picture

NONE = "–"


@dataclass(frozen=True)
class Sheet:
    """A table of an experiment: its title, the heads of its columns, its cells as text, and the notes below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    """The outcome of an experiment: sentences (the answer first), tables, pictures, and records (rows of table.csv)."""

    conclusions: Sequence[str]
    sheets: Sequence[Sheet]
    pictures: Sequence[Picture]
    records: Sequence[Table]
    title: str = ""  # with the paper's claim and notes: `fedabml.experiments.paper.reproduce` adds them
    claim: str = ""
    notes: Sequence[str] = ()


# -- numbers as text ------------------------------------------------------------------------------------------------
def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, or a dash where it is missing or not finite."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def spread(value: Mean | None, digits: int = 2) -> str:
    """Return a mean as text, with half of its interval where it has one."""
    if value is None:
        return NONE
    middle, half = value
    return number(middle, digits) + ("" if half is None else f" ± {half:.{digits}f}")


def over(count: int, interval: str = " ± half of its 95% interval", unit: str = "seed") -> str:
    """Say what a mean is over and how its interval is shown; fewer than three have no interval."""
    return f"{count} {unit}s{interval * (count >= SEEDS_TO_TEST)}" if count > 1 else f"one {unit}"


def against(ours: Mean | None, paper: float | None, digits: int = 2) -> str:
    """Return our mean with the paper's number and the difference beside it."""
    if ours is None or paper is None:
        return spread(ours, digits) if paper is None else f"{NONE} (paper {paper:.{digits}f})"
    return f"{spread(ours, digits)} (paper {paper:.{digits}f}, {ours[0] - paper:+.{digits}f})"


# -- files ----------------------------------------------------------------------------------------------------------
def publish(found: Findings, folder: Path, command: str, facts: Mapping[str, Sequence[Any]]) -> None:
    """Write table.md, table.csv, figures/*.svg and report.html into a folder."""
    write(folder / "table.md", _markdown(found, command, _made(facts)))
    write(folder / "table.csv", csv_records(found.records))
    for picture in found.pictures:
        write(folder / "figures" / f"{picture.name}.svg", picture.draw(LIGHT))
    write(folder / "report.html", page(found, command, facts))


def _made(facts: Mapping[str, Sequence[Any]]) -> str:
    """Say when, with what and on what the cells were made."""
    words = [time.strftime("%Y-%m-%d %H:%M"), f"written by fedabml {__version__}"]
    return "; ".join([*words, *(f"{name} {', '.join(map(str, values))}" for name, values in facts.items() if values)])


def _markdown(found: Findings, command: str, made: str) -> str:
    parts = [f"# {found.title}", f"```\n{command}\n```", made + ".", f"The paper: {found.claim}"]
    parts.append(_bullets(found.conclusions))
    for sheet in found.sheets:
        parts += [f"## {sheet.title}", markdown_table(sheet.head, sheet.rows)]
        parts += [_bullets(sheet.notes)] if len(sheet.notes) > 1 else sheet.notes
    parts += [f"![{p.heading}](figures/{p.name}.svg)\n\n{p.caption}" for p in found.pictures]
    parts.append(_bullets(found.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    """Return a Markdown list; a line that begins with the mark * is no list of its own."""
    return "\n".join(f"- {line}".replace("- * ", "- \\* ", 1) for line in lines)


def page(found: Findings, command: str, facts: Mapping[str, Sequence[Any]]) -> str:
    """Return the page of an experiment as one HTML document."""
    figures = [layout.Figure(p.heading, p.draw(PAGE), p.caption) for p in found.pictures]
    sections = [
        layout.Section(points=found.conclusions),
        *(_section(sheet) for sheet in found.sheets),
        layout.Section("Figures", figures=figures),
        layout.Section("How it was made", commands=[command], notes=[*found.notes, _made(facts)]),
    ]
    return layout.document(found.title, f"The paper: {found.claim}", sections)


def _section(sheet: Sheet) -> layout.Section:
    """Return a table as a section of the page."""
    rows = [layout.Row([layout.Cell(cell) for cell in row]) for row in sheet.rows]
    return layout.Section(sheet.title, tables=[layout.Table(sheet.head, rows)], notes=sheet.notes)
