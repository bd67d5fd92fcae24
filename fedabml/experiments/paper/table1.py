"""Table 1: every system on every column, personal test accuracy, mean over clients and seeds, beside the paper's.

Under `paper` a system is scored as the paper does: the all-client mean of the last ten rounds, and the fine-tuned ones
(+FT, FedBABU) after training. Under `tuned` all are scored after training, and FedABML comes twice: as the paper has
it, and with the label level. The paper claims that FedABML is first in every column but the first, where pFedBayes is
ahead by 0.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from ...report import figures
from ...report.canvas import Axis, Look
from ...report.charts import Series, bars, scatter
from ...report.read import Run
from ...runs.config import Table
from ..cell import Cell, along
from ..comparison_page import run_of
from ..comparison_tables import explained, grid, harm_grid
from ..ranking import Comparison, make
from ..statistics import mean
from . import numbers
from .experiment import Context, Done, Experiment, by_column
from .findings import NONE, Findings, Sheet, against, number, over
from .pictures import Mean, Picture, picture
from .settings import COLUMNS, TITLES, columns, person, rows

LAST = 0.1  # of the rounds: their mean is what the paper reports, ten of a hundred
QUICK_SEEN = 5  # rounds of a quick version's curve
AFTER = ("fedbabu", "fedavg-ft", "fedprox-ft", "scaffold-ft")  # scored after training, because that is fine-tuning


class Table1(Experiment):
    """Table 1."""

    title = "Table 1: personal accuracy"
    claim = (
        "FedABML has the best accuracy in every column but CIFAR-10 (100,2), where pFedBayes is ahead by 0.13 points."
    )
    columns = numbers.TABLE1_COLUMNS
    algorithms = (*numbers.NAMES, "fedabml-plain")

    def cells(self, context: Context) -> list[Cell]:
        made = []
        for column in columns(context, self.columns):
            if COLUMNS[column].model == "cnn100":
                context.note(
                    f"{TITLES[column]}: the paper's numbers are of a ResNet-18, which is the column {column}-resnet."
                )
            for name, config in rows(context, column, self.algorithms).items():
                more = along(max(1, config.rounds // QUICK_SEEN), config.rounds) if context.request.quick else ()
                curve = tuple(sorted({*more, *averaged(context, name, config.rounds)}))
                made += context.seeded(f"{column} {name}", config, curve=curve)
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        found = by_column(done)
        records = [_record(context, c, name, own) for c, group in found.items() for name, own in group.items()]
        conclusions, sheets, pictures = [], [_accuracies(context, records)], _beside(context, records)
        for column, groups in found.items():
            own = sorted((r for r in records if r["column"] == column), key=lambda r: -r["accuracy"])
            conclusions.append(_verdict(context, own))
            standings = _standings(context, groups)
            sheets += _sheets(column, standings)
            pictures += [_bars(context, own), *_duel(column, groups), *_of_comparison(column, standings)]
        return Findings(conclusions, sheets, pictures, records)


def averaged(context: Context, name: str, rounds: int) -> range:
    """Return the rounds whose mean is reported; none where that is the score after training."""
    if context.request.protocol != "paper" or name in AFTER:
        return range(0)
    return range(rounds - max(1, int(LAST * rounds)) + 1, rounds + 1)


def _record(context: Context, column: str, name: str, own: Sequence[Done]) -> Table:
    """Return the record of a system in a column; accuracies are in percent."""
    last = averaged(context, name, own[0].cell.config.rounds)
    curves = [[line for line in result.curve if line["round"] in last] for _, result in own]
    scores = [curve if last else [done.result.scores[0].summary] for curve, done in zip(curves, own, strict=True)]
    accuracy, half = mean([100 * fmean(line["accuracy"] for line in row if "accuracy" in line) for row in scores])
    paper = numbers.table1(name, column)
    return {
        "column": column, "algorithm": name, "accuracy": accuracy, "half": half, "paper": paper,
        "difference": None if paper is None else accuracy - paper,
        **{k: fmean(d.result.scores[0].summary[k] for d in own) for k in ("nll", "ece", "brier")},
        "seeds": len(own), "rounds_averaged": len(last),
    }  # fmt: skip


def _accuracies(context: Context, records: Sequence[Table]) -> Sheet:
    """Return the table of all systems in all columns."""
    here = list(dict.fromkeys(r["column"] for r in records))
    best = {c: max(r["accuracy"] for r in records if r["column"] == c) for c in here}
    cells = {(r["column"], r["algorithm"]): r for r in records}
    table = []
    for name in dict.fromkeys(r["algorithm"] for r in records):
        row = [context.name(name)]
        for column in here:
            own = cells.get((column, name), {})
            ours: Mean | None = (own["accuracy"], own["half"]) if own else None
            star = "★ " if own and own["accuracy"] == best[column] else ""
            row.append(star + against(ours, numbers.table1(name, column)))
        table.append(row)
    note = f"Accuracy in percent, mean of {over(len(context.request.seed_list))}; in brackets the paper's and the "
    note += "difference. ★ best here."
    title = f"Accuracy, protocol {context.request.protocol}"
    return Sheet(title, ["system", *(TITLES[c] for c in here)], table, [note])


def _standings(context: Context, groups: Mapping[str, Sequence[Done]]) -> Comparison:
    """Return a column as `fedabml compare` would have it, of the systems that finished all seeds."""
    seeds = [*context.request.seed_list]
    whole = {context.name(n): cells for n, cells in groups.items() if len(cells) == len(seeds)}
    results = {(label, d.result.seed): d.result for label, cells in whole.items() for d in cells}
    return make({label: cells[0].cell.config for label, cells in whole.items()}, results, {}, seeds, False)


def _sheets(column: str, found: Comparison) -> list[Sheet]:
    """Return all measures of a column after the last round, with the marks of paired tests."""
    title, (head, harmed) = TITLES[column], harm_grid(found)
    sheets = [Sheet(title, *grid(found, lead=True), explained(found, lead=True))]
    return sheets + ([Sheet(f"{title}: clients against Local only", head, harmed)] if harmed else [])


def _verdict(context: Context, own: Sequence[Table]) -> str:
    """Say who is first in a column, and where FedABML is; the records are sorted, the best first."""
    first = own[0]
    title, name = TITLES[first["column"]], context.name(first["algorithm"])
    words = f"{title}: {name} has the highest mean of the rows of this table: {first['accuracy']:.2f}"
    place = next((i for i, r in enumerate(own) if r["algorithm"].startswith("fedabml")), None)
    if place is None:
        return f"{words}."
    mine = own[place]
    if place:
        gap = first["accuracy"] - mine["accuracy"]
        words += f"; {context.name(mine['algorithm'])} is {gap:.2f} behind, in place {place + 1}"
    return words + (f"; the paper's FedABML has {mine['paper']:.2f}." if mine["paper"] else ".")


# -- pictures -------------------------------------------------------------------------------------------------------
def _beside(context: Context, records: Sequence[Table]) -> list[Picture]:
    """Draw every cell of the table: the paper's number across, ours up."""
    series = []
    for column in dict.fromkeys(r["column"] for r in records):
        known = [r for r in records if r["column"] == column and r["paper"] is not None]
        who = [f"{context.name(r['algorithm'])}, {TITLES[column]}" for r in known]
        tips = [f"{name}: {number(r['accuracy'])}, paper {r['paper']}" for name, r in zip(who, known, strict=True)]
        y, x = ([r[key] / 100 for r in known] for key in ("accuracy", "paper"))
        series.append(Series(TITLES[column], y, x, tips))
    if not any(each.y for each in series):
        return []
    axes: Table = {"x": Axis("the paper's accuracy", "percent"), "y": Axis("ours", "percent")}
    caption = "A dot is a system in a column. Above the line it does better here than in the paper."
    return [picture("ours-and-paper", "Ours against the paper's", caption, scatter, series, **axes, diagonal=True)]


def _bars(context: Context, own: Sequence[Table]) -> Picture:
    """Draw a column's systems, the best first, ours beside the paper's."""
    title, column = TITLES[own[0]["column"]], own[0]["column"]
    series = [Series("ours", [r["accuracy"] / 100 for r in own])]
    if any(r["paper"] for r in own):
        series.append(Series("the paper's", [None if r["paper"] is None else r["paper"] / 100 for r in own]))
    chart = partial(bars, [context.name(r["algorithm"]) for r in own])
    x = Axis("accuracy", "percent", (0, 1))
    return picture(f"accuracy-{column}", title, "Mean accuracy of the clients' own models.", chart, series, x=x)


def _duel(column: str, groups: Mapping[str, Sequence[Done]]) -> list[Picture]:
    """Draw every client under FedABML against itself under its rivals, in the first seed that both have finished."""
    mine = next((groups[n][0] for n in ("fedabml", "fedabml-plain") if n in groups), None)
    if mine is None:
        return []
    up, series = mine.result.scores[0].clients["accuracy"], []
    for name in ("local", "fedavg", "fedavg-ft"):
        other = next((d for d in groups.get(name, ()) if d.result.seed == mine.result.seed), None)
        if other is not None:
            across, rival = other.result.scores[0].clients["accuracy"], numbers.name(name)
            tips = [
                NONE if a is None or b is None else f"client {i}\nFedABML: {b:.1%}\n{rival}: {a:.1%}"
                for i, (a, b) in enumerate(zip(across, up, strict=True))
            ]
            people = [person(column, i) for i in range(len(up))]
            series.append(Series(f"against {rival}", up, across, tips, who=people))
    if not series:
        return []
    axes: Table = {"x": Axis("the rival's accuracy", "percent"), "y": Axis("FedABML's", "percent")}
    heading, title = f"Client by client, {TITLES[column]}", f"Clients, {TITLES[column]}"
    caption = "A dot is a client of the first seed. Above the line FedABML serves it better."
    return [picture(f"clients-{column}", heading, caption, scatter, series, title=title, **axes, diagonal=True)]


def _of_comparison(column: str, found: Comparison) -> list[Picture]:
    """Draw what the page of a comparison has, too: accuracy per round where cells were looked at, and reliability."""
    runs = [run_of(found, row) for row in found.rows if row.scores]
    drawn = []
    for name, figure in (("rounds", figures.progress), ("reliability", figures.reliability)):
        made = figure(runs) if runs else None
        if made:
            heading = f"{made.heading}, {TITLES[column]}"
            drawn.append(Picture(f"{name}-{column}", heading, made.reading, partial(_drawn, figure, runs)))
    return drawn


def _drawn(figure: Callable[..., figures.Figure | None], runs: Sequence[Run], look: Look) -> str:
    made = figure(runs, look)
    return made.svg if made else ""
