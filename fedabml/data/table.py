"""Reading a table with a client column (CSV, Parquet or Excel) as a federation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import checks_arguments
from .encode import TableOptions
from .federation import Federation
from .frames import as_frame, read_frame
from .once import once

if TYPE_CHECKING:
    import pandas as pd


@checks_arguments
def read_table(
    path: str | os.PathLike[str] | pd.DataFrame,
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
) -> Federation:
    """Make a federation from a table: a .csv, .parquet or .xlsx file, or a DataFrame of pandas.

    The other arguments are those of `Federation.from_frame`.
    """
    options = TableOptions(client, target, task, test_share, seed, drop_small, drop, id, dates, split_by)
    if not isinstance(path, str | os.PathLike):
        return Federation.from_encoded(as_frame(path), options)
    words = () if id is None else (id,)
    frame = once(path, ("frame", id), lambda: read_frame(path, words))
    return Federation.from_encoded(frame, options, source=str(path), dataset=Path(path).stem)
