"""Tuning: every algorithm gets the same number of trained federations, and only validation data are read.

A search tries the values that an algorithm declares for its hyperparameters (`tune=`, read by `search_space`); those
of lr, personal_epochs and personal_lr are the same for all algorithms. Trial 0 is the given configuration; then come
points around it that spread outward, then those of Optuna's TPE (`search`). The personal options (personal_epochs,
personal_lr) are not searched but scored, all of them, on each trained federation. The best trial is confirmed on
another seed before it is written, else the next best.

Trials are chosen in batches, and a batch runs together. A search is a function of its settings and of the scores:
after an interruption it is played again from its beginning, and cells that the ledger has are not run again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..accel.process import borrowed
from ..algorithms import REGISTRY
from ..algorithms.hyper import Range
from ..arguments import checked_integer
from ..data.once import reading_once
from ..engine.processes import with_folder_lock
from ..errors import InputError, nearest, shortened
from ..evaluation.measures import TUNED, TWO_CLASSES, tuning_measures
from ..evaluation.scoring import check_rows
from ..files.paths import write
from ..files.sealed import sealed_text
from ..files.sheets import csv_text, frame, html_card
from ..runs import presets
from ..runs.config import DATA_KEYS, JsonDict, RunConfig, command_line_name, to_toml
from ..runs.request import command, flags, flat
from .cell import MACHINE
from .ledger import Ledger
from .ranking import BASE
from .request import claim, read, real_paths
from .runner import SILENT, Callbacks, refusals
from .search import Search, Trial
from .search_space import GRID, as_flag, has_list, need_optuna, own_grid
from .study import PLAIN, Study

if TYPE_CHECKING:
    import pandas as pd

    from ..algorithms import Algorithm
    from ..data import Federation
    from ..data.download import Progress

MAY_CHANGE = ("trials",)  # what a resumed search may change: a longer search begins with the trials of a shorter one
SEARCH_VERSION = 2  # which points the same request tries; earlier versions, which wrote none, tried others


@dataclass(frozen=True, repr=False)
class Tuned:
    """A finished search: its trials by algorithm, and the file with the best of each.

    `warnings` are sentences by algorithm, one for every chosen value at an end of its range.
    """

    trials: dict[str, list[Trial]]
    measure: str
    file: Path | None
    warnings: dict[str, list[str]] = field(default_factory=dict)
    fixed: dict[str, JsonDict] = field(default_factory=dict)  # hyperparameters by algorithm that were given
    notes: Sequence[str] = ()  # what was worth knowing before the trials

    def __repr__(self) -> str:
        return shortened(
            f"Tuned({', '.join(self.trials)}; by {self.measure}; {sum(map(len, self.trials.values()))} trials)"
        )

    def _repr_html_(self) -> str:
        """Show a notebook the best settings, the warnings and the trials."""
        facts: JsonDict = {"measure": self.decided_by, "base rate": self.base[0], "file": self.file}
        for name in self.trials:
            facts[name] = str(self.settings(name)) if self.best(name) else nothing_left(self.trials[name])
        warned = [text for texts in self.warnings.values() for text in texts]
        return html_card("Tuned", facts | {"warnings": " ".join(warned) or None}, self.records())

    def settings(self, algorithm: str) -> JsonDict:
        """Return the best hyperparameters of an algorithm, with those that were fixed. Raises InputError if none is."""
        if algorithm not in self.trials:
            raise InputError(f"'{algorithm}' was not tuned.{nearest(algorithm, self.trials)}")
        if not (best := self.best(algorithm)):
            raise InputError(f"Of {algorithm} {nothing_left(self.trials[algorithm])}.")
        return self.fixed.get(algorithm, {}) | best[0].hyper

    def algorithm(self, algorithm: str) -> Algorithm:
        """Return an algorithm with its best hyperparameters, for `fedabml.train`."""
        return RunConfig(algorithm=algorithm, hyper=self.settings(algorithm)).algorithm_object()

    @property
    def decided_by(self) -> str:
        """The measure with its positive class, and which clients it is of, where those of few rows do not count."""
        every = [trial for trials in self.trials.values() for trial in trials]
        names = "scored_clients", "positive"
        who, positive = (next(filter(None, (getattr(t, name) for t in every)), "") for name in names)
        named = f"{self.measure} of {positive}" if positive else self.measure
        return f"{named}{',' * bool(positive)} of clients {who}" if who else named

    @property
    def base(self) -> tuple[float | None, float | None]:
        """The measure and the NLL of a model that knows only the clients' training labels; None where not known."""
        scored = (trial for trials in self.trials.values() for trial in trials if trial.error is None)
        return next((trial.base for trial in scored), (None, None))

    def records(self) -> list[JsonDict]:
        """Return a record per trial: algorithm, number, hyperparameters, the measure, and why it was refused."""
        return [
            {"algorithm": t.algorithm, "trial": t.number, **t.hyper, "measure": t.measure, "value": t.value}
            | {"nll": t.nll, "second_seed": t.second, "seconds": t.seconds, "error": t.error, "refused": t.refused}
            for trials in self.trials.values()
            for t in trials
        ]

    def frame(self) -> pd.DataFrame:
        """Return the records as a DataFrame, a row per trial; the last row is the base rate, if it is known."""
        base = dict(zip(("value", "nll"), self.base, strict=True)) if self.base[0] is not None else None
        return frame([*self.records(), *([{"algorithm": BASE, "measure": self.measure, **base}] if base else [])])

    def best(self, algorithm: str, count: int = 1) -> list[Trial]:
        """Return the best trials of an algorithm that neither diverged nor were refused; the first was confirmed."""
        usable = [trial for trial in self.trials[algorithm] if trial.error is None and trial.refused is None]
        return sorted(usable, key=lambda trial: trial.rank, reverse=True)[:count]


@borrowed()
@reading_once()
@with_folder_lock("Tuning")
def tune(
    config: RunConfig,
    algorithms: Sequence[str] | None,
    out: str | os.PathLike[str],
    *,
    trials: int = 16,
    seeds: Sequence[int] = (100,),
    batch: int = 8,
    measure: str | None = None,
    preset: str | None = None,
    fixed: Mapping[str, JsonDict] | None = None,
    values: Mapping[str, Any] | None = None,
    study: Study | None = None,
    resume: bool = False,
    finished: Sequence[str | os.PathLike[str]] = (),
    closed: bool = False,
    callbacks: Callbacks = SILENT,
) -> Tuned:
    """Search good hyperparameters of each algorithm on validation data, and write the best to tuned.toml in `out`.

    `config` is the run; its `validation` share must be above 0. Its hyperparameters, and those that `fixed` has by
    algorithm, are not searched, nor is what contradicts them; `preset` has values to start from. `values` is a grid:
    lists by hyperparameter (or tables of them by algorithm) to search instead of what is declared; a range such as
    "0.001..3" replaces one declared range only. Each of the algorithms (None: all that fit the network) gets `trials`
    trained federations for every one of the `seeds`, and its best one is confirmed on the seed after the largest of
    them. A `study` chooses other data to train on or other clients to score. `measure` is one of
    `evaluation.measures.TUNED`, by default accuracy or rmse. `finished` are cells.jsonl of other folders or machines,
    whose cells are not run again. A search that is `closed` runs and writes nothing, and raises `Unfinished` if it has
    not ended.
    """
    optuna, folder = need_optuna(), Path(out)
    trials, batch = checked_integer(trials, "trials", 1), checked_integer(batch, "batch", 1)
    seeds = tuple(dict.fromkeys(checked_integer(seed, "seeds", 0) for seed in seeds))
    if not seeds or (algorithms is not None and not algorithms):
        raise InputError(f"Tuning needs at least one {'algorithm' if seeds else 'seed'}.")
    run, held = _without_algorithm(config), _held_values(config, fixed or {}, algorithms or list(REGISTRY))
    grid = _checked_grid(values or {}, held)
    fed = _data(run.with_changes(seed=seeds[0]), study or PLAIN, callbacks.download)
    measures = tuning_measures(fed.task, fed.classes)
    if measure is not None and measure not in measures:
        words = f"{', '.join(measures[:-1])} or {measures[-1]}"
        reason = ""
        if measure in TWO_CLASSES and measure in TUNED[fed.task]:
            reason = f" The data have {fed.classes} classes, and {measure} is of the positive one of two."
            reason += " The mean recall of all classes is balanced_accuracy." if measure == "recall" else ""
        raise InputError(f"Tuning a {fed.task} is decided by {words}; the measure is '{measure}'.{reason}")
    measure = measure or measures[0]
    start = presets.layer(preset, run.dataset) if preset else {}
    searches: dict[str, Search] = {}
    for name, hyper in held.items():
        first = run.with_changes(algorithm=name, hyper=start.get(name, {}) | hyper)  # of trial 0
        searches[name] = Search(first, hyper, seeds, batch, own_grid(name, grid), has_list(grid), study)
    refused, notes = refusals(fed, {name: search.config for name, search in searches.items()}, study or PLAIN)
    if refused and (algorithms is not None or len(refused) == len(searches)):
        raise InputError(next(iter(refused.values())))
    searches = {name: search for name, search in searches.items() if name not in refused}
    notes = [f"{name} is left out: {reason}" for name, reason in refused.items()] + notes
    for text in dict.fromkeys([*notes, *(text for search in searches.values() for text in search.notes)]):
        callbacks.note(text)
    request = {"algorithms": list(searches), "trials": trials, "seeds": list(seeds), "batch": batch, "measure": measure}
    request |= {"preset": preset, "fixed": {name: search.fixed for name, search in searches.items()}}
    grid = {name: v for name, v in grid.items() if name not in REGISTRY or name in searches}
    request |= ({"grid": grid} if grid else {}) | ({"study": study.identity} if study else {})
    request |= {
        "run": run.to_dict(everything=True),
        "data": fed.hash,
        "optuna": optuna.__version__,
        "search": SEARCH_VERSION,
    }
    del fed  # it may be large, and every cell makes its own
    if not closed:
        if of_earlier_version(folder):
            raise InputError(
                f"'{folder}' holds a search of an earlier version, which tried other settings. Its tuned.toml can be "
                "used as it is (fedabml compare --config). To search again, give another folder with --out, and "
                f"--finished {shlex.quote(str(folder / 'cells.jsonl'))} for the runs that both have."
            )
        claim(folder, "tune", request, resume, MAY_CHANGE)
    given = {name: search.config.hyper for name, search in searches.items()}
    tuned = Tuned({name: [] for name in searches}, measure, folder / "tuned.toml", fixed=given)
    _search_all(tuned, searches, trials, Ledger(folder / "cells.jsonl", finished, closed=closed), callbacks)
    if not closed:
        write(folder / "trials.csv", _trials_csv(tuned.trials))
        made_by = tune_command(run, request, folder) + (f" (in Python, with study={study})" if study else "")
        write(folder / "tuned.toml", sealed_text(_tuned_toml(tuned, run, searches, made_by)))
    return tuned


def _search_all(
    tuned: Tuned, searches: Mapping[str, Search], trials: int, ledger: Ledger, callbacks: Callbacks
) -> None:
    """Run one search after the other, and add their trials and warnings to `tuned`."""
    works = {name: search.works(trials) for name, search in searches.items()}

    def expect(name: str, confirmation: list[float]) -> None:
        works[name] = works[name][0], confirmation
        callbacks.expect([work for both in works.values() for part in both for work in part], len(ledger.results))

    first = next(iter(searches))
    expect(first, works[first][1])
    for name, search in searches.items():
        trials_so_far = tuned.trials[name]
        for trial in search.run(trials, tuned.measure, ledger, callbacks):
            trials_so_far.append(trial)
            callbacks.trial(trial)
        for trial in search.confirm(trials_so_far, ledger, partial(expect, name), callbacks):
            trials_so_far[trial.number] = trial
            callbacks.trial(trial)
        tuned.warnings[name] = [text for trial in tuned.best(name) for text in search.warnings(trial)]


def of_earlier_version(folder: Path) -> bool:
    """Return whether a folder holds a search of an earlier version, which tried other points."""
    return (folder / "tune.json").is_file() and read(folder, "tune").get("search") != SEARCH_VERSION


# -- before anything is trained ---------------------------------------------------------------------------------
def _without_algorithm(config: RunConfig) -> RunConfig:
    """Return the run without its algorithm and seed, scored on validation rows; its paths hold from every folder."""
    names = ("algorithm", "lr", "seed", "evaluate", "eval_every", "split")
    defaults = {name: getattr(RunConfig, name) for name in names}
    return config.with_changes(**defaults, hyper={}, **real_paths(config))


def _held_values(config: RunConfig, fixed: Mapping[str, JsonDict], algorithms: Sequence[str]) -> dict[str, JsonDict]:
    """Return the hyperparameters that are not searched, by algorithm."""
    for name in (*algorithms, *fixed):
        if name not in REGISTRY:
            raise InputError(f"There is no algorithm '{name}'.{nearest(name, REGISTRY)}")
    common = {} if config.lr is None else {"lr": config.lr}
    tables = {config.algorithm: config.hyper}
    return {name: {**common, **tables.get(name, {}), **fixed.get(name, {})} for name in algorithms}


def _checked_grid(grid: Mapping[str, Any], algorithms: Collection[str]) -> JsonDict:
    """Return a grid as JSON has it; refuse names that no algorithm searches."""
    for name, values in grid.items():
        if name in REGISTRY and name not in algorithms:
            raise InputError(f"The grid has values for {name}, which is not among the algorithms to tune.")
        if name not in REGISTRY and not any(name in own_grid(algorithm, {name: values}) for algorithm in algorithms):
            raise InputError(f"The grid has values for '{name}', which is no hyperparameter to search.")
    return {name: _as_json(values) for name, values in grid.items()}


def _as_json(values: Any) -> Any:
    """Return a list or a range, or a table of them, as JSON has it."""
    if isinstance(values, Mapping):
        return {name: _as_json(value) for name, value in values.items()}
    if isinstance(values, Range):
        return as_flag(values)
    return list(values) if isinstance(values, tuple) else values


def _data(config: RunConfig, study: Study, download: Progress | None) -> Federation:
    """Return the federation of a run or a study, which must have validation rows."""
    if config.validation <= 0:
        raise InputError(
            "Tuning reads validation data only, so a share of every client's training data must be held out: "
            f"--validation 0.2 (from Python: validation=0.2); it is {config.validation:g}."
        )
    fed = study.federation(config) if study.given else config.federation(download)
    check_rows(fed, "val")
    return fed if study is PLAIN or study.given else study.federation(config)


# -- what is written ----------------------------------------------------------------------------------------------
def tune_command(config: RunConfig, request: JsonDict, out: Path) -> str:
    """Return the shell command of this search, without the keys of the machine."""
    config = config.with_changes(**{name: getattr(RunConfig, name) for name in MACHINE})
    options: JsonDict = {"algorithms": ",".join(map(command_line_name, request["algorithms"]))}
    options |= {name: request[name] or None for name in ("preset", "trials", "batch", "measure")}
    options |= {"seeds": ",".join(map(str, request["seeds"]))}
    grid = tuple(
        f"{name}={v if isinstance(v, str) else as_flag(v)}" for name, v in flat(request.get("grid", {})).items()
    )
    return command("tune", flags(options | config.options() | request["fixed"] | {"grid": grid}), out)


def _trials_csv(trials: Mapping[str, list[Trial]]) -> str:
    """Return all trials as CSV, with a column for every hyperparameter that any of them has."""
    everything = [trial for searched in trials.values() for trial in searched]
    names = list(dict.fromkeys([*(name for trial in everything for name in trial.searched), *GRID]))
    rows = []
    for trial in everything:
        hyper = ["none" if (v := trial.hyper.get(name, "")) is None else v for name in names]
        numbers = ["" if v is None else f"{v:.6g}" for v in (trial.value, trial.nll, trial.second, trial.seconds)]
        rows.append([trial.algorithm, trial.number, *hyper, *numbers, trial.error or "", trial.refused or ""])
    return csv_text(["algorithm", "trial", *names, "value", "nll", "second_seed", "seconds", "error", "refused"], rows)


def _tuned_toml(tuned: Tuned, config: RunConfig, searches: Mapping[str, Search], made_by: str) -> str:
    """Return the run's keys and a table for every algorithm, as `fedabml train --config` reads them."""
    share, first = config.validation, next(iter(searches.values()))
    seeds = ", ".join(map(str, first.seeds))
    lines = [
        f"# Made by: {made_by}",
        f"# Chosen by {tuned.decided_by} on validation data (share {share:g}), seeds {seeds}; each was then",
        f"# trained on seed {first.second_seed}, with validation data held out and with all training data:",
    ]
    if tuned.base[0] is not None:
        lines.append(f"#   {'base rate':12} the training labels alone: {tuned.measure} {tuned.base[0]:.4f}")
    best = {name: trials[0] for name in searches if (trials := tuned.best(name))}
    for name, trials in tuned.trials.items():
        lines.append(f"#   {name:12} {_chosen(best[name], len(trials)) if name in best else nothing_left(trials)}")
        lines += [f"#   {name:12} trial {t.number} was refused {t.refused}" for t in trials if t.refused]
        lines += [f"#   {text}" for text in tuned.warnings.get(name, ())]
    words = ["--config", str(tuned.file), "--algorithm", command_line_name(next(iter(searches))), *config.code_flags]
    lines.append(f"# Use it: fedabml train {shlex.join(words)}")
    left_out = (*MACHINE, "validation", "algorithm", "seed", *(DATA_KEYS if first.study and first.study.given else ()))
    run = {k: v for k, v in config.relevant().items() if k not in left_out}
    run |= {name: searches[name].config.hyper | trial.hyper for name, trial in best.items()}
    return "\n".join([*lines, "", to_toml(run)])


def _chosen(trial: Trial, count: int) -> str:
    """Describe the best of `count` trials."""
    scores = f"{trial.measure} {trial.value:.4f}" + ("" if trial.measure == "nll" else f", nll {trial.nll:.4f}")
    return f"trial {trial.number} of {count}: {scores}; on the second seed {trial.measure} {trial.second:.4f}"


def nothing_left(trials: Sequence[Trial]) -> str:
    """Say why an algorithm has no best trial."""
    refused = any(trial.refused for trial in trials)
    return "every trial diverged or was refused" if refused else "every trial diverged"
