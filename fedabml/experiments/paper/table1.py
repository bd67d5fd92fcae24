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
from ...report.charts import Axis, Series, Theme, bars, scatter
from ...report.read import SavedRun
from ...runs.config import JsonDict
from ..cell import Cell, along
from ..comparison_page import run_of
from ..comparison_tables import explained, grid, harm_grid
from ..ranking import Comparison, make
from . import numbers
from .experiment import Context, Done, Experiment, by_column, scored
from .findings import NONE, Findings, Mean, Picture, Sheet, by, number, over, pivot
from .settings import COLUMNS, TITLES, person, systems

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
    algorithms = (*numbers.SYSTEM_NAMES, "fedabml-plain")

    def cells(self, context: Context) -> list[Cell]:
        cells = []
        for column, name, config in systems(context, self):
            if COLUMNS[column].model == "cnn100":
                context.note(
                    f"{TITLES[column]}: the paper's numbers are of a ResNet-18, which is the column {column}-resnet."
                )
            more = along(max(1, config.rounds // QUICK_SEEN), config.rounds) if context.request.quick else ()
            curve = tuple(sorted({*more, *averaged(context, name, config.rounds)}))
            cells += context.seeded(f"{column} {name}", config, curve=curve)
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        groups = by_column(finished)
        records = [_record(context, c, name, cells) for c, methods in groups.items() for name, cells in methods.items()]
        conclusions, sheets, pictures = [], [_accuracies(context, records)], [_beside(context, records)]
        for column, column_records in by(records, "column").items():
            ranked = sorted(column_records, key=lambda r: -r["accuracy"])
            conclusions.append(_verdict(context, ranked))
            standings = _standings(context, groups[column])
            sheets += _sheets(column, standings)
            pictures += [_bars(context, ranked), _duel(column, groups[column]), *_of_comparison(column, standings)]
        return Findings(conclusions, sheets, pictures, records)


def averaged(context: Context, name: str, rounds: int) -> range:
    """Return the rounds whose mean is reported; none where that is the score after training."""
    if context.request.protocol != "paper" or name in AFTER:
        return range(0)
    return range(rounds - max(1, int(LAST * rounds)) + 1, rounds + 1)


def _record(context: Context, column: str, name: str, cells: Sequence[Done]) -> JsonDict:
    """Return the record of a system in a column; accuracies are in percent."""
    last = averaged(context, name, cells[0].cell.config.rounds)

    def score(finished: Done) -> float:
        curve = [line for line in finished.result.curve if line["round"] in last]
        lines = curve if last else [finished.result.scores[0].summary]
        return 100 * fmean(line["accuracy"] for line in lines if "accuracy" in line)

    accuracy, paper = Mean({d.result.seed: score(d) for d in cells}), numbers.table1(name, column)
    return {
        "column": column, "algorithm": name, "accuracy": accuracy, "half": accuracy.half, "paper": paper,
        "difference": None if paper is None else accuracy - paper,
        **{key: scored(cells, key) for key in ("nll", "ece", "brier")},
        "seeds": len(cells), "rounds_averaged": len(last),
    }  # fmt: skip


def beside_paper(record: JsonDict) -> str:
    """Return our accuracy with the paper's number and the difference beside it, as far as they are known."""
    ours, paper = record["accuracy"], record["paper"]
    difference = "" if ours is None or paper is None else f", {ours - paper:+.2f}"
    return number(ours) + ("" if paper is None else f" (paper {paper:.2f}{difference})")


def _accuracies(context: Context, records: Sequence[JsonDict]) -> Sheet:
    """Return the table of all systems in all columns."""
    columns = by(records, "column")
    best = {column: max(r["accuracy"] for r in column_records) for column, column_records in columns.items()}
    missing = [
        {"column": column, "algorithm": name, "accuracy": None, "paper": numbers.table1(name, column)}
        for column, column_records in columns.items()
        for name in by(records, "algorithm").keys() - by(column_records, "algorithm").keys()
    ]

    def cell(record: JsonDict) -> str:
        return "★ " * (record["accuracy"] == best[record["column"]]) + beside_paper(record)

    rows = pivot([*records, *missing], "system", context.named, lambda r: TITLES[r["column"]], cell)
    note = f"Accuracy in percent, mean of {over(len(context.request.seed_list))}; in brackets the paper's and the "
    return Sheet(f"Accuracy, protocol {context.request.protocol}", *rows, [note + "difference. ★ best here."])


def _standings(context: Context, groups: Mapping[str, Sequence[Done]]) -> Comparison:
    """Return a column as `fedabml compare` would have it, of the systems that finished all seeds."""
    seeds = [*context.request.seed_list]
    complete = {context.name(n): cells for n, cells in groups.items() if len(cells) == len(seeds)}
    results = {(label, d.result.seed): d.result for label, cells in complete.items() for d in cells}
    return make({label: cells[0].cell.config for label, cells in complete.items()}, results, {}, seeds, False)


def _sheets(column: str, comparison: Comparison) -> list[Sheet]:
    """Return all measures of a column after the last round, with the marks of paired tests."""
    measures = Sheet(TITLES[column], *grid(comparison, lead=True), explained(comparison, lead=True))
    return [measures, Sheet(f"{TITLES[column]}: clients against Local only", *harm_grid(comparison))]


def _verdict(context: Context, ranked: Sequence[JsonDict]) -> str:
    """Say who is first in a column, and where FedABML is; the records are sorted, the best first."""
    best, title = ranked[0], TITLES[ranked[0]["column"]]
    text = f"{title}: {context.named(best)} has the highest mean of the rows of this table: {best['accuracy']:.2f}"
    for rank, record in enumerate(ranked, 1):
        if record["algorithm"].startswith("fedabml"):
            behind = f"{best['accuracy'] - record['accuracy']:.2f} behind, in place {rank}"
            text += f"; {context.named(record)} is {behind}" * (rank > 1)
            text += f"; the paper's FedABML has {record['paper']:.2f}" if record["paper"] else ""
            break
    return f"{text}."


# -- pictures -------------------------------------------------------------------------------------------------------
def _beside(context: Context, records: Sequence[JsonDict]) -> Picture:
    """Draw every cell of the table: the paper's number across, ours up."""
    series = []
    for column, compared in by((r for r in records if r["paper"] is not None), "column").items():
        tips = [f"{context.named(r)}, {TITLES[column]}: {r['accuracy']:.2f}, paper {r['paper']}" for r in compared]
        y, x = ([r[key] / 100 for r in compared] for key in ("accuracy", "paper"))
        series.append(Series(TITLES[column], y, x, tips))
    options = {"x": Axis("the paper's accuracy", "percent"), "y": Axis("ours", "percent"), "diagonal": True}
    caption = "A dot is a system in a column. Above the line it does better here than in the paper."
    return Picture("ours-and-paper", "Ours against the paper's", caption, scatter, series, options)


def _bars(context: Context, ranked: Sequence[JsonDict]) -> Picture:
    """Draw a column's systems, the best first, ours beside the paper's."""
    column, chart = ranked[0]["column"], partial(bars, [context.named(r) for r in ranked])
    series = [Series("ours", [r["accuracy"] / 100 for r in ranked])]
    if any(r["paper"] for r in ranked):
        series.append(Series("the paper's", [r["paper"] and r["paper"] / 100 for r in ranked]))
    caption, axes = "Mean accuracy of the clients' own models.", {"x": Axis("accuracy", "percent", (0, 1))}
    return Picture(f"accuracy-{column}", TITLES[column], caption, chart, series, axes)


def _duel(column: str, groups: Mapping[str, Sequence[Done]]) -> Picture:
    """Draw every client under FedABML against itself under its rivals, in the first seed that both have finished."""
    ours = next((groups[n][0].result for n in ("fedabml", "fedabml-plain") if n in groups), None)
    series = []
    for name in ("local", "fedavg", "fedavg-ft"):
        other = next((d.result for d in groups.get(name, ()) if ours and d.result.seed == ours.seed), None)
        if ours is None or other is None:
            continue
        up, across = (result.scores[0].clients["accuracy"] for result in (ours, other))
        rival = numbers.name(name)
        tips = [
            NONE if a is None or b is None else f"client {i}\nFedABML: {b:.1%}\n{rival}: {a:.1%}"
            for i, (a, b) in enumerate(zip(across, up, strict=True))
        ]
        names = [person(column, i) for i in range(len(up))]
        series.append(Series(f"against {rival}", up, across, tips, who=names))
    options = {"x": Axis("the rival's accuracy", "percent"), "y": Axis("FedABML's", "percent"), "diagonal": True}
    options["title"] = f"Clients, {TITLES[column]}"
    caption = "A dot is a client of the first seed. Above the line FedABML serves it better."
    return Picture(f"clients-{column}", f"Client by client, {TITLES[column]}", caption, scatter, series, options)


def _of_comparison(column: str, comparison: Comparison) -> list[Picture]:
    """Draw what the page of a comparison has, too: accuracy per round where cells were looked at, and reliability."""
    runs = [run_of(comparison, row) for row in comparison.rows if row.scores]
    pictures = []
    for name, figure in (("rounds", figures.progress), ("reliability", figures.reliability)):
        if drawn := figure(runs) if runs else None:
            heading = f"{drawn.heading}, {TITLES[column]}"
            pictures.append(Picture(f"{name}-{column}", heading, drawn.reading, partial(_svg, figure), runs))
    return pictures


def _svg(figure: Callable[..., figures.Figure | None], runs: Sequence[SavedRun], *, theme: Theme, title: str) -> str:
    """Return a figure of the page of runs, which has a title of its own."""
    drawn = figure(runs, theme)
    return drawn.svg if drawn else ""
