"""The paper's networks by name. A new one is a function in `networks.py` and its name in `NAMES`.

Importing this package imports no torch: a function is imported when it is first used, as `MODELS["cnn"]`,
`models.cnn` or `models.build("cnn", ...)`. A user's own `nn.Module` works the same way everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..accel import threads_sleep_while_waiting

if TYPE_CHECKING:
    from torch import nn

    from .networks import Seeded, build, cnn, cnn100, mlp, mlr, resnet18, with_weights

NAMES = ("mlr", "mlp", "cnn", "cnn100", "resnet18")

__all__ = ["MODELS", "NAMES", "Seeded", "build", "cnn", "cnn100", "mlp", "mlr", "resnet18", "with_weights"]


class _Registry(Mapping[str, "Callable[..., nn.Module]"]):
    """Functions (shape of an example, number of outputs, options) → module, by name."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        if name not in NAMES:
            raise KeyError(name)
        return getattr(_networks(), name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


MODELS: Mapping[str, Callable[..., nn.Module]] = _Registry()


def _networks() -> Any:
    with threads_sleep_while_waiting():
        return import_module(".networks", __name__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(_networks(), name)
    return globals()[name]
