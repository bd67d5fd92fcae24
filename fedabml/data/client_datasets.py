"""Map-style datasets of clients as arrays: torch Datasets, Hugging Face datasets, and lists of (x, y).

An item is a pair (x, y), or a dictionary whose entries the caller names. Neither library is imported: a dataset needs
only a length and items by number. Items are read once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..errors import InputError, nearest, quoted
from .arrays import SPLIT_WORDS, Pair
from .images import image_pixels

SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "test": "test"}
MOST_EXACT = 1 << 24  # whole numbers up to which float32 is exact
MASK, TYPES = "attention_mask", "token_type_ids"  # columns that tokenizers add
Items = dict[str, tuple[list[Any], list[Any]]]  # x and y of every item, by split


def read_datasets(
    train: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    val: Mapping[str, Any] | None,
    x: str | None,
    y: str | None,
    padding: int | None,
    task: str | None = None,
) -> tuple[list[str], dict[str, list[Pair | None]], tuple[str, ...]]:
    """Return the clients' names, one (x, y) of arrays per split and client (or None), and the names of the classes.

    `x` and `y` name the entries of items that are dictionaries. Sequences of different lengths are padded to the
    longest: whole numbers of x with `padding`, labels of y with −1. For the `task` sequence each token then needs a
    label. Datasets that name their classes must name the same ones in the same order; without names there are none.
    Raises InputError for anything else.
    """
    if not train:
        raise InputError("There are no clients: the dictionary of training data is empty.")
    names = [str(name) for name in train]
    items: list[Items] = []
    first_named: tuple[str, tuple[str, ...]] = "", ()
    for name, dataset in train.items():
        splits = _splits(name, dataset)
        for split, extra in (("test", test), ("val", val)):
            if extra is not None and name in extra:
                if split in splits:
                    word = SPLIT_WORDS[split]
                    raise InputError(
                        f"client '{name}' has {word} data in its own dictionary of datasets, and in {split}=, too. "
                        "Give them in one of the two."
                    )
                splits[split] = extra[name]
        for split, part in splits.items():
            for class_names in _class_names(part, y):
                subject = f"client '{name}', {split} data"
                first_named = first_named if first_named[1] else (subject, class_names)
                _check_class_names(subject, class_names, *first_named)
        items.append(
            {split: _read(part, f"client '{name}', {split} data", x, y, padding) for split, part in splits.items()}
        )
    for word, extra in (("test", test), ("validation", val)):
        stray = next((name for name in extra or () if name not in train), None)
        if stray is not None:
            raise InputError(f"There are {word} data of '{stray}', but no training data.{nearest(str(stray), names)}")
    pairs = [pair for splits in items for pair in splits.values()]
    length = max((len(v) for xs, _ in pairs for v in xs if v.ndim), default=0)
    steps = max((len(v) for _, ys in pairs for v in ys if v.ndim), default=0)
    arrays: dict[str, list[Pair | None]] = {split: [] for split in ("train", "test", "val")}
    for name, splits in zip(names, items, strict=True):
        for split, entries in arrays.items():
            if split not in splits:
                entries.append(None)
                continue
            subject = f"client '{name}', {split} data"
            xs, ys = splits[split]
            ragged = len({v.shape for v in xs}) > 1 or padding is not None
            stacked = (
                pad_tokens(xs, padding, length, f"x of {subject}") if ragged else np.stack(xs) if xs else np.empty(0)
            )
            if task == "sequence" and padding is not None:
                check_steps(xs, ys, subject)
            labels = pad_labels(ys, steps, f"y of {subject}")
            entries.append((stacked, labels))
    return names, arrays, first_named[1]


def pad_tokens(sequences: Sequence[Any] | np.ndarray, padding: int | None, length: int, subject: str) -> np.ndarray:
    """Return sequences of whole numbers as one array [n, length], filled up with the number `padding`."""
    sequences = [np.asarray(tokens) for tokens in sequences]
    wrong = next((tokens for tokens in sequences if tokens.ndim != 1 or tokens.dtype.kind not in "iu"), None)
    if wrong is not None:
        shapes = sorted({tuple(tokens.shape) for tokens in sequences})
        if padding is None or wrong.ndim != 1:
            raise InputError(
                f"{subject}: samples have different shapes, {shapes[0]} and {shapes[-1]} among them. Make them alike "
                "first: resize images, cut or fill series. Only sequences of whole numbers (tokens) are padded."
            )
        raise InputError(f"{subject}: padding is for sequences of whole numbers (tokens), but here are {wrong.dtype}.")
    if padding is None:
        raise InputError(
            f"{subject}: sequences have different lengths. Give the token number that fills short ones, as padding=0."
        )
    for i, tokens in enumerate(sequences):
        if len(tokens) > length:
            raise InputError(
                f"{subject}: sequence {i} has {len(tokens)} tokens; at most {length} are taken. Shorten it."
            )
        if not (tokens != padding).any():
            raise InputError(f"{subject}: sequence {i} has no token but padding ({padding}). Leave it out.")
        if tokens.max() >= MOST_EXACT or tokens.min() < 0:
            raise InputError(
                f"{subject}: sequence {i} has a token outside 0..{MOST_EXACT - 1:,}. Number tokens from 0."
            )
    padded = np.full((len(sequences), length), padding, np.int64)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = tokens
    return padded


def check_steps(tokens: Sequence[Any], labels: Sequence[Any], subject: str) -> None:
    """Refuse a sequence with more or fewer labels than tokens, whose labels would belong to padding or to nothing."""
    for i, (one, other) in enumerate(zip(tokens, labels, strict=False)):
        if np.shape(one)[:1] != np.shape(other)[:1]:
            raise InputError(
                f"{subject}: sequence {i} has {len(one)} tokens and {np.size(other)} labels. Give a label for each "
                "token, -1 where it is not known."
            )


def pad_labels(labels: list[np.ndarray], steps: int, subject: str) -> np.ndarray:
    """Return labels as one array; those of sequences with different lengths are filled up with −1."""
    if not labels:
        return np.empty(0, np.int64)
    if all(sample.ndim == 1 and sample.dtype.kind in "iu" for sample in labels):
        if all(len(sample) == steps for sample in labels):
            return np.stack(labels)
        padded = np.full((len(labels), steps), -1, np.int64)
        for i, (row, sample) in enumerate(zip(padded, labels, strict=True)):
            if len(sample) > steps:
                raise InputError(f"{subject}: sample {i} has {len(sample)} labels; at most {steps} steps are taken.")
            row[: len(sample)] = sample
        return padded
    if len({sample.shape for sample in labels}) > 1:
        raise InputError(f"{subject}: targets have different shapes. Give each sample a target of one shape.")
    return np.stack(labels)


def _splits(name: str, dataset: Any) -> dict[str, Any]:
    """Return a client's datasets by split: a dictionary, such as a DatasetDict, has several."""
    if not isinstance(dataset, Mapping):
        return {"train": dataset}
    unknown = next((key for key in dataset if key not in SPLIT_NAMES), None)
    if unknown is not None or "train" not in dataset:
        raise InputError(
            f"client '{name}' has a dictionary of datasets with {', '.join(map(str, dataset)) or 'nothing'}; its "
            "splits must be called train, validation and test, and train is needed."
        )
    return {SPLIT_NAMES[key]: part for key, part in dataset.items()}


def _class_names(dataset: Any, y: str | None) -> Iterator[tuple[str, ...]]:
    """Yield the names of the classes that a dataset knows: a ClassLabel of Hugging Face, or `classes` of torchvision.

    A dataset made of others (torch's Subset and ConcatDataset) has theirs.
    """
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping) and y in features:
        feature = features[y]
        names = getattr(getattr(feature, "feature", feature), "names", None)
    else:
        names = None if getattr(dataset, "target_transform", None) else getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        yield tuple(names)
        return
    parts = getattr(dataset, "datasets", None)
    for part in parts if isinstance(parts, list | tuple) else [getattr(dataset, "dataset", None)]:
        if part is not None and part is not dataset:
            yield from _class_names(part, y)


def _check_class_names(subject: str, names: tuple[str, ...], other: str, expected: tuple[str, ...]) -> None:
    """Refuse class names that are not those of the `other` dataset, whose class numbers would mean something else."""
    if len(set(names)) < len(names):
        raise InputError(f"{subject}: two classes have one name: {quoted(list(names))}. Give each a name of its own.")
    if names != expected:
        pairs = enumerate(zip_longest(names, expected))
        number, called = next(
            (i, [f"'{n}'" if n else "no class" for n in pair]) for i, pair in pairs if len({*pair}) > 1
        )
        raise InputError(
            f"{subject}: class {number} is {called[0]}, but in {other} it is {called[1]}. Number the classes alike in "
            "all datasets (Hugging Face: dataset.align_labels_with_mapping)."
        )


def _read(dataset: Any, subject: str, x: str | None, y: str | None, padding: int | None) -> tuple[list[Any], list[Any]]:
    """Return x and y of every item of a dataset, as arrays."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, str | bytes):
        kind = type(dataset).__name__
        raise InputError(
            f"{subject}: {kind} has no length or no items by number, as iterable (streaming) datasets. A federation "
            "draws samples by number: give a map-style dataset, or list(dataset) if it fits into memory."
        )
    xs, ys = [], []
    for i in range(_length(dataset, subject)):
        try:
            item = dataset[i]
        except Exception as error:  # a dataset's own code fails in many ways
            raise InputError(
                f"{subject}: item {i} cannot be read: {type(error).__name__}: {error}".rstrip(".") + "."
            ) from error
        value, label = _pair(item, f"{subject}, item {i}", x, y)
        xs.append(_array(value, f"{subject}, item {i}: x"))
        ys.append(_array(label, f"{subject}, item {i}: y"))
        if isinstance(item, Mapping) and MASK in item and x != MASK and xs[-1].ndim == 1:
            _check_mask(np.asarray(item[MASK]), xs[-1], padding, f"{subject}, item {i}")
        if isinstance(item, Mapping) and x != TYPES and np.any(np.asarray(item.get(TYPES, 0))):
            raise InputError(
                f"{subject}, item {i}: its {TYPES} are not all 0, as of a pair of texts, but a model gets the tokens "
                f"alone. Give one text per item, or remove the column {TYPES}."
            )
    return xs, ys


def _length(dataset: Any, subject: str) -> int:
    try:
        return len(dataset)
    except TypeError as error:  # torch's IterableDataset may have a length by name alone
        raise InputError(
            f"{subject}: the dataset has no length. Give a map-style dataset, or list(dataset)."
        ) from error


def _pair(item: Any, subject: str, x: str | None, y: str | None) -> tuple[Any, Any]:
    """Return x and y of an item."""
    if isinstance(item, Mapping):
        if x is None or y is None:
            keys = ", ".join(map(str, item))
            raise InputError(f"{subject} is a dictionary with {keys}. Name the two to use, as x='image', y='label'.")
        for name in (x, y):
            if name not in item:
                raise InputError(f"{subject} has no entry '{name}'.{nearest(name, map(str, item))}")
        return item[x], item[y]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise InputError(f"{subject} is {quoted(item)}; a pair (x, y) is needed, or a dictionary with names x= and y=.")


def _array(value: Any, subject: str) -> np.ndarray:
    """Return a number, list, array, tensor or PIL image as an array; images are uint8 [C, H, W]."""
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        return image_pixels(value, subject)
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{subject} cannot be read as an array: {error}.") from error
    if array.dtype.kind not in "buif":
        raise InputError(f"{subject} is {quoted(value)}; numbers are needed. Encode words as numbers first.")
    return array


def _check_mask(mask: np.ndarray, tokens: np.ndarray, padding: int | None, subject: str) -> None:
    """Refuse a tokenizer's mask that hides other tokens than the padding, because fedabml makes the mask itself."""
    hidden = mask == 0
    if hidden.any() and padding is None:
        raise InputError(
            f"{subject} has padding (its {MASK} has zeros). Give the token number of padding, as padding=0."
        )
    if padding is not None and not np.array_equal(hidden, tokens == padding):
        raise InputError(
            f"{subject}: its {MASK} does not mark the tokens that are {padding}. Give the token number that the "
            "tokenizer pads with as padding=, and one that no text has."
        )
