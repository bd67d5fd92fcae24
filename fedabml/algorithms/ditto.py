"""Ditto (Li et al. 2021): FedAvg for the shared model, and beside it a personal model pulled towards it.

client   w ← w_t;  w ← w − η∇f(w) for R epochs;  then v_i ← v_i − η(∇f(v_i) + λ(v_i − w_t)) for R epochs
server   w_{t+1} = mean of the clients' w
sends    w, both ways
keeps    v_i; a client that has none begins at w_t (`newcomer` server), or at the initial weights (initial)
scored   v_i, after `personal_epochs` more of its steps (five epochs by default)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..files.sealed import group, prefixed
from ..gaussian import Distribution, Point
from .base import Algorithm, Batch, Batches, Loss, Phase, Site, State, Stepped
from .hyper import NEWCOMER, PERSONAL_EPOCHS, Range, hyper


@dataclass(frozen=True, repr=False)
class Ditto(Algorithm):
    """Ditto."""

    lam: float = hyper(0.75, "λ: strength of the pull towards w_t", 0, tune=Range(0.05, 5.0, log=True))
    personal_epochs: int = hyper(5, "further epochs of v_i before it is scored", 0, tune=PERSONAL_EPOCHS)
    newcomer: str = hyper("server", NEWCOMER, choices=("server", "initial"), neutral="initial")

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"mean": shared["mean"] if self.newcomer == "server" else params}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        personal = {"mean": kept["mean"], **self.zero_momentum(kept["mean"])}
        return super().begin(shared, kept, site, key) | prefixed("own", personal)

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, self.step), Phase(epochs, self.own_step)]

    def own_step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        """Take a step of v_i in a round."""
        return self._proximal_sgd(carry, shared, batches[0], key, loss, self.lr)

    def personal_step(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped:
        return self._proximal_sgd(carry, shared, batches[0], key, loss, self.effective_personal_lr)

    def _proximal_sgd(self, carry: State, shared: State, batch: Batch, key: Tensor, loss: Loss, lr: float) -> Stepped:
        personal = group(carry, "own")
        pull = self.lam * (personal["mean"] - shared["mean"])
        personal, value = self.sgd(personal, batch, key, loss, lr, pull)
        return carry | prefixed("own", personal), value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {"mean": carry["mean"]}, {"mean": carry["own.mean"]}

    def own_model(self, carry: State) -> Distribution:
        return Point(carry["own.mean"])
