"""Decisions of least expected cost between any number of classes, for an aim such as `cost:costs.csv`.

    decision(x) = argmin_j Σ_i p(i | x) · C[i, j]        C[i, j]: what decision j costs if class i is true

The matrix is a small CSV file. Its header names the decisions, and the first cell of every row the true class:

    true,healthy,ill,critical
    healthy,0,1,2
    ill,10,0,1
    critical,100,20,0
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, nearest, quoted
from ..files.paths import read_text
from ..files.sheets import csv_value

LARGEST_FILE = 16 << 20  # bytes
PREFIX, SUFFIX = "cost:", ".csv"


@dataclass(frozen=True)
class DecisionCosts:
    """What every decision costs: `matrix[i][j]` for decision j if class i is true, with the classes' names in order."""

    names: tuple[str, ...]
    matrix: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        costs = np.asarray(self.matrix)
        if costs.shape != (len(self.names), len(self.names)) or not (np.isfinite(costs) & (costs >= 0)).all():
            raise ValueError("a cost matrix that is not square, or has a cost that is negative or not finite")

    def decide(self, probs: np.ndarray) -> np.ndarray:
        """Return the decision of least expected cost for probabilities [n, classes]; of equal ones the first."""
        return (probs @ np.asarray(self.matrix)).argmin(-1)

    @classmethod
    def read(cls, path: str | Path, names: Sequence[str]) -> DecisionCosts:
        """Read a matrix for classes of these names, which its rows and columns may have in any order."""
        try:
            rows = [row for row in csv.reader(read_text(path, LARGEST_FILE).splitlines(), strict=True) if any(row)]
        except csv.Error as error:
            raise InputError(f"'{path}' is no CSV file ({error}). Separate its cells with commas.") from error
        head, *lines = [[cell.strip() for cell in row] for row in rows] or [[]]
        decisions = _positions(head[1:], names, f"'{path}', header")
        classes = _positions([line[0] for line in lines], names, f"'{path}', first column")
        matrix = []
        for name in names:
            line = lines[classes[name]]
            if len(line) != len(head):
                raise InputError(f"'{path}', row '{name}' has {len(line)} cells, but the header has {len(head)}.")
            cells = {decision: line[1 + decisions[decision]] for decision in names}
            matrix.append(tuple(_cost(cell, f"'{path}', row '{name}', column '{j}'") for j, cell in cells.items()))
        if all(len(set(costs)) == 1 for costs in matrix):
            raise InputError(f"'{path}': every decision costs the same, so none is better. Give them different costs.")
        return cls(tuple(names), tuple(matrix))

    @classmethod
    def of_aim(cls, aim: str, names: Sequence[str]) -> DecisionCosts | None:
        """Return the matrix of the file that an aim such as `cost:costs.csv` names; None for any other aim.

        Raises InputError if there are no classes to decide between.
        """
        text = aim.strip()
        if not (text.startswith(PREFIX) and text.lower().endswith(SUFFIX)):
            return None
        if not names:
            raise InputError(f"The aim {aim!r} chooses between classes; this posterior has no single label. Omit it.")
        return cls.read(text.removeprefix(PREFIX).strip(), names)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for a posterior's file."""
        return {"names": list(self.names), "matrix": [list(row) for row in self.matrix]}

    @classmethod
    def from_json(cls, content: Any) -> DecisionCosts | None:
        """Return what `to_json` wrote, None for None; anything else is an error that names the file elsewhere."""
        if content is None:
            return None
        cells = [value for row in content["matrix"] for value in row]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in cells):
            raise TypeError("a cost that is no number")
        matrix = tuple(tuple(float(value) for value in row) for row in content["matrix"])
        return cls(tuple(str(name) for name in content["names"]), matrix)


def short_aim(aim: str) -> str:
    """Return an aim whose file is named without its folder, as a posterior keeps it."""
    return PREFIX + Path(aim.strip().removeprefix(PREFIX).strip()).name


def _positions(cells: Sequence[str], names: Sequence[str], place: str) -> dict[str, int]:
    """Return where the classes stand among the names of a header. Raises InputError unless each is there once."""
    labels = [csv_value(cell) for cell in cells]
    for label in labels:
        if label not in names:
            raise InputError(f"{place}: {quoted(label)} is no class of the posterior.{nearest(label, names)}")
        if labels.count(label) > 1:
            raise InputError(f"{place}: the class '{label}' occurs more than once. Give each class once.")
    missing = [name for name in names if name not in labels]
    if missing:
        raise InputError(f"{place}: the class '{missing[0]}' is missing. Give a row and a column for each class.")
    return {label: position for position, label in enumerate(labels)}


def _cost(cell: str, place: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{place}: {quoted(cell)} is no cost. Give a finite number of at least 0, such as 2.5.")
    return value
