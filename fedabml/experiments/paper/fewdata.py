"""Few data, the paper's motivation: new clients with 5 to 500 training samples.

Four fifths of the clients train; the others come with n_i samples each, spread over their labels, personalise what was
learned, and are scored on all of their test data. Local only, which has nothing to learn from others, takes 50 epochs
on its n_i samples. The paper claims that a Bayesian prior helps most where data are few. Under `tuned` FedAvg is also
lent the label level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...evaluation.measures import MEASURES
from ...report.canvas import line_chart
from ...report.frame import Axis, Look
from ...runs.config import Table
from ..cell import Cell
from ..statistics import mean
from . import numbers
from .columns import COLUMNS, columns, lent, rows
from .experiment import Desk, Done, Experiment
from .findings import Drawing, Findings, Mean, Sheet, spread
from .newcomers import Newcomers
from .pictures import banded, power
from .table1 import grouped

SHARE, SIZES, QUICK_SIZES = 0.8, (5, 10, 25, 50, 100, 500), (4, 8, 16)
ALONE = 50  # epochs of Local only
# New clients with few of the embedded digits: one hyperparameter of each method, the best of four values on validation
# data (docs/research.md). FedAvg+FT, Per-FedAvg and pFedMe are best at their default.
EMBEDDED_HYPER: dict[str, Table] = {
    "fedabml": {"label_alpha": 3.0},
    "fedabml-plain": {"personal_lr": 0.01},
    "local": {"personal_lr": 0.1},
}
SHOWN = {key: MEASURES[key] for key in ("accuracy", "nll", "ece")}


class FewData(Experiment):
    """Few data."""

    title = "Few data: new clients with few samples"
    claim = "A Bayesian prior learned from others helps most where a client has few data."
    columns = ("cifar10-5", "emnist", "fashionmnist")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "perfedavg", "pfedme", "local")

    def cells(self, desk: Desk) -> list[Cell]:
        study = Newcomers(SHARE, QUICK_SIZES if desk.ask.quick else SIZES)
        made = []
        whose = ("fedavg-ft",) if desk.ask.protocol == "tuned" else ()  # the paper's FedABML has no label level
        for column, _ in columns(desk, self.columns):
            for name, config in lent(desk, rows(desk, column, self.algorithms), whose).items():
                if column == "digits" and desk.ask.protocol == "paper":
                    config = config.with_changes(hyper=config.hyper | EMBEDDED_HYPER.get(name, {}))
                if name == "local":  # a new client has only its own epochs, whatever others did in rounds
                    config = config.with_changes(rounds=0, hyper=config.hyper | {"personal_epochs": ALONE})
                configs = [config.with_changes(seed=seed) for seed in desk.ask.seed_list]
                made += [Cell(f"{column} {name}", each, study=study) for each in configs]
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        protocol, groups = desk.ask.protocol, grouped(done)
        sheets, drawings, records, said = [], [], [], []
        for column in dict.fromkeys(column for column, _ in groups):
            own = {name: cells for (c, name), cells in groups.items() if c == column}
            sizes = [score.on for score in next(iter(own.values()))[0].result.scores]
            found = {key: {name: _means(cells, key) for name, cells in own.items()} for key in SHOWN}
            for key, measure in SHOWN.items():
                table = [
                    [numbers.name(name, protocol), *(spread(_times(v, measure.factor), measure.digits) for v in values)]
                    for name, values in found[key].items()
                ]
                sheets.append(Sheet(f"{COLUMNS[column].title}: {measure.heading}", ["samples", *sizes], table))
                drawings.append(_curves(column, key, own, protocol))
            records += [
                {
                    "column": column,
                    "algorithm": name,
                    "samples": int(n),
                    **{key: found[key][name][i][0] for key in SHOWN},
                }
                for name in own
                for i, n in enumerate(sizes)
            ]
            best = [max((v[i][0], name) for name, v in found["accuracy"].items())[1] for i in range(len(sizes))]
            firsts = "; ".join(f"{n}: {numbers.name(b, protocol)}" for n, b in zip(sizes, best, strict=True))
            said.append(f"{COLUMNS[column].title}, first in accuracy by the number of samples: {firsts}.")
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _times(value: Mean, factor: float) -> Mean:
    return factor * value[0], None if value[1] is None else factor * value[1]


def _means(own: Sequence[Done], key: str) -> list[Mean]:
    return [mean(column) for column in zip(*_by_seed(own, key), strict=True)]


def _by_seed(own: Sequence[Done], key: str) -> list[list[float]]:
    return [[math.nan if s.error else s.summary[key] for s in d.result.scores] for d in own]


def _curves(column: str, key: str, own: Mapping[str, Sequence[Done]], protocol: str) -> Drawing:
    word = MEASURES[key].label

    def draw(look: Look) -> str:
        across = [power(float(score.on)) for score in next(iter(own.values()))[0].result.scores]
        most = math.inf if key == "nll" else 1.0
        series = [
            banded(numbers.name(name, protocol), across, _by_seed(cells, key), most=most)  # type: ignore[arg-type]
            for name, cells in own.items()
        ]
        y = Axis(word, "percent" if key == "accuracy" else "number")
        x = Axis("training samples of a new client", "power")
        return line_chart(series, title=f"{word}, {COLUMNS[column].title}", x=x, y=y, look=look)

    reading = f"{word} of new clients against the number of their training samples, on a logarithmic axis."
    return Drawing(f"{key}-{column}", f"{word}, {COLUMNS[column].title}", reading, draw)
