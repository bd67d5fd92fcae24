"""What there is to know about a table before training: its columns, and warnings of what makes scores untrue.

    found = fedabml.inspect_table("patients.csv", client="hospital", target="died", id="patient")
    print("\\n".join(found.warnings))

A score is too good to be true if a column holds the target under another name, if the same rows or people are at two
clients, or if rows of one person train and test. A column in another unit at one client makes it worse. Each warning is
a question to whoever knows the data, not a verdict.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import checks_arguments, flag_value
from ..data.columns import Columns, as_text, numbers, refuse_gaps
from ..data.dates import parse_dates
from ..data.encode import (
    TableOptions,
    alike_notes,
    alike_words_notes,
    clients_of,
    date_note,
    identifier_note,
    identifiers,
    merged_clients_notes,
    numbers_of_dates,
    rare_class_notes,
)
from ..data.frames import as_frame, pandas
from ..data.profile import COLUMN_KINDS, ColumnProfile, profile_columns
from ..data.rows import Rows
from .decisions import auroc
from .duplicates import NAMED, Chance, agreement, repeated_rows, shared_rows

if TYPE_CHECKING:
    import pandas as pd

NEARLY = 0.99  # AUROC, or rank correlation, from which one column alone nearly predicts the target
LEAST_ROWS_OF_CLASS = 10  # of a class, below which a column is not said to predict it
BINS = 20  # of a column of numbers, for more than two classes
LEAST_REPEATED, LEAST_DIFFERENT = 3, 5  # rows with the mark of a missing value; different values beside it
OTHER_UNIT = 5.0  # times as large as elsewhere, from which a client's median looks like another unit


@dataclass(frozen=True)
class Inspection:
    """The columns of a table, its clients, and warnings: sentences that name a column or clients, and the way out."""

    dataset: str
    clients: tuple[str, ...]
    rows: tuple[int, ...]  # of every client
    columns: tuple[ColumnProfile, ...]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        size = f"{sum(self.rows)} rows, {len(self.clients)} clients, {len(self.columns)} columns"
        return f"Inspection({self.dataset}: {size}, {len(self.warnings)} warnings)"

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and words."""
        return {"version": 1, **asdict(self)}


@checks_arguments
def inspect_table(
    path: str | os.PathLike[str] | pd.DataFrame,
    *,
    client: str,
    target: str,
    drop: Sequence[str] | str = (),
    id: str | None = None,
    dates: Sequence[str] | str = (),
    split_by: str | None = None,
    task: str | None = None,
) -> Inspection:
    """Look at a table without training: its columns, and what `warnings` should be answered first.

    The arguments are those of `fedabml.read_table`. A column that training would refuse is among the warnings.
    """
    named = isinstance(path, str | os.PathLike)
    source, frame = str(path) if named else "The table", as_frame(path, (id,) if id else ())
    options = TableOptions(client, target, task, drop=drop, id=id, dates=dates, split_by=split_by)
    options.check(frame, source)
    for name in (client, target):
        refuse_gaps(frame[name], f"{source}: column '{name}' has no value")
    names, owners = clients_of(frame[client])
    columns = profile_columns(frame, options, owners)
    features = [column for column in columns if column.use in ("feature", "date")]
    goal = next(column for column in columns if column.name == target)
    warnings = [column.problem for column in columns if column.problem]
    warnings += merged_clients_notes(frame[client])
    few_values = goal.kind == "words" or (goal.kind == "whole numbers" and not goal.total.quantiles)
    if task == "classification" or (task is None and few_values):
        labels = as_text(frame[target])
        warnings += alike_notes(f"The target '{target}'", set(labels)) if goal.kind == "words" else []
        warnings += rare_class_notes(target, labels)
    numbered = identifiers(
        Columns(frame), owners, [c.name for c in features if c.kind in COLUMN_KINDS[:3] and not c.problem]
    )
    dated = numbers_of_dates(Columns(frame), [c.name for c in features if c.kind == "whole numbers"])
    warnings += map(date_note, dated)
    warnings += [identifier_note(name) for name in numbered if name not in dated]
    usable = [column for column in features if column.kind in COLUMN_KINDS[:4] and column.name not in numbered]
    for column in usable:
        if column.kind == "words" and not column.problem:
            warnings += alike_words_notes(column.name, set(as_text(frame[column.name])))
        elif column.kind in ("numbers", "whole numbers"):
            warnings += _sentinels(column.name, numbers(frame[column.name], column.name))
    warnings += [text for column in usable for text in _leak(frame, column, goal)]
    warnings += _shared_rows(frame.drop(columns=[client, *([id] if id else [])]), owners, names)
    warnings += _shared_ids(frame[id], owners, names) if id else []
    warnings += [text for column in usable for text in _other_units(column, names)]
    dataset = Path(str(path)).stem if named else "table"
    return Inspection(dataset, names, tuple(owners.counts.tolist()), tuple(columns), tuple(warnings))


def _leak(frame: pd.DataFrame, column: ColumnProfile, target: ColumnProfile) -> Iterator[str]:
    """Yield a warning if a column, or its gaps, tells the target by itself."""
    name, goal = column.name, target.name
    way = f"Leave it out (--drop-columns {flag_value([name])}) unless it is known before '{goal}' is."
    if target.kind == "numbers" or (target.kind == "whole numbers" and target.total.quantiles):
        if column.kind == "words":
            return
        x, y = _measured(frame[name], column), numbers(frame[goal], goal)
        both = ~np.isnan(x) & ~np.isnan(y)
        if both.sum() < LEAST_ROWS_OF_CLASS:
            return
        if np.array_equal(x[both], y[both]):
            yield f"Column '{name}' equals the target '{goal}'. {way}"
        elif (tied := abs(_correlation(_ranks(x[both]), _ranks(y[both])))) >= NEARLY:
            yield f"Column '{name}' alone nearly predicts '{goal}' (rank correlation {tied:.3f}). {way}"
        return
    texts, labels = as_text(frame[name]), as_text(frame[goal])
    values, code = np.unique(texts, return_inverse=True)
    classes, y = np.unique(labels, return_inverse=True)
    pairs = len(np.unique(code * len(classes) + y))
    if pairs == len(values) and 2 * len(values) <= len(texts):
        one_to_one = pairs == len(classes)
        relation = "equals" if texts == labels else "determines one-to-one" if one_to_one else "determines"
        yield f"Column '{name}' {relation} the target '{goal}' in every row. {way}"
        return
    gaps = np.array([not text for text in texts])
    score = _measured(frame[name], column) if column.kind != "words" else None
    area = _auroc_of_column(code, score, y, len(classes))
    if area >= NEARLY:
        yield f"Column '{name}' alone nearly predicts '{goal}' (AUROC {area:.3f}). {way}"
    elif gaps.any() and (area := _auroc_of_column(gaps.astype(np.int64), None, y, len(classes))) >= NEARLY:
        yield f"Whether '{name}' has a value nearly predicts '{goal}' (AUROC {area:.3f}). {way}"


def _measured(values: pd.Series, column: ColumnProfile) -> np.ndarray:
    """Return a column of numbers, or the seconds of one of dates, float64 [n] with NaN in the gaps."""
    if column.kind != "dates":
        return numbers(values, column.name)
    dates = parse_dates(values, column.name)
    return np.where(np.isnat(dates), np.nan, dates.astype(np.float64))


def _auroc_of_column(code: np.ndarray, score: np.ndarray | None, y: np.ndarray, classes: int) -> float:
    """Return the AUROC of the target's classes [n] given one column alone; 0 where classes are too small to tell.

    Numbers are their own `score` [n] if there are two classes; else each value (or a bin of numbers) is scored by its
    class frequencies among the other half of the rows, so that a column of many values does not know its own rows.
    """
    counts = np.bincount(y, minlength=classes)
    if classes < 2 or counts.min() < LEAST_ROWS_OF_CLASS:
        return 0.0
    best = 0.0
    if score is not None:
        is_number = ~np.isnan(score)
        if np.bincount(y[is_number], minlength=classes).min() < LEAST_ROWS_OF_CLASS:
            return 0.0
        code, y, score = code[is_number], y[is_number], score[is_number]
        if classes == 2:
            area = auroc(score, y == 1)
            best = max(area, 1 - area)
        edges = np.unique(np.quantile(score, np.linspace(0, 1, BINS + 1)[1:-1]))
        code = np.searchsorted(edges, score)
    place = np.empty(len(y), np.int64)
    order = np.argsort(y, kind="stable")
    place[order] = np.arange(len(y)) - (np.cumsum(np.bincount(y, minlength=classes)) - np.bincount(y))[y[order]]
    half = place % 2  # every class gives half of its rows to either half
    rates = np.empty((len(y), classes))
    for side in (0, 1):
        other_half, this_half = half != side, half == side
        table = np.bincount(code[other_half] * classes + y[other_half], minlength=(code.max() + 1) * classes)
        table = table.reshape(-1, classes) + counts / counts.sum()
        rates[this_half] = (table / table.sum(1, keepdims=True))[code[this_half]]
    columns = range(classes) if classes > 2 else (1,)
    return max(best, float(np.mean([auroc(rates[:, c], y == c) for c in columns])))


def _sentinels(name: str, values: np.ndarray) -> Iterator[str]:
    """Yield a warning for a repeated lowest or highest value [n] that lies farther off than all others are wide."""
    different, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    if len(different) < LEAST_DIFFERENT + 2:
        return
    low, high = (int(counts[end] >= LEAST_REPEATED) for end in (0, -1))
    others = different[low : len(different) - high]
    span = others[-1] - others[0]
    for end, apart in ((0, others[0] - different[0]), (-1, different[-1] - others[-1])):
        if apart > span:
            yield (
                f"Column '{name}' has the value {different[end]:g} in {counts[end]} rows, far outside of all others "
                f"({others[0]:g} to {others[-1]:g}): does it mark a missing value? Leave such cells empty."
            )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values [n]; equal values share their mean rank."""
    _, code, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[code]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def _shared_rows(frame: pd.DataFrame, owners: Rows, names: Sequence[str]) -> list[str]:
    """Return warnings if clients have more identical rows in common, or one client alone, than chance explains."""
    frame = frame.astype(str)
    hashes = pandas().util.hash_pandas_object(frame, index=False).to_numpy()
    codes = np.unique(hashes, return_inverse=True)[1].reshape(-1)[owners.index]
    frequency = np.ones(len(frame))
    for name in frame:
        _, code, times = np.unique(frame[name].to_numpy(str), return_inverse=True, return_counts=True)
        frequency *= times[code] / len(frame)
    alike = np.bincount(owners.owner, frequency[owners.index], len(owners))  # a row elsewhere that is one of a client's
    shared = shared_rows(codes, owners.owner, names, Chance(agreement(codes, owners.owner), alike))
    return [*shared, *repeated_rows(codes, owners.owner, frequency[owners.index], names)]


def _shared_ids(column: pd.Series, owners: Rows, names: Sequence[str]) -> list[str]:
    """Return warnings about identifiers at several clients, and about those with several rows at one client."""
    texts = np.array(as_text(column), object)[owners.index]
    rows = Counter(zip(texts.tolist(), owners.owner.tolist(), strict=True))
    holders: dict[str, list[int]] = {}
    for text, client in rows:
        if text:
            holders.setdefault(text, []).append(client)
    shared = Counter(pair for clients in holders.values() for pair in combinations(sorted(clients[:100]), 2))
    warnings = []
    if shared:
        most = [f"'{names[a]}' and '{names[b]}' ({count})" for (a, b), count in shared.most_common(NAMED)]
        count = sum(len(clients) > 1 for clients in holders.values())
        warnings.append(
            f"{count} value{'s' * (count != 1)} of the ID column '{column.name}' occur at more than one client, most "
            f"often at {', '.join(most)}. If they mean the same person, keep each at one client."
        )
    repeated = sum(n > 1 for (text, _), n in rows.items() if text)
    if repeated:
        warnings.append(
            f"{repeated} value{'s' * (repeated != 1)} of the ID column '{column.name}' occur in several rows of one "
            "client, so one person's rows may both train and test. Keep one row of each, or split by time (--split-by)."
        )
    return warnings


def _other_units(column: ColumnProfile, names: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each client whose numbers look as if they had another unit than those of the others."""
    if column.kind == "dates" or not column.total.quantiles or len(names) < 3:
        return
    positive = [
        (i, client.quantiles) for i, client in enumerate(column.clients) if client.quantiles and client.quantiles[0] > 0
    ]
    if len(positive) < max(3, len(names) // 2):
        return
    usual = float(np.median([middle for _, (_, middle, _) in positive]))
    low, high = (float(np.median([ends[side] for _, ends in positive])) for side in (0, 2))
    for i, (least, middle, most) in positive:
        apart = least > high or most < low
        if apart and not usual / OTHER_UNIT < middle < usual * OTHER_UNIT:
            yield (
                f"At '{names[i]}' the median of '{column.name}' is {middle:.4g}, elsewhere about {usual:.4g}: is it "
                "another unit? Convert it before training."
            )
