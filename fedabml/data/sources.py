"""Loading a dataset by name: from NAME.npz in the data folder, or from its official files. catalogue.py lists them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import checks_arguments
from ..errors import InputError, nearest, shortened
from ..files.paths import write_aside
from . import decode
from .arrays import channels_first
from .catalogue import EMBEDDED, SOURCES, Source
from .decode import rank_in_class
from .files import CLIENT_KEYS, data_dir, read_npz

if TYPE_CHECKING:
    from .download import Progress


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and class numbers in the official training and test splits.

    `x_train` and `x_test` are uint8 [n, H, W] or [n, H, W, C]; `y_train` and `y_test` are integers [n] below `classes`.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    class_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = f"{len(self.y_train)} train / {len(self.y_test)} test"
        return shortened(f"Dataset({self.name}: {sizes}, shape {self.x_train.shape[1:]}, {self.classes} classes)")

    @cached_property
    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all images, uint8 [n, C, H, W], and class numbers, int64 [n]: the training split, then the test split.

        They are made once, so that all partitions of a dataset share them.
        """
        x = np.concatenate([channels_first(self.x_train), channels_first(self.x_test)])
        return x, np.concatenate([self.y_train, self.y_test]).astype(np.int64)


@checks_arguments
def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Return a dataset by name: from NAME.npz in the data folder, else downloaded into it (unless `offline`).

    The folder is `data_dir`, else $FEDABML_DATA, else ~/.cache/fedabml/data. `progress` is called with the bytes done
    and in all. Raises InputError for an unknown name, a failed download or a damaged file.
    """
    source = _source(name)
    path = location(name, data_dir)
    if not path.exists():
        try:
            _get(source, path, offline, progress)
        except InputError as error:
            raise InputError(
                f"The dataset {name} is not in {path.parent}. {error} Run `fedabml data get {name}` on a connected "
                f"machine and copy {name}.npz to {path.parent}, or set the environment variable FEDABML_DATA to a "
                f"folder that has it. Or put {', '.join(remote.name for remote in source.files)} from "
                f"{source.files[0].bases[0]} into {_raw(path)}."
            ) from error
    dataset = _checked(name, source, path)
    return _halved(dataset) if name == "digits-few" else dataset


def location(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the path that a dataset's NAME.npz has, or would have."""
    _source(name)
    if name in EMBEDDED:
        return Path(str(resources.files("fedabml.data") / "digits.npz"))
    return data_dir(folder) / f"{name}.npz"


@checks_arguments
def datasets(folder: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """List the datasets: name, classes, sizes of the splits, shape of an image, whether it is here, and its path."""
    return [
        {
            "name": name,
            **{key: getattr(source, key) for key in ("classes", "train", "test", "shape")},
            "present": location(name, folder).exists(),
            "path": str(location(name, folder)),
        }
        for name, source in SOURCES.items()
    ]


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise InputError(f"There is no dataset called '{name}'.{nearest(name, SOURCES)}")
    return SOURCES[name]


def _halved(full: Dataset) -> Dataset:
    """Return the same samples with every second training sample of each class in the test split."""
    kept = rank_in_class(full.y_train, np.arange(len(full.y_train))) % 2 == 0
    return replace(
        full,
        x_train=full.x_train[kept],
        y_train=full.y_train[kept],
        x_test=np.concatenate([full.x_test, full.x_train[~kept]]),
        y_test=np.concatenate([full.y_test, full.y_train[~kept]]),
    )


def _raw(path: Path) -> Path:
    """Return the folder of the official files while they are downloaded."""
    return path.with_name(f"{path.stem}-files")


def _get(source: Source, path: Path, offline: bool, progress: Progress | None) -> None:
    """Download the official files, decode them, and write NAME.npz. Files that are there already are used."""
    from .download import digest, download

    files = {remote.name: _raw(path) / remote.name for remote in source.files}
    for remote in source.files:
        file = files[remote.name]
        if offline and not (file.exists() and digest(file) == remote.md5):
            raise InputError("Nothing was downloaded, because offline is set.")
        download([base + remote.name for base in remote.bases], remote.md5, file, progress)
    try:
        arrays = getattr(decode, source.decoder)(files)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"Its files cannot be decoded: {error}") from error
    with write_aside(path) as out:
        np.savez(out, **arrays)
    shutil.rmtree(_raw(path), ignore_errors=True)


def _checked(name: str, source: Source, path: Path) -> Dataset:
    """Read NAME.npz and refuse it unless it holds the arrays that the catalogue promises."""
    remedy = f"Delete {path}, then run `fedabml data get {name}`." if source.files else "Install fedabml again."
    try:
        arrays = read_npz(path)
        if not source.train:
            empty = {"x_train": np.empty((0, *source.shape), np.uint8), "y_train": np.empty(0, np.uint8)}
            arrays = empty | arrays
        for key in CLIENT_KEYS:
            if key not in arrays:
                raise InputError(f"{path} lacks {key}, so it is not the dataset {name}.")
        for split in ("train", "test"):
            x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            if x.dtype != np.uint8 or x.shape[1:] != source.shape:
                raise InputError(
                    f"{path}: x_{split} is {x.dtype} of shape {list(x.shape)}; {name} has uint8 images of "
                    f"{source.shape}."
                )
            if y.dtype.kind not in "ui" or y.shape != x.shape[:1]:
                raise InputError(f"{path}: y_{split} does not hold one class number for each image of x_{split}.")
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < source.classes:
                raise InputError(f"{path}: y_{split} goes beyond the {source.classes} classes of {name}.")
    except InputError as error:
        raise InputError(f"{error} {remedy}") from error
    images = {key: arrays[key] for key in CLIENT_KEYS}
    return Dataset(name, **images, classes=source.classes, class_names=source.class_names)
