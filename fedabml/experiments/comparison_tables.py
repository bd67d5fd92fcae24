"""A finished comparison as text: tables, explanations, and the files table.md, table.csv, table.json, clients.csv."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..evaluation.decisions import SPECIFICITY
from ..evaluation.measures import FEW_ROWS, Measure, positive_class
from ..files.formats import size
from ..files.paths import write
from ..files.sealed import write_json
from ..files.sheets import csv_records, markdown_table
from ..report.page import TableCell
from ..report.score_tables import BASE_NOTE
from ..runs.config import JsonDict
from ..version import __version__
from .benefits import benefit_cells, benefit_heading, benefit_notes, benefit_records
from .class_tables import NOTE, class_cells, class_record
from .ranking import BASE, LEVEL, WORST, ClientLoss, Comparison, Row
from .statistics import SEEDS_TO_TEST

NONE = "–"
TABLE = "table.json"
Rows = list[list[TableCell]]


def grid(comparison: Comparison, brief: bool = False, lead: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table as text; see `cells`."""
    return _text(*cells(comparison, brief, lead))


def decision_grid(comparison: Comparison, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of ranks and decisions as text; see `decision_cells`."""
    return _text(*decision_cells(comparison, brief))


def harm_grid(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of harm as text; it has no rows without Local only."""
    return _text(*harm_cells(comparison))


def _text(head: list[str], rows: Rows) -> tuple[list[str], list[list[str]]]:
    return head, [[cell.text for cell in row] for row in rows]


def cells(comparison: Comparison, brief: bool = False, lead: bool = False) -> tuple[list[str], Rows]:
    """Return the head and the cells of the table.

    `brief` leaves out the intervals of all but the first two measures. With `lead` the third column is the difference
    to the best, where any row is tested.
    """
    lead = lead and any(row.lead for row in comparison.rows)
    head = ["algorithm", *(measure.heading for measure in comparison.columns), "traffic", "seconds"]
    if lead:
        head.insert(2, "behind")
    head += [_harm_heading(comparison)] * bool(comparison.local)
    rows = [_row(comparison, row, brief, lead) for row in comparison.rows]
    if base := _base(comparison, comparison.columns):
        base[2:2] = [TableCell(NONE)] * lead
        rows.append([*base, *[TableCell(NONE)] * (len(head) - len(base))])
    return head, rows


def decision_cells(comparison: Comparison, brief: bool = False) -> tuple[list[str], Rows]:
    """Return the head and the cells of the table of ranks and decisions; it has no rows where there are none.

    `brief` leaves out the intervals.
    """
    columns = comparison.decisions
    if not columns:
        return [], []
    head, rows = ["algorithm", *(measure.heading for measure in columns)], []
    for row in comparison.rows:
        scores = {column: row.scores.get(column.key, (None, None)) for column in columns}
        cells = [TableCell(_mean(column, m, None if brief else half), m) for column, (m, half) in scores.items()]
        rows.append([TableCell(row.label), *cells])
    base = _base(comparison, columns)
    return head, [*rows, *([base] if base else [])]


def _base(comparison: Comparison, columns: Sequence[Measure]) -> list[TableCell]:
    """Return the base rate's row; empty where results do not have it."""
    values = [comparison.base.get(column.key) for column in columns]
    cells = [TableCell(_mean(column, value, None), value) for column, value in zip(columns, values, strict=True)]
    return [TableCell(BASE), *cells] if any(value is not None for value in values) else []


def decision_notes(comparison: Comparison) -> list[str]:
    """Explain the table of ranks and decisions: who counts, and which specificity sensitivity is at."""
    lines = ["Pooled: the samples of all clients together. The others are means over clients."]
    if positive := positive_class({"class_names": comparison.class_names}):
        lines.append(f"Average precision, F1, recall, precision and sensitivity are those of {positive}.")
    if words := next(iter(comparison.large_only.values()), ""):
        lines.append(f"These means are over clients {words}, because chance decides the measures of the others.")
    if any(column.key == "sensitivity" for column in comparison.decisions):
        level = comparison.rows[0].config.specificity or SPECIFICITY
        lines.append(f"Sensitivity is at a specificity of {100 * level:g}% or more.")
    return lines if comparison.decisions else []


def _row(comparison: Comparison, row: Row, brief: bool, lead: bool) -> list[TableCell]:
    cells = [TableCell(row.label)]
    for i, column in enumerate(comparison.columns):
        mean, half = row.scores.get(column.key, (None, None))
        cells.append(TableCell(_mean(column, mean, None if brief and i > 1 else half), mean))
    main = cells[1]
    # The mark: the best, not significantly different from it, diverged in some seeds.
    mark = "* " if row.best else "≈ " if row.not_significant else "† " if row.diverged else ""
    text = "diverged" if row.diverged and not row.scores else mark + main.text
    cells[1] = TableCell(text, main.value, best=row.best)
    if lead:
        mean, half = (row.lead.mean, row.lead.half) if row.lead else (None, None)
        cells.insert(2, TableCell(_mean(comparison.columns[0], mean, half), mean))
    cells.append(TableCell(NONE if row.traffic is None else size(row.traffic), row.traffic))
    cells.append(TableCell(NONE if row.seconds is None else f"{row.seconds:.1f}", row.seconds))
    if comparison.local is None:
        return cells
    share = comparison.harmed_share(row.label)
    if _harm_heading(comparison) == "worse":
        share = row.harm.share if row.harm else None
    return [*cells, TableCell(NONE if share is None else f"{share:.0%}", share)]


def _harm_heading(comparison: Comparison) -> str:
    """Return "harmed" if any client has an interval, otherwise "worse", which counts the smallest difference, too."""
    known = any(comparison.harmed_share(row.label) is not None for row in comparison.rows)
    return "harmed" if known else "worse"


def _mean(column: Measure, mean: float | None, half: float | None) -> str:
    """Return a mean with half of its interval, where it has one."""
    if mean is None:
        return NONE
    return column.cell(mean) + ("" if half is None else f" ± {column.cell(half)}")


def harm_cells(comparison: Comparison) -> tuple[list[str], Rows]:
    """Return the head and the cells of the table of harm."""
    main, rows = comparison.columns[0], []
    for row in comparison.rows:
        if row.harm:
            counts = [TableCell(str(n), n) for n in (row.harm.worse, row.harm.equal, row.harm.better)]
            loss = TableCell(main.cell(row.harm.loss) if row.harm.worse else NONE, row.harm.loss)
            worst = TableCell(_hit(comparison, row.harm.worst[0]) if row.harm.worst else NONE)
            rows.append([TableCell(row.label), *counts, loss, worst])
    return ["algorithm", "worse", "equal", "better", f"mean loss ({_unit(main)})", "hit hardest"], rows


def _hit(comparison: Comparison, loss: ClientLoss) -> str:
    """Return a client's loss, with its number of rows where these are few."""
    main, rows = comparison.columns[0], ""
    if (counts := comparison.counts.get(loss.seed)) is not None:
        count = int(counts[list(comparison.client_names[loss.seed]).index(loss.client)])
        rows = f", {_count(count, 'row')}" if count < FEW_ROWS else ""
    return f"{loss.client} (seed {loss.seed}{rows}): {main.cell(loss.local_value)} → {main.cell(loss.value)}"


def _unit(column: Measure) -> str:
    return "points" if column.factor == 100 else column.heading


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def titled(comparison: Comparison) -> str:
    """Return a short title of the comparison."""
    config, count = comparison.rows[0].config, len(comparison.rows)
    name = Path(config.data).stem if config.data else config.dataset or "digits"
    return f"{_count(count, 'algorithm')} on {name}, {_count(len(comparison.seeds), 'seed')}"


def described(comparison: Comparison) -> str:
    """Return a title of the comparison with its setting."""
    config, clients = comparison.rows[0].config, len(comparison.client_names[comparison.seeds[0]])
    return f"{titled(comparison)}: {_count(clients, 'client')}, {config.model}, {_count(config.rounds, 'round')}"


def explained(comparison: Comparison, lead: bool = False) -> list[str]:
    """Explain the numbers and marks, and what is missing, a sentence each; with `lead` the column "behind", too."""
    count, data = len(comparison.seeds), "validation" if comparison.split == "val" else "test"
    pooled = " (ECE: all predictions together)" if comparison.task == "classification" else ""
    one_seed = f"seed {comparison.seeds[0]} alone"
    of = f"mean of {count} seeds ± half of its 95% interval (Student)" if count > 1 else one_seed
    lines = [
        f"Every client's own model on its own {data} data, averaged over clients{pooled}; {of}.",
        "Traffic, up and down, is per client and round; seconds are per run.",
    ]
    if small := comparison.small_clients:
        rest = "; worst tenth: of the other clients" if small < comparison.scored_clients else ""
        lines.append(
            f"{small} of {comparison.scored_clients} clients{' (all seeds)' if count > 1 else ''} have fewer than "
            f"{FEW_ROWS} {data} rows, so chance decides their own measures. Pooled: every row counts alike{rest}. "
            "Order and marks go by the mean over clients."
        )
    if comparison.base:
        lines.append(BASE_NOTE)
    if rivals := sum(row.lead is not None for row in comparison.rows):
        lines.append(_test(comparison, rivals))
        if lead:
            spread = " ± half of its 95% interval over seeds (of this pair alone, not corrected)" if count > 1 else ""
            lines.append(f"Behind: the best's lead over it{spread}.")
    if comparison.local is None:
        lines.append("Harm is not counted: it needs Local only, the algorithm 'local', among those compared.")
    elif _harm_heading(comparison) == "harmed":
        lines.append(
            "Harmed: clients that Local only serves better beyond chance, which is with the whole 95% interval of the "
            "client's own difference over seeds. Worse, below: by however little, each seed counted."
        )
    else:
        lines.append(
            "Worse: clients that Local only serves better, by however little, each seed counted. Which are harmed "
            f"beyond chance is not known: that takes the same clients with at least {SEEDS_TO_TEST} seeds."
        )
    for row in comparison.rows:
        if row.diverged:
            seeds = ", ".join(map(str, row.diverged))
            rest = "; the numbers are of the others" if row.scores else ""
            lines.append(f"† {row.label} diverged with seed {seeds}{rest}. {next(iter(row.diverged.values()))}")
    for reason in dict.fromkeys(row.refused for row in comparison.rows if row.refused):
        lines.append(f"{NONE} {', '.join(row.label for row in comparison.rows if row.refused == reason)}: {reason}")
    return lines


def _test(comparison: Comparison, rivals: int) -> str:
    """Explain the marks: which tests they come from, and how large a difference must be for the tests to see it."""
    count, main = len(comparison.seeds), comparison.columns[0]
    client_counts = [len(names) for names in comparison.client_names.values()]
    clients = client_counts[0] if comparison.same_clients else sum(client_counts)
    best = f"* best {main.label}; ≈ not distinguishable from it"
    level = f"at {LEVEL:.0%}" + (f", Holm-corrected for {rivals} rivals" if rivals > 1 else "")
    if count < SEEDS_TO_TEST:
        return (
            f"{best} by a paired t-test over {clients} clients {level}. That holds for "
            f"{'this seed' if count == 1 else 'these two seeds'} alone: for others give at least "
            f"--seeds {SEEDS_TO_TEST}."
        )
    leads = [row.lead for row in comparison.rows if row.not_significant and row.lead is not None]
    # Holm has put those that are seen aside, so the level is shared by the others.
    gaps = [least for lead in leads if (least := lead.least(LEVEL / len(leads))) is not None]
    median = float(np.median(gaps)) if gaps else 0.0
    gap = f"{main.factor * median:.{main.digits - 1}f} {_unit(main)}"
    return (
        f"{best}: at least one of the two paired tests is not significant {level}. They are t-tests over the "
        f"{count} seeds and over {clients} clients."
        + (f" With {count} seeds a gap below about {gap} is not seen." if median else "")
    )


# -- files --------------------------------------------------------------------------------------------------------
def write_all(comparison: Comparison, folder: Path, command: str) -> None:
    """Write table.md, table.csv, table.json, clients.csv and benefits.csv, with the same numbers."""
    write(folder / "table.md", markdown(comparison, command))
    write(folder / "table.csv", csv_records(_record(comparison, row) for row in comparison.rows))
    write_json(folder / TABLE, to_json(comparison, command))
    write(folder / "clients.csv", csv_records(_clients(comparison)))
    if records := list(benefit_records(comparison)):
        write(folder / "benefits.csv", csv_records(records))


def markdown(comparison: Comparison, command: str) -> str:
    """Return the comparison as a page of Markdown."""
    versions = "; ".join(
        ", ".join(f"{k} {v}" for k, v in packages.items()) for packages in comparison.distinct("versions")
    )
    devices, types = (", ".join(map(str, comparison.distinct(name))) for name in ("device", "dtype"))
    further = {name: comparison.distinct(name) for name in ("code", "hardware")}
    more = "".join(f"; {name} {', '.join(values)}" for name, values in further.items() if values)
    head, rows = grid(comparison, lead=True)
    for row, cells in zip(comparison.rows, rows, strict=False):  # the base rate is the last row of cells
        if row.best:  # Markdown would read a star as its own
            cells[1] = f"**{cells[1].removeprefix('* ')}**"
    parts = [
        f"# {described(comparison)}",
        f"```\n{command}\n```",
        f"{time.strftime('%Y-%m-%d %H:%M')}, fedabml {__version__}, {versions}; on {devices}, {types}{more}.",
        markdown_table(head, rows),
        "\n\n".join(line.replace("* best", "Bold: best") for line in explained(comparison, lead=True)),
    ]
    decided_head, decided_rows = decision_grid(comparison)
    if decided_rows:
        parts += ["## Ranks and decisions", markdown_table(decided_head, decided_rows)]
        parts.append("\n\n".join(decision_notes(comparison)))
    class_head, class_rows = _text(*class_cells(comparison))
    if class_rows:
        parts += ["## Classes", markdown_table(class_head, class_rows), NOTE]
    harm_head, harm_rows = harm_grid(comparison)
    if harm_rows:
        parts += ["## Against Local only", markdown_table(harm_head, harm_rows)]
        losses = [(row.label, loss) for row in comparison.rows if row.harm for loss in row.harm.worst]
        losses = sorted(losses, key=lambda item: -abs(item[1].value - item[1].local_value))[:WORST]
        parts.append(f"The {len(losses)} largest losses:")
        parts.append("\n".join(f"- {label}, {_hit(comparison, loss)}" for label, loss in losses))
    benefit_head, benefit_rows = _text(*benefit_cells(comparison))
    if benefit_rows:
        parts += [f"## {benefit_heading(comparison)}", markdown_table(benefit_head, benefit_rows)]
        parts.append("\n\n".join(benefit_notes(comparison)))
    chosen = {row.label: ", ".join(f"{k} = {v}" for k, v in row.config.hyper.items()) for row in comparison.rows}
    hyper = [f"- {label}: {values or 'the defaults'}" for label, values in chosen.items()]
    hashes = [f"- seed {seed}: `{digest}`" for seed, digest in comparison.partition_hashes.items()]
    parts += ["## Hyperparameters", "\n".join(hyper), "## Partitions", "\n".join(hashes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(comparison: Comparison, command: str) -> JsonDict:
    """Return everything about the comparison as table.json keeps it."""
    first = comparison.rows[0].config
    setting = {k: v for k, v in first.relevant().items() if k not in ("algorithm", "seed", first.algorithm)}
    provenance = {
        name: comparison.distinct(name) for name in ("versions", "device", "dtype", "fedabml", "code", "hardware")
    }
    hashes = {str(seed): digest for seed, digest in comparison.partition_hashes.items()}
    return {
        "command": command, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **provenance, "setting": setting,
        "seeds": list(comparison.seeds), "split": comparison.split, "partition_hashes": hashes,
        "rows": [_object(comparison, row) for row in comparison.rows], "notes": explained(comparison, lead=True),
        "base_rate": comparison.base,
    }  # fmt: skip


def _object(comparison: Comparison, row: Row) -> JsonDict:
    """Return a row as table.json keeps it: its record, with the scores of every seed and what else is known."""
    seeds = comparison.finished(row.label)
    return {"label": row.label} | _record(comparison, row) | {
        "algorithm": row.config.algorithm, "hyper": dict(row.config.hyper),
        "by_seed": {key: {str(s): comparison.score(row.label, s, key) for s in seeds} for key in comparison.measures},
        "diverged": {str(s): why for s, why in row.diverged.items()}, "curve": comparison.curve(row.label),
        "harm_most": [_loss(loss) for loss in row.harm.worst] if row.harm else [],
    }  # fmt: skip


def _loss(loss: ClientLoss) -> JsonDict:
    """Return a client's loss by the names that table.json has always had."""
    return {"seed": loss.seed, "client": loss.client, "alone": loss.local_value, "here": loss.value}


def _record(comparison: Comparison, row: Row) -> JsonDict:
    """Return a row as one record of numbers."""
    record: JsonDict = {"algorithm": row.label, "refused": row.refused, "diverged": len(row.diverged)}
    for key in comparison.measures:
        record[key], record[f"{key}_half"] = row.scores.get(key, (None, None))
    record |= class_record(comparison, row.label)
    lead, harm = row.lead, row.harm
    return record | {
        "traffic_bytes": row.traffic, "seconds": row.seconds, "best": row.best, "alike": row.not_significant,
        "behind": lead and lead.mean, "behind_half": lead and lead.half, "p": row.p,
        "p_seeds": lead and lead.p_seeds, "p_clients": lead and lead.p_clients,
        "harm_worse": harm and harm.worse, "harm_equal": harm and harm.equal, "harm_better": harm and harm.better,
        "harm_share": harm and harm.share, "harm_mean_loss": harm and harm.loss,
        "harm_share_significant": comparison.harmed_share(row.label),
    }  # fmt: skip


def _clients(comparison: Comparison) -> Iterable[JsonDict]:
    """Yield a record per algorithm, seed and client: the main measure beside Local only, and all that results hold."""
    main = comparison.columns[0].key
    measures = [key for key in comparison.client_measures if key not in (main, "nll")]
    for row in comparison.rows:
        for seed in comparison.seeds:
            values, nll = comparison.values(row.label, seed, main), comparison.values(row.label, seed, "nll")
            local_values = comparison.values(comparison.local or "", seed, main)
            if values is None or nll is None:
                continue
            columns = {key: comparison.values(row.label, seed, key) for key in measures}
            for i, name in enumerate(comparison.client_names[seed]):
                local = None if local_values is None else local_values[i]
                yield {
                    "algorithm": row.label, "seed": seed, "client": i, "name": name, main: values[i], "nll": nll[i],
                    f"local_{main}": local, "difference": None if local is None else values[i] - local,
                } | {key: None if column is None else column[i] for key, column in columns.items()}  # fmt: skip
