"""Who benefits? Every client once: what each algorithm brings it over training alone, with an interval over seeds.

A client's own score changes from seed to seed, with its test rows and with the training. So its gain is the mean over
seeds of the paired differences, with Student's 95% interval, and it counts as harmed only where the whole interval lies
below zero. That needs the same clients with every seed (your own data, or a fixed partition seed) and three seeds.
Without any effect, about one client in forty is found harmed by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..evaluation.measures import Measure
from ..report.page import Cell
from ..runs.config import Table
from .statistics import SEEDS_TO_TEST, interval

SHOWN = 100  # clients of a table on a page; the file has all
HARMED, GAINS, OPEN = "harmed", "gains", "not significant"


class Labelled(Protocol):
    """A row of a comparison, as these tables need it."""

    @property
    def label(self) -> str: ...


class Comparison(Protocol):
    """A comparison as these tables read it: `ranking.Comparison`, which has the share of harmed clients from here."""

    @property
    def rows(self) -> Sequence[Labelled]: ...

    @property
    def seeds(self) -> Sequence[int]: ...

    @property
    def same_clients(self) -> bool: ...

    @property
    def local(self) -> str | None: ...

    @property
    def columns(self) -> Sequence[Measure]: ...

    @property
    def client_names(self) -> Mapping[int, Sequence[str]]: ...

    @property
    def counts(self) -> Mapping[int, np.ndarray]: ...

    def values(self, label: str, seed: int, measure: str) -> np.ndarray | None: ...


@dataclass(frozen=True)
class Benefit:
    """What one algorithm brings one client: means over the seeds in which both it and Local only have a score."""

    client: str
    rows: float | None  # that the client is scored on, mean over seeds
    alone: float
    gain: float  # above zero is better, whatever the measure
    half: float | None  # of the 95% interval of the gain; None with too few seeds
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the gain's interval lies below zero, above it, or around it; empty without an interval."""
        if self.half is None:
            return ""
        return HARMED if self.gain + self.half < 0 else GAINS if self.gain - self.half > 0 else OPEN


def benefits(comparison: Comparison, label: str) -> list[Benefit]:
    """Return every client's benefit from a row over Local only, the largest first.

    Empty without Local only, for Local only itself, and where clients are other ones with every seed.
    """
    if comparison.local is None or label == comparison.local or not _repeated(comparison):
        return []
    main = comparison.columns[0]
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for seed in comparison.seeds:
        local_values, row_values = (comparison.values(row, seed, main.key) for row in (comparison.local, label))
        if local_values is None or row_values is None:
            continue
        names = comparison.client_names[seed]
        rows = comparison.counts.get(seed, np.full(len(names), math.nan))
        for name, a, b, count in zip(names, local_values.tolist(), row_values.tolist(), rows.tolist(), strict=True):
            if not math.isnan(a) and not math.isnan(b):
                pairs.setdefault(name, []).append((a, main.better * (b - a), count))
    gained = []
    for name, values in pairs.items():
        local_scores, gains, counts = (list(column) for column in zip(*values, strict=True))
        gain, half = interval(gains)
        count = float(np.mean(counts))
        enough = len(gains) >= SEEDS_TO_TEST
        gained.append(
            Benefit(name, None if math.isnan(count) else count, float(np.mean(local_scores)), gain,
                    half if enough else None, len(gains))
        )  # fmt: skip
    return sorted(gained, key=lambda benefit: (-benefit.gain, benefit.client))


def _repeated(comparison: Comparison) -> bool:
    """Return whether clients can be matched across seeds: they are the same with every seed, or there is one seed."""
    return comparison.same_clients or len(comparison.seeds) == 1


def harmed_share(comparison: Comparison, label: str) -> float | None:
    """Return the share of clients that are harmed beyond their intervals; None where no client has an interval."""
    verdicts = [benefit.verdict for benefit in benefits(comparison, label) if benefit.verdict]
    return verdicts.count(HARMED) / len(verdicts) if verdicts else None


def benefit_cells(comparison: Comparison) -> tuple[list[str], list[list[Cell]]]:
    """Return the head and the cells of a table with a row per client, the one that gains most from the best row first.

    Of more than `SHOWN` clients it has the first and the last.
    """
    main = comparison.columns[0]
    by_label = {row.label: {b.client: b for b in benefits(comparison, row.label)} for row in comparison.rows}
    by_label = {label: by_client for label, by_client in by_label.items() if by_client}
    head = ["client", "rows", f"alone: {main.heading}", *(f"gain by {label}" for label in by_label)]
    if not by_label:
        return head, []
    order = list(next(iter(by_label.values())))
    if len(order) > SHOWN:
        order = order[: SHOWN // 2] + order[-SHOWN // 2 :]
    rows = []
    for client in order:
        first = next(by_client[client] for by_client in by_label.values() if client in by_client)
        cells = [Cell(client), Cell("–" if first.rows is None else f"{first.rows:.0f}", first.rows)]
        cells.append(Cell(main.cell(first.alone), first.alone))
        for by_client in by_label.values():
            benefit = by_client.get(client)
            if benefit is None:
                cells.append(Cell("–"))
                continue
            spread = "" if benefit.half is None else f" ± {main.cell(benefit.half)}"
            mark = {HARMED: " ▼", GAINS: " ▲"}.get(benefit.verdict, "")
            cells.append(Cell(f"{main.cell(benefit.gain)}{spread}{mark}", benefit.gain))
        rows.append(cells)
    return head, rows


def benefit_notes(comparison: Comparison) -> list[str]:
    """Explain the table of benefits in sentences; and say why there is none."""
    if comparison.local is None:
        return []
    if not _repeated(comparison):
        return [
            "Who benefits is not shown per client: every seed divides the data anew, so a client occurs once. Fix the "
            "clients with --partition-seed 0, or use your own data."
        ]
    if len(comparison.seeds) < SEEDS_TO_TEST:
        return [f"Harm beyond chance needs at least {SEEDS_TO_TEST} seeds; with fewer a client has no interval."]
    lines = [
        "A gain is a client's own mean over seeds against Local only, ± half of its 95% interval (Student); above zero "
        "is better. ▲ gains and ▼ harmed: the whole interval is on one side of zero. By chance alone about one client "
        "in forty is marked ▼."
    ]
    for row in comparison.rows:
        verdicts = [benefit.verdict for benefit in benefits(comparison, row.label)]
        if any(verdicts):
            gains, harmed = verdicts.count(GAINS), verdicts.count(HARMED)
            lines.append(f"{row.label}: {gains} of {len(verdicts)} clients gain, {harmed} are harmed.")
    return lines


def benefit_records(comparison: Comparison) -> Iterable[Table]:
    """Yield a record per algorithm and client, as benefits.csv keeps them."""
    main = comparison.columns[0].key
    for row in comparison.rows:
        for benefit in benefits(comparison, row.label):
            yield {
                "algorithm": row.label, "client": benefit.client, "rows": benefit.rows, f"local_{main}": benefit.alone,
                "gain": benefit.gain, "gain_half": benefit.half, "seeds": benefit.seeds, "verdict": benefit.verdict,
            }  # fmt: skip
