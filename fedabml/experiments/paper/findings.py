"""What an experiment has found, ready to be shown: sentences, tables, pictures, and the numbers as plain records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files.paths import write
from ...files.sheets import csv_text
from ...report import page as layout
from ...report.figures import Figure
from ...report.frame import LIGHT, PAGE, Look, text
from ...runs.config import Table
from ...version import __version__
from ..statistics import (
    SEEDS_TO_TEST,  # it belongs with `spread` and `against`
)

NONE = "–"
Mean = tuple[float, float | None]  # with half of its 95% interval


@dataclass(frozen=True)
class Sheet:
    """A table: its heading, the heads of its columns, its cells in words, and what they mean."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture: the name of its file, its heading, how to read it, and how it is drawn in a given look."""

    name: str
    heading: str
    reading: str
    draw: Callable[[Look], str]


@dataclass(frozen=True)
class Findings:
    """An experiment's outcome. `said` are sentences, the answer first; `records` are the rows of table.csv."""

    title: str
    claim: str
    said: Sequence[str]
    sheets: Sequence[Sheet]
    drawings: Sequence[Drawing]
    records: Sequence[Table]
    notes: Sequence[str] = field(default=())


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def spread(value: Mean | None, digits: int = 2) -> str:
    """A mean with half of its interval, where it has one."""
    if value is None:
        return NONE
    middle, half = value
    return number(middle, digits) + ("" if half is None else f" ± {half:.{digits}f}")


def over(count: int, known: str = " ± half of its 95% interval", what: str = "seed") -> str:
    """What a mean is over, and how its interval is shown, which fewer than three do not have."""
    return f"{count} {what}s{known * (count >= SEEDS_TO_TEST)}" if count > 1 else f"one {what}"


def against(ours: Mean | None, paper: float | None, digits: int = 2) -> str:
    """Ours, and beside it the paper's number and the difference."""
    if ours is None or paper is None:
        return spread(ours, digits) if paper is None else f"{NONE} (paper {paper:.{digits}f})"
    return f"{spread(ours, digits)} (paper {paper:.{digits}f}, {ours[0] - paper:+.{digits}f})"


def publish(found: Findings, folder: Path, command: str, facts: Mapping[str, Sequence[Any]]) -> None:
    """Writes table.md, table.csv, figures/*.svg and report.html."""
    write(folder / "table.md", _markdown(found, command, made(facts)))
    write(folder / "table.csv", _csv(found.records))
    for drawing in found.drawings:
        write(folder / "figures" / f"{drawing.name}.svg", drawing.draw(LIGHT))
    write(folder / "report.html", page(found, command, facts))


def page(found: Findings, command: str, facts: Mapping[str, Sequence[Any]]) -> str:
    """The page of it."""
    return _html(found, command, made(facts))


def made(facts: Mapping[str, Sequence[Any]]) -> str:
    """When, with what and on what it was made."""
    words = [time.strftime("%Y-%m-%d %H:%M"), f"written by fedabml {__version__}"]
    return "; ".join([*words, *(f"{name} {', '.join(map(str, values))}" for name, values in facts.items() if values)])


def _markdown(found: Findings, command: str, origin: str) -> str:
    parts = [f"# {found.title}", f"```\n{command}\n```", origin + ".", f"The paper: {found.claim}"]
    parts += ["\n".join(f"- {line}" for line in found.said)] if found.said else []
    for sheet in found.sheets:
        parts += [f"## {sheet.title}", pipes(sheet.head, sheet.rows), sheet.note]
    parts += [f"![{d.heading}](figures/{d.name}.svg)\n\n{d.reading}" for d in found.drawings]
    parts += ["\n".join(f"- {line}" for line in found.notes)] if found.notes else []
    return "\n\n".join(part for part in parts if part) + "\n"


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _csv(records: Sequence[Table]) -> str:
    head = list(dict.fromkeys(name for record in records for name in record))
    return csv_text(head, ([_plain(record.get(name)) for name in head] for record in records))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return "" if value is None else value


def _html(found: Findings, command: str, made: str) -> str:
    """The whole page as one HTML document."""
    answer = "".join(f"<li>{text(line)}</li>" for line in found.said)
    figures = [Figure(d.heading, d.draw(PAGE), d.reading) for d in found.drawings]
    notes = "".join(f'<p class="note">{text(line)}</p>' for line in (*found.notes, made))
    body = [
        layout.heading(found.title, text(f"The paper: {found.claim}")),
        "<main>",
        f'<section aria-label="Summary"><ul>{answer}</ul></section>' if answer else "",
        *(_sheet(sheet) for sheet in found.sheets),
        layout.section("Figures", figures),
        f"<section><h2>How it was made</h2><pre>{text(command)}</pre>{notes}</section>",
        "</main>",
    ]
    data = {"runs": [], "marks": [], "percent": True, "clients": [], "values": {}, "tally": {}}
    return layout.document(found.title, body, data)


def _sheet(sheet: Sheet) -> str:
    """Return a sheet as a section of the page."""
    rows = [
        f'<tr><th scope="row">{text(first)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in sheet.rows
    ]
    note = f'<p class="note">{text(sheet.note)}</p>' if sheet.note else ""
    table = layout.table([(word, "") for word in sheet.head], rows)
    return f"<section><h2>{text(sheet.title)}</h2>{table}{note}</section>"
