"""Table 2: new clients. A fifth of the clients train, two a round; the others then personalise what was learned.

Reported is the test accuracy of the new clients after 0, 1, 2, 3, 4, 5, 8 and 10 epochs of fine-tuning. The paper
claims that FedABML is first after every number of epochs from 1 on. Under `tuned` FedAvg is also lent the label level,
so that it shows what that alone brings. Every method is tuned there as it is used here: a fifth of the clients train,
and the others' validation data score it after five epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...report.frame import Axis, Look
from ...report.svg import line_chart
from .. import paper
from ..cells import Cell
from .columns import COLUMNS, Search, columns, lent, rows
from .experiment import Desk, Done, Experiment
from .findings import Drawing, Findings, Mean, Sheet, mean, over, spread
from .newcomers import Newcomers
from .pictures import banded
from .table1 import grouped

SHARE, QUICK_SHARE = 0.2, 0.5  # of the clients train
PERSONAL = {"personal_epochs": [5], "personal_lr": [0.003, 0.01, 0.03]}  # options that a search scores


class Table2(Experiment):
    """Table 2."""

    title = "Table 2: new clients"
    claim = "New clients do best with FedABML after every number of fine-tuning epochs from 1 to 10."
    columns = ("cifar10-2", "cifar10-5")
    algorithms = ("fedavg-ft", "fedprox-ft", "perfedavg", "pfedme", "pfedbayes", "fedabml", "fedabml-plain")

    def cells(self, desk: Desk) -> list[Cell]:
        study = Newcomers(QUICK_SHARE if desk.ask.quick else SHARE)
        options = tuple({"personal_epochs": epochs} for epochs in paper.EPOCHS)
        search, made = Search("-new", study, PERSONAL), []
        whose = ("fedavg-ft",) if desk.ask.protocol == "tuned" else ()  # the paper's FedABML has no label level
        for column, _ in columns(desk, self.columns):
            found = rows(desk, column, self.algorithms, search)
            for name, config in lent(desk, found, whose).items():
                configs = [config.with_changes(seed=seed) for seed in desk.ask.seed_list]
                made += [Cell(f"{column} {name}", each, options, study=study) for each in configs]
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        protocol, groups = desk.ask.protocol, grouped(done)
        ours = {key: _accuracies(own) for key, own in groups.items()}
        here = list(dict.fromkeys(column for column, _ in groups))
        sheets, drawings, records, said = [], [], [], []
        for column in here:
            own = {name: values for (c, name), values in ours.items() if c == column}
            known = {name: paper.table2(name, column) for name in own}
            for name, values in own.items():
                for epochs, v, p in zip(paper.EPOCHS, values, known[name] or (None,) * len(values), strict=True):
                    record = {"column": column, "algorithm": name, "epochs": epochs, "accuracy": v[0], "half": v[1]}
                    records.append(record | {"paper": p, "difference": None if p is None else v[0] - p})
            title, head = COLUMNS[column].title, ["epochs", *map(str, paper.EPOCHS)]
            table = [[paper.name(name, protocol), *map(spread, values)] for name, values in own.items()]
            note = f"Accuracy of new clients in percent, mean over clients and {over(len(desk.ask.seed_list))}."
            sheets.append(Sheet(title, head, table, note))
            beside = lambda v, p: f"{v[0] - p:+.2f} ({p:.2f})"  # noqa: E731
            told = [(name, numbers) for name, numbers in known.items() if numbers]
            table = [[paper.name(name, protocol), *map(beside, own[name], numbers)] for name, numbers in told]
            note = "Ours less the paper's and, in brackets, the paper's."
            sheets += [Sheet(f"{title}: beside the paper", head, table, note)] if table else []
            drawings += [_curves(column, groups, desk, first) for first in (0, 1)]
            said.append(_verdict(column, own, protocol))
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _by_seed(own: Sequence[Done]) -> list[list[float]]:
    """In percent, a row per seed, a column per number of epochs."""
    return [[100 * s.summary["accuracy"] if not s.error else math.nan for s in d.result.scores] for d in own]


def _accuracies(own: Sequence[Done]) -> list[Mean]:
    return [mean(column) for column in zip(*_by_seed(own), strict=True)]


def _verdict(column: str, own: Mapping[str, Sequence[Mean]], protocol: str) -> str:
    """At which epochs each FedABML is ahead of all that are not one."""
    mine = [name for name in own if name.startswith("fedabml")]
    title = COLUMNS[column].title
    if not mine:
        return f"{title}: FedABML was not run."
    rivals = {name: values for name, values in own.items() if name not in mine}
    if not rivals:
        return f"{title}: no rival was run."
    words = f"{title}: {'; '.join(_lead(name, own[name], rivals, protocol) for name in mine)}."
    others = {name: values[1][0] for name, values in rivals.items() if not name.endswith(paper.LABELS)}
    if protocol == "tuned" and "fedabml" in mine and others:
        best = max(others, key=lambda name: others[name])
        words += (
            f" Before any {paper.name('fedabml', protocol)} has {own['fedabml'][0][0]:.2f}; the best rival without "
        )
        words += f"the label level after one, {paper.name(best, protocol)}, {others[best]:.2f}."
    return words


def _lead(name: str, own: Sequence[Mean], rivals: Mapping[str, Sequence[Mean]], protocol: str) -> str:
    first = [
        str(epochs)
        for i, epochs in enumerate(paper.EPOCHS)
        if all(own[i][0] > values[i][0] for values in rivals.values())
    ]
    return f"{paper.name(name, protocol)} is ahead of every rival after {', '.join(first) or 'no number of'} epochs"


def _curves(column: str, groups: Mapping[tuple[str, str], Sequence[Done]], desk: Desk, first: int) -> Drawing:
    """From so many epochs on: without any, most are so far behind that the rest could not be told apart."""
    here = paper.EPOCHS.index(first)

    def draw(look: Look) -> str:
        series = [
            banded(
                paper.name(name, desk.ask.protocol),
                paper.EPOCHS[here:],
                [[v / 100 for v in row[here:]] for row in _by_seed(own)],
            )
            for (c, name), own in groups.items()
            if c == column
        ]
        axes = Axis("epochs of fine-tuning", "whole"), Axis("accuracy of new clients", "percent")
        return line_chart(series, title=COLUMNS[column].title, x=axes[0], y=axes[1], look=look)

    part = "half" if desk.ask.quick else "a fifth"
    seeds = over(len(desk.ask.seed_list), " with its 95% band")
    reading = f"New clients personalise what {part} of the clients has learned; mean over {seeds}."
    mark, words = ("-fine-tuned", f", from {first} epoch on") if first else ("", "")
    return Drawing(f"new-clients-{column}{mark}", f"New clients, {COLUMNS[column].title}{words}", reading, draw)
