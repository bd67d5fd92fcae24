"""Sensitivity: FedABML's accuracy per round under λ, k and s, one at a time around the protocol's own values.

The paper's captions say that s hardly matters, that a large λ and a small k hurt on CIFAR-10, and that little matters
on EMNIST. λ acts where the KL can pull: with k > 1, or θ moving with ρ < 1. Under `paper` that is so (k = 5, θ-step as
printed); under `tuned` the tuned configuration is given k = 5 and ρ = 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...report.canvas import line_chart
from ...report.frame import Axis, Look
from ..cell import Cell
from ..statistics import mean
from .columns import COLUMNS, columns, rows
from .experiment import Desk, Done, Experiment
from .findings import Drawing, Findings, Sheet, spread
from .pictures import over_rounds

GRID: dict[str, tuple[float, ...]] = {"lam": (0.001, 0.01, 0.1, 1.0, 10.0), "k": (1, 3, 5, 7), "s": (1, 3, 5, 10)}
QUICK_GRID: dict[str, tuple[float, ...]] = {"lam": (0.01, 1.0, 10.0), "k": (1, 5), "s": (1, 5)}
SYMBOLS = {"lam": "λ", "k": "k", "s": "s"}
SEEN = 10  # rounds of the curve: all clients are personalised at each, which takes longer than the rounds between
LITTLE = 1.0  # points of accuracy


class Sensitivity(Experiment):
    """Sensitivity."""

    title = "Sensitivity of FedABML to λ, k and s"
    claim = "s hardly matters; a large λ and a small k hurt on CIFAR-10; little matters on EMNIST."
    columns = ("cifar10-5", "emnist")
    algorithms = ("fedabml",)
    seeds = (3, 2)

    def cells(self, desk: Desk) -> list[Cell]:
        made = []
        for column, _ in columns(desk, self.columns):
            for name, config in rows(desk, column, self.algorithms).items():
                base = config.hyper | ({"k": 5, "rho": 0.5} if desk.ask.protocol == "tuned" else {})
                step = max(1, config.rounds // SEEN)
                curve = tuple(range(step, config.rounds + 1, step))
                for key, values in (QUICK_GRID if desk.ask.quick else GRID).items():
                    for value in values:
                        for seed in desk.ask.seed_list:
                            each = config.with_changes(seed=seed, hyper=base | {key: value})
                            made.append(Cell(f"{column} {name} {key} {value:g}", each, curve=curve))
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        found: dict[tuple[str, str], dict[str, list[Done]]] = {}
        for each in done:
            column, _, key, value = each.cell.label.split()
            found.setdefault((column, key), {}).setdefault(value, []).append(each)
        sheets, drawings, records, said = [], [], [], []
        for (column, key), own in found.items():
            title, symbol = COLUMNS[column].title, SYMBOLS[key]
            ends = {
                value: mean([100 * d.result.scores[0].summary["accuracy"] for d in cells])
                for value, cells in own.items()
            }
            nll = {value: mean([d.result.scores[0].summary["nll"] for d in cells]) for value, cells in own.items()}
            table = [[f"{symbol} = {value}", spread(ends[value]), spread(nll[value], 3)] for value in own]
            sheets.append(Sheet(f"{title}: {symbol}", [symbol, "accuracy %", "NLL"], table))
            drawings.append(_curves(column, key, own))
            records += [
                {"column": column, "parameter": key, "value": value, "accuracy": ends[value][0], "half": ends[value][1]}
                for value in own
            ]
            if len(ends) < 2:  # of cells that are not finished, or diverged: no comparison
                continue
            best, worst = max(ends, key=lambda v: ends[v][0]), min(ends, key=lambda v: ends[v][0])
            gap = ends[best][0] - ends[worst][0]
            said.append(
                f"{title}: {symbol} {'hardly matters' if gap < LITTLE else 'matters'}: {gap:.2f} points between "
                f"{symbol} = {best} (best) and {symbol} = {worst} (worst)."
            )
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _curves(column: str, key: str, own: Mapping[str, Sequence[Done]]) -> Drawing:
    title = f"{SYMBOLS[key]}, {COLUMNS[column].title}"

    def draw(look: Look) -> str:
        series = [over_rounds(f"{SYMBOLS[key]} = {value}", cells, "accuracy") for value, cells in own.items()]
        return line_chart(series, title=title, x=Axis("round", "whole"), y=Axis("accuracy", "percent"), look=look)

    return Drawing(f"{key}-{column}", title, "Personal test accuracy after the given round, mean over seeds.", draw)
