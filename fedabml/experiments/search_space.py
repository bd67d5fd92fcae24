"""What a search may try: the space that hyperparameters declare (`tune=`), or lists and ranges in place of it.

A list, as `lr=0.01,0.1`, is searched alone: nothing else is, but further lists. A range, as `lr=0.001..3`, takes the
place of the declared one, and all else is searched as declared. personal_epochs and personal_lr are lists that are
scored on every trained federation, whatever is searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

from ..algorithms import REGISTRY
from ..algorithms.hyper import Range, checked
from ..errors import InputError, nearest
from ..runs.config import RunConfig, Table
from .points import Space, around, position

Grid = Mapping[str, Range | tuple[Any, ...]]

GRID = ("personal_epochs", "personal_lr")  # scored on each trained federation, not searched
TO = ".."  # between the ends of a range


def space(algorithm: str, fixed: Collection[str] = ()) -> Space:
    """What is searched for an algorithm: hyperparameters that declare it, unless they are fixed or make the variant."""
    kind, variant = REGISTRY[algorithm].kind, REGISTRY[algorithm].defaults
    held = {*GRID, *variant, *fixed}
    return {f.name: f.metadata["tune"] for f in fields(kind) if f.metadata["tune"] and f.name not in held}


def read_grid(words: Sequence[str]) -> dict[str, Any]:
    """`lr=0.01,0.1`, `fedprox.mu=0.1,1`, ... as lists by name, and by algorithm; a range `lr=0.001..3` stays text."""
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
    """A number, none, true, false, or the word itself."""
    known = {"none": None, "true": True, "false": False}
    if word in known:
        return known[word]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def searches(grid: Mapping[str, Any]) -> bool:
    """Whether a grid has a list to search: then nothing that it does not name is searched."""
    named = [pair for key, v in grid.items() for pair in (v.items() if key in REGISTRY else [(key, v)])]
    return any(name not in GRID and not isinstance(values, str) for name, values in named)


def searchable(algorithm: str) -> dict[str, Field[Any]]:
    """The hyperparameters of an algorithm but those that make the variant."""
    kind, variant = REGISTRY[algorithm].kind, REGISTRY[algorithm].defaults
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
        if not values or not (isinstance(values, list | tuple) or (isinstance(values, str) and TO in values)):
            raise InputError(f"A grid has a list of values for every hyperparameter; '{name}' has {values!r}.")
    return {name: _meant(algorithm, known[name], values) for name, values in own.items()}


def _meant(algorithm: str, field: Field[Any], values: Any) -> Range | tuple[Any, ...]:
    """A list, a range or the text of a range, checked."""
    if isinstance(values, list | tuple) and not isinstance(values, Range):
        return _list(algorithm, field, values)
    return _range(algorithm, field, spoken(values) if isinstance(values, Range) else values)


def _list(algorithm: str, field: Field[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    """The values of a list, each once, in the hyperparameter's own type."""
    meant = ["none" if v is None and "none" in field.metadata["choices"] else v for v in values]
    return tuple(dict.fromkeys(checked(algorithm, field, v) for v in meant))


def _range(algorithm: str, field: Field[Any], text: str) -> Range | tuple[Any, ...]:
    """`LOW..HIGH`: a range, logarithmic where the declared one is; of whole numbers five, evenly spaced."""
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
    """The personal options to score: all pairs of epochs and step sizes, the same for every algorithm.

    Each of the two is the grid's list, the declared list, or the value that is held. A step size that is given, as by
    a preset, comes first with its epochs. None, which means something else for every algorithm, is of no declared list.
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
    return _options([*first, *itertools.product(*values)])


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
    others = [given, *around(space, given, [1.0] * 8, seed=0)] if space else []
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


# -- choices at an end of what was searched -----------------------------------------------------------------------
NEAR = 0.05  # a choice within this share of a range's end lies on it


def spoken(values: Range | Sequence[Any]) -> str:
    """A range or a list as --grid takes it."""
    if isinstance(values, Range):
        return f"{values.low:g}{TO}{values.high:g}"
    return ",".join("none" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def edge(algorithm: str, name: str, values: Range | tuple[Any, ...], chosen: Any, *, lower: bool = True) -> str | None:
    """A warning, with the flag to widen the search, where a choice lies at an end beyond which there are legal values.

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
    flag = spoken(wide) if name in GRID else f"{wide[0]:g}{TO}{wide[-1]:g}"
    side, searched = "upper" if upper else "lower", spoken(values if isinstance(values, Range) else numbers)
    return (
        f"{algorithm}: {name} = {chosen} lies at the {side} end of what was searched ({searched}). To search "
        f"further, use another folder and --grid {algorithm}.{name}={flag}"
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beyond(numbers: Sequence[Any], values: Range | tuple[Any, ...], bound: float) -> Any:
    """A legal number beyond the last of these; None where the last one is the bound."""
    before, last = numbers[-2:]
    if isinstance(values, Range):
        found = last * (10 if last > before else 0.1) if values.log else last + (last - before) / 2
    else:
        found = last * min(max(last / before, 1 / 3), 3) if before * last > 0 else 2 * last - before
    if (found - bound) * (last - before) > 0:  # not legal
        found = (last + bound) / 2
    found = round(found) if isinstance(last, int) else float(f"{found:.2g}")
    return found if (found - last) * (last - before) > 0 else None
