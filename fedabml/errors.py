"""The errors a person can cause, each one paragraph: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """Something handed to fedabml cannot be used. The command line prints it and exits with code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (a loss that is no longer finite). What was saved before stays as it was."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: ` Did you mean 'x'?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" There is: {', '.join(known)}."


class _Shown(reprlib.Repr):
    """Short texts of values: containers are cut, arrays are their type and shape, and no address in memory is shown."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, type):
            return f"the class {x.__name__}"
        if hasattr(x, "shape") and hasattr(x, "dtype") and tuple(x.shape):
            return f"{type(x).__name__} of shape {tuple(x.shape)}"
        if x is None or isinstance(x, bool | float | complex | bytes | os.PathLike) or hasattr(x, "dtype"):
            return short(repr(x), 60)
        return f"an object of type {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "a number of thousands of digits"


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = 60


def shown(value: Any) -> str:
    """Returns a value in a few words, for the sentence that refuses it."""
    return short(_SHOWN.repr(value), 120)


def short(text: str, most: int = 200) -> str:
    """Returns a text cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
