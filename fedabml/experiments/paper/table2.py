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

from ...report.canvas import line_chart
from ...report.frame import Axis, Look
from ..cell import Cell
from ..statistics import mean
from . import numbers as paper
from .columns import COLUMNS, Search, columns, lent, rows
from .experiment import Desk, Done, Experiment
from .findings import NONE, Drawing, Findings, Mean, Sheet, number, over, spread
from .newcomers import Newcomers
from .pictures import banded, banded_means
from .table1 import grouped

SHARE, QUICK_SHARE = 0.2, 0.5  # of the clients train
FAR = 3  # points behind the best rival: drawn, it would hide how the others differ
PERSONAL = {"personal_epochs": [5], "personal_lr": [0.003, 0.01, 0.03]}  # options that a search scores
Seeded = Mapping[int, Sequence[float]]  # by seed: accuracy in percent after every number of epochs
Leads = Mapping[str, Sequence[Mean]]  # over every rival, after every number of epochs


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
            own = {name: _means(runs) for name, runs in seeded.items()}
            known = {name: paper.table2(name, column) for name in own}
            for name, values in own.items():
                for epochs, v, p in zip(paper.EPOCHS, values, known[name] or (None,) * len(values), strict=True):
                    record = {"column": column, "algorithm": name, "epochs": epochs, "accuracy": v[0], "half": v[1]}
                    records.append(record | {"paper": p, "difference": None if p is None else v[0] - p})
            title, head = COLUMNS[column].title, ["epochs", *map(str, paper.EPOCHS)]
            table = [[paper.name(name, protocol), *map(spread, values)] for name, values in own.items()]
            note = f"Accuracy of new clients in percent, mean over clients and {over(len(desk.ask.seed_list))}."
            sheets.append(Sheet(title, head, table, note))
            leads = _leads(seeded)
            table = [[paper.name(name, protocol), *_smallest(each, protocol)] for name, each in leads.items() if each]
            note = "FedABML less its best rival, who is named, in points: differences of the same partitions, "
            note += f"mean over {over(len(desk.ask.seed_list))}."
            sheets += [Sheet(f"{title}: ahead of the best rival", head, table, note)] if table else []
            beside = lambda v, p: f"{v[0] - p:+.2f} ({p:.2f})"  # noqa: E731
            told = [(name, numbers) for name, numbers in known.items() if numbers]
            table = [[paper.name(name, protocol), *map(beside, own[name], numbers)] for name, numbers in told]
            note = "Ours less the paper's and, in brackets, the paper's."
            sheets += [Sheet(f"{title}: beside the paper", head, table, note)] if table else []
            drawings.append(_accuracies(column, seeded, desk))
            drawings += _distances(column, seeded, desk)
            said += [_verdict(column, own, leads, protocol), *_failed(column, seeded, protocol)]
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _by_seed(own: Sequence[Done]) -> Seeded:
    return {
        d.cell.config.seed: [100 * s.summary["accuracy"] if not s.error else math.nan for s in d.result.scores]
        for d in own
    }


def _ours(name: str) -> bool:
    return name.startswith("fedabml")


def _means(runs: Seeded) -> list[Mean]:
    """After every number of epochs, over the seeds where personalising did not fail; NaN where it always did."""
    columns = [[run[i] for run in runs.values() if math.isfinite(run[i])] for i in range(len(paper.EPOCHS))]
    return [mean(values) if values else (math.nan, None) for values in columns]


def _differences(own: Seeded, other: Seeded) -> list[Mean]:
    """The same of differences, over the seeds that both have."""
    both = sorted(own.keys() & other.keys())
    return _means({seed: [a - b for a, b in zip(own[seed], other[seed], strict=True)] for seed in both})


def _failed(column: str, seeded: Mapping[str, Seeded], protocol: str) -> list[str]:
    """Whose means are over fewer seeds, in words."""
    bad = {name: sum(not all(map(math.isfinite, run)) for run in runs.values()) for name, runs in seeded.items()}
    words = [f"{paper.name(name, protocol)} in {n} of {len(seeded[name])} runs" for name, n in bad.items() if n]
    said = (
        f"{COLUMNS[column].title}: personalising diverged for {', '.join(words)}, after some numbers of epochs; these "
    )
    return [said + "are left out there."] if words else []


def _leads(seeded: Mapping[str, Seeded]) -> dict[str, Leads]:
    """Every FedABML's over all that are not one."""
    rivals = {name: runs for name, runs in seeded.items() if not _ours(name)}
    return {
        name: {rival: _differences(own, theirs) for rival, theirs in rivals.items()}
        for name, own in seeded.items()
        if _ours(name)
    }


def _smallest(leads: Leads, protocol: str) -> list[str]:
    """The smallest lead after every number of epochs, and over whom."""
    words = []
    for i in range(len(paper.EPOCHS)):
        here = {name: each[i] for name, each in leads.items() if math.isfinite(each[i][0])}
        name = min(here, key=lambda name: here[name][0], default="")
        sign = "+" if name and here[name][0] >= 0 else ""
        words.append(f"{sign}{spread(here[name])} ({paper.name(name, protocol)})" if name else NONE)
    return words


def _verdict(column: str, own: Mapping[str, Sequence[Mean]], leads: Mapping[str, Leads], protocol: str) -> str:
    """At which epochs each FedABML is ahead of all that are not one."""
    title = COLUMNS[column].title
    if not leads:
        return f"{title}: FedABML was not run."
    if not any(leads.values()):
        return f"{title}: no rival was run."
    words = f"{title}: {'; '.join(_ahead(name, each, protocol) for name, each in leads.items())}."
    none, one = map(paper.EPOCHS.index, (0, 1))
    others = {name: v[one][0] for name, v in own.items() if not _ours(name) and not name.endswith(paper.LABELS)}
    others = {name: value for name, value in others.items() if math.isfinite(value)}
    if protocol == "tuned" and "fedabml" in leads and others:
        best = max(others, key=lambda name: others[name])
        words += f" Before any {paper.name('fedabml', protocol)} has {number(own['fedabml'][none][0])}; the best rival "
        words += f"without the label level after one, {paper.name(best, protocol)}, {others[best]:.2f}."
    return words


def _ahead(name: str, leads: Leads, protocol: str) -> str:
    known = {
        epochs: [each[i] for each in leads.values() if math.isfinite(each[i][0])]
        for i, epochs in enumerate(paper.EPOCHS)
    }
    columns = [(str(epochs), each) for epochs, each in known.items() if each]
    first = [epochs for epochs, each in columns if all(lead > 0 for lead, _ in each)]
    sure = [epochs for epochs, each in columns if all(half is not None and lead > half for lead, half in each)]
    words = f"{paper.name(name, protocol)} is ahead of every rival after {', '.join(first) or 'no number of'} epochs"
    if not first or not any(half is not None for _, each in columns for _, half in each):
        return words
    return (
        f"{words}, by more than the 95% interval after {'all of them' if sure == first else ', '.join(sure) or 'none'}"
    )


def _accuracies(column: str, seeded: Mapping[str, Seeded], desk: Desk) -> Drawing:
    def draw(look: Look) -> str:
        shares = {name: [[v / 100 for v in run] for run in runs.values()] for name, runs in seeded.items()}
        names = {name: paper.name(name, desk.ask.protocol) for name in seeded}
        series = [banded(names[name], paper.EPOCHS, rows, most=1.0) for name, rows in shares.items()]
        axes = Axis("epochs of fine-tuning", "whole"), Axis("accuracy of new clients", "percent")
        return line_chart(series, title=COLUMNS[column].title, x=axes[0], y=axes[1], look=look)

    part = "half" if desk.ask.quick else "a fifth"
    seeds = over(len(desk.ask.seed_list), " with its 95% band")
    reading = f"New clients personalise what {part} of the clients has learned; mean over {seeds}."
    return Drawing(f"new-clients-{column}", f"New clients, {COLUMNS[column].title}", reading, draw)


def _distances(column: str, seeded: Mapping[str, Seeded], desk: Desk) -> list[Drawing]:
    """How far each is from the best rival, from one epoch on: among accuracies most could not be told apart."""
    start, protocol = paper.EPOCHS.index(1), desk.ask.protocol
    levels = {name: [m for m, _ in _means(runs)[start:]] for name, runs in seeded.items() if not _ours(name)}
    levels = {name: values for name, values in levels.items() if all(map(math.isfinite, values))}
    if not levels:
        return []
    best = max(levels, key=lambda name: fmean(levels[name]))
    means = {name: _differences(runs, seeded[best])[start:] for name, runs in seeded.items()}
    drawn = {name: [m if m[0] >= -FAR else (math.nan, None) for m in each] for name, each in means.items()}
    known = {name: [m for m, _ in each if math.isfinite(m)] for name, each in means.items()}
    far = [name for name, each in known.items() if each and max(each) < -FAR]
    if not any(each and name not in (best, *far) for name, each in known.items()):
        return []  # the best rival alone is no picture

    def draw(look: Look) -> str:
        series = [banded_means(paper.name(name, protocol), paper.EPOCHS[start:], each) for name, each in drawn.items()]
        axes = Axis("epochs of fine-tuning", "whole"), Axis(f"points ahead of {paper.name(best, protocol)}")
        return line_chart(series, title=COLUMNS[column].title, x=axes[0], y=axes[1], look=look)

    reading = f"Differences of the same partitions, mean over {over(len(desk.ask.seed_list), ' with its 95% band')}. "
    reading += f"{paper.name(best, protocol)} is the best rival; what is more than {FAR} points behind is not drawn"
    reading += f" (nowhere: {', '.join(paper.name(name, protocol) for name in far)})." if far else "."
    heading = f"New clients beside the best rival, {COLUMNS[column].title}"
    return [Drawing(f"new-clients-{column}-ahead", heading, reading, draw)]
