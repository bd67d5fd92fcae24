"""FedRep (Collins et al. 2021): a shared representation, and a head of its own for every client.

client   head epochs h_i ← h_i − η∇_h f(body_t, h_i) with the body frozen, then body epochs with the head frozen
server   body_{t+1} = mean of the clients' bodies
sends    the body, both ways
keeps    h_i; before a client's first round it is the initial head
scored   (body_t, h_i), after `personal_epochs` more of the head (five by default)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Batches, Loss, Phase, Site, State, Stepped
from .heads import Headed
from .hyper import PERSONAL_EPOCHS, hyper


@dataclass(frozen=True, repr=False)
class FedRep(Headed):
    """FedRep."""

    body_epochs: int = hyper(1, "epochs of the body in a round, after those of the head", 1, tune=(1, 2, 5))
    personal_epochs: int = hyper(5, "further epochs of the head before it is scored", 0, tune=PERSONAL_EPOCHS)

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, self.head_step), Phase(self.body_epochs, self.step)]

    def head_step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        """Take a step of the head under the frozen body."""
        return self.part_step("head", carry, batches[0], key, loss, self.lr)

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        return self.part_step("body", carry, batches[0], key, loss, self.lr)

    def personal_step(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped:
        return self.part_step("head", carry, batches[0], key, loss, self.effective_personal_lr)
