"""Datasets, their division among clients, and the federation that results.

Importing this package imports neither numpy nor pandas: a name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..accel import import_on_use

if TYPE_CHECKING:
    from .encode import features as features
    from .federation import Federation as Federation
    from .files import data_dir as data_dir
    from .files import read_client as read_client
    from .partition import federate as federate
    from .partition import save_manifest as save_manifest
    from .recipe import TableRecipe as TableRecipe
    from .rows import Rows as Rows
    from .sources import Dataset as Dataset
    from .sources import datasets as datasets
    from .sources import load as load
    from .table import read_table as read_table

_HOMES = {
    "encode": ("features",),
    "federation": ("Federation",),
    "files": ("data_dir", "read_client"),
    "partition": ("federate", "save_manifest"),
    "recipe": ("TableRecipe",),
    "rows": ("Rows",),
    "sources": ("Dataset", "datasets", "load"),
    "table": ("read_table",),
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = import_on_use(__name__, _HOMES)
