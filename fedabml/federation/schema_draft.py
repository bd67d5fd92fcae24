"""Draft a schema from one site's data, for the operator to edit.

What it takes from the data: names and kinds of columns, words that at least `LEAST_ROWS_TO_REVEAL` rows share,
classes, shapes, and rounded shifts and scales. It takes no single value of a feature, no extreme and no rare word. But
all classes enter it that are whole numbers or names of image folders, even rare ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import checked_integer
from ..data.arrays import as_features, as_targets, check_task
from ..data.dates import clock, has_times, parse_dates
from ..data.encode import positive_last
from ..data.images import LARGEST_SIZE, ImageRecipe
from ..data.recipe import MAX_CATEGORIES, as_text, choose_task, is_numeric, numbers, refuse_gaps
from ..errors import InputError, nearest
from .schema_types import Column, Schema
from .site_check import LEAST_ROWS_TO_REVEAL, kind_of, shared_words
from .site_data import open_data

if TYPE_CHECKING:
    import pandas as pd

BYTES = (127.5,)  # the shift and the scale of images: bytes become numbers from -1 to 1


def draft_schema(
    path: str | os.PathLike[str],
    *,
    target_column: str = "",
    drop_columns: Sequence[str] | str = (),
    id_column: str = "",
    date_columns: Sequence[str] | str = (),
    task: str | None = None,
    image_size: int | None = None,
    positive_class: str | None = None,
) -> Schema:
    """Return the schema of one site's data: a table, an .npz file of one client, or a folder of images, class/*.png.

    A table needs the `target_column`. Its columns `drop_columns` and `id_column` are left out, `date_columns` hold ISO
    dates. `image_size` is the side in pixels to which all images are resized. Of a table's two classes
    `positive_class` comes second.
    """
    drop, dates = _listed(drop_columns), _listed(date_columns)
    data = open_data(Path(path), [id_column] if id_column else [])
    kind = kind_of(data)
    if kind != "table" and (target_column or drop or id_column or dates):
        raise InputError(f"'{path}' is no table, so it has no columns to choose. Leave those options out.")
    if kind != "table" and positive_class:
        raise InputError(f"'{path}' is no table, so --positive-class has no target to choose from. Leave it out.")
    if kind != "images" and image_size is not None:
        raise InputError(f"'{path}' is no folder of images, so image_size has nothing to resize. Leave it out.")
    if kind == "table":
        schema = _of_table(data, str(path), target_column, {*drop, *([id_column] if id_column else [])}, dates, task)
        schema = dataclasses.replace(schema, id=id_column)
        if positive_class:
            subject = f"'{path}': the target '{target_column}'"
            schema = dataclasses.replace(schema, classes=positive_last(schema.classes, positive_class, subject))
    else:
        schema = _of_arrays(data, task) if kind == "arrays" else _of_images(data, task, image_size)
    return Schema.of(schema.to_json(), f"The schema of '{path}'")


def _listed(names: Sequence[str] | str) -> list[str]:
    """Return names that are given as a list, or as a text with commas."""
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names) if name.strip()]


def _of_table(
    frame: pd.DataFrame, where: str, target: str, unused: set[str], dates: list[str], task: str | None
) -> Schema:
    if not target:
        raise InputError(f"'{where}' is a table: name the column to predict (--target-column).")
    for name in (target, *sorted(unused), *dates):
        if name not in frame.columns:
            raise InputError(f"'{where}' has no column '{name}'.{nearest(name, map(str, frame.columns))}")
    if target in unused or target in dates or unused & set(dates):
        raise InputError(f"'{where}': a column has two uses. The target, dates and columns left out are different.")
    refuse_gaps(frame[target], f"'{where}': the target '{target}' has no value")
    task = choose_task(frame[target], target, task)
    names = [str(name) for name in frame.columns if name != target and name not in unused]
    columns = {name: _column(frame[name], name, name in dates) for name in names}
    if task == "regression":
        shift, scale = rounded(numbers(frame[target], target))
        return Schema("table", task, (), target, columns, target_shift=(shift,), target_scale=(scale,))
    return Schema("table", task, _classes(frame[target], target), target, columns)


def _column(values: pd.Series, name: str, date: bool) -> Column:
    if int(values.notna().sum()) < LEAST_ROWS_TO_REVEAL:
        raise InputError(
            f"Column '{name}' has a value in fewer than {LEAST_ROWS_TO_REVEAL} rows. Leave it out "
            f"(--drop-columns {name})."
        )
    if date:
        parsed = parse_dates(values, name)
        years = clock(parsed)["year"]
        shift, scale = rounded(years)
        return Column("date", shift, scale, shift, bool(np.isnan(years).any()), times=has_times(parsed))
    if is_numeric(values, name):
        known = numbers(values, name)
        shift, scale = rounded(known)
        return Column("number", shift, scale, shift, bool(np.isnan(known).any()))
    words = shared_words(as_text(values))
    if not 0 < len(words) <= MAX_CATEGORIES:
        raise InputError(
            f"Column '{name}' has {len(words)} words that {LEAST_ROWS_TO_REVEAL} rows share: it seems to hold "
            f"identifiers or free text. Leave it out (--drop-columns {name}), or turn it into at most {MAX_CATEGORIES} "
            "categories."
        )
    return Column("words", words=words)


def _classes(values: pd.Series, target: str) -> tuple[str, ...]:
    """Return the classes of a target: all whole numbers, or the words that enough rows share."""
    if is_numeric(values, target):
        found = np.unique(numbers(values, target))
        if not (np.floor(found) == found).all():
            raise InputError(f"The target '{target}' has fractions, so it is no class. Use task='regression'.")
        classes = tuple(str(int(value)) for value in found)
    else:
        classes = shared_words(as_text(values))
    if len(classes) < 2:
        raise InputError(
            f"The target '{target}' has {len(classes)} classes that {LEAST_ROWS_TO_REVEAL} rows share; a "
            "classification has two or more."
        )
    return classes


def _of_arrays(data: dict[str, np.ndarray], task: str | None) -> Schema:
    x, raw = as_features(data["x_train"], "x_train"), np.asarray(data["y_train"])
    task = check_task(task, [raw])
    y = as_targets(raw, task, "y_train")
    targets = 1 if task == "classification" else y.shape[1]
    count = int(y.max(initial=0)) + 1 if task in ("classification", "sequence") else 0
    classes = tuple(str(number) for number in range(max(2, count))) if count else ()
    if x.dtype == np.uint8:
        norm: list[tuple[float, float]] = [(BYTES[0], BYTES[0])]
    else:
        norm = [rounded(column) for column in x.T] if x.ndim == 2 else [rounded(x.reshape(-1))]
    shift, scale = zip(*norm, strict=True)
    extra: dict[str, Any] = {}
    if task == "regression":
        extra["target_shift"], extra["target_scale"] = zip(*(rounded(column) for column in y.T), strict=True)
    shape = tuple(x.shape[1:])
    return Schema("arrays", task, classes, "", {}, shape, str(x.dtype), targets, shift, scale, **extra)


def _of_images(files: Sequence[Any], task: str | None, size: int | None) -> Schema:
    if task not in (None, "classification"):
        raise InputError(f"A folder of images has classes, so the task is classification, not {task!r}.")
    if size is not None and checked_integer(size, "image_size") > LARGEST_SIZE:
        raise InputError(f"image_size is {size}; at most {LARGEST_SIZE} pixels are read.")
    recipe = ImageRecipe.fit(files, size)
    shape, names = recipe.shape, recipe.class_names
    return Schema(
        "images", "classification", names, "", {}, shape, "uint8", 1, BYTES, BYTES, mode=recipe.mode,
        resized=recipe.resized,
    )  # fmt: skip


def rounded(values: np.ndarray) -> tuple[float, float]:
    """Return the rounded mean and deviation of the numbers that are not NaN, as a shift and a scale."""
    known = values[~np.isnan(values)].astype(np.float64)
    mean, deviation = float(known.mean()), float(known.std())
    if not deviation > 1e-12 * abs(mean) + 1e-30:
        return _digits(mean, 4), 1.0
    step = 10.0 ** math.floor(math.log10(deviation / 2))
    return float(f"{round(mean / step) * step:.12g}"), _digits(deviation, 2)


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
