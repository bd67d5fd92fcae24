"""The one tensor of outputs (logits, or targets) among all that a module returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError, quoted

OutputKey = str | int  # the name of a dictionary's entry or a dataclass's field, or the number of a tuple's entry


def select_output(returned: Any, place: OutputKey | None) -> Tensor:
    """Return the tensor at a place of what a module returned: a tensor alone, a tuple, a dictionary or a dataclass.

    Raises InputError, which lists what the module returned, if there is no tensor at this place.
    """
    if isinstance(returned, Tensor) and place is None:
        return returned
    parts = _parts(returned)
    number = len(parts) + place if isinstance(place, int) and place < 0 else place
    selected = None if number is None else parts.get(number)
    if isinstance(selected, Tensor):
        return selected
    if not parts:
        also = " Leave model_options.output out." if isinstance(returned, Tensor) else ""
        description = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else quoted(returned)
        raise InputError(
            f"The model returns {description}; one tensor of outputs, a row per example, is needed.{also or _ALONE}"
        )
    listed = ", ".join(f"{name!r} ({_described(part)})" for name, part in [*parts.items()][:12])
    problem = "one tensor of outputs, a row per example, is needed" if place is None else f"no tensor is at {place!r}"
    tensors = [name for name, part in parts.items() if isinstance(part, Tensor)]
    example = "logits" if "logits" in tensors else tensors[0] if len(tensors) == 1 else None
    remedy = "" if example is None else f' Name it: model_options={{"output": {example!r}}}, or --set {_KEY}={example}.'
    if tensors and example is None:
        either = " or ".join(map(repr, tensors[:12]))
        remedy = f' Name it: model_options={{"output": PLACE}}, or --set {_KEY}=PLACE, where PLACE is {either}.'
    raise InputError(f"The model returns a {type(returned).__name__} of {listed}; {problem}.{remedy or _ALONE}")


_KEY = "model_options.output"
_ALONE = " Return that tensor alone from forward, or wrap the model in a module that picks it."


def _parts(returned: Any) -> dict[OutputKey, Any]:
    """Return the entries of a dictionary, a dataclass, a named or a plain tuple, or a list, by name or number."""
    if isinstance(returned, Mapping):
        return {name: part for name, part in returned.items() if isinstance(name, str | int)}
    if is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in fields(returned)}
    if isinstance(returned, tuple | list):
        names = getattr(returned, "_fields", ())
        return {**dict(enumerate(returned)), **dict(zip(names, returned, strict=False))}
    return {}


def _described(part: Any) -> str:
    return f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
