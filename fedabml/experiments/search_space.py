"""What a search may try: the space that hyperparameters declare (`tune=`), or lists and ranges in place of it.

A list, such as `lr=0.01,0.1`, limits the search to the lists that are given. A range, such as `lr=0.001..3`, only
replaces the declared range of that hyperparameter. personal_epochs and personal_lr are not searched: their values are
all scored on every trained federation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

import torch

from ..algorithms import REGISTRY
from ..algorithms.hyper import Range, checked
from ..errors import InputError, nearest
from ..runs.config import RunConfig, Table

Values = Range | tuple[Any, ...]
Space = dict[str, Values]
Grid = Mapping[str, Values]

GRID = ("personal_epochs", "personal_lr")  # scored on each trained federation, not searched
TO = ".."  # between the ends of a range


def space(algorithm: str, fixed: Collection[str] = ()) -> Space:
    """Return what is searched for an algorithm: what its hyperparameters declare, but for the fixed ones."""
    kind, variant = REGISTRY[algorithm].kind, REGISTRY[algorithm].defaults
    held = {*GRID, *variant, *fixed}
    return {f.name: f.metadata["tune"] for f in fields(kind) if f.metadata["tune"] and f.name not in held}


def read_grid(words: Sequence[str]) -> dict[str, Any]:
    """Read `lr=0.01,0.1`, `fedprox.mu=0.1,1`, ... as lists by name, and by algorithm; a range stays text."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        *algorithm, key = name.strip().split(".")
        if not text.strip() or not key or len(algorithm) > 1:
            raise InputError(
                "--grid takes NAME=A,B,C or ALGORITHM.NAME=A,B,C, such as lr=0.01,0.1, or a range, such as "
                f"lr=0.001..3; it is '{word}'."
            )
        own = found.setdefault(algorithm[0], {}) if algorithm else found
        if key in own:
            raise InputError(f"--grid {word}: values of '{name.strip()}' have been given already.")
        own[key] = text.strip() if TO in text else [_value(each.strip()) for each in text.split(",")]
    return found


def _value(word: str) -> Any:
    """Return a word as a number, None, True or False, or as it stands."""
    known = {"none": None, "true": True, "false": False}
    if word in known:
        return known[word]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def searches(grid: Mapping[str, Any]) -> bool:
    """Whether a grid has a list to search: then nothing else is searched."""
    named = [pair for key, v in grid.items() for pair in (v.items() if key in REGISTRY else [(key, v)])]
    return any(name not in GRID and not isinstance(values, str) for name, values in named)


def searchable(algorithm: str) -> dict[str, Field[Any]]:
    """Return the hyperparameters of an algorithm, without those that make the variant."""
    kind, variant = REGISTRY[algorithm].kind, REGISTRY[algorithm].defaults
    return {f.name: f for f in fields(kind) if f.name not in variant}


def own_grid(algorithm: str, grid: Mapping[str, Any]) -> Grid:
    """Return the values of a grid that are for an algorithm; those under its name override the common ones."""
    if not isinstance(grid.get(algorithm, {}), Mapping):
        raise InputError(f"'{algorithm}' is an algorithm: name a hyperparameter, such as {algorithm}.lr=0.01,0.1.")
    known = searchable(algorithm)
    shared = {name: values for name, values in grid.items() if name not in REGISTRY and name in known}
    own = {**shared, **grid.get(algorithm, {})}
    for name, values in own.items():
        if name not in known:
            raise InputError(f"{algorithm} has no hyperparameter '{name}' to search.{nearest(name, known)}")
        if not values or not (isinstance(values, list | tuple) or (isinstance(values, str) and TO in values)):
            raise InputError(f"A grid has a list of values for every hyperparameter; '{name}' has {values!r}.")
    return {name: _parsed(algorithm, known[name], values) for name, values in own.items()}


def _parsed(algorithm: str, field: Field[Any], values: Any) -> Values:
    """Return a list with each of its values once, or a range from the text `LOW..HIGH`, checked.

    A range is logarithmic where the declared one is; one of whole numbers becomes a list of five, evenly spaced.
    """
    if isinstance(values, list | tuple) and not isinstance(values, Range):
        words = ["none" if v is None and "none" in field.metadata["choices"] else v for v in values]
        return tuple(dict.fromkeys(checked(algorithm, field, v) for v in words))
    text = as_flag(values) if isinstance(values, Range) else values
    where = f"{algorithm}: the range '{field.name}={text}'"
    if field.name in GRID or field.metadata["choices"]:
        raise InputError(f"{where}: '{field.name}' has no range. Give a list of values, as {field.name}=A,B,C.")
    low, high = (checked(algorithm, field, _value(end.strip())) for end in text.split(TO, 1))
    if not low < high:
        raise InputError(f"{where} must rise, as {field.name}=0.001{TO}3.")
    if isinstance(low, int):
        return tuple(dict.fromkeys(round(low + i * (high - low) / 4) for i in range(5)))
    declared = field.metadata["tune"]
    log = declared.log if isinstance(declared, Range) else low > 0 and high >= 10 * low
    if log and low <= 0:
        raise InputError(f"{where} is logarithmic: it must begin above 0.")
    return Range(low, high, log)


def personal_options(
    config: RunConfig, fixed: Collection[str] = (), grid: Grid = MappingProxyType({})
) -> tuple[Table, ...]:
    """Return the personal options to score: all pairs of epochs and step sizes, the same for every algorithm.

    Each of the two is the grid's list, the declared list, or the fixed value. A step size that the configuration has,
    as from a preset, comes first with its epochs. None, whose meaning depends on the algorithm, is in no declared list.
    """
    kind, variant = REGISTRY[config.algorithm].kind, REGISTRY[config.algorithm].defaults
    given, declared = config.algorithm_object(), {f.name: f.metadata["tune"] for f in fields(kind)}
    held = {*variant, *fixed}
    own = [getattr(given, name) for name in GRID]
    values = [
        grid.get(name) or (declared[name] if declared[name] and name not in held else (mine,))
        for name, mine in zip(GRID, own, strict=True)
    ]
    first = [] if own[1] is None or any(name in grid for name in GRID) else [own]
    found = dict.fromkeys((epochs, lr if epochs else None) for epochs, lr in [*first, *itertools.product(*values)])
    return tuple({"personal_epochs": epochs} | ({"personal_lr": lr} if epochs else {}) for epochs, lr in found)


def sound(config: RunConfig, space: Space) -> tuple[Space, list[str]]:
    """Return the space without choices that contradict fixed hyperparameters, and notes on what is left out.

    A choice is left out if no algorithm can be made with it, neither at the configuration's values of the others nor at
    a few points of the space. A hyperparameter with no choice left but its given value is not searched.
    """
    made = config.algorithm_object()
    given = {name: getattr(made, name) for name in space}
    others = [given, *around(space, given, [1.0] * 8, seed=0)] if space else []
    found, notes = dict(space), []
    for name, values in space.items():
        if isinstance(values, Range):
            continue
        reasons = {value: _contradiction(config, [point | {name: value} for point in others]) for value in values}
        left = tuple(value for value, reason in reasons.items() if reason is None)
        notes += [
            f"{config.algorithm}: {name} = {value} is not searched, because it contradicts a fixed value: {reason}"
            for value, reason in reasons.items()
            if reason is not None
        ]
        found[name] = left
        if {*left} <= {given[name]}:
            del found[name]
    return found, notes


def _contradiction(config: RunConfig, points: Sequence[Table]) -> str | None:
    """Return why no algorithm can be made at any of the points; None if it can at one."""
    reason = None
    for point in points:
        try:
            config.with_changes(hyper=config.hyper | point).algorithm_object()
            return None
        except InputError as error:
            reason = reason or str(error)
    return reason


# -- the geometry of a space ----------------------------------------------------------------------------------------
def finite(space: Space) -> bool:
    """Whether a space consists of lists alone."""
    return not any(isinstance(values, Range) for values in space.values())


def combinations(space: Space, given: Table) -> list[Table]:
    """Return all combinations of lists, the given one first."""
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [given, *(point for point in points if point != given)]


def around(space: Space, centre: Table, shares: Sequence[float], seed: int) -> list[Table]:
    """Return a point for each share, drawn from the box around the centre that covers this share of the space."""
    draws = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed).draw(len(shares), dtype=torch.float64)
    return [
        {name: _drawn(space[name], centre[name], u, share) for name, u in zip(space, row, strict=True)}
        for row, share in zip(draws.tolist(), shares, strict=True)
    ]


def _drawn(values: Values, centre: Any, u: float, share: float) -> Any:
    """Return the value that u in [0, 1) picks from the box around the centre."""
    if isinstance(values, Range):
        middle = min(max(position(values, centre), 0.0), 1.0)
        low, high = _scale(values, values.low), _scale(values, values.high)
        found = low + (middle + share * (u - middle)) * (high - low)
        return rounded(math.exp(found) if values.log else found)
    if centre in values:
        if u < 1 - share:
            return centre
        u = 1 - (1 - u) / share
    return values[min(int(u * len(values)), len(values) - 1)]


def position(values: Range, value: Any) -> float:
    """Return how far through a range a value lies: 0 at its low end, 1 at its high end, ½ for None."""
    if value is None:
        return 0.5
    low, high = _scale(values, values.low), _scale(values, values.high)
    return (_scale(values, value) - low) / (high - low)


def _scale(values: Range, value: float) -> float:
    if not values.log:
        return value
    return math.log(value) if value > 0 else -math.inf


def rounded(value: Any) -> Any:
    """Round a number to three digits, which are enough."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def inside(space: Space, point: Table) -> bool:
    """Whether a point lies in the space."""
    return all(
        isinstance(point[name], float) and values.low <= point[name] <= values.high
        if isinstance(values, Range)
        else point[name] in values
        for name, values in space.items()
    )


# -- choices at an end of their range -----------------------------------------------------------------------
NEAR = 0.05  # a choice within this share of a range's end lies on it


def as_flag(values: Range | Sequence[Any]) -> str:
    """Return a range or a list as --grid takes it."""
    if isinstance(values, Range):
        return f"{values.low:g}{TO}{values.high:g}"
    return ",".join("none" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def edge(algorithm: str, name: str, values: Values, chosen: Any, *, lower: bool = True) -> str | None:
    """Return a warning, with the flag that widens the search, where a choice lies at an end that can be exceeded.

    The end of a range is its outer 5%, that of a list of numbers its first or last one; `lower` says whether the lower
    end counts.
    """
    field = next(f for f in fields(REGISTRY[algorithm].kind) if f.name == name)
    numbers = sorted({*values[:2]} if isinstance(values, Range) else {v for v in values if _number(v)})
    if len(numbers) < 2 or not _number(chosen):
        return None
    span = values if isinstance(values, Range) else Range(numbers[0], numbers[-1])
    at, near = position(span, chosen), NEAR if isinstance(values, Range) else 0.0
    upper = at >= 1 - near
    if not upper and (at > near or not lower):
        return None
    beyond = _beyond(numbers[::-1] if not upper else numbers, values, field.metadata["high" if upper else "low"])
    if beyond is None:
        return None
    wide = [*numbers, beyond] if upper else [beyond, *numbers]
    flag = as_flag(wide) if name in GRID else f"{wide[0]:g}{TO}{wide[-1]:g}"
    side, searched = "upper" if upper else "lower", as_flag(values if isinstance(values, Range) else numbers)
    return (
        f"{algorithm}: {name} = {chosen} lies at the {side} end of what was searched ({searched}). To search "
        f"further, use another folder and --grid {algorithm}.{name}={flag}"
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beyond(numbers: Sequence[Any], values: Values, bound: float) -> Any:
    """Return a legal number beyond the last of these; None where the last one is the bound."""
    before, last = numbers[-2:]
    if isinstance(values, Range):
        found = last * (10 if last > before else 0.1) if values.log else last + (last - before) / 2
    else:
        found = last * min(max(last / before, 1 / 3), 3) if before * last > 0 else 2 * last - before
    if (found - bound) * (last - before) > 0:  # not legal
        found = (last + bound) / 2
    found = round(found) if isinstance(last, int) else float(f"{found:.2g}")
    return found if (found - last) * (last - before) > 0 else None
