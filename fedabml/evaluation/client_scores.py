"""The measures of predictions, client by client and pooled: what `scoring` computes of every run's predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data.statistics import worst_decile
from .decisions import BINS, pinball
from .predictions import Prediction, Regression
from .structured import MultiPrediction

COVERAGE = 0.9  # nominal coverage of the interval that a regression is tested against
_Z90 = 1.6448536269514722
Scores = tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]  # by client, pooled, diagrams


def _mean_by(owner: np.ndarray, clients: int, values: np.ndarray) -> np.ndarray:
    """Average values [n] over the samples of each client."""
    return np.bincount(owner, values, clients) / np.bincount(owner, minlength=clients)


def calibration(confidence: np.ndarray, correct: np.ndarray, owner: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """Return for each client and bin of confidence [clients, BINS]: samples, summed confidence, correct predictions."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    cell = owner * BINS + bins
    sums = (np.bincount(cell, w, clients * BINS) for w in (np.ones(len(cell)), confidence, correct.astype(float)))
    return tuple(s.reshape(clients, BINS) for s in sums)


def classification_scores(p: Prediction, y: np.ndarray, owner: np.ndarray, clients: int) -> Scores:
    """Return the measures of each client, the pooled measures, and the diagrams of all predictions."""
    true = p.probs[np.arange(len(y)), y]
    correct, confidence = p.label == y, p.probs.max(-1)
    rows = {
        "accuracy": correct.astype(float),
        "nll": -np.log(np.clip(true, 1e-30, None)),
        "brier": (p.probs**2).sum(-1) - 2 * true + 1,
        "entropy": p.entropy,
        "mutual_information": p.mutual_information,
    }
    by_client = {name: _mean_by(owner, clients, v) for name, v in rows.items()}
    count, confidence_sum, right = calibration(confidence, correct, owner, clients)
    by_client["ece"] = np.abs(confidence_sum - right).sum(1) / count.sum(1)
    count, confidence_sum, right = count.sum(0), confidence_sum.sum(0), right.sum(0)
    pooled: dict[str, Any] = {f"{name}_pooled": float(v.mean()) for name, v in rows.items()}
    # A client's own calibration error is biased upwards by its few samples; the pooled one is the headline.
    pooled |= {
        "ece": float(np.abs(confidence_sum - right).sum() / count.sum()),
        "ece_clients": float(by_client["ece"].mean()),
    }
    pooled["accuracy_worst_decile"] = worst_decile(by_client["accuracy"])
    edges = np.linspace(0, math.log(p.probs.shape[1]), 31)
    nonzero = np.maximum(count, 1)
    details = {
        "reliability": [
            {"low": i / BINS, "high": (i + 1) / BINS, "confidence": c, "accuracy": h, "count": int(n)}
            for i, (c, h, n) in enumerate(
                zip((confidence_sum / nonzero).tolist(), (right / nonzero).tolist(), count, strict=True)
            )
        ],
        "entropy_histogram": {
            "edges": edges.tolist(),
            "correct": np.histogram(np.minimum(p.entropy[correct], edges[-1]), edges)[0].tolist(),
            "wrong": np.histogram(np.minimum(p.entropy[~correct], edges[-1]), edges)[0].tolist(),
        },
    }
    return by_client, pooled, details


def structured_scores(p: MultiPrediction, y: np.ndarray, owner: np.ndarray, clients: int) -> Scores:
    """Return the measures over all known answers, and how often all answers of an input are right."""
    by_client, pooled, details = classification_scores(*p.flat(y, owner), clients)
    exact = p.exact(y).astype(float)
    by_client["exact_match"] = _mean_by(owner, clients, exact)
    return by_client, pooled | {"exact_match_pooled": float(exact.mean())}, details


def regression_rows(p: Regression, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return the measures of every row [n] by the names of their means; `squared` is the squared error."""
    gaps, width = _interval_gaps(p, y)
    # Of a skewed distribution, as one cut at 0, the median has the lowest absolute error.
    middle = p.mean if p.transform is None else p.median
    return {
        "squared": ((p.mean - y) ** 2).mean(-1),
        "nll": p.nll(y),
        "mae": np.abs(middle - y).mean(-1),
        "pinball": pinball(gaps),
        "coverage": ((gaps[0] >= 0) & (gaps[1] <= 0)).mean(-1),
        "interval_width": width,
        "std": p.std.mean(-1),
        "model_std": p.model_std.mean(-1),
    }


def regression_scores(p: Regression, y: np.ndarray, owner: np.ndarray, clients: int) -> Scores:
    """Return the measures of each client and the pooled measures; a regression has no diagrams."""
    rows = regression_rows(p, y)
    by_client = {key: _mean_by(owner, clients, values) for key, values in rows.items()}
    by_client = {"rmse": np.sqrt(by_client.pop("squared"))} | by_client
    pooled = {"rmse_pooled": math.sqrt(rows["squared"].mean())}
    pooled |= {f"{key}_pooled": rows[key].mean() for key in ("nll", "mae", "pinball", "coverage", "interval_width")}
    if y.shape[1] > 1:  # targets may have different units: each its own
        pooled |= {f"rmse_target_{j}": v for j, v in enumerate(np.sqrt(((p.mean - y) ** 2).mean(0)))}
    return by_client, {k: float(v) for k, v in pooled.items()} | {"interval": COVERAGE}, {}


def _interval_gaps(p: Regression, y: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return how far targets [n, targets] lie above both ends of their 90% intervals, and the intervals' widths [n].

    The interval of a transformed target is between the quantiles 5% and 95%, that of any other is mean ± 1.64 std.
    """
    if p.transform is None:
        return [y - p.mean - z * p.std for z in (-_Z90, _Z90)], 2 * _Z90 * p.std.mean(-1)
    mean, std = p.gaussian()
    ends = p.original(mean + np.multiply.outer((-_Z90, _Z90), std))
    low, high = p.quantile((0.05, 0.95)) if p.transformed else ends
    return [y - low, y - high], (high - low).mean(-1)


SCORE_FUNCTIONS: dict[Any, Callable[..., Scores]] = {
    Prediction: classification_scores,
    Regression: regression_scores,
    MultiPrediction: structured_scores,
}
