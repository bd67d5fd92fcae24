"""Where a search looks next: at what was given, around it in widening boxes, then where Optuna's TPE proposes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from ..algorithms.hyper import Range
from ..errors import InputError
from ..runs.config import Table

Space = dict[str, Range | tuple[Any, ...]]


class Points:
    """The points of a search, in their order.

    The first point is the one given. The next `early` − 1 points are scrambled Sobol numbers in boxes around it: box i
    covers the share s = i/(early − 1) of every range (of its logarithm, where the range is logarithmic). A list has its
    given value with probability 1 − s, else any of its values. So the first trials stay near what is known to work, and
    the last of them come from the whole space. After them TPE proposes points from all scores so far.

    A space of lists alone has no more points than combinations: each is tried once, in random order.
    """

    def __init__(self, space: Space, given: Table, seed: int, early: int):
        self.space = space
        self.study: Any = None  # Optuna's
        self.asked: list[Any] = []  # its trials, None for a point it does not know
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

    def ask(self, count: int) -> list[Table]:
        """The next points."""
        pairs = [self._next() for _ in range(count)]
        self.asked = [trial for _, trial in pairs]
        return [point for point, _ in pairs]

    def _next(self) -> tuple[Table, Any]:
        if not self.known:
            trial = self.study.ask(self.distributions)
            return {name: _short(trial.params[name]) for name in self.space}, trial
        point = self.known.pop(0)
        if self.study is None or not _inside(self.space, point):
            return point, None
        self.study.enqueue_trial(point)
        return point, self.study.ask(self.distributions)

    def tell(self, scores: Sequence[float]) -> None:
        """The scores of those points; more is better. A given point outside the ranges teaches TPE nothing."""
        for trial, score in zip(self.asked, scores, strict=True):
            if trial is not None:
                self.study.tell(trial, score)


def finite(space: Space) -> bool:
    """Whether a space has lists alone."""
    return not any(isinstance(values, Range) for values in space.values())


def combinations(space: Space, given: Table) -> list[Table]:
    """All combinations of lists, the one given at the head."""
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [given, *(point for point in points if point != given)]


def around(space: Space, centre: Table, shares: Sequence[float], seed: int) -> list[Table]:
    """A point for each share: drawn from the box around the centre that covers this share of the space."""
    draws = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed).draw(len(shares), dtype=torch.float64)
    return [
        {name: _drawn(space[name], centre[name], u, share) for name, u in zip(space, row, strict=True)}
        for row, share in zip(draws.tolist(), shares, strict=True)
    ]


def _drawn(values: Range | tuple[Any, ...], centre: Any, u: float, share: float) -> Any:
    """The value that u in [0, 1) picks from the box around the centre."""
    if isinstance(values, Range):
        middle = min(max(position(values, centre), 0.0), 1.0)
        low, high = _scale(values, values.low), _scale(values, values.high)
        found = low + (middle + share * (u - middle)) * (high - low)
        return _short(math.exp(found) if values.log else found)
    if centre in values:
        if u < 1 - share:
            return centre
        u = 1 - (1 - u) / share
    return values[min(int(u * len(values)), len(values) - 1)]


def position(values: Range, value: Any) -> float:
    """How far through a range a value lies: 0 at its low end, 1 at its high end, ½ for none."""
    if value is None:
        return 0.5
    low, high = _scale(values, values.low), _scale(values, values.high)
    return (_scale(values, value) - low) / (high - low)


def _scale(values: Range, value: float) -> float:
    if not values.log:
        return value
    return math.log(value) if value > 0 else -math.inf


def _short(value: Any) -> Any:
    """Three digits of a number are enough."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _inside(space: Space, point: Table) -> bool:
    return all(
        isinstance(point[name], float) and values.low <= point[name] <= values.high
        if isinstance(values, Range)
        else point[name] in values
        for name, values in space.items()
    )


def need_optuna() -> Any:
    """The module, quiet; or how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "Tuning searches with Optuna, which is not installed: pip install 'fedabml[tune]' (or pip install optuna)."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
