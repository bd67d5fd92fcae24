"""The columns of a table as numbers, words or dates: each is parsed once, however many recipes are learned from it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..errors import InputError
from .arrays import FEW_CLASSES
from .dates import parse_dates
from .frames import pandas

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
# d.m.Y, d/m/y, Y-m-d and their like, with a time of day or without; 1.2.10 is a version
DATE = (
    r"(?:\d{4}([./-])\d{1,2}\1\d{1,2}|\d{1,2}([./-])\d{1,2}\2\d{4}|\d{2}([./-])\d{2}\3\d{2})(?:[T ,]+\d{1,2}:\d{2}.*)?"
)
COMMA_NUMBER = r"[+-]?\d+(?:[. ]\d{3})*,\d+|[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?"  # 3,14 or 1.234,5 or 1,234.5
PERCENT = r"[+-]?\d+(?:[.,]\d+)?\s*%"  # 97% or 97.5 %
NO_DATES = (
    "To learn from ISO dates (2024-01-31), name the column in --date-columns (in Python dates=); to test on the newest "
    "rows, name it in --split-by (split_by=). Otherwise leave it out (--drop-columns, drop=)."
)
MOSTLY = 0.8  # a column of words with a larger share of numbers is a column of numbers with mistakes


class Words(NamedTuple):
    """A column of words: its different values, sorted, and the number of the value in each row, int32 [n]."""

    values: tuple[str, ...]
    codes: np.ndarray


class Columns:
    """The columns of a frame, each parsed when it is first needed and then kept.

    The seeds of an experiment divide the rows of one table in different ways, but a row's values stay the same. What is
    kept takes 8 bytes for each row of a column of numbers or dates, 4 for one of words, and 1 for the gaps. All callers
    share it, so none of them may write to it.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self._parsed: dict[tuple[str, Any], Any] = {}

    @classmethod
    def of(cls, table: pd.DataFrame | Columns) -> Columns:
        """Return the columns of a frame; columns come back unchanged."""
        return table if isinstance(table, Columns) else cls(table)

    def __len__(self) -> int:
        return len(self.frame)

    def is_numeric(self, name: str) -> bool:
        """Return whether a column holds numbers rather than categories; see the function `is_numeric`."""
        return self.parse_once("kind", name, lambda: is_numeric(self.frame[name], name))

    def numbers(self, name: str) -> np.ndarray:
        """Return the values of a column of numbers, float64 [n] with NaN in the gaps."""
        return self.parse_once("numbers", name, lambda: numbers(self.frame[name], name))

    def dates(self, name: str) -> np.ndarray:
        """Return the values of a column of dates, datetime64[s] [n] with NaT in the gaps."""
        return self.parse_once("dates", name, lambda: parse_dates(self.frame[name], name))

    def gaps(self, name: str) -> np.ndarray:
        """Return which rows of a column have no value, bool [n]."""
        return self.parse_once("gaps", name, lambda: self.frame[name].isna().to_numpy())

    def words(self, name: str) -> Words:
        """Return the values of a column as words, "" where one is missing."""

        def parse() -> Words:
            texts = as_text(self.frame[name])
            values = tuple(sorted(set(texts)))
            number = {text: i for i, text in enumerate(values)}
            return Words(values, np.fromiter((number[text] for text in texts), np.int32, len(texts)))

        return self.parse_once("words", name, parse)

    def parse_once(self, kind: str, key: Any, parse: Callable[[], T]) -> T:
        """Return what `parse` returned when this kind of parsing was first asked for with this key."""
        if (kind, key) not in self._parsed:
            self._parsed[kind, key] = parse()
        return self._parsed[kind, key]


def refuse_gaps(column: pd.Series, subject: str) -> None:
    """Refuse a column with a missing value; `subject` begins the error, which goes on with the row's number."""
    if column.isna().any():
        row = int(np.argmax(column.isna().to_numpy())) + 1
        raise InputError(f"{subject} in row {row}. Fill it or leave the row out.")


def is_numeric(column: pd.Series, name: str) -> bool:
    """Return whether a column holds numbers rather than categories; dates and nested values are refused."""
    types = pandas().api.types
    if types.is_timedelta64_dtype(column):
        raise InputError(
            f"Column '{name}' holds durations. Turn them into numbers, such as hours (frame['{name}'] / "
            "pandas.Timedelta(hours=1)), or leave the column out (--drop-columns, drop=)."
        )
    if types.is_datetime64_any_dtype(column):
        raise InputError(f"Column '{name}' holds dates or times. {NO_DATES}")
    if types.is_bool_dtype(column) or isinstance(column.dtype, pandas().CategoricalDtype):
        return False
    if types.is_numeric_dtype(column) and not types.is_complex_dtype(column):
        return True
    values = column.dropna()
    if len(values) and all(isinstance(value, datetime.date) for value in values):
        raise InputError(f"Column '{name}' holds dates, such as '{values.iloc[0]}'. {NO_DATES}")
    if not all(isinstance(value, str | bool | int | float) for value in values):
        raise InputError(f"Column '{name}' holds neither numbers nor words. Turn it into either, or leave it out.")
    if len(values):
        _refuse_spoiled(values.astype(str), name)
    return False


def _refuse_spoiled(texts: pd.Series, name: str) -> None:
    """Refuse a column of dates, of numbers with commas, or of numbers with a stray word among them.

    Their every value would become a category of its own.
    """

    def parsed(values: pd.Series) -> pd.Series:
        return pandas().to_numeric(values, errors="coerce").notna()

    different = texts.str.strip().drop_duplicates()
    dates, commas = different.str.fullmatch(DATE), different.str.fullmatch(COMMA_NUMBER)
    if dates.mean() > MOSTLY:
        raise InputError(f"Column '{name}' holds dates, such as '{different[dates].iloc[0]}'. {NO_DATES}")
    if (commas | parsed(different)).mean() > MOSTLY and 2 * commas.sum() >= len(different):
        raise InputError(
            f"Column '{name}' holds numbers with a comma, such as '{different[commas].iloc[0]}'. Write them with a "
            "decimal point and without separators of thousands (pandas.read_csv has decimal=',' and thousands=','), or "
            "leave the column out."
        )
    percent = different.str.fullmatch(PERCENT)
    if (percent | parsed(different)).mean() > MOSTLY and 2 * percent.sum() >= len(different):
        raise InputError(
            f"Column '{name}' holds percentages, such as '{different[percent].iloc[0]}'. Write them as numbers, "
            "without the sign, or leave the column out."
        )
    numeric = parsed(texts.str.replace(",", ".", n=1))
    if numeric.mean() > MOSTLY and numeric.sum() > FEW_CLASSES:
        stray = texts[~parsed(texts)]
        which = f", but '{stray.iloc[0]}' in row {stray.index[0] + 1} is none" if len(stray) else ", written as text"
        raise InputError(
            f"Column '{name}': {numeric.sum()} of {len(texts)} values are numbers{which}. Correct or empty such "
            "values, or leave the column out."
        )


def numbers(column: pd.Series, name: str) -> np.ndarray:
    """Return float64 values [n] with NaN in the gaps; infinity and words are refused."""
    values = pandas().to_numeric(column.astype(object).where(column.notna(), np.nan), errors="coerce")
    values = values.to_numpy(dtype=np.float64, na_value=np.nan)
    for row in np.flatnonzero(np.isnan(values) & column.notna().to_numpy()):
        raise InputError(f"Column '{name}' has {column.iloc[row]!r} in row {row + 1}, where a number is needed.")
    for row in np.flatnonzero(np.abs(values) > np.finfo(np.float32).max):  # infinity is
        raise InputError(
            f"Column '{name}' has an infinite (or far too large) number in row {row + 1}. Correct the value."
        )
    return values


def as_text(column: pd.Series) -> list[str]:
    """Return every value as a word, "" where it is missing; 1.0 is "1", as gaps turn pandas' integers into floats."""

    def text(value: Any) -> str:
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    missing = column.isna().to_numpy()
    return ["" if gap else text(value) for value, gap in zip(column.tolist(), missing, strict=True)]
