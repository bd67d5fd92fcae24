"""What an experiment has found: records, and the sentences, tables and pictures that are views of them.

A record is a row of table.csv; what it has measured are `Mean`s over seeds. `listed` and `pivot` make tables of
records, `band` a line of a chart. `publish` writes all of it: table.csv, table.md, figures/*.svg and report.html.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import shortened
from ...files.paths import write
from ...files.sheets import csv_records, frame, html_card, markdown_table
from ...report import page as layout
from ...report.charts import LIGHT, PAGE, Series, Theme
from ...runs.config import JsonDict
from ...version import __version__
from ..statistics import SEEDS_TO_TEST, mean

if TYPE_CHECKING:
    import pandas as pd

NONE = "–"
Grid = tuple[list[str], list[list[str]]]  # the heads and the rows of a table
Text = Callable[[JsonDict], str]  # of a record
Item = TypeVar("Item")
Key = TypeVar("Key")


class Mean(float):
    """A mean over seeds, NaN of none, that knows its values and `half` of its 95% interval (None below three seeds)."""

    by_seed: Mapping[int, float]
    half: float | None

    def __new__(cls, by_seed: Mapping[int, float]) -> Mean:
        middle, half = mean([*by_seed.values()]) if by_seed else (math.nan, None)
        self = super().__new__(cls, middle)
        self.by_seed, self.half = by_seed, half
        return self

    def times(self, factor: float) -> Mean:
        """Return the mean in another unit."""
        return Mean({seed: factor * value for seed, value in self.by_seed.items()})

    def minus(self, other: Mean) -> Mean:
        """Return the mean of the differences, over the seeds that both have."""
        return Mean({seed: v - other.by_seed[seed] for seed, v in self.by_seed.items() if seed in other.by_seed})


@dataclass(frozen=True)
class Sheet:
    """A table of an experiment: its title, the heads of its columns, its cells as text, and the notes below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Picture:
    """A picture: the name of its file, its heading and caption, a chart of `fedabml.report.charts`, and its series.

    `options` are the chart's axes, its title (by default the heading), its height and others.
    """

    name: str
    heading: str
    caption: str
    chart: Callable[..., str]
    series: Sequence[Any]
    options: JsonDict = field(default_factory=dict)

    def draw(self, theme: Theme) -> str:
        """Return the picture as SVG."""
        options: JsonDict = {"title": self.heading} | self.options
        return self.chart(self.series, theme=replace(theme, height=options.pop("height", theme.height)), **options)


@dataclass(frozen=True, repr=False)
class Findings:
    """The outcome of an experiment: sentences (the answer first), tables, pictures, and records (rows of table.csv).

    Tables without rows and pictures without series are left out.
    """

    conclusions: Sequence[str]
    sheets: Sequence[Sheet]
    pictures: Sequence[Picture]
    records: Sequence[JsonDict]
    title: str = ""  # with the paper's claim and notes: `fedabml.experiments.paper.reproduce` adds them
    claim: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sheets", [sheet for sheet in self.sheets if sheet.rows])
        object.__setattr__(self, "pictures", [picture for picture in self.pictures if picture.series])

    def __repr__(self) -> str:
        return shortened(f"Findings({self.title}; {len(self.records)} records)")

    def _repr_html_(self) -> str:
        """Show a notebook the conclusions and the records."""
        facts = {f"{number}.": text for number, text in enumerate(self.conclusions, 1)}
        return html_card(self.title or "Findings", facts, self.records)

    def frame(self) -> pd.DataFrame:
        """Return the records as a DataFrame, the rows of table.csv; a mean is its number."""
        return frame({k: float(v) if isinstance(v, Mean) else v for k, v in r.items()} for r in self.records)


# -- views of records -----------------------------------------------------------------------------------------------
def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key, in the order in which the keys first occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by(records: Iterable[JsonDict], key: str) -> dict[Any, list[JsonDict]]:
    """Group records by one of their values."""
    return grouped(records, lambda record: record[key])


def listed(records: Iterable[JsonDict], head: str, name: Text, columns: Mapping[str, tuple[str, int]]) -> Grid:
    """Return a table with a row per record: its name, then the values of the columns, each a key and its decimals."""
    rows = [[name(r), *(number(r[key], digits) for key, digits in columns.values())] for r in records]
    return [head, *columns], rows


def pivot(records: Sequence[JsonDict], head: str, name: Text, column: Text, cell: Text) -> Grid:
    """Return a table with a cell per record, in the row with its name and in its column."""
    table: dict[str, dict[str, str]] = {}
    for record in records:
        table.setdefault(name(record), {})[column(record)] = cell(record)
    columns = list(dict.fromkeys(map(column, records)))
    return [head, *columns], [[row, *(cells.get(c, NONE) for c in columns)] for row, cells in table.items()]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, a mean with half of its interval; a dash where it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return NONE
    half = getattr(value, "half", None)
    return f"{value:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def over(count: int, interval: str = " ± half of its 95% interval", unit: str = "seed") -> str:
    """Say what a mean is over and how its interval is shown; fewer than three have no interval."""
    return f"{count} {unit}s{interval * (count >= SEEDS_TO_TEST)}" if count > 1 else f"one {unit}"


def power(value: float | None) -> float | None:
    """Return a number as a `power` axis takes it, its decimal logarithm; None where it has none."""
    return None if value is None or not value > 0 else math.log10(value)


def band(
    name: str,
    x: Sequence[float | None],
    means: Sequence[Mean],
    *,
    log: bool = False,
    least: float = 0.0,
    greatest: float = math.inf,
) -> Series:
    """Return means as a line and their intervals as a band around it, which ends at `least` and `greatest`.

    With `log` the values are logarithms, for a `power` axis. A mean without an interval has no band.
    """
    scale = power if log else (lambda value: value)
    low = [None if m.half is None else scale(max(m - m.half, 1e-3 * m if log else least)) for m in means]
    high = [None if m.half is None else scale(min(m + m.half, greatest)) for m in means]
    return Series(name, [scale(m) for m in means], x, low=low, high=high)


# -- files ----------------------------------------------------------------------------------------------------------
def publish(findings: Findings, folder: Path, command: str, provenance: Mapping[str, Sequence[Any]]) -> None:
    """Write table.md, table.csv, figures/*.svg and report.html into a folder."""
    write(folder / "table.md", _markdown(findings, command, _provenance_line(provenance)))
    write(folder / "table.csv", csv_records(findings.records))
    for picture in findings.pictures:
        write(folder / "figures" / f"{picture.name}.svg", picture.draw(LIGHT))
    write(folder / "report.html", page(findings, command, provenance))


def _provenance_line(provenance: Mapping[str, Sequence[Any]]) -> str:
    """Say when, with what and on what the cells were made."""
    parts = [f"{name} {', '.join(map(str, values))}" for name, values in provenance.items() if values]
    return "; ".join([time.strftime("%Y-%m-%d %H:%M"), f"written by fedabml {__version__}", *parts])


def _markdown(findings: Findings, command: str, provenance: str) -> str:
    parts = [f"# {findings.title}", f"```\n{command}\n```", provenance + ".", f"The paper: {findings.claim}"]
    parts.append(_bullets(findings.conclusions))
    for sheet in findings.sheets:
        parts += [f"## {sheet.title}", markdown_table(sheet.head, sheet.rows)]
        parts += [_bullets(sheet.notes)] if len(sheet.notes) > 1 else sheet.notes
    parts += [f"![{p.heading}](figures/{p.name}.svg)\n\n{p.caption}" for p in findings.pictures]
    parts.append(_bullets(findings.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    """Return a Markdown list; a line that begins with the mark * is no list of its own."""
    return "\n".join(f"- {line}".replace("- * ", "- \\* ", 1) for line in lines)


def page(findings: Findings, command: str, provenance: Mapping[str, Sequence[Any]]) -> str:
    """Return the page of an experiment as one HTML document."""
    sections = [layout.Section(points=findings.conclusions)]
    for sheet in findings.sheets:
        rows = [layout.Row([layout.TableCell(cell) for cell in row]) for row in sheet.rows]
        sections.append(layout.Section(sheet.title, tables=[layout.Table(sheet.head, rows)], notes=sheet.notes))
    figures = [layout.Figure(p.heading, p.draw(PAGE), p.caption) for p in findings.pictures]
    sections.append(layout.Section("Figures", figures=figures))
    notes = [*findings.notes, _provenance_line(provenance)]
    sections.append(layout.Section("How it was made", commands=[command], notes=notes))
    return layout.document(findings.title, f"The paper: {findings.claim}", sections)
