"""The recipe that turns the columns of a table into numbers, learned from training rows and kept for later rows."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, nearest, shortened
from .arrays import STRUCTURED, TASKS, check_task, few_whole_numbers
from .columns import Columns, Words, as_text, is_numeric, numbers, refuse_gaps
from .dates import CIRCLES, has_times, part_names, part_values, usual_names, usual_values
from .ranges import LEAST, NumberRange, Ranges

if TYPE_CHECKING:
    import pandas as pd

MAX_CATEGORIES = 256  # a column of words with more values is an identifier or free text, not a category
OTHER = "other"
WHOLE = re.compile(r"^\s*(-?(?:0|[1-9]\d*))(?:\.0*)?\s*$")  # 1.0 in a file may be the number 1 of a DataFrame


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: gaps become the median, then (value - mean) / std; `gaps` adds a column that marks them.

    The median is rounded to a hundredth of the deviation or finer, because it may be the value of a single row.
    """

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
        if std > 0 and (rounded := round(median, -math.floor(math.log10(std / 100)))) != median:
            filled[gaps] = median = rounded
            mean, std = float(filled.mean()), float(filled.std())
        return cls(median, mean, std if std > 1e-12 * max(1.0, abs(mean)) else 1.0, bool(gaps.any()))


@dataclass(frozen=True)
class TableRecipe:
    """The columns of a table in order, the rule that encodes each, and the target with its classes.

    A column is in `numeric`, or in `categories` with its known values: one output column per value and one for
    everything else (rare, unknown or missing). A value of fewer than `LEAST` training rows is not known: it could name
    a person, and the recipe travels with the prior. Recipes of earlier versions know every value. A column of dates
    stands here as its parts, which are numbers (`data.dates`).
    """

    columns: tuple[str, ...]
    numeric: Mapping[str, Numeric]
    categories: Mapping[str, tuple[str, ...]]
    client: str
    target: str
    task: str
    class_names: tuple[str, ...] = ()
    ranges: Ranges | None = None  # what the columns usually hold, over all sites; recipes of earlier versions have none
    dates: Mapping[str, bool] = field(default_factory=dict)  # columns of dates, whose parts are numeric; with times?
    id: str | None = None  # the column of identifiers, which predictions carry

    def __repr__(self) -> str:
        kinds = f"{len(self.numeric)} columns of numbers, {len(self.categories)} of words"
        return shortened(f"TableRecipe({self.task} of '{self.target}' from {kinds})")

    @classmethod
    def fit(
        cls,
        table: pd.DataFrame | Columns,
        client: str,
        target: str,
        task: str,
        class_names: Sequence[str],
        dates: Sequence[str] = (),
        *,
        rows: np.ndarray | None = None,
        unused: Collection[str] = (),
    ) -> TableRecipe:
        """Learn medians, means, deviations and categories from the training `rows` of a table, or from all of them.

        `dates` and `unused` name columns: those of dates, and those that the recipe leaves out.
        """
        parsed, chosen = Columns.of(table), slice(None) if rows is None else rows
        times = {name: has_times(parsed.dates(name)[chosen]) for name in dates}
        parts = date_parts(parsed, times, chosen)
        circles = {part for name in dates for part in part_names(name, times[name])[1:]}
        used = [name for name in map(str, parsed.frame.columns) if name not in (client, target, *unused)]
        columns: list[str] = []
        for name in used:
            names = part_names(name, times[name]) if name in times else (name,)
            columns += names
            if name in times and (taken := next((part for part in names if part in used), None)):
                raise InputError(
                    f"The table has both dates in '{name}' and a column '{taken}'. Rename or drop one of them."
                )
        if not columns:
            raise InputError(f"There is no column besides '{client}' and '{target}', so nothing to predict from.")
        numeric, categories = {}, {}
        for name in columns:
            if (np.isnan(parts[name]) if name in parts else parsed.gaps(name)[chosen]).all():
                raise InputError(f"Column '{name}' has no value in any training row. Leave it out or fill it.")
            if name in parts:
                rule = Numeric.fit(parts[name])
                numeric[name] = replace(rule, gaps=False) if name in circles else rule  # the year marks a date's gaps
                continue
            if parsed.is_numeric(name):
                numeric[name] = Numeric.fit(parsed.numbers(name)[chosen])
                continue
            words = parsed.words(name)
            counts = word_counts(words, chosen)
            categories[name] = tuple(value for value, count in counts.items() if count >= LEAST)
            if len(counts) > MAX_CATEGORIES:
                raise InputError(
                    f"Column '{name}' has {len(counts)} different words. It looks like an identifier or free text. "
                    f"Name an identifier in --id-column (in Python id='{name}'), leave the column out "
                    f"(--drop-columns, drop=['{name}']), or turn it into numbers or at most {MAX_CATEGORIES} "
                    "categories."
                )
        recipe = cls(tuple(columns), numeric, categories, client, target, task, tuple(class_names), dates=times)
        return replace(recipe, ranges=Ranges.fit(recipe.raw_columns(parsed, chosen)))

    def raw_columns(
        self, table: pd.DataFrame | Columns, rows: np.ndarray | slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Return the values of a table's known columns in these rows: float64 [n] with NaN, or words, object [n].

        A missing word is None. A column of dates is its year, and the names of its month and weekday (and hour).
        """
        parsed = Columns.of(table)
        self._check_columns(parsed.frame)
        raw: dict[str, np.ndarray] = {}
        for name in self.columns:
            if name in self.categories:
                words = parsed.words(name)
                texts = [text or None for text in self._known_words(name, words.values)]
                raw[name] = np.array(texts, object)[words.codes[rows]]
            elif name not in self._date_parts:
                raw[name] = parsed.numbers(name)[rows]
        for name, times in self.dates.items():
            raw |= usual_values(name, parsed.dates(name)[rows], times)
        return raw

    @property
    def _date_parts(self) -> set[str]:
        return {part for name, times in self.dates.items() for part in part_names(name, times)}

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The columns that a table must have: those of numbers, words and dates."""
        parts = self._date_parts
        return (*(name for name in self.columns if name not in parts), *self.dates)

    def surplus(self, names: Iterable[str]) -> list[str]:
        """Return which columns of a table have no use here: neither to predict from nor client, target or ID."""
        used = {*self.table_columns, self.client, self.target, self.id}
        return [name for name in names if name not in used]

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of a file to read as text: identifiers, and words, which are 01 even where none is a letter.

        True and False are left to the reader of the file, which knows them in any case.
        """
        words = [name for name, values in self.categories.items() if not values or set(values) - {"True", "False"}]
        return (*words, *([self.id] if self.id is not None else []))

    def words(self, frame: pd.DataFrame, name: str) -> list[str]:
        """Return the values of a column of words, "" where one is missing; 1.0 is 1 unless 1.0 itself is known."""
        return self._known_words(name, as_text(frame[name]))

    def _known_words(self, name: str, texts: Iterable[str]) -> list[str]:
        """Return words as the recipe knows them: 1.0 is 1 unless 1.0 itself is known."""
        known = {*self.categories[name], ""}
        return [text if text in known else WHOLE.sub(r"\1", text) for text in texts]

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

    def apply(self, table: pd.DataFrame | Columns) -> np.ndarray:
        """Return the features of every row, float32 [n, features]. Columns that were not learned are ignored."""
        parsed = Columns.of(table)
        self._check_columns(parsed.frame)
        parts = date_parts(parsed, self.dates)
        features = np.zeros((len(parsed), len(self.feature_names)), np.float32)
        every, feature = np.arange(len(parsed)), 0
        for name in self.columns:
            if name in self.numeric:
                rule, values = self.numeric[name], parts[name] if name in parts else parsed.numbers(name)
                missing = np.isnan(values)
                features[:, feature] = (np.where(missing, rule.median, values) - rule.mean) / rule.std
                feature += 1
                if rule.gaps:
                    features[:, feature] = missing
                    feature += 1
            else:
                number = {value: i for i, value in enumerate(self.categories[name])}
                words = parsed.words(name)
                codes = [number.get(text, len(number)) for text in self._known_words(name, words.values)]
                features[every, feature + np.array(codes, np.int64)[words.codes]] = 1
                feature += len(number) + 1
        return features

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
        with_range = [name for name in columns if name not in recipe._date_parts]
        with_range += [part for name, times in dates.items() for part in usual_names(name, times)]
        if ranges and (
            sorted(ranges.columns) != sorted(with_range)
            or any(isinstance(rule, NumberRange) for name, rule in ranges.columns.items() if name in words)
        ):
            raise InputError("The ranges of the recipe are not those of its columns. Take it from a saved model.")
        return recipe


def word_counts(words: Words, rows: np.ndarray | slice) -> dict[str, int]:
    """Return how many of these rows have each word of a column; missing words do not count."""
    codes, counts = np.unique(words.codes[rows], return_counts=True)
    pairs = zip((words.values[code] for code in codes), counts.tolist(), strict=True)
    return {value: count for value, count in pairs if value}


def date_parts(
    parsed: Columns, dates: Mapping[str, bool], rows: np.ndarray | slice = slice(None)
) -> dict[str, np.ndarray]:
    """Return the columns of numbers of every column of dates, by name; `dates` tells which have times."""
    parts: dict[str, np.ndarray] = {}
    for name, times in dates.items():
        parts |= zip(part_names(name, times), part_values(parsed.dates(name)[rows], times), strict=True)
    return parts


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
    measurements = numbers(values, name)
    if values.dtype.kind == "f":
        return check_task(None, [measurements], f"The values of the target '{name}'")
    return "regression" if few_whole_numbers([measurements]) is None else "classification"


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError("a list of words was expected")
    return tuple(values)
