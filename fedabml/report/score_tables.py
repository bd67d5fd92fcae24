"""The scores of one run as tables, the same for the terminal and for its page: all measures, and class by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..evaluation.decisions import MOST_COLUMNS
from ..evaluation.measures import (
    FEW_OF_CLASS,
    FEW_ROWS,
    MEASURES,
    SCORED,
    Measure,
    in_words,
    of_large,
)
from ..files.formats import size
from .canvas import finite
from .page import TableCell

# The columns of the scores: their headings, and the prefixes of the summary's keys.
MODELS = {"personalised": "", "prior + label level": "prior_level_", "prior": "prior_", "base rate": "base_"}
BASE_NOTE = (
    "Base rate: a model that knows only each client's training labels. It predicts the commonest class, with the label "
    "frequencies as probabilities; of numbers it predicts the mean, the median and the quantiles."
)
Format = Callable[[Measure, float | None], str]
Cells = tuple[list[str], list[list[TableCell]]]


def score_cells(summary: Mapping[str, Any], form: Format) -> Cells:
    """Return head and rows of the table of scores: of the personalised models and, if there is one, of the prior.

    Clients of few rows count in no mean of ranks and decisions, nor in the worst tenth, where a summary has these
    measures without them. `form` formats the value of a measure.
    """
    scored = {key for key, value in summary.items() if value is not None}
    models = {head: start for head, start in MODELS.items() if start in ("", "prior_") or f"{start}nll" in scored}
    rows = []
    for key in SCORED:
        if key in summary:
            measure = in_words(MEASURES[key], summary)
            cells = [
                TableCell(form(measure, value := finite(summary[name])), value) if name in summary else TableCell("")
                for name in (f"{start}{key}" for start in models.values())
            ]
            rows.append([TableCell(" ".join(filter(None, [measure.name, of_large(key, summary)]))), *cells])
    blank = [TableCell("")] * (len(models) - 1)
    for key, words in (
        ("clients_small", f"clients with fewer than {FEW_ROWS} rows"),
        ("clients_few_of_class", f"clients with fewer than {FEW_OF_CLASS} rows of a class"),
    ):
        if summary.get(key):
            rows.append([TableCell(words), TableCell(f"{summary[key]} of {summary['clients_scored']}"), *blank])
    if "bytes_up" in summary:
        traffic = size(summary["bytes_up"] + summary["bytes_down"])
        rows.append([TableCell("traffic per client and round"), TableCell(traffic), *blank])
    return ["", *models], rows


def class_cells(summary: Mapping[str, Any], form: Format) -> Cells:
    """Return head and rows of the table of classes, all samples pooled; no rows for other tasks.

    Up to `MOST_COLUMNS` classes it has the confusion matrix, with a column per predicted class.
    """
    confusion, names = summary.get("confusion"), summary.get("class_names")
    rates = {key: summary.get(f"{key}_by_class") for key in ("recall", "precision", "f1")}
    lists = [confusion, *rates.values()]
    if not all(isinstance(values, list) and values and len(values) == len(lists[0] or ()) for values in lists):
        return [], []
    assert isinstance(confusion, list)
    classes = len(confusion)
    if not all(isinstance(row, list) and len(row) == classes and all(type(n) is int for n in row) for row in confusion):
        return [], []
    words = [str(n) for n in (names if isinstance(names, list) and len(names) == classes else range(classes))]
    matrix = classes <= MOST_COLUMNS
    rows = []
    for c, row in enumerate(confusion):
        values = {key: finite(column[c]) for key, column in rates.items() if column is not None}
        cells = [TableCell(f"{n:,}", n) for n in (sum(row), *(row if matrix else ()))]
        rows.append(
            [TableCell(words[c], c), *cells, *(TableCell(form(MEASURES[key], v), v) for key, v in values.items())]
        )
    return ["class", "rows", *(f"predicted {name}" for name in words if matrix), "recall", "precision", "F1"], rows
