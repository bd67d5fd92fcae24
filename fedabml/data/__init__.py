"""Datasets, their division among clients, and the federation that results.

Importing this package imports neither numpy nor pandas: a name is imported when it is first asked for.
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
    "Dataset": "sources",
    "Federation": "federation",
    "Rows": "rows",
    "TableRecipe": "recipe",
    "data_dir": "files",
    "datasets": "sources",
    "features": "table",
    "federate": "partition",
    "load": "sources",
    "read_client": "files",
    "read_table": "table",
    "save_manifest": "partition",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return globals()[name]
