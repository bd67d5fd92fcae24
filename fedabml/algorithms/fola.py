"""FOLA (Liu et al. 2021): a Gaussian N(μ, diag Λ⁻¹) of the server is every client's prior; it becomes their product.

    client   w ← μ;  w ← w − η(∇f_i(w) + κ(w − μ)) for every minibatch,  κ = λΛ/T:  a MAP estimate under the prior
             F_i = diagonal curvature of f_i along the way;  Λ_i = Λ + F_i (online Laplace)
    server   Λ⁺ = mean of the Λ_i,  μ⁺ = μ + mean of the Λ_i(w_i − μ)/Λ⁺  (the product of the Gaussians N(w_i, Λ_i⁻¹)),
             T⁺ = T + 1  (rounds whose curvature is in Λ, the first prior counted as one)
    sends    μ, Λ and T down, Λ_i and Λ_i(w − μ) up
    keeps    nothing: every client, new or not, begins from μ
    scored   w after `personal_epochs` of the same steps from μ (0: μ itself)

F_i is the empirical Fisher, the mean of |B|·(∇f_B)² over minibatches, or the Hessian's diagonal by Hutchinson's probes
z∘Hz, cut at 0. Λ begins at ε, so that it is never 0. `memory` = m forgets old rounds: Λ_i = ε + m(Λ − ε) + F_i and
T⁺ = mT + 1; 1 is the paper's sum. The pull κ is taken implicitly, which is stable for every Λ/T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..vectors import Layout
from .base import Algorithm, Batch, Batches, Loss, Site, State, Stepped, gradient_at, needs_second_derivative
from .hyper import Range, hyper
from .steps import proximal_momentum_step


@dataclass(frozen=True, repr=False)
class FOLA(Algorithm):
    """FOLA, federated online Laplace approximation."""

    lam: float = hyper(
        1.0, "λ: weight of the prior (1: that of the client's data)", 0, tune=Range(0.01, 100.0, log=True)
    )
    memory: float = hyper(
        1.0, "m: share of the old precision that stays in a round (1: all)", 0, 1, tune=(0.5, 0.9, 1.0)
    )
    curvature: str = hyper("fisher", "F_i: squared gradients, or the Hessian's diagonal", choices=("fisher", "hessian"))
    eps: float = hyper(1e-5, "ε: precision of the first prior, and the least", 1e-12, tune=Range(1e-8, 1e-2, log=True))

    def init(self, params: Tensor, layout: Layout) -> State:
        return {"mean": params, "precision": torch.full_like(params, self.eps), "rounds": params.new_ones(())}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        empty = {"curved": torch.zeros_like(shared["mean"]), "rows": torch.zeros_like(shared["rounds"])}
        return {**super().begin(shared, kept, site, key), **empty}

    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return super().begin(shared, kept, site, key)

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        gradient, curvature, value = self.gradient_and_curvature(carry["mean"], batches[0], key, loss)
        rows = batches[0].mask.sum()
        sums = {"curved": carry["curved"] + rows * curvature, "rows": carry["rows"] + rows}
        return {**self.move(carry, gradient, shared, self.lr), **sums}, value

    def descend(
        self, carry: State, shared: State, batch: Batch, site: Site, key: Tensor, loss: Loss, lr: float
    ) -> Stepped:
        """Take a step without estimating the curvature, as personalising does."""
        gradient, value = gradient_at(carry["mean"], batch, key, loss)
        return self.move(carry, gradient, shared, lr), value

    def gradient_and_curvature(self, w: Tensor, batch: Batch, key: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """Return ∇f(w) and the diagonal of its curvature, both [d], and f(w), all by one minibatch."""
        if self.curvature == "fisher":
            gradient, value = gradient_at(w, batch, key, loss)
            return gradient, batch.mask.sum() * gradient**2, value
        with needs_second_derivative("curvature fisher"):
            gradient, back, value = torch.func.vjp(lambda w: gradient_at(w, batch, key, loss), w, has_aux=True)  # type: ignore[misc]
            probe = torch.sign(rng.normal(rng.fold(key, 0), w.shape, w.dtype))  # dropout folds 1, 2, ...
            return gradient, probe * back(probe)[0], value

    def move(self, carry: State, gradient: Tensor, shared: State, lr: float) -> State:
        """Return the carry after a step of w with the prior's pull taken implicitly."""
        kappa = self.lam * shared["precision"] / shared["rounds"]
        mean, buffer = proximal_momentum_step(self, carry, gradient, shared["mean"], kappa, lr)
        return {**carry, "mean": mean, **buffer}

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        curvature = (carry["curved"] / carry["rows"]).clamp_min(0)
        precision = self.eps + self.memory * (shared["precision"] - self.eps) + curvature
        return {"precision": precision, "moved": precision * (carry["mean"] - shared["mean"])}, {}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        mean = shared["mean"] + update["moved"] / update["precision"]
        return {"mean": mean, "precision": update["precision"], "rounds": self.memory * shared["rounds"] + 1}
