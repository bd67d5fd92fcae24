"""Predictions with their uncertainty: `Prediction` for classes, `Regression` for numbers.

Scoring expects three things of both: `concatenate` joins the predictions of several batches, `columns` and
`from_columns` turn them into a table and back (processes sum such tables), and `finite` marks the usable rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.target_transform import TargetTransform
from ..errors import InputError, quoted
from ..files.sheets import frame
from .decision_costs import DecisionCosts

if TYPE_CHECKING:
    import pandas as pd

DISTANCE, STRANGENESS = "distance to the training data", "strangeness"  # causes of alarms beside a table's columns
BISECTIONS = 60  # halvings of an interval, after which a double cannot tell its ends apart


def entropy(probs: np.ndarray) -> np.ndarray:
    """Return H = −Σ p log p along the last axis, in nats."""
    return -(probs * np.log(np.clip(probs, 1e-30, None))).sum(-1)


def _entropy(probs: Tensor) -> Tensor:
    """Compute `entropy` on the device of `probs`."""
    return -(probs * probs.clamp_min(1e-30).log()).sum(-1)


def surprise(probs: Tensor, labels: Tensor) -> Tensor:
    """Return −log p_i(x)/p(x): how much rarer inputs are at a client than among all clients, judged by their labels.

    `probs` [n, classes] are the network's own probabilities, without a label level; `labels` are log π_i of the client.
    If the federation's labels are balanced, p_i(x)/p(x) = K Σ_y π_iy p(y|x). Inputs of the client's own classes have a
    surprise below 0.
    """
    return -(probs * labels.exp()).sum(-1).mul(probs.shape[-1]).clamp_min(1e-30).log()


def with_label_level(draws: Tensor, labels: Tensor) -> Tensor:
    """Multiply probabilities [draws, n, classes] by π_i and normalise; `labels` is log π_i [n, classes]."""
    return torch.softmax(draws.double().clamp_min(1e-30).log() + labels.double(), -1)


def _without_label_level(draws: Tensor, labels: Tensor) -> Tensor:
    """Divide probabilities by π_i, normalise, and average over draws: the inverse of `with_label_level`."""
    return torch.softmax(draws.double().clamp_min(1e-30).log() - labels, -1).mean(0)


@dataclass(frozen=True)
class Checks:
    """What validation rows and the usual values of a table's columns say about each prediction; see `runs.trust`."""

    coverage: float | None  # that the sets, or the intervals from `low` to `high`, have; None without validation rows
    alarm: np.ndarray  # bool [n]: whether the input is unlike the client's data
    distance: np.ndarray | None = None  # [n]: to the training data, in the last hidden layer
    flags: list[list[str]] | None = None  # a sentence per unusual value of a table's row
    sets: np.ndarray | None = None  # bool [n, classes]
    low: np.ndarray | None = None  # [n, targets]
    high: np.ndarray | None = None
    strangeness: np.ndarray | None = None  # [n]: about 1 for usual inputs; see `evaluation.density`
    score: np.ndarray | None = None  # [n]: how unusual the input is, in units of its limits; above 1 is an alarm
    causes: list[list[str]] | None = None  # of each row's alarm: names of columns, and DISTANCE or STRANGENESS

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have an alarm by each cause, the most frequent first."""
        return dict(Counter(cause for causes in self.causes or () for cause in causes).most_common())


class NamedColumns:
    """A prediction of a posterior, which knows the names of its columns."""

    named: Callable[[Any], Mapping[str, Sequence[Any]]] | None

    def frame(self) -> pd.DataFrame:
        """Return the predictions as a DataFrame, with the columns of `fedabml predict`."""
        if self.named is None:
            raise InputError("Only predictions of a posterior have named columns: posterior.predict(x).frame().")
        columns = self.named(self)
        return frame(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


@dataclass(frozen=True)
class Prediction(NamedColumns):
    """Class probabilities with their uncertainty, one row per input."""

    probs: np.ndarray  # [n, classes], averaged over weight samples
    mutual_information: np.ndarray  # [n]: the part of the entropy that is due to the weights
    surprise: np.ndarray | None = None  # [n]: see `surprise`; None without a label level
    threshold: float | None = None  # of class 1, where two classes are decided by one; None: the more probable class
    checks: Checks | None = None  # None without validation rows, unless the rows are of a table
    ids: list[str] | None = None  # of a table's rows, if it has a column of identifiers
    costs: DecisionCosts | None = None  # of decisions, where classes are decided by them
    named: Callable[[Any], Mapping[str, Sequence[Any]]] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.probs)} inputs, {self.probs.shape[-1]} classes)"

    @property
    def label(self) -> np.ndarray:
        """The class of each input: the most probable one, class 1 from the threshold on, or that of least cost."""
        if self.costs is not None:
            return self.costs.decide(self.probs)
        if self.threshold is not None:
            return (self.probs[:, 1] >= self.threshold).astype(np.int64)
        return self.probs.argmax(-1)

    @property
    def entropy(self) -> np.ndarray:
        """The entropy H of the averaged probabilities of each input, in nats."""
        return entropy(self.probs)

    @property
    def finite(self) -> np.ndarray:
        """Which rows hold finite probabilities [n]."""
        return np.isfinite(self.probs).all(1)

    @staticmethod
    def of(draws: Tensor, labels: Tensor | None = None) -> Prediction:
        """Average the probabilities under each weight sample [draws, n, classes].

        `labels` is the label level log π_i that the probabilities contain, if any: it gives the surprise.
        """
        probs = draws.mean(0, dtype=torch.float64)
        within = torch.stack([_entropy(draw.double()) for draw in draws]).mean(0)
        information = (_entropy(probs) - within).clamp_min(0)
        odd = None
        if labels is not None:
            level = labels.double()
            odd = surprise(_without_label_level(draws, level), level).cpu().numpy()
        return Prediction(probs.cpu().numpy(), information.cpu().numpy(), odd)

    @staticmethod
    def concatenate(parts: Sequence[Prediction]) -> Prediction:
        """Join predictions for several batches; their surprise is dropped, because no score needs it."""
        probs, information = (np.concatenate([getattr(p, n) for p in parts]) for n in ("probs", "mutual_information"))
        return Prediction(probs, information)

    def columns(self) -> np.ndarray:
        """Return the predictions as a table with one row per input."""
        return np.column_stack([self.probs, self.mutual_information])

    @staticmethod
    def from_columns(table: np.ndarray, targets: int) -> Prediction:
        """Invert `columns`; `targets` has no meaning for classes."""
        return Prediction(np.ascontiguousarray(table[:, :-1]), table[:, -1].copy())


@dataclass(frozen=True)
class Regression(NamedColumns):
    """Predicted means and standard deviations, one row per input and one column per target, in the data's own units.

    The predictive distribution is a mixture of one Gaussian per weight sample or, where the target is transformed, of
    what the transform's inverse makes of them.
    """

    mean: np.ndarray
    std: np.ndarray  # of the predictive distribution: noise and weights together
    model_std: np.ndarray  # the part that is due to the weights: the deviation of the mean from sample to sample
    draws: np.ndarray  # [draws, n, 2·targets]: mean and noise deviation of the (transformed) target by weight sample
    checks: Checks | None = None  # None without validation rows, unless the rows are of a table
    ids: list[str] | None = None  # of a table's rows, if it has a column of identifiers
    transform: TargetTransform | None = None  # of a target that is never below 0
    named: Callable[[Any], Mapping[str, Sequence[Any]]] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"Regression({len(self.mean)} inputs, {self.mean.shape[-1]} target(s))"

    @property
    def finite(self) -> np.ndarray:
        """Which rows hold finite means and deviations [n]."""
        return np.isfinite(self.mean).all(1) & np.isfinite(self.std).all(1)

    @property
    def transformed(self) -> bool:
        """Whether the target is transformed, so that the predictive distribution is skewed."""
        return self.transform is not None and bool(self.transform.powers)

    @property
    def median(self) -> np.ndarray:
        """The median of the predictive distribution [n, targets]."""
        return self.quantile(0.5)

    def quantile(self, level: float | Sequence[float]) -> np.ndarray:
        """Return quantiles of the predictive distribution: [n, targets] for a level, [levels, n, targets] for several.

        A mixture's quantile lies between those of its parts, and is found by bisection; a single Gaussian's is exact.
        """
        try:
            levels = np.asarray(level, np.float64)
        except (TypeError, ValueError):
            levels = np.full(1, np.nan)
        if not levels.size or levels.ndim > 1 or not ((levels > 0) & (levels < 1)).all():
            raise InputError(f"A quantile's level is a number between 0 and 1, such as 0.9; it is {quoted(level)}.")
        quantiles = np.stack(
            [self.original(_mixture_quantile(self.draws, probability)) for probability in levels.reshape(-1).tolist()]
        )
        return quantiles if levels.ndim else quantiles[0]

    def gaussian(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation on the scale where the noise is Gaussian, before a transform or a cut at 0."""
        return (self.mean, self.std) if self.transform is None else _moments(self.draws)[:2]

    def latent(self, y: np.ndarray) -> np.ndarray:
        """Return targets [..., targets] on the scale of `gaussian`."""
        return y if self.transform is None else self.transform.forward(y)

    def original(self, z: np.ndarray) -> np.ndarray:
        """Return values on the scale of `gaussian` in the data's own units, none below 0 if the target is positive."""
        return z if self.transform is None else self.transform.inverse(z)

    def nll(self, y: np.ndarray) -> np.ndarray:
        """Return −log of the mixture density of every row of `y` [n, targets], summed over targets."""
        mean, std = np.split(self.draws, 2, -1)
        log = (-0.5 * ((self.latent(y) - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)).sum(-1)
        top = log.max(0)
        nll = -(top + np.log(np.exp(log - top).mean(0)))
        return nll if self.transform is None else nll - self.transform.log_slope(y)

    @staticmethod
    def of(draws: Tensor, shift: np.ndarray, scale: np.ndarray, transform: TargetTransform | None = None) -> Regression:
        """Average over weight samples: `draws` [draws, n, mean and log noise deviation] is in standardised units."""
        mean, log = np.split(draws.double().cpu().numpy(), 2, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged: see `finite`
            parts = np.concatenate([mean * scale + shift, np.exp(log) * scale], -1)
            return Regression(*_moments(parts, transform), parts, transform=transform)

    @staticmethod
    def concatenate(parts: Sequence[Regression]) -> Regression:
        """Join predictions for several batches."""
        mean, std, model = (np.concatenate([getattr(p, n) for p in parts]) for n in ("mean", "std", "model_std"))
        draws = np.concatenate([p.draws for p in parts], 1)
        return Regression(mean, std, model, draws, transform=parts[0].transform)

    def columns(self) -> np.ndarray:
        """Return the predictions as a table with one row per input."""
        return np.column_stack([self.mean, self.std, self.model_std, *self.draws])

    @staticmethod
    def from_columns(table: np.ndarray, targets: int) -> Regression:
        """Invert `columns` for a given number of targets; the caller adds the transform."""
        mean, std, model, draws = np.split(table, np.arange(1, 4) * targets, 1)
        return Regression(mean, std, model, np.stack(np.split(draws, draws.shape[1] // (2 * targets), 1)))


def _moments(draws: np.ndarray, transform: TargetTransform | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a mixture's mean, its deviation, and the part of it that is due to the weights, [n, targets] each.

    Var y = E_w[Var(y | w)] + Var_w(E[y | w]); `draws` [draws, n, mean and deviation] has one Gaussian per sample w.
    """
    mean, std = np.split(draws, 2, -1)
    if transform is not None:
        mean, std = transform.moments(mean, std)
    model = mean.std(0)
    return mean.mean(0), np.sqrt((std**2).mean(0) + model**2), model


def _mixture_quantile(draws: np.ndarray, level: float) -> np.ndarray:
    """Return the quantile [n, targets] of mixtures of Gaussians [draws, n, mean and deviation]."""
    mean, std = torch.from_numpy(draws).chunk(2, -1)
    of_draws = mean + std * torch.special.ndtri(torch.tensor(level, dtype=mean.dtype))
    low, high = of_draws.amin(0), of_draws.amax(0)
    for _ in range(BISECTIONS if len(draws) > 1 else 0):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle - mean) / std).mean(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2).numpy()
