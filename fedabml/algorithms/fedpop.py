"""FedPop (Kotelevskii et al. 2022): a shared body under heads drawn from a population N(μ, diag s²).

    client   for every minibatch a Langevin chain of its head,  z ← z − γ(n∇_z f + (z − μ)/s²) + √(2γ) ξ,
             `burn` steps thrown away and M kept;  body ← body − η · mean over the M heads of ∇_body f
    server   body_{t+1} = mean of the bodies;  (μ, s) the moments of all clients' heads (the M-step of EM)
    sends    the body, μ and log s down; the body and the moments of the M heads up
    keeps    z, the head; a client that has none begins at μ (`newcomer` server), or at the initial head (initial)
    scored   the softmax averaged over the last M heads of the chain in `personal_epochs`, one step per minibatch

A round has `sampled` of all clients, so it renews that share of the population's moments; for the others the population
stays N(μ, diag s²). (The moments of the sampled heads alone lose 1/sampled of s² a round wherever the data are silent,
and s shrinks towards its floor.)

The chain's step solves its Ornstein-Uhlenbeck process exactly while ∇_z f is held: with t = γ/s², z keeps e^{−t} of its
distance to μ − s²n∇_z f, and the noise is s√(1 − e^{−2t}) ξ. That is the printed step to first order in γ, at rest at
the same point (the posterior's mode), but stable where γ/s² > 2, which a narrowing population soon reaches. s has a
floor: a single head (one client, M = 1) has no spread, and a population without any would never move again.
`personal_lr` is, as elsewhere, the step size on the mean loss: personal steps have γ = personal_lr/n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..gaussian import Branches, Distribution, Samples, moments
from ..vectors import Layout, derived
from .base import Batch, Batches, Loss, Site, State, Stepped
from .heads import Headed, head_start
from .hyper import LR, NEWCOMER, PERSONAL_LRS, Range, hyper
from .steps import Number


@dataclass(frozen=True, repr=False)
class FedPop(Headed):
    """FedPop."""

    lr: float = hyper(0.3, "η: step size of local training", 0, tune=LR)
    gamma: float = hyper(5e-5, "γ: step size of the chain", 0, tune=Range(1e-5, 3e-4, log=True))
    burn: int = hyper(2, "steps of the chain before samples are kept", 0)
    chain: int = hyper(3, "M: heads kept per minibatch, and averaged in a prediction", 1)
    nu0: float = hyper(-3.0, "log s of the first population", -20, 2, tune=Range(-4.0, -2.0))
    floor: float = hyper(-6.0, "least log s of the population", -20, 2)
    personal_lr: float | None = hyper(
        0.01, "n·γ of the personal epochs, a step size on the mean loss (none: γ)", 0, tune=PERSONAL_LRS
    )
    newcomer: str = hyper("server", NEWCOMER, choices=("server", "initial"), neutral="initial")

    @property
    def samples_per_step(self) -> int:  # type: ignore[override]
        return self.chain

    def init(self, params: Tensor, layout: Layout) -> State:
        cut = head_start(layout, self.head)
        return {"body": params[:cut], "mu": params[cut:], "logstd": self.nu0 + 0 * params[cut:]}

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"head": shared["mu"]} if self.newcomer == "server" else super().keep(params, shared, site, key)

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        parts = {"body": shared["body"], **kept, "heads": kept["head"].expand(self.chain, -1)}
        return parts | self.zero_momentum(shared["body"])

    def langevin(
        self, carry: State, shared: State, batch: Batch, site: Site, key: Tensor, loss: Loss, gamma: Number
    ) -> tuple[Tensor, Tensor]:
        """Return the next head of the chain, [d_h], and the loss of the last one."""

        def of_head(z: Tensor) -> Tensor:
            return loss(Branches(carry["body"], z.unsqueeze(0)), batch, key)

        gradient, value = derived(of_head, carry["head"])
        noise = rng.normal(rng.fold(key, 0), gradient.shape, gradient.dtype)  # dropout folds 1, 2, ...
        time = gamma * torch.exp(-2 * shared["logstd"])
        target = shared["mu"] - torch.exp(2 * shared["logstd"]) * site.n * gradient
        wide = torch.exp(shared["logstd"]) * torch.sqrt(-torch.expm1(-2 * time))
        return carry["head"] + torch.expm1(-time) * (carry["head"] - target) + wide * noise, value

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        heads = []
        for j in range(self.burn + self.chain):
            z, _ = self.langevin(carry, shared, batches[0], site, rng.fold(key, j), loss, self.gamma)
            carry = {**carry, "head": z}
            heads.append(z)
        kept = torch.stack(heads[self.burn :])

        def of_body(body: Tensor) -> Tensor:
            return loss(Branches(body, kept), batches[0], key)

        gradient, value = derived(of_body, carry["body"])
        direction, buffer = self.momentum_step(carry, gradient)
        return {**carry, "heads": kept, "body": carry["body"] - self.lr * direction, **buffer}, value

    def personal_step(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped:
        gamma = self.gamma if self.personal_lr is None else self.personal_lr / site.n
        z, value = self.langevin(carry, shared, batches[0], site, key, loss, gamma)
        return {**carry, "head": z, "heads": torch.cat([carry["heads"][1:], z.unsqueeze(0)])}, value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        heads = carry["heads"]
        second = ((heads - shared["mu"]) ** 2).mean(0)
        return {"body": carry["body"], "mu": heads.mean(0), "second": second}, {"head": carry["head"]}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        participation = sampled / clients
        mean = shared["mu"] + participation * (update["mu"] - shared["mu"])
        second = torch.exp(2 * shared["logstd"]) * (1 - participation) + participation * update["second"]
        fitted = moments(mean, second, shared["mu"])
        return {"body": update["body"], "mu": fitted.mean, "logstd": fitted.logstd.clamp_min(self.floor)}

    def own_model(self, carry: State) -> Distribution:
        return Samples(Branches(carry["body"], carry["heads"]).weights)
