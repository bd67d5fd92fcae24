"""Normalise by the data of all sites: sums that a site may send, and the schema that the server makes from them.

A number v counts as z = (v - shift) / scale, with the numbers of the schema, so that sums lose no digits to a large
mean. A site sends n, the sum of z and the sum of its squares; of images, how often each of the 256 bytes occurs. With
N, S and Q, the totals over sites:

    mean = shift + scale S / N        deviation = scale sqrt(Q / N - (S / N)^2)

Sums of fewer than `LEAST_ROWS_TO_REVEAL` values are never sent. A median is rounded to a twentieth of the column's own
deviation, or of the schema's scale if that is larger: the server chooses the scale, and so cannot ask for the exact
value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import is_number, is_whole
from ..data.arrays import as_features, as_targets
from ..data.dates import clock, parse_dates
from ..data.recipe import MAX_CATEGORIES, as_text, numbers
from ..errors import InputError
from .schema_types import MOST_WORD, Column, Schema
from .settings import SiteSettings
from .site_check import LEAST_ROWS_TO_REVEAL, shared_words
from .site_data import divide

Sums = list[float]  # n, sum, sum of squares
MOST_NEW_WORDS = 64  # the most new words of one column from one site


# -- at a site --------------------------------------------------------------------------------------------------------
def site_sums(schema: Schema, data: Any, settings: SiteSettings, seed: int) -> dict[str, Any]:
    """Return the sums of a site's training rows as JSON facts, with medians and words if the site allows them."""
    if schema.kind == "table":
        return _table_sums(schema, data, settings, seed)
    facts: dict[str, Any] = {}
    if schema.kind == "images":
        files = [each.file for each in data if not each.test]
        x = schema.image_recipe().read(files)
    else:
        x = as_features(data["x_train"], "x_train")
        if schema.task == "regression":
            y = as_targets(np.asarray(data["y_train"]), schema.task, "y_train")
            facts["target"] = [_sums(y[:, i], *pair) for i, pair in enumerate(_pairs(schema, "target_"))]
    if x.dtype == np.uint8:
        facts["bytes"] = [np.bincount(x[:, i].reshape(-1), minlength=256).tolist() for i in range(x.shape[1])]
        return facts
    columns = list(x.T) if x.ndim == 2 and len(schema.shift) > 1 else [x.reshape(-1)]
    facts["inputs"] = [_sums(column, *pair) for column, pair in zip(columns, _pairs(schema), strict=True)]
    return facts


def _pairs(schema: Schema, prefix: str = "") -> list[tuple[float, float]]:
    return list(zip(getattr(schema, f"{prefix}shift"), getattr(schema, f"{prefix}scale"), strict=True))


def _sums(values: np.ndarray, shift: float, scale: float) -> Sums:
    """Return n, sum and sum of squares of (values - shift) / scale of the known values; zeros if too few."""
    known = values[~np.isnan(values)].astype(np.float64)
    if len(known) < LEAST_ROWS_TO_REVEAL:
        return [0, 0.0, 0.0]
    z = (known - shift) / scale
    return [len(z), math.fsum(z), math.fsum(z * z)]


def _table_sums(schema: Schema, frame: Any, settings: SiteSettings, seed: int) -> dict[str, Any]:
    train, _ = divide(settings, schema.target, bool(schema.classes), frame, seed)
    frame = frame.iloc[np.sort(train.index)]
    facts: dict[str, Any] = {"columns": {}, "medians": {}, "words": {}}
    for name, column in schema.columns.items():
        if column.kind == "words":
            if settings.allow_words:
                new = sorted(set(shared_words(as_text(frame[name]))) - set(column.words))
                facts["words"][name] = [word for word in new if len(word) <= MOST_WORD][:MOST_NEW_WORDS]
            continue
        values = _values(frame, name, column)
        facts["columns"][name] = _sums(values, column.shift, column.scale)
        known = values[~np.isnan(values)]
        if settings.allow_medians and len(known) >= LEAST_ROWS_TO_REVEAL:
            step = max(column.scale, float(known.std())) / 20  # coarse, because a median is the value of a row
            facts["medians"][name] = float(f"{round(float(np.median(known)) / step) * step:.6g}")
    if schema.task == "regression":
        pair = schema.target_shift[0], schema.target_scale[0]
        facts["target"] = [_sums(numbers(frame[schema.target], schema.target), *pair)]
    return facts


def _values(frame: Any, name: str, column: Column) -> np.ndarray:
    if column.kind == "date":
        return clock(parse_dates(frame[name], name))["year"]
    return numbers(frame[name], name)


# -- at the server ----------------------------------------------------------------------------------------------------
def check_sums(schema: Schema, facts: Any, most: int) -> str:
    """Return why a site's sums cannot be used, or "". A site has at most `most` samples."""
    try:
        wanted: set[str] = {"target"} if schema.task == "regression" else set()
        if schema.kind == "table":
            numeric = {name for name, column in schema.columns.items() if column.kind != "words"}
            words = schema.columns.keys() - numeric
            groups = list(facts["columns"].values())
            fits = facts["columns"].keys() == numeric and facts.keys() - wanted == {"columns", "medians", "words"}
            fits &= facts["medians"].keys() <= numeric and all(_finite(each) for each in facts["medians"].values())
            fits &= facts["words"].keys() <= words and all(_few_words(each) for each in facts["words"].values())
        else:
            key = "bytes" if schema.type == "uint8" else "inputs"
            groups = list(facts["inputs"]) if key == "inputs" else []
            count = schema.shape[0] if key == "bytes" else len(schema.shift)
            fits = facts.keys() - wanted == {key} and len(facts[key]) == count
            fits &= key == "inputs" or all(_is_histogram(each, most * math.prod(schema.shape)) for each in facts[key])
            most *= math.prod(schema.shape)
        if wanted:
            groups += facts["target"]
            fits &= len(facts["target"]) == len(schema.target_shift)
        return "" if fits and all(_are_sums(each, most) for each in groups) else "Its sums are not those of the schema."
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        return "Its sums are damaged."


def _finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and abs(value) < 1e30


def _are_sums(each: Any, most: int) -> bool:
    """Return whether numbers can be n, sum and sum of squares: S² <= n Q up to rounding."""
    if not isinstance(each, list) or len(each) != 3 or not is_whole(each[0]) or not all(_finite(v) for v in each):
        return False
    n, total, squares = each
    return 0 <= n <= most and squares >= 0 and total * total <= n * squares * (1 + 1e-9) + 1e-30


def _is_histogram(each: Any, most: int) -> bool:
    return isinstance(each, list) and len(each) == 256 and all(is_whole(v) and 0 <= v <= most for v in each)


def _few_words(words: Any) -> bool:
    return (
        isinstance(words, list)
        and len(words) <= MOST_NEW_WORDS
        and all(isinstance(word, str) and 0 < len(word) <= MOST_WORD and word.isprintable() for word in words)
    )


def pooled_schema(schema: Schema, sites: Sequence[Mapping[str, Any]]) -> Schema:
    """Return the schema with the means and deviations of all sites' checked sums, in the order of the sites.

    A missing number becomes the pooled mean or, where sites sent medians, the median of these, weighted by their rows.
    Words that sites sent are added to a category while it has room for them.
    """
    changes: dict[str, Any] = {}
    if schema.kind == "table":
        changes["columns"] = {name: _pooled_column(name, each, sites) for name, each in schema.columns.items()}
    elif schema.type == "uint8":
        totals = np.sum([np.array(facts["bytes"], dtype=object) for facts in sites], axis=0)
        moments = [_byte_moments([int(count) for count in channel]) for channel in totals]
        changes["shift"], changes["scale"] = zip(*moments, strict=True)
    else:
        pairs = _pairs(schema)
        moments = [_moments([facts["inputs"][i] for facts in sites], *pair) for i, pair in enumerate(pairs)]
        changes["shift"], changes["scale"] = zip(*moments, strict=True)
    if schema.task == "regression":
        pairs = _pairs(schema, "target_")
        moments = [_moments([facts["target"][i] for facts in sites], *pair) for i, pair in enumerate(pairs)]
        changes["target_shift"], changes["target_scale"] = zip(*moments, strict=True)
    return Schema.of(dataclasses.replace(schema, **changes).to_json(), "The pooled schema")


def unpooled(schema: Schema) -> dict[str, Any]:
    """Return those facts of a schema that `pooled_schema` never changes."""
    facts = schema.to_json()
    for part in (facts, *facts.get("columns", {}).values()):
        for key in ("shift", "scale", "fill", "words", "target_shift", "target_scale"):
            part.pop(key, None)
    return facts


def _pooled_column(name: str, column: Column, sites: Sequence[Mapping[str, Any]]) -> Column:
    if column.kind == "words":
        new = sorted({word for facts in sites for word in facts["words"].get(name, [])} - set(column.words))
        return dataclasses.replace(column, words=(*column.words, *new)[:MAX_CATEGORIES])
    sums = [facts["columns"][name] for facts in sites]
    if not sum(each[0] for each in sums):
        return column
    shift, scale = _moments(sums, column.shift, column.scale)
    medians = sorted((facts["medians"][name], facts["columns"][name][0]) for facts in sites if name in facts["medians"])
    return dataclasses.replace(column, shift=shift, scale=scale, fill=_weighted_median(medians) if medians else shift)


def _weighted_median(pairs: Sequence[tuple[float, int]]) -> float:
    """Return the weighted median: the first of ascending values up to which at least half of the weight lies."""
    half, total = sum(weight for _, weight in pairs) / 2, 0
    for value, weight in pairs:
        total += weight
        if total >= half:
            return value
    return pairs[-1][0]


def _moments(sums: Sequence[Sums], shift: float, scale: float) -> tuple[float, float]:
    """Return the mean and the deviation (never 0) of all values whose sums these are."""
    n = sum(each[0] for each in sums)
    if not n:
        return shift, scale
    mean = math.fsum(each[1] for each in sums) / n
    square = math.fsum(each[2] for each in sums) / n
    variance, centre = square - mean * mean, shift + scale * mean
    # A variance within rounding error means a constant column: it is shifted to zero and left unscaled.
    deviation = scale * math.sqrt(variance) if variance > 1e-13 * square else 0.0
    return centre, deviation if deviation > 1e-12 * abs(centre) + 1e-30 else 1.0


def _byte_moments(counts: Sequence[int]) -> tuple[float, float]:
    """Return the exact mean and deviation (never 0) of bytes, from how often each occurs."""
    n = sum(counts)
    if not n:
        raise InputError("No site sent an image.")
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    variance = (squares * n - total * total) / (n * n)  # whole numbers: exact up to the division
    return total / n, math.sqrt(variance) if variance > 0 else 1.0
