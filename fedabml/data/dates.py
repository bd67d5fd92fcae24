"""Columns of dates and times: how they become numbers that a network can use, and how they order a table's rows.

A date becomes the year with its fraction, and the month, the weekday and (if the column has times) the hour, each as
sine and cosine of its place on a circle, so that December is next to January:

    year: 2024.5 in the middle of 2024      month: sin and cos of 2π (m − 1)/12, January is 0
    hour: sin and cos of 2π h/24            weekday: sin and cos of 2π d/7, Monday is 0

Dates are ISO 8601: 2024-01-31, 2024-01-31 10:30 or 2024-01-31T10:30:00Z; a number or text may be 20240131. What
is learned is the clock at the place: the offset of a time zone is left out, so 10:30+02:00 is 10:30. The order of rows
is that of UTC. A column that has such times beside times in UTC (Z) or without any zone tells neither, and is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .frames import pandas

if TYPE_CHECKING:
    import pandas as pd

ISO = r"^(\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?)?)\s*(Z|[+-]\d{2}:?\d{2})?$"  # 1: clock, 2: zone
_EIGHT_DIGITS = r"^(\d{4})(\d{2})(\d{2})$"
_SIGNS = str.maketrans("-", "+")
_KINDS = {"": "times without a zone", "+": "times with an offset (+02:00)", "Z": "times in UTC (Z)"}
PART_NAMES = {
    "month": (
        *("January", "February", "March", "April", "May", "June"),
        *("July", "August", "September", "October", "November", "December"),
    ),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "hour": tuple(str(hour) for hour in range(24)),
}
CIRCLES = {part: len(names) for part, names in PART_NAMES.items()}


def parse_dates(column: pd.Series, name: str, utc: bool = False) -> np.ndarray:
    """Return the values of a column, datetime64[s] [n] with NaT in the gaps. Anything but ISO dates is refused.

    They are those of the clock at the place or, with `utc`, of UTC.
    """
    pd = pandas()
    if pd.api.types.is_datetime64_any_dtype(column):
        plain = column
        if column.dt.tz is not None:
            plain = (column.dt.tz_convert("UTC") if utc else column).dt.tz_localize(None)
        return plain.to_numpy().astype("datetime64[s]")
    texts = column.map(_as_text, na_action="ignore").astype(object)
    present = texts.notna().to_numpy() & (texts != "").to_numpy()
    dates = np.full(len(texts), np.datetime64("NaT"), "datetime64[s]")
    found = texts[present].astype(str).str.replace(_EIGHT_DIGITS, r"\1-\2-\3", regex=True).str.extract(ISO)
    values = pd.to_datetime(found[0].str.replace(",", "."), format="ISO8601", errors="coerce")
    if (wrong := values.isna().to_numpy()).any():
        row = np.flatnonzero(present)[np.argmax(wrong)]
        raise InputError(
            f"Column '{name}' has {texts.iloc[row]!r} in row {row + 1}, which is no ISO date such as 2024-01-31 or "
            "2024-01-31T10:30. Write its dates like this (pandas.to_datetime reads others), or leave the column out."
        )
    minutes = {zone: _minutes(zone) for zone in found[1].fillna("").unique()}
    kinds = sorted({zone[:1].translate(_SIGNS) for zone in minutes})
    if len(kinds) > 1:
        raise InputError(
            f"Column '{name}' mixes {' and '.join(_KINDS[kind] for kind in kinds)}. Write all of its times in one way."
        )
    dates[present] = values.to_numpy().astype("datetime64[s]")
    if utc:
        dates[present] -= found[1].fillna("").map(minutes).to_numpy().astype("timedelta64[m]")
    return dates


def _as_text(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value).strip()


def _minutes(zone: str) -> int:
    """Return how far a zone such as +02:00 is ahead of UTC; 0 for Z and for no zone."""
    if zone[:1] not in ("+", "-"):
        return 0
    return int(f"{zone[0]}1") * (60 * int(zone[1:3]) + int(zone[-2:]))


def looks_like_dates(column: pd.Series) -> bool:
    """Return whether a column of numbers holds dates such as 20240131."""
    values = column.dropna().astype(np.float64)
    if not len(values) or not (values.between(19000101, 21001231) & (values % 1 == 0)).all():
        return False
    texts = values.drop_duplicates().astype(np.int64).astype(str)
    return bool(pandas().to_datetime(texts, format="%Y%m%d", errors="coerce").notna().all())


def has_times(values: np.ndarray) -> bool:
    """Return whether any of the dates has a time of day other than midnight."""
    dates = values[~np.isnat(values)]
    return bool((dates.astype("datetime64[D]") != dates).any())


def clock(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return year with its fraction, month 0 to 11, weekday 0 to 6 and hour 0 to 24, float64 [n] with NaN in gaps."""
    gaps = np.isnat(values)
    seconds = np.where(gaps, np.datetime64(0, "s"), values)
    years, months, days = (seconds.astype(f"datetime64[{unit}]") for unit in "YMD")
    start, end = years.astype("datetime64[s]"), (years + 1).astype("datetime64[s]")
    parts = {
        "year": 1970 + years.astype(np.int64) + (seconds - start) / (end - start),
        "month": (months - years.astype("datetime64[M]")).astype(np.float64),
        "weekday": (days.astype(np.int64) + 3.0) % 7,  # day 0, 1970-01-01, was a Thursday
        "hour": (seconds - days) / np.timedelta64(3600, "s"),
    }
    return {part: np.where(gaps, np.nan, numbers) for part, numbers in parts.items()}


def part_names(name: str, times: bool) -> tuple[str, ...]:
    """Return the names of the columns of numbers that `name` becomes; the first is its year."""
    circles = [part for part in CIRCLES if times or part != "hour"]
    return f"{name} year", *(f"{name} {part} {side}" for part in circles for side in ("sine", "cosine"))


def part_values(values: np.ndarray, times: bool) -> list[np.ndarray]:
    """Return the columns of numbers of dates, float64 [n] each, in the order of `part_names`."""
    parts = clock(values)
    angles = [2 * np.pi * parts[part] / size for part, size in CIRCLES.items() if times or part != "hour"]
    return [parts["year"], *(side(angle) for angle in angles for side in (np.sin, np.cos))]


def usual_names(name: str, times: bool) -> tuple[str, ...]:
    """Return the names of what the ranges of a table remember of dates."""
    return tuple(f"{name} {part}" for part in ("year", *CIRCLES) if times or part != "hour")


def usual_values(name: str, values: np.ndarray, times: bool) -> dict[str, np.ndarray]:
    """Return what the ranges of a table remember of dates: the year as a number; month, weekday and hour as words."""
    parts = clock(values)

    def words(part: str) -> np.ndarray:
        return np.array([None if number != number else PART_NAMES[part][int(number)] for number in parts[part]], object)

    return {
        column: parts["year"] if column == f"{name} year" else words(column[len(name) + 1 :])
        for column in usual_names(name, times)
    }
