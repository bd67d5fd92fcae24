"""The amortised θ-step: the derivative of a client's loss through its own φ-steps, as the paper's title has it.

    θ ← θ − η' d/dθ L(θ, φ_k(θ)),   φ_0 = θ,  φ_{j+1} = φ_j − η ∇_φ L(θ, φ_j),   fresh noise in every step

`curvature` chooses the second derivatives: exact, a difference of gradients, or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import rng
from ..gaussian import Gaussian, kl
from .base import Batch, Loss, Site, State, Stepped, needs_second_derivative
from .hyper import hyper
from .steps import Number
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
        """Return θ_i after θ_i ← θ_i − η' d/dθ L(θ, φ_k(θ)), φ_0 = θ, with fresh noise in every step, and the loss.

        One recursion runs backwards through the steps. `move` is in closed form, so its derivative is exact. The
        likelihood's Hessian enters only as H·v. The derivative in φ_0 is added to that in θ.
        """
        fraction = self.step_fraction(batch, site.n)

        def gradient(j: int, phi: State) -> State:
            return self.gradient(phi, batch, rng.fold(key, j), loss)[0]

        def move(phi: State, gradient: State, theta: State) -> State:
            return self.move(phi, gradient, theta, site.n, self.lr, fraction)

        def outer(theta: State, phi: State) -> tuple[Tensor, Tensor]:
            q, prior = self.distribution(phi), self.distribution(theta)
            value = loss(q, batch, rng.fold(key, self.k), self.s)
            are_gaussian = isinstance(q, Gaussian) and isinstance(prior, Gaussian)
            pull = self.lam / site.n * kl(q, prior) if are_gaussian else None  # type: ignore[arg-type]
            return (value if pull is None else value + pull), value

        with needs_second_derivative("curvature hessian_free or first_order"):
            path, gradients = [{**theta, **self.zero_momentum(theta["mean"])}], []
            for j in range(self.k):
                gradients.append(gradient(j, path[-1]))
                path.append(move(path[-1], gradients[-1], theta))
            (total, back), (_, value) = torch.func.grad_and_value(outer, argnums=(0, 1), has_aux=True)(theta, path[-1])
            for j in reversed(range(self.k)):
                back, v, direct = torch.func.vjp(move, path[j], gradients[j], theta)[1](back)
                product = self.hessian_product(partial(gradient, j), path[j], v)
                back = {name: b + product.get(name, 0) for name, b in back.items()}
                total = {name: t + direct[name] for name, t in total.items()}
        learned = ("mean", "logstd") if self.prior_std == "learned" else ("mean",)
        rate = self.theta_lr * fraction
        return {
            name: v - rate * (total[name] + back[name]) if name in learned else v for name, v in theta.items()
        }, value

    def hessian_product(self, gradient: Callable[[State], State], phi: State, v: State) -> State:
        """Return H·v at φ, H the derivative of `gradient`: exact, by a central difference (O(δ²)), or nothing."""
        if self.curvature == "first_order":
            return {}
        if self.curvature == "exact":
            return torch.func.vjp(gradient, phi)[1](v)[0]
        # δ is a distance: the direction's length is proportional to η, and rounding would hide a small one.
        length = torch.cat(list(v.values())).norm() + torch.finfo(v["mean"].dtype).tiny

        def at(delta: Number) -> State:
            return gradient({name: w + delta * v[name] if name in v else w for name, w in phi.items()})

        ahead, behind = at(self.delta / length), at(-self.delta / length)
        return {name: length / (2 * self.delta) * (ahead[name] - behind[name]) for name in ahead}
