"""Tables as text: CSV that is safe to open in a spreadsheet, Markdown, HTML for notebooks; and as DataFrames.

Every CSV file of the package is written by `csv_text` or `csv_records`, every Markdown table by `markdown_table`.
Spreadsheets run a cell that begins with =, +, -, @, a tab or a carriage return as a formula. Names of classes and
clients come from data, so such a cell gets a leading apostrophe, which a spreadsheet shows as text. Numbers are not
changed. `csv_value` removes the apostrophe.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# Apostrophes in front count as part of the pattern, so that `csv_value` is the exact inverse of `csv_cell`. Excel takes
# the full-width signs for formulas, too.
_FORMULA = re.compile(r"'*(?:[\s\x00\u200b\ufeff]*[=+\-@＝＋－＠]|[\t\r\n])")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE | re.ASCII)


def csv_cell(value: Any) -> Any:
    """Return a cell, with a leading apostrophe if a spreadsheet would run it as a formula."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def csv_value(cell: str) -> str:
    """Return the text that `csv_cell` was given."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return the text of a CSV file: a header and rows with equally many cells."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([csv_cell(cell) for cell in row] for row in (head, *rows))
    return out.getvalue()


def csv_records(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns records as a CSV file's text, a row each: six digits of a number, an empty cell for a missing value."""
    rows = list(records)
    head = list(dict.fromkeys(name for record in rows for name in record))
    return csv_text(head, ([_short(record.get(name)) for name in head] for record in rows))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return "" if value is None else value


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; all columns but the first are aligned to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return records as a DataFrame, a row each. Raises InputError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise InputError("A DataFrame needs pandas: pip install 'fedabml[tables]'.") from error
    return pandas.DataFrame(list(records))


SHOWN_ROWS = 20  # rows of a table in a notebook


def html_card(title: str, properties: Mapping[str, Any], records: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return what a notebook shows of an object: its kind, properties, and the first records. Every text is escaped."""

    def row(cells: Iterable[Any], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(_short(cell)))}</{tag}>" for cell in cells) + "</tr>"

    parts = [f"<strong>{html.escape(title)}</strong>"]
    parts.append(f"<table>{''.join(row(pair) for pair in properties.items() if pair[1] is not None)}</table>")
    if records:
        head = list(dict.fromkeys(name for record in records for name in record))
        lines = (row(record.get(name) for name in head) for record in records[:SHOWN_ROWS])
        parts.append(f"<table>{row(head, 'th')}{''.join(lines)}</table>")
    if len(records) > SHOWN_ROWS:
        parts.append(f"<p>and {len(records) - SHOWN_ROWS} more: see .frame()</p>")
    return f"<div>{''.join(parts)}</div>"
