"""The hyperparameters and steps that algorithms with a Gaussian posterior over weights share.

φ-step   g = ∇ of the mean −log likelihood over s samples w = m + ε∘exp ν,  κ = (λ/n)/σ_θ²
         m ← (m − η g + ηκ m_θ)/(1 + ηκ)            (`kl_step` implicit; explicit: m − η(g + κ(m − m_θ)))
         ν ← ν − η_ν(g_ν + (λ/n)(σ²/σ_θ² − 1))      (`posterior_std` sgd; natural: in the precision; or fixed)

With `optimiser` adam the KL's pull is part of both gradients, as in explicit steps, and ν has its own Adam state.
A minibatch of |B| < b rows has η|B|/b and η_ν|B|/b in place of η and η_ν (`short_batch` rows; `steps.batch_fraction`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import InputError
from ..files.sealed import group, prefixed
from ..gaussian import Distribution, Gaussian, Point
from ..vectors import Layout, derived, plus
from .base import Algorithm, Batch, Loss, Site, State, Stepped
from .hyper import Range, hyper
from .steps import Number, batch_fraction, natural_logstd, proximal_momentum_step


@dataclass(frozen=True, repr=False)
class Variational(Algorithm):
    """A Gaussian (or point) posterior φ that descends E_q[−log p(D|w)]/n + (λ/n) KL[q ‖ p(θ)]."""

    lam: float = hyper(
        0.01, "λ: weight of the KL; 1 is the exact ELBO, less a cold posterior", 0, tune=Range(1e-3, 1.0, log=True)
    )
    k: int = hyper(1, "k: φ-steps per minibatch", 1)
    s: int = hyper(1, "s: weight samples per gradient", 1)
    estimator: str = hyper(  # type: ignore[misc]
        "local", "noise on the weights, or on activations", choices=("weight", "local", "flipout")
    )
    antithetic: bool = hyper(False, "samples in pairs of opposite noise")  # type: ignore[misc]
    nu0: float = hyper(-4.0, "ν₀: log deviation of the first prior", -20, 2, tune=Range(-5.0, -3.0))
    posterior: str = hyper("gaussian", "φ: a Gaussian, or a point (no variances, no KL)", choices=("gaussian", "point"))
    posterior_std: str = hyper("sgd", "the step of the posterior's ν", choices=("fixed", "sgd", "natural"))
    lr_std: float | None = hyper(None, "step size of ν (none: that of the mean); for natural a rate in [0, 1]", 0)
    kl_step: str = hyper("implicit", "the KL's pull on means", choices=("implicit", "explicit"))
    short_batch: str = hyper(
        "whole",
        "the step of an epoch's short last minibatch: as a whole one's, or by its rows",
        choices=("whole", "rows"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = (self.lr, self.effective_personal_lr) if self.lr_std is None else (self.lr_std,)
        if self.posterior_std == "natural" and (self.lam == 0 or max(rates) > 1):
            raise InputError(
                f"{type(self).__name__}: posterior_std natural is a rate of the exact curvature: it needs lam > 0 and "
                "lr_std between 0 and 1."
            )

    remedy: ClassVar[str] = "A smaller step size usually helps; so do kl_step implicit and a smaller lam."

    @property
    def samples_per_step(self) -> int:  # type: ignore[override]
        return 1 if self.posterior == "point" else self.s

    def init(self, params: Tensor, layout: Layout) -> State:
        return self.initial_distribution(params)

    def initial_distribution(self, params: Tensor) -> State:
        """Return the state that a federation starts from: the initial weights with log deviation ν₀."""
        return {"mean": params} if self.posterior == "point" else {"mean": params, "logstd": self.nu0 + 0 * params}

    def prior(self, shared: State) -> Distribution | None:
        return self.distribution(shared)

    def own_model(self, carry: State) -> Distribution:
        return self.distribution(carry)

    def distribution(self, state: State) -> Distribution:
        """Return the Gaussian, or the point, that a state describes."""
        return Point(state["mean"]) if self.posterior == "point" else Gaussian(state["mean"], state["logstd"])

    def descend(
        self, phi: State, theta: State, batch: Batch, site: Site, key: Tensor, loss: Loss, lr: float
    ) -> Stepped:
        """Take one step of φ towards the posterior of a client under the prior θ."""
        gradient, value = self.gradient(phi, batch, key, loss)
        return self.move(phi, gradient, theta, site.n, lr, self.step_fraction(batch, site.n)), value

    def gradient(self, phi: State, batch: Batch, key: Tensor, loss: Loss) -> Stepped:
        """Return ∇_φ of the expected negative log likelihood by reparameterised samples, and its value."""
        q = {name: phi[name] for name in ("mean", "logstd") if name in phi}
        return derived(lambda q: loss(self.distribution(q), batch, key, self.s), q)

    def zero_momentum(self, like: Tensor) -> State:
        mean = super().zero_momentum(like)
        learned = self.posterior == "gaussian" and self.posterior_std == "sgd"
        return mean | (prefixed("std", super().zero_momentum(like)) if learned and self.optimiser == "adam" else {})

    def step_fraction(self, batch: Batch, n: Tensor) -> Number:
        """Return the factor on the step sizes for this minibatch."""
        return batch_fraction(batch, n) if self.short_batch == "rows" else 1.0

    def move(self, phi: State, gradient: State, theta: State, n: Tensor, lr: Number, fraction: Number = 1.0) -> State:
        """Return φ after a step by the likelihood's gradient and the KL's pull towards θ, all in closed form.

        `fraction` multiplies the step sizes; it is the minibatch's part of a whole one.
        """
        lr = lr * fraction
        if self.posterior == "point":
            direction, buffer = self.momentum_step(phi, gradient["mean"])
            return {**phi, "mean": phi["mean"] - lr * direction, **buffer}
        weight, precision = self.lam / n, torch.exp(-2 * theta["logstd"])
        kappa = weight * precision
        if self.kl_step == "implicit":
            mean, buffer = proximal_momentum_step(self, phi, gradient["mean"], theta["mean"], kappa, lr)
        else:
            direction, buffer = self.momentum_step(phi, gradient["mean"] + kappa * (phi["mean"] - theta["mean"]))
            mean = phi["mean"] - lr * direction
        logstd, rate = phi["logstd"], lr if self.lr_std is None else self.lr_std * fraction
        if self.posterior_std == "sgd" and self.optimiser == "adam":
            # Exactly 0 where ν is still the prior's: Adam would turn a mere rounding error into a step of about η.
            excess = torch.expm1(2 * (logstd - theta["logstd"]))
            direction, state = self.momentum_step(group(phi, "std"), plus(gradient["logstd"], weight, excess))
            logstd, buffer = plus(logstd, rate, direction, -1), buffer | prefixed("std", state)
        elif self.posterior_std == "sgd":
            excess = plus(-precision.new_ones(()), torch.exp(2 * logstd), precision)
            logstd = plus(logstd, rate, plus(gradient["logstd"], weight, excess), -1)
        elif self.posterior_std == "natural":
            logstd = natural_logstd(logstd, gradient["logstd"], theta["logstd"], weight, rate)
        return {**phi, "mean": mean, "logstd": logstd, **buffer}
