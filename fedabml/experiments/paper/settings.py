"""The settings of the paper's tables, and the configuration of each algorithm in them under the two protocols.

A column is a dataset, divided among clients, with a network (`fedabml.runs.presets.COLUMNS`). `paper` has the paper's
settings for every method. `tuned` gives every method the same number of trials on validation data
(`fedabml.experiments.tune`) and its best there, or takes what such a search has chosen before. With `quick` both are
smaller: few rounds, and by default the embedded digits. The paper has no settings for those, so under `paper` every
method has the library's defaults there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...data.catalogue import EMBEDDED
from ...errors import InputError, nearest
from ...files.limits import MAX_TOML
from ...files.paths import read_text, write
from ...runs import presets
from ...runs.config import JsonDict, RunConfig, names, read_toml
from ...runs.presets import COLUMNS
from ..compare import configs
from ..ledger import Unfinished
from ..runner import refusals
from ..search_space import own_grid, read_grid, searchable
from ..study import Study, dataset, federation
from ..tune import nothing_left, of_earlier_version, tune
from . import numbers
from .experiment import Context, Experiment

HELD_OUT = 0.2  # the share of every client's training data that searches hold out
IDENTIFYING = ("dataset", "clients", "classes_per_client", "model", "partition")  # the keys that make a column
QUICK = ("digits",)  # the columns of a quick version, unless the request names others
TITLES = {name: column.title for name, column in COLUMNS.items()}
Check = Callable[[Context, str], None]  # of a column


@dataclass(frozen=True)
class Search:
    """How an experiment searches settings of its own: the suffix of its folders, on which study, and which values."""

    suffix: str = ""
    study: Study | None = None
    values: JsonDict = field(default_factory=dict)


def setting(column: str, quick: bool) -> JsonDict:
    """Return the keys of a run in a column."""
    keys = {"dataset": COLUMNS[column].dataset} | COLUMNS[column].keys | presets.RUN
    if COLUMNS[column].dataset in EMBEDDED:
        return keys | {"participation": 0.25} | ({"rounds": 20} if quick else {})
    few = {"rounds": 10, "epochs": 2, "participation": max(0.1, 5 / COLUMNS[column].clients), "batch_size": 20}
    return keys | few if quick else keys


def person(column: str, client: int) -> str:
    """Return a client's name, which is the same in all pictures of a page and nobody else's there."""
    return f"client {client}, {TITLES[column]}"


# -- checks before anything is done ---------------------------------------------------------------------------------
def check(columns: Sequence[str], algorithms: Sequence[str]) -> None:
    """Refuse columns and algorithms that do not exist."""
    with_level = (name + level for name in ("fedavg", "fedabml") for level in numbers.LEVELS)
    algorithm_names = (*names("algorithm"), *with_level)
    for kind, wanted, have in (("column", columns, tuple(COLUMNS)), ("algorithm", algorithms, algorithm_names)):
        for name in (name for name in wanted if name not in have):
            raise InputError(f"There is no {kind} '{name}'.{nearest(name, have)}")


def check_grid(grid: Sequence[str], algorithms: Sequence[str]) -> None:
    """Refuse a grid (`NAME=A,B,C`, `ALGORITHM.NAME=A,B,C`) with values that no search of the algorithms would try."""
    values, searched = read_grid(grid), [name for name in algorithms if not name.endswith(numbers.LEVELS)]
    hyper = sorted({parameter for name in searched for parameter in searchable(name)})
    for name, tried in values.items():
        if name not in (allowed := searched if isinstance(tried, dict) else hyper):
            raise InputError(f"The grid has values for '{name}', which no search has.{nearest(name, allowed)}")
    for name in searched:
        own_grid(name, values)


# -- settings that a search has chosen before -----------------------------------------------------------------------
def read_chosen(files: Sequence[str | Path]) -> dict[str, str]:
    """Return the text of files of chosen settings (a search's tuned.toml) by column; refuse what is not sound."""
    texts: dict[str, str] = {}
    for file in files:
        content = read_toml(file)
        tables = [name for name, value in content.items() if isinstance(value, dict) and name != "model_options"]
        if not tables:
            raise InputError(f"'{file}' has no table of an algorithm's settings. Give a tuned.toml of `fedabml tune`.")
        try:
            RunConfig.of({k: v for k, v in content.items() if k not in tables})
            for algorithm in tables:
                if algorithm not in names("algorithm"):
                    raise InputError(f"there is no algorithm '{algorithm}'.{nearest(algorithm, names('algorithm'))}")
                configs([algorithm], {algorithm: content[algorithm]})[algorithm].algorithm_object()
        except InputError as error:
            raise InputError(f"'{file}': {error}") from error
        name = next((name for name in COLUMNS if _is_of(content, name)), None)
        if name is None:
            keys = ", ".join(f"{key} {content[key]}" for key in IDENTIFYING if key in content)
            raise InputError(f"'{file}' has settings of no column: {keys}.")
        if name in texts:
            raise InputError(f"'{file}' is the second file of settings of {name}: give one for each column.")
        texts[name] = read_text(file, MAX_TOML)
    return texts


def _is_of(content: JsonDict, column: str) -> bool:
    keys = setting(column, quick=False)
    return all(content.get(k, getattr(RunConfig, k)) == keys.get(k, getattr(RunConfig, k)) for k in IDENTIFYING)


def keep_chosen(chosen: Mapping[str, str], folder: Path) -> None:
    """Write chosen settings into the folder of searches, where `systems` finds them again."""
    for name, text in chosen.items():
        kept = folder / f"{name}.toml"
        if kept.exists() and read_text(kept, MAX_TOML) != text:
            raise InputError(f"'{kept}' has other settings of {name} than those given now. Give another --out.")
        write(kept, text)


# -- systems of a table---------------------------------------------------------------------------------------------
def _columns(context: Context, default: Sequence[str], check: Check) -> list[str]:
    """Return the requested columns whose data are here; for the others a note says how to get them."""
    request, missing = context.request, {}
    wanted = tuple(dict.fromkeys(request.columns or (QUICK if request.quick else default)))
    for name in wanted:
        try:
            dataset(COLUMNS[name].dataset, request.machine.get("data_dir"))
            check(context, name)
        except InputError as error:
            missing[name] = f"{TITLES[name]} is left out. {error}"
    if len(missing) == len(wanted):
        raise InputError(missing[wanted[0]])
    for text in missing.values():
        context.note(text)
    return [name for name in wanted if name not in missing]


def systems(
    context: Context,
    experiment: Experiment,
    *,
    levels: Sequence[str] = (),
    sparse: Sequence[str] = (),
    search: Search | None = None,
    check: Check = lambda context, column: None,
) -> Iterator[tuple[str, str, RunConfig]]:
    """Yield the column, the name and the configuration of every system of an experiment, under the protocol.

    The systems named in `levels` come once more, with the label level, and those in `sparse` with the sparse one; where
    the request names algorithms, it must name these, too. `search` is for an experiment that tunes for itself, not for
    the column's whole federation.
    `check` raises InputError for a column that cannot be used.
    """
    named = context.request.algorithms
    for column in _columns(context, experiment.columns, check):
        rows = _configs(context, column, experiment.algorithms, search or Search())
        for name in (name for name in levels if name in rows):
            level = name.removesuffix("-ft") + numbers.LABELS  # fedavg+labels for fedavg-ft
            if rows[name].algorithm_object().label_prior != "dirichlet" and (not named or level in named):
                rows[level] = rows[name].with_changes(hyper=rows[name].hyper | {"label_prior": "dirichlet"})
        for name in (name for name in sparse if name in rows):
            level = name.removesuffix("-ft") + numbers.SPARSE
            if not named or level in named:
                rows[level] = rows[name].with_changes(hyper=rows[name].hyper | {"label_prior": "sparse"})
        for name, config in rows.items():
            yield column, name, config


def _configs(context: Context, column: str, algorithms: Sequence[str], search: Search) -> dict[str, RunConfig]:
    """Return a configuration per algorithm, in a column and under the protocol; note those that cannot run there."""
    request, data = context.request, COLUMNS[column].dataset
    wanted = [name for name in request.algorithms or algorithms if not name.endswith(numbers.LEVELS)]
    layers = [{"dtype": request.dtype} | request.machine | setting(column, request.quick)]
    if request.protocol == "paper" and data not in EMBEDDED:
        layers.insert(0, presets.layer("paper", data))
        wanted = [name for name in wanted if name != "fedabml-plain"]  # there fedabml is the paper's own
    rows = configs(wanted, *layers)
    refused, _ = refusals(federation(next(iter(rows.values()))), rows)
    for name, reason in refused.items():
        context.note(f"{TITLES[column]}: {name} cannot run. {reason}")
        del rows[name]
    return rows if request.protocol == "paper" else _tuned(context, column, rows, search)


def _tuned(context: Context, column: str, untuned: dict[str, RunConfig], search: Search) -> dict[str, RunConfig]:
    """Return the best of each algorithm's trials; each algorithm has its own search, which experiments share.

    Algorithms whose settings were chosen before (`keep_chosen`) are not searched again.
    """
    request, title, rows = context.request, TITLES[column], {}
    kept, values = context.tuning / f"{column}.toml", read_grid(request.grid)
    chosen = read_toml(kept) if kept.exists() else {}
    if before := [name for name in untuned if name in chosen]:
        context.note(f"{title}: settings of {', '.join(before)} were chosen before ('{kept}').")
    for name, config in untuned.items():
        folder = context.tuning / (column + search.suffix) / name
        file, held_out = folder / "tuned.toml", config.with_changes(validation=HELD_OUT, hyper={})
        earlier = name not in chosen and of_earlier_version(folder) and file.is_file()  # finished, and not repeatable
        if name in chosen or earlier:
            table = read_toml(file) if earlier else chosen
            if name in table:
                rows[name] = config.with_changes(hyper=configs([name], {name: table[name]})[name].hyper)
            continue
        try:
            tuned = tune(
                held_out, [name], folder, trials=request.budget, batch=min(8, request.budget), study=search.study,
                seeds=(request.first_search_seed,), values={**search.values, **own_grid(name, values)},
                resume=(folder / "tune.json").exists(), finished=context.finished, closed=context.mode != "run",
                callbacks=context.callbacks.search(held_out),
            )  # fmt: skip
        except Unfinished as error:
            if context.mode == "finished":
                raise
            what = f"{title}: the settings of {name} are not searched"
            if context.mode == "share":
                raise Unfinished(
                    f"{what}, and parts do not share searches. Search first (fedabml tune) and give --chosen."
                ) from error
            context.note(f"{what} yet.")
            continue
        if best := tuned.best(name):
            rows[name] = config.with_changes(hyper=best[0].hyper)
        else:
            context.note(f"{title}: of {name} {nothing_left(tuned.trials[name])}.")
    return rows
