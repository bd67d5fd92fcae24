"""Local only: every client trains its own model on its own data, and nothing is sent.

client   w_i ← w_i − η ∇f_i(w_i), in the rounds in which it is drawn (so its budget is that of other algorithms)
server   nothing
sends    nothing
keeps    w_i; before a client's first round it is the initial weights, rebuilt from the seed
scored   w_i after `personal_epochs` more epochs; a client that was never drawn has those alone
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..vectors import Layout
from .base import Algorithm, Site, State
from .hyper import hyper


@dataclass(frozen=True, repr=False)
class Local(Algorithm):
    """Local only."""

    average: float = hyper(0.0, "no effect: there is no θ to average", 0, 0.999)
    server_momentum: float = hyper(0.0, "no effect: the server takes no step", 0, 0.999, neutral=0.0)

    def init(self, params: Tensor, layout: Layout) -> State:
        return {}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        return shared

    def prior(self, shared: State) -> None:
        return None

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"mean": params}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return {"mean": kept["mean"], **self.zero_momentum(kept["mean"])}

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {}, {"mean": carry["mean"]}
