"""pFedMe (Dinh et al. 2020): personal models under a Moreau envelope around the shared one.

client   w ← w_t, θ ← w_t; for every minibatch: k times θ ← θ − η_p(∇f(θ) + λ(θ − w)), then w ← w − ηλ(w − θ)
server   w_{t+1} = (1 − β) w_t + β mean of the clients' w
sends    w, both ways
keeps    nothing: every client, new or not, begins from w_t
scored   θ_i, from w_t by `personal_epochs` of the inner steps on the client's training data
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import rng
from .base import Algorithm, Batch, Batches, Loss, Site, State, Stepped
from .hyper import LR, PERSONAL_LRS, Range, hyper
from .steps import blend


@dataclass(frozen=True, repr=False)
class PFedMe(Algorithm):
    """pFedMe."""

    lr: float = hyper(0.03, "η: step size of local training", 0, tune=LR)
    personal_lr: float | None = hyper(0.01, "step size of the personal epochs (none: η_p)", 0, tune=PERSONAL_LRS)
    lam: float = hyper(15.0, "λ: strength of the pull towards w", 0, tune=Range(1.0, 50.0, log=True))
    k: int = hyper(5, "k: inner steps per minibatch", 1, tune=(1, 5, 10))
    inner_lr: float | None = hyper(None, "η_p: step size of θ (none: lr)", 0, tune=LR)
    beta: float = hyper(1.0, "β: the server's share of the new mean", 0, 2)

    @property
    def inner(self) -> float:
        """The step size η_p of θ."""
        return self.lr if self.inner_lr is None else self.inner_lr

    @property
    def effective_personal_lr(self) -> float:
        return self.inner if self.personal_lr is None else self.personal_lr

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return {**super().begin(shared, kept, site, key), "anchor": shared["mean"]}

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        for j in range(self.k):
            carry, value = self.descend(carry, shared, batches[0], site, rng.fold(key, j), loss, self.inner)
        anchor = carry["anchor"]
        return {**carry, "anchor": anchor - self.lr * self.lam * (anchor - carry["mean"])}, value

    def descend(
        self, carry: State, shared: State, batch: Batch, site: Site, key: Tensor, loss: Loss, lr: float
    ) -> Stepped:
        """Take an inner step θ ← θ − η_p(∇f(θ) + λ(θ − w))."""
        return self.sgd(carry, batch, key, loss, lr, self.lam * (carry["mean"] - carry["anchor"]))

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {"mean": carry["anchor"]}, {}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        return blend(shared, update, self.beta)
