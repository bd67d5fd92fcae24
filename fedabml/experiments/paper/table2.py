"""Table 2: new clients. A fifth of the clients train, two a round; the others then personalise what was learned.

Reported is the test accuracy of the new clients after 0, 1, 2, 3, 4, 5, 8 and 10 epochs of fine-tuning. The paper
claims that FedABML is first after every number of epochs from 1 on. Under `tuned` FedAvg also has a row with the label
level, which shows what that alone brings. Every method is tuned there as it is used here: a fifth of the clients train,
and the others' validation data score it after five epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ...report.canvas import Axis
from ...report.charts import line_chart
from ...runs.config import Table
from ..cell import Cell
from ..statistics import mean
from . import numbers as paper
from .experiment import Context, Done, Experiment, by_column
from .findings import NONE, Findings, Sheet, number, over, spread
from .newcomers import Newcomers
from .pictures import Mean, Picture, banded, banded_means, picture
from .settings import TITLES, Search, columns, rows, with_label_level

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

    def cells(self, context: Context) -> list[Cell]:
        study = Newcomers(QUICK_SHARE if context.request.quick else SHARE)
        options = tuple({"personal_epochs": epochs} for epochs in paper.EPOCHS)
        search, made = Search("-new", study, PERSONAL), []
        whose = ("fedavg-ft",) if context.request.protocol == "tuned" else ()  # the paper's FedABML has no label level
        for column in columns(context, self.columns):
            found = rows(context, column, self.algorithms, search)
            for name, config in with_label_level(context, found, whose).items():
                made += context.seeded(f"{column} {name}", config, personal=options, study=study)
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, groups in by_column(done).items():
            seeded = {name: _by_seed(own) for name, own in groups.items()}
            means = {name: _means(runs) for name, runs in seeded.items()}
            leads = _leads(seeded)
            for name, values in means.items():
                known = paper.table2(name, column) or (None,) * len(values)
                for epochs, (value, half), p in zip(paper.EPOCHS, values, known, strict=True):
                    record = {"column": column, "algorithm": name, "epochs": epochs, "accuracy": value, "half": half}
                    records.append(record | {"paper": p, "difference": None if p is None else value - p})
            sheets += _sheets(context, column, means, leads)
            pictures += [_accuracies(context, column, seeded), *_distances(context, column, seeded)]
            conclusions += [_verdict(context, column, means, leads), *_failed(context, column, seeded)]
        return Findings(conclusions, sheets, pictures, records)


def _by_seed(own: Sequence[Done]) -> Seeded:
    return {
        d.cell.config.seed: [100 * s.summary["accuracy"] if not s.error else math.nan for s in d.result.scores]
        for d in own
    }


def _ours(name: str) -> bool:
    return name.startswith("fedabml")


def _means(runs: Seeded) -> list[Mean]:
    """Return the mean after every number of epochs over the seeds where personalising worked, else NaN."""
    columns = [[run[i] for run in runs.values() if math.isfinite(run[i])] for i in range(len(paper.EPOCHS))]
    return [mean(values) if values else (math.nan, None) for values in columns]


def _differences(own: Seeded, other: Seeded) -> list[Mean]:
    """Return the means of the differences of two methods, over the seeds that both have."""
    both = sorted(own.keys() & other.keys())
    return _means({seed: [a - b for a, b in zip(own[seed], other[seed], strict=True)] for seed in both})


def _leads(seeded: Mapping[str, Seeded]) -> dict[str, Leads]:
    """Return the leads of every FedABML over all other methods."""
    rivals = {name: runs for name, runs in seeded.items() if not _ours(name)}
    return {
        name: {rival: _differences(own, theirs) for rival, theirs in rivals.items()}
        for name, own in seeded.items()
        if _ours(name)
    }


def _sheets(
    context: Context, column: str, means: Mapping[str, Sequence[Mean]], leads: Mapping[str, Leads]
) -> list[Sheet]:
    """Return the accuracies of a column, the leads over the best rival, and the differences to the paper."""
    title, head, seeds = TITLES[column], ["epochs", *map(str, paper.EPOCHS)], over(len(context.request.seed_list))
    known = {name: row for name in means if (row := paper.table2(name, column))}
    tables = [
        (
            title,
            {name: list(map(spread, values)) for name, values in means.items()},
            f"Accuracy of new clients in percent, mean over clients and {seeds}.",
        ),
        (
            f"{title}: ahead of the best rival",
            {name: _smallest(context, each) for name, each in leads.items() if each},
            f"FedABML less its best rival, who is named, in points: differences of the same partitions, mean over "
            f"{seeds}.",
        ),
        (
            f"{title}: beside the paper",
            {
                name: [f"{value - p:+.2f} ({p:.2f})" for (value, _), p in zip(means[name], row, strict=True)]
                for name, row in known.items()
            },
            "Ours less the paper's and, in brackets, the paper's.",
        ),
    ]
    return [
        Sheet(heading, head, [[context.name(name), *cells] for name, cells in table.items()], [note])
        for heading, table, note in tables
        if table
    ]


def _smallest(context: Context, leads: Leads) -> list[str]:
    """Return the smallest lead after every number of epochs, and over whom."""
    words = []
    for i in range(len(paper.EPOCHS)):
        here = {name: each[i] for name, each in leads.items() if math.isfinite(each[i][0])}
        name = min(here, key=lambda name: here[name][0], default="")
        sign = "+" if name and here[name][0] >= 0 else ""
        words.append(f"{sign}{spread(here[name])} ({context.name(name)})" if name else NONE)
    return words


# -- sentences ------------------------------------------------------------------------------------------------------
def _failed(context: Context, column: str, seeded: Mapping[str, Seeded]) -> list[str]:
    """Name the methods whose means are over fewer seeds."""
    bad = {name: sum(not all(map(math.isfinite, run)) for run in runs.values()) for name, runs in seeded.items()}
    words = [f"{context.name(name)} in {n} of {len(seeded[name])} runs" for name, n in bad.items() if n]
    text = f"{TITLES[column]}: personalising diverged for {', '.join(words)}, after some numbers of epochs; these "
    return [text + "are left out there."] if words else []


def _verdict(context: Context, column: str, means: Mapping[str, Sequence[Mean]], leads: Mapping[str, Leads]) -> str:
    """Say after which numbers of epochs each FedABML is ahead of all other methods."""
    title = TITLES[column]
    if not leads:
        return f"{title}: FedABML was not run."
    if not any(leads.values()):
        return f"{title}: no rival was run."
    words = f"{title}: {'; '.join(_ahead(context, name, each) for name, each in leads.items())}."
    none, one = map(paper.EPOCHS.index, (0, 1))
    others = {name: v[one][0] for name, v in means.items() if not _ours(name) and not name.endswith(paper.LABELS)}
    others = {name: value for name, value in others.items() if math.isfinite(value)}
    if context.request.protocol == "tuned" and "fedabml" in leads and others:
        best = max(others, key=lambda name: others[name])
        words += f" Before any {context.name('fedabml')} has {number(means['fedabml'][none][0])}; the best rival "
        words += f"without the label level after one, {context.name(best)}, {others[best]:.2f}."
    return words


def _ahead(context: Context, name: str, leads: Leads) -> str:
    known = {
        epochs: [each[i] for each in leads.values() if math.isfinite(each[i][0])]
        for i, epochs in enumerate(paper.EPOCHS)
    }
    columns = [(str(epochs), each) for epochs, each in known.items() if each]
    first = [epochs for epochs, each in columns if all(lead > 0 for lead, _ in each)]
    sure = [epochs for epochs, each in columns if all(half is not None and lead > half for lead, half in each)]
    words = f"{context.name(name)} is ahead of every rival after {', '.join(first) or 'no number of'} epochs"
    if not first or not any(half is not None for _, each in columns for _, half in each):
        return words
    after = "all of them" if sure == first else ", ".join(sure) or "none"
    return f"{words}, by more than the 95% interval after {after}"


# -- pictures -------------------------------------------------------------------------------------------------------
def _accuracies(context: Context, column: str, seeded: Mapping[str, Seeded]) -> Picture:
    """Draw the accuracy of every method against the epochs."""
    shares = {name: [[v / 100 for v in run] for run in runs.values()] for name, runs in seeded.items()}
    series = [banded(context.name(name), paper.EPOCHS, rows, most=1.0) for name, rows in shares.items()]
    axes: Table = {"x": Axis("epochs of fine-tuning", "whole"), "y": Axis("accuracy of new clients", "percent")}
    seeds = over(len(context.request.seed_list), " with its 95% band")
    part = "half" if context.request.quick else "a fifth"
    caption = f"New clients personalise what {part} of the clients has learned; mean over {seeds}."
    heading = f"New clients, {TITLES[column]}"
    return picture(f"new-clients-{column}", heading, caption, line_chart, series, title=TITLES[column], **axes)


def _distances(context: Context, column: str, seeded: Mapping[str, Seeded]) -> list[Picture]:
    """Draw how far each is from the best rival, from one epoch on: accuracies alone lie too close to tell apart."""
    start = paper.EPOCHS.index(1)
    levels = {name: [m for m, _ in _means(runs)[start:]] for name, runs in seeded.items() if not _ours(name)}
    levels = {name: values for name, values in levels.items() if all(map(math.isfinite, values))}
    if not levels:
        return []
    best = max(levels, key=lambda name: fmean(levels[name]))
    means = {name: _differences(runs, seeded[best])[start:] for name, runs in seeded.items()}
    known = {name: [m for m, _ in each if math.isfinite(m)] for name, each in means.items()}
    far = [name for name, each in known.items() if each and max(each) < -FAR]
    if not any(each and name not in (best, *far) for name, each in known.items()):
        return []  # the best rival alone is no picture
    near = {name: [m if m[0] >= -FAR else (math.nan, None) for m in each] for name, each in means.items()}
    series = [banded_means(context.name(name), paper.EPOCHS[start:], each) for name, each in near.items()]
    axes: Table = {"x": Axis("epochs of fine-tuning", "whole"), "y": Axis(f"points ahead of {context.name(best)}")}
    seeds = over(len(context.request.seed_list), " with its 95% band")
    caption = f"Differences of the same partitions, mean over {seeds}. {context.name(best)} is the best rival; what is "
    caption += f"more than {FAR} points behind is not drawn"
    caption += f" (nowhere: {', '.join(map(context.name, far))})." if far else "."
    heading = f"New clients beside the best rival, {TITLES[column]}"
    name = f"new-clients-{column}-ahead"
    return [picture(name, heading, caption, line_chart, series, title=TITLES[column], **axes)]
