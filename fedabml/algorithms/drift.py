"""Corrections that keep the local steps of unlike clients close to the federation's direction.

    φ-step   g ← g + α(c − o), g the likelihood's gradient in the mean; in training alone, never in personal steps
    control  o = c_i, which the client keeps: SCAFFOLD's control variates (Karimireddy et al. 2020)
    server   o = g, so (1 − α) g + α c: FedCM's momentum of the server in local steps (Xu et al. 2021); nothing is kept

A client moves by d = (m_θ − m)/T per unit of step size, where T = Σ η over its φ-steps (short ones by their rows,
η/(1 − μ) with momentum μ). So d is exactly the mean of its gradients, the KL's pulls and the corrections. Hence

    control  c_i⁺ = d − α(c − c_i), the client's move without correction;  c ← c + (|A|/N) mean(c_i⁺ − c_i)
    server   c ← mean(T d)/mean(T)
    sends    c down; c_i⁺ − c_i (control) or T (server) up
    keeps    c_i (control), at first 0; nothing (server)

ρ, `server_momentum` and `average` act on θ and not on c, which is a gradient. The KL's pull is 0 at m = m_θ, so with
α = 1 the fixed point of control variates is where the mean of the clients' gradients is 0, however many steps they
take. The posterior of a client remains that of the prior θ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..vectors import Layout, plus
from .amortised import Amortised
from .base import Site, State
from .hyper import hyper


@dataclass(frozen=True, repr=False)
class DriftCorrected(Amortised):
    """Training whose φ-steps may be corrected for drift; the server and its clients hold the c of the correction."""

    drift: str = hyper(
        "none",
        "correction of local steps: none, by what clients keep (SCAFFOLD), or by the server's last step (FedCM)",
        choices=("none", "control", "server"),
        neutral="none",
        tune=("none", "server"),
    )
    drift_share: float = hyper(0.5, "α: share of the drift correction", 0, 1, neutral=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift != "none" and self.lr == 0:
            raise InputError(f"{type(self).__name__}: drift {self.drift} divides by the step size: set lr above 0.")

    @property
    def keeps(self) -> bool:
        return self.drift == "control"

    def init(self, params: Tensor, layout: Layout) -> State:
        return super().init(params, layout) | ({} if self.drift == "none" else {"control": torch.zeros_like(params)})

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"control": torch.zeros_like(params)} if self.keeps else {}

    def theta(self, shared: State) -> State:
        """Return the prior: the shared state without c."""
        return {name: value for name, value in shared.items() if name != "control"}

    def initial_drift(self, shared: State, kept: State) -> State:
        """Return the drift's entries of the first carry: T = 0, [], and c_i, [d], where the client keeps it."""
        if self.drift == "none":
            return {}
        return {"length": shared["mean"].new_zeros(()), **({"own": kept["control"]} if self.keeps else {})}

    def corrected_gradient(self, gradient: State, carry: State, shared: State) -> State:
        """Return the gradient with its correction."""
        if self.drift == "none":
            return gradient
        offset = carry["own"] if self.keeps else gradient["mean"]
        return {**gradient, "mean": plus(gradient["mean"], self.drift_share, shared["control"] - offset)}

    def drift_update(self, carry: State, shared: State, kept: State, site: Site) -> tuple[State, State]:
        """Return the drift's entries of the update, which go beside θ_i, and the new kept state."""
        if self.drift == "none":
            return {}, {}
        length = carry["length"] / (1 - self.momentum)
        if not self.keeps:
            return {"length": length}, {}
        correction = self.drift_share * (shared["control"] - kept["control"])
        control = (shared["mean"] - carry["mean"]) / length - correction
        change = control - kept["control"]
        if self.weights == "uniform":
            return {"control": change}, {"control": control}
        # As in SCAFFOLD, c is the mean over clients, whatever their weights.
        return {"control": change / site.n, "share": 1 / site.n}, {"control": control}

    def next_server_control(self, shared: State, update: State, step: float, participation: float) -> State:
        """Return the server's new c.

        `step` is the part of m − m_θ that an update's mean has, `participation` is |A|/N.
        """
        if self.drift == "none":
            return {}
        if not self.keeps:
            return {"control": (shared["mean"] - update["mean"]) / (step * update["length"])}
        return {"control": shared["control"] + participation * update["control"] / update.get("share", 1)}
