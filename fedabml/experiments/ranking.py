"""A finished comparison as numbers: a row per algorithm, which one is best, and which clients are harmed.

`comparison_tables` shows it as text and files, `comparison_page` as a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..data.rows import FEW_ROWS
from ..data.statistics import worst_decile
from ..evaluation.measures import COMPARED, MEASURES, POOLED, Measure
from ..runs.config import RunConfig, Table
from .cell import Result
from .statistics import Paired, holm, interval, mean, paired

LEVEL = 0.05  # of the tests
LOCAL = "local"  # the algorithm that harm is measured against
WORST = 10  # the number of clients with the largest losses that are listed


WORST_TENTH = "accuracy_worst_decile"


class Loss(NamedTuple):
    """A client that a method serves worse than training alone would."""

    seed: int
    client: str
    alone: float
    here: float


@dataclass(frozen=True)
class Harm:
    """How many clients, of all seeds together, a method serves worse than Local only does, equally, and better."""

    worse: int
    equal: int
    better: int
    loss: float  # mean, of those it serves worse
    worst: list[Loss]

    @property
    def share(self) -> float:
        """The share of the clients that are served worse."""
        return self.worse / (self.worse + self.equal + self.better)


@dataclass(frozen=True)
class Row:
    """A row of the table. One that was refused, or that diverged in every seed, has a reason and no numbers."""

    label: str
    config: RunConfig
    scores: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # by measure: mean, half interval
    traffic: float | None = None  # bytes up and down, per client and round
    seconds: float | None = None
    refused: str | None = None
    diverged: dict[int, str] = field(default_factory=dict)  # by seed, the error
    best: bool = False
    behind: Paired | None = None  # the best's lead over this row
    p: float | None = None  # of that lead, corrected for the number of rivals
    harm: Harm | None = None

    @property
    def alike(self) -> bool:
        """Whether it is not significantly different from the best."""
        return self.p is not None and self.p >= LEVEL


@dataclass(frozen=True)
class Comparison:
    """A finished comparison. `rows` are sorted, the best first; `results` are by label and seed."""

    rows: list[Row]
    seeds: tuple[int, ...]
    task: str
    split: str
    results: Mapping[tuple[str, int], Result]
    people: Mapping[int, Sequence[str]]  # by seed, the names of the clients
    same_clients: bool

    @cached_property
    def columns(self) -> tuple[Measure, ...]:
        """The measures of the table, the deciding one first; with small clients, pooled measures, too."""
        main, *others = (MEASURES[key] for key in COMPARED[self.task])
        if not self.small:
            return (main, *others)
        if self.small == self.scored:
            others = [column for column in others if column.key != WORST_TENTH]
        return (main, MEASURES[POOLED[main.key]], *(MEASURES[POOLED.get(column.key, column.key)] for column in others))

    @property
    def measures(self) -> list[str]:
        """The keys of all measures that the files have: those of this table, and those of the usual one."""
        return list(dict.fromkeys([*(column.key for column in self.columns), *COMPARED[self.task]]))

    @cached_property
    def counts(self) -> dict[int, np.ndarray]:
        """By seed, the number of rows that each client is scored on, where a run has recorded it."""
        noted = {seed: np.array(r.facts["rows"]) for (_, seed), r in self.results.items() if "rows" in r.facts}
        return {seed: rows for seed, rows in noted.items() if len(rows) == len(self.people[seed])}

    @cached_property
    def small(self) -> int:
        """The number of clients, of all seeds together, whose rows are so few that chance decides their measures."""
        return sum(int(((rows > 0) & (rows < FEW_ROWS)).sum()) for rows in self.counts.values())

    @property
    def scored(self) -> int:
        """The number of clients, of all seeds together, that have rows to be scored on."""
        return sum(int((rows > 0).sum()) for rows in self.counts.values())

    def score(self, label: str, seed: int, measure: str) -> float | None:
        """Return a finished run's measure of all clients; the worst tenth leaves small clients out."""
        if measure == WORST_TENTH and self.small and seed in self.counts:
            own, large = self.values(label, seed, "accuracy"), self.counts[seed] >= FEW_ROWS
            known = own[large & ~np.isnan(own)] if own is not None else np.zeros(0)
            return worst_decile(known) if len(known) else None
        value: float | None = self.results[label, seed].scores[0].summary.get(measure)
        return value

    @property
    def local(self) -> str | None:
        """The label of Local only, if it is compared and finished."""
        return next((row.label for row in self.rows if row.config.algorithm == LOCAL and row.scores), None)

    def values(self, label: str, seed: int, measure: str) -> np.ndarray | None:
        """Return a measure of every client, NaN for a client without data; None where no run has the measure."""
        result = self.results.get((label, seed))
        column = result.scores[0].clients.get(measure) if result and result.scores else None
        return None if column is None else np.array(column, float)

    def reliability(self, label: str) -> list[Table]:
        """Return how often a row's predictions are right by confidence, over all seeds; empty if a seed lacks it."""
        own = [r.scores[0].reliability for s in self.seeds if (r := self.results.get((label, s))) and r.scores]
        if not own or not all(own):
            return []
        bins = np.array(own)  # seeds, bins, three
        count = bins[..., 2].sum(0)
        sure, right = ((bins[..., i] * bins[..., 2]).sum(0) / np.maximum(count, 1) for i in (0, 1))
        return [{"confidence": c, "accuracy": a, "count": n} for c, a, n in np.stack([sure, right, count], 1).tolist()]

    def curve(self, label: str) -> list[Table]:
        """Return a row's first measure after rounds, mean over seeds with half of its interval; empty without a curve.

        A round in which a seed could not be scored has no mean: it would be one of the other seeds alone.
        """
        own = [r.by_round() for s in self.seeds if (r := self.results.get((label, s))) and r.scores]
        return [self._point(t, [seen.get(t, {}) for seen in own]) for t in own[0]] if own and len(own[0]) > 1 else []

    def _point(self, round: int, lines: Sequence[Table]) -> Table:
        key = self.columns[0].key
        values = [line[key] for line in lines if key in line]
        if len(values) < len(lines):
            return {"round": round, "eval_error": next((e for line in lines if (e := line.get("error"))), "missing")}
        middle, half = mean(values)
        return {"round": round, key: middle, f"{key}_half": half}

    def facts(self, name: str) -> list[Any]:
        """Return the distinct values of a fact over all runs, in their order."""
        return list({str(f): f for r in self.results.values() if (f := r.facts.get(name)) is not None}.values())


def make(
    rows: Mapping[str, RunConfig],
    results: Mapping[tuple[str, int], Result],
    refused: Mapping[str, str],
    people: Mapping[int, Sequence[str]],
    same_clients: bool,
) -> Comparison:
    """Rank finished runs.

    `rows` are configurations by label, `results` finished cells by label and seed, `refused` the reasons by label of
    rows that could not run, and `people` the names of the clients by seed, who are the same in all seeds or not.
    """
    scored = [result for result in results.values() if result.scores]
    task = "regression" if scored and "rmse" in scored[0].scores[0].summary else "classification"
    split = str(scored[0].facts["split"]) if scored else "test"
    bare = [Row(label, config, refused=refused.get(label)) for label, config in rows.items()]
    found = Comparison(bare, tuple(people), task, split, results, people, same_clients)
    done = _ranked(found, [_measured(found, row) for row in bare])
    found = replace(found, rows=done)
    return replace(found, rows=[replace(row, harm=_harm(found, row)) for row in done])


def _measured(found: Comparison, row: Row) -> Row:
    """Return a row with its own numbers."""
    own = {seed: result for seed in found.seeds if (result := found.results.get((row.label, seed)))}
    diverged = {seed: result.error for seed, result in own.items() if result.error is not None}
    scored = [seed for seed, result in own.items() if result.scores]
    fine = [own[seed] for seed in scored]
    if not fine:
        return replace(row, diverged=diverged)
    values = {key: [found.score(row.label, seed, key) for seed in scored] for key in found.measures}
    scores = {key: interval(known) for key, own in values.items() if (known := [v for v in own if v is not None])}
    traffic = fine[0].facts["bytes_up"] + fine[0].facts["bytes_down"]
    seconds = float(np.mean([result.facts["seconds"] for result in fine]))
    return replace(row, scores=scores, traffic=traffic, seconds=seconds, diverged=diverged)


def _ranked(found: Comparison, rows: list[Row]) -> list[Row]:
    """Sort rows, the best first, and test its lead over the others; rows that diverged in a seed come last."""
    main = found.columns[0]
    whole = [row for row in rows if row.scores and not row.diverged]
    others = [row for row in rows if row not in whole]
    whole.sort(key=lambda row: -main.better * row.scores[main.key][0])
    others.sort(key=lambda row: -main.better * row.scores[main.key][0] if row.scores else math.inf)
    if len(whole) < 2:
        return whole + others
    best, *rivals = whole
    leads = [_lead(found, best, row) for row in rivals]
    ps = holm([lead.p for lead in leads])
    tested = [replace(row, behind=lead, p=p) for row, lead, p in zip(rivals, leads, ps, strict=True)]
    return [replace(best, best=True), *tested, *others]


def _lead(found: Comparison, best: Row, row: Row) -> Paired:
    """Test the lead of the best row over another."""
    main, differences, units = found.columns[0], [], []
    for seed in found.seeds:
        a, b = (found.values(each.label, seed, main.key) for each in (best, row))
        assert a is not None and b is not None
        known = ~(np.isnan(a) | np.isnan(b))
        differences.append(main.better * (a - b)[known])
        units.append([name for name, fine in zip(found.people[seed], known, strict=True) if fine])
    return paired(differences, units if found.same_clients else None)


def _harm(found: Comparison, row: Row) -> Harm | None:
    """Compare every client under a row with itself under Local only, in the seeds that both finished."""
    if found.local is None or row.label == found.local:
        return None
    main, pairs = found.columns[0], []
    for seed in found.seeds:
        alone, here = (found.values(label, seed, main.key) for label in (found.local, row.label))
        if alone is not None and here is not None:
            for name, a, b in zip(found.people[seed], alone.tolist(), here.tolist(), strict=True):
                pairs.append((main.better * (b - a), Loss(seed, name, a, b)))
    pairs = [pair for pair in pairs if not math.isnan(pair[0])]
    if not pairs:
        return None
    lost = sorted(pair for pair in pairs if pair[0] < 0)
    equal = sum(gain == 0 for gain, _ in pairs)
    mean = float(np.mean([-gain for gain, _ in lost])) if lost else 0.0
    return Harm(len(lost), equal, len(pairs) - len(lost) - equal, mean, [loss for _, loss in lost[:WORST]])
