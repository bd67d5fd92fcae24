"""SCAFFOLD (Karimireddy et al. 2020): control variates that take the clients' drift out of local steps.

    client   y ← x;  y ← y − η(∇f_i(y) − c_i + c) for K minibatches
             c_i⁺ = c_i − c + (x − y)/(Kη)
    server   x ← x + η_g mean(y − x),  c ← c + (|A|/N) mean(c_i⁺ − c_i)
    sends    x and c down, y − x and c_i⁺ − c_i up
    keeps    c_i; that of a client before its first round is 0
    scored   x, or as `scaffold-ft` x after a few plain epochs

With momentum m a buffer at rest makes steps 1/(1 − m) as long, so the divisor is Kη/(1 − m). `weights` weighs the y − x
alone: c is the plain mean of all c_i. With `samples` a client therefore sends (c_i⁺ − c_i)/n_i and 1/n_i; the ratio of
their means by n_i is the plain mean of c_i⁺ − c_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..vectors import Layout
from .base import Algorithm, Batches, Loss, Site, State, Stepped
from .hyper import LR, SERVER_LR, hyper


@dataclass(frozen=True, repr=False)
class Scaffold(Algorithm):
    """SCAFFOLD; with personal epochs, SCAFFOLD + fine-tuning."""

    lr: float = hyper(0.03, "η: step size of local training; above 0, because c_i divides by it", 1e-12, tune=LR)
    server_lr: float = hyper(1.0, "η_g: the server's step size", 0, tune=SERVER_LR)

    needs_sgd: ClassVar[bool] = True  # (x − y)/(Kη) is a mean of gradients

    def init(self, params: Tensor, layout: Layout) -> State:
        return {"mean": params, "control": torch.zeros_like(params)}

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"control": torch.zeros_like(params)}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        return {**super().begin(shared, kept, site, key), "own": kept["control"]}

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        return self.sgd(carry, batches[0], key, loss, self.lr, shared["control"] - carry["own"])

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        moved = carry["mean"] - shared["mean"]
        change = -shared["control"] - moved * (1 - self.momentum) / (steps * self.lr)
        kept = {"control": kept["control"] + change}
        if self.weights == "uniform":
            return {"mean": moved, "control": change}, kept
        return {"mean": moved, "control": change / site.n, "share": 1 / site.n}, kept

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        mean = shared["mean"] + self.server_lr * update["mean"]
        change = update["control"] / update.get("share", 1)
        return {"mean": mean, "control": shared["control"] + sampled / clients * change}
