"""The datasets of the experiments: one small one inside the package, the others from their official sources.

`digits` are the 1797 images of the test part of *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0), as scikit-learn distributes them: 8x8 pixels of
0..16, here times 15, split 4:1 inside every class. `digits-few` has the same images with every second training image of
a class in the test split instead. Its clients have so few that sharing helps, and no image that it tests is trained on,
whatever the seed of the partition.
"""

from __future__ import annotations

import os
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import checks_arguments
from ..errors import InputError, nearest, short
from ..files.sealed import write_aside
from .arrays import channels_first
from .files import CLIENT_KEYS, data_dir, read_npz

if TYPE_CHECKING:
    from .download import Progress


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images (uint8, [n, H, W] or [n, H, W, C]) and class numbers, in the official training and test splits."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    class_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = f"{len(self.y_train)} train / {len(self.y_test)} test"
        return short(f"Dataset({self.name}: {sizes}, shape {self.x_train.shape[1:]}, {self.classes} classes)")

    @cached_property
    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """All images, channels first, and their class numbers: the training split, then the test split.

        Made once, so that all partitions of a dataset share it.
        """
        x = np.concatenate([channels_first(self.x_train), channels_first(self.x_test)])
        return x, np.concatenate([self.y_train, self.y_test]).astype(np.int64)


@dataclass(frozen=True)
class Remote:
    """One official file: its md5 and the addresses that have it."""

    name: str
    md5: str
    bases: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Where to try, in order."""
        return tuple(base + self.name for base in self.bases)


@dataclass(frozen=True)
class Source:
    """What is known of a dataset before it is there. `decoder` names a function of the module decode."""

    classes: int
    train: int
    test: int
    shape: tuple[int, ...]
    decoder: str = ""
    files: tuple[Remote, ...] = ()
    class_names: tuple[str, ...] = ()


def _idx_files(bases: tuple[str, ...], *md5: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Remote(f"{name}-ubyte.gz", value, bases) for name, value in zip(names, md5, strict=True))


DIGITS = tuple(string.digits)
EMBEDDED = ("digits", "digits-few")  # inside the package, in one file
TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
SOURCES: Mapping[str, Source] = {
    "digits": Source(10, 1442, 355, (8, 8), class_names=DIGITS),
    "digits-few": Source(10, 723, 1074, (8, 8), class_names=DIGITS),
    "mnist": Source(
        10,
        60000,
        10000,
        (28, 28),
        "mnist",
        _idx_files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        DIGITS,
    ),
    "fashionmnist": Source(
        10,
        60000,
        10000,
        (28, 28),
        "mnist",
        _idx_files(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "emnist": Source(  # a tenth of by-class; another tenth has a few samples more or fewer in a split
        62,
        69821,
        11604,
        (28, 28),
        "emnist",
        (
            Remote(
                "gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                ("https://biometrics.nist.gov/cs_links/EMNIST/", "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/"),
            ),
        ),
        tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    ),
    "cifar10": Source(
        10,
        50000,
        10000,
        (32, 32, 3),
        "cifar10",
        (Remote("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", TORONTO),),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": Source(
        100,
        50000,
        10000,
        (32, 32, 3),
        "cifar100",
        (Remote("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", TORONTO),),
    ),
    "svhn": Source(  # the test split alone: it serves as out-of-distribution data
        10,
        0,
        26032,
        (32, 32, 3),
        "svhn",
        (Remote("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", ("http://ufldl.stanford.edu/housenumbers/",)),),
        DIGITS,
    ),
}


@checks_arguments
def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """A dataset by name: from NAME.npz in the data folder, else downloaded into it (unless `offline`).

    The folder is `data_dir`, else $FEDABML_DATA, else ~/.cache/fedabml/data. `progress` hears of bytes done and in all.
    """
    source = _source(name)
    path = location(name, data_dir)
    if not path.exists():
        remedy = (
            f"Run `fedabml data get {name}` on a connected machine and copy {name}.npz to {path.parent}, or let the "
            f"environment variable FEDABML_DATA name a folder that has it. Or put "
            f"{', '.join(remote.name for remote in source.files)} from {source.files[0].bases[0]} into {_raw(path)}."
        )
        try:
            _get(source, path, offline, progress)
        except InputError as error:
            raise InputError(f"The dataset {name} is not in {path.parent}. {error} {remedy}") from error
    found = _checked(name, source, path)
    return _halved(found) if name == "digits-few" else found


def location(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Where a dataset's NAME.npz is, or would be."""
    _source(name)
    if name in EMBEDDED:
        return Path(str(resources.files("fedabml.data") / "digits.npz"))
    return data_dir(folder) / f"{name}.npz"


@checks_arguments
def datasets(folder: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """What there is: name, classes, sizes of the splits, shape of an image, whether it is here, and where."""
    return [
        {
            "name": name,
            "classes": source.classes,
            "train": source.train,
            "test": source.test,
            "shape": source.shape,
            "present": location(name, folder).exists(),
            "path": str(location(name, folder)),
        }
        for name, source in SOURCES.items()
    ]


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise InputError(f"There is no dataset called '{name}'.{nearest(name, SOURCES)}")
    return SOURCES[name]


def _halved(whole: Dataset) -> Dataset:
    """The same samples with every second training sample of each class in the test split instead."""
    place = np.empty(len(whole.y_train), np.int64)
    for c in range(whole.classes):
        own = np.flatnonzero(whole.y_train == c)
        place[own] = np.arange(len(own))
    kept = place % 2 == 0
    return replace(
        whole,
        x_train=whole.x_train[kept],
        y_train=whole.y_train[kept],
        x_test=np.concatenate([whole.x_test, whole.x_train[~kept]]),
        y_test=np.concatenate([whole.y_test, whole.y_train[~kept]]),
    )


def _raw(path: Path) -> Path:
    return path.with_name(f"{path.stem}-files")


def _get(source: Source, path: Path, offline: bool, progress: Progress | None) -> None:
    """Downloads the official files, decodes them, and writes NAME.npz. Files already put there are used."""
    from . import decode
    from .download import digest, download

    files = {remote.name: _raw(path) / remote.name for remote in source.files}
    for remote in source.files:
        file = files[remote.name]
        if offline and not (file.exists() and digest(file) == remote.md5):
            raise InputError("Nothing was downloaded, as offline was asked for.")
        download(remote.urls, remote.md5, file, progress)
    try:
        arrays = getattr(decode, source.decoder)(files)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"Its files cannot be decoded: {error}") from error
    with write_aside(path) as out:
        np.savez(out, **arrays)
    shutil.rmtree(_raw(path), ignore_errors=True)


def _checked(name: str, source: Source, path: Path) -> Dataset:
    """Reads NAME.npz and makes sure that it holds what the name promises."""
    remedy = f"Delete {path}, then run `fedabml data get {name}`." if source.files else "Install fedabml again."
    try:
        arrays = read_npz(path)
    except InputError as error:
        raise InputError(f"{error} {remedy}") from error
    if not source.train:
        arrays.setdefault("x_train", np.empty((0, *source.shape), np.uint8))
        arrays.setdefault("y_train", np.empty(0, np.uint8))
    for key in CLIENT_KEYS:
        if key not in arrays:
            raise InputError(f"{path} lacks {key}, so it is not the dataset {name}. {remedy}")
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != source.shape:
            raise InputError(
                f"{path}: x_{split} is {x.dtype} of shape {list(x.shape)}; {name} has uint8 images of "
                f"{source.shape}. {remedy}"
            )
        if y.dtype.kind not in "ui" or y.shape != x.shape[:1]:
            raise InputError(f"{path}: y_{split} does not hold one class number for each image of x_{split}. {remedy}")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < source.classes:
            raise InputError(f"{path}: y_{split} goes beyond the {source.classes} classes of {name}. {remedy}")
    return Dataset(
        name, **{key: arrays[key] for key in CLIENT_KEYS}, classes=source.classes, class_names=source.class_names
    )
