"""Datasets, how they are divided among clients, and the federation that comes of it."""

from __future__ import annotations

from fedabml.data.federation import Federation
from fedabml.data.files import data_dir, read_client
from fedabml.data.partition import federate, save_manifest
from fedabml.data.picture import heat_map
from fedabml.data.rows import Rows
from fedabml.data.sources import Dataset, datasets, load
from fedabml.data.table import TableRecipe, features, read_table

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
