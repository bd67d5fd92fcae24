"""What a search may try: the space that hyperparameters declare (`tune=`), and where in it to look next."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

import torch

from ..algorithms import REGISTRY
from ..algorithms.hyper import Range, checked
from ..config import RunConfig, Table
from ..errors import InputError, nearest

Space = dict[str, Range | tuple[Any, ...]]
Grid = Mapping[str, tuple[Any, ...]]

GRID = ("personal_epochs", "personal_lr")  # scored on each trained federation, not searched


def space(algorithm: str, fixed: Collection[str] = ()) -> Space:
    """What is searched for an algorithm: hyperparameters that declare it, unless they are fixed or make the variant."""
    kind, variant = REGISTRY[algorithm]
    held = {*GRID, *variant, *fixed}
    return {f.name: f.metadata["tune"] for f in fields(kind) if f.metadata["tune"] and f.name not in held}


def read_grid(words: Sequence[str]) -> dict[str, Any]:
    """`lr=0.01,0.1`, `fedprox.mu=0.1,1`, ... as lists by name, and by algorithm."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        *algorithm, key = name.strip().split(".")
        if not text.strip() or not key or len(algorithm) > 1:
            raise InputError(f"--grid takes NAME=A,B,C or ALGORITHM.NAME=A,B,C, such as lr=0.01,0.1; it is '{word}'.")
        own = found.setdefault(algorithm[0], {}) if algorithm else found
        if key in own:
            raise InputError(f"--grid {word}: values of '{name.strip()}' have been given already.")
        own[key] = [_value(each.strip()) for each in text.split(",")]
    return found


def _value(word: str) -> Any:
    """A number, none, true, false, or the word itself."""
    known = {"none": None, "true": True, "false": False}
    if word in known:
        return known[word]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def searches(told: Mapping[str, Any]) -> bool:
    """Whether a grid says what to search, and not only which personal options to score."""
    return any(name not in GRID for key, v in told.items() for name in (v if key in REGISTRY else [key]))


def searchable(algorithm: str) -> dict[str, Field[Any]]:
    """The hyperparameters of an algorithm but those that make the variant."""
    kind, variant = REGISTRY[algorithm]
    return {f.name: f for f in fields(kind) if f.name not in variant}


def own_grid(algorithm: str, told: Mapping[str, Any]) -> Grid:
    """An algorithm's part of a grid: values by hyperparameter, and tables of such by algorithm, which come first."""
    if not isinstance(told.get(algorithm, {}), Mapping):
        raise InputError(f"'{algorithm}' is an algorithm: say which hyperparameter, as {algorithm}.lr=0.01,0.1.")
    known = searchable(algorithm)
    shared = {name: values for name, values in told.items() if name not in REGISTRY and name in known}
    own = {**shared, **told.get(algorithm, {})}
    for name, values in own.items():
        if name not in known:
            raise InputError(f"{algorithm} has no hyperparameter '{name}' to search.{nearest(name, known)}")
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"A grid has a list of values for every hyperparameter; '{name}' has {values!r}.")
    word = lambda f, v: "none" if v is None and "none" in f.metadata["choices"] else v  # noqa: E731
    meant = {name: [word(known[name], v) for v in own[name]] for name in own}
    return {name: tuple(dict.fromkeys(checked(algorithm, known[name], v) for v in meant[name])) for name in own}


def personal_options(
    config: RunConfig, fixed: Collection[str] = (), grid: Grid = MappingProxyType({})
) -> tuple[Table, ...]:
    """The personal options to score: the one given, then the declared grid. No epochs need no step size.

    Where the step size given is none, which follows another or is the algorithm's own, that is of the grid, too.
    A grid that was told is all there is.
    """
    kind, variant = REGISTRY[config.algorithm]
    given, declared = config.algorithm_object(), {f.name: f.metadata["tune"] for f in fields(kind)}
    held = {*variant, *fixed}
    own = [getattr(given, name) for name in GRID]
    if any(name in grid for name in GRID):
        told = [grid.get(name, (mine,)) for name, mine in zip(GRID, own, strict=True)]
        return _options(itertools.product(*told))
    values = [
        (*((None,) if mine is None else ()), *declared[name]) if declared[name] and name not in held else (mine,)
        for name, mine in zip(GRID, own, strict=True)
    ]
    return _options([own, *itertools.product(*values)])


def _options(pairs: Iterable[Sequence[Any]]) -> tuple[Table, ...]:
    """Each pair of epochs and a step size once."""
    found = dict.fromkeys((epochs, lr if epochs else None) for epochs, lr in pairs)
    return tuple({"personal_epochs": epochs} | ({"personal_lr": lr} if epochs else {}) for epochs, lr in found)


def sound(config: RunConfig, space: Space) -> tuple[Space, list[str]]:
    """The space without choices that contradict what is held, and what is left out of it, in words.

    A choice is left out if it makes no algorithm with what is given of the others, nor with any of a few points of
    the space. What then has no choice but the one given is not searched.
    """
    made = config.algorithm_object()
    given = {name: getattr(made, name) for name in space}
    others = [given, *_even(space, 8, seed=0)] if space else []
    found, notes = dict(space), []
    for name, values in space.items():
        if isinstance(values, Range):
            continue
        reasons = {value: _contradiction(config, [point | {name: value} for point in others]) for value in values}
        left = tuple(value for value, reason in reasons.items() if reason is None)
        notes += [
            f"{config.algorithm}: {name} = {value} is not searched, for it contradicts what is held: {reason}"
            for value, reason in reasons.items()
            if reason is not None
        ]
        found[name] = left
        if {*left} <= {given[name]}:
            del found[name]
    return found, notes


def _contradiction(config: RunConfig, points: Sequence[Table]) -> str | None:
    """Why none of the points makes an algorithm; None if one does."""
    reason = None
    for point in points:
        try:
            config.with_changes(hyper=config.hyper | point).algorithm_object()
            return None
        except InputError as error:
            reason = reason or str(error)
    return reason


class Points:
    """Where to search next: the point given, points that fill the space evenly, then those that TPE asks for.

    A space of choices alone has no more than their combinations: they are tried in a random order, each once.
    """

    def __init__(self, space: Space, given: Table, seed: int, even: int):
        self.space = space
        self.study: Any = None  # Optuna's
        self.asked: list[Any] = []  # its trials, None for a point it does not know
        if finite(space):
            self.known = grid(space, given)
            self.known[1:] = random.Random(seed).sample(self.known[1:], len(self.known) - 1)
            return
        optuna = need_optuna()
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.known = [given, *_even(space, even - 1, seed)]
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
    """Whether there are choices alone."""
    return not any(isinstance(values, Range) for values in space.values())


def grid(space: Space, given: Table) -> list[Table]:
    """All combinations of choices, the one given at the head."""
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [given, *(point for point in points if point != given)]


def _even(space: Space, count: int, seed: int) -> list[Table]:
    """Points that fill the space evenly: scrambled Sobol numbers."""
    draws = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return [{name: _at(space[name], u) for name, u in zip(space, row, strict=True)} for row in draws.tolist()]


def _at(values: Range | tuple[Any, ...], u: float) -> Any:
    """The value at a share of the way through a range, or through a list of choices."""
    if not isinstance(values, Range):
        return values[min(int(u * len(values)), len(values) - 1)]
    low, high = (math.log(values.low), math.log(values.high)) if values.log else (values.low, values.high)
    found = low + u * (high - low)
    return _short(math.exp(found) if values.log else found)


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
