"""Samples from outside a federation: another dataset of the same shape, or the test samples with their pixels mixed up.

They are appended to the federation's own samples, so they are normalised with the *training* statistics.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ...data import Federation
from ...data.arrays import as_features
from ...errors import InputError
from ...runs.config import RunConfig
from ..study import dataset, federation
from .experiment import Context

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


def check_outside(context: Context, column: str) -> None:
    """Refuse a column that has no dataset outside it, or whose is not here."""
    if column not in OUTSIDE:
        raise InputError(f"No dataset lies outside it: choose among {', '.join(OUTSIDE)}.")
    if OUTSIDE[column] != SCRAMBLED:
        dataset(OUTSIDE[column], context.request.machine.get("data_dir"))


@cache
def _arrays(name: str, other: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the samples of a dataset followed by those from outside, their labels, and the number of the first."""
    fed = federation(RunConfig(dataset=name, partition="iid", clients=2, data_dir=data_dir))
    if other == SCRAMBLED:
        test = np.sort(fed.test.index)
        mixed = np.random.Generator(np.random.PCG64(0)).permutation(fed.x[0].size)
        x, y = fed.x[test].reshape(len(test), -1)[:, mixed].reshape(fed.x[test].shape), fed.y[test]
    else:
        source = dataset(other, data_dir)
        x, y = as_features(source.x_test, other), source.y_test.astype(fed.y.dtype)
    return np.concatenate([fed.x, x]), np.concatenate([fed.y, y]), len(fed.x)


def with_outside(config: RunConfig, other: str) -> tuple[Federation, int]:
    """Return a configuration's federation with samples from outside after its own, and the number of the first."""
    x, y, first = _arrays(config.dataset or "digits", other, config.data_dir)
    return replace(federation(config), x=x, y=y), first


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the probability that a sample from outside scores higher than one from inside; ties count half."""
    _, position, counts = np.unique(np.concatenate([inside, outside]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[position]
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
