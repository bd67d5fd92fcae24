"""The page of a reproduced experiment: the paper's claim, what was found, tables, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import page
from .figures import Figure
from .frame import PAGE, text

if TYPE_CHECKING:
    from ..experiments.paper.findings import Findings, Sheet


def render(found: Findings, command: str, made: str) -> str:
    """The whole page as one HTML document."""
    answer = "".join(f"<li>{text(line)}</li>" for line in found.said)
    figures = [Figure(d.heading, d.draw(PAGE), d.reading) for d in found.drawings]
    notes = "".join(f'<p class="note">{text(line)}</p>' for line in (*found.notes, made))
    body = [
        page.heading(found.title, text(f"The paper: {found.claim}")),
        "<main>",
        f'<section aria-label="Summary"><ul>{answer}</ul></section>' if answer else "",
        *(_sheet(sheet) for sheet in found.sheets),
        page.section("Figures", figures),
        f"<section><h2>How it was made</h2><pre>{text(command)}</pre>{notes}</section>",
        "</main>",
    ]
    data = {"runs": [], "marks": [], "percent": True, "clients": [], "values": {}, "tally": {}}
    return page.document(found.title, body, data)


def _sheet(sheet: Sheet) -> str:
    rows = [
        f'<tr><th scope="row">{text(first)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in sheet.rows
    ]
    note = f'<p class="note">{text(sheet.note)}</p>' if sheet.note else ""
    return (
        f"<section><h2>{text(sheet.title)}</h2>{page.table([(word, '') for word in sheet.head], rows)}{note}</section>"
    )
