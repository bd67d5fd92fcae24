"""Sensitivity: FedABML's accuracy per round under λ, k and s, one at a time around the protocol's own values.

The paper's captions say that s hardly matters, that a large λ and a small k hurt on CIFAR-10, and that little matters
on EMNIST. λ acts where the KL can pull: with k > 1, or θ moving with ρ < 1. Under `paper` that is so (k = 5, θ-step as
printed); under `tuned` the tuned configuration is given k = 5 and ρ = 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...report.charts import Axis, line_chart
from ...runs.config import JsonDict
from ..cell import Cell
from .experiment import Context, Done, Experiment, by_label, over_rounds, scored
from .findings import Findings, Picture, Sheet, grouped, listed
from .settings import TITLES, systems

GRID: dict[str, tuple[float, ...]] = {"lam": (0.001, 0.01, 0.1, 1.0, 10.0), "k": (1, 3, 5, 7), "s": (1, 3, 5, 10)}
QUICK_GRID: dict[str, tuple[float, ...]] = {"lam": (0.01, 1.0, 10.0), "k": (1, 5), "s": (1, 5)}
SYMBOLS = {"lam": "λ", "k": "k", "s": "s"}
SEEN = 10  # rounds of the curve: all clients are personalised at each, which takes longer than the rounds between
SHOWN_MEASURES = {"accuracy %": ("accuracy", 2), "NLL": ("nll", 3)}
LITTLE = 1.0  # points of accuracy


class Sensitivity(Experiment):
    """The sensitivity to three hyperparameters."""

    title = "Sensitivity of FedABML to λ, k and s"
    claim = "s hardly matters; a large λ and a small k hurt on CIFAR-10; little matters on EMNIST."
    columns = ("cifar10-5", "emnist")
    algorithms = ("fedabml",)
    seeds = (3, 2)

    def cells(self, context: Context) -> list[Cell]:
        cells = []
        for column, name, config in systems(context, self):
            base = config.hyper | ({"k": 5, "rho": 0.5} if context.request.protocol == "tuned" else {})
            step = max(1, config.rounds // SEEN)
            curve = tuple(range(step, config.rounds + 1, step))
            for key, values in (QUICK_GRID if context.request.quick else GRID).items():
                for value in values:
                    changed = config.with_changes(hyper=base | {key: value})
                    cells += context.seeded(f"{column} {name} {key} {value:g}", changed, curve=curve)
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for (column, key), swept in grouped(finished, _swept).items():
            title, symbol, parameter_records, series = TITLES[column], SYMBOLS[key], [], []
            for label, cells in by_label(swept).items():
                accuracy, value = scored(cells, "accuracy", 100), label.split()[3]
                record: JsonDict = {"column": column, "parameter": key, "value": value, "accuracy": accuracy}
                parameter_records.append(record | {"half": accuracy.half, "nll": scored(cells, "nll")})
                series.append(over_rounds(f"{symbol} = {value}", cells, "accuracy"))
            grid = listed(
                parameter_records, symbol, lambda r: f"{SYMBOLS[r['parameter']]} = {r['value']}", SHOWN_MEASURES
            )
            sheets.append(Sheet(f"{title}: {symbol}", *grid))
            caption = "Personal test accuracy after the given round, mean over seeds."
            axes = {"x": Axis("round", "whole"), "y": Axis("accuracy", "percent")}
            pictures.append(Picture(f"{key}-{column}", f"{symbol}, {title}", caption, line_chart, series, axes))
            records += parameter_records
            if len(parameter_records) > 1:  # else the others are not finished, or diverged: nothing to compare
                conclusions.append(f"{title}: {_matters(symbol, parameter_records)}")
        return Findings(conclusions, sheets, pictures, records)


def _swept(finished: Done) -> tuple[str, str]:
    """Return the column and the hyperparameter of a cell."""
    column, _, key, _ = finished.cell.label.split()
    return column, key


def _matters(symbol: str, records: Sequence[JsonDict]) -> str:
    """Say whether a hyperparameter matters, by the accuracies of its values."""
    best, worst = max(records, key=lambda r: r["accuracy"]), min(records, key=lambda r: r["accuracy"])
    gap = best["accuracy"] - worst["accuracy"]
    return (
        f"{symbol} {'hardly matters' if gap < LITTLE else 'matters'}: {gap:.2f} points between {symbol} = "
        f"{best['value']} (best) and {symbol} = {worst['value']} (worst)."
    )
