"""A finished comparison as text: tables, explanations, and the files table.md, table.csv, table.json, clients.csv."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..data.rows import FEW_ROWS
from ..evaluation.measures import Measure, size
from ..files.paths import write
from ..files.sealed import write_json
from ..files.sheets import csv_records, markdown_table
from ..runs.config import Table
from ..version import __version__
from .ranking import LEVEL, WORST, Comparison, Loss, Row
from .statistics import SEEDS_TO_TEST

NONE = "–"
TABLE = "table.json"


def grid(found: Comparison, brief: bool = False, behind: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of the table.

    `brief` leaves out the intervals of all but the first two measures. With `behind` the second column is the
    difference to the best, where any row is tested.
    """
    harmed = ["harmed"] if found.local else []
    head = ["algorithm", *(measure.heading for measure in found.columns), "traffic", "seconds", *harmed]
    rows = [_cells(found, row, brief) for row in found.rows]
    if behind and any(row.behind for row in found.rows):
        head.insert(2, "behind")
        for row, cells in zip(found.rows, rows, strict=True):
            cells.insert(2, _behind(found, row))
    return head, rows


def _behind(found: Comparison, row: Row) -> str:
    """Return the difference of a row to the best, with half of its interval."""
    if row.behind is None:
        return NONE
    column, half = found.columns[0], row.behind.half
    return column.cell(row.behind.mean) + ("" if half is None else f" ± {column.cell(half)}")


def _cells(found: Comparison, row: Row, brief: bool) -> list[str]:
    if not row.scores:
        word = NONE if row.refused else "diverged"
        return [row.label, word, *[NONE] * (len(found.columns) + 1 + (found.local is not None))]
    cells = [row.label]
    for i, column in enumerate(found.columns):
        if column.key not in row.scores:
            cells.append(NONE)
            continue
        mean, half = row.scores[column.key]
        known = "" if half is None or (brief and i > 1) else f" ± {column.cell(half)}"
        cells.append(f"{'' if i else _mark(row)}{column.cell(mean)}{known}")
    harmed = [NONE if row.harm is None else f"{row.harm.share:.0%}"] if found.local else []
    return [*cells, size(row.traffic or 0), f"{row.seconds:.1f}", *harmed]


def _mark(row: Row) -> str:
    """Return the mark before the first measure: the best, not different from it, diverged in some seeds."""
    return "* " if row.best else "≈ " if row.alike else "† " if row.diverged else ""


def explained(found: Comparison, behind: bool = False) -> list[str]:
    """Explain the numbers and marks, and what is missing, a sentence each; with `behind` that column, too."""
    count, main = len(found.seeds), found.columns[0]
    data = "validation" if found.split == "val" else "test"
    pooled = " (ECE: all predictions together)" if found.task == "classification" else ""
    of = f"mean of {count} seeds ± half of its 95% interval (Student)" if count > 1 else f"seed {found.seeds[0]} alone"
    lines = [
        f"Every client's own model on its own {data} data, averaged over clients{pooled}; {of}.",
        "Traffic, up and down, is per client and round; seconds are per run.",
    ]
    if found.small:
        rest = "; worst tenth: of the other clients" if found.small < found.scored else ""
        lines.append(
            f"{found.small} of {found.scored} clients{' (all seeds)' if count > 1 else ''} have fewer than {FEW_ROWS} "
            f"{data} rows, so chance decides their own measures. Pooled: every row counts alike{rest}. Order and marks "
            "go by the mean over clients."
        )
    rivals = sum(row.behind is not None for row in found.rows)
    if rivals:
        each = [len(names) for names in found.people.values()]
        clients = each[0] if found.same_clients else sum(each)
        best = f"* best {main.label}; ≈ not distinguishable from it"
        level = f"at {LEVEL:.0%}" + (f", Holm-corrected for {rivals} rivals" if rivals > 1 else "")
        if count >= SEEDS_TO_TEST:
            lines.append(
                f"{best}: at least one of the two paired tests is not significant {level}. They are t-tests over the "
                f"{count} seeds and over {clients} clients.{_power(found)}"
            )
        else:
            lines.append(
                f"{best} by a paired t-test over {clients} clients {level}. That holds for "
                f"{'this seed' if count == 1 else 'these two seeds'} alone: for others give at least "
                f"--seeds {SEEDS_TO_TEST}."
            )
        if behind:
            spread = " ± half of its 95% interval over seeds (of this pair alone, not corrected)" if count > 1 else ""
            lines.append(f"Behind: the best's lead over it{spread}.")
    if found.local is None:
        lines.append("Harm is not counted: it needs Local only, the algorithm 'local', among those compared.")
    else:
        lines.append("Harmed: clients that Local only serves better, be it by one sample; below is by how much.")
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.refused:
            reasons.setdefault(row.refused, []).append(row.label)
        elif row.diverged:
            seeds = ", ".join(map(str, row.diverged))
            rest = "; the numbers are of the others" if row.scores else ""
            lines.append(f"† {row.label} diverged with seed {seeds}{rest}. {next(iter(row.diverged.values()))}")
    lines += [f"{NONE} {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
    return lines


def _power(found: Comparison) -> str:
    """Say how large a difference must be for the tests to see it; nothing if all rows differ from the best."""
    main = found.columns[0]
    alike = [row.behind for row in found.rows if row.alike and row.behind is not None]
    # Holm has put those that are seen aside, so the level is shared by the others.
    gaps = [gap for lead in alike if (gap := lead.least(LEVEL / len(alike))) is not None]
    least = float(np.median(gaps)) if gaps else 0.0
    if not least:
        return ""
    words = f"{main.factor * least:.{main.digits - 1}f} {_unit(main)}"
    return f" With {len(found.seeds)} seeds a gap below about {words} is not seen."


def _unit(column: Measure) -> str:
    return "points" if column.factor == 100 else column.heading


def harm_grid(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of the table of harm; it is empty without Local only."""
    main = found.columns[0]
    head = ["algorithm", "worse", "equal", "better", f"mean loss ({_unit(main)})", "hit hardest"]
    rows = []
    for row in found.rows:
        if row.harm:
            loss = main.cell(row.harm.loss) if row.harm.worse else NONE
            worst = _hit(found, row.harm.worst[0]) if row.harm.worst else NONE
            rows.append([row.label, str(row.harm.worse), str(row.harm.equal), str(row.harm.better), loss, worst])
    return head, rows


def _hit(found: Comparison, loss: Loss) -> str:
    main, rows = found.columns[0], ""
    if (counts := found.counts.get(loss.seed)) is not None:
        count = int(counts[list(found.people[loss.seed]).index(loss.client)])
        rows = f", {count} row{'s' * (count != 1)}" if count < FEW_ROWS else ""
    return f"{loss.client} (seed {loss.seed}{rows}): {main.cell(loss.alone)} → {main.cell(loss.here)}"


def titled(found: Comparison) -> str:
    """Return a short title of the comparison."""
    config, count = found.rows[0].config, len(found.rows)
    name = Path(config.data).stem if config.data else config.dataset or "digits"
    return f"{_count(count, 'algorithm')} on {name}, {_count(len(found.seeds), 'seed')}"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def described(found: Comparison) -> str:
    """Return a title of the comparison with its setting."""
    config, clients = found.rows[0].config, len(found.people[found.seeds[0]])
    return f"{titled(found)}: {_count(clients, 'client')}, {config.model}, {_count(config.rounds, 'round')}"


# -- files --------------------------------------------------------------------------------------------------------
def write_all(found: Comparison, folder: Path, command: str) -> None:
    """Write table.md, table.csv, table.json and clients.csv, with the same numbers."""
    write(folder / "table.md", markdown(found, command))
    write(folder / "table.csv", csv_records(_flat(found, row) for row in found.rows))
    write_json(folder / TABLE, to_json(found, command))
    write(folder / "clients.csv", csv_records(_clients(found)))


def markdown(found: Comparison, command: str) -> str:
    """Return the comparison as a page of Markdown."""
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in each.items()) for each in found.facts("versions"))
    devices, types = (", ".join(map(str, found.facts(name))) for name in ("device", "dtype"))
    made = "".join(f"; {name} {', '.join(values)}" for name in ("code", "hardware") if (values := found.facts(name)))
    hashes = {seed: r.facts["partition_hash"] for (_, seed), r in found.results.items()}
    head, rows = grid(found, behind=True)
    bold = [_bold(row, cells) for row, cells in zip(found.rows, rows, strict=True)]
    harm_head, harm_rows = harm_grid(found)
    parts = [
        f"# {described(found)}",
        f"```\n{command}\n```",
        f"{time.strftime('%Y-%m-%d %H:%M')}, fedabml {__version__}, {versions}; on {devices}, {types}{made}.",
        markdown_table(head, bold),
        "\n\n".join(line.replace("* best", "Bold: best") for line in explained(found, behind=True)),
    ]
    if harm_rows:
        parts += ["## Against Local only", markdown_table(harm_head, harm_rows)]
        lost = sorted(((abs(w.here - w.alone), row.label, w) for row in found.rows if row.harm for w in row.harm.worst),
                      key=lambda each: -each[0])[:WORST]  # fmt: skip
        parts += [f"The {len(lost)} largest losses:", "\n".join(f"- {label}, {_hit(found, w)}" for _, label, w in lost)]
    chosen = {row.label: ", ".join(f"{k} = {v}" for k, v in row.config.hyper.items()) for row in found.rows}
    hyper = [f"- {label}: {words or 'the defaults'}" for label, words in chosen.items()]
    parts += ["## Hyperparameters", "\n".join(hyper), "## Partitions"]
    parts.append("\n".join(f"- seed {seed}: `{digest}`" for seed, digest in hashes.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _bold(row: Row, cells: list[str]) -> list[str]:
    """Return the cells with the best in bold instead of a star, which Markdown would read as its own."""
    first = cells[1].removeprefix("* ")
    return [cells[0], f"**{first}**" if row.best else first, *cells[2:]]


def to_json(found: Comparison, command: str) -> Table:
    """Return everything about the comparison as table.json keeps it."""
    first = found.rows[0].config
    setting = {k: v for k, v in first.relevant().items() if k not in ("algorithm", "seed", first.algorithm)}
    facts = {name: found.facts(name) for name in ("versions", "device", "dtype", "fedabml", "code", "hardware")}
    hashes = {str(seed): r.facts["partition_hash"] for (_, seed), r in found.results.items()}
    return {
        "command": command, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts, "setting": setting,
        "seeds": list(found.seeds), "split": found.split, "partition_hashes": hashes,
        "rows": [_object(found, row) for row in found.rows], "notes": explained(found, behind=True),
    }  # fmt: skip


def _object(found: Comparison, row: Row) -> Table:
    by_seed = {
        key: {
            str(s): found.score(row.label, s, key)
            for s in found.seeds
            if (r := found.results.get((row.label, s))) and r.scores
        }
        for key in found.measures
    }
    flat = _flat(found, row) | {"algorithm": row.config.algorithm}
    own = {"label": row.label, **flat, "hyper": dict(row.config.hyper), "by_seed": by_seed}
    own |= {"diverged": {str(s): why for s, why in row.diverged.items()}, "curve": found.curve(row.label)}
    return own | {"harm_most": [loss._asdict() for loss in row.harm.worst] if row.harm else []}


def _flat(found: Comparison, row: Row) -> Table:
    """Return a row as one record of numbers."""
    flat: Table = {"algorithm": row.label, "refused": row.refused, "diverged": len(row.diverged)}
    for key in found.measures:
        flat[key], flat[f"{key}_half"] = row.scores.get(key, (None, None))
    flat |= {"traffic_bytes": row.traffic, "seconds": row.seconds, "best": row.best, "alike": row.alike}
    tests = asdict(row.behind) if row.behind else dict.fromkeys(("mean", "half", "p_seeds", "p_clients"))
    flat |= {"behind": tests["mean"], "behind_half": tests["half"], "p": row.p}
    flat |= {"p_seeds": tests["p_seeds"], "p_clients": tests["p_clients"]}
    harm = row.harm
    return flat | {
        "harm_worse": harm and harm.worse, "harm_equal": harm and harm.equal, "harm_better": harm and harm.better,
        "harm_share": harm and harm.share, "harm_mean_loss": harm and harm.loss,
    }  # fmt: skip


def _clients(found: Comparison) -> Iterable[Table]:
    """Yield a record per algorithm, seed and client."""
    main = found.columns[0].key
    for row in found.rows:
        for seed in found.seeds:
            own, nll = found.values(row.label, seed, main), found.values(row.label, seed, "nll")
            alone = found.values(found.local or "", seed, main)
            if own is None or nll is None:
                continue
            for i, name in enumerate(found.people[seed]):
                local = None if alone is None else alone[i]
                yield {
                    "algorithm": row.label, "seed": seed, "client": i, "name": name, main: own[i], "nll": nll[i],
                    f"local_{main}": local, "difference": None if local is None else own[i] - local,
                }  # fmt: skip
