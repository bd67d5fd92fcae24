"""The paper's networks by name.

A new one is a function in `networks.py`, in its `MODELS`, and a name in `NETWORK_NAMES`.

Also here: Hugging Face's classifiers from local folders (`huggingface`), which weights of a module are trained
(`adapters`), which of its outputs count (`outputs`), and keyed dropout (`dropout`).

Importing this package imports no torch: a function is imported when it is first used, as `MODELS["cnn"]`,
`models.cnn` or `models.build("cnn", ...)`. A user's own `nn.Module` works the same way everywhere.
`register_user_network` makes a class or function in a user's file, `mine.py:Net`, one of the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..accel import import_on_use
from .own import NETWORK_NAMES as NETWORK_NAMES
from .own import TRAINED as TRAINED
from .own import USER_NETWORKS as USER_NETWORKS
from .own import file_digest as file_digest
from .own import folder_digest as folder_digest
from .own import is_folder as is_folder
from .own import register_user_network as register_user_network

if TYPE_CHECKING:
    from .networks import MODELS, Seeded, build, cnn, cnn100, mlp, mlr, resnet18, with_weights

_LATER = ("MODELS", "Seeded", "build", "cnn", "cnn100", "mlp", "mlr", "resnet18", "with_weights")
__all__ = ["MODELS", "NETWORK_NAMES", "USER_NETWORKS", "Seeded", "build", "cnn", "cnn100", "mlp", "mlr", "resnet18"]
__all__ += ["register_user_network", "with_weights"]
__getattr__ = import_on_use(__name__, {"networks": _LATER})
