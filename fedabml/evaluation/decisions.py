"""Measures of classifiers beyond accuracy: who ranks well, what is found, what is missed; per client and pooled.

Every function takes the predictions for all clients' samples at once, with `owner` [n], the client of each sample, and
returns one value per client; with `owner` all zeros and one client the value is the pooled one. A value that is not
defined, such as the AUROC of a client whose samples are all of one class, is NaN: it counts in no mean.

With two classes, ranking, F1, recall, precision and sensitivity are those of class 1, the *positive* class. With more,
they are means over the classes that are defined at the client (macro averages, one class against the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .measures import FEW_OF_CLASS

SPECIFICITY = 0.9  # at which sensitivity is reported by default
BINS = 15  # of calibration errors, as is customary
SMALL = 50  # rows below which a client gets intervals; of two classes, rows of either class
RESAMPLES = 500  # of a client's rows, for the intervals of its measures
MOST_RESAMPLED = 25_000  # rows of small clients that are resampled, the smallest clients first: 0.2 ms each
MOST_AT_ONCE = 1_000_000  # resampled rows in memory
BOOTSTRAPPED = ("auroc", "average_precision", "balanced_accuracy", "f1", "precision", "sensitivity")
BOOTSTRAPPED_MACRO = ("balanced_accuracy", "f1")  # those of more than two classes
MOST_CLIENTS = 20_000  # up to which every client is measured; beyond it, only the pooled samples are
MOST_CLASSES = 100  # up to which the confusion matrix is reported
MOST_COLUMNS = 20  # classes up to which each client's rows, recall and precision are reported class by class
MOST_CONFUSED = 5  # classes up to which each client's confusion matrix is reported, a column per cell
QUANTILES = (0.05, 0.95)  # the ends of the 90% interval
Scores = tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]
"""Measures by client, pooled measures, and details."""


def report(
    probs: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    counts: np.ndarray,
    specificity: float = SPECIFICITY,
    names: Sequence[str] = (),
) -> Scores:
    """Return all measures of this module: by client, pooled over all samples, and the confusion matrix.

    `owner` [n] ascends. `counts` [clients, classes] are the labels that each client trained on: they give the base
    rate, the score of a model that knows nothing but these counts. Clients with fewer than `SMALL` samples, or with so
    few of either of two classes, get 95% intervals: of accuracy and recall those of Wilson, of other measures those of
    `bootstrap` (`accuracy_low`, `accuracy_high`, …). With the `names` of at most `MOST_COLUMNS` classes, each client
    has columns by class, such as `recall[yes]`. With at most `MOST_CONFUSED`, it also has its confusion matrix:
    `confusion[yes>no]` counts the rows of `yes` for which `no` was predicted.
    """
    clients, classes = counts.shape
    label, one_owner = probs.argmax(1), np.zeros(len(y), int)
    together = decision_measures(probs, y, one_owner, 1, specificity)
    pooled: dict[str, Any] = {f"{name}_pooled": value[0] for name, value in together.items()}
    by_client: dict[str, np.ndarray] = {}
    if clients <= MOST_CLIENTS:
        base, pooled_base = base_rate(y, owner, counts, specificity)
        by_client, pooled = decision_measures(probs, y, owner, clients, specificity) | base, pooled | pooled_base
        # A client's own calibration error is biased upwards by its few samples; the pooled one is the headline.
        pooled["classwise_ece"] = pooled["classwise_ece_pooled"]
        by_client |= _intervals(probs, y, owner, clients, specificity)
        if 0 < len(names) <= MOST_COLUMNS:
            by_client |= _by_class(class_counts(label, y, owner, clients, classes), names)
            by_client |= _confused(label, y, owner, clients, names)
    details: dict[str, Any] = {"class_names": list(names)} if 0 < len(names) <= MOST_CLASSES else {}
    if classes <= MOST_CLASSES:
        recall, precision, f1 = (_listed(values[0]) for values in rates(*class_counts(label, y, one_owner, 1, classes)))
        details |= {"recall_by_class": recall, "precision_by_class": precision, "f1_by_class": f1}
        table = np.bincount(y * classes + label, minlength=classes**2).reshape(classes, classes)
        details["confusion"] = table.tolist()  # a row per true class, a column per predicted one
    return by_client, {k: None if np.isnan(v) else float(v) for k, v in pooled.items()}, details


def _by_class(counts: tuple[np.ndarray, np.ndarray, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return every client's rows, recall and precision of each class, by columns such as `recall[yes]`."""
    recall, precision, _ = rates(*counts)
    columns = {"rows": counts[1], "recall": recall, "precision": precision}
    return {f"{key}[{name}]": values[:, c] for c, name in enumerate(names) for key, values in columns.items()}


def _confused(
    label: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return every client's confusion matrix, by columns such as `confusion[yes>no]` (true > predicted)."""
    classes = len(names)
    if classes > MOST_CONFUSED:
        return {}
    cells = np.bincount((owner * classes + y) * classes + label, minlength=clients * classes**2)
    table = cells.astype(float).reshape(clients, classes, classes)
    return {f"confusion[{a}>{b}]": table[:, i, j] for i, a in enumerate(names) for j, b in enumerate(names)}


def _intervals(
    probs: np.ndarray, y: np.ndarray, owner: np.ndarray, clients: int, specificity: float
) -> dict[str, np.ndarray]:
    """Return the ends of the small clients' intervals, NaN for the others."""
    classes = probs.shape[1]
    found, true, _ = class_counts(probs.argmax(1), y, owner, clients, classes)
    size = np.bincount(owner, minlength=clients)
    rarer = true.min(1) if classes == 2 else size
    small = np.flatnonzero((size > 0) & ((size < SMALL) | (rarer < SMALL)))
    shares = {"accuracy": (found.sum(1), size)} | ({"recall": (found[:, 1], true[:, 1])} if classes == 2 else {})
    keys = (*shares, *_resampled(classes))
    ends = {f"{key}_{end}": np.full(clients, np.nan) for key in keys for end in ("low", "high")}
    for key, (hits, count) in shares.items():
        some = small[count[small] > 0]
        ends[f"{key}_low"][some], ends[f"{key}_high"][some] = wilson(hits[some], count[some])
    first, smallest = np.cumsum(size) - size, small[np.argsort(size[small], kind="stable")]
    for client in smallest[np.cumsum(size[smallest]) <= MOST_RESAMPLED]:
        rows = slice(first[client], first[client] + size[client])
        for key, both in bootstrap(probs[rows], y[rows], int(client), specificity).items():
            ends[f"{key}_low"][client], ends[f"{key}_high"][client] = both
    return {key: values for key, values in ends.items() if not np.isnan(values).all()}


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


def bootstrap(
    probs: np.ndarray, y: np.ndarray, seed: int = 0, specificity: float = SPECIFICITY
) -> dict[str, tuple[float, float]]:
    """Return the ends of the 95% percentile intervals of `BOOTSTRAPPED` for one client's rows.

    The rows [n, classes] are drawn n times with replacement, `RESAMPLES` times over, and each draw is measured. Draws
    without a class, in which a measure is not defined, do not count. With more than two classes the measures are
    `BOOTSTRAPPED_MACRO`, over the classes that the client has. All ends are NaN with fewer than `FEW_OF_CLASS` rows
    of one of these classes, or with one class alone: draws from so few do not show how much the measures vary.
    """
    n, classes = probs.shape
    keys, count = _resampled(classes), np.bincount(y, minlength=classes)
    present = count > 0
    if present.sum() < 2 or count[present].min() < FEW_OF_CLASS:
        return dict.fromkeys(keys, (np.nan, np.nan))
    random, at_once = np.random.default_rng(seed), max(1, MOST_AT_ONCE // n)
    parts = []
    for count in (min(at_once, RESAMPLES - begin) for begin in range(0, RESAMPLES, at_once)):
        rows, draw = random.integers(0, n, count * n), np.repeat(np.arange(count), n)
        if classes == 2:
            draws = _decided(probs[rows], y[rows], draw, count, specificity)
        else:
            recall, _, f1 = rates(*class_counts(probs.argmax(1)[rows], y[rows], draw, count, classes))
            # The F1 of a class that is predicted and not present is 0: it counts, as in the client's own value.
            whole = np.isnan(recall[:, present]).any(1)
            draws = {"balanced_accuracy": mean(recall.T), "f1": mean(f1.T)}
            draws = {key: np.where(whole, np.nan, values) for key, values in draws.items()}
        parts.append([draws[key] for key in keys])
    ends = np.nanquantile(np.concatenate(parts, 1), (0.025, 0.975), axis=1).T
    return {key: (float(low), float(high)) for key, (low, high) in zip(keys, ends, strict=True)}


def _resampled(classes: int) -> tuple[str, ...]:
    return BOOTSTRAPPED if classes == 2 else BOOTSTRAPPED_MACRO


def regression_intervals(
    absolute: np.ndarray, squared: np.ndarray, inside: np.ndarray, owner: np.ndarray, clients: int
) -> dict[str, np.ndarray]:
    """Return the ends of the 95% intervals of small clients' coverage, MAE and RMSE, NaN for the others.

    Of every row [n], means over its targets: the absolute and the squared error, and the share inside the interval.
    Coverage has Wilson's interval; the errors have bootstrap intervals, from `FEW_OF_CLASS` rows on.
    """
    size = np.bincount(owner, minlength=clients)
    small = np.flatnonzero((size > 0) & (size < SMALL))
    keys = ("coverage", "mae", "rmse") if size[small].sum() <= MOST_RESAMPLED else ("coverage",)
    ends = {f"{key}_{end}": np.full(clients, np.nan) for key in keys for end in ("low", "high")} if len(small) else {}
    if ends:
        low, high = wilson(np.bincount(owner, inside, clients)[small], size[small])
        ends["coverage_low"][small], ends["coverage_high"][small] = low, high
    first = np.cumsum(size) - size
    for client in small if "mae" in keys else ():
        if (n := size[client]) >= FEW_OF_CLASS:
            rows = first[client] + np.random.default_rng(int(client)).integers(0, n, (RESAMPLES, n))
            for key, draws in {"mae": absolute[rows].mean(1), "rmse": np.sqrt(squared[rows].mean(1))}.items():
                ends[f"{key}_low"][client], ends[f"{key}_high"][client] = np.quantile(draws, (0.025, 0.975))
    return ends


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def base_rate(
    y: np.ndarray, owner: np.ndarray, counts: np.ndarray, specificity: float = SPECIFICITY
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the scores of a model that knows only a client's training labels [clients, classes]: by client, pooled.

    Its probabilities are the label frequencies, with one sample of every class added; its answer is always the
    commonest class. At a client it ranks nothing: the AUROC is 0.5 and the average precision is the class's share of
    the samples. Over all samples it ranks by client, because clients have other frequencies.
    """
    clients, classes = counts.shape
    shares = (counts + 1) / (counts + 1).sum(1, keepdims=True)
    true, label, one_owner = shares[owner, y], counts.argmax(1)[owner], np.zeros(len(y), int)
    rows = {"accuracy": (label == y).astype(float), "nll": -np.log(true)}
    rows["brier"] = (shares**2).sum(1)[owner] - 2 * true + 1
    size = np.bincount(owner, minlength=clients)
    hits = np.bincount(owner * classes + y, minlength=clients * classes).reshape(clients, classes).astype(float)

    def decided(groups: np.ndarray, owners: np.ndarray, count: int) -> dict[str, np.ndarray]:
        """Measure decisions with the group, client or all together, of every client and every sample."""
        columns = range(classes) if classes > 2 else (1,)
        ranked = [_ranking(shares[:, c], hits[:, c], groups, count, specificity, size - hits[:, c]) for c in columns]
        return _of_decisions(ranked, rates(*class_counts(label, y, owners, count, classes)))

    by_client = {key: np.bincount(owner, value, clients) / size for key, value in rows.items()}
    by_client |= decided(np.arange(clients), owner, clients)
    pooled = {f"{key}_pooled": value.mean() for key, value in rows.items()}
    pooled |= {f"{key}_pooled": value[0] for key, value in decided(np.zeros(clients, int), one_owner, 1).items()}
    pooled["ece"] = _ece(shares.max(1)[owner], label == y, one_owner, 1)[0]
    pooled["classwise_ece"] = np.mean([_ece(shares[owner, c], y == c, one_owner, 1) for c in range(classes)])
    return {f"base_{k}": v for k, v in by_client.items()}, {f"base_{k}": float(v) for k, v in pooled.items()}


def base_regression(
    y: np.ndarray, owner: np.ndarray, train: np.ndarray, trainer: np.ndarray, clients: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the scores of a model that knows only a client's training targets: by client, and pooled.

    It predicts their mean and deviation, and for MAE and pinball loss their median and quantiles of 5% and 95%. The
    variance is smoothed by one sample with that of all clients, so that equal targets do not claim certainty.

    `y` [n, targets] are the samples that are scored, with `owner` [n] counted among the scored `clients`; `train` [m,
    targets] are all training targets, with the number of the client, `trainer` [m], of each.
    """
    count = np.maximum(np.bincount(trainer, minlength=clients.max() + 1), 1)[:, None]

    def mean_of(values: np.ndarray) -> np.ndarray:
        sums = [np.bincount(trainer, column, len(count)) for column in values.T]
        return np.stack(sums, 1) / count

    average = mean_of(train)
    spread = mean_of((train - average[trainer]) ** 2) * count
    std = np.sqrt((spread + np.maximum(train.var(0), 1e-12)) / (count + 1))[clients][owner]
    error = y - average[clients][owner]
    low, middle, high = (
        _quantiles(train, trainer, len(count), q)[clients][owner] for q in (QUANTILES[0], 0.5, QUANTILES[1])
    )
    rows = {
        "rmse": (error**2).mean(1),  # squared: the root follows
        "nll": (0.5 * (error / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)).sum(1),
        "mae": np.abs(y - middle).mean(1),
        "pinball": pinball([y - low, y - high]),
        "coverage": ((low <= y) & (y <= high)).mean(1),
        "interval_width": (high - low).mean(1),
    }
    size = np.bincount(owner, minlength=len(clients))
    by_client = {f"base_{key}": np.bincount(owner, value, len(clients)) / size for key, value in rows.items()}
    pooled = {f"base_{key}_pooled": float(value.mean()) for key, value in rows.items()}
    by_client["base_rmse"] = np.sqrt(by_client["base_rmse"])
    return by_client, pooled | {"base_rmse_pooled": pooled["base_rmse_pooled"] ** 0.5}


def _quantiles(values: np.ndarray, owner: np.ndarray, clients: int, level: float) -> np.ndarray:
    """Return a quantile of every client's values [n, targets], 0 for a client without any: [clients, targets]."""
    count = np.bincount(owner, minlength=clients)
    place = level * np.maximum(count - 1, 0)
    first = np.cumsum(count) - count
    low, high = (np.minimum(first + f(place).astype(int), len(owner) - 1) for f in (np.floor, np.ceil))
    columns = []
    for column in values.T:
        ordered = column[np.lexsort((column, owner))]
        columns.append(np.where(count > 0, ordered[low] + (place % 1) * (ordered[high] - ordered[low]), 0.0))
    return np.stack(columns, 1)


def pinball(gaps: Sequence[np.ndarray]) -> np.ndarray:
    """Return the pinball loss [n] of an interval from how far targets [n, targets] lie above both of its ends.

    It is a mean over the two ends and the targets, and rewards narrow intervals that cover.
    """
    losses = [np.maximum(level * gap, (level - 1) * gap) for gap, level in zip(gaps, QUANTILES, strict=True)]
    return np.mean(losses, axis=0).mean(-1)


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
    return _of_decisions(ranked, rates(*class_counts(probs.argmax(1), y, owner, clients, classes)))


def _of_decisions(
    ranked: Sequence[dict[str, np.ndarray]], of_classes: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the measures [clients] from those of every class's ranks, and from `rates` [clients, classes]."""
    recall, precision, f1 = of_classes
    classes = recall.shape[1]
    measures = {
        "auroc": mean([curve["auroc"] for curve in ranked]),
        "average_precision": mean([curve["average_precision"] for curve in ranked]),
        "balanced_accuracy": mean(recall.T),
        "f1": mean(f1.T if classes > 2 else f1.T[1:]),
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
    score: np.ndarray,
    hit: np.ndarray,
    owner: np.ndarray,
    clients: int,
    specificity: float,
    miss: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return AUROC, average precision and sensitivity at a specificity of one score [n] for each client.

    All thresholds of all clients are walked through in one sorted pass: samples are ordered by client and by falling
    score, and those with equal scores form one threshold. With `miss` [n] an entry stands for several samples of one
    score: `hit` of them are positive, and `miss` are not.
    """
    order = np.lexsort((-score, owner))
    miss = hit == 0 if miss is None else miss
    owner, score, hit, miss = owner[order], score[order], hit[order].astype(float), miss[order].astype(float)
    positives = np.bincount(owner, hit, clients)
    negatives = np.bincount(owner, miss, clients)
    first = np.r_[True, owner[1:] != owner[:-1]]  # the first sample of a client
    last = np.r_[(owner[1:] != owner[:-1]) | (score[1:] != score[:-1]), True]  # the last sample of a threshold
    before = np.flatnonzero(first)[np.cumsum(first) - 1]  # the first sample of this sample's client
    true = np.cumsum(hit) - (np.cumsum(hit) - hit)[before]
    false = np.cumsum(miss) - (np.cumsum(miss) - miss)[before]
    true, false, owner = true[last], false[last], owner[last]
    start = np.r_[True, owner[1:] != owner[:-1]]
    true_before = np.where(start, 0.0, np.r_[0.0, true[:-1]])
    false_before = np.where(start, 0.0, np.r_[0.0, false[:-1]])
    area = np.bincount(owner, (false - false_before) * (true + true_before) / 2, clients)
    precise = np.bincount(owner, (true - true_before) * true / np.maximum(true + false, 1), clients)
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
