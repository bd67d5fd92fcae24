"""What a search may try: the space that hyperparameters declare (`tune=`), or lists and ranges in place of it.

A list, such as `lr=0.01,0.1`, limits the search to the lists that are given. A range, such as `lr=0.001..3`, only
replaces the declared range of that hyperparameter. personal_epochs and personal_lr are not searched: their values are
all scored on every trained federation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

import torch

from ..algorithms import REGISTRY
from ..algorithms.hyper import Range, checked
from ..arguments import is_number
from ..errors import InputError, nearest
from ..runs.config import JsonDict, RunConfig

Values = Range | tuple[Any, ...]
Space = dict[str, Values]
Grid = Mapping[str, Values]

GRID = ("personal_epochs", "personal_lr")  # scored on each trained federation, not searched
TO = ".."  # between the ends of a range


def searchable(algorithm: str) -> dict[str, Field[Any]]:
    """Return the hyperparameters of an algorithm, without those that make the variant."""
    kind, variant = REGISTRY[algorithm].kind, REGISTRY[algorithm].defaults
    return {f.name: f for f in fields(kind) if f.name not in variant}


def space(algorithm: str, fixed: Collection[str] = ()) -> Space:
    """Return what is searched for an algorithm: what its hyperparameters declare, but for the fixed ones."""
    declared = {name: f.metadata["tune"] for name, f in searchable(algorithm).items()}
    return {name: values for name, values in declared.items() if values and name not in (*GRID, *fixed)}


def read_grid(entries: Sequence[str]) -> dict[str, Any]:
    """Read `lr=0.01,0.1`, `fedprox.mu=0.1,1`, ... as lists by name, and by algorithm; a range stays text."""
    grid: dict[str, Any] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        *algorithm, key = name.strip().split(".")
        if not text.strip() or not key or len(algorithm) > 1:
            raise InputError(
                "--grid takes NAME=A,B,C or ALGORITHM.NAME=A,B,C, such as lr=0.01,0.1, or a range, such as "
                f"lr=0.001..3; it is '{entry}'."
            )
        table = grid.setdefault(algorithm[0], {}) if algorithm else grid
        if key in table:
            raise InputError(f"--grid {entry}: values of '{name.strip()}' have been given already.")
        table[key] = text.strip() if TO in text else [_value(value.strip()) for value in text.split(",")]
    return grid


def _value(word: str) -> Any:
    """Return a word as a number, None, True or False, or as it stands."""
    constants = {"none": None, "true": True, "false": False}
    if word in constants:
        return constants[word]
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word


def has_list(grid: Mapping[str, Any]) -> bool:
    """Return whether a grid has a list to search: then nothing else is searched."""
    named = [pair for key, v in grid.items() for pair in (v.items() if key in REGISTRY else [(key, v)])]
    return any(name not in GRID and not isinstance(values, str) for name, values in named)


def own_grid(algorithm: str, grid: Mapping[str, Any]) -> Grid:
    """Return the values of a grid that are for an algorithm; those under its name override the common ones."""
    if not isinstance(grid.get(algorithm, {}), Mapping):
        raise InputError(f"'{algorithm}' is an algorithm: name a hyperparameter, such as {algorithm}.lr=0.01,0.1.")
    fields = searchable(algorithm)
    shared = {name: values for name, values in grid.items() if name not in REGISTRY and name in fields}
    merged = {**shared, **grid.get(algorithm, {})}
    for name, values in merged.items():
        if name not in fields:
            raise InputError(f"{algorithm} has no hyperparameter '{name}' to search.{nearest(name, fields)}")
        if not values or not (isinstance(values, list | tuple) or (isinstance(values, str) and TO in values)):
            raise InputError(f"A grid has a list of values for every hyperparameter; '{name}' has {values!r}.")
    return {name: _parsed(algorithm, fields[name], values) for name, values in merged.items()}


def _parsed(algorithm: str, field: Field[Any], values: Any) -> Values:
    """Return a list with each of its values once, or a range from the text `LOW..HIGH`, checked.

    A range is logarithmic where the declared one is; one of whole numbers becomes a list of five, evenly spaced.
    """
    if isinstance(values, list | tuple) and not isinstance(values, Range):
        named = ["none" if v is None and "none" in field.metadata["choices"] else v for v in values]
        return tuple(dict.fromkeys(checked(algorithm, field, v) for v in named))
    text = as_flag(values) if isinstance(values, Range) else values
    subject = f"{algorithm}: the range '{field.name}={text}'"
    if field.name in GRID or field.metadata["choices"]:
        raise InputError(f"{subject}: '{field.name}' has no range. Give a list of values, as {field.name}=A,B,C.")
    low, high = (checked(algorithm, field, _value(end.strip())) for end in text.split(TO, 1))
    if not low < high:
        raise InputError(f"{subject} must rise, as {field.name}=0.001{TO}3.")
    if isinstance(low, int):
        return tuple(dict.fromkeys(round(low + i * (high - low) / 4) for i in range(5)))
    declared = field.metadata["tune"]
    log = declared.log if isinstance(declared, Range) else low > 0 and high >= 10 * low
    if log and low <= 0:
        raise InputError(f"{subject} is logarithmic: it must begin above 0.")
    return Range(low, high, log)


def personal_options(
    config: RunConfig, fixed: Collection[str] = (), grid: Grid = MappingProxyType({})
) -> tuple[JsonDict, ...]:
    """Return the personal options to score: all pairs of epochs and step sizes, the same for every algorithm.

    Each of the two is the grid's list, the declared list, or the fixed value. A step size that the configuration has,
    as from a preset, comes first with its epochs. None, whose meaning depends on the algorithm, is in no declared list.
    """
    fields, algorithm = searchable(config.algorithm), config.algorithm_object()
    defaults = [getattr(algorithm, name) for name in GRID]
    lists = []
    for name, value in zip(GRID, defaults, strict=True):
        declared = fields[name].metadata["tune"] if name in fields and name not in fixed else ()
        lists.append(grid.get(name) or declared or (value,))
    first = [] if defaults[1] is None or any(name in grid for name in GRID) else [defaults]
    pairs = dict.fromkeys((epochs, lr if epochs else None) for epochs, lr in [*first, *itertools.product(*lists)])
    return tuple({"personal_epochs": epochs} | ({"personal_lr": lr} if epochs else {}) for epochs, lr in pairs)


def without_contradictions(config: RunConfig, space: Space) -> tuple[Space, list[str]]:
    """Return the space without choices that contradict fixed hyperparameters, and notes on what is left out.

    A choice is left out if no algorithm can be made with it, neither at the configuration's values of the others nor at
    a few points of the space. A hyperparameter with no choice left but its given value is not searched.
    """
    algorithm = config.algorithm_object()
    setting = {name: getattr(algorithm, name) for name in space}
    points = [setting, *around(space, setting, [1.0] * 8, seed=0)] if space else []
    kept, notes = dict(space), []
    for name, values in space.items():
        if isinstance(values, Range):
            continue
        reasons = {value: _contradiction(config, [point | {name: value} for point in points]) for value in values}
        kept[name] = tuple(value for value in values if reasons[value] is None)
        if {*kept[name]} <= {setting[name]}:
            del kept[name]
        notes += [
            f"{config.algorithm}: {name} = {value} is not searched, because it contradicts a fixed value: {reason}"
            for value, reason in reasons.items()
            if reason is not None
        ]
    return kept, notes


def _contradiction(config: RunConfig, points: Sequence[JsonDict]) -> str | None:
    """Return why no algorithm can be made at any of the points; None if it can at one."""
    reasons = []
    for point in points:
        try:
            config.with_changes(hyper=config.hyper | point).algorithm_object()
            return None
        except InputError as error:
            reasons.append(str(error))
    return reasons[0]


# -- the points of a search -----------------------------------------------------------------------------------------
EARLY = 8  # points before TPE proposes (or the first batch, where that is larger)


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


class Points:
    """The points of a search, in their order.

    The first point is the given one. The next `early` − 1 points are scrambled Sobol numbers in boxes around it: box i
    covers the share s = i/(early − 1) of every range (of its logarithm, where the range is logarithmic). A list has its
    given value with probability 1 − s, else any of its values. So the first trials stay near what is known to work, and
    the last of them come from the whole space. After them TPE proposes points from all scores so far.

    A space of lists alone has no more points than combinations: each is tried once, in random order.
    """

    def __init__(self, space: Space, start: JsonDict, seed: int, early: int):
        self.space, self.planned = space, combinations(space, start)  # points to try before TPE proposes any
        self.study: Any = None  # Optuna's
        self.pending: list[Any] = []  # its trials without a score; None for a point outside its space
        if self.planned:
            self.planned[1:] = random.Random(seed).sample(self.planned[1:], len(self.planned) - 1)
            return
        optuna = need_optuna()
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.planned = [start, *around(space, start, [i / (early - 1) for i in range(1, early)], seed)]
        self.distributions = {
            name: optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
            if isinstance(values, Range)
            else optuna.distributions.CategoricalDistribution(values)
            for name, values in space.items()
        }

    def propose(self, count: int) -> list[JsonDict]:
        """Return the next points."""
        pairs = [self._next() for _ in range(count)]
        self.pending = [trial for _, trial in pairs]
        return [point for point, _ in pairs]

    def _next(self) -> tuple[JsonDict, Any]:
        if not self.planned:
            trial = self.study.ask(self.distributions)
            return {name: _rounded(trial.params[name]) for name in self.space}, trial
        point = self.planned.pop(0)
        if self.study is None or not all(_contains(values, point[name]) for name, values in self.space.items()):
            return point, None
        self.study.enqueue_trial(point)
        return point, self.study.ask(self.distributions)

    def report(self, scores: Sequence[float]) -> None:
        """Take the scores of the last points; more is better. TPE learns nothing of a given point outside the space."""
        for trial, score in zip(self.pending, scores, strict=True):
            if trial is not None:
                self.study.tell(trial, score)


def combinations(space: Space, start: JsonDict) -> list[JsonDict]:
    """Return all points of a space of lists alone, the given one first; none of a space with a range."""
    if any(isinstance(values, Range) for values in space.values()):
        return []
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [start, *(point for point in points if point != start)]


def around(space: Space, centre: JsonDict, widths: Sequence[float], seed: int) -> list[JsonDict]:
    """Return a point for each share, drawn from the box around the centre that covers this share of the space."""
    draws = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed).draw(len(widths), dtype=torch.float64)
    return [
        {name: _drawn(space[name], centre[name], u, width) for name, u in zip(space, row, strict=True)}
        for row, width in zip(draws.tolist(), widths, strict=True)
    ]


def _drawn(values: Values, centre: Any, u: float, width: float) -> Any:
    """Return the value that u in [0, 1) picks from the box around the centre."""
    if isinstance(values, Range):
        middle = min(max(position(values, centre), 0.0), 1.0)
        low, high = _scale(values, values.low), _scale(values, values.high)
        drawn = low + (middle + width * (u - middle)) * (high - low)
        return _rounded(math.exp(drawn) if values.log else drawn)
    if centre in values:
        if u < 1 - width:
            return centre
        u = 1 - (1 - u) / width
    return values[min(int(u * len(values)), len(values) - 1)]


def position(values: Range, value: Any) -> float:
    """Return how far through a range a value lies: 0 at its low end, 1 at its high end, ½ for None."""
    if value is None:
        return 0.5
    low, high, at = (_scale(values, v) for v in (values.low, values.high, value))
    return (at - low) / (high - low)


def _scale(values: Range, value: float) -> float:
    if not values.log:
        return value
    return math.log(value) if value > 0 else -math.inf


def _rounded(value: Any) -> Any:
    """Round a number to three digits, which are enough."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _contains(values: Values, value: Any) -> bool:
    if isinstance(values, Range):
        return isinstance(value, float) and values.low <= value <= values.high
    return value in values


# -- choices at an end of their range -----------------------------------------------------------------------
NEAR = 0.05  # a choice within this share of a range's end lies on it


def as_flag(values: Range | Sequence[Any]) -> str:
    """Return a range or a list as --grid takes it."""
    if isinstance(values, Range):
        return f"{values.low:g}{TO}{values.high:g}"
    return ",".join("none" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def end_warning(algorithm: str, name: str, values: Values, chosen: Any, *, lower: bool = True) -> str | None:
    """Return a warning, with the flag that widens the search, where a choice lies at an end that can be exceeded.

    The end of a range is its outer 5%, that of a list of numbers its first or last one; `lower` says whether the lower
    end counts.
    """
    is_range = isinstance(values, Range)
    numbers = sorted({v for v in (values[:2] if is_range else values) if is_number(v)})
    if len(numbers) < 2 or not is_number(chosen):
        return None
    at = position(values if isinstance(values, Range) else Range(numbers[0], numbers[-1]), chosen)
    near = NEAR if is_range else 0.0
    upper = at >= 1 - near
    if not upper and (at > near or not lower):
        return None
    limits = next(f.metadata for f in fields(REGISTRY[algorithm].kind) if f.name == name)
    beyond = _value_beyond(numbers if upper else numbers[::-1], values, limits["high" if upper else "low"])
    if beyond is None:
        return None
    wide = sorted([*numbers, beyond])
    flag = as_flag(wide) if name in GRID else f"{wide[0]:g}{TO}{wide[-1]:g}"
    side, searched = "upper" if upper else "lower", as_flag(values if is_range else numbers)
    return (
        f"{algorithm}: {name} = {chosen} lies at the {side} end of what was searched ({searched}). To search "
        f"further, use another folder and --grid {algorithm}.{name}={flag}"
    )


def _value_beyond(numbers: Sequence[Any], values: Values, bound: float) -> Any:
    """Return a legal number beyond the last of these; None where the last one is the bound."""
    before, last = numbers[-2:]
    if isinstance(values, Range):
        beyond = last * (10 if last > before else 0.1) if values.log else last + (last - before) / 2
    else:
        beyond = last * min(max(last / before, 1 / 3), 3) if before * last > 0 else 2 * last - before
    if (beyond - bound) * (last - before) > 0:  # not legal
        beyond = (last + bound) / 2
    beyond = round(beyond) if isinstance(last, int) else float(f"{beyond:.2g}")
    return beyond if (beyond - last) * (last - before) > 0 else None
