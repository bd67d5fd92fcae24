"""Measures of classifiers beyond accuracy: who ranks well, what is found, what is missed; per client and pooled.

Every function takes the predictions for all clients' samples at once, with `owner` [n], the client of each sample, and
returns one value per client; with `owner` all zeros and one client the value is the pooled one. A value that is not
defined, such as the AUROC of a client whose samples are all of one class, is NaN: it counts in no mean.

With two classes, ranking, F1, recall, precision and sensitivity are those of class 1, the *positive* class. With more,
they are means over the classes that are defined at the client (macro averages, one class against the rest).
"""

from __future__ import annotations

from typing import Any

import numpy as np

SPECIFICITY = 0.9  # at which sensitivity is reported by default
BINS = 15  # of calibration errors, as is customary
SMALL = 50  # rows below which a client gets intervals
RESAMPLES = 500  # of a client's rows, for the intervals of its measures
MOST_RESAMPLED = 500  # small clients up to which measures get bootstrap intervals: resampling takes 8 ms each
LEAST_RESAMPLED = 5  # rows of each class that a client needs for bootstrap intervals
BOOTSTRAPPED = ("auroc", "average_precision", "balanced_accuracy", "f1", "recall")
MOST_CLIENTS = 20_000  # up to which every client is measured; beyond it, only the pooled samples are
MOST_CLASSES = 100  # up to which the confusion matrix is reported
Scores = tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]
"""Measures by client, pooled measures, and details."""


def report(
    probs: np.ndarray, y: np.ndarray, owner: np.ndarray, counts: np.ndarray, specificity: float = SPECIFICITY
) -> Scores:
    """Return all measures of this module: by client, pooled over all samples, and the confusion matrix.

    `owner` [n] ascends. `counts` [clients, classes] are the labels that each client trained on: they give the base
    rate, the score of a model that knows nothing but these counts. Clients with fewer than `SMALL` samples get 95%
    intervals of their accuracy and, of two classes, of `BOOTSTRAPPED` (`accuracy_low`, `accuracy_high`, …).
    """
    clients, classes = counts.shape
    label, one_owner = probs.argmax(1), np.zeros(len(y), int)
    together = decision_measures(probs, y, one_owner, 1, specificity)
    pooled: dict[str, Any] = {f"{name}_pooled": value[0] for name, value in together.items()}
    by_client: dict[str, np.ndarray] = {}
    if clients <= MOST_CLIENTS:
        by_client = decision_measures(probs, y, owner, clients, specificity) | base_rate(y, owner, counts)
        # A client's own calibration error is biased upwards by its few samples; the pooled one is the headline.
        pooled["classwise_ece"] = pooled["classwise_ece_pooled"]
        by_client |= _intervals(probs, y, label == y, owner, clients)
    details: dict[str, Any] = {}
    if classes <= MOST_CLASSES:
        recall, precision, f1 = (_listed(values[0]) for values in rates(*class_counts(label, y, one_owner, 1, classes)))
        details = {"recall_by_class": recall, "precision_by_class": precision, "f1_by_class": f1}
        table = np.bincount(y * classes + label, minlength=classes**2).reshape(classes, classes)
        details["confusion"] = table.tolist()  # a row per true class, a column per predicted one
    return by_client, {k: None if np.isnan(v) else float(v) for k, v in pooled.items()}, details


def _intervals(
    probs: np.ndarray, y: np.ndarray, correct: np.ndarray, owner: np.ndarray, clients: int
) -> dict[str, np.ndarray]:
    """Return the ends of the small clients' intervals, NaN for the others."""
    size = np.bincount(owner, minlength=clients)
    small = np.flatnonzero((size > 0) & (size < SMALL))
    if not len(small):
        return {}
    ends = {f"accuracy_{end}": np.full(clients, np.nan) for end in ("low", "high")}
    low, high = wilson(np.bincount(owner, correct, clients)[small], size[small])
    ends["accuracy_low"][small], ends["accuracy_high"][small] = low, high
    if probs.shape[1] == 2 and len(small) <= MOST_RESAMPLED:
        ends |= {f"{key}_{end}": np.full(clients, np.nan) for key in BOOTSTRAPPED for end in ("low", "high")}
        first = np.cumsum(size) - size
        for client in small:
            rows = slice(first[client], first[client] + size[client])
            for key, both in bootstrap(probs[rows], y[rows], seed=int(client)).items():
                ends[f"{key}_low"][client], ends[f"{key}_high"][client] = both
    return ends


def wilson(hits: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the 95% interval of a share (Wilson 1927), which is no point where all samples are right."""
    z = 1.959963984540054
    rate, scale = hits / count, 1 + z**2 / count
    middle = (rate + z**2 / (2 * count)) / scale
    half = z * np.sqrt(rate * (1 - rate) / count + (z / (2 * count)) ** 2) / scale
    return middle - half, middle + half


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Return the AUROC of one score [n] for the samples marked in `positive` [n]; NaN if all or none are."""
    owner = np.zeros(len(score), np.int64)
    return float(_ranking(score, positive, owner, 1, SPECIFICITY)["auroc"][0])


def bootstrap(probs: np.ndarray, y: np.ndarray, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return the ends of the 95% percentile intervals of `BOOTSTRAPPED` for one client's rows, of two classes.

    The rows [n, 2] are drawn n times with replacement, `RESAMPLES` times over, and each draw is measured. Draws without
    a class, in which a measure is not defined, do not count. All ends are NaN with fewer than `LEAST_RESAMPLED` rows of
    either class: draws from so few do not show how much the measures vary.
    """
    n = len(y)
    if min((y == 0).sum(), (y == 1).sum()) < LEAST_RESAMPLED:
        return dict.fromkeys(BOOTSTRAPPED, (np.nan, np.nan))
    rows = np.random.default_rng(seed).integers(0, n, RESAMPLES * n)
    draws = _decided(probs[rows], y[rows], np.repeat(np.arange(RESAMPLES), n), RESAMPLES, SPECIFICITY)
    ends = {key: np.nanquantile(draws[key], (0.025, 0.975)) for key in BOOTSTRAPPED}
    return {key: (float(low), float(high)) for key, (low, high) in ends.items()}


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def base_rate(y: np.ndarray, owner: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores of a model that knows only a client's training labels [clients, classes], per client.

    `base_accuracy` always predicts the commonest class; `base_nll` and `base_brier` predict the label frequencies, with
    one sample of every class added.
    """
    clients = len(counts)
    shares = (counts + 1) / (counts + 1).sum(1, keepdims=True)
    true = shares[owner, y]
    rows = {
        "base_accuracy": (counts.argmax(1)[owner] == y).astype(float),
        "base_nll": -np.log(true),
        "base_brier": (shares**2).sum(1)[owner] - 2 * true + 1,
    }
    size = np.bincount(owner, minlength=clients)
    return {key: np.bincount(owner, value, clients) / size for key, value in rows.items()}


def base_regression(
    y: np.ndarray, owner: np.ndarray, train: np.ndarray, trainer: np.ndarray, clients: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the scores of a model that predicts the mean and deviation of a client's training targets, per client.

    The variance is smoothed by one sample with that of all clients, so that equal targets do not claim certainty.

    `y` [n, targets] are the samples that are scored, with `owner` [n] counted among the scored `clients`; `train` [m,
    targets] are all training targets, with the number of the client, `trainer` [m], of each.
    """
    count = np.maximum(np.bincount(trainer, minlength=clients.max() + 1), 1)[:, None]

    def mean_of(values: np.ndarray) -> np.ndarray:
        sums = [np.bincount(trainer, column, len(count)) for column in values.T]
        return np.stack(sums, 1) / count

    mean = mean_of(train)
    spread = mean_of((train - mean[trainer]) ** 2) * count
    std = np.sqrt((spread + np.maximum(train.var(0), 1e-12)) / (count + 1))[clients][owner]
    error = y - mean[clients][owner]
    nll = (0.5 * (error / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)).sum(1)
    size = np.bincount(owner, minlength=len(clients))
    rmse = np.sqrt(np.bincount(owner, (error**2).mean(1), len(clients)) / size)
    return {"base_rmse": rmse, "base_nll": np.bincount(owner, nll, len(clients)) / size}


def decision_measures(
    probs: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, specificity: float = SPECIFICITY
) -> dict[str, np.ndarray]:
    """Return the measures of each client [clients] from probabilities [n, classes] and labels [n].

    Recall, precision and sensitivity are those of the positive class, so they exist for two classes alone. Sensitivity
    is the largest recall of any threshold whose specificity, the share of negative samples below it, is high enough.
    """
    errors = [_ece(probs[:, c], y == c, owner, clients) for c in range(probs.shape[1])]
    return _decided(probs, y, owner, clients, specificity) | {"classwise_ece": mean(errors)}


def _decided(
    probs: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, specificity: float
) -> dict[str, np.ndarray]:
    """Return the measures of ranks and decisions of each client, without those of calibration."""
    classes = probs.shape[1]
    positive = range(classes) if classes > 2 else (1,)
    ranked = [_ranking(probs[:, c], y == c, owner, clients, specificity) for c in positive]
    recall, precision, f1 = rates(*class_counts(probs.argmax(1), y, owner, clients, classes))
    measures = {
        "auroc": mean([curve["auroc"] for curve in ranked]),
        "average_precision": mean([curve["average_precision"] for curve in ranked]),
        "balanced_accuracy": mean(recall.T),
        "f1": mean(f1.T[list(positive)]),
    }
    if classes == 2:
        measures |= {"recall": recall[:, 1], "precision": precision[:, 1], "sensitivity": ranked[0]["sensitivity"]}
    return measures


def class_counts(
    label: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count each client's samples of every class [clients, classes]: found, true, predicted."""

    def count(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        cells = np.bincount(owner * classes + values, weights, clients * classes)
        return cells.astype(float).reshape(clients, classes)

    return count(y, (label == y).astype(float)), count(y), count(label)


def rates(
    true_positives: np.ndarray, true: np.ndarray, predicted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return recall, precision and F1 of every class from `class_counts`.

    Recall is NaN for a class without samples; precision and F1 are 0 for a class that has samples and is never
    predicted, and NaN for a class that neither has samples nor is predicted.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(true > 0, true_positives / true, np.nan)
        precision = np.where(predicted > 0, true_positives / predicted, np.where(true > 0, 0.0, np.nan))
        f1 = 2 * true_positives / (true + predicted)  # 0/0, NaN, where the class does not occur
    return recall, precision, f1


def mean(values: list[Any] | np.ndarray) -> np.ndarray:
    """Average over the first axis, without NaN; NaN where nothing is defined."""
    stacked = np.asarray(values, dtype=float)
    is_number = ~np.isnan(stacked)
    with np.errstate(invalid="ignore"):
        return np.where(is_number, stacked, 0.0).sum(0) / is_number.sum(0)


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
    most_found = np.zeros(clients)
    np.maximum.at(most_found, owner, np.where(allowed, true, 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        defined = np.where((positives > 0) & (negatives > 0), 1.0, np.nan)
        return {
            "auroc": area / (positives * negatives) * defined,
            "average_precision": precise / positives * defined,
            "sensitivity": most_found / positives * defined,
        }


def classwise_ece(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over classes of the calibration error of each class's probability, for rows [n, classes]."""
    owner = np.zeros(len(y), int)
    return float(np.mean([_ece(probs[:, c], y == c, owner, 1)[0] for c in range(probs.shape[1])]))


def _ece(score: np.ndarray, hit: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """Return the calibration error of one class's probability [n] for each client, with 15 equal bins."""
    bins = np.clip(np.ceil(score * BINS).astype(int) - 1, 0, BINS - 1)
    gap = np.bincount(owner * BINS + bins, score - hit, clients * BINS).reshape(clients, BINS)
    return np.abs(gap).sum(1) / np.maximum(np.bincount(owner, minlength=clients), 1)
