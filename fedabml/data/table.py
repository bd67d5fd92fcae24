"""Reading tables with a client column (CSV or Parquet) with pandas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..arguments import checks_arguments
from ..errors import InputError, nearest, shown
from ..files.limits import check_unpacked
from ..files.paths import open_regular
from .arrays import as_array, large_enough
from .federation import Federation
from .once import once
from .partition import natural
from .recipe import TableRecipe, as_text, choose_task, is_numeric, numbers, pandas, refuse_gaps
from .rows import TABLE, Rows, check_share, take_share

if TYPE_CHECKING:
    import pandas as pd

MAX_COLUMNS, MAX_LINE = 16_384, 16 << 20  # columns, as many as a spreadsheet has; bytes of a CSV file's first line


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
    drop: Sequence[str] = (),
) -> Federation:
    """Make a federation from a table: each value of the column `client` is a client, the column `target` is predicted.

    `path` is a .csv or .parquet file, or a DataFrame of pandas. A share of each client's rows is kept for testing,
    spread over its labels; at least two rows always train. Words and truth values become one column each, numbers are
    standardised, gaps are filled and marked. All of it is learned from training rows (the names of the classes alone
    come from the whole table) and kept in `federation.recipe`. The columns `drop` are left out.
    """
    check_share(test_share, "test")
    if isinstance(path, str | os.PathLike):
        where, dataset, frame = str(path), Path(path).stem, once(path, "frame", lambda: read_frame(path))
    else:
        where, dataset, frame = "The table", "table", as_frame(path)
    drop = [drop] if isinstance(drop, str) else list(drop)
    for name in (client, target, *drop):
        if name not in frame.columns:
            raise InputError(f"{where} has no column '{name}'.{nearest(str(name), map(str, frame.columns))}")
    if {client, target} & set(drop):
        raise InputError(f"'{client}' and '{target}' are the client and the target: they cannot be left out.")
    frame = frame.drop(columns=drop) if drop else frame
    for name in (client, target):
        refuse_gaps(frame[name], f"{where}: column '{name}' has no value")
    if client == target:
        raise InputError(f"'{client}' cannot be both the client and the target.")
    column = frame[client]
    numbered = column.dtype.kind in "iu"  # whole numbers keep their order, 9 before 10
    owners, _, names = natural(column.to_numpy() if numbered else [text.strip() for text in as_text(column)])
    kept = large_enough(owners.counts.tolist(), names, drop_small)
    owners, names = owners.select(kept), tuple(names[i] for i in kept)
    task = choose_task(frame[target], target, task)
    classes = _class_names(frame[target], target) if task == "classification" else ()
    if len(classes) == 1:
        raise InputError(f"{where}: the target '{target}' is '{classes[0]}' in every row; there is nothing to learn.")
    labels = np.unique(as_text(frame[target]), return_inverse=True)[1] if classes else np.zeros(len(frame), np.int64)
    train, test = take_share(owners, test_share, 2, labels, seed, TABLE)

    recipe = TableRecipe.fit(frame.iloc[np.sort(train.index)], client, target, task, classes)
    return Federation.assemble(
        recipe.apply(frame),
        recipe.encode_target(frame[target]),
        (train, Rows.empty(len(names)), test),
        names,
        len(classes),
        dataset=dataset,
        normalize="targets",
        manifest={"partition": {"kind": "natural", "column": client, "test_share": test_share}, "seed": int(seed)},
        recipe=recipe,
    )


@checks_arguments
def features(table: str | os.PathLike[str] | pd.DataFrame, recipe: TableRecipe) -> np.ndarray:
    """Return the model's inputs, float32 [n, features], of a file or frame."""
    return recipe.apply(as_frame(table))


def targets(frame: pd.DataFrame, recipe: TableRecipe, values: Any = None) -> np.ndarray:
    """Return the model's targets of a frame's rows: from its target column, or from raw `values` [n] beside it."""
    if values is None:
        if recipe.target not in frame.columns:
            raise InputError(
                f"The table has no column '{recipe.target}', and no y was given: there is nothing to learn from."
                + nearest(recipe.target, map(str, frame.columns))
            )
        return recipe.encode_target(frame[recipe.target])
    raw = as_array(values, "y")
    raw = raw[:, 0] if raw.ndim == 2 and raw.shape[1] == 1 else raw
    if raw.ndim != 1 or len(raw) != len(frame):
        raise InputError(
            f"The table has {len(frame)} rows, but y has the shape {list(raw.shape)}: give one value of "
            f"'{recipe.target}' for each row."
        )
    return recipe.encode_target(pandas().Series(raw, name=recipe.target))


def as_frame(table: str | os.PathLike[str] | pd.DataFrame) -> pd.DataFrame:
    """Return the frame of a file, or a frame with its columns named by words and its rows numbered, as a file's are."""
    if isinstance(table, str | os.PathLike):
        return read_frame(table)
    if not isinstance(table, pandas().DataFrame):
        raise InputError(
            f"A table must be the path of a .csv or .parquet file or a DataFrame of pandas; it is {shown(table)}."
        )
    return _check_frame(table.reset_index(drop=True), "The table")


def read_frame(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a CSV or Parquet file, by the end of its name."""
    pd = pandas()
    suffix = Path(path).suffix.lower()
    readers = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".pq": pd.read_parquet}
    if suffix not in readers:
        raise InputError(f"{path} ends in '{suffix}'; a table's name ends in .csv or .parquet.")
    with open_regular(path) as file:
        try:
            _check_size(path, file, suffix)
            file.seek(0)
            frame = readers[suffix](file)
        except InputError:
            raise
        except ImportError as error:
            raise InputError("Reading Parquet needs pyarrow: pip install fedabml[tables].") from error
        except Exception as error:  # pandas and pyarrow have errors of nearly every type for damaged bytes
            hint = " Save it as UTF-8." if isinstance(error, UnicodeError) else ""
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise InputError(f"{path} is not a {suffix[1:].upper()} table, or is damaged: {reason}.{hint}") from error
    frame = _check_frame(frame, str(path))
    if len(frame.columns) == 1 and (mark := next((m for m in ";\t|" if m in frame.columns[0]), None)):
        raise InputError(f"{path} has one column only; it seems to be separated by {mark!r}. Write it with commas.")
    return frame


def _check_frame(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the frame with columns named by words; it must have rows, and no name twice."""
    if not len(frame):
        raise InputError(f"{where} has no rows.")
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"{where} has two columns called '{twice}'. Give each a name of its own.")
    return frame


def _check_size(path: str | os.PathLike[str], file: IO[bytes], suffix: str) -> None:
    """Refuse columns for which pandas takes minutes, and a Parquet file that declares more cells than it can hold."""
    if suffix == ".csv":
        columns, cells = file.readline(MAX_LINE).count(b",") + 1, 0
    else:
        from pyarrow.parquet import ParquetFile

        facts = ParquetFile(file).metadata
        columns, declared = facts.num_columns, [facts.row_group(i).total_byte_size for i in range(facts.num_row_groups)]
        cells = max(sum(declared), facts.num_rows * columns)
    if columns > MAX_COLUMNS:
        raise InputError(f"{path} has more than {MAX_COLUMNS:,} columns. Leave some out, or give arrays (.npz).")
    if cells:
        check_unpacked(path, os.fstat(file.fileno()).st_size, cells)


def _class_names(values: pd.Series, target: str) -> tuple[str, ...]:
    """Return the different values of the target as words, numbers in their order."""
    if is_numeric(values, target):
        classes = np.unique(numbers(values, target))
        if not (np.floor(classes) == classes).all():
            raise InputError(f"The target '{target}' has fractions, so it is no class. Use task='regression'.")
        return tuple(str(int(value)) for value in classes)
    names = set(as_text(values))
    if len(names) > 1000:
        raise InputError(f"The target '{target}' has {len(names)} different values: too many to be classes.")
    return tuple(sorted(names))
