"""What the columns of a table hold, over all rows and at every client: kinds, gaps and ranges.

`fedabml data inspect` shows this before anything is trained, so nothing here refuses a column: what training would
refuse is kept as the column's `problem`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from .arrays import FEW_CLASSES
from .columns import as_text, is_numeric, numbers
from .dates import parse_dates
from .encode import TableOptions
from .frames import pandas
from .recipe import MAX_CATEGORIES, choose_task
from .rows import Rows

if TYPE_CHECKING:
    import pandas as pd

MOST_CLIENTS = 1000  # that are summarised one by one
QUANTILES = (0.05, 0.5, 0.95)
COLUMN_KINDS = ("numbers", "whole numbers", "words", "dates", "unclear")


@dataclass(frozen=True)
class Summary:
    """The values of a column in some rows: the share of gaps, and either three quantiles or the commonest value."""

    gaps: float
    quantiles: tuple[Any, ...] = ()  # 5%, 50% and 95%: numbers, or dates as text
    different: int = 0
    commonest: str = ""
    share: float = 0.0  # of the commonest value, among the values that are there

    @property
    def without_gaps(self) -> Summary:
        """The summary of the values that are there."""
        return replace(self, gaps=0.0)

    @property
    def text(self) -> str:
        """The summary in a few words: `61 [35, 88]` or `surgery 34% of 5`; a gap's share follows."""
        gaps = f", {self.gaps:.0%} gaps" if self.gaps else ""
        if not self.different:
            return "no value"
        if not self.quantiles:
            word = f"{self.commonest} {self.share:.0%} of " if self.commonest else ""
            return f"{word}{self.different}{'' if word else ' different'}{gaps}"
        low, middle, high = (end if isinstance(end, str) else f"{end:.4g}" for end in self.quantiles)
        return f"{middle} [{low}, {high}]{gaps}"


@dataclass(frozen=True)
class ColumnProfile:
    """One column: what it is used for, what it holds, and why training would refuse it, if it would."""

    name: str
    use: str  # feature, client, target, ID, date, left out, split
    kind: str  # one of `COLUMN_KINDS`
    total: Summary
    clients: tuple[Summary, ...]
    problem: str = ""


def profile_columns(frame: pd.DataFrame, options: TableOptions, owners: Rows) -> list[ColumnProfile]:
    """Return the profile of every column, in the table's order, with the first `MOST_CLIENTS` of `owners`."""
    uses: dict[str | None, str]
    uses = {options.client: "client", options.target: "target", options.id: "ID", options.split_by: "split"}
    uses |= {**dict.fromkeys(options.dates, "date"), **dict.fromkeys(options.drop, "left out")}
    profiles = []
    for name in map(str, frame.columns):
        use, column = uses.get(name, "feature"), frame[name]
        kind, values, problem = _values(column, name, use)
        counted = kind in ("words", "unclear") or (kind == "whole numbers" and len(np.unique(values)) <= FEW_CLASSES)
        texts = np.array(as_text(column), object) if counted else None

        def summary(rows: np.ndarray, values: Any = values, texts: Any = texts) -> Summary:
            return _quantiles(values[rows]) if texts is None else _commonest(texts[rows])

        per_client = [summary(owners[i]) for i in range(min(len(owners), MOST_CLIENTS))]
        total = summary(np.arange(len(frame)))
        if use == "ID" or (counted and total.different > MAX_CATEGORIES):  # a page names no person
            total, *per_client = (replace(counts, commonest="") for counts in (total, *per_client))
        if use in ("feature", "target") and kind == "words" and not problem and total.different > MAX_CATEGORIES:
            problem = (
                f"Column '{name}' has {total.different} different words. It looks like an identifier or free text."
            )
        if use == "target" and not problem:
            problem = _task_problem(column, name, options.task)
        profiles.append(ColumnProfile(name, use, kind, total, tuple(per_client), problem))
    return profiles


def _task_problem(column: pd.Series, name: str, task: str | None) -> str:
    """Return why training would refuse to choose a task for the target; "" if it would not."""
    if not column.notna().all():
        return ""
    try:
        choose_task(column, name, task)
    except InputError as error:
        return str(error)
    return "" if column.nunique() > 1 else f"The target '{name}' has one value in all rows: there is nothing to learn."


def _values(column: pd.Series, name: str, use: str) -> tuple[str, Any, str]:
    """Return the kind of a column, its values [n] where they are numbers or dates, and why training would refuse it."""
    problem, numeric = "", False
    try:
        if use == "date" or (pandas().api.types.is_datetime64_any_dtype(column) and use != "feature"):
            return "dates", parse_dates(column, name), ""
        numeric = is_numeric(column, name)
        if numeric:
            values = numbers(column, name)
            present = values[~np.isnan(values)]
            return ("whole numbers" if (present == np.floor(present)).all() else "numbers"), values, ""
    except InputError as error:
        problem = str(error) if use in ("feature", "target", "date") else ""
    if not problem and use not in ("date", "split"):
        return "words", None, ""
    try:
        return "dates", parse_dates(column, name), problem
    except InputError as error:
        return "unclear", None, str(error) if use == "split" else problem


def _quantiles(values: np.ndarray) -> Summary:
    """Summarise numbers, float64 [n] with NaN, or dates, datetime64 [n] with NaT."""
    dates = values.dtype.kind == "M"
    present = values[~(np.isnat(values) if dates else np.isnan(values))]
    gaps = 1 - len(present) / max(1, len(values))
    if not len(present):
        return Summary(gaps)
    ends = np.quantile(
        present.astype(np.int64) if dates else present, QUANTILES, method="nearest" if dates else "linear"
    )
    shown = tuple(str(np.datetime64(int(e), "s").astype("datetime64[D]")) for e in ends) if dates else map(float, ends)
    return Summary(gaps, tuple(shown), len(np.unique(present)))


def _commonest(texts: np.ndarray) -> Summary:
    """Summarise words, object [n] with "" in the gaps."""
    counts = Counter(text for text in texts if text)
    words = sum(counts.values())
    gaps = 1 - words / max(1, len(texts))
    if not words:
        return Summary(gaps)
    word, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return Summary(gaps, (), len(counts), word, count / words)
