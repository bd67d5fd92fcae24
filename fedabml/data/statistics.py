"""Means and standard deviations of training samples, in passes over small chunks; small tools of statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

CHUNK = 512  # samples per pass: no wide copy of a whole dataset is made, and a chunk stays in the cache


def worst_decile(values: np.ndarray) -> float:
    """Return the mean of the lowest tenth of `values` [N], at least one."""
    return float(np.sort(values)[: max(1, len(values) // 10)].mean())


def lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum is lowest between two bounds, by golden-section search."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 1e-7 * max(1.0, high):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return (low + high) / 2


def moments(x: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation (never 0), float32, of the samples x[index].

    uint8 images have one per channel, [C, 1, 1]; floats [n, f] one per feature, [f]; any other floats one number, [].
    """
    if x.dtype == np.uint8:
        mean, deviation = _of_bytes(x, index)
        shape: tuple[int, ...] = (x.shape[1], *(1,) * (x.ndim - 2))
    else:
        axes, shape = ((0,), x.shape[1:]) if x.ndim == 2 else (tuple(range(x.ndim)), ())
        total = len(index) * (1 if x.ndim == 2 else x[0].size)
        mean = sum((c.sum(axes, dtype=np.float64) for c in _chunks(x, index)), np.zeros(shape)) / total
        square = sum((np.square(c - mean).sum(axes) for c in _chunks(x, index)), np.zeros(shape))
        deviation = np.sqrt(square / total)
    # A constant feature has no information: it is shifted to zero and left unscaled. The bound allows for rounding.
    scale = np.where(deviation > 1e-7 * np.abs(mean) + 1e-30, deviation, 1.0)
    return mean.reshape(shape).astype(np.float32), scale.reshape(shape).astype(np.float32)


def _of_bytes(x: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return exact moments per channel by counting each of the 256 values, five times faster than in floats."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for chunk in _chunks(x, index):
        for channel, count in enumerate(counts):
            count += np.bincount(chunk[:, channel].reshape(-1), minlength=256)
    values = np.arange(256)
    mean = counts @ values / counts.sum(1)
    return mean, np.sqrt((counts * np.square(values - mean[:, None])).sum(1) / counts.sum(1))


def _chunks(x: np.ndarray, index: np.ndarray) -> Iterator[np.ndarray]:
    return (x[index[start : start + CHUNK]] for start in range(0, len(index), CHUNK))
