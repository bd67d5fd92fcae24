"""FedBABU (Oh et al. 2022): the body is trained under a random head that never changes; the head comes at the end.

client   body ← body_t;  body ← body − η∇_body f(body, h₀) for R epochs, h₀ the initial head
server   body_{t+1} = mean of the clients' bodies
sends    the body, both ways
keeps    nothing: h₀ is rebuilt from the seed, so every client, new or not, begins from (body_t, h₀)
scored   the whole network, from (body_t, h₀), after `personal_epochs` on the client's training data
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..gaussian import Distribution, Point
from .base import Batches, Loss, Site, State, Stepped
from .heads import Headed
from .hyper import LR, hyper


@dataclass(frozen=True, repr=False)
class FedBABU(Headed):
    """FedBABU."""

    lr: float = hyper(0.3, "η: step size of local training", 0, tune=LR)

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        return self.part_step("body", carry, batches[0], key, loss, self.lr)

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {"body": carry["body"]}, {}

    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        weights = self.flat_weights({**shared, **kept})
        return {"mean": weights, **self.zero_momentum(weights)}

    def own_model(self, carry: State) -> Distribution:
        return Point(carry["mean"])
