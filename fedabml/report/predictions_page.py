"""The page of predictions: how many rows have an alarm, what raised it, and these rows one by one.

Rows without an alarm are counted, and never listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation.predictions import Checks, Prediction, Regression
from ..evaluation.structured import MultiPrediction
from . import page
from .canvas import PAGE, Axis
from .charts import Series, bars, histogram
from .page import Figure, Row, Section, Table, TableCell, Tile

MOST_ROWS = 200  # with an alarm that are listed; the most unusual ones
MOST_CAUSES = 20  # of alarms that are drawn
_BINS = 24
_HIDDEN = ("p_", "q_", "label_", "model_std")  # beginnings of columns with many numbers, which the file has
_UNUSED = ("alarm", "flags", "mutual_information", "set")
_HINTS = {
    "entropy": "The uncertainty of the prediction, in nats. It may be low for a value far outside its range.",
    "std": "The standard deviation of the prediction.",
    "surprise": "Above 0 the input looks like other sites' data.",
    "score": "How unusual the input is, in units of its limits: above 1 is an alarm.",
    "distance": "To the client's training data, in the network's last hidden layer.",
    "strangeness": "About 1 for usual inputs.",
    "probability": "That of the predicted label.",
    "why": "What is unusual. What is usual at other sites, or common at this one, raises no alarm and is in brackets.",
}


def render_predictions(
    p: Prediction | Regression | MultiPrediction,
    names: Mapping[str, Sequence[Any]],
    columns: Mapping[str, Sequence[Any]],
    title: str,
    limits: str,
) -> str:
    """Return the page as one HTML document.

    `names` are the columns of the file of predictions that name its rows, such as identifiers, and `columns` those that
    are predicted. `limits` is a sentence on what alarms look at.
    """
    checks = p.checks
    rows = len(next(iter(columns.values())))
    if checks is None:
        none = "None of these predictions was checked, so no alarm could be raised."
        return page.document(title, f"{rows:,} rows, no alarms", [Section(points=[none], notes=[limits])])
    marked = np.flatnonzero(checks.alarm)
    tiles = [
        Tile("rows", f"{rows:,}", "predicted"),
        Tile("rows with an alarm", f"{len(marked):,}", f"{len(marked) / rows:.1%} of all rows"),
    ]
    drawn = [figure for figure in (_causes(checks), _uncertainty(p, checks)) if figure]
    sections = [Section(tiles=tiles, notes=[limits]), Section("What raised alarms", figures=drawn)]
    if len(marked):
        sections.append(Section("Rows with an alarm", tables=[_table(p, checks, names, columns, marked)]))
    return page.document(title, f"{rows:,} rows, {len(marked):,} with an alarm", sections)


def _causes(checks: Checks) -> Figure | None:
    """Draw how many rows have an alarm by each column, or by the network's features."""
    counts = list(checks.counts.items())[:MOST_CAUSES]
    if not counts:
        return None
    reading = "The rows with an alarm, by what raised it. A row with several causes counts for each of them."
    if len(checks.counts) > MOST_CAUSES:
        reading += f" The {MOST_CAUSES} most frequent of {len(checks.counts)} causes are drawn."
    names, values = zip(*counts, strict=True)
    svg = bars(names, [Series("rows", values)], title="Causes of alarms", x=Axis("rows", "whole"), theme=PAGE)
    return Figure("Causes of alarms", svg, reading)


def _uncertainty(p: Prediction | Regression | MultiPrediction, checks: Checks) -> Figure | None:
    """Draw how uncertain predictions with and without an alarm are; none where all rows are alike in this."""
    values, word = (p.std.mean(1), "standard deviation") if isinstance(p, Regression) else (p.entropy, "entropy (nats)")
    values = values.reshape(len(values), -1).sum(1)
    if checks.alarm.all() or not checks.alarm.any() or not np.isfinite(values).all() or np.ptp(values) == 0:
        return None
    edges = np.linspace(values.min(), values.max(), _BINS + 1)
    series = []
    for name, group in (("with an alarm", values[checks.alarm]), ("without an alarm", values[~checks.alarm])):
        series.append(Series(name, (np.histogram(group, edges)[0] / len(group)).tolist()))
    title = f"{'Spread' if isinstance(p, Regression) else 'Entropy'} with and without an alarm"
    axes = {"x": Axis(word), "y": Axis("share of the rows of each group", "percent")}
    reading = "A prediction may look certain although its input is unusual, so alarms do not follow from uncertainty."
    return Figure(title, histogram(edges.tolist(), series, title=title, theme=PAGE, **axes), reading)


def _table(
    p: Prediction | Regression | MultiPrediction,
    checks: Checks,
    names: Mapping[str, Sequence[Any]],
    columns: Mapping[str, Sequence[Any]],
    marked: np.ndarray,
) -> Table:
    """Return the rows with an alarm, the most unusual first."""
    score = np.zeros(len(checks.alarm)) if checks.score is None else checks.score
    listed = marked[np.argsort(-score[marked], kind="stable")][:MOST_ROWS]
    shown = {n: values for n, values in columns.items() if n not in _UNUSED and not n.startswith(_HIDDEN)}
    if isinstance(p, Prediction):
        probability = p.probs[np.arange(len(p.probs)), p.label].tolist()
        shown = {"label": columns["label"], "probability": probability} | shown
    head = [*shown, "alarm by", "why"]
    hints = [""] * (1 + len(names)) + [_HINTS.get(name, "") for name in head]
    rows = []
    for row in map(int, listed):
        cells = [TableCell(str(row), row), *(_cell(values[row]) for values in (*names.values(), *shown.values()))]
        causes, flags = (part[row] if part else [] for part in (checks.causes, checks.flags))
        rows.append(Row([*cells, TableCell(", ".join(causes)), TableCell("; ".join(flags))]))
    notes = ["Rows are numbered from 0, as in the file of predictions. Those without an alarm are not listed."]
    if len(listed) < len(marked):
        notes.append(f"The {len(listed):,} most unusual of {len(marked):,} rows are listed; the file has all of them.")
    return Table(["row", *names, *head], rows, hints, css_class="reasons", notes=notes)


def _cell(value: Any) -> TableCell:
    if isinstance(value, float):
        return TableCell(f"{value:.3g}", value if np.isfinite(value) else None)
    if isinstance(value, list):
        return TableCell(", ".join(map(str, value)))
    return TableCell("" if value is None else str(value))
