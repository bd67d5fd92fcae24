"""FedAvg (McMahan et al. 2017): clients run SGD from the shared weights, the server averages.

    client   w ← w_t;  w ← w − η ∇f_i(w) for every minibatch of R epochs
    server   w_{t+1} = mean of the clients' w

Scored: w_t itself (`personal_epochs` = 0), or, as `fedavg-ft`, w_t after a few epochs on the client's training data.
That fine-tuning is the base class's, shared by every algorithm that has a global model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg; with personal epochs, FedAvg + fine-tuning."""
