"""Checks that turn what people have (numpy or torch arrays, or lists) into the arrays of a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments import checked_integer
from ..errors import InputError, nearest

TASKS = ("classification", "regression", "multilabel", "sequence")
STRUCTURED = ("multilabel", "sequence")  # tasks with several whole numbers per sample; −1 is not known
SPLITS = ("train", "val", "test")
SPLIT_WORDS = {"train": "training", "val": "validation", "test": "test"}
MAX_ROUNDING = 1e-3  # share of a column's deviation by which float32 may round its values
FEW_CLASSES = 20  # whole numbers of a float type with at most this many values may be classes

Pair = tuple[Any, Any]
"""One client's (x, y)."""


class Part(NamedTuple):
    """The checked samples of one client in one split (a number), and how errors name them."""

    split: int
    client: int
    title: str
    x: np.ndarray
    y: np.ndarray
    whole: bool = False  # whether whole numbers became the floats of `x`


def as_array(value: Any, subject: str) -> np.ndarray:
    """Return an array of any type; masked values are refused, because numpy would read what lies under the mask."""
    parts = value if isinstance(value, list | tuple) else [value]
    masked = sum(int(np.ma.count_masked(part)) for part in parts if isinstance(part, np.ma.MaskedArray))
    if masked:
        raise InputError(
            f"{subject} is a masked array with {masked} masked value(s). Fill them, array.filled(value), or leave "
            "those samples out."
        )
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{subject} cannot be read as an array: {error}.") from error


def as_numpy(value: Any, subject: str) -> np.ndarray:
    """Return a numpy or torch array, or nested lists, as an array of numbers."""
    array = as_array(value, subject)
    if array.dtype.kind not in "buif":
        raise InputError(f"{subject} is of type {array.dtype}; numbers are needed. Encode words as numbers first.")
    return array


def is_mapped(array: np.ndarray) -> bool:
    """Return whether an array is a file that is mapped read-only, or a part of one, so that it need not be copied."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap) and base.mode == "r"


def as_features(value: Any, subject: str) -> np.ndarray:
    """Return images as uint8 [n, C, H, W], and everything else as float32 [n, ...].

    uint8 [n, H, W] gets one channel. uint8 [n, H, W, C] becomes channels-first when its last axis is 1, 3 or 4 and its
    second is not; any other uint8 array of four axes counts as channels-first already. Floats keep their axes.
    """
    x = as_numpy(value, subject)
    if x.ndim == 0:
        raise InputError(f"{subject} is a single number; an array with one sample per row is needed.")
    if len(x) and not x[0].size:
        raise InputError(f"{subject} has the shape {list(x.shape)}: its samples have no features.")
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


def as_targets(y: np.ndarray, task: str, subject: str) -> np.ndarray:
    """Return int64 [n] for classification, float32 [n, targets] for regression.

    For several labels and for labelled steps it is int64 [n, labels] or [n, steps].
    """
    if task == "regression":
        if y.ndim not in (1, 2):
            raise InputError(f"{subject} has {y.ndim} axes; regression needs [n] or [n, targets].")
        with np.errstate(over="ignore"):
            return y.reshape(len(y), -1).astype(np.float32, copy=False)
    if task in STRUCTURED:
        if y.ndim != 2 or not y.shape[1]:
            needed_shape = "[n, labels] of 0 and 1" if task == "multilabel" else "[n, steps], a class number per step"
            raise InputError(f"{subject} has the shape {list(y.shape)}; the task {task} needs {needed_shape}.")
    else:
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1:
            raise InputError(
                f"{subject} has the shape {list(y.shape)}; classification needs one class number per sample. For "
                "several labels of 0 and 1 give task='multilabel' (--task multilabel), for a class per step "
                "task='sequence'."
            )
    if task in STRUCTURED and y.dtype.kind == "f" and np.isnan(y).any():
        raise InputError(
            f"{subject} has NaN among the labels of the task {task}. Write -1 for a label that is unknown."
        )
    if y.dtype.kind == "f" and not (whole := np.isfinite(y) & (np.floor(y) == y)).all():
        raise InputError(
            f"{subject} has the label {y[~whole][0]}; classes are whole numbers. For measurements, task='regression'."
        )
    return y.astype(np.int64, copy=False)


def check_task(task: str | None, labels: list[np.ndarray], subject: str = "The targets") -> str:
    """Return the task, where it is None that of the labels: integers are classes, floats are measurements.

    A few whole numbers of a float type may be either, so the task must be given; `subject` names the targets in the
    error.
    """
    if task is not None and task not in TASKS:
        raise InputError(f"The task is {task!r}; it must be one of {', '.join(TASKS)}.{nearest(str(task), TASKS)}")
    if task is not None or not any(y.dtype.kind == "f" for y in labels):
        return task or "classification"
    values = few_whole_numbers(labels)
    if values is not None:
        classes = "task='classification' (--task classification) or labels of an integer type"
        classes += " (of one-hot rows y.argmax(1))"
        wide = [y for y in labels if y.ndim == 2 and y.shape[1] > 1]
        if wide:
            several = "task='multilabel' (--task multilabel)"
            one_hot = all((y.sum(1) == 1).all() for y in wide)
            classes = f"{classes}, for several labels per sample {several}" if one_hot else several
        raise InputError(
            f"{subject} are of a float type but hold only {len(values)} different whole numbers, such as "
            f"{values[-1]:g}: are they classes or measurements? Give {classes}; for measurements task='regression'."
        )
    return "regression"


def few_whole_numbers(labels: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the sorted values of all labels; None if one is a fraction, or if there are more than `FEW_CLASSES`."""
    values = np.empty(0)
    for y in labels:
        if (np.floor(y) != y).any():  # NaN differs from itself, too
            return None
        values = np.union1d(values, y)
        if len(values) > FEW_CLASSES:
            return None
    return values if len(values) else None


def check_finite(values: np.ndarray, describe: Callable[[int], str]) -> None:
    """Refuse NaN and infinity in [n, ...]; `describe(sample)` names a sample in the error."""
    if values.dtype.kind != "f":
        return
    for start in range(0, len(values), 4096):  # `values` may be memory-mapped and larger than memory
        part = values[start : start + 4096]
        finite = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not finite.all():
            sample = int(np.argmin(finite))
            fault = "NaN" if np.isnan(part[sample]).any() else "infinity (or a number beyond float32)"
            raise InputError(f"{describe(start + sample)} has {fault}. Remove the sample or fill the gap first.")


def check_parts(
    data: Mapping[str, Sequence[Pair | None] | None], names: Sequence[str], task: str | None
) -> tuple[list[Part], str]:
    """Check one (x, y) per split and client; return those that have samples, in this order, and the task."""
    count = 0 if data["train"] is None else len(data["train"])
    if not count:
        raise InputError("There are no clients: the list of training data is empty.")
    for subject, entries in {"names": names, **{f"{SPLIT_WORDS[split]} data": data[split] for split in data}}.items():
        if entries is not None and len(entries) != count:
            raise InputError(f"There are training data of {count} clients, but {subject} of {len(entries)}.")
    if len(set(names)) < count:
        repeated_name = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"Two clients are called '{repeated_name}'. Give every client a name of its own.")
    parts: list[Part] = []
    exact: list[np.ndarray] = []  # the features of each, as they were given
    for split, (key, word) in enumerate(SPLIT_WORDS.items()):
        for i, pair in enumerate(() if (pairs := data[key]) is None else pairs):
            if pair is None:
                continue
            title = f"client '{names[i]}' (number {i}), {word} data"
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InputError(f"{title}: a pair (x, y) is needed, not {type(pair).__name__}.")
            x, y = as_features(pair[0], f"x of {title}"), as_numpy(pair[1], f"y of {title}")
            if y.ndim == 0 or len(x) != len(y):
                raise InputError(f"{title}: x has {len(x)} samples, y has {y.size}. Each sample needs its y.")
            raw = as_array(pair[0], "x")
            if len(x):  # an empty array may have any shape: there is nothing in it to compare
                parts.append(Part(split, i, title, x, y, x.dtype == np.float32 and raw.dtype.kind in "iu"))
                exact.append(raw)
    if task is None:
        _refuse_mixed_targets(parts)
    task = check_task(task, [part.y for part in parts])
    check_rounding([(part.title, one, part.x) for part, one in zip(parts, exact, strict=True)], "feature")
    targets = [as_targets(part.y, task, f"y of {part.title}") for part in parts]
    check_rounding([(part.title, part.y, y) for part, y in zip(parts, targets, strict=True)], "target")
    return [part._replace(y=y) for part, y in zip(parts, targets, strict=True)], task


def _refuse_mixed_targets(parts: Sequence[Part]) -> None:
    """Refuse targets that are integers at one client, as classes are, and fractions at another."""
    whole = next((part for part in parts if part.y.dtype.kind in "bui"), None)
    fraction = next((part for part in parts if part.y.dtype.kind == "f"), None)
    if whole is not None and fraction is not None and few_whole_numbers([part.y for part in parts]) is None:
        raise InputError(
            f"The y of {whole.title} are whole numbers ({whole.y.dtype}), as of classes, but those of {fraction.title} "
            f"are measurements ({fraction.y.dtype}). Give all clients one type, or task='regression' (--task "
            "regression)."
        )


def check_rounding(parts: Sequence[tuple[str, np.ndarray, np.ndarray]], noun: str) -> None:
    """Refuse a column that float32 rounds by more than `MAX_ROUNDING` of its deviation over all parts.

    A part is its name in errors, its values [n, ...] as they were given, and the same as float32.
    """
    columns = [(title, raw, cast) for title, raw, cast in parts if cast.dtype == np.float32]
    if all(np.can_cast(raw.dtype, np.float32) for _, raw, _ in columns):
        return
    shapes = {cast.shape[1:] for _, _, cast in columns}
    if len(shapes) > 1:  # which is refused elsewhere
        return
    origin = columns[0][1][:1].reshape(-1).astype(np.float64)
    count, total, squares, lost, where = 0, 0.0, 0.0, np.zeros(len(origin)), np.zeros(len(origin), np.int64)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is reported elsewhere
        for number, (_, raw, cast) in enumerate(columns):
            for start in range(0, len(raw), 4096):  # float64 in pieces: `raw` may be large
                rows = slice(start, start + 4096)
                values = raw[rows].reshape(len(cast[rows]), -1).astype(np.float64)
                error = np.abs(values - cast[rows].reshape(values.shape)).max(0)
                where[error > lost], lost = number, np.fmax(lost, error)
                values -= origin
                count, total, squares = count + len(values), total + values.sum(0), squares + (values**2).sum(0)
        deviation = np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))
        coarse = (lost > MAX_ROUNDING * deviation) & np.isfinite(lost) & (deviation > 1e-12 * np.abs(origin))
    if coarse.any():
        column = int(np.argmax(coarse))
        raise InputError(
            f"{columns[where[column]][0]}: float32, in which fedabml learns, rounds {noun} {column} by up to "
            f"{lost[column]:.2g}, but its values deviate by {deviation[column]:.2g} only. Subtract an offset, such as "
            f"{origin[column]:.10g}, from all of them first."
        )


def check_alike(parts: Sequence[Part]) -> None:
    """Refuse features or targets of more than one shape or type."""
    first = parts[0]
    for part in parts:
        for subject, one, other in (("features", part.x, first.x), ("targets", part.y, first.y)):
            if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
                raise InputError(
                    f"{part.title}: the {subject} are {one.dtype} of shape {list(one.shape[1:])} each, but those of "
                    f"{first.title} are {other.dtype} of shape {list(other.shape[1:])}. Make them alike."
                )


def check_owned(x: Any, y: Any, owner: Any, test: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return y, the owner and the test mark of every sample of x as arrays; raise InputError for other shapes."""
    if not (isinstance(x, np.ndarray) and x.ndim and (x.dtype == np.float32 or (x.dtype, x.ndim) == (np.uint8, 4))):
        subject = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(f"x must be a numpy array, uint8 [n, C, H, W] or float32 [n, ...], not {subject}.")
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
    return labels, owner, marks


def large_enough(sizes: Sequence[int], names: Sequence[str], drop_small: bool) -> list[int]:
    """Return the numbers of the clients with two training samples or more.

    `sizes` counts every client's training samples. A smaller client is an error unless `drop_small`.
    """
    small = [i for i, size in enumerate(sizes) if size < 2]
    if small and not drop_small:
        i = small[0]
        others = f", and {len(small) - 1} more clients have fewer than two" if len(small) > 1 else ""
        raise InputError(
            f"client '{names[i]}' (number {i}) has {sizes[i]} training sample{'s' * (sizes[i] != 1)}{others}; two are "
            f"the least to learn from. Leave such clients out with drop_small=True (--drop-small)."
        )
    if len(small) == len(sizes):
        raise InputError(
            "No client has two training samples or more, so none is left. Check how the data were divided."
        )
    return [i for i, size in enumerate(sizes) if size >= 2]


def check_values(
    x: np.ndarray, y: np.ndarray, train: np.ndarray, task: str, classes: int | None, describe: Callable[[int], str]
) -> int:
    """Refuse values that are not finite and labels outside 0..classes-1; return the number of classes.

    Unless given, it is the highest label of the samples `train` plus one; for regression it is 0. `describe(sample)`
    names a sample in the error.
    """
    check_finite(x, describe)
    check_finite(y, describe)
    if task == "regression":
        return 0
    if task in STRUCTURED:
        return _check_structured(y, train, task, classes, describe)
    count = int(y[train].max()) + 1 if classes is None else checked_integer(classes, "classes")
    if classes is None and count > max(1000, len(y)):
        raise InputError(
            f"The largest class number is {count - 1}, with only {len(y)} samples; is it a stray value? Number the "
            "classes from 0, or give their number as classes=."
        )
    out_of_range = (y < 0) | (y >= count)
    if out_of_range.any():
        sample = int(np.argmax(out_of_range))
        raise InputError(
            f"{describe(sample)} has the label {y[sample]}, outside 0..{count - 1}. Number the classes from 0; "
            f"if there are classes that no training sample shows, give their number as classes=."
        )
    return count


def _check_structured(
    y: np.ndarray, train: np.ndarray, task: str, classes: int | None, describe: Callable[[int], str]
) -> int:
    """Check several labels per sample, int64 [n, labels or steps]; return the number of classes that each may have."""
    if task == "multilabel":
        count, allowed = 2, "0 and 1 (and -1 where a label is not known)"
    else:
        count = int(y[train].max()) + 1 if classes is None else checked_integer(classes, "classes")
        allowed = f"0..{count - 1} (and -1 for steps to leave out)"
    out_of_range = ((y < -1) | (y >= count)).any(1)
    if out_of_range.any():
        sample = int(np.argmax(out_of_range))
        value = next(v for v in y[sample] if not -1 <= v < count)
        raise InputError(f"{describe(sample)} has the label {value}; the labels of the task {task} are {allowed}.")
    empty = (y < 0).all(1)
    if empty.any():
        raise InputError(f"{describe(int(np.argmax(empty)))} has no label: all of them are -1. Leave the sample out.")
    return count
