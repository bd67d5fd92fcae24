"""Few data, the paper's motivation: new clients with 5 to 500 training samples.

Four fifths of the clients train; the others come with n_i samples each, spread over their labels, personalise what was
learned, and are scored on all of their test data. Local only, which has nothing to learn from others, takes 50 epochs
on its n_i samples. The paper claims that a Bayesian prior helps most where data are few. Under `tuned` FedAvg also has
a row with the label level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...evaluation.measures import MEASURES
from ...report.canvas import Axis
from ...report.charts import line_chart
from ...runs.config import Table
from ..cell import Cell
from ..statistics import mean
from .experiment import Context, Done, Experiment, by_column
from .findings import Findings, Sheet, spread
from .newcomers import Newcomers
from .pictures import Picture, banded, picture, power
from .settings import TITLES, columns, rows, with_label_level

SHARE, SIZES, QUICK_SIZES = 0.8, (5, 10, 25, 50, 100, 500), (4, 8, 16)
ALONE = 50  # epochs of Local only
# New clients with few of the embedded digits: one hyperparameter of each method, the best of four values on validation
# data (docs/research.md). FedAvg+FT, Per-FedAvg and pFedMe are best at their default.
EMBEDDED_HYPER: dict[str, Table] = {
    "fedabml": {"label_alpha": 3.0},
    "fedabml-plain": {"personal_lr": 0.01},
    "local": {"personal_lr": 0.1},
}
SHOWN = ("accuracy", "nll", "ece")


class FewData(Experiment):
    """New clients with few data."""

    title = "Few data: new clients with few samples"
    claim = "A Bayesian prior learned from others helps most where a client has few data."
    columns = ("cifar10-5", "emnist", "fashionmnist")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "perfedavg", "pfedme", "local")

    def cells(self, context: Context) -> list[Cell]:
        study, made = Newcomers(SHARE, QUICK_SIZES if context.request.quick else SIZES), []
        whose = ("fedavg-ft",) if context.request.protocol == "tuned" else ()  # the paper's FedABML has no label level
        for column in columns(context, self.columns):
            found = rows(context, column, self.algorithms)
            for name, config in with_label_level(context, found, whose).items():
                if column == "digits" and context.request.protocol == "paper":
                    config = config.with_changes(hyper=config.hyper | EMBEDDED_HYPER.get(name, {}))
                if name == "local":  # a new client has only its own epochs, whatever others did in rounds
                    config = config.with_changes(rounds=0, hyper=config.hyper | {"personal_epochs": ALONE})
                made += context.seeded(f"{column} {name}", config, study=study)
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, groups in by_column(done).items():
            sizes = [score.on for score in next(iter(groups.values()))[0].result.scores]
            own: list[Table] = [
                {"column": column, "algorithm": name, "samples": int(n)}
                | {key: mean([curve[i] for curve in _curves(cells, key)])[0] for key in SHOWN}
                for name, cells in groups.items()
                for i, n in enumerate(sizes)
            ]
            best = {n: max((r["accuracy"], r["algorithm"]) for r in own if r["samples"] == int(n))[1] for n in sizes}
            firsts = "; ".join(f"{n}: {context.name(name)}" for n, name in best.items())
            conclusions.append(f"{TITLES[column]}, first in accuracy by the number of samples: {firsts}.")
            for key in SHOWN:
                sheet, drawn = _views(context, column, key, groups, sizes)
                sheets.append(sheet)
                pictures.append(drawn)
            records += own
        return Findings(conclusions, sheets, pictures, records)


def _curves(own: Sequence[Done], key: str) -> list[list[float]]:
    """Return a measure by seed and number of samples."""
    return [[math.nan if s.error else s.summary[key] for s in d.result.scores] for d in own]


def _views(
    context: Context, column: str, key: str, groups: Mapping[str, Sequence[Done]], sizes: Sequence[str]
) -> tuple[Sheet, Picture]:
    """Return the table and the picture of a measure against the number of samples."""
    measure, across = MEASURES[key], [power(float(n)) for n in sizes]
    word, most = measure.label, math.inf if key == "nll" else 1.0
    table, series = [], []
    for name, cells in groups.items():
        curves = _curves(cells, key)
        means = [mean([measure.factor * value for value in values]) for values in zip(*curves, strict=True)]
        table.append([context.name(name), *(spread(value, measure.digits) for value in means)])
        series.append(banded(context.name(name), across, curves, most=most))
    y = Axis(word, "percent" if key == "accuracy" else "number")
    axes: Table = {"x": Axis("training samples of a new client", "power"), "y": y}
    caption = f"{word} of new clients against the number of their training samples, on a logarithmic axis."
    drawn = picture(f"{key}-{column}", f"{word}, {TITLES[column]}", caption, line_chart, series, **axes)
    return Sheet(f"{TITLES[column]}: {measure.heading}", ["samples", *sizes], table), drawn
