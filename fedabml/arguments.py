"""Argument checks of the library: public functions compare their arguments with their type hints.

    @checks_arguments
    def federate(dataset: Dataset, *, clients: int = 100): ...

    federate(None)      # InputError: federate: dataset must be a Dataset, as fedabml.load returns; it is None.

Without this a wrong argument raises a TypeError three frames further down. The functions themselves check ranges and
contents. A class checks its fields with `check_fields` in `__post_init__`.
"""

from __future__ import annotations

import csv
import functools
import inspect
import io
import operator
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InputError, quoted

P = ParamSpec("P")
R = TypeVar("R")
MAX_INTEGER = 2**63 - 1  # the largest integer of torch and numpy

_MADE_BY = {
    "Algorithm": "an object such as fedabml.FedABML(lr=0.03)",
    "Dataset": "a Dataset, as fedabml.load returns",
    "Federation": "a Federation, as Federation.from_arrays, federate or read_table returns",
    "Module": "a torch.nn.Module (an object, not its class)",
}


def split_words(text: str | None) -> list[str]:
    """Return the words of a list such as `a, b,c`; a word with a comma stands in double quotes, `a,"b, c"`."""
    words = next(csv.reader([" ".join((text or "").splitlines())], skipinitialspace=True), [])
    return [word.strip() for word in words if word.strip()]


def flag_value(words: Sequence[str]) -> str:
    """Return how a shell names a list of words, so that `split_words` returns them again."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(words)
    return shlex.quote(line.getvalue())


def checked_integer(value: object, name: str, least: int = 1) -> int:
    """Return `value` as a whole number of at least `least` that fits 64 bits. Raises InputError for anything else."""
    number = _index(value)
    if number is None or not least <= number <= MAX_INTEGER:
        raise InputError(f"{name} must be a whole number, {least} or more, not {quoted(value)}.")
    return number


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that an argument which its type hint does not allow raises an InputError.

    A missing or unknown argument still raises Python's TypeError. The function itself checks `Any`, arrays and tuples.
    """
    signature = inspect.signature(function)
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    checkable = {name for name, parameter in signature.parameters.items() if parameter.kind not in various}

    @functools.cache  # at the first call, when all modules are imported
    def hints() -> dict[str, Any]:
        texts = {name: text for name, text in function.__annotations__.items() if name in checkable}
        return _hints(texts, inspect.unwrap(function).__globals__)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # its own error names the function
        for name, hint in hints().items():
            if name in arguments:
                check(arguments[name], hint, f"{function.__qualname__}: {name}")
        return function(*args, **kwargs)

    return checked


def check_fields(self: Any) -> None:
    """Check the fields of a dataclass as `checks_arguments` does; for use as its `__post_init__`."""
    kind: Any = type(self)
    for name, hint in _class_hints(kind).items():
        check(getattr(self, name), hint, f"{kind.__name__}: {name}")


def check(value: Any, hint: Any, name: str) -> None:
    """Raise an InputError unless a type hint allows the value."""
    if wanted := _wanted(value, hint):
        raise InputError(f"{name} must be {wanted}; it is {quoted(value)}.")


def _wanted(value: Any, hint: Any) -> str:
    """Return what a hint allows, as text; an empty text if it allows the value."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        if any((get_origin(part) or part) is os.PathLike for part in args):
            args = (os.PathLike, *(part for part in args if part is not str and get_origin(part) is not os.PathLike))
        wanted = [_wanted(value, part) for part in args]
        return "" if "" in wanted else " or ".join(dict.fromkeys(wanted))
    if kind is Any or kind is tuple or not isinstance(kind, type) or kind.__name__ == "ndarray":
        return ""
    fits, text = _KINDS.get(kind, (None, ""))
    if not (fits(value) if fits else isinstance(value, kind)):
        return text or _MADE_BY.get(kind.__name__, f"a {kind.__name__}")
    if kind is Sequence and args:
        entries = value.tolist() if hasattr(value, "tolist") else value
        refusal = next(filter(None, (_wanted(entry, args[0]) for entry in entries)), "")
        return refusal and f"a list whose every entry is {refusal}"
    return ""


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # the latter are torch's, for a tensor of several numbers
        return None


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number that fits 64 bits."""
    number = _index(value)
    return number is not None and abs(number) <= MAX_INTEGER


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold; NaN and infinity count."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isinstance(float(value), float)
    except OverflowError:  # an integer beyond every float
        return False


def _is_path(value: Any) -> bool:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(text, str) and text != "" and "\0" not in text


def _is_list(value: Any) -> bool:
    sized = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, type)
    return sized and not isinstance(value, str | bytes | Mapping) and getattr(value, "ndim", 1) != 0


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    NoneType: (lambda value: value is None, "None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (is_whole, "a whole number"),
    float: (is_number, "a number"),
    str: (lambda value: isinstance(value, str), "a word"),
    os.PathLike: (_is_path, "a path"),
    Sequence: (_is_list, "a list"),
    Mapping: (lambda value: isinstance(value, Mapping), "a dictionary"),
    dict: (lambda value: isinstance(value, dict), "a dictionary"),
    Callable: (callable, "a function"),
}


@functools.cache
def _class_hints(kind: type) -> dict[str, Any]:
    return _hints(kind.__annotations__, vars(inspect.getmodule(kind)))


def _hints(texts: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Return the types of annotations; a name that is imported only for type checkers means Any."""
    hints: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            hints |= get_type_hints(type("Hint", (), {"__annotations__": {name: text}}), names)
        except NameError:
            hints[name] = Any
    return hints
