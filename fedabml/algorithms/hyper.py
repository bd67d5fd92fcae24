"""Hyperparameters: fields of a dataclass that declare meaning and range, and are checked when an object is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from ..arguments import is_number, is_whole
from ..errors import InputError, nearest, quoted


class Range(NamedTuple):
    """Numbers from low to high that a search draws from, evenly or (`log`) evenly in their logarithm."""

    low: float
    high: float
    log: bool = False


# What `fedabml tune` tries of hyperparameters that several algorithms share: the same for all of them.
LR = Range(1e-3, 1.0, log=True)
SERVER_LR = Range(0.3, 2.0, log=True)  # FedABML's ρ, too
SERVER_MOMENTA = (0.0, 0.4, 0.7)
AVERAGES = (0.0, 0.8, 0.9)
PERSONAL_EPOCHS = (0, 1, 5, 20)
PERSONAL_LRS = (0.003, 0.01, 0.03, 0.1, 0.3)
NEWCOMER = "where a client without kept state begins: at the server's state, or at the initial weights"


def hyper(
    default: Any,
    doc: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    choices: tuple[str, ...] = (),
    static: bool = False,
    neutral: float | str | None = None,
    tune: Range | tuple[Any, ...] = (),
) -> Any:
    """Declare a hyperparameter: its default, its meaning with the paper's symbol, its closed range or its choices.

    Floats reach the steps as 0-d tensors unless `static`. `tune` is what `fedabml tune` tries: a `Range`, or a tuple of
    values; without it the search keeps the default. The values of personal_epochs and personal_lr are a grid that is
    scored on every trained federation, so they must be tuples. The default must lie inside what is tried: the search
    begins there and spreads outward. A hyperparameter added in a later version has a `neutral` value, at which the
    algorithm is that of versions without it: results of such versions are found again.
    """
    meta = {"doc": doc, "low": low, "high": high, "choices": choices, "static": static, "tune": tune}
    meta["neutral"] = neutral
    return dataclasses.field(default=default, metadata=meta)


def checked(owner: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value in the field's type; an InputError gives the type, the choices or the range."""
    meta, subject = field.metadata, f"{owner}: hyperparameter '{field.name}' ({field.metadata['doc']})"
    hint = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    if value is None and "None" in hint:
        return None
    if meta["choices"]:
        if not isinstance(value, str) or value not in meta["choices"]:
            raise InputError(f"{subject} is {quoted(value)}.{nearest(str(value), meta['choices'])}")
        return value
    base = next((base for base in ("str", "bool", "int") if hint.startswith(base)), "float")
    if base == "str" and type(value) is int:
        value = str(value)  # a layer may be called 3
    if base in ("int", "float") and getattr(value, "ndim", None) == 0:
        value = value.item()  # of numpy or torch
    finite = is_number(value) and math.isfinite(value)
    wanted, fits = {
        "str": ("a word", isinstance(value, str)),
        "bool": ("true or false", isinstance(value, bool)),
        "int": ("a whole number", finite and int(value) == value and is_whole(int(value))),
        "float": ("a finite number" if isinstance(value, float) else "a number", finite),
    }[base]
    if not fits:
        raise InputError(f"{subject} must be {wanted}; it is {quoted(value)}.")
    if base in ("str", "bool"):
        return value
    number, low, high = int(value) if base == "int" else float(value), meta["low"], meta["high"]
    if not low <= number <= high:
        allowed = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise InputError(f"{subject} is {quoted(value)}; it must be {allowed}.")
    return number
