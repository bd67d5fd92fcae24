"""FedPA (Al-Shedivat et al. 2021): the server descends towards the mode of the product of the clients' posteriors.

    client   w ← w_t;  w ← w − η∇f_i(w) for every minibatch;  after `burn` steps every `window` iterates are averaged
             into a sample x_k (iterate-averaged SG-MCMC), of which the last ℓ are taken
             μ̂ = mean of the x_k,  S their covariance (by ℓ − 1),  ρ_ℓ = 1/(1 + (ℓ − 1)ρ),  Σ̂ = ρ_ℓ I + (1 − ρ_ℓ) S
    server   w_{t+1} = w_t − η_s mean of the Δ
    sends    w_t down (with `warm` the round's number, too), Δ = Σ̂⁻¹(w_t − μ̂) up
    keeps    nothing: every client, new or not, begins from w_t
    scored   w_t after `personal_epochs` of plain SGD on the client's training data (0: w_t itself)

Σ̂ = ρ_ℓ Σ̃ with Σ̃_k = Σ̃_{k−1} + γ_k u_k u_kᵀ, γ_k = ρ(k − 1)/k and u_k = x_k − mean(x_1 … x_{k−1}), so Sherman and
Morrison give Δ sample by sample in O(ℓ²d), without a matrix. No sample (too few steps): Δ = w_t − w, which is FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..vectors import Layout
from .base import Algorithm, Batches, Loss, Site, State, Stepped
from .hyper import SERVER_LR, Range, hyper
from .steps import Number


def posterior_correction(theta: Tensor, samples: Tensor, count: Tensor, rho: Number) -> Tensor:
    """Return Σ̂⁻¹(θ − μ̂), [d], of the last `count` rows of `samples` [ℓ, d], by dynamic programming; 0 for none."""
    mean, delta = theta, torch.zeros_like(theta)
    past: list[tuple[Tensor, Tensor]] = []  # v_k = Σ̃_{k−1}⁻¹ u_k, and γ_k/(1 + γ_k u_k·v_k)
    for j, x in enumerate(samples):
        k = count - (len(samples) - 1 - j)  # the number of this sample; not taken where it is below 1
        u = torch.where(k > 0, x - mean, 0)
        k = k.clamp_min(1)
        v = u - sum(c * (w @ u) * w for w, c in past)
        gamma = rho * (k - 1) / k
        scale = 1 + gamma * (u @ v)
        delta = delta - v * (1 / k + gamma * (u @ delta)) / scale
        mean = mean + u / k
        past.append((v, gamma / scale))
    return delta * (1 + (count - 1).clamp_min(0) * rho)


@dataclass(frozen=True, repr=False)
class FedPA(Algorithm):
    """FedPA, federated posterior averaging."""

    rho: float = hyper(
        0.01, "ρ: shrinkage of the covariance (0: none is estimated, Σ̂ = I)", 0, tune=Range(1e-4, 1.0, log=True)
    )
    burn: int = hyper(10, "B: steps before the first sample", 0, tune=(0, 10, 20))
    window: int = hyper(10, "K: iterates averaged into a sample", 1, tune=(1, 5, 10, 20))
    samples: int = hyper(4, "ℓ: samples taken at most, the last ones", 1, tune=(1, 2, 4, 8))
    warm: int = hyper(0, "rounds of FedAvg before the first of posterior averaging", 0)
    server_lr: float = hyper(1.0, "η_s: the server's step size", 0, tune=SERVER_LR)

    needs_sgd: ClassVar[bool] = True  # its samples are iterates of SGD with a constant step size

    @property
    def samples_per_step(self) -> int:  # type: ignore[override]
        return self.samples

    def init(self, params: Tensor, layout: Layout) -> State:
        return {"mean": params, **({"round": params.new_zeros(())} if self.warm else {})}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        mean = shared["mean"]
        empty = {"step": mean.new_zeros(()), "sum": torch.zeros_like(mean)}
        return {**super().begin(shared, kept, site, key), **empty, "samples": mean.new_zeros(self.samples, len(mean))}

    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return super().begin(shared, kept, site, key)

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        carry, value = super().step(carry, shared, batches, site, key, loss)
        after = carry["step"] + 1 - self.burn
        total = torch.where(after > 0, carry["sum"] + carry["mean"], 0)
        full = (after > 0) & (after % self.window == 0)
        newer = torch.cat([carry["samples"][1:], total.unsqueeze(0) / self.window])
        samples = torch.where(full, newer, carry["samples"])
        return {**carry, "step": carry["step"] + 1, "sum": torch.where(full, 0, total), "samples": samples}, value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        count = torch.floor((steps - self.burn) / self.window).clamp(0, self.samples)
        if self.warm:
            count = torch.where(shared["round"] < self.warm, 0, count)
        delta = posterior_correction(shared["mean"], carry["samples"], count, self.rho)
        return {"delta": torch.where(count > 0, delta, shared["mean"] - carry["mean"])}, {}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        mean = shared["mean"] - self.server_lr * update["delta"]
        return {"mean": mean, **({"round": shared["round"] + 1} if self.warm else {})}
