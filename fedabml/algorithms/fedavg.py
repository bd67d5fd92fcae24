"""FedAvg (McMahan et al. 2017): clients run SGD from the shared weights, the server averages.

    client   w ← w_t;  w ← w − η ∇f_i(w) for every minibatch of R epochs
    server   w_{t+1} = w_t + η_g(mean of the clients' w − w_t),  η_g = 1: their mean
    sends    w, both ways
    keeps    nothing: every client, new or not, begins from w_t
    scored   w_t (`personal_epochs` = 0), or, as `fedavg-ft`, w_t after a few epochs on the client's training data

The fine-tuning is the base class's, shared by every algorithm that has a global model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Algorithm, State
from .hyper import SERVER_LR, hyper


@dataclass(frozen=True, repr=False)
class FedAvg(Algorithm):
    """FedAvg; with personal epochs, FedAvg + fine-tuning."""

    server_lr: float = hyper(
        1.0, "η_g: the server's step size; 1 is the mean of the clients' w", 0, neutral=1.0, tune=SERVER_LR
    )

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        if self.server_lr == 1:
            return update
        return {"mean": shared["mean"] + self.server_lr * (update["mean"] - shared["mean"])}
