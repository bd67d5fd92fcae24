"""`fedabml.compare`, `fedabml.tune` and `fedabml.reproduce`: what the commands of these names call.

    comparison = fedabml.compare(fed, "mlp", ["fedabml", "fedavg-ft", "local"], seeds=3, rounds=20, participation=0.5)
    comparison.best, comparison.frame()

They take a federation and a network that a caller has in Python, or the keys of a run as the command line has them
(`data="patients.csv", client_column="hospital"`). Without `out` nothing stays on disk. With `out` the same call goes on
after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from ..accel.process import borrowed
from ..algorithms import REGISTRY, Algorithm, make, name_of, register_user_algorithm
from ..arguments import check, checked_integer, checks_arguments
from ..data import Federation, read_table
from ..data.table import as_columns
from ..errors import InputError, nearest, quoted
from ..models import register_user_network
from ..runs import presets
from ..runs.config import DATA_KEYS, TABLE_KEYS, JsonDict, RunConfig, read_toml, without_commands
from . import compare as comparing
from . import tune as tuning
from .compare import SET_BY_COMPARE, configs
from .paper import EXPERIMENTS, PROTOCOLS, Findings, Request, run, run_part
from .progress import CellProgress, SearchProgress, followed
from .ranking import Comparison
from .runner import Callbacks
from .study import PLAIN, Given, Study

AnyPath = str | os.PathLike[str]
SHARE = 0.2  # of every client's training rows, held out for a search


# -- compare --------------------------------------------------------------------------------------------------------
@checks_arguments
def compare(
    fed: Federation | None = None,
    model: nn.Module | str | None = None,
    algorithms: Sequence[Any] | Mapping[str, Any] = ("fedabml", "fedavg-ft", "local"),
    *,
    seeds: int | Sequence[int] = 5,
    config: str | os.PathLike[str] | None = None,
    preset: str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    finished: Sequence[str | os.PathLike[str]] = (),
    progress: bool = False,
    **options: Any,
) -> Comparison:
    """Train every algorithm with every seed, score every client, and rank the algorithms.

    `fed` is a federation; without it `options` name the data, as flags of `fedabml compare` do: `dataset="digits"`, or
    `data=` with a table, a folder or a DataFrame. Other `options` are further flags, such as `rounds=20`, or a table of
    hyperparameters, such as `fedabml={"lam": 0.1}`. `config` is a TOML file of such keys; options override it.

    `algorithms` are names, `mine.py:FedDyn`, or objects such as `FedAvg(lr=0.1)`; a dictionary gives them labels of its
    own. `model` is a network's name, `mine.py:Net`, or a module, whose weights are then where every seed starts.
    `seeds` are the seeds, or how many.

    With `out`, the folder gets the same files as with the command, and the same call goes on after an interruption;
    `resume=True` also adds algorithms and seeds. `progress=True` shows a bar. Ctrl-C raises KeyboardInterrupt.
    """
    rows, study = _rows(fed, model, algorithms, config, preset, options)
    warnings: list[str] = []
    board = CellProgress("comparing", not progress)
    dataset = next(iter(rows.values())).dataset if rows else ""
    with _folder(out) as folder, followed(board, dataset or "", start=board.start) as callbacks:
        comparison = comparing.compare(
            rows, seeds, out=folder, resume=resume, finished=finished, study=study,
            callbacks=_noting(callbacks, warnings),
        )  # fmt: skip
    return replace(comparison, folder=None if out is None else Path(out), warnings=warnings)


def _rows(
    fed: Federation | None,
    model: nn.Module | str | None,
    algorithms: Sequence[Any] | Mapping[str, Any],
    config: AnyPath | None,
    preset: str | None,
    options: Mapping[str, Any],
) -> tuple[dict[str, RunConfig], Study]:
    """Return the configurations by label, and the study that has the caller's data and network."""
    if isinstance(algorithms, Mapping) and any(isinstance(entry, RunConfig) for entry in algorithms.values()):
        if options or config or preset or not all(isinstance(entry, RunConfig) for entry in algorithms.values()):
            raise InputError("Configurations stand alone: give no other algorithms, options, config or preset.")
        return dict(algorithms), PLAIN if fed is None else _study_of(fed)
    for name in options.keys() & SET_BY_COMPARE.keys():
        raise InputError(f"compare takes no '{name}': {SET_BY_COMPARE[name].replace('--', '')}")
    layers, study = _setting("compare", fed, model, config, preset, options)
    chosen = algorithms if isinstance(algorithms, Mapping) else _labelled(algorithms)
    rows = {}
    for label, (name, hyper) in zip(chosen, _algorithms(chosen.values()), strict=True):
        rows[str(label)] = configs([name], *layers, {name: hyper})[name]
    return rows, study


def _labelled(algorithms: Sequence[Any]) -> dict[str, Any]:
    """Return algorithms by name; two of one name need labels."""
    chosen: dict[str, Any] = {}
    for algorithm in algorithms:
        name, _ = _algorithm(algorithm)
        if name in chosen:
            raise InputError(
                f"The algorithm '{name}' is named twice. Give labels: algorithms={{'small steps': FedAvg(lr=0.01), …}}."
            )
        chosen[name] = algorithm
    return chosen


def _algorithms(algorithms: Iterable[Any]) -> list[tuple[str, JsonDict]]:
    """Return the name and changed hyperparameters of each algorithm.

    Two classes of one name are refused, because only the last is registered.
    """
    chosen, entries = list[tuple[str, JsonDict]](), dict[str, Any]()
    for algorithm in algorithms:
        name, hyper = _algorithm(algorithm)
        entry = REGISTRY.get(name)
        if entries.setdefault(name, entry) is not entry:
            raise InputError(f"Two different classes have the name '{name}'. Rename one of them.")
        chosen.append((name, hyper))
    return chosen


def _algorithm(algorithm: Any) -> tuple[str, JsonDict]:
    """Return the registered name of an algorithm, and the hyperparameters that an object has set otherwise."""
    if isinstance(algorithm, str):
        return register_user_algorithm(algorithm), {}
    if isinstance(algorithm, Algorithm):
        register_user_algorithm(type(algorithm))  # a class of the caller's gets a name
        name = name_of(algorithm)
        default_values = make(name).values()
        return name, {key: v for key, v in algorithm.values().items() if v != default_values[key]}
    raise InputError(
        f"An algorithm is a name, or an object such as fedabml.FedAvg(lr=0.1); this is {quoted(algorithm)}."
    )


# -- tune -----------------------------------------------------------------------------------------------------------
@checks_arguments
def tune(
    fed: Federation | None = None,
    model: nn.Module | str | None = None,
    algorithms: Sequence[Any] | None = ("fedabml",),
    *,
    trials: int = 16,
    seeds: Sequence[int] = (100,),
    measure: str | None = None,
    batch: int = 8,
    grid: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    config: RunConfig | str | os.PathLike[str] | None = None,
    preset: str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    finished: Sequence[str | os.PathLike[str]] = (),
    progress: bool = False,
    **options: Any,
) -> tuning.Tuned:
    """Search good hyperparameters of each algorithm on validation data, all with the same budget.

    Data, network, `config` and `options` are those of `compare`; `validation` is the share of every client's training
    rows that is held out (0.2). Each of the `algorithms` (None: all that fit the network) gets `trials` trained
    federations for every one of the `seeds`. `fixed` has hyperparameters by algorithm that are not searched; so are
    those of an object, `FedAvg(momentum=0.9)`, that differ from its defaults. `grid` has what to search instead of what
    is declared: lists, or ranges such as "0.001..3". `measure` decides, by default accuracy or rmse.

    `tuned.algorithm("fedabml")` is the best setting as an object for `train`; with `out` it is also in tuned.toml.
    """
    for name, values in (fixed or {}).items():
        check(values, Mapping, f"tune: fixed[{name!r}], the hyperparameters of an algorithm,")
    held: dict[str, JsonDict] = {name: dict(values) for name, values in (fixed or {}).items()}
    chosen = None if algorithms is None else _algorithms(algorithms)
    names = None if chosen is None else [name for name, _ in chosen]
    study = PLAIN if fed is None else _study_of(fed)
    if isinstance(config, RunConfig):
        if options or model is not None:
            raise InputError("Give a RunConfig, or a model and options, not both.")
        plan = config
    else:
        for name in options.keys() & {*SET_BY_COMPARE, "eval_every"}:
            raise InputError(
                f"tune takes no '{name}': {SET_BY_COMPARE.get(name, 'trials are scored at the end.').replace('--', '')}"
            )
        layers, study = _setting("tune", fed, model, config, preset, options)
        every = names or list(tuning.REGISTRY)
        plan = next(iter(configs(every, {"validation": SHARE}, *layers).values())).with_changes(hyper={}, lr=None)
        fixing = layers[1:] if preset else layers  # a preset is only where the search starts
        held = {n: row.hyper | held.get(n, {}) for n, row in configs(every, *fixing).items()}
    for name, hyper in chosen or ():
        held[name] = hyper | held.get(name, {})
    board, warnings = SearchProgress(not progress), list[str]()
    displays: dict[str, Callable[..., None]] = {"expect": board.expect, "trial": board.trial}
    with _folder(out) as folder, followed(board, plan.dataset or "", **displays) as callbacks:
        tuned = tuning.tune(
            plan, names, folder, trials=trials, seeds=seeds, batch=batch, measure=measure, preset=preset, fixed=held,
            values=grid, study=None if study is PLAIN else study, resume=resume, finished=finished,
            callbacks=_noting(callbacks, warnings),
        )  # fmt: skip
    return replace(tuned, file=None if out is None else tuned.file, notes=warnings)


# -- the data and network of a caller ---------------------------------------------------------------------------------
def _setting(
    call: str,
    fed: Federation | None,
    model: nn.Module | str | None,
    config: AnyPath | None,
    preset: str | None,
    options: Mapping[str, Any],
) -> tuple[list[JsonDict], Study]:
    """Return the layers of keys of a run, and the study that has what is no key: a federation, a frame or a module."""
    keys = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in options.items()}
    file = without_commands(read_toml(Path(config))) if config is not None else {}
    frame = keys.pop("data") if hasattr(keys.get("data"), "iloc") else None
    if fed is not None or frame is not None:
        allowed_keys = () if frame is None else (*TABLE_KEYS, "task", "drop_small")
        for name in {**file, **keys}:
            if name in DATA_KEYS and name not in allowed_keys:
                raise InputError(f"{call}: '{name}' chooses data, but the data are given already. Leave '{name}' out.")
    table = {name: keys.pop(name) for name in (*TABLE_KEYS, "task", "drop_small") if frame is not None and name in keys}
    if isinstance(model, str):
        keys["model"] = register_user_network(model)
    module = model if isinstance(model, nn.Module) else None
    layers = [presets.layer(preset, keys.get("dataset", file.get("dataset")))] if preset else []
    layers += [file, keys]
    if fed is None and frame is None and module is None:
        return layers, PLAIN
    if frame is not None:
        return layers, _given_frame(frame, table, module)
    if fed is None:
        return layers, Given(
            lambda config: config.with_changes(validation=0.0).federation(), "configuration", module, None
        )
    return layers, _study_of(fed, module)


def _study_of(fed: Federation, module: nn.Module | None = None) -> Given:
    """Return the study of a caller's federation."""
    return Given(lambda config: fed, fed.hash, module)


def _given_frame(frame: Any, table: Mapping[str, Any], module: nn.Module | None) -> Given:
    """Return the study of a DataFrame, whose rows are divided anew by every seed, as those of a table's file are."""
    if not ("client_column" in table and "target_column" in table):
        raise InputError(
            "A DataFrame needs client_column=, the column of clients, and target_column=, what to predict."
        )
    words = {"client_column": "client", "target_column": "target", "drop_columns": "drop", "id_column": "id"}
    options = {(words | {"date_columns": "dates"}).get(name, name): value for name, value in table.items()}

    for name in ("drop", "dates"):
        if isinstance(options.get(name), str):
            options[name] = [word.strip() for word in options[name].split(",")]

    columns = as_columns(frame)

    @cache
    def divided(seed: int) -> Federation:
        return read_table(columns, **options, seed=seed)

    return Given(lambda config: divided(config.seed), divided(0).hash, module)


@contextmanager
def _folder(out: AnyPath | None) -> Iterator[Path]:
    """Yield the folder of an experiment; without `out` one that is removed in the end."""
    if out is not None:
        yield Path(out)
        return
    with TemporaryDirectory(prefix="fedabml-") as folder:
        yield Path(folder) / "experiment"


def _noting(callbacks: Callbacks, notes: list[str]) -> Callbacks:
    """Return callbacks that also collect the notes."""

    def note(text: str) -> None:
        notes.append(text)
        callbacks.note(text)

    return replace(callbacks, note=note)


# -- reproduce --------------------------------------------------------------------------------------------------------
@checks_arguments
@borrowed()
def reproduce(
    experiment: str,
    *,
    protocol: str = "paper",
    quick: bool = False,
    columns: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    seeds: int | Sequence[int] | None = None,
    trials: int | None = None,
    grid: Sequence[str] = (),
    search_seed: int | None = None,
    chosen: Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    tuning: str | os.PathLike[str] | None = None,
    finished: Sequence[str | os.PathLike[str]] = (),
    part: Sequence[int] | None = None,
    so_far: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    compile: bool | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Findings | None:
    """Reproduce an experiment of the paper, and return what it has found: conclusions, tables, records.

    The arguments are those of `fedabml reproduce`. With `out` the same call goes on after an interruption. `part`,
    (i, n), runs the i-th of n shares of the cells and returns None; with `so_far` nothing is run, and the findings are
    of what is finished. `tuning` is the folder of searches of the protocol `tuned`; experiments may share it.
    """
    if experiment not in EXPERIMENTS:
        raise InputError(f"There is no experiment '{experiment}'.{nearest(experiment, EXPERIMENTS)}")
    if part is not None and (so_far or out is None or len(part) != 2):
        raise InputError("part is (i, n) and needs a folder, out=…; it runs cells, and so_far runs none.")
    request = paper_request(
        experiment, protocol=protocol, quick=quick, columns=columns, algorithms=algorithms, seeds=seeds, trials=trials,
        grid=grid, search_seed=search_seed, chosen=chosen, device=device, dtype=dtype, compile=compile,
        data_dir=data_dir,
    )  # fmt: skip
    with _folder(out) as folder, ExitStack() as boards:
        callbacks = _paper_callbacks(experiment, not progress, boards)
        common: Any = {"tuning": tuning, "finished": finished, "callbacks": callbacks}
        if part is not None:
            run_part(EXPERIMENTS[experiment](), request, folder, (part[0], part[1]), **common)
            return None
        return run(EXPERIMENTS[experiment](), request, folder, partial=so_far, **common)


def paper_request(
    experiment: str,
    *,
    protocol: str,
    quick: bool,
    columns: Sequence[str],
    algorithms: Sequence[str],
    seeds: int | Sequence[int] | None,
    trials: int | None,
    grid: Sequence[str],
    search_seed: int | None,
    chosen: Sequence[AnyPath],
    device: str,
    dtype: str,
    compile: bool | None,
    data_dir: AnyPath | None,
) -> Request:
    """Return the checked request of the arguments of `reproduce`."""
    if protocol not in PROTOCOLS:
        raise InputError(f"There is no protocol '{protocol}'.{nearest(protocol, PROTOCOLS)}")
    if isinstance(seeds, int):
        seeds = checked_integer(seeds, "seeds")
    machine = {"device": device, "data_dir": data_dir and os.fspath(data_dir), "compile": compile}
    return Request(
        experiment, protocol, quick, columns=tuple(columns), algorithms=tuple(algorithms),
        seeds=seeds if seeds is None or isinstance(seeds, int) else tuple(seeds),
        trials=None if trials is None else checked_integer(trials, "--trials"), dtype=dtype,
        machine={name: value for name, value in machine.items() if value is not None},
        chosen=tuple(os.fspath(path) for path in chosen), grid=tuple(grid),
        search_seed=None if search_seed is None else checked_integer(search_seed, "--search-seed", 0),
    )  # fmt: skip


def _paper_callbacks(label: str, quiet: bool, boards: ExitStack) -> Callbacks:
    """Return callbacks that show one progress display after another: of each search, then of the cells.

    The present display is on the stack `boards`, whose end closes it.
    """
    from ..runs.progress import note

    board = CellProgress(label, quiet)

    def start(todo: Any, finished: int) -> None:
        nonlocal board
        boards.close()
        board = boards.enter_context(CellProgress(label, quiet))
        board.start(todo, finished)

    def search(plan: RunConfig) -> Callbacks:
        boards.close()
        progress = boards.enter_context(SearchProgress(quiet))
        return Callbacks(expect=progress.expect, round=progress.round, done=progress.done, trial=progress.trial)

    return Callbacks(
        note=(lambda text: None) if quiet else note,
        start=start,
        round=lambda cells, round: board.round(cells, round),
        done=lambda result: board.done(result),
        search=search,
    )
