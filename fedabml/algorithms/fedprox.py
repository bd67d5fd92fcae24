"""FedProx (Li et al. 2020): FedAvg whose local steps are pulled towards the weights they started from.

client   w ← w_t;  w ← w − η(∇f_i(w) + μ(w − w_t)) for every minibatch
server   w_{t+1} = mean of the clients' w
sends    w, both ways
keeps    nothing: every client, new or not, begins from w_t
scored   w_t, or as `fedprox-ft` w_t after a few plain epochs on the client's training data
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Algorithm, Batches, Loss, Site, State, Stepped
from .hyper import Range, hyper


@dataclass(frozen=True, repr=False)
class FedProx(Algorithm):
    """FedProx; with personal epochs, FedProx + fine-tuning."""

    mu: float = hyper(0.25, "μ: strength of the pull towards w_t", 0, tune=Range(0.05, 5.0, log=True))

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        return self.sgd(carry, batches[0], key, loss, self.lr, self.mu * (carry["mean"] - shared["mean"]))
