"""A finished comparison as numbers: a row per algorithm, who is best, who is harmed; as Markdown, CSV and JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.rows import FEW_ROWS
from ..data.statistics import worst_decile
from ..evaluation.measures import COMPARED, MEASURES, POOLED, Measure, size
from ..files.paths import write
from ..files.sealed import write_json
from ..files.sheets import csv_text
from ..runs.config import RunConfig, Table
from ..version import __version__
from .cell import Result
from .statistics import SEEDS_TO_TEST, Paired, holm, interval, mean, paired

LEVEL = 0.05  # of the tests
LOCAL = "local"  # the algorithm that harm is held against
WORST = 10  # so many of the clients that lose most are listed
NONE = "–"
TABLE = "table.json"


WORST_TENTH = "accuracy_worst_decile"


class Loss(NamedTuple):
    """A client that a method serves worse than training alone would."""

    seed: int
    client: str
    alone: float
    here: float


@dataclass(frozen=True)
class Harm:
    """How many clients (of all seeds together) a method serves worse than Local only does, equally, and better."""

    worse: int
    equal: int
    better: int
    loss: float  # mean, of those it serves worse
    worst: list[Loss]

    @property
    def share(self) -> float:
        """Of the clients, those served worse."""
        return self.worse / (self.worse + self.equal + self.better)


@dataclass(frozen=True)
class Row:
    """A line of the table. One that was refused has a reason and no numbers; so has one that diverged in every seed."""

    label: str
    config: RunConfig
    scores: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # by measure: mean, half interval
    traffic: float | None = None  # bytes up and down, per client and round
    seconds: float | None = None
    refused: str | None = None
    diverged: dict[int, str] = field(default_factory=dict)  # by seed, what was said
    best: bool = False
    behind: Paired | None = None  # the best's lead over this row
    p: float | None = None  # of that lead, corrected for the number of rivals
    harm: Harm | None = None

    @property
    def alike(self) -> bool:
        """Whether it cannot be told from the best."""
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
        """The measures of the table, the one that decides first; with small clients, pooled ones too."""
        main, *others = (MEASURES[key] for key in COMPARED[self.task])
        if not self.small:
            return (main, *others)
        if self.small == self.scored:
            others = [column for column in others if column.key != WORST_TENTH]
        return (main, MEASURES[POOLED[main.key]], *(MEASURES[POOLED.get(column.key, column.key)] for column in others))

    @property
    def measures(self) -> list[str]:
        """The keys of all measures that the files have: those of the table, and those it would usually have."""
        return list(dict.fromkeys([*(column.key for column in self.columns), *COMPARED[self.task]]))

    @cached_property
    def counts(self) -> dict[int, np.ndarray]:
        """By seed, how many rows each client is scored on, where a run has noted them; 0: it is not scored."""
        noted = {seed: np.array(r.facts["rows"]) for (_, seed), r in self.results.items() if "rows" in r.facts}
        return {seed: rows for seed, rows in noted.items() if len(rows) == len(self.people[seed])}

    @cached_property
    def small(self) -> int:
        """The number of clients, of all seeds together, with so few rows that chance decides their measures."""
        return sum(int(((rows > 0) & (rows < FEW_ROWS)).sum()) for rows in self.counts.values())

    @property
    def scored(self) -> int:
        """The number of clients, of all seeds together, that have rows to be scored on, where that is noted."""
        return sum(int((rows > 0).sum()) for rows in self.counts.values())

    def score(self, label: str, seed: int, measure: str) -> float | None:
        """A finished run's measure of all clients; the worst tenth is of clients that are not small."""
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
        """A measure of every client, NaN for a client without data; None where there is no such run or measure."""
        result = self.results.get((label, seed))
        column = result.scores[0].clients.get(measure) if result and result.scores else None
        return None if column is None else np.array(column, float)

    def reliability(self, label: str) -> list[Table]:
        """How often a row's predictions of a confidence are right, seeds together; none if a seed has not kept it."""
        own = [r.scores[0].reliability for s in self.seeds if (r := self.results.get((label, s))) and r.scores]
        if not own or not all(own):
            return []
        bins = np.array(own)  # seeds, bins, three
        count = bins[..., 2].sum(0)
        sure, right = ((bins[..., i] * bins[..., 2]).sum(0) / np.maximum(count, 1) for i in (0, 1))
        return [{"confidence": c, "accuracy": a, "count": n} for c, a, n in np.stack([sure, right, count], 1).tolist()]

    def curve(self, label: str) -> list[Table]:
        """A row's first measure after rounds, mean over seeds with half of its interval; none if none was watched.

        A round in which some seed could not be scored has no mean, which would be one of other seeds.
        """
        own = [r.seen() for s in self.seeds if (r := self.results.get((label, s))) and r.scores]
        return [self._point(t, [seen.get(t, {}) for seen in own]) for t in own[0]] if own and len(own[0]) > 1 else []

    def _point(self, round: int, lines: Sequence[Table]) -> Table:
        key = self.columns[0].key
        values = [line[key] for line in lines if key in line]
        if len(values) < len(lines):
            return {"round": round, "eval_error": next((e for line in lines if (e := line.get("error"))), "missing")}
        middle, half = mean(values)
        return {"round": round, key: middle, f"{key}_half": half}

    def facts(self, name: str) -> list[Any]:
        """The distinct values of a fact over all runs, in their order."""
        return list({str(f): f for r in self.results.values() if (f := r.facts.get(name)) is not None}.values())


def make(
    rows: Mapping[str, RunConfig],
    results: Mapping[tuple[str, int], Result],
    refused: Mapping[str, str],
    people: Mapping[int, Sequence[str]],
    same_clients: bool,
) -> Comparison:
    """The table of finished runs."""
    scored = [result for result in results.values() if result.scores]
    task = "regression" if scored and "rmse" in scored[0].scores[0].summary else "classification"
    split = str(scored[0].facts["split"]) if scored else "test"
    bare = [Row(label, config, refused=refused.get(label)) for label, config in rows.items()]
    found = Comparison(bare, tuple(people), task, split, results, people, same_clients)
    done = _ranked(found, [_measured(found, row) for row in bare])
    found = replace(found, rows=done)
    return replace(found, rows=[replace(row, harm=_harm(found, row)) for row in done])


def _measured(found: Comparison, row: Row) -> Row:
    """A row with its own numbers."""
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
    """The best first, then the others with the tests of its lead. A row that diverged in some seed stays out of it."""
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
    main, differences, units = found.columns[0], [], []
    for seed in found.seeds:
        a, b = (found.values(each.label, seed, main.key) for each in (best, row))
        assert a is not None and b is not None
        known = ~(np.isnan(a) | np.isnan(b))
        differences.append(main.better * (a - b)[known])
        units.append([name for name, fine in zip(found.people[seed], known, strict=True) if fine])
    return paired(differences, units if found.same_clients else None)


def _harm(found: Comparison, row: Row) -> Harm | None:
    """Every client under a row against itself under Local only, in the seeds that both finished."""
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


# -- in words -----------------------------------------------------------------------------------------------------
def grid(found: Comparison, brief: bool = False, behind: bool = False) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table; `brief` leaves out the intervals of all but the first measures.

    With `behind` the second column has the difference to the best, where any row is tested.
    """
    harmed = ["harmed"] if found.local else []
    head = ["algorithm", *(measure.heading for measure in found.columns), "traffic", "seconds", *harmed]
    rows = [_cells(found, row, brief) for row in found.rows]
    if behind and _tested(found):
        head.insert(2, "behind")
        for row, cells in zip(found.rows, rows, strict=True):
            cells.insert(2, _behind(found, row))
    return head, rows


def _tested(found: Comparison) -> list[Paired]:
    """The tests of the best against its rivals."""
    return [row.behind for row in found.rows if row.behind is not None]


def _behind(found: Comparison, row: Row) -> str:
    """What a row lacks to the best, with half of its interval."""
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
    """The mark before the first measure: the best, one like it, one that diverged in some seeds."""
    return "* " if row.best else "≈ " if row.alike else "† " if row.diverged else ""


def explained(found: Comparison, behind: bool = False) -> list[str]:
    """What the numbers and marks mean, and what is missing, a sentence each; `behind`: of that column, too."""
    count, main = len(found.seeds), found.columns[0]
    data = "validation" if found.split == "val" else "test"
    pooled = " (ECE: all predictions together)" if found.task == "classification" else ""
    of = f"mean of {count} seeds ± half of its 95% interval (Student)" if count > 1 else f"seed {found.seeds[0]} alone"
    said = [
        f"Every client's own model on its own {data} data, averaged over clients{pooled}; {of}. Traffic, up and down, "
        "is per client and round; seconds are per run."
    ]
    if found.small:
        rest = "; worst tenth: of the other clients" if found.small < found.scored else ""
        said.append(
            f"{found.small} of {found.scored} clients{' (all seeds)' if count > 1 else ''} have fewer than {FEW_ROWS} "
            f"{data} rows, so chance decides their own measures. Pooled: every row counts alike{rest}. Order and marks "
            "go by the mean over clients."
        )
    leads = _tested(found)
    rivals = len(leads)
    if rivals:
        each = [len(names) for names in found.people.values()]
        clients = each[0] if found.same_clients else sum(each)
        best = f"* best {main.label}; ≈ not distinguishable from it"
        level = f"at {LEVEL:.0%}" + (f", Holm-corrected for {rivals} rivals" if rivals > 1 else "")
        if count >= SEEDS_TO_TEST:
            said.append(
                f"{best}: paired t-tests over the {count} seeds and over {clients} clients do not both see a "
                f"difference {level}.{_power(found)}"
            )
        else:
            said.append(
                f"{best} by a paired t-test over {clients} clients {level}. That tells of "
                f"{'this seed' if count == 1 else 'these two seeds'} alone: for others give at least "
                f"--seeds {SEEDS_TO_TEST}."
            )
        if behind:
            spread = " ± half of its 95% interval over seeds (of this pair alone, not corrected)" if count > 1 else ""
            said.append(f"Behind: the best's lead over it{spread}.")
    if found.local is None:
        said.append("Harm is not counted: it needs Local only, the algorithm 'local', among those compared.")
    else:
        said.append("Harmed: clients that Local only serves better, be it by one sample; below is by how much.")
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.refused:
            reasons.setdefault(row.refused, []).append(row.label)
        elif row.diverged:
            seeds = ", ".join(map(str, row.diverged))
            rest = "; the numbers are of the others" if row.scores else ""
            said.append(f"† {row.label} diverged with seed {seeds}{rest}. {next(iter(row.diverged.values()))}")
    said += [f"{NONE} {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
    return said


def _power(found: Comparison) -> str:
    """How large a gap must be for this table to see it, in a sentence; none if it tells all rows from the best."""
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
    """Head and cells of the harm table; without rows where nothing can be said."""
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
    """The comparison in a few words."""
    config, count = found.rows[0].config, len(found.rows)
    name = Path(config.data).stem if config.data else config.dataset or "digits"
    return f"{_count(count, 'algorithm')} on {name}, {_count(len(found.seeds), 'seed')}"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def described(found: Comparison) -> str:
    """The comparison and its setting in a line."""
    config, clients = found.rows[0].config, len(found.people[found.seeds[0]])
    return f"{titled(found)}: {_count(clients, 'client')}, {config.model}, {_count(config.rounds, 'round')}"


# -- files --------------------------------------------------------------------------------------------------------
def write_all(found: Comparison, folder: Path, command: str) -> None:
    """table.md, table.csv, table.json and clients.csv, with the same numbers."""
    write(folder / "table.md", markdown(found, command))
    write(folder / "table.csv", _csv(_flat(found, row) for row in found.rows))
    write_json(folder / TABLE, to_json(found, command))
    write(folder / "clients.csv", _csv(_clients(found)))


def markdown(found: Comparison, command: str) -> str:
    """The comparison as a page of Markdown."""
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
        _pipes(head, bold),
        "\n\n".join(line.replace("* best", "Bold: best") for line in explained(found, behind=True)),
    ]
    if harm_rows:
        parts += ["## Against Local only", _pipes(harm_head, harm_rows)]
        lost = sorted(((abs(w.here - w.alone), row.label, w) for row in found.rows if row.harm for w in row.harm.worst),
                      key=lambda each: -each[0])[:WORST]  # fmt: skip
        parts += [f"The {len(lost)} largest losses:", "\n".join(f"- {label}, {_hit(found, w)}" for _, label, w in lost)]
    hyper = [f"- {row.label}: {_words(row.config.hyper)}" for row in found.rows]
    parts += ["## Hyperparameters", "\n".join(hyper), "## Partitions"]
    parts.append("\n".join(f"- seed {seed}: `{digest}`" for seed, digest in hashes.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _bold(row: Row, cells: list[str]) -> list[str]:
    """The cells without the star, which Markdown would take for its own."""
    first = cells[1].removeprefix("* ")
    return [cells[0], f"**{first}**" if row.best else first, *cells[2:]]


def _words(hyper: Table) -> str:
    return ", ".join(f"{k} = {v}" for k, v in hyper.items()) or "the defaults"


def _pipes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_json(found: Comparison, command: str) -> Table:
    """Everything about the comparison, as JSON."""
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
    """A row as one line of numbers."""
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
    """A row per algorithm, seed and client."""
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


def _csv(rows: Iterable[Table]) -> str:
    lines = list(rows)
    return csv_text(list(lines[0]) if lines else [], (map(_plain, line.values()) for line in lines))


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
