"""The paper's networks by name. A new one is a function in `networks.py` and its name in `registry.NAMES`.

Importing this package imports no torch: a function is imported when it is first used, as `MODELS["cnn"]`,
`models.cnn` or `models.build("cnn", ...)`. A user's own `nn.Module` works the same way everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registry
from .registry import MODELS, NAMES

if TYPE_CHECKING:
    from .networks import Seeded, build, cnn, cnn100, mlp, mlr, resnet18, with_weights

__all__ = ["MODELS", "NAMES", "Seeded", "build", "cnn", "cnn100", "mlp", "mlr", "resnet18", "with_weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(registry.networks(), name)
    return globals()[name]
