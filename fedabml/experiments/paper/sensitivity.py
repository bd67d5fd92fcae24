"""Sensitivity: FedABML's accuracy per round under λ, k and s, one at a time around the protocol's own values.

The paper's captions say that s hardly matters, that a large λ and a small k hurt on CIFAR-10, and that little matters
on EMNIST. λ acts where the KL can pull: with k > 1, or θ moving with ρ < 1. Under `paper` that is so (k = 5, θ-step as
printed); under `tuned` the tuned configuration is given k = 5 and ρ = 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...report.canvas import Axis
from ...report.charts import line_chart
from ...runs.config import Table
from ..cell import Cell
from ..statistics import mean
from .experiment import Context, Done, Experiment, by_label, over_rounds
from .findings import Findings, Sheet, spread
from .pictures import picture
from .settings import TITLES, columns, rows

GRID: dict[str, tuple[float, ...]] = {"lam": (0.001, 0.01, 0.1, 1.0, 10.0), "k": (1, 3, 5, 7), "s": (1, 3, 5, 10)}
QUICK_GRID: dict[str, tuple[float, ...]] = {"lam": (0.01, 1.0, 10.0), "k": (1, 5), "s": (1, 5)}
SYMBOLS = {"lam": "λ", "k": "k", "s": "s"}
SEEN = 10  # rounds of the curve: all clients are personalised at each, which takes longer than the rounds between
LITTLE = 1.0  # points of accuracy


class Sensitivity(Experiment):
    """The sensitivity to three hyperparameters."""

    title = "Sensitivity of FedABML to λ, k and s"
    claim = "s hardly matters; a large λ and a small k hurt on CIFAR-10; little matters on EMNIST."
    columns = ("cifar10-5", "emnist")
    algorithms = ("fedabml",)
    seeds = (3, 2)

    def cells(self, context: Context) -> list[Cell]:
        made = []
        for column in columns(context, self.columns):
            for name, config in rows(context, column, self.algorithms).items():
                base = config.hyper | ({"k": 5, "rho": 0.5} if context.request.protocol == "tuned" else {})
                step = max(1, config.rounds // SEEN)
                curve = tuple(range(step, config.rounds + 1, step))
                for key, values in (QUICK_GRID if context.request.quick else GRID).items():
                    for value in values:
                        each = config.with_changes(hyper=base | {key: value})
                        made += context.seeded(f"{column} {name} {key} {value:g}", each, curve=curve)
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        found: dict[tuple[str, str], dict[str, list[Done]]] = {}
        for label, own in by_label(done).items():
            column, _, key, value = label.split()
            found.setdefault((column, key), {})[value] = own
        conclusions, sheets, pictures, records = [], [], [], []
        for (column, key), values in found.items():
            title, symbol, table = TITLES[column], SYMBOLS[key], []
            here: list[Table] = []
            for value, own in values.items():
                summaries = [d.result.scores[0].summary for d in own]
                accuracy, nll = mean([100 * s["accuracy"] for s in summaries]), mean([s["nll"] for s in summaries])
                table.append([f"{symbol} = {value}", spread(accuracy), spread(nll, 3)])
                record = {"column": column, "parameter": key, "value": value}
                here.append(record | {"accuracy": accuracy[0], "half": accuracy[1]})
            sheets.append(Sheet(f"{title}: {symbol}", [symbol, "accuracy %", "NLL"], table))
            caption = "Personal test accuracy after the given round, mean over seeds."
            series = [over_rounds(f"{symbol} = {value}", own, "accuracy") for value, own in values.items()]
            axes: Table = {"x": Axis("round", "whole"), "y": Axis("accuracy", "percent")}
            pictures.append(picture(f"{key}-{column}", f"{symbol}, {title}", caption, line_chart, series, **axes))
            records += here
            if len(here) < 2:  # the others are not finished, or diverged: nothing to compare
                continue
            best, worst = max(here, key=lambda r: r["accuracy"]), min(here, key=lambda r: r["accuracy"])
            gap = best["accuracy"] - worst["accuracy"]
            conclusions.append(
                f"{title}: {symbol} {'hardly matters' if gap < LITTLE else 'matters'}: {gap:.2f} points between "
                f"{symbol} = {best['value']} (best) and {symbol} = {worst['value']} (worst)."
            )
        return Findings(conclusions, sheets, pictures, records)
