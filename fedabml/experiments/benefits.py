"""Who benefits? Every client once: what each algorithm brings it over training alone, with an interval over seeds.

A client's own score changes from seed to seed, with its test rows and with the training. So its gain is the mean over
seeds of the paired differences, with Student's 95% interval, and it counts as harmed only where the whole interval lies
below zero. That needs the same clients with every seed (your own data, or a fixed partition seed) and three seeds.
Without any effect, about one client in forty is found harmed by chance.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..report.page import TableCell
from ..runs.config import JsonDict
from .ranking import GAINS, HARMED, Comparison
from .statistics import SEEDS_TO_TEST

SHOWN_CLIENTS = 100  # clients of a table on a page; the file has all


def benefit_heading(comparison: Comparison) -> str:
    """Return the heading of the table, with the measure that gains are of."""
    return f"Who benefits? Gains in {comparison.columns[0].label}"


def benefit_cells(comparison: Comparison) -> tuple[list[str], list[list[TableCell]]]:
    """Return the head and the cells of a table with a row per client, the one that gains most from the best row first.

    Of more than `SHOWN_CLIENTS` clients it has the first and the last.
    """
    main = comparison.columns[0]
    by_label = {row.label: {b.client: b for b in comparison.benefits(row.label)} for row in comparison.rows}
    by_label = {label: by_client for label, by_client in by_label.items() if by_client}
    head = [
        "client",
        "train rows",
        f"{comparison.split} rows",
        f"alone: {main.heading}",
        *(f"gain by {label}" for label in by_label),
    ]
    if not by_label:
        return head, []
    order = list(next(iter(by_label.values())))
    if len(order) > SHOWN_CLIENTS:
        order = order[: SHOWN_CLIENTS // 2] + order[-SHOWN_CLIENTS // 2 :]
    rows = []
    for client in order:
        first = next(by_client[client] for by_client in by_label.values() if client in by_client)
        sizes = (first.train_rows, first.rows)
        cells = [TableCell(client), *(TableCell("–" if size is None else f"{size:.0f}", size) for size in sizes)]
        cells.append(TableCell(main.cell(first.alone), first.alone))
        for by_client in by_label.values():
            benefit = by_client.get(client)
            if benefit is None:
                cells.append(TableCell("–"))
                continue
            spread = "" if benefit.half is None else f" ± {main.cell(benefit.half)}"
            mark = {HARMED: " ▼", GAINS: " ▲"}.get(benefit.verdict, "")
            cells.append(TableCell(f"{main.cell(benefit.gain)}{spread}{mark}", benefit.gain))
        rows.append(cells)
    return head, rows


def benefit_notes(comparison: Comparison) -> list[str]:
    """Explain the table of benefits in sentences; and say why there is none."""
    if comparison.local is None:
        return []
    if not comparison.repeated:
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
        verdicts = [benefit.verdict for benefit in comparison.benefits(row.label)]
        if any(verdicts):
            gains, harmed = verdicts.count(GAINS), verdicts.count(HARMED)
            lines.append(f"{row.label}: {gains} of {len(verdicts)} clients gain, {harmed} are harmed.")
    return lines


def benefit_records(comparison: Comparison) -> Iterable[JsonDict]:
    """Yield a record per algorithm and client, as benefits.csv keeps them."""
    main = comparison.columns[0].key
    for row in comparison.rows:
        for benefit in comparison.benefits(row.label):
            yield {
                "algorithm": row.label, "client": benefit.client, "rows": benefit.rows,
                "train_rows": benefit.train_rows, f"local_{main}": benefit.alone,
                "gain": benefit.gain, "gain_half": benefit.half, "seeds": benefit.seeds, "verdict": benefit.verdict,
            }  # fmt: skip
