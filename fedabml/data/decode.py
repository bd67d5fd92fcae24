"""Decoding the official files of the image datasets. No file is unpacked to disk, and none is unpickled.

A decoder maps the downloaded files, by name, to x_train, y_train, x_test and y_test.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import InputError
from .rows import EMNIST, generator, shuffled

Arrays = dict[str, np.ndarray]
MAX_BYTES = 1 << 30  # in one array: more than any file here, less than a machine's memory


def idx(file: IO[bytes], subject: str) -> np.ndarray:
    """Read an array of bytes in the IDX format of MNIST; `subject` names it in errors."""
    head = file.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
        raise InputError(f"{subject} is not an IDX file of bytes.")
    shape = tuple(int.from_bytes(file.read(4), "big") for _ in range(head[3]))
    size = math.prod(shape)
    if size > MAX_BYTES:
        raise InputError(f"{subject} claims the shape {list(shape)}, which is too large to be true.")
    raw = file.read(size + 1)
    if len(raw) != size:
        raise InputError(f"{subject} does not have the length that its head promises.")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def mnist(files: Mapping[str, Path]) -> Arrays:
    """Decode MNIST and FashionMNIST: four gzipped IDX files."""

    def read(name: str) -> np.ndarray:
        with gzip.open(files[f"{name}-ubyte.gz"]) as file:
            return idx(file, name)  # type: ignore[arg-type]

    x_train, y_train = read("train-images-idx3"), read("train-labels-idx1")
    x_test, y_test = read("t10k-images-idx3"), read("t10k-labels-idx1")
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def emnist(files: Mapping[str, Path]) -> Arrays:
    """Decode a tenth of EMNIST by-class, a fixed draw, split 6:1 inside every class; the images are set upright."""

    def read(name: str) -> np.ndarray:
        member = f"gzip/emnist-byclass-{name}-ubyte.gz"
        try:
            with archive.open(member) as packed, gzip.open(packed) as file:
                return idx(file, member)  # type: ignore[arg-type]
        except KeyError as error:
            raise InputError(f"gzip.zip has no {member}.") from error

    with zipfile.ZipFile(files["gzip.zip"]) as archive:
        y = np.concatenate([read("train-labels-idx1"), read("test-labels-idx1")])
        tenth = np.sort(shuffled(len(y), generator(0, EMNIST))[: len(y) // 10])
        train = read("train-images-idx3")
        first = tenth[tenth < len(train)]
        x = np.concatenate([train[first], read("test-images-idx3")[tenth[len(first) :] - len(train)]])
    x, y = x.transpose(0, 2, 1), y[tenth]
    test = rank_in_class(y, np.random.default_rng(0).permutation(len(y))) % 7 == 6
    return {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}


def rank_in_class(y: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the rank [n] of every sample among those of its class, if they stand in this order of sample numbers."""
    rank = np.empty(len(y), np.int64)
    for c in np.unique(y):
        samples = order[y[order] == c]
        rank[samples] = np.arange(len(samples))
    return rank


def cifar10(files: Mapping[str, Path]) -> Arrays:
    """Decode CIFAR-10, the binary version: records of a label and 3072 bytes of pixels."""
    members = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    return _cifar(files["cifar-10-binary.tar.gz"], members, "cifar-10-batches-bin/test_batch.bin", labels=1)


def cifar100(files: Mapping[str, Path]) -> Arrays:
    """Decode CIFAR-100, the binary version: records of a coarse label, a fine label (which is used) and 3072 bytes."""
    folder = "cifar-100-binary"
    return _cifar(files["cifar-100-binary.tar.gz"], [f"{folder}/train.bin"], f"{folder}/test.bin", labels=2)


def _cifar(path: Path, train: list[str], test: str, labels: int) -> Arrays:
    record = labels + 3072

    def part(archive: tarfile.TarFile, name: str) -> tuple[np.ndarray, np.ndarray]:
        try:
            member = archive.getmember(name)
        except KeyError as error:
            raise InputError(f"{path.name} has no {name}.") from error
        file = archive.extractfile(member) if member.isfile() else None
        if file is None or member.size % record or not 0 < member.size <= MAX_BYTES:
            raise InputError(f"{name} in {path.name} is not a file of whole records of {record} bytes.")
        table = np.frombuffer(file.read(), np.uint8).reshape(-1, record)
        images = table[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return images, table[:, labels - 1]

    with tarfile.open(path, "r:gz") as archive:
        parts = [part(archive, name) for name in train]
        x_test, y_test = part(archive, test)
    x, y = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    return {"x_train": x, "y_train": y, "x_test": np.ascontiguousarray(x_test), "y_test": y_test.copy()}


def svhn(files: Mapping[str, Path]) -> Arrays:
    """Decode the test split of SVHN (cropped digits), a MATLAB file; its label 10 means the digit 0."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise InputError("Decoding SVHN needs scipy: pip install scipy.") from error
    content = loadmat(files["test_32x32.mat"], variable_names=["X", "y"])
    x, y = content.get("X"), content.get("y")
    if x is None or y is None or x.ndim != 4 or x.shape[3] != y.size:
        raise InputError("test_32x32.mat does not hold images X and labels y.")
    x = np.ascontiguousarray(x.transpose(3, 0, 1, 2)).astype(np.uint8, copy=False)
    return {"x_test": x, "y_test": (y.reshape(-1) % 10).astype(np.uint8)}
