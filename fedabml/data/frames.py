"""Files of tables (CSV, Parquet, Excel) as frames of pandas, read with care: no false size is believed."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from ..errors import InputError, quoted
from ..files.limits import check_unpacked
from ..files.paths import open_regular

if TYPE_CHECKING:
    import pandas as pd

MAX_COLUMNS, MAX_LINE = 16_384, 16 << 20  # columns, as many as a spreadsheet has; bytes of a CSV file's first line
WORKBOOKS = (".xls", ".xlsm", ".xlsb", ".ods")  # formats of spreadsheets that are not read


def pandas() -> ModuleType:
    """Return pandas; without it, raise an InputError with the command that installs it."""
    try:
        import pandas as pd
    except ImportError as error:
        raise InputError("Tables need pandas: pip install fedabml[tables].") from error
    return pd


def as_frame(table: str | os.PathLike[str] | pd.DataFrame, words: Sequence[str] = ()) -> pd.DataFrame:
    """Return the frame of a file, or a frame with its columns named by words and its rows numbered, as a file's are.

    A file's columns `words` are read as text, so that an identifier or a category such as 007 keeps its zeros.
    """
    if isinstance(table, str | os.PathLike):
        return read_frame(table, words)
    if not isinstance(table, pandas().DataFrame):
        raise InputError(
            "A table must be the path of a .csv, .parquet or .xlsx file or a DataFrame of pandas; it is "
            f"{quoted(table)}."
        )
    return _check_frame(table, "The table")


def read_frame(path: str | os.PathLike[str], words: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV, Parquet or Excel file, by the end of its name; the columns `words` are read as text."""
    suffix = Path(path).suffix.lower()
    if suffix in WORKBOOKS:
        raise InputError(f"{path} is a workbook that fedabml does not read. Save its sheet as CSV or as .xlsx.")
    if suffix not in READERS:
        raise InputError(f"{path} ends in '{suffix}'; a table's name ends in .csv, .parquet or .xlsx.")
    pandas()
    with open_regular(path) as file:
        try:
            _check_size(path, file, suffix)
            file.seek(0)
            frame = READERS[suffix](file, words)
        except InputError as error:
            raise error if str(path) in str(error) else InputError(f"{path} {error}") from error
        except ImportError as error:
            if suffix == ".xlsx":
                remedy = "Install it with pip install fedabml[excel], or save the sheet as CSV"
                raise InputError(f"{path}: reading .xlsx needs openpyxl. {remedy}.") from error
            raise InputError("Reading Parquet needs pyarrow: pip install fedabml[tables].") from error
        except Exception as error:  # pandas and pyarrow have errors of nearly every type for damaged bytes
            hint = " Save it as UTF-8." if isinstance(error, UnicodeError) else ""
            if suffix == ".csv" and (mark := _other_separator(file)):
                hint = f" It seems to be separated by {mark!r}. Write it with commas, and numbers with a decimal point."
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise InputError(f"{path} is not a {suffix[1:].upper()} table, or is damaged: {reason}.{hint}") from error
    frame = _check_frame(frame, str(path))
    if len(frame.columns) == 1 and (mark := next((m for m in ";\t|" if m in frame.columns[0]), None)):
        raise InputError(f"{path} has one column only; it seems to be separated by {mark!r}. Write it with commas.")
    return frame


def _read_csv(file: IO[bytes], words: Sequence[str]) -> pd.DataFrame:
    # Read in one piece: pandas would choose a type for each part of a long file, and 01 would also become 1.
    frame = pandas().read_csv(file, dtype=dict.fromkeys(words, str), low_memory=False)
    if not isinstance(frame.index, pandas().RangeIndex) and not _other_separator(file):
        raise InputError(
            "has more values in its rows than names of columns in its first line, so the names would not belong to the "
            "values. Name every column, or remove commas at the ends of rows."
        )
    return frame


def _other_separator(file: IO[bytes]) -> str | None:
    """Return the mark that separates the first line of a CSV file if that line has no comma."""
    file.seek(0)
    line = file.readline(MAX_COLUMNS).decode(errors="replace")
    return None if "," in line else next((mark for mark in ";\t|" if mark in line), None)


def _read_parquet(file: IO[bytes], words: Sequence[str]) -> pd.DataFrame:
    return pandas().read_parquet(file)  # its columns have types of their own


def _read_excel(file: IO[bytes], words: Sequence[str]) -> pd.DataFrame:
    """Read the only sheet of a workbook; several sheets are refused, because nobody said which one is the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl warns of styles and of validation rules that it leaves out
        with pandas().ExcelFile(file, engine="openpyxl") as book:
            if len(book.sheet_names) != 1:
                names = ", ".join(f"'{name}'" for name in book.sheet_names[:5])
                raise InputError(
                    f"has {len(book.sheet_names)} sheets ({names}), but a table is one sheet. Save that sheet as a "
                    "workbook of its own, or as CSV."
                )
            return book.parse(book.sheet_names[0], dtype=dict.fromkeys(words, str))


READERS: dict[str, Callable[[IO[bytes], Sequence[str]], Any]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
    ".xlsx": _read_excel,
}


def _check_frame(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the frame with numbered rows and columns named by words; it must have rows, and no name twice.

    An index with a name, as `set_index` makes and Parquet keeps, becomes a column of this name.
    """
    if not len(frame):
        raise InputError(f"{source} has no rows.")
    named = [name for name in frame.index.names if name is not None]
    if twice := next((name for name in named if name in frame.columns), None):
        raise InputError(f"{source} has an index and a column called '{twice}'. Rename or drop one of them.")
    index = frame.index.to_frame(index=False)[named] if named else None
    if not isinstance(frame.index, pandas().RangeIndex) or frame.index.start or frame.index.step != 1:
        frame = frame.reset_index(drop=True)
    frame = frame if index is None else pandas().concat([index, frame], axis=1)
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"{source} has two columns called '{twice}'. Give each a name of its own.")
    return frame


def _check_size(path: str | os.PathLike[str], file: IO[bytes], suffix: str) -> None:
    """Refuse columns for which pandas takes minutes, and files that declare more content than they can hold."""
    if suffix == ".csv":
        columns, cells = file.readline(MAX_LINE).count(b",") + 1, 0
    elif suffix == ".xlsx":
        with zipfile.ZipFile(file) as archive:
            columns, cells = 0, sum(member.file_size for member in archive.infolist())
    else:
        from pyarrow.parquet import ParquetFile

        metadata = ParquetFile(file).metadata
        columns = metadata.num_columns
        declared = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        cells = max(declared, metadata.num_rows * columns)
    if columns > MAX_COLUMNS:
        raise InputError(f"{path} has more than {MAX_COLUMNS:,} columns. Leave some out, or give arrays (.npz).")
    if cells:
        check_unpacked(path, os.fstat(file.fileno()).st_size, cells)
