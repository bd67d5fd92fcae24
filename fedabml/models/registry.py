"""The names of the networks, known without torch; `MODELS[name]` imports a network's function on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..accel import threads_sleep_while_waiting

if TYPE_CHECKING:
    from torch import nn

NAMES = ("mlr", "mlp", "cnn", "cnn100", "resnet18")


class _Registry(Mapping[str, "Callable[..., nn.Module]"]):
    """Functions (shape of an example, number of outputs, options) → module, by name."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        if name not in NAMES:
            raise KeyError(name)
        return getattr(networks(), name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


MODELS: Mapping[str, Callable[..., nn.Module]] = _Registry()


def networks() -> Any:
    """Return the module `networks`, and with it torch."""
    with threads_sleep_while_waiting():
        return import_module("fedabml.models.networks")
