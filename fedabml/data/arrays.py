"""From what people have (lists of numpy or torch arrays) to checked arrays: features, labels, statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arguments import whole
from ..errors import InputError, nearest
from .rows import Rows

TASKS = ("classification", "regression")
SPLITS = ("train", "val", "test")
FEW = 20  # whole numbers of a float type with at most so many values may be classes
SPOKEN = {"train": "training", "val": "validation", "test": "test"}

Pair = tuple[Any, Any]
"""One client's (x, y)."""


def as_array(value: Any, what: str) -> np.ndarray:
    """Returns an array of any kind. Masked values are refused, because numpy would read what lies under the mask."""
    parts = value if isinstance(value, list | tuple) else [value]
    masked = sum(int(np.ma.count_masked(part)) for part in parts if isinstance(part, np.ma.MaskedArray))
    if masked:
        raise InputError(
            f"{what} is a masked array with {masked} masked value(s). Fill them, array.filled(value), or leave those "
            "samples out."
        )
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read as an array: {error}.") from error


def as_numpy(value: Any, what: str) -> np.ndarray:
    """A numpy or torch array (or nested lists) of numbers."""
    array = as_array(value, what)
    if array.dtype.kind not in "buif":
        raise InputError(f"{what} is of type {array.dtype}; numbers are needed. Encode words as numbers first.")
    return array


def as_features(value: Any, what: str) -> np.ndarray:
    """uint8 images [n, C, H, W], or float32 [n, ...] for everything else.

    uint8 [n, H, W] gets one channel. uint8 [n, H, W, C] is turned channels-first when its last axis is 1, 3 or 4 and
    its second is not; any other uint8 array of four axes is taken to be channels-first. Floats stay as they lie.
    """
    x = as_numpy(value, what)
    if x.ndim == 0:
        raise InputError(f"{what} is a single number; an array with one sample per row is needed.")
    if len(x) and not x[0].size:
        raise InputError(f"{what} has the shape {list(x.shape)}: its samples have no features.")
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        return channels_first(x) if x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4) else x
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is reported as such
        x = x.astype(np.float32, copy=False)
    return x[:, None] if x.ndim == 1 else x


def channels_first(x: np.ndarray) -> np.ndarray:
    """Images [n, H, W] or [n, H, W, C] as [n, C, H, W]."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def check_task(task: str | None, labels: list[np.ndarray]) -> str:
    """The task given, or the one the labels speak of: whole-number types are classes, floats are measurements.

    A few whole numbers of a float type may be either, so the task must be given.
    """
    if task is None:
        if not any(y.dtype.kind == "f" for y in labels):
            return "classification"
        found = few_whole_numbers(labels)
        if found is not None:
            raise InputError(
                f"The targets are of a float type but hold only {len(found)} different whole numbers, such as "
                f"{found[-1]:g}: are they classes or measurements? Give task='classification' (--task classification) "
                "or labels of an integer type (of one-hot rows y.argmax(1)); for measurements task='regression'."
            )
        return "regression"
    if task not in TASKS:
        raise InputError(f"The task is {task!r}; it must be classification or regression.{nearest(str(task), TASKS)}")
    return task


def few_whole_numbers(labels: Sequence[np.ndarray]) -> np.ndarray | None:
    """Returns the different values of all labels in order; None for a fraction, or for more than `FEW` values."""
    found = np.empty(0)
    for y in labels:
        if (np.floor(y) != y).any():  # so is NaN
            return None
        found = np.union1d(found, y)
        if len(found) > FEW:
            return None
    return found if len(found) else None


def as_targets(y: np.ndarray, task: str, what: str) -> np.ndarray:
    """int64 [n] for classification, float32 [n, targets] for regression."""
    if task == "regression":
        if y.ndim not in (1, 2):
            raise InputError(f"{what} has {y.ndim} axes; regression needs [n] or [n, targets].")
        with np.errstate(over="ignore"):
            return y.reshape(len(y), -1).astype(np.float32, copy=False)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise InputError(f"{what} has the shape {list(y.shape)}; classification needs one class number per sample.")
    if y.dtype.kind == "f" and not (np.isfinite(y) & (np.floor(y) == y)).all():
        bad = y[~(np.isfinite(y) & (np.floor(y) == y))][0]
        raise InputError(f"{what} has the label {bad}; classes are whole numbers. For measurements, task='regression'.")
    return y.astype(np.int64, copy=False)


def check_finite(values: np.ndarray, where: Callable[[int], str]) -> None:
    """Refuses NaN and infinity; `where(sample)` says whose sample it is."""
    if values.dtype.kind != "f":
        return
    for start in range(0, len(values), 4096):
        part = values[start : start + 4096]
        good = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not good.all():
            sample = int(np.argmin(good))
            what = "NaN" if np.isnan(part[sample]).any() else "infinity (or a number beyond float32)"
            raise InputError(f"{where(start + sample)} has {what}. Remove the sample or fill the gap first.")


def check_labels(y: np.ndarray, classes: int, where: Callable[[int], str]) -> None:
    """Refuses class numbers outside 0..classes-1."""
    bad = (y < 0) | (y >= classes)
    if bad.any():
        sample = int(np.argmax(bad))
        raise InputError(
            f"{where(sample)} has the label {y[sample]}, outside 0..{classes - 1}. Number the classes from 0; "
            f"if there are classes that no training sample shows, give their number as classes=."
        )


@dataclass(frozen=True, eq=False)
class Gathered:
    """Every client's samples one after another, checked, and who owns which."""

    x: np.ndarray
    y: np.ndarray
    rows: tuple[Rows, Rows, Rows]
    task: str
    classes: int
    names: tuple[str, ...]


def gather(
    data: Mapping[str, Sequence[Pair | None] | None],
    names: Sequence[str],
    task: str | None,
    classes: int | None,
    drop_small: bool,
) -> Gathered:
    """Checks one (x, y) per client and split, and joins them: all training samples, then validation, then test."""
    check_clients(data, names)

    def spoken(i: int, split: str) -> str:
        return f"client '{names[i]}' (number {i}), {SPOKEN[split]} data"

    given = {split: () if (part := data[split]) is None else part for split in SPLITS}
    pairs = {(split, i): pair for split in SPLITS for i, pair in enumerate(given[split]) if pair is not None}
    for (split, i), pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"{spoken(i, split)}: a pair (x, y) is needed, not {type(pair).__name__}.")
    labels = {(split, i): as_numpy(pair[1], f"y of {spoken(i, split)}") for (split, i), pair in pairs.items()}
    task = check_task(task, list(labels.values()))
    kept: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    for (split, i), (features, _) in pairs.items():
        x, y = as_features(features, f"x of {spoken(i, split)}"), labels[split, i]
        if y.ndim == 0 or len(x) != len(y):
            raise InputError(f"{spoken(i, split)}: x has {len(x)} samples, y has {y.size}. Each sample needs its y.")
        if len(x):  # an empty array may have any shape: there is nothing in it to compare
            kept[split, i] = x, as_targets(y, task, f"y of {spoken(i, split)}")
    sizes = [len(kept["train", i][0]) if ("train", i) in kept else 0 for i in range(len(names))]
    clients = large_enough(sizes, names, drop_small)
    kept = {(split, i): kept[split, i] for split in SPLITS for i in clients if (split, i) in kept}
    check_alike(kept, spoken)

    keys = list(kept)
    ends = np.cumsum([len(kept[key][1]) for key in keys])
    x, y = (np.concatenate([pair[part] for pair in kept.values()]) for part in (0, 1))

    def whose(sample: int) -> str:
        place = int(np.searchsorted(ends, sample, side="right"))
        split, i = keys[place]
        return f"{spoken(i, split)}, sample {sample - int(ends[place]) + len(kept[split, i][1])},"

    check_finite(x, whose)
    check_finite(y, whose)
    lengths = {key: len(pair[1]) for key, pair in kept.items()}
    rows, first = [], 0
    for split in SPLITS:
        counts = np.array([lengths.get((split, i), 0) for i in clients], np.int64)
        rows.append(Rows.by_owner(np.repeat(np.arange(len(clients)), counts), len(clients), first))
        first += int(counts.sum())
    known = 0
    if task == "classification":
        known = int(y[rows[0].index].max()) + 1 if classes is None else whole(classes, "classes")
        if classes is None and known > max(1000, len(y)):
            raise InputError(
                f"The largest class number is {known - 1}, with only {len(y)} samples; is it a stray value? If there "
                "are so many classes, say classes=; else number them from 0."
            )
        check_labels(y, known, whose)
    return Gathered(x, y, (rows[0], rows[1], rows[2]), task, known, tuple(names[i] for i in clients))


def by_owners(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    test: np.ndarray | None,
    task: str | None,
    classes: int | None,
    drop_small: bool,
) -> Gathered:
    """Checks samples that lie in one array with the owner of each; x is not copied."""
    if not (isinstance(x, np.ndarray) and ((x.dtype == np.uint8 and x.ndim == 4) or x.dtype == np.float32)):
        what = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(f"x must be a numpy array, uint8 [n, C, H, W] or float32 [n, ...], not {what}.")
    if x.ndim == 0:
        raise InputError("x is a single number; an array with one sample per row is needed.")
    as_array(x, "x")  # no value of it may be masked
    labels, owner = as_numpy(y, "y"), as_array(owner, "owner")
    marks = np.zeros(len(x), bool) if test is None else as_array(test, "test")
    for name, column in (("y", labels), ("owner", owner), ("test", marks)):
        if column.ndim == 0 or len(column) != len(x) or (name != "y" and column.ndim != 1):
            raise InputError(
                f"{name} must have one entry for each of the {len(x)} samples; it has shape {column.shape}."
            )
    if marks.dtype != bool:
        raise InputError(f"test marks samples with true and false; it is {marks.dtype}.")
    task = check_task(task, [labels])
    targets = as_targets(labels, task, "y")
    names, whose = np.unique(owner, return_inverse=True)
    index = [np.flatnonzero(~marks), np.flatnonzero(marks)]
    rows = [Rows.by_owner(whose[i], len(names)) for i in index]
    train, held = (Rows(i[r.index], r.offsets) for i, r in zip(index, rows, strict=True))
    words = tuple(map(str, names.tolist()))
    kept = large_enough(train.counts.tolist(), words, drop_small)
    if len(kept) < len(words):
        train, held, words = train.select(kept), held.select(kept), tuple(words[i] for i in kept)

    def spoken(sample: int, first: int = 0) -> str:
        return f"sample {first + sample} (client '{owner[first + sample]}')"

    for start in range(0, len(x), CHUNK):
        check_finite(x[start : start + CHUNK], partial(spoken, first=start))
    check_finite(targets, spoken)
    known = 0
    if task == "classification":
        known = int(targets[train.index].max()) + 1 if classes is None else whole(classes, "classes")
        check_labels(targets, known, spoken)
    return Gathered(x, targets, (train, Rows.empty(len(words)), held), task, known, words)


CHUNK = 1 << 16  # samples that are looked through at once


def check_clients(data: Mapping[str, Sequence[Pair | None] | None], names: Sequence[str]) -> None:
    """As many names and test data as clients, and no name twice."""
    count = 0 if data["train"] is None else len(data["train"])
    if not count:
        raise InputError("There are no clients: the list of training data is empty.")
    given = {"names": names, **{f"{SPOKEN[split]} data": data[split] for split in SPLITS[1:]}}
    for what, those in given.items():
        if those is not None and len(those) != count:
            raise InputError(f"There are training data of {count} clients, but {what} of {len(those)}.")
    if len(set(names)) < count:
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"Two clients are called '{twice}'. Give every client a name of its own.")


def large_enough(sizes: Sequence[int], names: Sequence[str], drop_small: bool) -> list[int]:
    """The numbers of the clients with at least two training samples; smaller ones are an error unless dropped."""
    small = [i for i, size in enumerate(sizes) if size < 2]
    if small and not drop_small:
        i = small[0]
        more = f", and {len(small) - 1} more clients have fewer than two" if len(small) > 1 else ""
        raise InputError(
            f"client '{names[i]}' (number {i}) has {sizes[i]} training sample{'s' * (sizes[i] != 1)}{more}; two are "
            f"the least to learn from. Leave such clients out with drop_small=True (--drop-small)."
        )
    if len(small) == len(sizes):
        raise InputError(
            "No client has two training samples or more, so none is left. Check how the data were divided."
        )
    return [i for i, size in enumerate(sizes) if size >= 2]


def check_alike(
    kept: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]], spoken: Callable[[int, str], str]
) -> None:
    """One shape and type of features, and one number of targets, in the whole federation."""
    (split0, i0), (x0, y0) = next(iter(kept.items()))
    for (split, i), (x, y) in kept.items():
        for what, one, other in (("features", x, x0), ("targets", y, y0)):
            if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
                raise InputError(
                    f"{spoken(i, split)}: the {what} are {one.dtype} of shape {list(one.shape[1:])} each, but those of "
                    f"{spoken(i0, split0)} are {other.dtype} of shape {list(other.shape[1:])}. Make them alike."
                )
