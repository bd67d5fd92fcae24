"""The search of one algorithm: its trials on validation data, and the confirmation of the best of them.

A trial is a setting that was trained, once for every seed of the search. The winner must survive before it is used: on
a second seed it is trained with the validation rows held out, and with all training rows, as `compare` will train it.
It is refused, and the next best is confirmed in its place, where

    either of the two diverges or has scores that are not finite,
    on validation rows it is clearly worse than trial 0, the setting as it was given, or
    trained with all training rows it is clearly worse on these very rows than on validation rows that it had not seen.

Clearly worse is worse by more than three standard errors of the clients' paired differences. No test row is read.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ..algorithms.hyper import Range
from ..data import Federation
from ..errors import InputError
from ..runs.config import RunConfig, Table
from .cell import Cell, Result
from .ledger import Ledger
from .runner import Callbacks, execute
from .search_space import (
    GRID,
    Grid,
    Space,
    around,
    combinations,
    edge,
    finite,
    inside,
    personal_options,
    rounded,
    sound,
    space,
)
from .study import PLAIN, Study

SIGN = {"accuracy": 1, "rmse": -1, "nll": -1}  # times it, more is better
EARLY = 8  # trials before TPE proposes (or the first batch, where that is larger)
WORST = (-math.inf, -math.inf)  # the rank of a trial that diverged
HELD_OUT, ALL_ROWS = "validation rows", "all training rows"


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
    second: float | None = None  # of the measure on validation data of the second seed, once it is confirmed there
    refused: str | None = None  # why it was not confirmed

    @property
    def hyper(self) -> Table:
        """The hyperparameters of this trial: the searched and the personal ones."""
        return self.searched | self.personal


@dataclass(frozen=True)
class AllTraining(Study):
    """Another study's training, scored on its own training rows: no test row is read."""

    of: Study

    @property
    def identity(self) -> list[Any]:
        return [type(self).__name__, self.of.identity]

    def federation(self, config: RunConfig) -> Federation:
        return _scored_on_training(self.of.federation(config))

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        return self.of.network(config, fed)

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        audiences = self.of.audiences(config, fed)
        return {name: own if own is fed else _scored_on_training(own) for name, own in audiences.items()}

    @property
    def scored(self) -> float:
        return self.of.scored


def _scored_on_training(fed: Federation) -> Federation:
    return replace(fed, val=fed.train)


class Points:
    """The points of a search, in their order.

    The first point is the given one. The next `early` − 1 points are scrambled Sobol numbers in boxes around it: box i
    covers the share s = i/(early − 1) of every range (of its logarithm, where the range is logarithmic). A list has its
    given value with probability 1 − s, else any of its values. So the first trials stay near what is known to work, and
    the last of them come from the whole space. After them TPE proposes points from all scores so far.

    A space of lists alone has no more points than combinations: each is tried once, in random order.
    """

    def __init__(self, space: Space, given: Table, seed: int, early: int):
        self.space = space
        self.study: Any = None  # Optuna's
        self.pending: list[Any] = []  # its trials without a score; None for a point outside its space
        if finite(space):
            self.known = combinations(space, given)
            self.known[1:] = random.Random(seed).sample(self.known[1:], len(self.known) - 1)
            return
        optuna = need_optuna()
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.known = [given, *around(space, given, [i / (early - 1) for i in range(1, early)], seed)]
        self.distributions = {
            name: optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
            if isinstance(values, Range)
            else optuna.distributions.CategoricalDistribution(values)
            for name, values in space.items()
        }

    def propose(self, count: int) -> list[Table]:
        """Return the next points."""
        pairs = [self._next() for _ in range(count)]
        self.pending = [trial for _, trial in pairs]
        return [point for point, _ in pairs]

    def _next(self) -> tuple[Table, Any]:
        if not self.known:
            trial = self.study.ask(self.distributions)
            return {name: rounded(trial.params[name]) for name in self.space}, trial
        point = self.known.pop(0)
        if self.study is None or not inside(self.space, point):
            return point, None
        self.study.enqueue_trial(point)
        return point, self.study.ask(self.distributions)

    def report(self, scores: Sequence[float]) -> None:
        """Take the scores of the last points; more is better. TPE learns nothing of a given point outside the space."""
        for trial, score in zip(self.pending, scores, strict=True):
            if trial is not None:
                self.study.tell(trial, score)


def need_optuna() -> Any:
    """Import Optuna without its messages; an error says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "Tuning needs Optuna, which is not installed: pip install 'fedabml[tune]' (or pip install optuna)."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """The search of one algorithm."""

    def __init__(
        self,
        config: RunConfig,
        fixed: Table,
        seeds: Sequence[int],
        batch: int,
        grid: Grid = MappingProxyType({}),
        only: bool = False,  # search nothing but the grid
        study: Study | None = None,
    ):
        if both := fixed.keys() & grid.keys():
            raise InputError(f"{config.algorithm}: '{min(both)}' is held at a value, and a grid has it, too.")
        self.config, self.fixed, self.seeds, self.batch, self.study = config, fixed, seeds, batch, study
        own: Space = {name: values for name, values in grid.items() if name not in GRID}
        self.space, self.notes = sound(config, own if only else space(config.algorithm, fixed) | own)
        self.personal = personal_options(config, fixed, grid)
        given = config.algorithm_object()
        self.given = {name: getattr(given, name) for name in self.space}
        steps = [name for name, values in self.space.items() if isinstance(values, Range)]
        self.given |= {name: given.lr for name in steps if self.given[name] is None}  # none: it follows lr
        for name, values in grid.items():
            if name in self.space and not isinstance(values, Range) and self.given[name] not in values:
                self.given[name] = values[0]

    @property
    def second_seed(self) -> int:
        """The seed of the confirmation, which is none of the search's."""
        return max(self.seeds) + 1

    def size(self, trials: int) -> int:
        """Return the number of trials: lists alone have no more than their combinations."""
        return min(trials, len(combinations(self.space, self.given))) if finite(self.space) else trials

    def works(self, trials: int) -> tuple[list[float], list[float]]:
        """Return the work (`Cell.work`) of every cell of the trials, and of those expected of the confirmation."""
        config, usual = self.config, self.personal[-1:]
        each = Cell(config.algorithm, config, self.personal, study=self.study).work
        confirming = Cell(config.algorithm, config, usual, study=self.study).work
        return [each] * self.size(trials) * len(self.seeds), [confirming] * (4 if self.size(trials) > 1 else 2)

    def run(self, trials: int, measure: str, ledger: Ledger, callbacks: Callbacks) -> Iterator[Trial]:
        """Yield the trials in order; those of a batch are trained together."""
        seed = hashlib.sha256(f"{self.seeds[0]} {self.config.algorithm}".encode()).digest()
        points = Points(self.space, self.given, int.from_bytes(seed[:4]), max(EARLY, self.batch))
        trials = self.size(trials)
        for begin in range(0, trials, self.batch):
            proposed = points.propose(min(self.batch, trials - begin))
            cells = [self.cells(point) for point in proposed]
            execute([cell for each in cells for cell in each], ledger, callbacks)
            done = [
                self.trial(number, point, [ledger[cell] for cell in own], measure)
                for number, (point, own) in enumerate(zip(proposed, cells, strict=True), begin)
            ]
            points.report([trial.rank[0] for trial in done])
            yield from done

    def cells(self, point: Table) -> list[Cell]:
        """Return the cells of a point, one for every seed."""
        config = self._config(point)
        config.algorithm_object()  # a contradiction to what is fixed is found before anything is trained
        each = [config.with_changes(seed=seed) for seed in self.seeds]
        return [Cell(config.algorithm, own, self.personal, study=self.study) for own in each]

    def _config(self, point: Table) -> RunConfig:
        return self.config.with_changes(hyper=self.config.hyper | point)

    def trial(self, number: int, point: Table, results: Sequence[Result], measure: str) -> Trial:
        """Return the trial of finished cells, with the personal option that has the best mean over seeds."""
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

    # -- confirmation ---------------------------------------------------------------------------------------------
    def confirm(
        self, trials: Sequence[Trial], ledger: Ledger, on_works: Callable[[list[float]], None], callbacks: Callbacks
    ) -> Iterator[Trial]:
        """Yield the trials that are refused, from the best on, and at last the one that is confirmed, if any.

        `on_works` is called with the work of every cell of the confirmation that is known so far.
        """
        works: dict[str, float] = {}
        candidates = sorted((t for t in trials if t.error is None), key=lambda t: t.rank, reverse=True)
        if not candidates:
            on_works([])
        for trial in candidates:
            cells, first = self.rehearsals(trial), () if trials[0].error else self.rehearsals(trials[0])
            needed = {cell.identity: cell for cell in (*cells, *first)}
            works |= {identity: cell.work for identity, cell in needed.items()}
            on_works(list(works.values()))
            execute(list(needed.values()), ledger, callbacks)
            found = self._judged(trial, [ledger[cell] for cell in cells])
            if first and not found.refused:
                reference = self._judged(trials[0], [ledger[cell] for cell in first])
                words = None if reference.refused else _collapse(trial.measure, ledger[cells[0]], ledger[first[0]])
                found = replace(
                    found, refused=words and f"on {HELD_OUT} of seed {self.second_seed}: {words} of trial 0"
                )
            yield found
            if not found.refused:
                return

    def rehearsals(self, trial: Trial) -> tuple[Cell, Cell]:
        """Return the cells of a trial on the second seed: with validation rows held out, and with all training rows."""
        config = self._config(trial.searched).with_changes(seed=self.second_seed)
        whole = AllTraining(self.study or PLAIN)
        return (
            Cell(trial.algorithm, config, (trial.personal,), study=self.study),
            Cell(trial.algorithm, config.with_changes(validation=0.0), (trial.personal,), study=whole),
        )

    def _judged(self, trial: Trial, results: Sequence[Result]) -> Trial:
        """Return the trial with its score on the second seed, or with the reason why it is refused."""
        measure, seed = trial.measure, f"of seed {self.second_seed}"
        for result, rows in zip(results, ("training rows without validation rows", ALL_ROWS), strict=True):
            summary = result.scores[0].summary if result.scores else {}
            if result.error or not all(math.isfinite(summary[key]) for key in (measure, "nll")):
                reason = " ".join((result.error or f"{measure} or nll is not finite").split())
                return replace(trial, refused=f"on {rows} {seed}: {reason}")
        held_out, whole = results
        if words := _collapse(measure, whole, held_out):
            return replace(trial, refused=f"on {ALL_ROWS} {seed}: {words} on {HELD_OUT}")
        return replace(trial, second=held_out.scores[0].summary[measure])

    def warnings(self, trial: Trial) -> list[str]:
        """Warn of chosen values at an end of what was searched, each with the flag that searches further.

        Epochs times step size is how far a client goes from θ. So the most epochs are no end where larger steps were
        tried with them, nor is the smallest step where fewer epochs of it were tried: further and less far have lost.
        """
        epochs, rates = (tuple(dict.fromkeys(o[name] for o in self.personal if name in o)) for name in GRID)
        own = trial.hyper
        found = [edge(trial.algorithm, name, values, own[name]) for name, values in self.space.items()]
        if (rate := own.get("personal_lr")) is None or rate == max(r for r in rates if r is not None):
            found.append(edge(trial.algorithm, "personal_epochs", epochs, own["personal_epochs"]))
        if rate is not None:
            fewest = own["personal_epochs"] == min(e for e in epochs if e)
            found.append(edge(trial.algorithm, "personal_lr", rates, rate, lower=fewest))
        return [text for text in found if text]


def _collapse(measure: str, own: Result, other: Result) -> str | None:
    """Say that a result is worse than another by more than three standard errors over clients; None if it is not."""
    pairs = zip(own.scores[0].clients[measure], other.scores[0].clients[measure], strict=True)
    gains = [SIGN[measure] * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(gains) < 2 or statistics.fmean(gains) >= -3 * statistics.stdev(gains) / math.sqrt(len(gains)):
        return None
    value, least = (result.scores[0].summary[measure] for result in (own, other))
    return f"{measure} is {value:.4f}, clearly worse than {least:.4f}"
