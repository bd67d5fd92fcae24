"""A finished comparison as text: tables, explanations, and the files table.md, table.csv, table.json, clients.csv."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..data.rows import FEW_ROWS
from ..evaluation.measures import Measure, size
from ..files.paths import write
from ..files.sealed import write_json
from ..files.sheets import csv_records, markdown_table
from ..report.page import Cell
from ..runs.config import Table
from ..version import __version__
from .ranking import LEVEL, WORST, Comparison, Loss, Row
from .statistics import SEEDS_TO_TEST

NONE = "–"
TABLE = "table.json"
Rows = list[list[Cell]]


def grid(found: Comparison, brief: bool = False, lead: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table as text; see `cells`."""
    return _text(*cells(found, brief, lead))


def harm_grid(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of harm as text; it has no rows without Local only."""
    return _text(*harm_cells(found))


def _text(head: list[str], rows: Rows) -> tuple[list[str], list[list[str]]]:
    return head, [[cell.text for cell in row] for row in rows]


def cells(found: Comparison, brief: bool = False, lead: bool = False) -> tuple[list[str], Rows]:
    """Return the head and the cells of the table.

    `brief` leaves out the intervals of all but the first two measures. With `lead` the third column is the difference
    to the best, where any row is tested.
    """
    lead = lead and any(row.lead for row in found.rows)
    head = ["algorithm", *(measure.heading for measure in found.columns), "traffic", "seconds"]
    if lead:
        head.insert(2, "behind")
    return head + ["harmed"] * bool(found.local), [_row(found, row, brief, lead) for row in found.rows]


def _row(found: Comparison, row: Row, brief: bool, lead: bool) -> list[Cell]:
    cells = [Cell(row.label)]
    for i, column in enumerate(found.columns):
        mean, half = row.scores.get(column.key, (None, None))
        cells.append(Cell(_mean(column, mean, None if brief and i > 1 else half), mean))
    main = cells[1]
    # The mark: the best, not significantly different from it, diverged in some seeds.
    mark = "* " if row.best else "≈ " if row.not_significant else "† " if row.diverged else ""
    text = "diverged" if row.diverged and not row.scores else mark + main.text
    cells[1] = Cell(text, main.value, best=row.best)
    if lead:
        mean, half = (row.lead.mean, row.lead.half) if row.lead else (None, None)
        cells.insert(2, Cell(_mean(found.columns[0], mean, half), mean))
    cells.append(Cell(NONE if row.traffic is None else size(row.traffic), row.traffic))
    cells.append(Cell(NONE if row.seconds is None else f"{row.seconds:.1f}", row.seconds))
    share = row.harm.share if row.harm else None
    return cells + [Cell(NONE if share is None else f"{share:.0%}", share)] * bool(found.local)


def _mean(column: Measure, mean: float | None, half: float | None) -> str:
    """Return a mean with half of its interval, where it has one."""
    if mean is None:
        return NONE
    return column.cell(mean) + ("" if half is None else f" ± {column.cell(half)}")


def harm_cells(found: Comparison) -> tuple[list[str], Rows]:
    """Return the head and the cells of the table of harm."""
    main, rows = found.columns[0], []
    for row in found.rows:
        if row.harm:
            counts = [Cell(str(n), n) for n in (row.harm.worse, row.harm.equal, row.harm.better)]
            loss = Cell(main.cell(row.harm.loss) if row.harm.worse else NONE, row.harm.loss)
            worst = Cell(_hit(found, row.harm.worst[0]) if row.harm.worst else NONE)
            rows.append([Cell(row.label), *counts, loss, worst])
    return ["algorithm", "worse", "equal", "better", f"mean loss ({_unit(main)})", "hit hardest"], rows


def _hit(found: Comparison, loss: Loss) -> str:
    """Return a client's loss, with its number of rows where these are few."""
    main, rows = found.columns[0], ""
    if (counts := found.counts.get(loss.seed)) is not None:
        count = int(counts[list(found.client_names[loss.seed]).index(loss.client)])
        rows = f", {_count(count, 'row')}" if count < FEW_ROWS else ""
    return f"{loss.client} (seed {loss.seed}{rows}): {main.cell(loss.alone)} → {main.cell(loss.here)}"


def _unit(column: Measure) -> str:
    return "points" if column.factor == 100 else column.heading


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def titled(found: Comparison) -> str:
    """Return a short title of the comparison."""
    config, count = found.rows[0].config, len(found.rows)
    name = Path(config.data).stem if config.data else config.dataset or "digits"
    return f"{_count(count, 'algorithm')} on {name}, {_count(len(found.seeds), 'seed')}"


def described(found: Comparison) -> str:
    """Return a title of the comparison with its setting."""
    config, clients = found.rows[0].config, len(found.client_names[found.seeds[0]])
    return f"{titled(found)}: {_count(clients, 'client')}, {config.model}, {_count(config.rounds, 'round')}"


def explained(found: Comparison, lead: bool = False) -> list[str]:
    """Explain the numbers and marks, and what is missing, a sentence each; with `lead` the column "behind", too."""
    count, data = len(found.seeds), "validation" if found.split == "val" else "test"
    pooled = " (ECE: all predictions together)" if found.task == "classification" else ""
    of = f"mean of {count} seeds ± half of its 95% interval (Student)" if count > 1 else f"seed {found.seeds[0]} alone"
    lines = [
        f"Every client's own model on its own {data} data, averaged over clients{pooled}; {of}.",
        "Traffic, up and down, is per client and round; seconds are per run.",
    ]
    if small := found.small_clients:
        rest = "; worst tenth: of the other clients" if small < found.scored_clients else ""
        lines.append(
            f"{small} of {found.scored_clients} clients{' (all seeds)' if count > 1 else ''} have fewer than "
            f"{FEW_ROWS} {data} rows, so chance decides their own measures. Pooled: every row counts alike{rest}. "
            "Order and marks go by the mean over clients."
        )
    if rivals := sum(row.lead is not None for row in found.rows):
        lines.append(_test(found, rivals))
        if lead:
            spread = " ± half of its 95% interval over seeds (of this pair alone, not corrected)" if count > 1 else ""
            lines.append(f"Behind: the best's lead over it{spread}.")
    if found.local is None:
        lines.append("Harm is not counted: it needs Local only, the algorithm 'local', among those compared.")
    else:
        lines.append("Harmed: clients that Local only serves better, be it by one sample; below is by how much.")
    for row in found.rows:
        if row.diverged:
            seeds = ", ".join(map(str, row.diverged))
            rest = "; the numbers are of the others" if row.scores else ""
            lines.append(f"† {row.label} diverged with seed {seeds}{rest}. {next(iter(row.diverged.values()))}")
    for reason in dict.fromkeys(row.refused for row in found.rows if row.refused):
        lines.append(f"{NONE} {', '.join(row.label for row in found.rows if row.refused == reason)}: {reason}")
    return lines


def _test(found: Comparison, rivals: int) -> str:
    """Explain the marks: which tests they come from, and how large a difference must be for the tests to see it."""
    count, main = len(found.seeds), found.columns[0]
    each = [len(names) for names in found.client_names.values()]
    clients = each[0] if found.same_clients else sum(each)
    best = f"* best {main.label}; ≈ not distinguishable from it"
    level = f"at {LEVEL:.0%}" + (f", Holm-corrected for {rivals} rivals" if rivals > 1 else "")
    if count < SEEDS_TO_TEST:
        return (
            f"{best} by a paired t-test over {clients} clients {level}. That holds for "
            f"{'this seed' if count == 1 else 'these two seeds'} alone: for others give at least "
            f"--seeds {SEEDS_TO_TEST}."
        )
    leads = [row.lead for row in found.rows if row.not_significant and row.lead is not None]
    # Holm has put those that are seen aside, so the level is shared by the others.
    gaps = [gap for lead in leads if (gap := lead.least(LEVEL / len(leads))) is not None]
    least = float(np.median(gaps)) if gaps else 0.0
    words = f"{main.factor * least:.{main.digits - 1}f} {_unit(main)}"
    return (
        f"{best}: at least one of the two paired tests is not significant {level}. They are t-tests over the "
        f"{count} seeds and over {clients} clients."
        + (f" With {count} seeds a gap below about {words} is not seen." if least else "")
    )


# -- files --------------------------------------------------------------------------------------------------------
def write_all(found: Comparison, folder: Path, command: str) -> None:
    """Write table.md, table.csv, table.json and clients.csv, with the same numbers."""
    write(folder / "table.md", markdown(found, command))
    write(folder / "table.csv", csv_records(_record(found, row) for row in found.rows))
    write_json(folder / TABLE, to_json(found, command))
    write(folder / "clients.csv", csv_records(_clients(found)))


def markdown(found: Comparison, command: str) -> str:
    """Return the comparison as a page of Markdown."""
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in each.items()) for each in found.facts("versions"))
    devices, types = (", ".join(map(str, found.facts(name))) for name in ("device", "dtype"))
    more = "".join(f"; {name} {', '.join(values)}" for name in ("code", "hardware") if (values := found.facts(name)))
    head, rows = grid(found, lead=True)
    for row, shown in zip(found.rows, rows, strict=True):
        if row.best:  # Markdown would read a star as its own
            shown[1] = f"**{shown[1].removeprefix('* ')}**"
    parts = [
        f"# {described(found)}",
        f"```\n{command}\n```",
        f"{time.strftime('%Y-%m-%d %H:%M')}, fedabml {__version__}, {versions}; on {devices}, {types}{more}.",
        markdown_table(head, rows),
        "\n\n".join(line.replace("* best", "Bold: best") for line in explained(found, lead=True)),
    ]
    harm_head, harm_rows = harm_grid(found)
    if harm_rows:
        parts += ["## Against Local only", markdown_table(harm_head, harm_rows)]
        losses = [(row.label, loss) for row in found.rows if row.harm for loss in row.harm.worst]
        losses = sorted(losses, key=lambda each: -abs(each[1].here - each[1].alone))[:WORST]
        parts.append(f"The {len(losses)} largest losses:")
        parts.append("\n".join(f"- {label}, {_hit(found, loss)}" for label, loss in losses))
    chosen = {row.label: ", ".join(f"{k} = {v}" for k, v in row.config.hyper.items()) for row in found.rows}
    hyper = [f"- {label}: {values or 'the defaults'}" for label, values in chosen.items()]
    hashes = [f"- seed {seed}: `{digest}`" for seed, digest in found.partition_hashes.items()]
    parts += ["## Hyperparameters", "\n".join(hyper), "## Partitions", "\n".join(hashes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(found: Comparison, command: str) -> Table:
    """Return everything about the comparison as table.json keeps it."""
    first = found.rows[0].config
    setting = {k: v for k, v in first.relevant().items() if k not in ("algorithm", "seed", first.algorithm)}
    facts = {name: found.facts(name) for name in ("versions", "device", "dtype", "fedabml", "code", "hardware")}
    hashes = {str(seed): digest for seed, digest in found.partition_hashes.items()}
    return {
        "command": command, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts, "setting": setting,
        "seeds": list(found.seeds), "split": found.split, "partition_hashes": hashes,
        "rows": [_object(found, row) for row in found.rows], "notes": explained(found, lead=True),
    }  # fmt: skip


def _object(found: Comparison, row: Row) -> Table:
    """Return a row as table.json keeps it: its record, with the scores of every seed and what else is known."""
    seeds = found.finished(row.label)
    return {"label": row.label} | _record(found, row) | {
        "algorithm": row.config.algorithm, "hyper": dict(row.config.hyper),
        "by_seed": {key: {str(s): found.score(row.label, s, key) for s in seeds} for key in found.measures},
        "diverged": {str(s): why for s, why in row.diverged.items()}, "curve": found.curve(row.label),
        "harm_most": [loss._asdict() for loss in row.harm.worst] if row.harm else [],
    }  # fmt: skip


def _record(found: Comparison, row: Row) -> Table:
    """Return a row as one record of numbers."""
    record: Table = {"algorithm": row.label, "refused": row.refused, "diverged": len(row.diverged)}
    for key in found.measures:
        record[key], record[f"{key}_half"] = row.scores.get(key, (None, None))
    lead, harm = row.lead, row.harm
    return record | {
        "traffic_bytes": row.traffic, "seconds": row.seconds, "best": row.best, "alike": row.not_significant,
        "behind": lead and lead.mean, "behind_half": lead and lead.half, "p": row.p,
        "p_seeds": lead and lead.p_seeds, "p_clients": lead and lead.p_clients,
        "harm_worse": harm and harm.worse, "harm_equal": harm and harm.equal, "harm_better": harm and harm.better,
        "harm_share": harm and harm.share, "harm_mean_loss": harm and harm.loss,
    }  # fmt: skip


def _clients(found: Comparison) -> Iterable[Table]:
    """Yield a record per algorithm, seed and client."""
    main = found.columns[0].key
    for row in found.rows:
        for seed in found.seeds:
            values, nll = found.values(row.label, seed, main), found.values(row.label, seed, "nll")
            alone = found.values(found.local or "", seed, main)
            if values is None or nll is None:
                continue
            for i, name in enumerate(found.client_names[seed]):
                local = None if alone is None else alone[i]
                yield {
                    "algorithm": row.label, "seed": seed, "client": i, "name": name, main: values[i], "nll": nll[i],
                    f"local_{main}": local, "difference": None if local is None else values[i] - local,
                }  # fmt: skip
