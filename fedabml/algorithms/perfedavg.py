"""Per-FedAvg, Hessian-free (Fallah et al. 2020): weights from which one gradient step on a client's data goes far.

    client   on three minibatches:  w̃ = w − α∇f(w; D₁),  g = ∇f(w̃; D₂)
             h = [∇f(w + δg; D₃) − ∇f(w − δg; D₃)]/2δ,   w ← w − β(g − αh)          (β is `lr`)
    server   w_{t+1} = mean of the clients' w
    sends    w, both ways
    keeps    nothing: every client, new or not, begins from w_t
    scored   w_t after `personal_epochs` at `personal_lr` on the client's *training* data

`personal_lr` = α, one epoch and one full batch give the paper's single α-step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import rng
from .base import Algorithm, Batches, Loss, Site, State, Stepped, gradient_at
from .hyper import LR, PERSONAL_LRS, Range, hyper


@dataclass(frozen=True, repr=False)
class PerFedAvg(Algorithm):
    """Per-FedAvg with its Hessian-free step."""

    lr: float = hyper(0.3, "β: step size of local training", 0, tune=LR)
    personal_lr: float | None = hyper(0.1, "step size of the personal epochs (none: lr)", 0, tune=PERSONAL_LRS)
    alpha: float = hyper(1e-4, "α: step size of the adaptation inside", 0, tune=Range(1e-5, 0.1, log=True))
    delta: float = hyper(1e-3, "δ: step of the finite difference for the Hessian, as a multiple of g", 1e-12)

    batches_per_step: ClassVar[int] = 3
    needs_full_precision: ClassVar[bool] = True  # mixed precision would leave only errors of the difference

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        def at(w: Tensor, j: int) -> tuple[Tensor, Tensor]:
            return gradient_at(w, batches[j], rng.fold(key, j), loss)

        w = carry["mean"]
        first, value = at(w, 0)
        outer, _ = at(w - self.alpha * first, 1)
        curved = (at(w + self.delta * outer, 2)[0] - at(w - self.delta * outer, 2)[0]) / (2 * self.delta)
        direction, buffer = self.momentum_step(carry, outer - self.alpha * curved)
        return {**carry, "mean": w - self.lr * direction, **buffer}, value
