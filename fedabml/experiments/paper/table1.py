"""Table 1: every system on every column, personal test accuracy, mean over clients and seeds, beside the paper's.

Under `paper` a system is scored as the paper does: the all-client mean of the last ten rounds, and the fine-tuned ones
(+FT, FedBABU) after training. Under `tuned` all are scored after training, and FedABML comes twice: as the paper has
it, and with the label level. The paper claims that FedABML is first in every column but the first, where pFedBayes is
ahead by 0.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from ...report import figures
from ...report.canvas import Series, bars, scatter
from ...report.frame import Axis, Look
from ..cell import Cell, Result, along
from ..comparison_page import run_of
from ..ranking import Comparison, explained, grid, harm_grid, make
from ..statistics import mean
from . import numbers
from .columns import COLUMNS, columns, rows
from .experiment import Desk, Done, Experiment
from .findings import NONE, Drawing, Findings, Mean, Sheet, against, number, over
from .pictures import person

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

    def cells(self, desk: Desk) -> list[Cell]:
        made = []
        for column, known in columns(desk, self.columns):
            if known.model == "cnn100":
                desk.note(
                    f"{known.title}: the paper's numbers are of a ResNet-18, which is the column {column}-resnet."
                )
            for name, config in rows(desk, column, self.algorithms).items():
                more = along(max(1, config.rounds // QUICK_SEEN), config.rounds) if desk.ask.quick else ()
                curve = tuple(sorted({*more, *averaged(desk.ask.protocol, name, config.rounds)}))
                made += [Cell(f"{column} {name}", config.with_changes(seed=s), curve=curve) for s in desk.ask.seed_list]
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        protocol, groups = desk.ask.protocol, grouped(done)
        ours = {(column, name): _accuracy(own, protocol, name) for (column, name), own in groups.items()}
        here = list(dict.fromkeys(column for column, _ in groups))
        names = list(dict.fromkeys(name for _, name in groups))
        best = {c: max(v[0] for (column, _), v in ours.items() if column == c) for c in here}
        table = [
            [numbers.name(name, protocol), *(_cell(ours.get((c, name)), name, c, best[c]) for c in here)]
            for name in names
        ]
        head = ["system", *(COLUMNS[c].title for c in here)]
        of = over(len(desk.ask.seed_list))
        note = f"Accuracy in percent, mean of {of}; in brackets the paper's and the difference. ★ best here."
        sheets = [Sheet(f"Accuracy, protocol {protocol}", head, table, note)]
        found = {c: _standings(desk, {n: groups[c, n] for n in names if (c, n) in groups}) for c in here}
        for column in here:
            sheets += _sheets(column, found[column])
        drawings = [_beside(ours, names, protocol)] if any(numbers.table1(n, c) for c, n in ours) else []
        for column in here:
            drawings += [_bars(column, ours, names, protocol), *_duel(column, groups), *_alike(column, found[column])]
        records = [_record(desk, column, name, ours[column, name], own) for (column, name), own in groups.items()]
        said = [_verdict(c, ours, protocol) for c in here]
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def grouped(done: Sequence[Done]) -> dict[tuple[str, str], list[Done]]:
    """The finished cells of every seed, by column and algorithm."""
    found: dict[tuple[str, str], list[Done]] = {}
    for each in done:
        column, name = each.cell.label.split()[:2]
        found.setdefault((column, name), []).append(each)
    return found


def averaged(protocol: str, name: str, rounds: int) -> range:
    """The rounds whose mean is reported; none where that is the score after training."""
    if protocol != "paper" or name in AFTER:
        return range(0)
    return range(rounds - max(1, int(LAST * rounds)) + 1, rounds + 1)


def _accuracy(own: Sequence[Done], protocol: str, name: str) -> Mean:
    """In percent."""
    last = averaged(protocol, name, own[0].cell.config.rounds)
    rows = [[line for line in result.curve if line["round"] in last] for _, result in own]
    scores = [row if last else [result.scores[0].summary] for row, (_, result) in zip(rows, own, strict=True)]
    return mean([100 * fmean(line["accuracy"] for line in row if "accuracy" in line) for row in scores])


def _cell(ours: Mean | None, name: str, column: str, best: float) -> str:
    words = against(ours, numbers.table1(name, column))
    return f"★ {words}" if ours and ours[0] == best else words


def _standings(desk: Desk, own: Mapping[str, Sequence[Done]]) -> Comparison:
    """A column as `fedabml compare` would have it, of the systems that finished all seeds."""
    seeds = [*desk.ask.seed_list]
    whole = {numbers.name(n, desk.ask.protocol): cells for n, cells in own.items() if len(cells) == len(seeds)}
    results = {(label, d.result.seed): d.result for label, cells in whole.items() for d in cells}
    people = {seed: [f"client-{i}" for i in range(_clients(results, seed))] for seed in seeds}
    return make({label: cells[0].cell.config for label, cells in whole.items()}, results, {}, people, False)


def _sheets(column: str, found: Comparison) -> list[Sheet]:
    """All measures of a column after the last round, with the marks of paired tests."""
    title, (head, harmed) = COLUMNS[column].title, harm_grid(found)
    sheets = [Sheet(title, *grid(found, behind=True), " ".join(explained(found, behind=True)))]
    return sheets + ([Sheet(f"{title}: clients against Local only", head, harmed)] if harmed else [])


def _clients(results: Mapping[tuple[str, int], Result], seed: int) -> int:
    return next((len(r.scores[0].clients["accuracy"]) for (_, s), r in results.items() if s == seed), 0)


def _verdict(column: str, ours: dict[tuple[str, str], Mean], protocol: str) -> str:
    own = sorted(((v[0], name) for (c, name), v in ours.items() if c == column), reverse=True)
    first, title = own[0], COLUMNS[column].title
    words = f"{title}: {numbers.name(first[1], protocol)} is first with {first[0]:.2f}"
    mine = next((each for each in own if each[1].startswith("fedabml")), None)
    if mine and not first[1].startswith("fedabml"):
        words += f"; {numbers.name(mine[1], protocol)} is {first[0] - mine[0]:.2f} behind, place {own.index(mine) + 1}"
    known = mine and numbers.table1(mine[1], column)
    return words + (f"; the paper's FedABML has {known:.2f}." if known else ".")


def _record(desk: Desk, column: str, name: str, ours: Mean, own: Sequence[Done]) -> dict[str, object]:
    known = numbers.table1(name, column)
    return {
        "column": column, "algorithm": name, "accuracy": ours[0], "half": ours[1], "paper": known,
        "difference": None if known is None else ours[0] - known,
        **{k: fmean(d.result.scores[0].summary[k] for d in own) for k in ("nll", "ece", "brier")},
        "seeds": len(own), "rounds_averaged": len(averaged(desk.ask.protocol, name, own[0].cell.config.rounds)),
    }  # fmt: skip


# -- pictures -------------------------------------------------------------------------------------------------------
def _beside(ours: dict[tuple[str, str], Mean], names: Sequence[str], protocol: str) -> Drawing:
    """Every cell: the paper's number across, ours up."""

    def draw(look: Look) -> str:
        series = []
        for column in dict.fromkeys(c for c, _ in ours):
            own = [(n, numbers.table1(n, column), ours[column, n][0]) for n in names if (column, n) in ours]
            known = [(n, p, v) for n, p, v in own if p is not None]
            tips = [
                f"{numbers.name(n, protocol)}, {COLUMNS[column].title}: {number(v)}, paper {p}" for n, p, v in known
            ]
            x, y = ([each[i] / 100 for each in known] for i in (1, 2))  # type: ignore[operator]
            series.append(Series(COLUMNS[column].title, y, x, tips))
        across, up = Axis("the paper's accuracy", "percent"), Axis("ours", "percent")
        return scatter(series, title="Ours against the paper's", x=across, y=up, look=look, diagonal=True)

    reading = "A dot is a system in a column. Above the line it does better here than in the paper."
    return Drawing("ours-and-paper", "Ours against the paper's", reading, draw)


def _bars(column: str, ours: dict[tuple[str, str], Mean], names: Sequence[str], protocol: str) -> Drawing:
    """A column's systems, the best first, ours beside the paper's."""
    own = sorted((n for n in names if (column, n) in ours), key=lambda n: -ours[column, n][0])
    theirs = [numbers.table1(n, column) for n in own]

    def draw(look: Look) -> str:
        series = [Series("ours", [ours[column, n][0] / 100 for n in own])]
        if any(theirs):
            series.append(Series("the paper's", [None if p is None else p / 100 for p in theirs]))
        labels = [numbers.name(n, protocol) for n in own]
        return bars(labels, series, title=COLUMNS[column].title, x=Axis("accuracy", "percent", (0, 1)), look=look)

    return Drawing(f"accuracy-{column}", COLUMNS[column].title, "Mean accuracy of the clients' own models.", draw)


def _duel(column: str, groups: dict[tuple[str, str], list[Done]]) -> list[Drawing]:
    """Every client under FedABML against itself under its rivals, in its first seed, which they have finished, too."""
    mine = next((groups[column, n][0] for n in ("fedabml", "fedabml-plain") if (column, n) in groups), None)
    if mine is None:
        return []
    alike = ((n, d) for n in ("local", "fedavg", "fedavg-ft") for d in groups.get((column, n), ()))
    rivals = {name: done for name, done in alike if done.result.seed == mine.result.seed}
    if not rivals:
        return []

    def draw(look: Look) -> str:
        up = mine.result.scores[0].clients["accuracy"]
        series = []
        for name, other in rivals.items():
            across = other.result.scores[0].clients["accuracy"]
            tips = [
                NONE if a is None or b is None else f"client {i}\nFedABML: {b:.1%}\n{numbers.name(name)}: {a:.1%}"
                for i, (a, b) in enumerate(zip(across, up, strict=True))
            ]
            people = [person(column, i) for i in range(len(up))]
            series.append(Series(f"against {numbers.name(name)}", up, across, tips, who=people))
        x, y = Axis("the rival's accuracy", "percent"), Axis("FedABML's", "percent")
        return scatter(series, title=f"Clients, {COLUMNS[column].title}", x=x, y=y, look=look, diagonal=True)

    reading = "A dot is a client of the first seed. Above the line FedABML serves it better."
    return [Drawing(f"clients-{column}", f"Client by client, {COLUMNS[column].title}", reading, draw)]


def _alike(column: str, found: Comparison) -> list[Drawing]:
    """What the page of a comparison draws, too: accuracy per round where cells were looked at, and reliability."""
    runs, title = [run_of(found, row) for row in found.rows if row.scores], COLUMNS[column].title
    drawn = []
    for name, figure in (("rounds", figures.progress), ("reliability", figures.reliability)):
        made = figure(runs) if runs else None
        if made:
            draw = lambda look, figure=figure: figure(runs, look).svg  # noqa: E731
            drawn.append(Drawing(f"{name}-{column}", f"{made.heading}, {title}", made.reading, draw))
    return drawn
