"""Reading a table with a client column (CSV, Parquet or Excel) as a federation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import checks_arguments
from .columns import Columns
from .encode import TableOptions
from .federation import Federation
from .frames import as_frame, read_frame
from .once import once

if TYPE_CHECKING:
    import pandas as pd


def as_columns(table: pd.DataFrame | Columns) -> Columns:
    """Return the columns of a DataFrame, which are parsed when they are first needed; columns come back unchanged."""
    return table if isinstance(table, Columns) else Columns(as_frame(table))


@checks_arguments
def read_table(
    path: str | os.PathLike[str] | pd.DataFrame | Columns,
    *,
    client: str,
    target: str,
    task: str | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    drop_small: bool = False,
    drop: Sequence[str] | str = (),
    id: str | None = None,
    dates: Sequence[str] | str = (),
    split_by: str | None = None,
    positive_class: str | None = None,
) -> Federation:
    """Make a federation from a table: a .csv, .parquet or .xlsx file, or a DataFrame of pandas.

    To divide a DataFrame's rows by several seeds without parsing it each time, give `as_columns(frame)` instead of it.
    The other arguments are those of `Federation.from_frame`.
    """
    options = TableOptions(
        client, target, task, test_share, seed, drop_small, drop, id, dates, split_by, positive_class
    )
    if not isinstance(path, str | os.PathLike):
        return Federation.from_encoded(as_columns(path), options)
    words = () if id is None else (id,)
    columns = once(path, ("columns", id), lambda: Columns(read_frame(path, words)))
    return Federation.from_encoded(columns, options, source=str(path), dataset=Path(path).stem)
