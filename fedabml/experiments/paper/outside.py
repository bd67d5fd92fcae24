"""Samples from outside a federation: another dataset of the same shape, or the test samples with their pixels mixed up.

They are appended to the federation's own samples, so they are normalised with the *training* statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ...data import Federation
from ...data.arrays import as_features
from ...errors import InputError
from ...runs.config import RunConfig
from ..study import dataset, federation
from .columns import columns
from .experiment import Desk

SCRAMBLED = "scrambled"  # the dataset's own test samples, all under one permutation of the pixels
# What lies outside each column.
OUTSIDE = {
    "fashionmnist": "mnist",
    "mnist": "fashionmnist",
    "cifar10-2": "svhn",
    "cifar10-5": "svhn",
    "digits": SCRAMBLED,
}
TITLES = {"mnist": "MNIST", "fashionmnist": "FashionMNIST", "svhn": "SVHN", SCRAMBLED: "digits scrambled"}


def pairs(desk: Desk, usual: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The columns asked for, each with what lies outside it, as far as both are here."""
    found = False
    for column, known in columns(desk, usual):
        other = OUTSIDE.get(column)
        try:
            if other is None:
                raise InputError(f"No dataset lies outside it: choose of {', '.join(OUTSIDE)}.")
            if other != SCRAMBLED:
                dataset(other, desk.ask.machine.get("data_dir"))
        except InputError as error:
            desk.note(f"{known.title} is left out. {error}")
            continue
        found = True
        yield column, other
    if not found:
        raise InputError(desk.notes[-1])


@cache
def _arrays(name: str, other: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray, int]:
    """The samples of a dataset with those from outside behind them, their labels, and the number of the first."""
    own = federation(RunConfig(dataset=name, partition="iid", clients=2, data_dir=data_dir))
    if other == SCRAMBLED:
        test = np.sort(own.test.index)
        mixed = np.random.Generator(np.random.PCG64(0)).permutation(own.x[0].size)
        x, y = own.x[test].reshape(len(test), -1)[:, mixed].reshape(own.x[test].shape), own.y[test]
    else:
        source = dataset(other, data_dir)
        x, y = as_features(source.x_test, other), source.y_test.astype(own.y.dtype)
    return np.concatenate([own.x, x]), np.concatenate([own.y, y]), len(own.x)


def with_outside(config: RunConfig, other: str) -> tuple[Federation, int]:
    """A configuration's federation with samples from outside behind its own, and the number of the first of those."""
    x, y, first = _arrays(config.dataset or "digits", other, config.data_dir)
    return replace(federation(config), x=x, y=y), first


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """The chance that a sample from outside scores higher than one from inside; ties count half."""
    _, place, counts = np.unique(np.concatenate([inside, outside]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
