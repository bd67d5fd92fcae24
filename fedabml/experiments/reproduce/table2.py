"""Table 2: new clients. A fifth of the clients train, two a round; the others then personalise what was learned.

Reported is the test accuracy of the new clients after 0, 1, 2, 3, 4, 5, 8 and 10 epochs of fine-tuning. The paper
claims that FedABML is first after every number of epochs from 1 on. Under `tuned` FedAvg is also lent the label level,
so that it shows what that alone brings. Every method is tuned there as it is used here: a fifth of the clients train,
and the others' validation data score it after five epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ...report.frame import Axis, Look
from ...report.svg import line_chart
from .. import paper
from ..cells import Cell
from .columns import COLUMNS, Search, columns, lent, rows
from .experiment import Desk, Done, Experiment
from .findings import NONE, Drawing, Findings, Mean, Sheet, mean, over, spread
from .newcomers import Newcomers
from .pictures import banded
from .table1 import grouped

SHARE, QUICK_SHARE = 0.2, 0.5  # of the clients train
FAR = 8  # points behind the best rival: drawn beside the others, it would hide how they differ
PERSONAL = {"personal_epochs": [5], "personal_lr": [0.003, 0.01, 0.03]}  # options that a search scores
Seeded = Mapping[int, Sequence[float]]  # by seed: accuracy in percent after every number of epochs


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
        here = list(dict.fromkeys(column for column, _ in groups))
        sheets, drawings, records, said = [], [], [], []
        for column in here:
            seeded = {name: _by_seed(found) for (c, name), found in groups.items() if c == column}
            own = {name: [mean(each) for each in zip(*rows.values(), strict=True)] for name, rows in seeded.items()}
            known = {name: paper.table2(name, column) for name in own}
            for name, values in own.items():
                for epochs, v, p in zip(paper.EPOCHS, values, known[name] or (None,) * len(values), strict=True):
                    record = {"column": column, "algorithm": name, "epochs": epochs, "accuracy": v[0], "half": v[1]}
                    records.append(record | {"paper": p, "difference": None if p is None else v[0] - p})
            title, head = COLUMNS[column].title, ["epochs", *map(str, paper.EPOCHS)]
            table = [[paper.name(name, protocol), *map(spread, values)] for name, values in own.items()]
            note = f"Accuracy of new clients in percent, mean over clients and {over(len(desk.ask.seed_list))}."
            sheets.append(Sheet(title, head, table, note))
            mine, rivals = _sides(seeded)
            if mine and rivals:
                table = [[paper.name(name, protocol), *_leads(mine[name], rivals, protocol)] for name in mine]
                note = "FedABML less its best rival, who is named, in points: differences of the same partitions, "
                note += f"mean over {over(len(desk.ask.seed_list))}."
                sheets.append(Sheet(f"{title}: ahead of the best rival", head, table, note))
            beside = lambda v, p: f"{v[0] - p:+.2f} ({p:.2f})"  # noqa: E731
            told = [(name, numbers) for name, numbers in known.items() if numbers]
            table = [[paper.name(name, protocol), *map(beside, own[name], numbers)] for name, numbers in told]
            note = "Ours less the paper's and, in brackets, the paper's."
            sheets += [Sheet(f"{title}: beside the paper", head, table, note)] if table else []
            drawings += _drawings(column, seeded, desk)
            said.append(_verdict(column, seeded, protocol))
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _by_seed(own: Sequence[Done]) -> Seeded:
    return {
        d.cell.config.seed: [100 * s.summary["accuracy"] if not s.error else math.nan for s in d.result.scores]
        for d in own
    }


def _sides(seeded: Mapping[str, Seeded]) -> tuple[dict[str, Seeded], dict[str, Seeded]]:
    """The FedABMLs, and all that are not one."""
    mine = {name: rows for name, rows in seeded.items() if name.startswith("fedabml")}
    return mine, {name: rows for name, rows in seeded.items() if name not in mine}


def _less(own: Seeded, other: Seeded) -> list[list[float]]:
    """The differences, a row per seed that both have, but for runs that failed."""
    both = sorted(own.keys() & other.keys())
    rows = [[a - b for a, b in zip(own[seed], other[seed], strict=True)] for seed in both]
    return [row for row in rows if all(map(math.isfinite, row))]


def _ahead(own: Seeded, rivals: Mapping[str, Seeded], place: int) -> dict[str, Mean]:
    """The leads over every rival after one number of epochs, over seeds that both have."""
    rows = {name: _less(own, theirs) for name, theirs in rivals.items()}
    return {name: mean([row[place] for row in each]) for name, each in rows.items() if each}


def _leads(own: Seeded, rivals: Mapping[str, Seeded], protocol: str) -> list[str]:
    """The smallest lead after every number of epochs, and over whom."""
    words = []
    for place in range(len(paper.EPOCHS)):
        ahead = _ahead(own, rivals, place)
        name = min(ahead, key=lambda name: ahead[name][0], default=None)
        words.append(NONE if name is None else f"{_signed(ahead[name])} ({paper.name(name, protocol)})")
    return words


def _signed(lead: Mean) -> str:
    return ("+" if lead[0] >= 0 else "") + spread(lead)


def _verdict(column: str, seeded: Mapping[str, Seeded], protocol: str) -> str:
    """At which epochs each FedABML is ahead of all that are not one."""
    title, (mine, rivals) = COLUMNS[column].title, _sides(seeded)
    if not mine:
        return f"{title}: FedABML was not run."
    if not rivals:
        return f"{title}: no rival was run."
    words = f"{title}: {'; '.join(_lead(name, mine[name], rivals, protocol) for name in mine)}."
    after = paper.EPOCHS.index(1)
    others = {
        name: mean([row[after] for row in rows.values()])[0]
        for name, rows in rivals.items()
        if not name.endswith(paper.LABELS)
    }
    if protocol == "tuned" and "fedabml" in mine and others:
        best = max(others, key=lambda name: others[name])
        before = mean([row[0] for row in mine["fedabml"].values()])[0]
        words += f" Before any {paper.name('fedabml', protocol)} has {before:.2f}; the best rival without "
        words += f"the label level after one, {paper.name(best, protocol)}, {others[best]:.2f}."
    return words


def _lead(name: str, own: Seeded, rivals: Mapping[str, Seeded], protocol: str) -> str:
    leads = {epochs: list(_ahead(own, rivals, i).values()) for i, epochs in enumerate(paper.EPOCHS)}
    first = [epochs for epochs, each in leads.items() if each and all(middle > 0 for middle, _ in each)]
    sure = [epochs for epochs in first if all(half is not None and middle > half for middle, half in leads[epochs])]
    after, told = (", ".join(map(str, epochs)) for epochs in (first, sure))
    words = f"{paper.name(name, protocol)} is ahead of every rival after {after or 'no number of'} epochs"
    if not first or any(half is None for each in leads.values() for _, half in each):
        return words
    return f"{words}, by more than the 95% interval after {'all of them' if sure == first else told or 'none'}"


def _drawings(column: str, seeded: Mapping[str, Seeded], desk: Desk) -> list[Drawing]:
    """Accuracies, and from one epoch on how far each is from the best rival, but for those that are far behind."""
    title, protocol, after = COLUMNS[column].title, desk.ask.protocol, paper.EPOCHS.index(1)
    level = {name: [fmean(each) for each in zip(*rows.values(), strict=True)][after:] for name, rows in seeded.items()}
    rivals = [name for name in _sides(seeded)[1] if all(map(math.isfinite, level[name]))]
    best = max(rivals, key=lambda name: fmean(level[name]), default=None)
    far = [name for name in level if best and min(a - b for a, b in zip(level[name], level[best], strict=True)) < -FAR]
    names = [name for name in seeded if name not in far] + far  # so that a colour means the same in both
    epochs = Axis("epochs of fine-tuning", "whole")

    def accuracies(look: Look) -> str:
        rows = {name: [[v / 100 for v in row] for row in seeded[name].values()] for name in names}
        series = [banded(paper.name(name, protocol), paper.EPOCHS, rows[name]) for name in names]
        return line_chart(series, title=title, x=epochs, y=Axis("accuracy of new clients", "percent"), look=look)

    def leads(look: Look) -> str:
        near = {name: _less(seeded[name], seeded[best]) for name in names if name not in far} if best else {}
        series = [
            banded(paper.name(name, protocol), paper.EPOCHS[after:], [row[after:] for row in rows], signed=True)
            for name, rows in near.items()
        ]
        points = Axis(f"points ahead of {paper.name(best or '', protocol)}")
        return line_chart(series, title=title, x=epochs, y=points, look=look)

    part = "half" if desk.ask.quick else "a fifth"
    seeds = over(len(desk.ask.seed_list), " with its 95% band")
    reading = f"New clients personalise what {part} of the clients has learned; mean over {seeds}."
    drawings = [Drawing(f"new-clients-{column}", f"New clients, {title}", reading, accuracies)]
    if best is None or len(names) - len(far) < 2:
        return drawings
    reading = f"Differences of the same partitions, mean over {seeds}; {paper.name(best, protocol)} is the best rival."
    if far:
        whose = ", ".join(paper.name(name, protocol) for name in far)
        reading += f" Left out, being more than {FAR} points behind it somewhere: {whose}."
    return [
        *drawings,
        Drawing(f"new-clients-{column}-ahead", f"New clients beside the best rival, {title}", reading, leads),
    ]
