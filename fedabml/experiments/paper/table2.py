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

from ...report.charts import Axis, line_chart
from ...runs.config import JsonDict
from ..cell import Cell
from . import numbers as paper
from .experiment import Context, Done, Experiment, by_column
from .findings import NONE, Findings, Mean, Picture, Sheet, band, number, over
from .newcomers import Newcomers
from .settings import TITLES, Search, systems

SHARE, QUICK_SHARE = 0.2, 0.5  # of the clients train
FAR = 3  # points behind the best rival: drawn, it would hide how the others differ
PERSONAL = {"personal_epochs": [5], "personal_lr": [0.003, 0.01, 0.03]}  # options that a search scores
Row = Sequence[Mean]  # after every number of epochs, in percent or points
Rows = Mapping[str, Row]  # by method


class Table2(Experiment):
    """Table 2."""

    title = "Table 2: new clients"
    claim = "New clients do best with FedABML after every number of fine-tuning epochs from 1 to 10."
    columns = ("cifar10-2", "cifar10-5")
    algorithms = ("fedavg-ft", "fedprox-ft", "perfedavg", "pfedme", "pfedbayes", "fedabml", "fedabml-plain")

    def cells(self, context: Context) -> list[Cell]:
        study = Newcomers(QUICK_SHARE if context.request.quick else SHARE)
        options = tuple({"personal_epochs": epochs} for epochs in paper.EPOCHS)
        levels = ("fedavg-ft",) if context.request.protocol == "tuned" else ()  # the paper's FedABML has no label level
        return [
            cell
            for column, name, config in systems(context, self, levels=levels, search=Search("-new", study, PERSONAL))
            for cell in context.seeded(f"{column} {name}", config, personal=options, study=study)
        ]

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, groups in by_column(finished).items():
            means = {name: _means(cells) for name, cells in groups.items()}
            for name, row in means.items():
                paper_row = paper.table2(name, column) or (None,) * len(row)
                for epochs, value, p in zip(paper.EPOCHS, row, paper_row, strict=True):
                    record: JsonDict = {"column": column, "algorithm": name, "epochs": epochs, "accuracy": value}
                    records.append(record | {"half": value.half, "paper": p, "difference": p and value - p})
            sheets += _sheets(context, column, means)
            pictures += [_accuracies(context, column, means), *_distances(context, column, means)]
            conclusions += [_verdict(context, column, means), *_failed(context, column, means)]
        return Findings(conclusions, sheets, pictures, records)


def _means(cells: Sequence[Done]) -> list[Mean]:
    """Return the mean accuracy after every number of epochs over the seeds where personalising worked."""
    runs = {d.result.seed: d.result.scores for d in cells}
    return [
        Mean({seed: 100 * scores[i].summary["accuracy"] for seed, scores in runs.items() if not scores[i].error})
        for i in range(len(paper.EPOCHS))
    ]


def _ours(name: str) -> bool:
    return name.startswith("fedabml")


def _differences(row: Row, other: Row) -> list[Mean]:
    """Return the means of the differences of two methods, over the seeds that both have."""
    return [a.minus(b) for a, b in zip(row, other, strict=True)]


def _leads(means: Rows) -> dict[str, Rows]:
    """Return the leads of every FedABML over all other methods."""
    rivals = {name: row for name, row in means.items() if not _ours(name)}
    ours = {name: row for name, row in means.items() if _ours(name)}
    return {name: {rival: _differences(row, their) for rival, their in rivals.items()} for name, row in ours.items()}


def _sheets(context: Context, column: str, means: Rows) -> list[Sheet]:
    """Return the accuracies of a column, the leads over the best rival, and the differences to the paper."""
    title, seeds = TITLES[column], over(len(context.request.seed_list))
    paper_rows = {name: row for name in means if (row := paper.table2(name, column))}
    accuracies = {name: [number(value) for value in row] for name, row in means.items()}
    leads = {name: _smallest(context, lead) for name, lead in _leads(means).items() if lead}
    beside = {
        name: [f"{value - p:+.2f} ({p:.2f})" for value, p in zip(means[name], row, strict=True)]
        for name, row in paper_rows.items()
    }
    lead_note = "FedABML less its best rival, who is named, in points: differences of the same partitions, mean over "
    tables = (
        ("", accuracies, f"Accuracy of new clients in percent, mean over clients and {seeds}."),
        (": ahead of the best rival", leads, f"{lead_note}{seeds}."),
        (": beside the paper", beside, "Ours less the paper's and, in brackets, the paper's."),
    )
    head = ["epochs", *map(str, paper.EPOCHS)]
    return [
        Sheet(title + suffix, head, [[context.name(name), *cells] for name, cells in table.items()], [note])
        for suffix, table, note in tables
    ]


def _smallest(context: Context, leads: Rows) -> list[str]:
    """Return the smallest lead after every number of epochs, and over whom."""
    texts = []
    for i in range(len(paper.EPOCHS)):
        finite_leads = {name: row[i] for name, row in leads.items() if math.isfinite(row[i])}
        name = min(finite_leads, key=lambda name: finite_leads[name], default="")
        texts.append(
            f"{'+' * (finite_leads[name] >= 0)}{number(finite_leads[name])} ({context.name(name)})" if name else NONE
        )
    return texts


# -- sentences ------------------------------------------------------------------------------------------------------
def _failed(context: Context, column: str, means: Rows) -> list[str]:
    """Name the methods whose means are over fewer seeds."""
    texts = []
    for name, row in means.items():
        seeds = {seed for value in row for seed in value.by_seed}
        if failed := sum(any(seed not in value.by_seed for value in row) for seed in seeds):
            texts.append(f"{context.name(name)} in {failed} of {len(seeds)} runs")
    text = f"{TITLES[column]}: personalising diverged for {', '.join(texts)}, after some numbers of epochs; these "
    return [text + "are left out there."] if texts else []


def _verdict(context: Context, column: str, means: Rows) -> str:
    """Say after which numbers of epochs each FedABML is ahead of all other methods."""
    title, leads = TITLES[column], _leads(means)
    if not leads:
        return f"{title}: FedABML was not run."
    if not any(leads.values()):
        return f"{title}: no rival was run."
    text = f"{title}: {'; '.join(_ahead(context, name, lead) for name, lead in leads.items())}."
    none, one = map(paper.EPOCHS.index, (0, 1))
    others = {name: row[one] for name, row in means.items() if not _ours(name) and not name.endswith(paper.LABELS)}
    others = {name: value for name, value in others.items() if math.isfinite(value)}
    if context.request.protocol == "tuned" and "fedabml" in leads and others:
        best = max(others, key=lambda name: others[name])
        text += f" Before any {context.name('fedabml')} has {number(float(means['fedabml'][none]))}; the best rival "
        text += f"without the label level after one, {context.name(best)}, {others[best]:.2f}."
    return text


def _ahead(context: Context, name: str, leads: Rows) -> str:
    leads_by_epochs = {
        str(epochs): [row[i] for row in leads.values() if math.isfinite(row[i])]
        for i, epochs in enumerate(paper.EPOCHS)
    }
    first = [
        epochs
        for epochs, epoch_leads in leads_by_epochs.items()
        if epoch_leads and all(lead > 0 for lead in epoch_leads)
    ]
    significant = [
        e
        for e, epoch_leads in leads_by_epochs.items()
        if epoch_leads and all(v.half is not None and v > v.half for v in epoch_leads)
    ]
    text = f"{context.name(name)} is ahead of every rival after {', '.join(first) or 'no number of'} epochs"
    if not first or not any(lead.half is not None for epoch_leads in leads_by_epochs.values() for lead in epoch_leads):
        return text
    after = "all of them" if significant == first else ", ".join(significant) or "none"
    return f"{text}, by more than the 95% interval after {after}"


# -- pictures -------------------------------------------------------------------------------------------------------
def _axes(y: Axis, column: str) -> JsonDict:
    return {"x": Axis("epochs of fine-tuning", "whole"), "y": y, "title": TITLES[column]}


def _accuracies(context: Context, column: str, means: Rows) -> Picture:
    """Draw the accuracy of every method against the epochs."""
    series = []
    for name, row in means.items():
        shares = [Mean({seed: percent / 100 for seed, percent in value.by_seed.items()}) for value in row]
        series.append(band(context.name(name), paper.EPOCHS, shares, greatest=1.0))
    seeds = over(len(context.request.seed_list), " with its 95% band")
    part = "half" if context.request.quick else "a fifth"
    caption = f"New clients personalise what {part} of the clients has learned; mean over {seeds}."
    axes = _axes(Axis("accuracy of new clients", "percent"), column)
    return Picture(f"new-clients-{column}", f"New clients, {TITLES[column]}", caption, line_chart, series, axes)


def _distances(context: Context, column: str, means: Rows) -> list[Picture]:
    """Draw how far each is from the best rival, from one epoch on: accuracies alone lie too close to tell apart."""
    start = paper.EPOCHS.index(1)
    levels = {name: row[start:] for name, row in means.items() if not _ours(name)}
    levels = {name: row for name, row in levels.items() if all(map(math.isfinite, row))}
    if not levels:
        return []
    best = max(levels, key=lambda name: fmean(levels[name]))
    ahead = {name: _differences(row[start:], levels[best]) for name, row in means.items()}
    finite_rows = {name: [value for value in row if math.isfinite(value)] for name, row in ahead.items()}
    far = [name for name, row in finite_rows.items() if row and max(row) < -FAR]
    if not any(row and name not in (best, *far) for name, row in finite_rows.items()):
        return []  # the best rival alone is no picture
    near = {name: [value if value >= -FAR else Mean({}) for value in row] for name, row in ahead.items()}
    series = [band(context.name(name), paper.EPOCHS[start:], row, least=-math.inf) for name, row in near.items()]
    seeds = over(len(context.request.seed_list), " with its 95% band")
    caption = f"Differences of the same partitions, mean over {seeds}. {context.name(best)} is the best rival; what is "
    caption += f"more than {FAR} points behind is not drawn"
    caption += f" (nowhere: {', '.join(map(context.name, far))})." if far else "."
    heading = f"New clients beside the best rival, {TITLES[column]}"
    axes = _axes(Axis(f"points ahead of {context.name(best)}"), column)
    return [Picture(f"new-clients-{column}-ahead", heading, caption, line_chart, series, axes)]
