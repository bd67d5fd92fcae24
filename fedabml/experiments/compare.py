"""Comparing algorithms: one federation setting, one list of seeds, one budget, a row per algorithm.

    rows = configs(["fedabml", "fedavg-ft", "local"], {"clients": 20, "rounds": 10})
    comparison = compare(rows, seeds=3, out="runs/my-comparison")
    print(comparison.rows[0].label, comparison.rows[0].scores["accuracy"])

The folder gets comparison.json (the request), cells.jsonl (a line per finished run), manifest-SEED.json and
partition-SEED.svg (the first seed's partition) and, when all runs are finished, table.md, table.csv, table.json,
clients.csv and report.html. A finished run is never run again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..accel.process import borrowed
from ..algorithms import REGISTRY
from ..arguments import MAX_INTEGER, checked_integer
from ..data.once import reading_once
from ..engine.processes import with_folder_lock
from ..errors import InputError, nearest
from ..evaluation.scoring import check_rows
from ..files.paths import write
from ..files.sealed import read_json, write_json
from ..report import save_heat_map
from ..runs.config import JsonDict, RunConfig, command_line_name, names, upgrade_config
from ..runs.prepare import resolve_split
from ..runs.request import command, describe, differences, flags, resume_command
from .cell import MACHINE, Cell, Result, along
from .comparison_page import render
from .comparison_tables import TABLE, write_all
from .ledger import Ledger
from .ranking import Comparison, make
from .request import begun, read, real_paths, refuse_changes
from .runner import SILENT, Callbacks, execute, refusals
from .study import PLAIN, Given, Study

if TYPE_CHECKING:
    from ..data import Federation
    from ..data.download import Progress

REQUEST, CELLS = "comparison.json", "cells.jsonl"
MANIFEST, PICTURE = "manifest-{}.json", "partition-{}.svg"  # of the first seed's data
# Keys of a run that a comparison decides itself, and how a user chooses them instead.
SET_BY_COMPARE = {"algorithm": "use --algorithms instead.", "seed": "use --seeds instead."}
SET_BY_COMPARE |= dict.fromkeys(("evaluate", "eval_clients", "eval_all"), "every client is scored at the end.")
MAY_CHANGE = {*MACHINE} - {"eval_every"}  # keys of the setting that a resumed comparison may change
MANY_SEEDS = 10_000
# Which default step sizes a comparison's rows rely on. Those written without it have other ones than today's.
DEFAULTS_VERSION, FORMER = 2, {"lr": 0.03, "personal_lr": "none"}
FORMER_OWN = {name: {"personal_epochs": 0} for name in ("ditto", "fedrep", "pfedbayes")}
Rows = dict[str, RunConfig]


def configs(algorithms: Sequence[str], *layers: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Rows:
    """Return a configuration per algorithm, with the hyperparameters of its own table in the layers (`RunConfig.of`).

    `overrides`, the last layer (--set), may have tables for the named algorithms and no others.
    """
    overrides, algorithm_names = overrides or {}, names("algorithm")
    for name in overrides:
        if name in SET_BY_COMPARE:
            raise InputError(f"--set {name}=… is not accepted here: {SET_BY_COMPARE[name]}")
        if name in algorithm_names and name not in algorithms:
            raise InputError(
                f"--set {name}.… is for {name}, which is not among the named algorithms.{nearest(name, algorithms)}"
            )
        _check_key(name, algorithms)
    repeated_name = next((name for i, name in enumerate(algorithms) if name in algorithms[:i]), None)
    if repeated_name is not None:
        raise InputError(f"The algorithm '{repeated_name}' is named twice.")
    common = [{k: v for k, v in layer.items() if k not in SET_BY_COMPARE} for layer in layers]
    rows = {}
    for name in algorithms:
        row_overrides = {k: v for k, v in overrides.items() if k not in algorithm_names or k == name}
        rows[name] = RunConfig.of(*common, {"algorithm": name}, overrides=row_overrides)
    return rows


def _check_key(name: str, algorithms: Sequence[str]) -> None:
    """Refuse a hyperparameter that is set without the name of its algorithm, and name its owners."""
    if name in (*names("algorithm"), *(f.name for f in fields(RunConfig))):
        return
    owners = [
        algorithm
        for algorithm in algorithms
        if algorithm in REGISTRY and name in {f.name for f in fields(REGISTRY[algorithm].kind)}
    ]
    if owners:
        hint = f"; {', '.join(owners)} have it" if len(owners) > 1 else ""
        raise InputError(f"'{name}' is a hyperparameter: name its algorithm, such as {owners[0]}.{name}=…{hint}.")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that are negative, too large, given twice, or too many."""
    if len(seeds) > MANY_SEEDS:
        raise InputError(f"{len(seeds)} seeds are more than {MANY_SEEDS:,}, the most that an experiment takes.")
    if not 0 <= min(seeds) <= max(seeds) <= MAX_INTEGER or len(set(seeds)) < len(seeds):
        words = ", ".join(map(str, seeds))
        raise InputError(
            f"Seeds are whole numbers of at least 0 and at most {MAX_INTEGER}, each once; they are {words}."
        )


def seeds_flag(seeds: Sequence[int]) -> str:
    """Return seeds as --seeds takes them: how many, or which."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


@dataclass(frozen=True)
class ComparisonRequest:
    """What is compared: configurations by label, which differ in the algorithm alone, and the seeds."""

    rows: Rows
    seeds: tuple[int, ...]
    former: bool = False  # whether it was written when algorithms had other default step sizes
    study: Study = PLAIN

    @classmethod
    def of(cls, rows: Mapping[str, RunConfig], seeds: int | Sequence[int], study: Study = PLAIN) -> ComparisonRequest:
        """Return a checked request: one setting, valid hyperparameters and seeds."""
        if isinstance(seeds, int):
            seeds = range(seeds)
        if not rows or not seeds:
            raise InputError(f"Nothing to compare: there is no {'seed' if rows else 'algorithm'}.")
        check_seeds(seeds)
        request = cls({label: _settled(config) for label, config in rows.items()}, tuple(seeds), study=study)
        first, setting = next(iter(rows)), request.setting
        checked_integer(setting.eval_every, "eval_every", 0)
        for label, config in request.rows.items():
            config.algorithm_object()  # its hyperparameters are checked before anything else is done
            same_algorithm = config.with_changes(algorithm=setting.algorithm, hyper=setting.hyper)
            differ = {key: pair for key, pair in setting.differences(same_algorithm).items() if key not in MAY_CHANGE}
            if differ:
                keys = "; ".join(f"{key} = {a} and {b}" for key, (a, b) in differ.items())
                raise InputError(f"'{first}' and '{label}' are of different settings, so they do not compare: {keys}.")
        return request

    @property
    def setting(self) -> RunConfig:
        """The setting that all rows share, with the first one's algorithm."""
        return next(iter(self.rows.values()))

    @property
    def same_clients(self) -> bool:
        """Whether the clients are the same with every seed."""
        if isinstance(self.study, Given) and self.study.same_clients is not None:
            return self.study.same_clients
        return self.setting.data is not None or self.setting.partition_seed is not None

    def cells(self, refused: Collection[str] = ()) -> list[Cell]:
        """Return the runs of all rows but those that are `refused`, the first seed's before the second's."""
        study = self.study if self.study is not PLAIN else None
        return [
            Cell(label, config.with_changes(seed=seed), curve=along(config.eval_every, config.rounds), study=study)
            for seed in self.seeds
            for label, config in self.rows.items()
            if label not in refused
        ]

    def command(self, out: Path) -> str:
        """Return the shell command, which is right where labels are names of algorithms; or the call in Python."""
        if self.study.given:
            return f"fedabml.compare(federation, ..., algorithms={[*self.rows]}, seeds={[*self.seeds]}, out='{out}')"
        plain = self.setting.with_changes(algorithm=RunConfig.algorithm, hyper={})
        rows = ",".join(map(command_line_name, self.rows))
        options: JsonDict = {"algorithms": rows, "seeds": seeds_flag(self.seeds)} | plain.options()
        options |= {config.algorithm: dict(config.hyper) for config in self.rows.values()}
        return command("compare", flags(options), out)

    # -- on disk ----------------------------------------------------------------------------------------------------
    def to_dict(self) -> JsonDict:
        """Return the request as comparison.json keeps it."""
        row_keys = {*SET_BY_COMPARE, self.setting.algorithm}
        shared = {k: v for k, v in self.setting.to_dict(everything=True).items() if k not in row_keys}
        rows = {label: {"algorithm": c.algorithm, "hyper": dict(c.hyper)} for label, c in self.rows.items()}
        content = {"setting": shared, "rows": rows, "seeds": list(self.seeds), "defaults": DEFAULTS_VERSION}
        return content | ({} if self.study is PLAIN else {"study": self.study.identity})

    @classmethod
    def read(cls, out: Path, study: Study = PLAIN) -> ComparisonRequest:
        """Return the request that a folder was made for, on the data of this study."""
        content = read(out, "compare")
        if study.identity != content.get("study", PLAIN.identity):
            raise InputError(
                f"The comparison in '{out}' has other data, or data and networks of a Python session. Call "
                "fedabml.compare there with the same ones, or give another folder with --out."
            )
        try:
            setting, rows = upgrade_config(content["setting"]), {}
            for label, row in content["rows"].items():
                name = row["algorithm"]
                rows[label] = RunConfig.of(setting, {"algorithm": name, name: row["hyper"]})
            former = "defaults" not in content
            return cls(_with_former_defaults(rows) if former else rows, tuple(content["seeds"]), former, study)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"'{out / REQUEST}' is not a comparison's ({error!r}). Give another folder with --out."
            ) from error

    def joined(self, saved: ComparisonRequest, out: Path, resume: bool) -> ComparisonRequest:
        """Return this request joined to the one that a folder was made for; both must have one setting.

        Other rows or seeds are accepted only with `resume`. Rows that are added to a comparison with earlier defaults
        have these defaults, too.
        """
        rows = _with_former_defaults(self.rows) if saved.former else self.rows
        pair = saved, replace(self, rows=rows)
        common = rows.keys() & saved.rows.keys()
        was, now = (r.to_dict()["setting"] | {"rows": {k: _row(r.rows[k]) for k in common}} for r in pair)
        refuse_changes(out, "compare", was, now, MAY_CHANGE)
        changes = differences(*({"algorithms": sorted(r.rows), "seeds": sorted(r.seeds)} for r in pair))
        if changes and not resume:
            raise InputError(
                f"The comparison in '{out}' has other rows or seeds: {describe(changes)}. Extend it with --resume: the "
                "table then has both. Or give another folder with --out."
            )
        return ComparisonRequest({**saved.rows, **rows}, tuple(sorted({*saved.seeds, *self.seeds})), study=self.study)


def _row(config: RunConfig) -> JsonDict:
    return {"algorithm": config.algorithm, **config.hyper}


def _with_former_defaults(rows: Mapping[str, RunConfig]) -> Rows:
    """Return the rows with the default step sizes of earlier versions, where they set no others."""
    former = {label: FORMER | FORMER_OWN.get(config.algorithm, {}) for label, config in rows.items()}
    return {label: config.with_changes(hyper=former[label] | config.hyper) for label, config in rows.items()}


def _settled(config: RunConfig) -> RunConfig:
    """Return a row's configuration with lr among the hyperparameters, and with paths that hold from every folder."""
    hyper = dict(config.hyper) if config.lr is None else {"lr": config.lr, **config.hyper}
    scored = {"evaluate": True, "eval_clients": None, "eval_all": True}
    return config.with_changes(hyper=hyper, lr=None, seed=0, **scored, **real_paths(config))


@borrowed()
@reading_once()
@with_folder_lock("A comparison")
def compare(
    rows: Mapping[str, RunConfig],
    seeds: int | Sequence[int] = 5,
    *,
    out: str | os.PathLike[str],
    resume: bool = False,
    finished: Sequence[str | os.PathLike[str]] = (),
    study: Study = PLAIN,
    callbacks: Callbacks = SILENT,
) -> Comparison:
    """Run every row with every seed, write the comparison into a folder, and return it.

    `rows` are configurations by label, all of one setting (see `configs`). `seeds` are the seeds, or how many. With
    `resume`, a folder's comparison may be extended by rows and seeds, and the table has the old ones, too. A row that
    the model refuses is noted and shown without numbers, unless it refuses all. A row that diverges is a result, not an
    error. `finished` are cells.jsonl of other folders or machines, whose cells are not run again. A `study` has other
    data or networks than the rows' own.
    """
    folder, request = Path(out), ComparisonRequest.of(rows, seeds, study)
    if resume or begun(folder, "compare"):
        request = request.joined(ComparisonRequest.read(folder, study), folder, resume)
    ledger = Ledger(folder / CELLS, finished)
    refused, notes, fed = _refused(request, ledger, callbacks.download)
    for text in notes:
        callbacks.note(text)
    command = request.command(folder)
    if fed:
        write_json(folder / MANIFEST.format(request.seeds[0]), fed.manifest_rows(rows=False), indent=None)
        save_heat_map(fed, folder / PICTURE.format(request.seeds[0]))
    write_json(folder / REQUEST, request.to_dict() | {"command": command})
    execute(request.cells(refused), ledger, callbacks)
    comparison = _ranked(request, ledger, refused)
    write_all(comparison, folder, command)
    drawn = render(comparison, command, manifest=_manifest(request, folder))
    if drawn:
        write(folder / "report.html", drawn)
    return comparison


def page(folder: Path, title: str | None = None) -> str:
    """Return the page of a finished comparison, drawn from its cells: nothing is run, and no data are needed."""
    request, ledger = ComparisonRequest.read(folder), Ledger(folder / CELLS)
    refused = _recorded_refusals(folder / TABLE)
    cells = request.cells(refused)
    missing = [cell for cell in cells if cell not in ledger]
    if missing:
        raise InputError(
            f"The comparison in '{folder}' is not finished: {len(missing)} of {len(cells)} runs are missing, or are of "
            f"other defaults. Resume it: {resume_command('compare', folder)}"
        )
    drawn = render(_ranked(request, ledger, refused), request.command(folder), title, _manifest(request, folder))
    if not drawn:
        raise InputError(f"The comparison in '{folder}' has no page: fewer than two of its rows have numbers.")
    return drawn


def _manifest(request: ComparisonRequest, folder: Path) -> JsonDict | None:
    """Read the manifest of the first seed's partition, if its data were here when it ran."""
    path = folder / MANIFEST.format(request.seeds[0])
    return read_json(path) if path.is_file() else None


def _recorded_refusals(path: Path) -> dict[str, str]:
    """Return the rows that could not run, with the reasons, from table.json."""
    try:
        rows = read_json(path)["rows"] if path.exists() else []
        return {row["label"]: row["refused"] for row in rows if row["refused"]}
    except (KeyError, TypeError) as error:
        raise InputError(f"'{path}' is not a comparison's ({error!r}). Remove it and resume the comparison.") from error


def _refused(
    request: ComparisonRequest, ledger: Ledger, download: Progress | None
) -> tuple[dict[str, str], list[str], Federation | None]:
    """Return the rows that cannot run with the reason, found before anything runs; notes; and the first seed's data.

    The data are `None` where nothing is left to run with the first seed.
    """
    todo = [cell for cell in request.cells() if cell not in ledger]
    if not todo:
        return {}, [], None
    first = todo[0].config
    fed = request.study.federation(first) if request.study.given else first.federation(download)
    check_rows(fed, resolve_split(fed, first.split))
    _check_data([result for result in ledger.results.values() if result.seed == first.seed], {first.seed: fed.hash})
    refused, notes = refusals(
        fed, {cell.label: cell.config for cell in todo if cell.config.seed == first.seed}, request.study
    )
    if len(refused) == len(request.rows):  # not the algorithms are wrong, but the setting
        raise InputError(next(iter(refused.values())))
    for reason in dict.fromkeys(refused.values()):
        notes.append(f"{', '.join(k for k, v in refused.items() if v == reason)} cannot be compared here: {reason}")
    return refused, notes, fed if first.seed == request.seeds[0] else None


def _ranked(request: ComparisonRequest, ledger: Ledger, refused: Mapping[str, str]) -> Comparison:
    """Return the comparison of a request whose cells are finished."""
    results = {(cell.label, cell.config.seed): ledger[cell] for cell in request.cells(refused)}
    _check_data(results.values(), {})
    return make(request.rows, results, refused, request.seeds, request.same_clients)


def _check_data(results: Iterable[Result], hashes: dict[int, str]) -> None:
    """Refuse results of a seed that had different data: their clients do not pair. `hashes` are known ones by seed."""
    for result in results:
        if hashes.setdefault(result.seed, digest := result.facts["partition_hash"]) != digest:
            raise InputError(
                f"The data have changed since some runs of seed {result.seed} were finished: their hash is another. "
                "Restore the data, or compare anew in another folder."
            )
