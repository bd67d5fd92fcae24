"""FedABML: amortised Bayesian meta-learning of a Gaussian prior over weights (Liu et al., arXiv 2307.02222).

    prior     p(w|θ) = N(m_θ, diag σ_θ²), the server's        posterior  q(w|φ_i) = N(m_i, diag σ_i²), the client's
    loss      L_i(θ, φ) = E_q[mean −log p(D_i|w)] + (λ/n_i)·KL[q(φ) ‖ p(θ)],   σ = exp ν
    client    φ = θ_i = θ_t; for every minibatch: k times φ ← φ − η ∇_φ L(θ_i, φ), then a step of θ_i (`prior_step`)
    server    θ_{t+1} = mean of the θ_i, or the moments of the φ_i
    sends     θ, both ways: means and log deviations
    keeps     nothing (with `drift` control c_i, at first 0): every client, new or not, begins from φ = θ
    scored    φ_i, from φ = θ by a few epochs of φ-steps
    carry     mean, logstd (not for a point); velocity with `momentum`; velocity, squares and taken with `optimiser`
              adam, and std.velocity, std.squares and std.taken where ν has steps; length with `drift`, own with `drift`
              control; prior.mean, prior.logstd (not for a point) with `prior_every` batch

The φ-step takes the KL's pull on the mean implicitly (κ = (λ/n)/σ_θ²): m ← (m − η g + ηκ m_θ)/(1 + ηκ). The θ-step:
`natural` m_θ ← m_θ + ρ(m − m_θ), ν_θ ← ν_θ + ½ log(1 + ρ_ν(r − 1)), r = (σ² + (m − m_θ)²)/σ_θ²; `euclidean` as printed,
∂m = (m_θ − m)/σ_θ², ∂ν = 1 − r, scaled by η'λ/n; `amortised` the total derivative of L(θ, φ_k(θ)) through k φ-steps.
A minibatch of |B| rows, fewer than the batch size b, has η|B|/b for η (`short_batch`): every sample counts once.
φ may start narrower or wider than θ, ν_φ = ν_θ + `start_gap`. A learned ν_θ may have a hyper-prior,
(r + h σ₀²/σ_θ²)/(1 + h) for r: σ₀ = exp ν₀ counts as h clients. `drift` corrects a round's φ-steps (drift.py).
The label level: p(y|x, w, i) ∝ π_i(y)·exp f_w(x)_y, π_i = (counts + α)/(n + Kα), known to the client alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..errors import InputError
from ..files.sealed import group, prefixed
from ..gaussian import Gaussian, moments
from .base import LABEL_PRIORS, SERVER_MOMENTUM, Batches, Loss, Site, State, Stepped
from .drift import DriftCorrected
from .hyper import AVERAGES, PERSONAL_LRS, SERVER_LR, SERVER_MOMENTA, hyper
from .steps import euclidean_prior, natural_prior


@dataclass(frozen=True, repr=False)
class FedABML(DriftCorrected):
    """FedABML, with a hyperparameter for every choice of its steps."""

    prior_step: str = hyper("natural", "the θ-step", choices=("natural", "euclidean", "amortised"))
    prior_every: str = hyper("round", "when θ_i moves", choices=("batch", "round"))
    rho: float = hyper(1.0, "ρ: natural step of m_θ (with moments: the server's)", 0, 2, tune=SERVER_LR)
    rho_std: float = hyper(0.1, "ρ_ν: natural step of ν_θ (with moments: the server's)", 0, 1)
    start_gap: float = hyper(0.0, "ν_φ − ν_θ where a posterior starts", -10, 10, neutral=0.0)
    hyper_prior: float = hyper(0.0, "h: weight of ν₀ in a learned ν_θ, in clients", 0, neutral=0.0)
    aggregate: str = hyper("mean", "the server's mean of θ_i, or moments of φ_i", choices=("mean", "moments"))
    average: float = hyper(
        0.8, "decay of the average of θ over rounds, which is scored (0: the last θ)", 0, 0.999, tune=AVERAGES
    )
    server_momentum: float = hyper(0.4, SERVER_MOMENTUM, 0, 0.999, neutral=0.0, tune=SERVER_MOMENTA)
    posterior_std: str = hyper(
        "sgd", "the step of the posterior's ν", choices=("fixed", "sgd", "natural"), tune=("sgd", "natural")
    )
    personal_lr: float | None = hyper(
        0.03, "step size of the personal epochs (none: 0.003 with the label level, 0.01 without)", 0, tune=PERSONAL_LRS
    )
    short_batch: str = hyper("rows", "an epoch's short last step: whole, or by its rows", choices=("whole", "rows"))
    label_prior: str = hyper("dirichlet", "label level: π_i from the client's counts", choices=LABEL_PRIORS)

    def __post_init__(self) -> None:
        super().__post_init__()
        step, remedy = (self.prior_step, self.prior_every), ""
        if self.posterior == "point" and ("euclidean" in step or self.aggregate == "moments"):
            remedy = "a point has neither KL nor variance: set prior_step natural or amortised, and aggregate mean"
        elif step == ("amortised", "round"):
            remedy = "prior_step amortised moves θ with every minibatch: set prior_every batch"
        elif self.aggregate == "moments" and step != ("natural", "round"):
            remedy = "aggregate moments is the server's θ-step: set prior_step natural and prior_every round"
        elif self.drift != "none" and step != ("natural", "round"):
            remedy = f"drift {self.drift} corrects a whole round: set prior_step natural and prior_every round"
        elif self.optimiser == "adam" and (self.drift != "none" or self.prior_step == "amortised"):
            remedy = "drift and prior_step amortised hold for steps along the gradient: set optimiser sgd"
        elif self.drift == "server" and self.rho == 0:
            remedy = "drift server follows the server's steps, and with rho 0 there are none: set rho above 0"
        elif self.start_gap and (self.posterior == "point" or self.prior_step == "amortised"):
            remedy = "start_gap needs a Gaussian that starts from θ once a round: set posterior gaussian, not amortised"
        elif self.hyper_prior and (self.prior_std == "fixed" or self.prior_step != "natural"):
            remedy = "hyper_prior holds a learned σ of θ: set prior_std learned and prior_step natural"
        if remedy:
            raise InputError(f"FedABML: these options contradict each other; {remedy}.")

    @property
    def needs_full_precision(self) -> bool:  # type: ignore[override]
        return self.prior_step == "amortised" and self.curvature == "hessian_free"

    def notes(self) -> list[str]:
        never_pulls = (self.prior_step, self.prior_every, self.rho, self.k) == ("natural", "batch", 1.0, 1)
        note = "With rho = 1 at every minibatch and k = 1 the KL never pulls: this is FedAvg with weight noise."
        return super().notes() + [note] * never_pulls

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        moving = prefixed("prior", shared) if self.prior_every == "batch" else {}  # θ_i, else it rests in the round
        return {**self.personal(shared, kept, site, key), **self.initial_drift(shared, kept), **moving}

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        theta = shared | group(carry, "prior")
        phi = {name: value for name, value in carry.items() if not name.startswith("prior.")}
        fraction = self.step_fraction(batches[0], site.n)
        if self.prior_step == "amortised":
            theta, value = self.amortised(theta, batches[0], site, key, loss)
            phi |= theta
        else:
            for j in range(self.k):
                gradient, value = self.gradient(phi, batches[0], rng.fold(key, j), loss)
                phi = self.move(phi, self.corrected_gradient(gradient, carry, shared), theta, site.n, self.lr, fraction)
            if self.drift != "none":
                phi["length"] = carry["length"] + self.k * self.lr * fraction
            theta = self.theta_step(theta, phi, site.n) if self.prior_every == "batch" else theta
        return phi | (prefixed("prior", theta) if self.prior_every == "batch" else {}), value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        drift, kept = self.drift_update(carry, shared, kept, site)
        if self.aggregate == "moments":
            second = torch.exp(2 * carry["logstd"]) + (carry["mean"] - shared["mean"]) ** 2
            return {"mean": carry["mean"], "second": second, **drift}, kept
        if self.prior_every == "round":
            return {**self.theta_step(shared, carry, site.n), **drift}, kept
        return group(carry, "prior"), {}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        drift = self.next_server_control(
            shared, update, 1.0 if self.aggregate == "moments" else self.rho, sampled / clients
        )
        if self.aggregate == "mean":
            return {name: (update | drift)[name] for name in shared}
        fitted = moments(update["mean"], update["second"], shared["mean"])
        mean = shared["mean"] + self.rho * (fitted.mean - shared["mean"])
        if self.prior_std == "fixed":
            return {"mean": mean, "logstd": shared["logstd"], **drift}
        first = torch.exp(2 * self.nu0 + 0 * fitted.logstd)
        old = torch.exp(2 * shared["logstd"])
        new = (torch.exp(2 * fitted.logstd) + self.hyper_prior * first) / (1 + self.hyper_prior)
        return {"mean": mean, "logstd": 0.5 * torch.log(old + self.rho_std * (new - old)), **drift}

    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        phi = self.theta(shared)
        wide = {} if self.posterior == "point" else {"logstd": phi["logstd"] + self.start_gap}
        return {**phi, **wide, **self.zero_momentum(shared["mean"])}

    @property
    def effective_personal_lr(self) -> float:
        # With the label level θ is already good for a client; steps at the training rate would undo that.
        default = 0.01 if self.label_prior == "none" else 0.003
        return default if self.personal_lr is None else self.personal_lr

    def theta_step(self, theta: State, phi: State, n: Tensor) -> State:
        """Return θ_i after one step towards the posterior φ."""
        if self.posterior == "point":
            return {"mean": theta["mean"] + self.rho * (phi["mean"] - theta["mean"])}
        prior, q = Gaussian(theta["mean"], theta["logstd"]), Gaussian(phi["mean"], phi["logstd"])
        if self.prior_step == "natural":
            moved = natural_prior(prior, q, self.rho, self.rho_std, self.hyper_prior, self.nu0)
        else:
            moved = euclidean_prior(prior, q, self.theta_lr * self.lam / n, implicit=self.kl_step == "implicit")
        return {"mean": moved.mean, "logstd": prior.logstd if self.prior_std == "fixed" else moved.logstd}
