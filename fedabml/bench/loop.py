"""The eager loop that the engine is raced against: clients trained one after another with plain PyTorch.

It does the arithmetic of FedAvg or FedABML on the same data and the same minibatches in the same order, so its losses
equal the engine's. It is written to be fast: the module's weights are views of one flat buffer, so that a reset, a
weight sample or an average is one kernel; data lie on the device, normalised once per client; the host waits for the
device only at the end of a round; images are channels-last where that is faster, and on a GPU cuDNN's autotuner is on.
Shuffles are taken from the engine's plan and not timed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import rng
from ..algorithms import FedABML, FedAvg
from ..engine.label_level import label_offset
from ..engine.minibatches import minibatches, steps_of
from ..engine.server import draw_clients
from ..errors import InputError
from ..gaussian import Gaussian
from ..models.dropout import KeyedDropout
from ..runs.prepare import Setup

# The hyperparameters of the variants that the loop implements.
IMPLEMENTED: dict[str, Any] = {
    **{"prior_step": "natural", "prior_every": "round", "aggregate": "mean", "estimator": "weight", "k": 1},
    **{"posterior": "gaussian", "posterior_std": "sgd", "kl_step": "implicit", "antithetic": False},
    **{"momentum": 0.0, "optimiser": "sgd", "server_momentum": 0.0, "weights": "uniform", "short_batch": "whole"},
}


class Client(NamedTuple):
    """Holds what one client of a round trains on."""

    samples: Tensor  # their numbers, [n]
    steps: list[Tensor]  # for each step, the positions of its batch in `samples`, [batch]
    key: Tensor  # the engine's key for its round
    offset: Tensor | None  # its label level, [classes]


Batches = Iterator[tuple[Tensor, Tensor]]


class Loop:
    """Trains a federation client by client; raises InputError for an algorithm that it does not implement.

    `keyed` draws the engine's own noise, for a comparison of losses; without it the noise is torch's, which is cheaper.
    `optimiser` steps FedAvg with torch.optim.SGD(foreach=True) rather than by hand. `autocast` is the type of products.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        keyed: bool = False,
        optimiser: bool = False,
        channels_last: bool = False,
        autocast: torch.dtype | None = None,
    ):
        self.cohort, self.participation, self.epochs = setup.cohort, setup.participation, setup.epochs
        self.keyed, self.autocast, self.channels_last = keyed, autocast, channels_last
        self.algorithm, self.round, self.next_clients = setup.cohort.algorithm, 0, list[Client]()
        algorithm, network = self.algorithm, setup.cohort.network
        if type(algorithm) not in (FedAvg, FedABML):
            raise InputError("The eager loop implements FedAvg and FedABML only.")
        for name, value in IMPLEMENTED.items():
            if getattr(algorithm, name, value) != value:
                raise InputError(f"The eager loop implements only {name}={value}.")
        self.layout = network.layout
        self.module = copy.deepcopy(network.module).train()
        named = dict(self.module.named_parameters())
        self.params = [named[name].requires_grad_() for name in self.layout.names]
        self.w, self.mean = torch.zeros_like(network.initial), torch.zeros_like(network.initial)
        for p, view in zip(self.params, self.views(self.w), strict=True):
            p.data = view
        self.fill(self.views(self.mean), network.initial)
        self.logstd = torch.full_like(self.mean, getattr(algorithm, "nu0", 0.0))
        self.sgd = torch.optim.SGD(self.params, lr=float(algorithm.lr), foreach=True) if optimiser else None
        if isinstance(algorithm, FedABML):
            self.m, self.nu, self.g_m, self.g_nu = (torch.zeros_like(self.w) for _ in range(4))
            self.eps = self.w.new_zeros(algorithm.s, len(self.w))
            self.g_m_views, self.g_nu_views = self.views(self.g_m), self.views(self.g_nu)
            self.eps_views = [self.views(eps) for eps in self.eps]

    # -- vectors ----------------------------------------------------------------------------------------------------
    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer [d] in the shapes of the network's parameters."""
        pieces = zip(flat.split(self.layout.sizes), self.layout.shapes, strict=True)
        return [
            piece.view(s[0], *s[2:], s[1]).permute(0, 3, 1, 2) if self.channels_last and len(s) == 4 else piece.view(s)
            for piece, s in pieces
        ]

    def fill(self, views: list[Tensor], vector: Tensor) -> None:
        """Copy the values of one of the engine's vectors into the views of a buffer."""
        for view, value in zip(views, self.layout.split(vector).values(), strict=True):
            view.copy_(value)

    # -- a round ----------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Take the clients and the minibatches of the next round from the engine's plan; this is never timed."""
        cohort, self.round = self.cohort, self.round + 1
        clients = draw_clients(cohort.fed.clients, self.participation, cohort.seed, self.round)
        sizes = cohort.fed.train.counts[clients]
        rows = torch.arange(int(sizes.max())).expand(len(clients), -1)
        rows = torch.where(rows < torch.as_tensor(sizes).unsqueeze(-1), rows, -1)
        shuffles = rng.keys((cohort.seed, rng.NOISE, self.round, 0, rng.SHUFFLE), clients)
        plan = minibatches(rows, torch.as_tensor(sizes), shuffles, self.epochs, cohort.batch_size, 1)
        counts = steps_of(sizes, self.epochs, plan.shape[-1], 1)
        keys = rng.fold(cohort.keys(rng.NOISE, self.round, clients), 0)
        offsets = label_offset(self.algorithm, cohort.site(clients))
        self.next_clients = []
        for lane, client in enumerate(clients):
            samples = torch.as_tensor(cohort.fed.train[client]).to(cohort.device)
            steps = [row[row >= 0].to(cohort.device) for row in plan[: int(counts[lane]), 0, lane]]
            self.next_clients.append(Client(samples, steps, keys[lane], None if offsets is None else offsets[lane]))

    def step(self) -> float:
        """Train the clients that `prepare` chose, one after another, and return their mean loss."""
        train = self.train_fedabml if isinstance(self.algorithm, FedABML) else self.train_fedavg
        sums, losses = [torch.zeros_like(self.mean), torch.zeros_like(self.logstd)], []
        for client in self.next_clients:
            samples = self.cohort.data.batch(client.samples)
            update, steps = train(client, self.batches(samples.x, samples.y, client.steps))
            losses.append(torch.stack(steps).mean())
            for total, value in zip(sums, update, strict=False):
                total.add_(value, alpha=1 / len(self.next_clients))
        self.mean, self.logstd = sums
        loss = torch.stack(losses).mean().item()
        if self.mean.is_cuda:
            torch.cuda.synchronize(self.mean.device)
        return float(loss)

    def batches(self, x: Tensor, y: Tensor, steps: list[Tensor]) -> Batches:
        """Yield a client's minibatches: on a GPU gathered all at once, on a CPU one by one, to stay in its cache."""
        layout = torch.channels_last if self.channels_last and x.ndim == 4 else torch.contiguous_format
        if x.device.type == "cpu":
            return ((x[index].contiguous(memory_format=layout), y[index]) for index in steps)
        order = torch.cat(steps)
        x, sizes = x[order].contiguous(memory_format=layout), [len(index) for index in steps]
        return zip(x.split(sizes), y[order].split(sizes), strict=True)

    def loss(self, x: Tensor, y: Tensor, offset: Tensor | None, key: Tensor | None) -> Tensor:
        """Return the mean −log p(y|x) under the weights in the module."""
        with contextlib.ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast(x.device.type, self.autocast))
            if key is not None:
                stack.enter_context(KeyedDropout(key))
            outputs = self.module(x)
        outputs = outputs.to(self.w.dtype)
        return cross_entropy(outputs if offset is None else outputs + offset, y)

    def train_fedavg(self, client: Client, batches: Batches) -> tuple[list[Tensor], list[Tensor]]:
        """Do FedAvg's local work, SGD from the shared weights, in the buffer w; return (w,) and the losses."""
        self.w.copy_(self.mean)
        lr, losses = float(self.algorithm.lr), []
        for t, (x, y) in enumerate(batches):
            value = self.loss(x, y, client.offset, rng.fold(client.key, t) if self.keyed else None)
            losses.append(value.detach())
            if self.sgd is not None:
                value.backward()
                self.sgd.step()
                self.sgd.zero_grad()
                continue
            gradient = torch.autograd.grad(value, self.params)
            with torch.no_grad():
                torch._foreach_add_(self.params, gradient, alpha=-lr)
        return [self.w], losses

    def train_fedabml(self, client: Client, batches: Batches) -> tuple[list[Tensor], list[Tensor]]:
        """Do FedABML's local work and return the client's θ (mean, logstd) and the losses.

        φ-steps of m and ν from s weight samples each, with an implicit step of the KL; then the natural θ-step.
        """
        algorithm = self.algorithm
        assert isinstance(algorithm, FedABML)
        lr, s = float(algorithm.lr), algorithm.s
        rate = lr if algorithm.lr_std is None else algorithm.lr_std
        weight = algorithm.lam / len(client.samples)
        pull = lr * weight * torch.exp(-2 * self.logstd)
        shrink = 1 / (1 + pull)
        pull = pull * self.mean * shrink
        self.m.copy_(self.mean)
        self.nu.copy_(self.logstd)
        losses = []
        for t, (x, y) in enumerate(batches):
            keys = self.noise(client.key, t)
            std = self.nu.exp()
            self.g_m.zero_()
            self.g_nu.zero_()
            for eps, views, key in zip(self.eps, self.eps_views, keys, strict=True):
                torch.addcmul(self.m, eps, std, out=self.w)
                value = self.loss(x, y, client.offset, key)
                losses.append(value.detach())
                gradient = torch.autograd.grad(value, self.params)
                torch._foreach_add_(self.g_m_views, gradient, alpha=1 / s)
                torch._foreach_addcmul_(self.g_nu_views, gradient, views, value=1 / s)
            self.g_nu.mul_(std)
            self.m.sub_(self.g_m, alpha=lr)
            torch.addcmul(pull, self.m, shrink, out=self.m)
            self.g_nu.add_((self.nu - self.logstd).mul_(2).expm1_(), alpha=weight)
            self.nu.sub_(self.g_nu, alpha=rate)
        moved, logstd = self.m - self.mean, self.logstd
        if algorithm.prior_std != "fixed":
            spread = torch.exp(2 * (self.nu - logstd)) + (moved * torch.exp(-logstd)) ** 2
            logstd = logstd + 0.5 * torch.log1p(algorithm.rho_std * (spread - 1))
        return [self.mean + algorithm.rho * moved, logstd], losses

    def noise(self, key: Tensor, t: int) -> list[Tensor | None]:
        """Fill ε anew; return the keys of the samples' dropout where noise is the engine's, else None for each."""
        if not self.keyed:
            self.eps.normal_()
            return [None] * len(self.eps)
        zero = torch.zeros_like(self.w)
        step = rng.fold(rng.fold(key, t), 0)
        for views, vector in zip(self.eps_views, Gaussian(zero, zero).draw(step, len(self.eps)), strict=True):
            self.fill(views, vector)
        return [step] if len(self.eps) == 1 else list(rng.folds(step, len(self.eps)))


def best_format(setup: Setup, autocast: torch.dtype | None = None, steps: int = 6) -> bool:
    """Return whether the loop is faster with images channels-last, by a trial of a few steps of one client."""
    if not any(isinstance(m, nn.Conv2d) for m in setup.cohort.network.module.modules()):
        return False  # there is nothing to choose
    seconds = []
    for channels_last in (False, True):
        loop = Loop(setup, channels_last=channels_last, autocast=autocast)
        loop.prepare()
        client = loop.next_clients[0]
        loop.next_clients = [client._replace(steps=list(itertools.islice(itertools.cycle(client.steps), steps)))]
        loop.step()
        start = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - start)
    return seconds[1] < seconds[0]
