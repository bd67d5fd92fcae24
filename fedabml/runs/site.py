"""Which model serves a site best: the prior as it is, the site's posterior, or training alone.

    report = fedabml.compare_at_site(prior, frame)
    print(report.sentence)

All three learn from the same rows of the site and are scored on the same rows held out, by the negative log-likelihood
of each row. So their differences are paired, and the interval says whether a difference is more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..accel.process import borrowed
from ..algorithms.local import Local
from ..arguments import checks_arguments
from ..errors import InputError
from ..evaluation.predictions import Prediction
from .posterior import Posterior
from .prior import Prior

ALONE_EPOCHS = (20, 100)  # that training alone tries; the better one counts, which favours it
NAMES = {"posterior": "its posterior", "prior": "the prior", "alone": "training alone"}


@dataclass(frozen=True)
class SiteReport:
    """The mean NLL of every model on `rows` rows held out, and how much worse each is than the best."""

    rows: int
    nll: dict[str, float]  # by posterior, prior, alone
    worse: dict[str, tuple[float, float]]  # by name: the mean of the paired differences, and half of its 95% interval

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
            parts.append(f"{NAMES[name]} is worse by {mean:.3f} ± {half:.3f}{chance}")
        best = NAMES[self.best]
        scored = f"NLL {self.nll[self.best]:.3f} on {self.rows} rows held out"
        return f"{best[0].upper()}{best[1:]} serves this site best: {scored}; {', '.join(parts)}."


@checks_arguments
@borrowed()
def compare_at_site(
    prior: Prior,
    x: Any,
    y: Any = None,
    validation: float = 0.3,
    seed: int = 0,
    device: str = "auto",
    *,
    encoded: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    class_weights: str | Sequence[float] | None = None,
) -> SiteReport:
    """Hold out a share of a site's rows and compare the prior, the site's posterior and training alone on them.

    `x` and `y` are those of `Prior.personalize`, as are `epochs` and `lr`, which make the posterior, and `batch_size`
    and `class_weights`, which also hold for training alone.
    """
    train, held = prior.hold_out(x, y, validation, seed, encoded)
    options: dict[str, Any] = {"seed": seed, "device": device, "encoded": True}
    options |= {"batch_size": batch_size, "class_weights": class_weights}
    losses = {
        "posterior": _losses(prior.personalize(*train, epochs=epochs, lr=lr, **options), *held),
        "prior": _losses(prior.personalize(*train, epochs=0, **options), *held),
    }
    local = Prior(Local(), {}, prior.input_spec, prior.batch_size)
    tries = [_try_losses(local, train, held, epochs, options) for epochs in ALONE_EPOCHS]
    losses["alone"] = min(tries, key=lambda per_row: per_row.mean())
    means = {name: float(per_row.mean()) for name, per_row in losses.items()}
    best = min(means, key=lambda name: means[name])
    worse = {}
    for name in losses.keys() - {best}:
        gap = losses[name] - losses[best]
        half = 1.96 * gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        worse[name] = float(gap.mean()), float(half)
    return SiteReport(len(held[1]), means, {name: worse[name] for name in losses if name in worse})


def _losses(posterior: Posterior, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return −log p(y | x) of every row."""
    p = posterior.predict(x, encoded=True)
    if not isinstance(p, Prediction):
        return p.nll(y)
    return -np.log(np.clip(p.probs[np.arange(len(y)), y], 1e-30, None))


def _try_losses(
    local: Prior,
    train: tuple[np.ndarray, np.ndarray],
    held: tuple[np.ndarray, np.ndarray],
    epochs: int,
    options: dict[str, Any],
) -> np.ndarray:
    """Return the losses of training alone; infinite where it diverges."""
    try:
        x, y = train
        return _losses(local.personalize(x, y, epochs, **options), *held)
    except InputError:
        return np.full(len(held[1]), np.inf)
