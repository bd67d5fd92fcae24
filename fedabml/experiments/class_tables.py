"""How well each of more than two classes is predicted under every algorithm of a comparison, all samples pooled.

Of two classes the table of ranks and decisions has the recall and precision of the positive one.
"""

from __future__ import annotations

import numpy as np

from ..errors import shortened
from ..evaluation.measures import MEASURES
from ..report.page import TableCell
from ..runs.config import JsonDict
from .ranking import Comparison
from .statistics import interval

RATES = ("recall", "precision")
NONE = "–"
NOTE = (
    "Recall: the share of a class's rows that is found. Precision: the share of right predictions among those of the "
    "class. The rows of all clients together, mean of the seeds ± half of its 95% interval."
)


def class_scores(comparison: Comparison, label: str) -> dict[str, dict[str, list[float]]]:
    """Return each class's rows, recall and precision in the seeds that have them; empty for results without classes."""
    scores: dict[str, dict[str, list[float]]] = {}
    for result in comparison.finished(label).values():
        for name, values in result.scores[0].by_class.items():
            for key, value in values.items():
                by_seed = scores.setdefault(name, {}).setdefault(key, [])
                by_seed += [] if value is None else [value]
    return scores


def class_cells(comparison: Comparison) -> tuple[list[str], list[list[TableCell]]]:
    """Return the head and the cells of the table of classes; it has no rows without more than two classes."""
    scores = {row.label: class_scores(comparison, row.label) for row in comparison.rows if row.scores}
    first = next((classes for classes in scores.values() if classes), {})
    if not first:
        return [], []
    counts = [float(np.mean(values["rows"])) for values in first.values()]
    rows = [[TableCell("rows"), TableCell(""), *(TableCell(f"{count:,.0f}", count) for count in counts)]]
    for label, classes in scores.items():
        for key in RATES if classes else ():
            cells = (_cell(key, classes.get(name, {}).get(key, [])) for name in first)
            rows.append([TableCell(label), TableCell(MEASURES[key].heading), *cells])
    return ["algorithm", "of the class", *(shortened(name, 40) for name in first)], rows


def _cell(key: str, values: list[float]) -> TableCell:
    """Return the mean of a measure over seeds, with half of its interval; a dash where it is not defined."""
    if not values:
        return TableCell(NONE)
    mean, half = interval(values)
    measure = MEASURES[key]
    return TableCell(measure.cell(mean) + ("" if half is None else f" ± {measure.cell(half)}"), mean)


def class_record(comparison: Comparison, label: str) -> JsonDict:
    """Return a row's means by class, as table.csv and table.json have them: `recall[cat]`, `precision[cat]`."""
    scores = class_scores(comparison, label)
    return {
        f"{key}[{name}]": float(np.mean(values[key])) if values[key] else None
        for name, values in scores.items()
        for key in RATES
    }
