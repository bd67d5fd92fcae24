"""The page of a comparison: the table with its marks, the intervals, and every client under two chosen algorithms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..report import page
from ..report.canvas import PAGE, Axis
from ..report.charts import Series, scatter
from ..report.page import Figure, Section
from ..report.read import Client, SavedRun
from ..report.run_page import render as render_runs
from ..runs.config import JsonDict
from .benefits import benefit_cells, benefit_heading, benefit_notes
from .class_tables import NOTE, class_cells
from .comparison_tables import Rows, cells, decision_cells, decision_notes, explained, harm_cells, titled
from .ranking import Comparison, Row

CLIENT_COLUMNS = ("accuracy", "rmse", "auroc", "recall", "nll", "mae", "coverage")  # of the page's tables of clients


def render(comparison: Comparison, command: str, title: str | None = None, manifest: JsonDict | None = None) -> str:
    """Return the page, empty where fewer than two rows have numbers; `manifest` is of the first seed's partition."""
    scored = [row for row in comparison.rows if row.scores]
    if len(scored) < 2:
        return ""
    one_partition = comparison.same_clients or len(comparison.seeds) == 1
    divided = "" if one_partition else f"This is seed {comparison.seeds[0]}; every other seed divides the data anew."
    runs = [replace(run_of(comparison, row, command), partition=manifest or {}, divided=divided) for row in scored]
    sections = _summary(comparison, scored)
    if manifest is None:
        note = "The partition is not shown, because the folder holds no manifest of it."
        sections[0] = replace(sections[0], notes=[*sections[0].notes, note])
    return render_runs(runs, title or titled(comparison), sections)


def run_of(comparison: Comparison, row: Row, command: str = "") -> SavedRun:
    """Return a row as the page's figures read it: one run, whose clients are those of all seeds."""
    config = row.config
    rows_of_class = (f"rows[{name}]" for name in comparison.class_names)
    measures = (*(key for key in CLIENT_COLUMNS if key in comparison.client_measures), *rows_of_class)
    clients = []
    rows = "n_val" if comparison.split == "val" else "n_test"
    for seed in comparison.seeds:
        columns = {name: v for name in measures if (v := comparison.values(row.label, seed, name)) is not None}
        counts = comparison.counts.get(seed)
        for i, name in enumerate(comparison.client_names[seed] if columns else ()):
            values = {key: None if v[i] != v[i] else float(v[i]) for key, v in columns.items()}
            values |= {} if counts is None else {rows: float(counts[i])}
            clients.append(Client(f"{seed}.{i}", f"{name}, seed {seed}" if len(comparison.seeds) > 1 else name, values))
    summary: dict[str, Any] = {key: mean for key, (mean, _) in row.scores.items()}
    summary |= {"task": comparison.task, "split": comparison.split, "seconds": row.seconds, "bytes_up": row.traffic}
    summary |= {"class_names": comparison.class_names} if comparison.class_names else {}
    summary["reliability"] = comparison.reliability(row.label)
    sizes = {len(names) for names in comparison.client_names.values()}
    description: dict[str, Any] = {"dataset": Path(config.data).name if config.data else config.dataset or "digits"}
    description |= {"command": command} | ({"clients": sizes.pop()} if len(sizes) == 1 else {})
    settings = {k: v for k, v in config.relevant().items() if k not in ("dataset", "clients", "seed")} | description
    return SavedRun(Path(row.label), settings, summary, comparison.curve(row.label), clients, name=row.label)


def _summary(comparison: Comparison, scored: list[Row]) -> list[Section]:
    """Return the table with its notes, the intervals of the means, and the clients that are harmed."""
    runs = {row.label: i for i, row in enumerate(scored)}  # the legend's entries

    def table(head: list[str], rows: Rows) -> page.Table:
        return page.Table(head, [page.Row(row, run=runs.get(row[0].text)) for row in rows])

    sections = [Section(tables=[table(*cells(comparison, lead=True))], notes=explained(comparison, lead=True))]
    head, rows = decision_cells(comparison)
    if rows:
        sections.append(Section("Ranks and decisions", tables=[table(head, rows)], notes=decision_notes(comparison)))
    head, rows = class_cells(comparison)
    if rows:
        sections.append(Section("Classes", tables=[table(head, rows)], notes=[NOTE]))
    if len(comparison.seeds) > 1:
        sections.append(Section("How sure the means are", figures=[_intervals(comparison, scored)]))
    head, rows = harm_cells(comparison)
    if rows:
        sections.append(Section("Clients against Local only", tables=[table(head, rows)]))
    head, rows = benefit_cells(comparison)
    if notes := benefit_notes(comparison):
        tables = [page.Table(head, [page.Row(row) for row in rows])] if rows else []
        sections.append(Section(benefit_heading(comparison), tables=tables, notes=notes))
    return sections


def _intervals(comparison: Comparison, scored: list[Row]) -> Figure:
    """Draw the mean of every row with its interval over seeds."""
    main, series = comparison.columns[0], []
    for i, row in enumerate(scored):
        mean, half = row.scores[main.key]
        spread = half or 0.0
        tips = [f"{row.label}: {main.cell(mean)} ± {main.cell(spread)}"] * 3
        ends = [mean - spread, mean, mean + spread]
        series.append(Series(row.label, ends, [i + 1.0] * 3, tips, sizes=(1.5, 5.0, 1.5), slot=i))
    y = Axis(main.label, "percent" if main.unit == "percent" else "number")
    x = Axis("algorithms, the best first", "whole", (0.5, len(scored) + 0.5))
    svg = scatter(series, title="Means and intervals", x=x, y=y, theme=replace(PAGE, height=350), connect=True)
    reading = (
        "A dot is the mean over seeds, its line the 95% interval. Seeds differ in their partition, which all "
        "algorithms share, so overlapping intervals do not mean equal: the table's marks come from paired tests."
    )
    return Figure("Means and intervals", svg, reading)
