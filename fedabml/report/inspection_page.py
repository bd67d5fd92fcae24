"""The page of an inspected table: its warnings, its columns, and every column's values at every client."""

from __future__ import annotations

from ..data.profile import MOST_CLIENTS
from ..evaluation.inspection import Inspection
from . import page
from .page import Row, Section, Table, TableCell


def render_inspection(inspection: Inspection) -> str:
    """Return the page as one HTML document."""
    listed = min(len(inspection.clients), MOST_CLIENTS)
    shown_note = (
        f" The first {listed} of {len(inspection.clients)} clients are shown."
        if listed < len(inspection.clients)
        else ""
    )
    warnings = Section(
        points=[*inspection.warnings, *([] if inspection.warnings else ["Nothing in this table looks wrong."])],
        notes=["Each warning is a question to whoever knows the data, not a verdict."],
    )
    columns = Table(
        ("column", "use", "kind", "gaps", "values"),
        [
            Row(
                [
                    TableCell(c.name),
                    TableCell(c.use),
                    TableCell(c.kind),
                    TableCell(f"{c.total.gaps:.1%}", c.total.gaps),
                    TableCell(values),
                ]
            )
            for c, values in ((c, c.total.without_gaps.text) for c in inspection.columns)
        ],
    )
    described = [column for column in inspection.columns if column.use != "client"]
    rows = [
        Row(
            [
                TableCell(name),
                TableCell(f"{count:,}", count),
                *(TableCell(column.clients[i].text) for column in described),
            ]
        )
        for i, (name, count) in enumerate(zip(inspection.clients[:listed], inspection.rows[:listed], strict=True))
    ]
    clients = Table(("client", "rows", *(column.name for column in described)), rows)
    reading = "Numbers: median [5%, 95% of the values are below]. Words: the commonest, its share, how many there are."
    sections = [
        warnings,
        Section("Columns", tables=[columns], notes=[reading]),
        Section("Values at every client", tables=[clients], notes=[reading + shown_note]),
    ]
    size = f"{sum(inspection.rows):,} rows, {len(inspection.clients):,} clients, {len(inspection.columns):,} columns"
    return page.document(f"{inspection.dataset}: what the table holds", size, sections)
