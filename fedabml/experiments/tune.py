"""Tuning: every algorithm gets the same number of trained federations, and only validation data are looked at.

What is searched is what the hyperparameters declare (`tune=`). Trial 0 is the configuration as it was given; then come
points that fill the space evenly, then Optuna's TPE, which learns from those before. The personal options
(personal_epochs, personal_lr) are not searched but scored, all of them, on each trained federation.

Trials are asked for in batches, and a batch runs together. A search is a function of its settings and of the scores:
after an interruption it is played again from its beginning, and cells that the ledger has are not run again.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import presets
from ..algorithms import REGISTRY
from ..config import RunConfig, Table, _toml
from ..data.once import reading_once
from ..data.rows import whole
from ..engine.distributed import refuse
from ..errors import InputError, nearest
from ..evaluate import check_rows
from ..files import write
from ..run import prepare
from ..sheets import csv_text
from .cells import MACHINE, Cell, Ledger, Result, execute
from .request import claim
from .space import GRID, Grid, Points, Space, finite, grid, need_optuna, own_grid, personal_options, sound, space
from .space import searches as is_searched

if TYPE_CHECKING:
    from ..data import Federation
    from ..data.download import Progress
    from .study import Study

SIGN = {"accuracy": 1, "rmse": -1, "nll": -1}  # times it, more is better
EVEN = 8  # so many trials come before TPE chooses (or the first batch, where that is larger)
FREE = ("trials",)  # what a resumed search may change: a longer search begins with the trials of a shorter one
WORST = (-math.inf, -math.inf)  # the rank of a trial that diverged


@dataclass(frozen=True)
class Trial:
    """A configuration that was trained, once for every seed, and its best personal option."""

    algorithm: str
    number: int
    searched: Table
    personal: Table
    measure: str
    value: float | None  # of the measure on validation data, mean over seeds; None where it diverged
    nll: float | None
    rank: tuple[float, float]  # more is better: the measure, and for ties the NLL
    seconds: float
    error: str | None = None

    @property
    def hyper(self) -> Table:
        """What this trial says of its algorithm: the hyperparameters searched, and the personal ones."""
        return self.searched | self.personal


@dataclass(frozen=True)
class Tuned:
    """A finished search: its trials by algorithm, and the file with the best of each."""

    trials: dict[str, list[Trial]]
    measure: str
    file: Path

    def best(self, algorithm: str, count: int = 1) -> list[Trial]:
        """The best trials of an algorithm, those that diverged left out."""
        fine = [trial for trial in self.trials[algorithm] if trial.error is None]
        return sorted(fine, key=lambda trial: trial.rank, reverse=True)[:count]


@reading_once()
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
    fixed: Mapping[str, Table] | None = None,
    values: Mapping[str, Any] | None = None,
    study: Study | None = None,
    resume: bool = False,
    finished: Sequence[str | os.PathLike[str]] = (),
    closed: bool = False,
    progress: Progress | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    on_start: Callable[[list[float], int], None] = lambda works, finished: None,
    on_round: Callable[[list[Cell], float], None] = lambda cells, round: None,
    on_done: Callable[[Result], None] = lambda result: None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Searches good hyperparameters of each algorithm on validation data; the best are written to tuned.toml in `out`.

    `config` is the run; its `validation` share must be above 0. Hyperparameters that it has, or that `fixed` has by
    algorithm, are held and not searched, nor is what contradicts them; `preset` has others to start from. `values` is a
    grid, lists by hyperparameter (or tables of them by algorithm), to search in place of what is declared. Each of the
    algorithms (None: all that fit the network) gets `trials` trained federations for every one of the `seeds`. A
    `study` says whose data they are trained on and who is scored, where that is not the run's own clients.
    `measure` is accuracy (for regression rmse) or nll. `finished` are cells.jsonl of other folders or machines, whose
    cells are not run again. A search that is `closed` runs and writes nothing: it must have ended. `on_start` hears
    how long each cell takes (`Cell.work`) and how many were finished before, the others how it goes on, as in
    `execute`; `progress` hears of downloads.
    """
    refuse("Tuning")
    optuna = need_optuna()
    trials, batch = whole(trials, "trials", 1), whole(batch, "batch", 1)
    seeds = tuple(dict.fromkeys(whole(seed, "seeds", 0) for seed in seeds))
    if not seeds or (algorithms is not None and not algorithms):
        raise InputError(f"Tuning needs at least one {'algorithm' if seeds else 'seed'}.")
    bare, held = _bare(config), _held(config, fixed or {}, algorithms or list(REGISTRY))
    values = _listed(values or {}, held)
    fed = _data(bare, seeds[0], progress)
    fed = study.federation(bare.with_changes(seed=seeds[0])) if study else fed
    measure = _measure(fed, measure)
    start = presets.layer(preset, bare.dataset) if preset else {}
    searches: dict[str, _Search] = {}
    notes: dict[str, None] = {}
    for name, own in held.items():
        told = bare.with_changes(algorithm=name, hyper=start.get(name, {}) | own)
        search = _Search(told, own, seeds, batch, own_grid(name, values), is_searched(values), study)
        try:
            setup = prepare(fed, bare.model, search.config.algorithm_object(), **bare.words(fed))
        except InputError as error:  # some algorithms need a network with a body and a head
            if algorithms is not None:
                raise
            notes[f"{name} is left out: {error}"] = None
            continue
        searches[name] = search
        notes |= dict.fromkeys([*setup.notes, *search.notes])
    if not searches:  # then it is not the algorithms that are wrong
        raise InputError(next(iter(notes)))
    for text in notes:
        on_note(text)
    folder = Path(out)
    request = {"algorithms": list(searches), "trials": trials, "seeds": list(seeds), "batch": batch, "measure": measure}
    request |= {"preset": preset, "fixed": {name: search.fixed for name, search in searches.items()}}
    values = {name: v for name, v in values.items() if name not in REGISTRY or name in searches}
    request |= {"grid": values} if values else {}
    request |= {"study": study.identity} if study else {}
    request |= {"run": bare.to_dict(everything=True), "data": fed.hash, "optuna": optuna.__version__}
    if not closed:
        claim(folder, "tune", request, resume, FREE)
    del fed  # it may be large, and every cell makes its own
    ledger = Ledger(folder / "cells.jsonl", finished, closed=closed)
    works = [work for each in searches.values() for work in [each.work] * each.size(trials) * len(seeds)]
    on_start(works, len(ledger.results))
    hear = {"on_round": on_round, "on_done": on_done}
    found: dict[str, list[Trial]] = {name: [] for name in searches}
    for name, search in searches.items():
        for trial in search.run(trials, measure, ledger, **hear):
            found[name].append(trial)
            on_trial(trial)
    tuned = Tuned(found, measure, folder / "tuned.toml")
    if closed:
        return tuned
    write(folder / "trials.csv", _trials_csv(found))
    made = command(bare, request, folder) + (f" (in Python, with study={study})" if study else "")
    write(tuned.file, _tuned_toml(tuned, bare, searches, made))
    return tuned


class _Search:
    """The search of one algorithm."""

    def __init__(
        self,
        config: RunConfig,
        fixed: Table,
        seeds: Sequence[int],
        batch: int,
        grid: Grid = MappingProxyType({}),
        only: bool = False,  # what the grid has is all that is searched
        study: Study | None = None,
    ):
        if both := fixed.keys() & grid.keys():
            raise InputError(f"{config.algorithm}: '{min(both)}' is held at a value, and a grid has it, too.")
        self.config, self.fixed, self.seeds, self.batch, self.study = config, fixed, seeds, batch, study
        told: Space = {name: values for name, values in grid.items() if name not in GRID}
        self.space, self.notes = sound(config, told if only else space(config.algorithm, fixed))
        self.personal = personal_options(config, fixed, grid)
        given = config.algorithm_object()
        self.given = {name: getattr(given, name) for name in self.space}
        for name, values in grid.items():
            if name in self.space and self.given[name] not in values:
                self.given[name] = values[0]

    def size(self, trials: int) -> int:
        """How many trials there will be: where there are only choices, no more than their combinations."""
        return min(trials, len(grid(self.space, self.given))) if finite(self.space) else trials

    def run(self, trials: int, measure: str, ledger: Ledger, **hear: Any) -> Iterator[Trial]:
        """The trials, in order; those of a batch are trained together. `hear` are listeners of `execute`."""
        seed = hashlib.sha256(f"{self.seeds[0]} {self.config.algorithm}".encode()).digest()
        points = Points(self.space, self.given, int.from_bytes(seed[:4]), max(EVEN, self.batch))
        trials = self.size(trials)
        for begin in range(0, trials, self.batch):
            asked = points.ask(min(self.batch, trials - begin))
            cells = [self.cells(point) for point in asked]
            for _ in execute([cell for each in cells for cell in each], ledger, **hear):
                pass
            done = [
                self.trial(number, point, [ledger[cell] for cell in own], measure)
                for number, (point, own) in enumerate(zip(asked, cells, strict=True), begin)
            ]
            points.tell([trial.rank[0] for trial in done])
            yield from done

    @property
    def work(self) -> float:
        """Of each of its cells."""
        return Cell(self.config.algorithm, self.config, self.personal, study=self.study).work

    def cells(self, point: Table) -> list[Cell]:
        """A cell for every seed."""
        config = self.config.with_changes(hyper=self.config.hyper | point)
        config.algorithm_object()  # a contradiction to what is fixed is found before anything is trained
        each = [config.with_changes(seed=seed) for seed in self.seeds]
        return [Cell(config.algorithm, own, self.personal, study=self.study) for own in each]

    def trial(self, number: int, point: Table, results: Sequence[Result], measure: str) -> Trial:
        """What the cells of a trial amount to: the personal option with the best mean over seeds."""
        name, seconds = self.config.algorithm, sum(result.facts.get("seconds", 0.0) for result in results)
        error = next((result.error for result in results if result.error), None)
        scored = []
        for scores in zip(*(result.scores for result in results if not error), strict=True):
            if any(score.error for score in scores):
                continue
            value, nll = (statistics.fmean(score.summary[key] for score in scores) for key in (measure, "nll"))
            if math.isfinite(value) and math.isfinite(nll):
                rank = (round(SIGN[measure] * value, 6), -nll)  # beyond six digits it is rounding: the NLL decides
                scored.append(Trial(name, number, point, scores[0].personal, measure, value, nll, rank, seconds))
        error = error or f"{measure} is not finite"
        failed = Trial(name, number, point, {}, measure, None, None, WORST, seconds, error)
        return max(scored, key=lambda trial: trial.rank, default=failed)


# -- before anything is trained ---------------------------------------------------------------------------------
def _bare(config: RunConfig) -> RunConfig:
    """The run's keys without an algorithm and a seed; its paths hold from every working folder."""
    paths = {name: str(Path(v).resolve()) for name in ("data", "pretrained") if (v := getattr(config, name))}
    plain = {name: getattr(RunConfig, name) for name in ("algorithm", "lr", "seed", "evaluate", "eval_every")}
    return config.with_changes(**plain, hyper={}, **paths)


def _held(config: RunConfig, fixed: Mapping[str, Table], algorithms: Sequence[str]) -> dict[str, Table]:
    """By algorithm, the hyperparameters that are not searched."""
    for name in (*algorithms, *fixed):
        if name not in REGISTRY:
            raise InputError(f"There is no algorithm '{name}'.{nearest(name, REGISTRY)}")
    common = {} if config.lr is None else {"lr": config.lr}
    own = {config.algorithm: config.hyper}
    return {name: {**common, **own.get(name, {}), **fixed.get(name, {})} for name in algorithms}


def _listed(values: Mapping[str, Any], algorithms: Collection[str]) -> Table:
    """A grid as JSON would have it, if each of its names is to be searched for some algorithm."""
    for name, v in values.items():
        if name in REGISTRY and name not in algorithms:
            raise InputError(f"The grid has values for {name}, which is not among the algorithms to tune.")
        if name not in REGISTRY and not any(name in own_grid(each, {name: v}) for each in algorithms):
            raise InputError(f"The grid has values for '{name}', which is no hyperparameter to search.")
    plain = lambda v: list(v) if isinstance(v, list | tuple) else v  # noqa: E731
    return {k: {n: plain(x) for n, x in v.items()} if isinstance(v, Mapping) else plain(v) for k, v in values.items()}


def _data(config: RunConfig, seed: int, progress: Progress | None) -> Federation:
    """The federation of a seed, which must have validation rows."""
    if config.validation <= 0:
        raise InputError(
            "Tuning looks at validation data alone, so a share of every client's training data must be held out: "
            f"--validation 0.2 (from Python: validation=0.2); it is {config.validation:g}."
        )
    fed = config.with_changes(seed=seed).federation(progress)
    check_rows(fed, "val")
    return fed


def _measure(fed: Federation, measure: str | None) -> str:
    known = ("accuracy" if fed.task == "classification" else "rmse", "nll")
    if measure is not None and measure not in known:
        raise InputError(f"Tuning a {fed.task} goes by {' or '.join(known)}; the measure is '{measure}'.")
    return measure or known[0]


# -- what is written ----------------------------------------------------------------------------------------------
def command(config: RunConfig, request: Table, out: Path) -> str:
    """The shell command that makes this search, wherever it runs."""
    config = config.with_changes(**{name: getattr(RunConfig, name) for name in MACHINE})
    words = ["fedabml", "tune", "--algorithms", ",".join(request["algorithms"])]
    words += ["--preset", request["preset"]] if request["preset"] else []
    for k in ("trials", "batch", "measure"):
        words += [f"--{k}", str(request[k])]
    words += ["--seeds", ",".join(map(str, request["seeds"])), *shlex.split(config.command())[2:]]
    for name, table in request["fixed"].items():
        for k, v in table.items():
            words += ["--set", f"{name}.{k}={_word(v)}"]
    for name, own in request.get("grid", {}).items():
        for k, v in own.items() if name in REGISTRY else [("", own)]:
            words += ["--grid", f"{name}{'.' * bool(k)}{k}={','.join(map(_word, v))}"]
    return shlex.join([*words, "--out", str(out)])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else _toml("none" if value is None else value)


def _trials_csv(found: Mapping[str, list[Trial]]) -> str:
    """Every trial, a row each, with a column for every hyperparameter that any of them has."""
    everything = [trial for trials in found.values() for trial in trials]
    names = list(dict.fromkeys([*(name for trial in everything for name in trial.searched), *GRID]))
    rows = []
    for trial in everything:
        hyper = ["none" if (v := trial.hyper.get(name, "")) is None else v for name in names]
        numbers = ["" if v is None else f"{v:.6g}" for v in (trial.value, trial.nll, trial.seconds)]
        rows.append([trial.algorithm, trial.number, *hyper, *numbers, trial.error or ""])
    return csv_text(["algorithm", "trial", *names, "value", "nll", "seconds", "error"], rows)


def _tuned_toml(tuned: Tuned, config: RunConfig, searches: Mapping[str, _Search], told: str) -> str:
    """The run's keys and a table for every algorithm, as `fedabml train --config` reads them."""
    share, first = config.validation, next(iter(searches.values()))
    lines = [f"# Made by: {told}"]
    lines.append(f"# Chosen by {tuned.measure} on validation data (share {share:g}), seeds {_words(first.seeds)}:")
    best = {name: trials[0] for name in searches if (trials := tuned.best(name))}
    for name, trials in tuned.trials.items():
        words = f"trial {best[name].number} of {len(trials)}" if name in best else "every trial diverged"
        lines.append(f"#   {name:12} {words}{_figures(tuned.measure, best[name]) if name in best else ''}")
    lines.append(f"# Use it: fedabml train --config {shlex.quote(str(tuned.file))} --algorithm {next(iter(searches))}")
    own = (*MACHINE, "validation", "algorithm", "seed", "model_options")
    run = {k: v for k, v in config.to_dict(everything=True).items() if k not in own and v is not None}
    lines += ["", *(f"{k} = {_toml(v)}" for k, v in run.items())]
    tables = {"model_options": config.model_options} if config.model_options else {}
    tables |= {name: searches[name].config.hyper | trial.hyper for name, trial in best.items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{k} = {_toml('none' if v is None else v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _figures(measure: str, trial: Trial) -> str:
    more = "" if measure == "nll" else f", nll {trial.nll:.4f}"
    return f": {measure} {trial.value:.4f}{more}"


def _words(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
