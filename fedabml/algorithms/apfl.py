"""APFL (Deng, Kamani, Mahdavi 2020): every client predicts with a mixture of its own model and the shared one.

    client   w ← w_t;  for every minibatch, with v̄ = α_i v_i + (1 − α_i) w:
             w ← w − η∇f_i(w),   v_i ← v_i − η ∇_v f_i(v̄) = v_i − η α_i ∇f_i(v̄),
             α_i ← clip(α_i − η_α ⟨v_i − w, ∇f_i(v̄)⟩, 0, 1),   all three from the values before the step
    server   w_{t+1} = mean of the clients' w
    sends    w, both ways
    keeps    v_i and α_i; a client that has none begins with v_i = w_t (`newcomer` server) or v_i at the initial weights
             (initial), and with α_i = `alpha`
    scored   α_i v_i + (1 − α_i) w_t, after `personal_epochs` more steps of v_i and α_i under w_t (none by default)

α_i moves with the first minibatch only, as in the authors' code (`alpha_every` round): w is then still the w_t of the
mixture that is scored. Later w has been trained on the client's own data, and α_i would learn to rely on that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.sealed import group, prefixed
from ..gaussian import Distribution, Point
from .base import Algorithm, Batch, Batches, Loss, Site, State, Stepped, gradient_at
from .hyper import NEWCOMER, PERSONAL_EPOCHS, Range, hyper


@dataclass(frozen=True, repr=False)
class APFL(Algorithm):
    """APFL, adaptive personalised federated learning."""

    alpha: float = hyper(0.5, "α: share of v_i in the mixture, at the start", 0, 1, tune=(0.1, 0.25, 0.5, 0.75))
    alpha_lr: float | None = hyper(
        None, "η_α: step size of α (none: that of v_i; 0: α stays)", 0, tune=Range(1e-4, 1.0, log=True)
    )
    alpha_every: str = hyper("round", "when α moves: with the first minibatch, or all", choices=("batch", "round"))
    personal_epochs: int = hyper(0, "further epochs of v_i before it is scored", 0, tune=PERSONAL_EPOCHS)
    newcomer: str = hyper("server", NEWCOMER, choices=("server", "initial"), neutral="initial")

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        mean = shared["mean"] if self.newcomer == "server" else params
        return {"mean": mean, "alpha": params.new_zeros(()) + self.alpha}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        personal = {"mean": kept["mean"], **self.zero_momentum(kept["mean"])}
        mixing = {"alpha": kept["alpha"], "turn": torch.ones_like(kept["alpha"])}  # turn: 1 while α may move, else 0
        return super().begin(shared, kept, site, key) | mixing | prefixed("own", personal)

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        personal, value = self._mixture_step(carry, batches[0], key, loss, self.lr)
        return self.sgd(carry, batches[0], key, loss, self.lr)[0] | personal, value

    def personal_step(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped:
        personal, value = self._mixture_step(carry, batches[0], key, loss, self.effective_personal_lr)
        return carry | personal, value

    def _mixture_step(self, carry: State, batch: Batch, key: Tensor, loss: Loss, lr: float) -> Stepped:
        """Return v_i, its momentum and α_i after a step."""
        v, alpha = carry["own.mean"], carry["alpha"]
        gradient, value = gradient_at(self.mixture(carry), batch, key, loss)
        direction, buffer = self.momentum_step(group(carry, "own"), alpha * gradient)
        rate = carry["turn"] * (lr if self.alpha_lr is None else self.alpha_lr)
        alpha = (alpha - rate * ((v - carry["mean"]) @ gradient)).clamp(0, 1)
        mixing = {"alpha": alpha, "turn": carry["turn"] * (self.alpha_every == "batch")}
        return mixing | prefixed("own", {"mean": v - lr * direction, **buffer}), value

    def mixture(self, carry: State) -> Tensor:
        """Return v̄ = αv + (1 − α)w, [d]."""
        return carry["alpha"] * carry["own.mean"] + (1 - carry["alpha"]) * carry["mean"]

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {"mean": carry["mean"]}, {"mean": carry["own.mean"], "alpha": carry["alpha"]}

    def own_model(self, carry: State) -> Distribution:
        return Point(self.mixture(carry))
