"""CSV text that is safe to open in a spreadsheet: every CSV file of the package is written by `csv_text`.

Spreadsheets run a cell that begins with =, +, -, @, a tab or a carriage return as a formula. Names of classes and
clients come from data, so such a cell gets a leading apostrophe, which a spreadsheet shows as text. Numbers stay as
they are. `csv_value` takes the apostrophe off again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Apostrophes in front count as part of the pattern, so that `csv_value` is the exact inverse of `csv_cell`. Excel takes
# the full-width signs for formulas, too.
_FORMULA = re.compile(r"'*(?:[\s\x00\u200b\ufeff]*[=+\-@＝＋－＠]|[\t\r\n])")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE | re.ASCII)


def csv_cell(value: Any) -> Any:
    """Returns a cell with an apostrophe in front where a spreadsheet would run it; everything else as it is."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def csv_value(cell: str) -> str:
    """Returns the text that `csv_cell` was given."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a CSV file's text: a header and rows of equally many cells."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([csv_cell(cell) for cell in row] for row in (head, *rows))
    return out.getvalue()
