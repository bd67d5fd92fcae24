"""Datasets, how they are divided among clients, and the federation that comes of it."""

from __future__ import annotations

from .federation import Federation
from .files import data_dir, read_client
from .partition import federate, save_manifest
from .picture import heat_map
from .rows import Rows
from .sources import Dataset, datasets, load
from .table import TableRecipe, features, read_table

__all__ = [
    "Dataset",
    "Federation",
    "Rows",
    "TableRecipe",
    "data_dir",
    "datasets",
    "features",
    "federate",
    "heat_map",
    "load",
    "read_client",
    "read_table",
    "save_manifest",
]
