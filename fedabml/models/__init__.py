"""The paper's networks by name. A new one is a function in `networks.py`, in its `MODELS`, and a name in `NAMES`.

Importing this package imports no torch: a function is imported when it is first used, as `MODELS["cnn"]`,
`models.cnn` or `models.build("cnn", ...)`. A user's own `nn.Module` works the same way everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..accel import import_on_use

if TYPE_CHECKING:
    from .networks import MODELS, Seeded, build, cnn, cnn100, mlp, mlr, resnet18, with_weights

NAMES = ("mlr", "mlp", "cnn", "cnn100", "resnet18")
__all__ = ["MODELS", "NAMES", "Seeded", "build", "cnn", "cnn100", "mlp", "mlr", "resnet18", "with_weights"]
__getattr__ = import_on_use(__name__, {"networks": __all__})
