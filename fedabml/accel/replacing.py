"""Modes in which other functions are called in place of torch's, wherever a module calls those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.overrides import TorchFunctionMode


class Replacing(TorchFunctionMode):
    """Calls other functions in place of some of torch's, wherever a module calls those."""

    replacements: ClassVar[dict[Any, Callable[..., Any]]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


def pair(value: Any) -> tuple[int, int]:
    """Return (v, v) for a number, else the sequence as a tuple."""
    return (value, value) if isinstance(value, int) else tuple(value)
