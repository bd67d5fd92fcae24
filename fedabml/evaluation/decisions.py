"""Measures of classifiers beyond accuracy: who ranks well, what is found, what is missed; per client and pooled.

Every function takes the predictions for all clients' samples at once, with `owner` [n], the client of each sample, and
returns one value per client; with `owner` all zeros and one client the value is the pooled one. A value that is not
defined, such as the AUROC of a client whose samples are all of one class, is NaN: it counts in no mean.

With two classes the measures are those of class 1, the *positive* class. With more, they are means over the classes
that are defined at the client (macro averages, one class against the rest).
"""

from __future__ import annotations

import numpy as np

SPECIFICITY = 0.9  # at which sensitivity is reported
KEYS = ("auroc", "average_precision", "f1", "balanced_accuracy", "recall", "precision", "sensitivity", "classwise_ece")
BINS = 15


def decision_measures(
    probs: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, specificity: float = SPECIFICITY
) -> dict[str, np.ndarray]:
    """Return the measures `KEYS` of each client [clients] from probabilities [n, classes] and labels [n]."""
    classes = probs.shape[1]
    positive = range(classes) if classes > 2 else (1,)
    ranked = [_ranking(probs[:, c], y == c, owner, clients, specificity) for c in positive]
    table = confusion(probs.argmax(1), y, owner, clients, classes)
    recall, precision, f1 = rates(table)
    chosen = slice(None) if classes > 2 else slice(1, 2)
    return {
        **{key: _mean([each[key] for each in ranked]) for key in ("auroc", "average_precision", "sensitivity")},
        "f1": _mean(f1[:, chosen].T),
        "recall": _mean(recall[:, chosen].T),
        "precision": _mean(precision[:, chosen].T),
        "balanced_accuracy": _mean(recall.T),
        "classwise_ece": _mean([_ece(probs[:, c], y == c, owner, clients) for c in range(classes)]),
    }


def confusion(label: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, classes: int) -> np.ndarray:
    """Count each client's samples by true class and predicted class, int [clients, classes, classes]."""
    cell = (owner * classes + y) * classes + label
    return np.bincount(cell, minlength=clients * classes**2).reshape(clients, classes, classes)


def rates(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return recall, precision and F1 of every class [..., classes] from confusion matrices [..., true, predicted].

    Recall is NaN for a class without samples; precision and F1 are 0 for a class that has samples and is never
    predicted, and NaN for a class that neither has samples nor is predicted.
    """
    hits = np.diagonal(table, axis1=-2, axis2=-1).astype(float)
    true, predicted = table.sum(-1), table.sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(true > 0, hits / true, np.nan)
        precision = np.where(predicted > 0, hits / predicted, np.where(true > 0, 0.0, np.nan))
        f1 = 2 * hits / (true + predicted)  # 0/0, NaN, where the class does not occur
    return recall, precision, f1


def _mean(values: list[np.ndarray] | np.ndarray) -> np.ndarray:
    """Average over the first axis, without NaN; NaN where nothing is defined."""
    stacked = np.asarray(values, dtype=float)
    known = ~np.isnan(stacked)
    with np.errstate(invalid="ignore"):
        return np.where(known, stacked, 0.0).sum(0) / known.sum(0)


def _ranking(
    score: np.ndarray, hit: np.ndarray, owner: np.ndarray, clients: int, specificity: float
) -> dict[str, np.ndarray]:
    """Return AUROC, average precision and sensitivity at a specificity of one score [n] for each client.

    All thresholds of all clients are walked through in one sorted pass: samples are ordered by client and by falling
    score, and those with equal scores form one threshold.
    """
    order = np.lexsort((-score, owner))
    owner, score, hit = owner[order], score[order], hit[order].astype(float)
    positives = np.bincount(owner, hit, clients)
    negatives = np.bincount(owner, 1 - hit, clients)
    first = np.r_[True, owner[1:] != owner[:-1]]  # the first sample of a client
    last = np.r_[(owner[1:] != owner[:-1]) | (score[1:] != score[:-1]), True]  # the last sample of a threshold
    before = np.flatnonzero(first)[np.cumsum(first) - 1]  # the first sample of this sample's client
    true = np.cumsum(hit) - (np.cumsum(hit) - hit)[before]
    false = np.arange(len(hit)) - before + 1 - true
    true, false, owner = true[last], false[last], owner[last]
    start = np.r_[True, owner[1:] != owner[:-1]]
    true_before = np.where(start, 0.0, np.r_[0.0, true[:-1]])
    false_before = np.where(start, 0.0, np.r_[0.0, false[:-1]])
    area = np.bincount(owner, (false - false_before) * (true + true_before) / 2, clients)
    precise = np.bincount(owner, (true - true_before) * true / (true + false), clients)
    allowed = false <= (1 - specificity) * negatives[owner] + 1e-9
    found = np.zeros(clients)
    np.maximum.at(found, owner, np.where(allowed, true, 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        both = np.where((positives > 0) & (negatives > 0), 1.0, np.nan)
        return {
            "auroc": area / (positives * negatives) * both,
            "average_precision": precise / positives * both,
            "sensitivity": found / positives * both,
        }


def _ece(score: np.ndarray, hit: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """Return the calibration error of one class's probability [n] for each client, with 15 equal bins."""
    bins = np.clip(np.ceil(score * BINS).astype(int) - 1, 0, BINS - 1)
    gap = np.bincount(owner * BINS + bins, score - hit, clients * BINS).reshape(clients, BINS)
    return np.abs(gap).sum(1) / np.maximum(np.bincount(owner, minlength=clients), 1)
