"""Which model serves a site best: the prior as it is, the site's posterior, or training alone.

    report = fedabml.compare_at_site(prior, frame)
    print(report.sentence)

All three learn from the same rows of the site and are scored on the same rows held out, by the negative log-likelihood
of each row. So their differences are paired, and the interval says whether a difference is more than chance.

All three are calibrated and decide as the posterior that is written: with its kind of calibration and its aim. That
posterior's calibration and threshold are fitted on the rows held out. To score them on these rows would flatter them,
so each row is scored with a calibration and a threshold that are fitted on the other rows (five folds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..accel.process import borrowed
from ..algorithms.local import Local
from ..arguments import checks_arguments, is_number
from ..errors import InputError
from ..evaluation import calibration
from ..evaluation.decisions import RESAMPLES, auroc, base_rate, base_regression, bootstrap, wilson
from ..evaluation.measures import FEW_OF_CLASS, positive_class
from ..evaluation.predictions import Prediction, Regression
from ..evaluation.structured import MultiPrediction
from ..files.sheets import html_card
from .posterior import Posterior
from .prediction_columns import class_names
from .prior import Prior, rows_digest
from .trust import TRAINED_ON, Trust

ALONE_EPOCHS = (20, 100)  # that training alone tries; the better one counts, which favours it
MODEL_NAMES = {"posterior": "its posterior", "prior": "the prior", "alone": "training alone"}
LEAST_ROWS_TO_COMPARE = 10  # held out, from which on a command compares without being asked
QUICK_STEPS, QUICK_WEIGHTS = 1500, 100_000  # up to which training alone takes seconds on one core
_Z = 1.959963984540054
Predicted = Prediction | Regression | MultiPrediction


class SiteScore(NamedTuple):
    """A measure of one model on the rows held out, with its 95% interval; NaN where the rows do not define it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = " °" if math.isnan(self.low) else f" ({self.low:.3f} to {self.high:.3f})"
        return "–" if math.isnan(self.value) else f"{self.value:.3f}{ends}"


@dataclass(frozen=True)
class SiteReport:
    """The scores of every model on `rows` rows held out, and how much worse the NLL of each is than the best."""

    rows: int
    nll: dict[str, float]  # by posterior, prior, alone; calibrated, like all scores
    # By name: the mean of the paired differences, and half of its 95% interval, NaN below `FEW_OF_CLASS` rows.
    worse: dict[str, tuple[float, float]]
    scores: dict[str, dict[str, SiteScore]] = field(default_factory=dict)  # by model and measure: NLL, AUROC, recall, …
    calibration: str = "none"  # of all three; it is fitted on other rows than those scored
    # Of a model that knows the training targets alone, by measure; empty for several answers per input.
    base: dict[str, float] = field(default_factory=dict)
    positive: str = ""  # the positive class of two, as `measures.positive_class` names it
    trained_on: bool = False  # whether the prior is known to have been trained on the rows held out

    def __repr__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        """Show a notebook the table of all scores."""
        head, rows = self.table()
        records = [dict(zip(["model", *head[1:]], row, strict=True)) for row in rows]
        return html_card("Which model serves this site best?", {"result": self.sentence}, records)

    @property
    def best(self) -> str:
        """The model with the lowest NLL: posterior, prior or alone."""
        return min(self.nll, key=lambda name: self.nll[name])

    @property
    def sentence(self) -> str:
        """The result in words."""
        parts = []
        for name, (mean, half) in self.worse.items():
            chance = " (not significantly)" if mean <= half else ""
            within = "" if math.isnan(half) else f" ± {half:.3f}{chance}"
            gap = f"{MODEL_NAMES[name]} is worse by {mean:.3f}{within}"
            parts.append(gap if math.isfinite(mean) else f"{MODEL_NAMES[name]} diverges")
        best = MODEL_NAMES[self.best]
        others = {name: score for name, score in self.scores.get(self.best, {}).items() if name != "NLL"}
        more = "".join(f", {self._heading(name)} {score}" for name, score in others.items())
        scored = f"NLL {self.nll[self.best]:.3f} on {held_out_rows(self.rows)}{more}"
        few = " So few rows give no interval, and the differences may be chance." if self.rows < FEW_OF_CLASS else ""
        if not few and "°" in more:
            few = f" ° With fewer than {FEW_OF_CLASS} rows of a class, chance decides this value."
        base = self.base.get("NLL", math.nan)
        better = f" The base rate is better still: NLL {base:.3f}." if base < self.nll[self.best] else ""
        # Of few rows, half is NaN and this is false.
        if self.worse and all(mean <= half for mean, half in self.worse.values()):
            title = f"No significant difference at this site; {best} has the lowest NLL"
        else:
            title = f"{best[0].upper()}{best[1:]} serves this site best"
        caution = f" {TRAINED_ON}" if self.trained_on else ""
        return f"{title}: {scored}; {', '.join(parts)}.{better}{few}{caution}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table of all scores, a row per model."""
        measures = list(self.scores.get(self.best, {}))
        rows = [
            [MODEL_NAMES[name], *(str(scores[m]) for m in measures)] for name, scores in self.scores.items() if scores
        ]
        if self.base:
            base = (self.base.get(measure, math.nan) for measure in measures)
            rows.append(["the base rate", *("–" if math.isnan(value) else f"{value:.3f}" for value in base)])
        return ["", *map(self._heading, measures)], rows

    def _heading(self, measure: str) -> str:
        """Return the name of a measure, which for recall names the class that is to be found."""
        return f"{measure} of {self.positive}" if measure == "recall" and self.positive else measure


def held_out_rows(count: int) -> str:
    """Return how many rows are held out in words."""
    return f"{count} row{'s' * (count != 1)} held out"


def is_quick(prior: Prior, rows: int, validation: float | Sequence[int], batch_size: int | None = None) -> bool:
    """Return whether comparing on so many rows takes seconds: for tables and other inputs of one axis, if they are few.

    Training alone is what takes time: its steps are limited, and the weights of its network.
    """
    given: Any = validation
    held = rows * given if is_number(given) else len(given)
    steps = math.ceil((rows - held) / (batch_size or prior.batch_size)) * sum(ALONE_EPOCHS)
    spec = prior.input_spec
    return len(spec.shape) == 1 and steps <= QUICK_STEPS and spec.network.layout.size <= QUICK_WEIGHTS


@checks_arguments
@borrowed()
def compare_at_site(
    prior: Prior,
    x: Any,
    y: Any = None,
    validation: float | Sequence[int] = 0.3,
    seed: int = 0,
    device: str = "auto",
    *,
    encoded: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    class_weights: str | Sequence[float] | None = None,
    posterior: Posterior | None = None,
) -> SiteReport:
    """Hold out a share of a site's rows and compare the prior, the site's posterior and training alone on them.

    The prior must not have been trained on these rows: if it was, it and the posterior look better than they are. So
    `validation` is a share, or the numbers of the rows that the prior never saw.

    `x` and `y` are those of `Prior.personalize`, as are `epochs` and `lr`, which make the posterior, and `batch_size`
    and `class_weights`, which also hold for training alone. `posterior` is one that `personalize` has made of the same
    rows with the same `validation` and `seed`; its calibration and aim are then those of all three. Without it one is
    made, and all three are calibrated by a temperature.

    Two classes are scored by AUROC and recall, more by accuracy, a regression by RMSE, all of them also by NLL.
    """
    train, held = prior.hold_out(x, y, validation, seed, encoded)
    options: dict[str, Any] = {"seed": seed, "device": device, "encoded": True}
    options |= {"batch_size": batch_size, "class_weights": class_weights}
    if posterior is None:
        posterior, trust = prior.personalize(*train, epochs=epochs, lr=lr, **options), None
    else:
        posterior, trust = replace(posterior, trust=None), posterior.trust
        if trust is None or trust.held_out is None:
            raise InputError(
                "The posterior does not tell which rows it did not learn from. It was made without validation rows or "
                "by an earlier version. Make it again with `validation`, or leave `posterior` out."
            )
        if trust.held_out != rows_digest(*held):
            raise InputError(
                "The posterior was made with other rows held out than those here. Give the rows, the validation share "
                "and the seed that it was made with, or leave `posterior` out."
            )
    local = Prior(Local(), {}, prior.input_spec, prior.batch_size)

    def judged(model: Posterior) -> tuple[np.ndarray, dict[str, SiteScore]]:
        return _judged(model.predict(held[0], seed=seed, device=device, encoded=True), held[1], trust)

    results = {"posterior": judged(posterior), "prior": judged(prior.personalize(*train, epochs=0, **options))}
    tries = []
    for count in ALONE_EPOCHS:
        try:
            tries.append(judged(local.personalize(*train, count, **options)))
        except InputError:  # it diverges
            tries.append((np.full(len(held[1]), np.inf), {}))
    results["alone"] = min(tries, key=lambda result: result[0].mean())
    losses = {name: per_row for name, (per_row, _) in results.items()}
    means = {name: float(per_row.mean()) for name, per_row in losses.items()}
    best = min(means, key=lambda name: means[name])
    worse = {}
    for name in losses.keys() - {best}:
        gap = losses[name] - losses[best]
        worse[name] = float(gap.mean()), _half(gap) if np.isfinite(gap).all() else math.inf
    scores = {name: measures for name, (_, measures) in results.items()}
    kind = "none" if prior.input_spec.task == "regression" else trust.kind if trust else "temperature"
    positive = positive_class({"class_names": class_names(prior.input_spec)})
    ordered = {name: worse[name] for name in losses if name in worse}
    base = _base(prior.input_spec.task, train[1], held[1], prior.input_spec.classes or 0)
    return SiteReport(len(held[1]), means, ordered, scores, kind, base, positive, bool(trust and trust.trained_on))


def _base(task: str, train: np.ndarray, y: np.ndarray, classes: int) -> dict[str, float]:
    """Return the scores of a model that knows only the targets of the training rows, by the names of measures."""
    owner = np.zeros(len(y), int)
    if task == "classification":
        found, _ = base_rate(y, owner, np.bincount(train, minlength=classes)[None])
    elif task == "regression":
        found, _ = base_regression(y, owner, train, np.zeros(len(train), int), np.zeros(1, int))
    else:
        return {}
    named = {"NLL": "nll", "AUROC": "auroc", "recall": "recall", "accuracy": "accuracy", "RMSE": "rmse"}
    return {name: float(found[f"base_{key}"][0]) for name, key in named.items() if f"base_{key}" in found}


def _half(values: np.ndarray) -> float:
    """Return half of the 95% interval of a mean of values [n], NaN where they are too few for one."""
    return float(_Z * values.std(ddof=1) / math.sqrt(len(values))) if len(values) >= FEW_OF_CLASS else math.nan


def _judged(p: Predicted, y: np.ndarray, trust: Trust | None) -> tuple[np.ndarray, dict[str, SiteScore]]:
    """Return −log p(y | x) of every row, and the scores by name, of predictions that are not calibrated yet."""
    kind = trust.kind if trust else "temperature"
    if isinstance(p, Regression):
        per_row, squared = p.nll(y), ((p.mean - y) ** 2).mean(1)
        scores = {"RMSE": _resampled(squared, np.ones(len(y)), root=True)}
    elif isinstance(p, MultiPrediction):
        flat, answers, row = p.flat(y, np.arange(len(y)))
        probs = calibration.cross_calibrated(kind, flat.probs, answers, row)
        per_row = np.bincount(row, _surprisal(probs, answers), len(y))
        hits = np.bincount(row, probs.argmax(1) == answers, len(y))
        scores = {"accuracy": _resampled(hits, np.bincount(row, minlength=len(y)).astype(float))}
    else:
        probs = calibration.cross_calibrated(kind, p.probs, y)
        per_row, label = _surprisal(probs, y), _decided(probs, y, trust)
        if probs.shape[1] == 2:
            ends = bootstrap(probs, y)["auroc"]
            scores = {"AUROC": SiteScore(auroc(probs[:, 1], y == 1), *ends), "recall": _share((label == 1)[y == 1])}
        else:
            scores = {"accuracy": _share(label == y)}
    mean, half = float(per_row.mean()), _half(per_row)
    least = -math.inf if isinstance(p, Regression) else 0.0  # −log of a probability is never below 0
    return per_row, {"NLL": SiteScore(mean, max(mean - half, least), mean + half), **scores}


def _surprisal(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -np.log(np.clip(probs[np.arange(len(y)), y], 1e-30, None))


def _decided(probs: np.ndarray, y: np.ndarray, trust: Trust | None) -> np.ndarray:
    """Return the label of each row [n], by the aim's costs or by a threshold that is chosen on rows of other folds."""
    if trust is None or not trust.aim:
        return probs.argmax(1)
    if trust.costs is not None:
        return trust.costs.decide(probs)
    aim, fold, label = calibration.Aim.parse(trust.aim), calibration.folds(y), probs.argmax(1)
    for k in range(calibration.FOLDS):
        here = fold == k
        threshold = calibration.choose_threshold(probs[~here, 1], y[~here], aim) if not here.all() else None
        if threshold is not None:  # else the other rows cannot tell one
            label[here] = probs[here, 1] >= threshold
    return label


def _share(hits: np.ndarray) -> SiteScore:
    """Return the share of hits with Wilson's interval."""
    if not len(hits):
        return SiteScore(math.nan, math.nan, math.nan)
    low, high = wilson(np.asarray(hits.sum(), float), np.asarray(len(hits), float))
    return SiteScore(float(hits.mean()), float(low), float(high))


def _resampled(part: np.ndarray, whole: np.ndarray, root: bool = False) -> SiteScore:
    """Return Σ part / Σ whole of rows [n], perhaps its root, and a bootstrap interval over rows, if they suffice."""
    rows = np.random.default_rng(0).integers(0, len(part), (RESAMPLES, len(part)))
    with np.errstate(invalid="ignore", divide="ignore"):
        value, draws = part.sum() / whole.sum(), part[rows].sum(1) / whole[rows].sum(1)
        low, high = np.nanquantile(draws, (0.025, 0.975)) if len(part) >= FEW_OF_CLASS else (math.nan, math.nan)
    return SiteScore(*(float(np.sqrt(v) if root else v) for v in (value, low, high)))
