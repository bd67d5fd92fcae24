"""The amortised θ-step: the derivative of a client's loss through its own φ-steps, as the paper's title has it.

    θ ← θ − η' d/dθ L(θ, φ_k(θ)),   φ_0 = θ,  φ_{j+1} = φ_j − η ∇_φ L(θ, φ_j),   fresh noise in every step

`curvature` chooses the second derivatives: exact, a difference of gradients, or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .. import rng
from ..gaussian import Gaussian, kl
from .base import Batch, Loss, Site, State, Stepped, needs_second_derivative
from .hyper import hyper
from .steps import total_derivative
from .variational import Variational


@dataclass(frozen=True, repr=False)
class Amortised(Variational):
    """A Gaussian posterior, and a θ that may be moved by the derivative through its steps."""

    prior_std: str = hyper(
        "fixed", "σ_θ: as it starts, or learned", choices=("fixed", "learned"), tune=("fixed", "learned")
    )
    prior_lr: float | None = hyper(None, "η': step size of euclidean and amortised θ-steps (none: lr)", 0)
    curvature: str = hyper("exact", "amortised: H·v", choices=("exact", "first_order", "hessian_free"))
    delta: float = hyper(1e-3, "δ: step of the finite difference (hessian_free)", 1e-12)

    @property
    def theta_lr(self) -> float:
        """The step size η' of θ."""
        return self.lr if self.prior_lr is None else self.prior_lr

    def amortised(self, theta: State, batch: Batch, site: Site, key: Tensor, loss: Loss) -> Stepped:
        """Return θ_i after θ_i ← θ_i − η' d/dθ L(θ, φ_k(θ)), φ_0 = θ, with fresh noise in every step, and the loss."""

        def outer(theta: State, phi: State) -> tuple[Tensor, Tensor]:
            q, prior = self.distribution(phi), self.distribution(theta)
            value = loss(q, batch, rng.fold(key, self.k), self.s)
            both = isinstance(q, Gaussian) and isinstance(prior, Gaussian)
            return (value + self.lam / site.n * kl(q, prior) if both else value), value  # type: ignore[arg-type]

        def slope(j: int) -> Callable[[State], State]:
            return lambda phi: self.gradient(phi, batch, rng.fold(key, j), loss)[0]

        share = self.step_fraction(batch, site.n)
        with needs_second_derivative("curvature hessian_free or first_order"):
            total, value = total_derivative(
                {**theta, **self.zero_momentum(theta["mean"])},
                theta,
                [slope(j) for j in range(self.k)],
                lambda phi, gradient, theta: self.move(phi, gradient, theta, site.n, self.lr, share),
                outer,
                self.curvature,
                self.delta,
            )
        learned = ("mean", "logstd") if self.prior_std == "learned" else ("mean",)
        rate = self.theta_lr * share
        return {name: v - rate * total[name] if name in learned else v for name, v in theta.items()}, value
