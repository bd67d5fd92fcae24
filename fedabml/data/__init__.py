"""Datasets, their division among clients, and the federation that results.

Importing this package imports neither numpy nor pandas: a name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .federation import Federation
    from .files import data_dir, read_client
    from .partition import federate, save_manifest
    from .recipe import TableRecipe
    from .rows import Rows
    from .sources import Dataset, datasets, load
    from .table import features, read_table

_HOMES = {
    "federation": ("Federation",),
    "files": ("data_dir", "read_client"),
    "partition": ("federate", "save_manifest"),
    "recipe": ("TableRecipe",),
    "rows": ("Rows",),
    "sources": ("Dataset", "datasets", "load"),
    "table": ("features", "read_table"),
}
__all__ = [
    "Dataset",
    "Federation",
    "Rows",
    "TableRecipe",
    "data_dir",
    "datasets",
    "features",
    "federate",
    "load",
    "read_client",
    "read_table",
    "save_manifest",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return globals()[name]
