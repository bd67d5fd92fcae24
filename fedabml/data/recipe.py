"""The recipe that turns the columns of a table into numbers, learned from training rows and kept for later rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, nearest, shortened
from .arrays import FEW_CLASSES, STRUCTURED, TASKS, check_task, few_whole_numbers
from .dates import CIRCLES, has_times, parse_dates, part_names, usual_names, usual_values, with_parts
from .frames import pandas
from .ranges import NumberRange, Ranges

if TYPE_CHECKING:
    import pandas as pd

MAX_CATEGORIES = 256  # a column of words with more values is an identifier or free text, not a category
OTHER = "other"
# d.m.Y, d/m/y, Y-m-d and their like, with a time of day or without; 1.2.10 is a version
DATE = (
    r"(?:\d{4}([./-])\d{1,2}\1\d{1,2}|\d{1,2}([./-])\d{1,2}\2\d{4}|\d{2}([./-])\d{2}\3\d{2})(?:[T ,]+\d{1,2}:\d{2}.*)?"
)
COMMA_NUMBER = r"[+-]?\d+(?:[. ]\d{3})*,\d+|[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?"  # 3,14 or 1.234,5 or 1,234.5
NO_DATES = (
    "To learn from ISO dates (2024-01-31), name the column in --date-columns (in Python dates=); to test on the newest "
    "rows, name it in --split-by (split_by=). Otherwise leave it out (--drop-columns, drop=)."
)
WHOLE = re.compile(r"^\s*(-?(?:0|[1-9]\d*))(?:\.0*)?\s*$")  # 1.0 in a file may be the number 1 of a DataFrame
MOSTLY = 0.8  # a column of words with a larger share of numbers is a column of numbers with mistakes


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: gaps become the median, then (value - mean) / std; `gaps` adds a column that marks them."""

    median: float
    mean: float
    std: float
    gaps: bool

    @classmethod
    def fit(cls, values: np.ndarray) -> Numeric:
        """Learn from a column of training rows, float64 [n] with NaN in the gaps."""
        gaps = np.isnan(values)
        median = float(np.median(values[~gaps]))
        filled = np.where(gaps, median, values)
        mean, std = float(filled.mean()), float(filled.std())
        return cls(median, mean, std if std > 1e-12 * max(1.0, abs(mean)) else 1.0, bool(gaps.any()))


@dataclass(frozen=True)
class TableRecipe:
    """The columns of a table in order, the rule that encodes each, and the target with its classes.

    A column is in `numeric`, or in `categories` with its known values: one output column per value and one for
    everything else (unknown or missing). A column of dates stands here as its parts, which are numbers (`data.dates`).
    """

    columns: tuple[str, ...]
    numeric: Mapping[str, Numeric]
    categories: Mapping[str, tuple[str, ...]]
    client: str
    target: str
    task: str
    class_names: tuple[str, ...] = ()
    ranges: Ranges | None = None  # what the columns usually hold, over all sites; recipes of before have none
    dates: Mapping[str, bool] = field(default_factory=dict)  # columns of dates, whose parts are numeric; with times?
    id: str | None = None  # the column of identifiers, which predictions carry

    def __repr__(self) -> str:
        kinds = f"{len(self.numeric)} columns of numbers, {len(self.categories)} of words"
        return shortened(f"TableRecipe({self.task} of '{self.target}' from {kinds})")

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        client: str,
        target: str,
        task: str,
        class_names: Sequence[str],
        dates: Sequence[str] = (),
    ) -> TableRecipe:
        """Learn medians, means, deviations and categories from a frame of training rows; `dates` name columns."""
        raw, times = frame, {name: has_times(parse_dates(frame[name], name)) for name in dates}
        frame = with_parts(frame, times)
        circles = {part for name in dates for part in part_names(name, times[name])[1:]}
        columns = tuple(str(name) for name in frame.columns if name not in (client, target))
        if not columns:
            raise InputError(f"There is no column besides '{client}' and '{target}', so nothing to predict from.")
        numeric, categories = {}, {}
        for name in columns:
            column = frame[name]
            if column.isna().all():
                raise InputError(f"Column '{name}' has no value in any training row. Leave it out or fill it.")
            if is_numeric(column, name):
                rule = Numeric.fit(numbers(column, name))
                numeric[name] = replace(rule, gaps=False) if name in circles else rule  # the year marks a date's gaps
                continue
            categories[name] = tuple(sorted(set(as_text(column.dropna())) - {""}))
            if len(categories[name]) > MAX_CATEGORIES:
                raise InputError(
                    f"Column '{name}' has {len(categories[name])} different words: an identifier or free text, it "
                    f"seems. Leave it out (--drop-columns, in Python drop=['{name}']), or turn it into numbers or "
                    f"at most {MAX_CATEGORIES} categories."
                )
        recipe = cls(columns, numeric, categories, client, target, task, tuple(class_names), dates=times)
        return replace(recipe, ranges=Ranges.fit(recipe.raw_columns(raw)))

    def raw_columns(self, frame: pd.DataFrame) -> dict[str, np.ndarray]:
        """Return the values of a frame's known columns: float64 [n] with NaN, or words, object [n] with None.

        A column of dates is its year, and the names of its month and weekday (and hour).
        """
        self._check_columns(frame)
        words = {name: [text or None for text in self.words(frame, name)] for name in self.categories}
        plain = [name for name in self.columns if name not in self._date_parts]
        raw = {n: numbers(frame[n], n) if n in self.numeric else np.array(words[n], object) for n in plain}
        for name, times in self.dates.items():
            raw |= usual_values(name, parse_dates(frame[name], name), times)
        return raw

    @property
    def _date_parts(self) -> set[str]:
        return {part for name, times in self.dates.items() for part in part_names(name, times)}

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The columns that a table must have: those of numbers, words and dates."""
        parts = self._date_parts
        return (*(name for name in self.columns if name not in parts), *self.dates)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of a file to read as text: identifiers, and words, which are 01 even where none is a letter.

        True and False are left to the reader of the file, which knows them in any case.
        """
        words = [name for name, known in self.categories.items() if not set(known) <= {"True", "False"}]
        return (*words, *([self.id] if self.id is not None else []))

    def words(self, frame: pd.DataFrame, name: str) -> list[str]:
        """Return the values of a column of words, "" where one is missing; 1.0 is 1 unless 1.0 itself is known."""
        known = {*self.categories[name], ""}
        return [text if text in known else WHOLE.sub(r"\1", text) for text in as_text(frame[name])]

    def _check_columns(self, frame: pd.DataFrame) -> None:
        for name in self.table_columns:
            if name not in frame.columns:
                raise InputError(f"The table has no column '{name}'.{nearest(name, map(str, frame.columns))}")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the columns that `apply` returns."""
        names: list[str] = []
        for name in self.columns:
            if name in self.numeric:
                names += [name, f"{name} missing"] if self.numeric[name].gaps else [name]
            else:
                names += [f"{name}={value}" for value in (*self.categories[name], OTHER)]
        return tuple(names)

    def apply(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the features of every row, float32 [n, features]. Columns that were not learned are ignored."""
        self._check_columns(frame)
        frame = with_parts(frame, self.dates)
        parts: list[np.ndarray] = []
        for name in self.columns:
            if name in self.numeric:
                rule, values = self.numeric[name], numbers(frame[name], name)
                missing = np.isnan(values)
                parts.append((np.where(missing, rule.median, values) - rule.mean)[:, None] / rule.std)
                parts += [missing[:, None]] if rule.gaps else []
            else:
                number = {value: i for i, value in enumerate(self.categories[name])}
                codes = [number.get(text, len(number)) for text in self.words(frame, name)]
                parts.append(np.eye(len(number) + 1, dtype=np.float32)[codes])
        return np.concatenate(parts, axis=1).astype(np.float32)

    def encode_target(self, values: pd.Series) -> np.ndarray:
        """Return class numbers, int64 [n], or measurements, float32 [n, 1]."""
        refuse_gaps(values, f"The target '{self.target}' is missing")
        if self.task == "regression":
            return numbers(values, self.target).astype(np.float32)[:, None]
        number = {name: i for i, name in enumerate(self.class_names)}
        try:
            return np.array([number[text] for text in as_text(values)], np.int64)
        except KeyError as error:
            unknown = error.args[0]
            raise InputError(
                f"'{unknown}' is no known value of '{self.target}'.{nearest(unknown, self.class_names)}"
            ) from None

    def decode(self, targets: np.ndarray) -> list[str] | np.ndarray:
        """Return the class names of class numbers; measurements come back unchanged."""
        if self.task == "regression":
            return np.asarray(targets)
        return [self.class_names[int(number)] for number in np.asarray(targets).reshape(-1)]

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain dictionaries, lists, numbers and words."""
        content = {"version": 1, **asdict(replace(self, ranges=None))}
        for name in ("dates", "id"):  # without them a recipe is what earlier versions wrote
            content |= {name: value} if (value := content.pop(name)) else {}
        return content | {"ranges": self.ranges.to_json() if self.ranges else None}

    @classmethod
    def from_json(cls, content: Any) -> TableRecipe:
        """Return the recipe that `to_json` wrote; anything else is an InputError."""
        try:
            numeric = {str(k): Numeric(**v) for k, v in content["numeric"].items()}
            categories = {str(k): _texts(v) for k, v in content["categories"].items()}
            client, target, task = _texts([content[key] for key in ("client", "target", "task")])
            columns, class_names = _texts(content["columns"]), _texts(content["class_names"])
            for rule in numeric.values():
                if not all(type(v) in (int, float) and np.isfinite(v) for v in (rule.median, rule.mean, rule.std)):
                    raise ValueError("statistics that are no numbers")
                if rule.std <= 0 or type(rule.gaps) is not bool:
                    raise ValueError("a deviation that is not positive, or gaps neither true nor false")
            if content["version"] != 1 or task not in TASKS:
                raise ValueError("another version or task")
            if sorted(columns) != sorted([*numeric, *categories]):
                raise ValueError("columns without a rule")
            dates = {str(name): times for name, times in content.get("dates", {}).items()}
            if not all(type(times) is bool for times in dates.values()):
                raise ValueError("dates whose times are neither true nor false")
            if not {part for name, times in dates.items() for part in part_names(name, times)} <= numeric.keys():
                raise ValueError("dates without their parts")
            id = content.get("id")
            if id is not None and not isinstance(id, str):
                raise ValueError("an ID column without a name")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"This is not the recipe of a table ({error!r}). Take it from a saved model.") from error
        ranges = Ranges.from_json(content["ranges"]) if content.get("ranges") is not None else None
        recipe = cls(columns, numeric, categories, client, target, task, class_names, ranges, dates, id)
        words = {*categories, *(f"{name} {part}" for name in dates for part in CIRCLES)}
        known = [name for name in columns if name not in recipe._date_parts]
        known += [each for name, times in dates.items() for each in usual_names(name, times)]
        if ranges and (
            sorted(ranges.columns) != sorted(known)
            or any(isinstance(rule, NumberRange) for name, rule in ranges.columns.items() if name in words)
        ):
            raise InputError("The ranges of the recipe are not those of its columns. Take it from a saved model.")
        return recipe


def choose_task(values: pd.Series, name: str, task: str | None) -> str:
    """Return classification for words, truth values and few integers, else regression; `task` overrides.

    A few whole numbers of a float type, such as 0.0 and 1.0, may be either, so the task must be given.
    """
    if task in STRUCTURED:
        raise InputError(
            f"The task {task} needs several targets per row, but a table has one target column. Give arrays, as "
            "Federation.from_arrays reads them, with a column of y per label or step."
        )
    if task is not None:
        return check_task(task, [])
    if not is_numeric(values, name):
        return "classification"
    known = numbers(values, name)
    if values.dtype.kind == "f":
        return check_task(None, [known], f"The values of the target '{name}'")
    return "regression" if few_whole_numbers([known]) is None else "classification"


def refuse_gaps(column: pd.Series, subject: str) -> None:
    """Refuse a column with a missing value; `subject` begins the error, which goes on with the row's number."""
    if column.isna().any():
        row = int(np.argmax(column.isna().to_numpy())) + 1
        raise InputError(f"{subject} in row {row}. Fill it or leave the row out.")


def is_numeric(column: pd.Series, name: str) -> bool:
    """Return whether a column holds numbers rather than categories; dates and nested values are refused."""
    types = pandas().api.types
    if types.is_datetime64_any_dtype(column) or types.is_timedelta64_dtype(column):
        raise InputError(f"Column '{name}' holds dates or times. {NO_DATES}")
    if types.is_bool_dtype(column) or isinstance(column.dtype, pandas().CategoricalDtype):
        return False
    if types.is_numeric_dtype(column) and not types.is_complex_dtype(column):
        return True
    values = column.dropna()
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
    numeric = parsed(texts.str.replace(",", ".", n=1))
    if numeric.mean() > MOSTLY and numeric.sum() > FEW_CLASSES:
        stray = texts[~parsed(texts)]
        which = f", but '{stray.iloc[0]}' in row {stray.index[0] + 1} is none" if len(stray) else ", written as text"
        raise InputError(
            f"Column '{name}': {numeric.sum()} of {len(texts)} values are numbers{which}. Mend or empty such values, "
            "or leave the column out."
        )


def numbers(column: pd.Series, name: str) -> np.ndarray:
    """Return float64 values [n] with NaN in the gaps; infinity and words are refused."""
    values = pandas().to_numeric(column.astype(object).where(column.notna(), np.nan), errors="coerce")
    values = values.to_numpy(dtype=np.float64, na_value=np.nan)
    for row in np.flatnonzero(np.isnan(values) & column.notna().to_numpy()):
        raise InputError(f"Column '{name}' has {column.iloc[row]!r} in row {row + 1}, where a number is needed.")
    for row in np.flatnonzero(np.abs(values) > np.finfo(np.float32).max):  # infinity is
        raise InputError(f"Column '{name}' has an infinite (or far too large) number in row {row + 1}. Mend it first.")
    return values


def as_text(column: pd.Series) -> list[str]:
    """Return every value as a word, "" where it is missing; 1.0 is "1", as gaps turn pandas' integers into floats."""

    def text(value: Any) -> str:
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    missing = column.isna().to_numpy()
    return ["" if gap else text(value) for value, gap in zip(column.tolist(), missing, strict=True)]


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError("a list of words was expected")
    return tuple(values)
