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
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from ..algorithms.hyper import Range
from ..data import Federation
from ..errors import InputError
from ..evaluation.measures import (
    MEASURES,
    OF_NUMBERS,
    OF_POSITIVE,
    client_measure,
    key_of_all,
    of_large,
    positive_class,
)
from ..runs.config import JsonDict, RunConfig
from .cell import Cell, Result
from .ledger import Ledger
from .runner import Callbacks, execute
from .search_space import (
    EARLY,
    GRID,
    Grid,
    Points,
    Space,
    combinations,
    end_warning,
    personal_options,
    space,
    without_contradictions,
)
from .study import PLAIN, Study

WORST = (-math.inf, -math.inf)  # the rank of a trial that diverged
HELD_OUT, ALL_ROWS = "validation rows", "all training rows"


@dataclass(frozen=True)
class Trial:
    """A configuration that was trained, once for every seed, and its best personal option."""

    algorithm: str
    number: int
    searched: JsonDict
    personal: JsonDict
    measure: str
    value: float | None  # of the measure on validation data, mean over seeds; None where it diverged
    nll: float | None
    rank: tuple[float, float]  # more is better: the measure, and for ties the NLL
    seconds: float
    error: str | None = None
    second: float | None = None  # of the measure on validation data of the second seed, once it is confirmed there
    refused: str | None = None  # why it was not confirmed
    scored_clients: str = ""  # which clients the measure is of, such as "of 10 rows or more"; empty: all
    positive: str = ""  # the positive class of two, where the measure is of it
    base: tuple[float | None, float | None] = (None, None)  # the base rate's measure and NLL, mean over seeds

    @property
    def hyper(self) -> JsonDict:
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
        return {
            name: audience if audience is fed else _scored_on_training(audience) for name, audience in audiences.items()
        }

    @property
    def scored(self) -> float:
        return self.of.scored


def _scored_on_training(fed: Federation) -> Federation:
    return replace(fed, val=fed.train)


class Search:
    """The search of one algorithm; with `grid_only` nothing but the grid is searched."""

    def __init__(
        self,
        config: RunConfig,
        fixed: JsonDict,
        seeds: Sequence[int],
        batch: int,
        grid: Grid = MappingProxyType({}),
        grid_only: bool = False,
        study: Study | None = None,
    ):
        if repeated := fixed.keys() & grid.keys():
            raise InputError(f"{config.algorithm}: '{min(repeated)}' is held at a value, and a grid has it, too.")
        self.config, self.fixed, self.seeds, self.batch, self.study = config, fixed, seeds, batch, study
        searched: Space = {} if grid_only else space(config.algorithm, fixed)
        searched |= {name: values for name, values in grid.items() if name not in GRID}
        self.space, self.notes = without_contradictions(config, searched)
        self.personal = personal_options(config, fixed, grid)
        algorithm, self.start = config.algorithm_object(), JsonDict()
        for name, values in self.space.items():
            value = getattr(algorithm, name)
            if isinstance(values, Range):
                self.start[name] = algorithm.lr if value is None else value  # none: it follows lr
            else:
                self.start[name] = values[0] if name in grid and value not in values else value
        self.second_seed = max(seeds) + 1  # of the confirmation

    def size(self, trials: int) -> int:
        """Return the number of trials: lists alone have no more than their combinations."""
        return min(trials, len(combinations(self.space, self.start)) or trials)

    def works(self, trials: int) -> tuple[list[float], list[float]]:
        """Return `Cell.estimated_rounds` of every cell of the trials, and of those expected of the confirmation."""
        options_of_cells = self.personal, self.personal[-1:]
        trial, confirmation = (self._cell(self.config, options).estimated_rounds for options in options_of_cells)
        count = self.size(trials)
        return [trial] * count * len(self.seeds), [confirmation] * (4 if count > 1 else 2)

    def _cell(self, config: RunConfig, options: tuple[JsonDict, ...]) -> Cell:
        return Cell(config.algorithm, config, options, study=self.study)

    def run(self, trials: int, measure: str, ledger: Ledger, callbacks: Callbacks) -> Iterator[Trial]:
        """Yield the trials in order; those of a batch are trained together."""
        seed = hashlib.sha256(f"{self.seeds[0]} {self.config.algorithm}".encode()).digest()
        points = Points(self.space, self.start, int.from_bytes(seed[:4]), max(EARLY, self.batch))
        trials = self.size(trials)
        for begin in range(0, trials, self.batch):
            proposed = points.propose(min(self.batch, trials - begin))
            results = iter(execute([cell for point in proposed for cell in self.cells(point)], ledger, callbacks))
            finished = [
                self.trial(number, point, [next(results) for _ in self.seeds], measure)
                for number, point in enumerate(proposed, begin)
            ]
            points.report([trial.rank[0] for trial in finished])
            yield from finished

    def cells(self, point: JsonDict) -> list[Cell]:
        """Return the cells of a point, one for every seed."""
        config = self._config(point)
        config.algorithm_object()  # a contradiction to what is fixed is found before anything is trained
        return [self._cell(config.with_changes(seed=seed), self.personal) for seed in self.seeds]

    def _config(self, point: JsonDict) -> RunConfig:
        return self.config.with_changes(hyper=self.config.hyper | point)

    def trial(self, number: int, point: JsonDict, results: Sequence[Result], measure: str) -> Trial:
        """Return the trial of finished cells, with the personal option that has the best mean over seeds."""
        name, seconds = self.config.algorithm, sum(result.facts.get("seconds", 0.0) for result in results)
        error = next((result.error for result in results if result.error), None)
        reason = error or f"{measure} is not finite"
        of_one = client_measure(measure) in OF_POSITIVE
        positive = positive_class(results[0].facts) * of_one
        failed = Trial(name, number, point, {}, measure, None, None, WORST, seconds, reason, positive=positive)
        scored = []
        for scores in zip(*(result.scores for result in results if not error), strict=True):
            if not any(score.error for score in scores):
                summaries = [score.summary for score in scores]
                value, nll = (_mean([measured(summary, key) for summary in summaries]) for key in (measure, "nll"))
                if math.isfinite(value) and math.isfinite(nll):
                    # Beyond six digits a difference is rounding, and the NLL decides.
                    rank = (round(-MEASURES[measure].distance(value), 6), -nll)
                    personal = scores[0].personal
                    some_left = summaries[0].get(measure) is not None
                    some_left = some_left and client_measure(measure) not in OF_NUMBERS
                    who, base = of_large(measure, summaries[0]) * some_left, _base(summaries, measure)
                    found = replace(failed, personal=personal, value=value, nll=nll, rank=rank, error=None)
                    scored.append(replace(found, scored_clients=who, base=base))
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
            cells = [*self.confirmation(trial), *(() if trials[0].error else self.confirmation(trials[0]))]
            works |= {cell.identity: cell.estimated_rounds for cell in cells}
            on_works(list(works.values()))
            results = execute(cells, ledger, callbacks)
            of_trial, of_first, second = results[:2], results[2:], None
            reason = self._refusal(trial.measure, *of_trial)
            if not reason:
                second = measured(of_trial[0].scores[0].summary, trial.measure)
                if of_first and not self._refusal(trial.measure, *of_first):
                    loss = _clear_loss(trial.measure, of_trial[0], of_first[0])
                    reason = loss and f"on {HELD_OUT} of seed {self.second_seed}: {loss} of trial 0"
            yield replace(trial, second=second, refused=reason)
            if not reason:
                return

    def confirmation(self, trial: Trial) -> tuple[Cell, Cell]:
        """Return the cells of a trial on the second seed: with validation rows held out, and with all training rows."""
        config = self._config(trial.searched).with_changes(seed=self.second_seed)
        held_out = replace(self._cell(config, (trial.personal,)), measure=client_measure(trial.measure))
        all_rows = config.with_changes(validation=0.0)
        return held_out, replace(held_out, config=all_rows, study=AllTraining(self.study or PLAIN))

    def _refusal(self, measure: str, held_out: Result, all_rows: Result) -> str | None:
        """Return why a trial is refused by its results on the second seed alone; None if it is not."""
        seed = f"of seed {self.second_seed}"
        for result, rows in ((held_out, "training rows without validation rows"), (all_rows, ALL_ROWS)):
            summary = result.scores[0].summary if result.scores else {}
            if result.error or not math.isfinite(_mean([measured(summary, key) for key in (measure, "nll")])):
                reason = " ".join((result.error or f"{measure} or nll is not finite").split())
                return f"on {rows} {seed}: {reason}"
        loss = _clear_loss(measure, all_rows, held_out)
        return loss and f"on {ALL_ROWS} {seed}: {loss} on {HELD_OUT}"

    def warnings(self, trial: Trial) -> list[str]:
        """Warn of chosen values at an end of what was searched, each with the flag that searches further.

        Epochs times step size is how far a client goes from θ. So the most epochs are no end where larger steps were
        tried with them, nor is the smallest step where fewer epochs of it were tried: further and less far have lost.
        """
        epochs, rates = (tuple(dict.fromkeys(o[name] for o in self.personal if name in o)) for name in GRID)
        chosen, warn = trial.hyper, partial(end_warning, trial.algorithm)
        warnings = [warn(name, values, chosen[name]) for name, values in self.space.items()]
        if (rate := chosen.get("personal_lr")) is None or rate == max(r for r in rates if r is not None):
            warnings.append(warn("personal_epochs", epochs, chosen["personal_epochs"]))
        if rate is not None:
            fewest = chosen["personal_epochs"] == min(e for e in epochs if e)
            warnings.append(warn("personal_lr", rates, rate, lower=fewest))
        return [text for text in warnings if text]


def measured(summary: JsonDict, measure: str) -> float | None:
    """Return a measure without the clients of few rows, as pages show it; of all clients where every one has few.

    The measures of a regression are of all clients, as the table of `compare` has them.
    """
    of_numbers = client_measure(measure).removeprefix("base_") in OF_NUMBERS
    value: float | None = None if of_numbers else summary.get(measure)
    return summary.get(key_of_all(measure, summary)) if value is None else value


def _base(summaries: Sequence[JsonDict], measure: str) -> tuple[float | None, float | None]:
    """Return the base rate's measure and NLL, mean over seeds; None where cells of earlier versions lack them."""
    means = [_mean([measured(summary, f"base_{key}") for summary in summaries]) for key in (measure, "nll")]
    value, nll = (None if math.isnan(mean) else mean for mean in means)
    return value, nll


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean; NaN where a measure is not defined (an AUROC of one class), or missing in an older cell."""
    return math.nan if None in values else statistics.fmean(value for value in values if value is not None)


def _clear_loss(measure: str, result: Result, other: Result) -> str | None:
    """Say that a result is worse than another by more than three standard errors over clients; None if it is not.

    Where a ledger does not hold every client's value of the measure, the NLL is compared.
    """
    measure = client_measure(measure)
    measure = measure if all(measure in each.scores[0].clients for each in (result, other)) else "nll"
    pairs = zip(result.scores[0].clients[measure], other.scores[0].clients[measure], strict=True)
    distance = MEASURES[measure].distance
    gains = [distance(b) - distance(a) for a, b in pairs if a is not None and b is not None]
    if len(gains) < 2 or statistics.fmean(gains) >= -3 * statistics.stdev(gains) / math.sqrt(len(gains)):
        return None
    value, least = (measured(one_result.scores[0].summary, measure) for one_result in (result, other))
    return f"{measure} is {value:.4f}, clearly worse than {least:.4f}"
