"""From a frame of pandas to samples, targets and the rows of every client; `Federation.from_frame` assembles them."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments import checks_arguments, flag_value
from ..errors import InputError, nearest
from .arrays import as_array, check_rounding, large_enough
from .columns import Columns, as_text, numbers, refuse_gaps
from .dates import looks_like_dates, parse_dates
from .frames import as_frame, pandas
from .ranges import LEAST
from .recipe import TableRecipe, choose_task, word_counts
from .rows import TABLE, Rows, check_share, take_newest, take_share

if TYPE_CHECKING:
    import pandas as pd

NAMED_CLASSES = 5  # of those with few rows
LEAST_ROWS_OF_IDENTIFIERS = 20  # fewer rows do not show that a column is one of identifiers
FEW_OF_CLASS, MANY_OF_CLASS = 5, 20  # a class of fewer rows is odd where another one has so many
DIFFERENT, LONG = 0.98, 6  # share of an identifier's values that differ; usual digits of one that does not run on


@dataclass(frozen=True)
class TableOptions:
    """What the columns of a table are for, and how its rows are split; see `Federation.from_frame`."""

    client: str
    target: str
    task: str | None = None
    test_share: float = 0.2
    seed: int = 0
    drop_small: bool = False
    drop: Sequence[str] = ()
    id: str | None = None
    dates: Sequence[str] = ()
    split_by: str | None = None
    positive_class: str | None = None

    def __post_init__(self) -> None:
        for name in ("drop", "dates"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    def check(self, frame: pd.DataFrame, source: str) -> None:
        """Refuse columns that are not there, and columns with two purposes. `source` names the table in errors."""
        check_share(self.test_share, "test")
        uses: dict[str, Sequence[str]]
        uses = {
            "the client": [self.client],
            "the target": [self.target],
            "the ID": [self.id] if self.id is not None else [],
        }
        uses |= {"left out": self.drop, "a date to learn from": self.dates}
        split = {"what rows are split by": [self.split_by] if self.split_by is not None else []}
        for name in (column for names in (uses | split).values() for column in names):
            if name not in frame.columns:
                raise InputError(f"{source} has no column '{name}'.{nearest(str(name), map(str, frame.columns))}")
        seen: dict[str, str] = {}
        for use, names in (uses | ({} if self.split_by in (self.id, *self.dates) else split)).items():
            for name in names:
                if seen.setdefault(name, use) != use:
                    raise InputError(f"'{name}' cannot be both {seen[name]} and {use}.")


class Encoded(NamedTuple):
    """A table as arrays: what `Federation.assemble` needs."""

    x: np.ndarray
    y: np.ndarray
    rows: tuple[Rows, Rows, Rows]
    names: tuple[str, ...]
    recipe: TableRecipe
    manifest: dict[str, Any]


def encode(table: pd.DataFrame | Columns, options: TableOptions, source: str = "The table") -> Encoded:
    """Divide the rows of a table, learn the recipe from training rows, and apply it to all of them.

    What does not depend on the seed is computed once for the same columns.
    """
    columns = Columns.of(table)
    frame, once = columns.frame, columns.parse_once
    options.check(frame, source)
    client, target = options.client, options.target
    for name in (client, target):
        refuse_gaps(frame[name], f"{source}: column '{name}' has no value")
    names, owners = once("clients", client, lambda: clients_of(frame[client]))
    kept = large_enough(owners.counts.tolist(), names, options.drop_small)
    owners, names = owners.select(kept), tuple(names[i] for i in kept)
    task = once("task", (target, options.task), lambda: choose_task(frame[target], target, options.task))
    classes = once("classes", target, lambda: _class_names(columns, target)) if task == "classification" else ()
    if len(classes) == 1:
        raise InputError(f"{source}: the target '{target}' is '{classes[0]}' in every row; there is nothing to learn.")
    if options.positive_class is not None:
        classes = positive_last(classes, options.positive_class, f"{source}: the target '{target}'")
    partition = {"kind": "natural", "column": client, "test_share": options.test_share}
    if options.split_by is not None:
        name = partition["split_by"] = options.split_by
        order = once("order", name, lambda: time_order(frame[name], name))
        train, test = take_newest(owners, options.test_share, 2, order)
    else:
        labels = columns.words(target).codes if classes else np.zeros(len(frame), np.int64)
        train, test = take_share(owners, options.test_share, 2, labels, options.seed, TABLE)
    unused = {name for name in (*options.drop, options.id, options.split_by) if name is not None} - {*options.dates}
    rows = np.sort(train.index)
    recipe = TableRecipe.fit(columns, client, target, task, classes, options.dates, rows=rows, unused=unused)
    recipe = replace(recipe, id=options.id)
    plain = tuple(name for name in recipe.table_columns if name not in recipe.dates)
    manifest: dict[str, Any] = {"partition": partition, "seed": int(options.seed)}
    running = once("identifiers", (client, names, plain), lambda: identifiers(columns, owners, plain))
    dated = once("dated", plain, lambda: numbers_of_dates(columns, plain))
    notes = [*alike_notes(f"The target '{target}'", classes), *map(date_note, dated)]
    notes += once("names", client, lambda: merged_clients_notes(frame[client]))
    notes += once("rare classes", target, lambda: rare_class_notes(target, as_text(frame[target]))) if classes else []
    notes += [identifier_note(name) for name in running if name not in dated]
    for name, known in recipe.categories.items():
        notes += alike_words_notes(name, columns.words(name).values) if name not in running else []
        rare = len(word_counts(columns.words(name), rows)) - len(known)
        if rare and name not in running:
            notes.append(
                f"Column '{name}': {rare} of its values have fewer than {LEAST} rows, so they count as 'other'."
            )
    if notes:
        manifest["notes"] = notes
    y = once("targets", (target, task, classes), lambda: checked_targets(recipe, frame[target], source))
    return Encoded(recipe.apply(columns), y, (train, Rows.empty(len(names)), test), names, recipe, manifest)


def checked_targets(recipe: TableRecipe, values: pd.Series, source: str) -> np.ndarray:
    """Return the model's targets of a column; refuse numbers that float32 rounds too much for what they vary by."""
    y = recipe.encode_target(values)
    if recipe.task == "regression":
        check_rounding([(f"{source}, column '{recipe.target}'", numbers(values, recipe.target)[:, None], y)], "target")
    return y


def clients_of(column: pd.Series) -> tuple[tuple[str, ...], Rows]:
    """Return the names of the clients in their order, and the rows of each."""
    numbered = column.dtype.kind in "iu"  # whole numbers keep their order, 9 before 10
    values = column.to_numpy() if numbered else np.array([text.strip() for text in as_text(column)])
    owners, number = np.unique(values, return_inverse=True)
    return tuple(map(str, owners.tolist())), Rows.by_owner(number.reshape(-1), len(owners))


def merged_clients_notes(column: pd.Series) -> list[str]:
    """Return a note for names of clients that differ only by blanks around them, which count as one client."""
    spellings: dict[str, set[str]] = {}
    for text in set(as_text(column)):
        spellings.setdefault(text.strip(), set()).add(text)
    merged = sorted(name for name, texts in spellings.items() if len(texts) > 1)
    if not merged:
        return []
    more = f" and {len(merged) - 1} more" if len(merged) > 1 else ""
    return [
        f"Column '{column.name}' has the client '{merged[0]}'{more} with and without blanks around the name, which "
        "count as one client. Write the names alike, or give different clients different names."
    ]


def time_order(column: pd.Series, name: str) -> np.ndarray:
    """Return float64 [n] that grows with time: the seconds of ISO dates, or plain numbers such as a year."""
    refuse_gaps(column, f"Column '{name}', by which rows are split, has no value")
    types = pandas().api.types
    if types.is_numeric_dtype(column) and not types.is_bool_dtype(column):
        return numbers(column, name)
    return parse_dates(column, name, utc=True).astype(np.int64).astype(np.float64)


@checks_arguments
def features(table: str | os.PathLike[str] | pd.DataFrame, recipe: TableRecipe) -> np.ndarray:
    """Return the model's inputs, float32 [n, features], of a file or frame."""
    return recipe.apply(as_frame(table, recipe.text_columns))


def targets(frame: pd.DataFrame, recipe: TableRecipe, values: Any = None) -> np.ndarray:
    """Return the model's targets of a frame's rows: from its target column, or from raw `values` [n] beside it."""
    if values is None:
        if recipe.target not in frame.columns:
            raise InputError(
                f"The table has no column '{recipe.target}', and no y was given: there is nothing to learn from."
                + nearest(recipe.target, map(str, frame.columns))
            )
        return recipe.encode_target(frame[recipe.target])
    raw = as_array(values, "y")
    raw = raw[:, 0] if raw.ndim == 2 and raw.shape[1] == 1 else raw
    if raw.ndim != 1 or len(raw) != len(frame):
        raise InputError(
            f"The table has {len(frame)} rows, but y has the shape {list(raw.shape)}: give one value of "
            f"'{recipe.target}' for each row."
        )
    return recipe.encode_target(pandas().Series(raw, name=recipe.target))


def positive_last(classes: Sequence[str], positive: str, subject: str) -> tuple[str, ...]:
    """Return two classes with the positive one second, as all measures and thresholds of two classes have it."""
    if len(classes) != 2:
        held = f"has {len(classes)} classes" if classes else "has numbers"
        raise InputError(f"{subject} {held}, but a positive class is one of two. Leave --positive-class out.")
    if positive not in classes:
        raise InputError(
            f"{subject} has no class '{positive}' to be the positive one: its classes are '{classes[0]}' and "
            f"'{classes[1]}'. Give --positive-class one of them."
        )
    return (*(name for name in classes if name != positive), positive)


def _class_names(columns: Columns, target: str) -> tuple[str, ...]:
    """Return the different values of the target as words, numbers in their order."""
    if columns.is_numeric(target):
        classes = np.unique(columns.numbers(target))
        if not (np.floor(classes) == classes).all():
            raise InputError(f"The target '{target}' has fractions, so it is no class. Use task='regression'.")
        return tuple(str(int(value)) for value in classes)
    names = columns.words(target).values
    if len(names) > 1000:
        raise InputError(f"The target '{target}' has {len(names)} different values: too many to be classes.")
    return names


def alike_notes(subject: str, values: Iterable[str], kind: str = "classes") -> list[str]:
    """Return a note for values of a column that differ only by blanks or capitals, which are classes of their own."""
    groups: dict[str, list[str]] = {}
    for value in sorted(values):
        groups.setdefault(" ".join(value.casefold().split()), []).append(f"'{value}'")
    return [
        f"{subject} has the values {' and '.join(alike)}, which differ only by blanks or capitals. They "
        f"count as different {kind}. Write them alike."
        for alike in groups.values()
        if len(alike) > 1
    ]


def alike_words_notes(name: str, values: Iterable[str]) -> list[str]:
    """Return a note for the words of a feature that differ only by blanks or capitals: the first, and how many more."""
    first, *others = alike_notes(f"Column '{name}'", values, "words") or [""]
    more = f" So do {len(others)} more of its words." if others else ""
    return [f"{first}{more}"] if first else []


def rare_class_notes(target: str, labels: Iterable[str]) -> list[str]:
    """Return a note for each class of fewer than 5 rows in all, which may be a typing error; `labels` has every row's.

    Where no class has 20 rows, the table is small, and no class is named.
    """
    counts = Counter(labels)
    if max(counts.values(), default=0) < MANY_OF_CLASS:
        return []
    return [
        f"The target '{target}': class '{name}' has {count} row{'s' * (count != 1)}; is it a typing error? It counts "
        "as a class of its own. Correct the value or leave the row out."
        for name, count in sorted(counts.items())
        if count < FEW_OF_CLASS
    ][:NAMED_CLASSES]


def identifiers(columns: Columns, owners: Rows, names: Iterable[str]) -> list[str]:
    """Return which of the columns look like identifiers: words, or running or long whole numbers, nearly all different.

    Numbers that run on within each client count, too, because a hospital numbers its own patients.
    """
    index, owner = owners.index, owners.owner
    identifying = []
    for name in names if len(index) >= LEAST_ROWS_OF_IDENTIFIERS else ():
        if not columns.is_numeric(name):
            words = columns.words(name)
            codes = words.codes[index]
            codes = codes[codes != words.values.index("")] if "" in words.values else codes
            if len(codes) >= LEAST_ROWS_OF_IDENTIFIERS and len(np.unique(codes)) >= DIFFERENT * len(codes):
                identifying.append(name)
            continue
        values = columns.numbers(name)[index]
        present = ~np.isnan(values)
        if (values[present] == np.floor(values[present])).all() and any(
            _runs_on(values[present], group[present]) for group in (np.zeros_like(owner), owner)
        ):
            identifying.append(name)
    return identifying


def numbers_of_dates(columns: Columns, names: Iterable[str]) -> list[str]:
    """Return which of the columns hold numbers such as 20240131."""
    frame = columns.frame
    return [name for name in names if columns.is_numeric(name) and looks_like_dates(frame[name])]


def _runs_on(values: np.ndarray, group: np.ndarray) -> bool:
    """Return whether whole numbers are nearly all different within their group, and running or of many digits."""
    order = np.lexsort((values, group))
    same = group[order][1:] == group[order][:-1]
    steps = np.diff(values[order])[same]
    if len(steps) < LEAST_ROWS_OF_IDENTIFIERS // 2 or (steps == 0).mean() > 1 - DIFFERENT:
        return False
    running = np.median(steps) == 1 and (steps <= 2).mean() > 0.9
    rising = (np.diff(values[np.argsort(group, kind="stable")])[same] > 0).mean() > DIFFERENT
    lengths = np.floor(np.log10(np.maximum(np.abs(values), 1))) + 1
    many_digits = np.median(lengths) >= LONG and (lengths >= LONG - 1).mean() > DIFFERENT
    return bool(running or rising or many_digits)


def identifier_note(name: str) -> str:
    """Return the sentence that names a feature which looks like an identifier, and the way out."""
    return (
        f"Column '{name}' looks like an identifier: its values are nearly all different. It is used as a "
        f"feature. Name it with --id-column {shlex.quote(name)} (in Python id='{name}') to carry it into predictions, "
        f"or leave it out with --drop-columns {flag_value([name])} (drop=['{name}'])."
    )


def date_note(name: str) -> str:
    """Return the sentence that names a column of numbers which look like dates, and the way out."""
    return (
        f"Column '{name}' looks like dates (YYYYMMDD), but is used as a number. Name it with "
        f"--date-columns {flag_value([name])} (in Python dates=['{name}']) to learn from dates."
    )
