"""Compare a site's data with the schema of its federation: the reasons name columns, and never a value of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.arrays import as_features
from ..data.dates import parse_dates
from ..data.frames import pandas
from ..data.recipe import as_text, is_numeric, numbers
from ..errors import InputError
from .schema_types import Column, Schema

if TYPE_CHECKING:
    import pandas as pd

MOST_REASONS = 20
# Rows that must share a word, or have a value in a column, before anything about it is written or sent.
LEAST_ROWS_TO_REVEAL = 5


def reasons(schema: Schema, data: Any) -> list[str]:
    """Return why data do not fit the schema, at most `MOST_REASONS` sentences; the list is empty if they do."""
    kind = kind_of(data)
    if kind != schema.kind:
        return [f"The data are of the kind {kind}, but the schema is for {schema.kind}."]
    if kind == "table":
        found = _table(schema, data)
    else:
        found = _arrays(schema, data) if kind == "arrays" else _images(schema, data)
    more = [f"There are {len(found) - MOST_REASONS} more reasons."] if len(found) > MOST_REASONS else []
    return found[:MOST_REASONS] + more


def kind_of(data: Any) -> str:
    """Return the kind of opened data: table, arrays or images."""
    if hasattr(data, "iloc"):
        return "table"
    return "arrays" if isinstance(data, Mapping) else "images"


def shared_words(texts: Sequence[str]) -> tuple[str, ...]:
    """Return, sorted, the words that occur at least `LEAST_ROWS_TO_REVEAL` times; missing values do not count."""
    counts = Counter(text for text in texts if text)
    return tuple(sorted(word for word, count in counts.items() if count >= LEAST_ROWS_TO_REVEAL))


# -- tables -----------------------------------------------------------------------------------------------------------
def _table(schema: Schema, frame: pd.DataFrame) -> list[str]:
    found = []
    if schema.target not in frame.columns:
        found.append(f"The column '{schema.target}' (the target) is missing.")
    else:
        found += _target(schema, frame[schema.target])
    for name, column in schema.columns.items():
        if name not in frame.columns:
            found.append(f"The column '{name}' is missing.")
        elif reason := _column(name, column, frame[name]):
            found.append(reason)
    if len(frame) < 2:
        found.append("There are fewer than two rows.")
    return found


def _target(schema: Schema, values: pd.Series) -> list[str]:
    name = schema.target
    if values.isna().any():
        return [f"The target '{name}' has rows without a value."]
    if schema.task == "regression":
        return [] if _holds_numbers(values, name) else [f"The target '{name}' should hold numbers, and does not."]
    if not set(as_text(values)) <= set(schema.classes):
        return [f"The target '{name}' has values that are not among the schema's classes."]
    return []


def _column(name: str, column: Column, values: pd.Series) -> str:
    """Return why a column does not fit, or ""."""
    if values.isna().all():
        return ""
    if column.kind == "number":
        return "" if _holds_numbers(values, name) else f"The column '{name}' should hold numbers, and does not."
    if column.kind == "date":
        try:
            parse_dates(values, name)
        except (InputError, ValueError, TypeError, OverflowError):
            return f"The column '{name}' should hold ISO dates, and does not."
        return ""
    types = pandas().api.types
    known = values.dropna()
    fractions = types.is_float_dtype(values) and not (np.floor(known.to_numpy()) == known.to_numpy()).all()
    if types.is_datetime64_any_dtype(values) or fractions:
        return f"The column '{name}' should hold words, and does not."
    words = shared_words(as_text(known))  # so that no schema can make the site confirm a rare word
    if words and not set(words) & set(column.words):
        return f"The column '{name}' has none of the words that the schema lists."
    return ""


def _holds_numbers(values: pd.Series, name: str) -> bool:
    try:
        return is_numeric(values, name) and len(numbers(values, name)) > 0
    except (InputError, ValueError, TypeError):
        return False


# -- arrays -----------------------------------------------------------------------------------------------------------
def _arrays(schema: Schema, data: Mapping[str, np.ndarray]) -> list[str]:
    found = []
    for split in ("train", "test"):
        if f"x_{split}" in data:
            found += _pair(schema, data[f"x_{split}"], data[f"y_{split}"], split)
    if len(data["x_train"]) < 2:
        found.append("There are fewer than two training samples.")
    return found


def _pair(schema: Schema, x: np.ndarray, y: np.ndarray, split: str) -> list[str]:
    try:
        x = as_features(x, f"x_{split}")
    except InputError:
        return [f"x_{split} is no array of numbers with one sample per row."]
    if (x.dtype == np.uint8) != (schema.type == "uint8"):
        return [f"x_{split} is of type {x.dtype}, but the schema has {schema.type}."]
    if tuple(x.shape[1:]) != schema.shape:
        return [f"x_{split} has samples of shape {tuple(x.shape[1:])}, but the schema has {schema.shape}."]
    if len(x) != len(y):
        return [f"x_{split} and y_{split} have different numbers of rows."]
    if not np.isfinite(x).all():
        return [f"x_{split} has values that are not finite."]
    return _labels(schema, y, split)


def _labels(schema: Schema, y: np.ndarray, split: str) -> list[str]:
    width = 1 if y.ndim == 1 else int(np.prod(y.shape[1:]))
    if y.ndim not in (1, 2) or y.dtype.kind not in "buif" or width != schema.targets:
        return [f"y_{split} should be an array of numbers with {schema.targets} for each sample."]
    if not np.isfinite(y).all():
        return [f"y_{split} has values that are not finite."]
    if schema.task == "regression":
        return []
    least = 0 if schema.task == "classification" else -1
    most = 1 if schema.task == "multilabel" else len(schema.classes) - 1
    if not ((np.floor(y) == y) & (y >= least) & (y <= most)).all():
        return [f"y_{split} has labels that are not among the schema's classes."]
    return []


# -- images -----------------------------------------------------------------------------------------------------------
def _images(schema: Schema, files: Sequence[Any]) -> list[str]:
    found = []
    if not {each.label for each in files} <= set(schema.classes):
        found.append("There are folders of classes that the schema does not have.")
    if sum(not each.test for each in files) < 2:
        found.append("There are fewer than two training images.")
    try:
        schema.image_recipe().check([each.file for each in files])
    except InputError:
        _, height, width = schema.shape
        size = "" if schema.resized else f" of {width}×{height} pixels"
        found.append(f"There are files that are no {schema.mode} images{size}.")
    return found
