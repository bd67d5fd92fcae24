"""What a client learns from its validation data about its own model: calibration, a threshold, sets with coverage.

They are fitted on samples that the model was not trained on, and travel with the client's posterior:

- *Temperature* (Guo et al. 2017): p ∝ p^(1/T), with T of the lowest validation NLL. T > 1 makes a model less sure. A
  prior log T ~ N(0, 0.3²) keeps T near 1 where samples are few: ten right predictions do not make a model certain.
- *Isotonic regression* (Zadrozny and Elkan 2002): p ← f(p), with the non-decreasing f of the least squared error. It
  mends any monotone distortion, but needs more rows than one number does. For more than two classes there is an f for
  each, and the results are normalised.
- *Threshold*: for two classes, the probability from which class 1 is predicted, chosen for a stated aim.
- *Conformal sets and intervals* (Vovk et al. 2005): labels or ranges that contain the truth with a stated probability.
  The guarantee is marginal: over new samples of this client, if they are exchangeable with its validation samples. It
  holds for no single group of patients, and not after the client's data have changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..data.statistics import lowest
from ..errors import InputError

LOG_T_STD = 0.3  # standard deviation of the prior of log T
LOG_T_MOST = 3.0  # the largest |log T|
ISOTONIC_ROWS = 100  # validation rows that an isotonic regression needs; with fewer its steps follow single rows
CALIBRATION_KINDS = ("temperature", "isotonic", "none")
FOLDS = 5  # of the cross-validation that tells what a calibration brings


def fit_temperature(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the temperature T of the lowest NLL plus −log of its prior, for probabilities [n, classes], labels [n]."""
    if len(y) == 0:
        return 1.0
    logits = np.log(np.clip(probs, 1e-30, None))

    def loss(log_t: float) -> float:
        scaled = logits * math.exp(-log_t)
        top = scaled.max(1, keepdims=True)
        nll = (np.log(np.exp(scaled - top).sum(1)) + top[:, 0] - scaled[np.arange(len(y)), y]).sum()
        return float(nll + 0.5 * (log_t / LOG_T_STD) ** 2)

    return math.exp(lowest(loss, -LOG_T_MOST, LOG_T_MOST))


def with_temperature(probs: np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
    """Return p^(1/T), normalised, for probabilities [..., classes] and one T, or one per row [..., 1]."""
    scaled = np.log(np.clip(probs, 1e-30, None)) / temperature
    scaled = np.exp(scaled - scaled.max(-1, keepdims=True))
    return scaled / scaled.sum(-1, keepdims=True)


def isotonic_fit(score: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots (x, f(x)) of the non-decreasing function of the least squared error, ascending in x.

    `score` [n] and `target` [n] are numbers; rows of one score count as one row with their mean. Pooled adjacent
    violators: while a block's mean is below that of the block before it, the two become one. Of a block only the ends
    are kept, between which f is linear.
    """
    x, number, weight = np.unique(score, return_inverse=True, return_counts=True)
    mean = np.bincount(number, target) / weight
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of different scores
    for value, count in zip(mean.tolist(), weight.tolist(), strict=True):
        block = (value, float(count), 1)
        while blocks and blocks[-1][0] >= block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / total, total, before[2] + block[2])
        blocks.append(block)
    ends = np.cumsum([0, *(size for _, _, size in blocks)])
    keep = sorted({*ends[:-1].tolist(), *(ends[1:] - 1).tolist()})
    fitted = np.repeat([value for value, _, _ in blocks], np.diff(ends))
    return x[keep], fitted[keep]


@dataclass(frozen=True)
class Calibration:
    """How a client's probabilities [n, classes] are mended: by a temperature, by curves of knots, or not at all."""

    kind: str = "temperature"
    temperature: float = 1.0
    curves: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()  # (x, f(x)) per class; for two: of class 1

    @classmethod
    def fit(cls, kind: str, probs: np.ndarray, y: np.ndarray) -> Calibration:
        """Fit a calibration of one of `CALIBRATION_KINDS` on validation rows.

        The values of curves stay 1/(n + 2) away from 0 and 1: n rows do not show that something never happens.
        """
        if kind == "temperature":
            return cls(kind, fit_temperature(probs, y))
        if kind == "none":
            return cls(kind)
        least, curves = 1 / (len(y) + 2), []
        for c in (1,) if probs.shape[1] == 2 else range(probs.shape[1]):
            x, value = isotonic_fit(probs[:, c], (y == c).astype(float))
            curves.append((tuple(x.tolist()), tuple(np.clip(value, least, 1 - least).tolist())))
        return cls(kind, curves=tuple(curves))

    def apply(self, probs: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities; curves go on as constants beyond their ends."""
        if self.kind == "none":
            return probs
        if self.kind == "temperature":
            return with_temperature(probs, self.temperature)
        if len(self.curves) == 1:
            (x, value), score = self.curves[0], probs[:, 1]
            mended = np.interp(score, x, value)
            return np.stack([1 - mended, mended], 1)
        columns = [np.interp(probs[:, c], *curve) for c, curve in enumerate(self.curves)]
        return np.stack(columns, 1) / np.sum(columns, 0)[:, None]


def folds(y: np.ndarray) -> np.ndarray:
    """Return the fold [n] of each row, dealt class by class, so that every fold has its share of a rare class."""
    fold = np.empty(len(y), int)
    fold[np.argsort(y, kind="stable")] = np.arange(len(y)) % FOLDS
    return fold


def cross_calibrated(kind: str, probs: np.ndarray, y: np.ndarray, owner: np.ndarray | None = None) -> np.ndarray:
    """Return probabilities [n, classes], each row calibrated by a calibration that was fitted on other rows.

    Rows are dealt to folds class by class, so every fold has its share of a rare class. A single row stays as it is.
    With `owner` [n], the answers of one owner, such as an input with several labels, are in the same fold.
    """
    fold, out = folds(y), probs.copy()
    if owner is not None:
        fold = np.unique(owner, return_inverse=True)[1].reshape(-1) % FOLDS
    for k in range(FOLDS):
        if (fold == k).any() and (fold != k).any():
            out[fold == k] = Calibration.fit(kind, probs[fold != k], y[fold != k]).apply(probs[fold == k])
    return out


@dataclass(frozen=True)
class Aim:
    """What a decision threshold is chosen for: `f1`, `recall>=0.8`, `precision>=0.8`, or `cost:MISS,ALARM`."""

    kind: str
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Aim:
        """Read an aim as users write it; raise `InputError` for anything else."""
        kind, _, rest = text.replace(" ", "").partition(">=" if ">=" in text else ":")
        try:
            values = tuple(float(part) for part in rest.split(",")) if rest else ()
        except ValueError:
            values = (math.nan,)
        if kind == "f1" and not rest:
            return cls(kind)
        if kind in ("recall", "precision") and ">=" in text and len(values) == 1 and 0 < values[0] <= 1:
            return cls(kind, values)
        if kind == "cost" and len(values) == 2 and all(0 < v < math.inf for v in values):
            return cls(kind, values)
        raise InputError(
            f"The aim of the threshold is {text!r}. Write f1, recall>=0.8, precision>=0.8, or cost:MISS,ALARM with the "
            "cost of a missed positive and of a false alarm, such as cost:10,1; or cost:FILE.csv with all costs."
        )


def choose_threshold(score: np.ndarray, y: np.ndarray, aim: Aim) -> float | None:
    """Return the threshold t that serves the aim best on validation data: class 1 is predicted where score >= t.

    `score` [n] is the probability of class 1, `y` [n] is 0 or 1. Among thresholds that serve alike, the highest is
    taken. For `recall>=r` it is the highest threshold that finds the share r; for `precision>=p` the lowest whose
    precision is p. Returns None where the data cannot tell: no positive sample, or no threshold reaches the aim.
    """
    if not (y == 1).any():
        return None
    order = np.argsort(-score, kind="stable")
    last = np.r_[np.diff(score[order]) != 0, True]  # the last of equal scores: a threshold takes all of them
    true_positives, predicted = np.cumsum(y[order] == 1)[last], (np.arange(len(y)) + 1)[last]
    thresholds = score[order][last]
    positives = int((y == 1).sum())
    if aim.kind == "f1":
        best = int(np.argmax(2 * true_positives / (positives + predicted)))
    elif aim.kind == "recall":
        best = int(np.argmax(true_positives >= aim.values[0] * positives - 1e-9))
    elif aim.kind == "precision":
        good = np.flatnonzero(true_positives / predicted >= aim.values[0] - 1e-9)
        if not len(good):
            return None
        best = int(good[-1])
    else:
        miss, alarm = aim.values
        costs = miss * (positives - true_positives) + alarm * (predicted - true_positives)
        best = int(np.argmin(costs))
        if miss * positives <= costs[best]:  # to predict no positive at all is as cheap
            return math.inf
    # Halfway to the next lower score: the samples at the threshold itself stay on their side after rounding.
    below = thresholds[best + 1] if best + 1 < len(thresholds) else 0.0
    return float((thresholds[best] + below) / 2)


def conformal_quantile(scores: np.ndarray, coverage: float) -> float:
    """Return the score that a new sample exceeds with a probability of at most 1 − coverage.

    It is the ⌈(n + 1)·coverage⌉-th smallest of the validation scores [n], and infinite where n is too small for the
    coverage: then only "everything" has the guarantee. Nine samples are needed for 90%, 19 for 95%.
    """
    if not 0 < coverage < 1:
        raise InputError(f"The coverage is {coverage}; it must lie between 0 and 1, such as 0.9.")
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else math.inf


def label_scores(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how badly each label fits, 1 − p(y) [n]; sets are made of the labels below the conformal quantile."""
    return 1 - probs[np.arange(len(y)), y]


def label_sets(probs: np.ndarray, quantile: float) -> np.ndarray:
    """Return the prediction sets bool [n, classes]: labels with 1 − p <= quantile, and always the most probable one."""
    sets = 1 - probs <= quantile
    sets[np.arange(len(probs)), probs.argmax(1)] = True
    return sets


def interval_scores(mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return |y − mean| / std [n]: how many predicted deviations a target lies away."""
    return np.abs(y - mean) / std


def intervals(mean: np.ndarray, std: np.ndarray, quantile: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper ends of the intervals mean ± quantile · std."""
    return mean - quantile * std, mean + quantile * std
