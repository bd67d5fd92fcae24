"""The errors that a person can cause. A message is one paragraph: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """An input of fedabml cannot be used. The command line prints the message and exits with code 2."""


class TrainingError(RuntimeError):
    """Training cannot continue, because a loss is no longer finite. What was saved before stays valid."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message: ` Did you mean 'x'?`, or the list of known names."""
    names = sorted(names)
    folded = {name.casefold(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f" Did you mean '{folded[close[0]]}'?" if close else f" Known names: {', '.join(names)}."


class _Repr(reprlib.Repr):
    """Short texts of values: containers are cut, arrays show type and shape, and memory addresses are left out."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, type):
            return f"the class {x.__name__}"
        if hasattr(x, "shape") and hasattr(x, "dtype") and tuple(x.shape):
            return f"{type(x).__name__} of shape {tuple(x.shape)}"
        if x is None or isinstance(x, bool | float | complex | bytes | os.PathLike) or hasattr(x, "dtype"):
            return shortened(repr(x), 60)
        return f"an object of type {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "a number of thousands of digits"


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = 60


def quoted(value: Any) -> str:
    """Return a short text of a value, for the message that refuses it."""
    return shortened(_REPR.repr(value), 120)


def shortened(text: str, limit: int = 200) -> str:
    """Return a text cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
