"""A finished comparison as numbers: a row per algorithm, which one is best, and which clients are harmed.

`comparison_tables` shows it as text and files, `comparison_page` as a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..data.statistics import worst_decile
from ..errors import InputError, shortened
from ..evaluation.measures import (
    CALIBRATED,
    COMPARED,
    DECIDED,
    FEW_ROWS,
    MEASURES,
    POOLED,
    WORST_TENTH,
    Measure,
    key_of_all,
    of_large,
)
from ..files.sheets import frame, html_card
from ..runs.config import JsonDict, RunConfig
from .cell import Result
from .statistics import SEEDS_TO_TEST, Paired, holm, interval, mean, paired

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.05  # of the tests
LOCAL = "local"  # the algorithm that harm is measured against
WORST = 10  # the number of clients with the largest losses that are listed
HARMED, GAINS, OPEN = "harmed", "gains", "not significant"  # what a client's interval says
BASE = "base rate"  # the label of the row that no algorithm has


class ClientLoss(NamedTuple):
    """A client that a method serves worse than training alone would."""

    seed: int
    client: str
    local_value: float  # of the measure, under Local only
    value: float  # under the method


@dataclass(frozen=True)
class Harm:
    """How many clients, of all seeds together, a method serves worse than Local only does, equally, and better."""

    worse: int
    equal: int
    better: int
    loss: float  # mean, of those it serves worse
    worst: list[ClientLoss]

    @property
    def share(self) -> float:
        """The share of the clients that are served worse."""
        return self.worse / (self.worse + self.equal + self.better)


@dataclass(frozen=True)
class Benefit:
    """What one algorithm brings one client: means over the seeds in which both it and Local only have a score."""

    client: str
    rows: float | None  # that the client is scored on, mean over seeds
    alone: float
    gain: float  # above zero is better, whatever the measure
    half: float | None  # of the 95% interval of the gain; None with too few seeds
    seeds: int
    train_rows: float | None = None  # mean over seeds

    @property
    def verdict(self) -> str:
        """Whether the gain's interval lies below zero, above it, or around it; empty without an interval."""
        if self.half is None:
            return ""
        return HARMED if self.gain + self.half < 0 else GAINS if self.gain - self.half > 0 else OPEN


@dataclass(frozen=True)
class Row:
    """A row of the table. One that was refused, or that diverged in every seed, has a reason and no numbers."""

    label: str
    config: RunConfig
    refused: str | None = None
    diverged: dict[int, str] = field(default_factory=dict)  # by seed, the error
    scores: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # by measure: mean, half interval
    traffic: float | None = None  # bytes up and down, per client and round
    seconds: float | None = None
    best: bool = False
    lead: Paired | None = None  # the best row's lead over this one
    p: float | None = None  # of that lead, corrected for the number of rivals
    harm: Harm | None = None

    @property
    def not_significant(self) -> bool:
        """Whether the row is not significantly different from the best."""
        return self.p is not None and self.p >= LEVEL


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished comparison. `rows` are sorted, the best first; `results` are by label and seed."""

    rows: list[Row]
    seeds: tuple[int, ...]
    task: str
    split: str
    results: Mapping[tuple[str, int], Result]
    same_clients: bool  # whether they are the same with every seed
    folder: Path | None = None
    warnings: Sequence[str] = ()  # what was worth knowing before the runs, and why rows could not run

    def __repr__(self) -> str:
        best = f"; best {self.best.label}" if self.best else ""
        return shortened(f"Comparison({', '.join(row.label for row in self.rows)}; {len(self.seeds)} seeds{best})")

    def _repr_html_(self) -> str:
        """Show a notebook the table, the best row first."""
        properties: dict[str, Any] = {
            "seeds": ", ".join(map(str, self.seeds)),
            "scored on": self.split,
            "folder": self.folder,
        }
        return html_card(
            "Comparison", properties | {"warnings": "; ".join(self.warnings) or None}, self.records("algorithm")
        )

    @property
    def best(self) -> Row | None:
        """The best row; None if no row was finished with every seed."""
        return next((row for row in self.rows if row.scores and not row.diverged), None)

    def records(self, by: str = "client") -> list[JsonDict]:
        """Return records by "client" (one for each algorithm, seed and client) or by "algorithm" (a row each).

        Of an algorithm, `worse` is the number of clients that Local only serves better, by however little and each seed
        counted, and `harmed` the share of clients that it serves better beyond their own interval.
        """
        if by == "client":
            return list(self._client_records())
        if by != "algorithm":
            raise InputError(f"Records are by client or by algorithm, not by {by!r}.")
        return [
            {"algorithm": row.label, "best": row.best, **{key: mean for key, (mean, _) in row.scores.items()}}
            | {f"{key}_half": half for key, (_, half) in row.scores.items() if half is not None}
            | {"p": row.p, "worse": row.harm and row.harm.worse, "harmed": self.harmed_share(row.label)}
            | {"refused": row.refused}
            for row in self.rows
        ]

    @property
    def repeated(self) -> bool:
        """Whether clients can be matched across seeds: they are the same with every seed, or there is one seed."""
        return self.same_clients or len(self.seeds) == 1

    def benefits(self, label: str) -> list[Benefit]:
        """Return every client's benefit from a row over Local only, the largest first.

        Empty without Local only, for Local only itself, and where clients are other ones with every seed.
        """
        if self.local is None or label == self.local or not self.repeated:
            return []
        main = self.columns[0]
        pairs: dict[str, list[tuple[float, float, float, float]]] = {}
        for seed in self.seeds:
            local_values, row_values = (self.values(row, seed, main.key) for row in (self.local, label))
            if local_values is None or row_values is None:
                continue
            names = self.client_names[seed]
            unknown = np.full(len(names), math.nan)
            columns = local_values, row_values, self.counts.get(seed, unknown), self.train_counts.get(seed, unknown)
            for name, a, b, *counts in zip(names, *(column.tolist() for column in columns), strict=True):
                if not math.isnan(a) and not math.isnan(b):
                    pairs.setdefault(name, []).append((a, main.better * (b - a), counts[0], counts[1]))
        gained = []
        for name, values in pairs.items():
            local_scores, gains, *sizes = (list(column) for column in zip(*values, strict=True))
            gain, half = interval(gains)
            means = [float(np.mean(size)) for size in sizes]
            count, train_count = (None if math.isnan(rows) else rows for rows in means)
            enough = len(gains) >= SEEDS_TO_TEST
            gained.append(
                Benefit(name, count, float(np.mean(local_scores)), gain, half if enough else None, len(gains),
                        train_count)
            )  # fmt: skip
        return sorted(gained, key=lambda benefit: (-benefit.gain, benefit.client))

    def harmed_share(self, label: str) -> float | None:
        """Return the share of clients that are harmed beyond their intervals; None where no client has an interval."""
        verdicts = [benefit.verdict for benefit in self.benefits(label) if benefit.verdict]
        return verdicts.count(HARMED) / len(verdicts) if verdicts else None

    def _client_records(self) -> Iterator[JsonDict]:
        for row in self.rows:
            for seed, result in self.finished(row.label).items():
                sizes = {"n_train": result.facts.get("train_rows"), f"n_{self.split}": result.facts.get("rows")}
                names = self.client_names[seed]
                columns = {"client": range(len(names)), "name": names, **sizes, **result.scores[0].clients}
                present = {name: values for name, values in columns.items() if values is not None}
                for values in zip(*present.values(), strict=True):
                    yield {"algorithm": row.label, "seed": seed, **dict(zip(present, values, strict=True))}

    def frame(self, by: str = "client") -> pd.DataFrame:
        """Return the records as a DataFrame: a row per algorithm, seed and client, or per algorithm.

        By algorithm the last row is the base rate, if the results have it.
        """
        records = self.records(by)
        if by == "algorithm" and self.base:
            scored = {key for row in self.rows for key in row.scores}
            base = {key: value for key, value in self.base.items() if key in scored}
            records.append({"algorithm": BASE, "best": False, **base})
        return frame(records)

    def finished(self, label: str) -> dict[int, Result]:
        """Return the results of a row that have scores, by seed."""
        results = {seed: self.results.get((label, seed)) for seed in self.seeds}
        return {seed: result for seed, result in results.items() if result and result.scores}

    @cached_property
    def client_names(self) -> dict[int, Sequence[str]]:
        """By seed, the names of the clients; those of a divided dataset are numbered."""
        return {seed: _client_names([r for (_, s), r in self.results.items() if s == seed]) for seed in self.seeds}

    @cached_property
    def columns(self) -> tuple[Measure, ...]:
        """The measures of the table, the deciding one first; with small clients, pooled measures, too."""
        main, *others = (MEASURES[key] for key in self._compared)
        if not self.small_clients:
            return (main, *others)
        if self.small_clients == self.scored_clients:
            others = [column for column in others if column.key != WORST_TENTH]
        return (main, MEASURES[POOLED[main.key]], *(MEASURES[POOLED.get(column.key, column.key)] for column in others))

    @property
    def measures(self) -> list[str]:
        """The keys of all measures that the files have: those of both tables, and those of the usual one."""
        shown = [column.key for column in (*self.columns, *self.decisions)]
        return list(dict.fromkeys([*shown, *self._compared]))

    @property
    def _compared(self) -> tuple[str, ...]:
        """The keys of the usual table's measures, and the calibrated ones if every result has them."""
        known = [s.keys() for s in self._summaries]
        calibrated = (key for key in CALIBRATED.values() if known and all(key in keys for keys in known))
        return (*COMPARED[self.task], *calibrated)

    @cached_property
    def _summaries(self) -> list[JsonDict]:
        return [result.scores[0].summary for result in self.results.values() if result.scores]

    @cached_property
    def decisions(self) -> tuple[Measure, ...]:
        """The measures of the table of ranks and decisions, those that every result has: earlier ones lack some."""
        known = (key for key in DECIDED if all(key in summary for summary in self._summaries))
        return tuple(MEASURES[key] for key in known if any(s[key] is not None for s in self._summaries))

    @cached_property
    def _without_small(self) -> bool:
        """Whether means of ranks and decisions leave clients of few rows out: earlier results have no such means."""
        return all("base_ece" in summary for summary in self._summaries)

    @cached_property
    def class_names(self) -> list[str]:
        """The names of two classes, the positive one second; empty with more, and where earlier results lack them."""
        named = (result.facts["class_names"] for result in self.results.values() if "class_names" in result.facts)
        return list(next(named, ()))

    @property
    def large_only(self) -> dict[str, str]:
        """By key, the measures that leave clients of few rows out, and which clients count instead."""
        found = {m.key: {of_large(m.key, s) for s in self._summaries} - {""} for m in self.decisions}
        return {key: words.pop() for key, words in found.items() if words and self._without_small}

    @cached_property
    def base(self) -> dict[str, float]:
        """The scores of a model that knows only the clients' training labels, by measure, mean over seeds."""
        by_seed = [next(iter(self._finished_with(seed)), None) for seed in self.seeds]
        found: dict[str, float] = {}
        for key in self.measures:
            values = [self._base(result, key) for result in by_seed if result]
            numbers = [value for value in values if value is not None]
            if numbers and len(numbers) == len(values):
                found[key] = float(np.mean(numbers))
        return found

    def _finished_with(self, seed: int) -> list[Result]:
        return [result for (_, s), result in self.results.items() if s == seed and result.scores]

    def _base(self, result: Result, key: str) -> float | None:
        """Return the base rate's measure of the clients of one seed."""
        summary = result.scores[0].summary
        value: float | None = summary.get(self._key(key, summary, "base_"))
        return value

    @cached_property
    def counts(self) -> dict[int, np.ndarray]:
        """By seed, the number of rows that each client is scored on, where a run has recorded it."""
        return self._noted_counts("rows")

    @cached_property
    def train_counts(self) -> dict[int, np.ndarray]:
        """By seed, the number of rows that each client trains on, where a run has recorded it."""
        return self._noted_counts("train_rows")

    def _noted_counts(self, key: str) -> dict[int, np.ndarray]:
        noted = {seed: np.array(r.facts[key]) for (_, seed), r in self.results.items() if key in r.facts}
        return {seed: rows for seed, rows in noted.items() if len(rows) == len(self.client_names[seed])}

    @cached_property
    def small_clients(self) -> int:
        """The number of clients, of all seeds together, whose rows are so few that chance decides their measures."""
        return sum(int(((rows > 0) & (rows < FEW_ROWS)).sum()) for rows in self.counts.values())

    @property
    def scored_clients(self) -> int:
        """The number of clients, of all seeds together, that have rows to be scored on."""
        return sum(int((rows > 0).sum()) for rows in self.counts.values())

    @property
    def local(self) -> str | None:
        """The label of Local only, if it is compared and finished."""
        return next((row.label for row in self.rows if row.config.algorithm == LOCAL and row.scores), None)

    def score(self, label: str, seed: int, measure: str) -> float | None:
        """Return a finished run's measure of all clients; the worst tenth leaves small clients out."""
        if measure == WORST_TENTH and self.small_clients and seed in self.counts:
            values, large = self.values(label, seed, "accuracy"), self.counts[seed] >= FEW_ROWS
            accuracies = values[large & ~np.isnan(values)] if values is not None else np.zeros(0)
            return worst_decile(accuracies) if len(accuracies) else None
        summary = self.results[label, seed].scores[0].summary
        value: float | None = summary.get(self._key(measure, summary))
        return value

    def _key(self, measure: str, summary: JsonDict, prefix: str = "") -> str:
        """Return the key of a measure: clients of few rows count in the table's means, but not in those of decisions.

        They do not count in the base rate's worst tenth either.
        """
        decided = measure in DECIDED or (prefix and measure == WORST_TENTH)
        key = f"{prefix}{measure}"
        return key if self._without_small and decided else key_of_all(key, summary)

    def values(self, label: str, seed: int, measure: str) -> np.ndarray | None:
        """Return a measure of every client, NaN for a client without data; None where no run has the measure."""
        result = self.finished(label).get(seed)
        column = result.scores[0].clients.get(measure) if result else None
        return None if column is None else np.array(column, float)

    @cached_property
    def client_measures(self) -> list[str]:
        """The keys of every client's measures that any result has: those of earlier versions have fewer."""
        scored = (result.scores[0].clients for result in self.results.values() if result.scores)
        return list(dict.fromkeys(key for columns in scored for key in columns))

    def reliability(self, label: str) -> list[JsonDict]:
        """Return how often a row's predictions are right by confidence, over all seeds; empty if a seed lacks it."""
        tables = [result.scores[0].reliability for result in self.finished(label).values()]
        if not tables or not all(tables):
            return []
        bins = np.array(tables)  # seeds, bins, three
        count = bins[..., 2].sum(0)
        confidence, right = ((bins[..., i] * bins[..., 2]).sum(0) / np.maximum(count, 1) for i in (0, 1))
        return [
            {"confidence": c, "accuracy": a, "count": n} for c, a, n in np.stack([confidence, right, count], 1).tolist()
        ]

    def curve(self, label: str) -> list[JsonDict]:
        """Return a row's first measure after rounds, mean over seeds with half of its interval; empty without a curve.

        A round in which a seed could not be scored has no mean: it would be one of the other seeds alone.
        """
        curves, key = [r.by_round() for r in self.finished(label).values()], self.columns[0].key
        points: list[JsonDict] = []
        for round in curves[0] if curves and len(curves[0]) > 1 else ():
            lines = [curve.get(round, {}) for curve in curves]
            if all(key in line for line in lines):
                middle, half = mean([line[key_of_all(key, line)] for line in lines])
                points.append({"round": round, key: middle, f"{key}_half": half})
            else:
                error = next((line["error"] for line in lines if line.get("error")), "missing")
                points.append({"round": round, "eval_error": error})
        return points

    def distinct(self, name: str) -> list[Any]:
        """Return the distinct values of a fact over all runs, in their order."""
        return list({str(f): f for r in self.results.values() if (f := r.facts.get(name)) is not None}.values())

    @property
    def partition_hashes(self) -> dict[int, str]:
        """By seed, the hash of the data."""
        return {seed: result.facts["partition_hash"] for (_, seed), result in self.results.items()}


def _client_names(results: Sequence[Result]) -> Sequence[str]:
    """Return the names of the clients of a seed's results; those that no result names are numbered."""
    names = next((result.facts["names"] for result in results if "names" in result.facts), None)
    if names is not None:
        return names
    columns = (column for result in results for score in result.scores for column in score.clients.values())
    return [f"client-{i}" for i in range(len(next(columns, ())))]


def make(
    rows: Mapping[str, RunConfig],
    results: Mapping[tuple[str, int], Result],
    refused: Mapping[str, str],
    seeds: Sequence[int],
    same_clients: bool,
) -> Comparison:
    """Rank finished runs.

    `rows` are configurations by label, `results` finished cells by label and seed, and `refused` the reasons by label
    of rows that could not run. `same_clients` says whether the clients are the same with every seed.
    """
    scored = [result for result in results.values() if result.scores]
    task = "regression" if scored and "rmse" in scored[0].scores[0].summary else "classification"
    split = str(scored[0].facts["split"]) if scored else "test"
    comparison = Comparison([], tuple(seeds), task, split, results, same_clients)
    measured = [_measured(comparison, Row(label, config, refused.get(label))) for label, config in rows.items()]
    comparison = replace(comparison, rows=_ranked(comparison, measured))
    return replace(comparison, rows=[replace(row, harm=_harm(comparison, row)) for row in comparison.rows])


def _measured(comparison: Comparison, row: Row) -> Row:
    """Return a row with its own numbers."""
    results = {seed: r for (label, seed), r in comparison.results.items() if label == row.label}
    errors = {seed: results[seed].error for seed in comparison.seeds if seed in results}
    row = replace(row, diverged={seed: error for seed, error in errors.items() if error is not None})
    finished = comparison.finished(row.label)
    if not finished:
        return row
    values = {key: [comparison.score(row.label, seed, key) for seed in finished] for key in comparison.measures}
    scored = {key: [v for v in by_seed if v is not None] for key, by_seed in values.items()}
    scores = {key: interval(by_seed) for key, by_seed in scored.items() if by_seed}
    records = [result.facts for result in finished.values()]
    seconds = float(np.mean([record["seconds"] for record in records]))
    return replace(row, scores=scores, traffic=records[0]["bytes_up"] + records[0]["bytes_down"], seconds=seconds)


def _ranked(comparison: Comparison, rows: list[Row]) -> list[Row]:
    """Sort rows, the best first, and test its lead over the others; rows that diverged in a seed come last."""
    main = comparison.columns[0]
    rows = sorted(rows, key=lambda row: -main.better * row.scores[main.key][0] if row.scores else math.inf)
    complete = [row for row in rows if row.scores and not row.diverged]
    others = [row for row in rows if not row.scores or row.diverged]
    if len(complete) < 2:
        return complete + others
    best, *rivals = complete
    leads = [_lead(comparison, best, row) for row in rivals]
    ps = holm([lead.p for lead in leads])
    tested = [replace(row, lead=lead, p=p) for row, lead, p in zip(rivals, leads, ps, strict=True)]
    return [replace(best, best=True), *tested, *others]


def _lead(comparison: Comparison, best: Row, row: Row) -> Paired:
    """Test the lead of the best row over another."""
    main, differences, units = comparison.columns[0], [], []
    for seed in comparison.seeds:
        a, b = (comparison.values(candidate.label, seed, main.key) for candidate in (best, row))
        assert a is not None and b is not None
        both_scored = ~(np.isnan(a) | np.isnan(b))
        differences.append(main.better * (a - b)[both_scored])
        units.append([name for name, scored in zip(comparison.client_names[seed], both_scored, strict=True) if scored])
    return paired(differences, units if comparison.same_clients else None)


def _harm(comparison: Comparison, row: Row) -> Harm | None:
    """Compare every client under a row with itself under Local only, in the seeds that both finished."""
    if comparison.local is None or row.label == comparison.local:
        return None
    main, pairs = comparison.columns[0], []
    for seed in comparison.seeds:
        local_values, values = (comparison.values(label, seed, main.key) for label in (comparison.local, row.label))
        if local_values is not None and values is not None:
            for name, a, b in zip(comparison.client_names[seed], local_values.tolist(), values.tolist(), strict=True):
                pairs.append((main.better * (b - a), ClientLoss(seed, name, a, b)))
    pairs = [pair for pair in pairs if not math.isnan(pair[0])]
    if not pairs:
        return None
    lost = sorted(pair for pair in pairs if pair[0] < 0)
    equal = sum(gain == 0 for gain, _ in pairs)
    mean = float(np.mean([-gain for gain, _ in lost])) if lost else 0.0
    return Harm(len(lost), equal, len(pairs) - len(lost) - equal, mean, [loss for _, loss in lost[:WORST]])
