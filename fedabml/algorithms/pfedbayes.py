"""pFedBayes (Zhang et al. 2022): each client keeps its own Gaussian q_i, tied by a KL to a shared Gaussian z.

    client   z_i ← z_t; for every minibatch: k steps of q_i on mean −log p(D_i|w) + (ζ/n) KL[q_i ‖ z_i], then one step
             of z_i on (ζ/n) KL[q_i ‖ z_i]
    server   z_{t+1} = (1 − β) z_t + β mean of the z_i
    sends    z, both ways: means and log deviations
    keeps    q_i; a client that has none begins at z_t (`newcomer` server), or at the first z, the initial weights with
             log deviation ν₀ (initial)
    scored   q_i, after `personal_epochs` more of its steps (five by default)

ζ is `lam`. The steps are FedABML's (`euclidean`, every minibatch); the difference is that q_i lasts between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import LABEL_PRIORS, SERVER_MOMENTUM, Algorithm, Site, State
from .fedabml import FedABML
from .hyper import AVERAGES, NEWCOMER, PERSONAL_EPOCHS, PERSONAL_LRS, SERVER_MOMENTA, Range, hyper
from .steps import blend


@dataclass(frozen=True, repr=False)
class PFedBayes(FedABML):
    """pFedBayes."""

    lam: float = hyper(0.05, "ζ: weight of the KL", 0, tune=Range(0.01, 1.0, log=True))
    k: int = hyper(5, "k: steps of q_i per minibatch", 1, tune=(1, 5, 10))
    beta: float = hyper(1.0, "β: the server's share of the new mean", 0, 2)
    prior_step: str = hyper("euclidean", "the step of z", choices=("natural", "euclidean"))
    prior_every: str = hyper("batch", "when z_i moves", choices=("batch",))
    rho: float = hyper(1.0, "ρ: step of z_i's mean, with prior_step natural", 0, 2)
    prior_std: str = hyper("learned", "σ of z: as it starts, or learned", choices=("fixed", "learned"))
    start_gap: float = hyper(0.0, "no effect: q_i lasts between rounds", 0, 0, neutral=0.0)
    posterior: str = hyper("gaussian", "q_i: a Gaussian", choices=("gaussian",))
    aggregate: str = hyper("mean", "the server's mean of the z_i", choices=("mean",))
    personal_epochs: int = hyper(5, "further epochs of q_i before it is scored", 0, tune=PERSONAL_EPOCHS)
    personal_lr: float | None = hyper(0.03, "step size of the personal epochs (none: lr)", 0, tune=PERSONAL_LRS)
    average: float = hyper(0.0, "decay of the average of z over rounds (0: the last z)", 0, 0.999, tune=AVERAGES)
    server_momentum: float = hyper(0.0, SERVER_MOMENTUM, 0, 0.999, neutral=0.0, tune=SERVER_MOMENTA)
    short_batch: str = hyper("whole", "the step of an epoch's short last minibatch", choices=("whole", "rows"))
    label_prior: str = hyper("none", "label level: π_i from the client's counts", choices=LABEL_PRIORS)
    newcomer: str = hyper("server", NEWCOMER, choices=("server", "initial"), neutral="initial")
    drift: str = hyper("none", "no effect: q_i lasts between rounds", choices=("none",), neutral="none")

    keeps = Algorithm.keeps
    # FedABML's is smaller, because its θ is already good for a client.
    effective_personal_lr = Algorithm.effective_personal_lr

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        if self.newcomer == "server":
            return {name: shared[name] for name in ("mean", "logstd")}
        return self.initial_distribution(params)

    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return {**kept, **self.zero_momentum(kept["mean"])}

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return super().end(carry, shared, kept, site, steps)[0], {name: carry[name] for name in shared}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        return blend(shared, update, self.beta)
