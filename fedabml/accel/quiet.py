"""Suppress torch's warning that it batches an operation slowly, on which a user cannot act.

While one of our calls to `torch.vmap` runs, one entry in the filters of `warnings` ignores exactly that warning. The
call removes its own entry again; `warnings.catch_warnings` would restore the whole list and undo what other threads
have changed in the meantime.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

_MESSAGE = re.compile("There is a performance drop because we have not yet implemented the batching rule")
_ENTRY: Any = ("ignore", _MESSAGE, UserWarning, None, 0)


def quiet_vmap() -> AbstractContextManager[None]:
    """Return a context in which torch does not warn of operations that it batches slowly."""
    return nullcontext() if torch.compiler.is_compiling() else _quiet()


@contextmanager
def _quiet() -> Iterator[None]:
    filters: Any = warnings.filters  # the list itself: it may be another one when the call ends
    filters.insert(0, _ENTRY)
    try:
        yield
    finally:
        with suppress(ValueError):  # a caller may have emptied the list meanwhile
            filters.remove(_ENTRY)
