"""The page of an inspected table: its warnings, its columns, and every column's values at every client."""

from __future__ import annotations

from ..data.profile import MOST_CLIENTS
from ..evaluation.inspection import Inspection
from . import page
from .page import Cell, Row, Section, Table


def render_inspection(found: Inspection) -> str:
    """Return the page as one HTML document."""
    shown = min(len(found.clients), MOST_CLIENTS)
    some = f" The first {shown} of {len(found.clients)} clients are shown." if shown < len(found.clients) else ""
    warnings = Section(
        points=[*found.warnings, *([] if found.warnings else ["Nothing in this table looks wrong."])],
        notes=["Each warning is a question to whoever knows the data, not a verdict."],
    )
    columns = Table(
        ("column", "use", "kind", "gaps", "values"),
        [
            Row([Cell(c.name), Cell(c.use), Cell(c.kind), Cell(f"{c.total.gaps:.1%}", c.total.gaps), Cell(values)])
            for c, values in ((c, c.total.without_gaps.text) for c in found.columns)
        ],
    )
    held = [column for column in found.columns if column.use != "client"]
    rows = [
        Row([Cell(name), Cell(f"{count:,}", count), *(Cell(column.clients[i].text) for column in held)])
        for i, (name, count) in enumerate(zip(found.clients[:shown], found.rows[:shown], strict=True))
    ]
    clients = Table(("client", "rows", *(column.name for column in held)), rows)
    reading = "Numbers: median [5%, 95% of the values are below]. Words: the commonest, its share, how many there are."
    sections = [
        warnings,
        Section("Columns", tables=[columns], notes=[reading]),
        Section("Values at every client", tables=[clients], notes=[reading + some]),
    ]
    size = f"{sum(found.rows):,} rows, {len(found.clients):,} clients, {len(found.columns):,} columns"
    return page.document(f"{found.dataset}: what the table holds", size, sections)
