"""Checks that turn what people have (lists of numpy or torch arrays) into the arrays of a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments import whole
from ..errors import InputError, nearest
from .rows import Rows

TASKS = ("classification", "regression")
SPLITS = ("train", "val", "test")
SPLIT_WORDS = {"train": "training", "val": "validation", "test": "test"}
FEW_CLASSES = 20  # whole numbers of a float type with at most this many values may be classes

Pair = tuple[Any, Any]
"""One client's (x, y)."""


class Checked(NamedTuple):
    """The samples of all clients in one array, checked, and the rows of (train, val, test) that each client owns."""

    x: np.ndarray  # uint8 [n, C, H, W] or float32 [n, ...]
    y: np.ndarray  # int64 [n] for classification, float32 [n, targets] for regression
    rows: tuple[Rows, Rows, Rows]
    task: str
    classes: int  # 0 for regression
    names: tuple[str, ...]


def as_array(value: Any, what: str) -> np.ndarray:
    """Return an array of any type; masked values are refused, because numpy would read what lies under the mask."""
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
    """Return a numpy or torch array, or nested lists, as an array of numbers."""
    array = as_array(value, what)
    if array.dtype.kind not in "buif":
        raise InputError(f"{what} is of type {array.dtype}; numbers are needed. Encode words as numbers first.")
    return array


def as_features(value: Any, what: str) -> np.ndarray:
    """Return images as uint8 [n, C, H, W], and everything else as float32 [n, ...].

    uint8 [n, H, W] gets one channel. uint8 [n, H, W, C] becomes channels-first when its last axis is 1, 3 or 4 and its
    second is not; any other uint8 array of four axes counts as channels-first already. Floats keep their axes.
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
    """Return images [n, H, W] or [n, H, W, C] as [n, C, H, W]."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def as_targets(y: np.ndarray, task: str, what: str) -> np.ndarray:
    """Return int64 [n] for classification, float32 [n, targets] for regression."""
    if task == "regression":
        if y.ndim not in (1, 2):
            raise InputError(f"{what} has {y.ndim} axes; regression needs [n] or [n, targets].")
        with np.errstate(over="ignore"):
            return y.reshape(len(y), -1).astype(np.float32, copy=False)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise InputError(f"{what} has the shape {list(y.shape)}; classification needs one class number per sample.")
    if y.dtype.kind == "f" and not (good := np.isfinite(y) & (np.floor(y) == y)).all():
        raise InputError(
            f"{what} has the label {y[~good][0]}; classes are whole numbers. For measurements, task='regression'."
        )
    return y.astype(np.int64, copy=False)


def check_task(task: str | None, labels: list[np.ndarray]) -> str:
    """Return the given task, or the one of the labels: whole-number types are classes, floats are measurements.

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
    """Return the sorted values of all labels; None if one is a fraction, or if there are more than `FEW_CLASSES`."""
    found = np.empty(0)
    for y in labels:
        if (np.floor(y) != y).any():  # NaN differs from itself, too
            return None
        found = np.union1d(found, y)
        if len(found) > FEW_CLASSES:
            return None
    return found if len(found) else None


def check_finite(values: np.ndarray, where: Callable[[int], str]) -> None:
    """Refuse NaN and infinity in [n, ...]; `where(sample)` names a sample in the error."""
    if values.dtype.kind != "f":
        return
    for start in range(0, len(values), 4096):  # `values` may be memory-mapped and larger than memory
        part = values[start : start + 4096]
        good = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not good.all():
            sample = int(np.argmin(good))
            what = "NaN" if np.isnan(part[sample]).any() else "infinity (or a number beyond float32)"
            raise InputError(f"{where(start + sample)} has {what}. Remove the sample or fill the gap first.")


def gather(
    data: Mapping[str, Sequence[Pair | None] | None],
    names: Sequence[str],
    task: str | None,
    classes: int | None,
    drop_small: bool,
) -> Checked:
    """Check one (x, y) per split and client, and join them: all training samples, then validation, then test."""
    _check_clients(data, names)

    def place(split: str, i: int) -> str:
        return f"client '{names[i]}' (number {i}), {SPLIT_WORDS[split]} data"

    given = {split: () if (part := data[split]) is None else part for split in SPLITS}
    pairs = {(split, i): pair for split in SPLITS for i, pair in enumerate(given[split]) if pair is not None}
    for key, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"{place(*key)}: a pair (x, y) is needed, not {type(pair).__name__}.")
    labels = {key: as_numpy(pair[1], f"y of {place(*key)}") for key, pair in pairs.items()}
    task = check_task(task, list(labels.values()))
    kept: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    for key, (features, _) in pairs.items():
        x, y = as_features(features, f"x of {place(*key)}"), labels[key]
        if y.ndim == 0 or len(x) != len(y):
            raise InputError(f"{place(*key)}: x has {len(x)} samples, y has {y.size}. Each sample needs its y.")
        if len(x):  # an empty array may have any shape: there is nothing in it to compare
            kept[key] = x, as_targets(y, task, f"y of {place(*key)}")
    sizes = [len(kept["train", i][0]) if ("train", i) in kept else 0 for i in range(len(names))]
    clients = large_enough(sizes, names, drop_small)
    kept = {(split, i): kept[split, i] for split in SPLITS for i in clients if (split, i) in kept}
    _check_alike(kept, place)

    keys, ends = list(kept), np.cumsum([len(y) for _, y in kept.values()])
    x, y = (np.concatenate([pair[part] for pair in kept.values()]) for part in (0, 1))

    def where(sample: int) -> str:
        key = keys[number := int(np.searchsorted(ends, sample, side="right"))]
        return f"{place(*key)}, sample {sample - int(ends[number]) + len(kept[key][1])},"

    rows, first = [], 0
    for split in SPLITS:
        counts = np.array([len(kept[split, i][1]) if (split, i) in kept else 0 for i in clients], np.int64)
        rows.append(Rows.by_owner(np.repeat(np.arange(len(clients)), counts), len(clients), first))
        first += int(counts.sum())
    known = _check_values(x, y, rows[0], task, classes, where)
    return Checked(x, y, (rows[0], rows[1], rows[2]), task, known, tuple(names[i] for i in clients))


def by_owners(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    test: np.ndarray | None,
    task: str | None,
    classes: int | None,
    drop_small: bool,
) -> Checked:
    """Check samples x [n, ...] with the owner [n] of each; `test` [n] marks test samples. x is not copied."""
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
    found, number = np.unique(owner, return_inverse=True)
    parts = []
    for chosen in (np.flatnonzero(~marks), np.flatnonzero(marks)):
        own = Rows.by_owner(number[chosen], len(found))
        parts.append(Rows(chosen[own.index], own.offsets))
    names = tuple(map(str, found.tolist()))
    kept = large_enough(parts[0].counts.tolist(), names, drop_small)
    if len(kept) < len(names):
        parts, names = [part.select(kept) for part in parts], tuple(names[i] for i in kept)

    def where(sample: int) -> str:
        return f"sample {sample} (client '{owner[sample]}')"

    known = _check_values(x, targets, parts[0], task, classes, where)
    return Checked(x, targets, (parts[0], Rows.empty(len(names)), parts[1]), task, known, names)


def large_enough(sizes: Sequence[int], names: Sequence[str], drop_small: bool) -> list[int]:
    """Return the numbers of the clients with two training samples or more.

    `sizes` counts every client's training samples. A smaller client is an error unless `drop_small`.
    """
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


def _check_values(
    x: np.ndarray, y: np.ndarray, train: Rows, task: str, classes: int | None, where: Callable[[int], str]
) -> int:
    """Refuse values that are not finite and labels outside 0..classes-1; return the number of classes.

    Unless given, it is the highest training label plus one; for regression it is 0.
    """
    check_finite(x, where)
    check_finite(y, where)
    if task == "regression":
        return 0
    known = int(y[train.index].max()) + 1 if classes is None else whole(classes, "classes")
    if classes is None and known > max(1000, len(y)):
        raise InputError(
            f"The largest class number is {known - 1}, with only {len(y)} samples; is it a stray value? Number the "
            "classes from 0, or give their number as classes=."
        )
    bad = (y < 0) | (y >= known)
    if bad.any():
        sample = int(np.argmax(bad))
        raise InputError(
            f"{where(sample)} has the label {y[sample]}, outside 0..{known - 1}. Number the classes from 0; "
            f"if there are classes that no training sample shows, give their number as classes=."
        )
    return known


def _check_clients(data: Mapping[str, Sequence[Pair | None] | None], names: Sequence[str]) -> None:
    """Refuse an empty federation, other numbers of names or test data than of clients, and a name given twice."""
    count = 0 if data["train"] is None else len(data["train"])
    if not count:
        raise InputError("There are no clients: the list of training data is empty.")
    given = {"names": names, **{f"{SPLIT_WORDS[split]} data": data[split] for split in SPLITS[1:]}}
    for what, those in given.items():
        if those is not None and len(those) != count:
            raise InputError(f"There are training data of {count} clients, but {what} of {len(those)}.")
    if len(set(names)) < count:
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"Two clients are called '{twice}'. Give every client a name of its own.")


def _check_alike(
    kept: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]], place: Callable[[str, int], str]
) -> None:
    """Refuse features or targets of more than one shape or type."""
    first, (x0, y0) = next(iter(kept.items()))
    for key, (x, y) in kept.items():
        for what, one, other in (("features", x, x0), ("targets", y, y0)):
            if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
                raise InputError(
                    f"{place(*key)}: the {what} are {one.dtype} of shape {list(one.shape[1:])} each, but those of "
                    f"{place(*first)} are {other.dtype} of shape {list(other.shape[1:])}. Make them alike."
                )
