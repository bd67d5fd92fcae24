"""Many clients at once: the only place where a client axis exists.

`Cohort` takes an algorithm, written for one client, and runs it for a list of clients: all lanes of a chunk in one
batched program (`vmap`), or one after another (`loop`, for a debugger and where a CPU prefers it). Both draw the same
minibatches and the same noise, so they agree up to the rounding of floating-point sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import rng
from ..algorithms.base import Algorithm, Batch, Phase, Site, State, Step
from ..data import Federation
from ..gaussian import Distribution, Gaussian, Point
from ..likelihoods import Likelihood
from ..vectors import Network
from .plan import minibatches, padded


class Data:
    """All samples on the device, in the type they are stored in; a minibatch is a gather."""

    def __init__(self, fed: Federation, device: torch.device, dtype: torch.dtype):
        self.x = torch.as_tensor(fed.x).to(device)
        y = torch.as_tensor(fed.y)
        self.y = y.to(device) if fed.task == "classification" else y.to(device, dtype)
        put = lambda a: torch.as_tensor(np.asarray(a)).to(device, dtype)  # noqa: E731
        self.shift, self.inverse = put(fed.shift), 1 / put(fed.scale)
        if fed.task == "regression":
            self.y = (self.y - put(fed.y_shift)) / put(fed.y_scale)
        self.device, self.dtype = device, dtype

    def inputs(self, index: Tensor) -> Tensor:
        """The network's inputs for sample numbers of any shape."""
        return (self.x[index].to(self.dtype) - self.shift) * self.inverse

    def batch(self, index: Tensor) -> Batch:
        """A batch for sample numbers where −1 is padding."""
        own = index.clamp_min(0)
        return Batch(self.inputs(own), self.y[own], (index >= 0).to(self.dtype))


@dataclass(frozen=True)
class ClientLoss:
    """The engine's `Loss` for one client: it knows the network, the likelihood and the client's label level."""

    network: Network
    likelihood: Likelihood
    offset: Tensor | None
    batched: bool = True  # weight samples in one batched program, or one after another

    def __call__(self, q: Distribution, batch: Batch, key: Tensor, samples: int = 1) -> Tensor:
        if isinstance(q, Point):
            return self.nll(q.mean, batch, key)
        weights = q.draw(key, samples)
        if len(weights) == 1:
            return self.nll(weights[0], batch, key)
        keys = rng.fold(key, torch.arange(len(weights), device=key.device))
        if self.batched:
            return torch.vmap(self.nll, (0, None, 0))(weights, batch, keys).mean()
        return torch.stack([self.nll(w, batch, k) for w, k in zip(weights, keys, strict=True)]).mean()

    def nll(self, weights: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """Mean −log p(y|x, w) of the rows that are not padding."""
        outputs = self.network(weights, batch.x, key)
        each = self.likelihood.nll(outputs, batch.y, self.network.tail(weights), self.offset)
        return (each * batch.mask).sum() / batch.mask.sum().clamp_min(1)


class Cohort:
    """Runs the client side of an algorithm for many clients."""

    def __init__(
        self,
        algorithm: Algorithm,
        network: Network,
        likelihood: Likelihood,
        fed: Federation,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        chunk: int,
    ):
        self.algorithm, self.likelihood, self.fed = algorithm, likelihood, fed
        self.network = network.to(device, dtype)
        self.data = Data(fed, device, dtype)
        self.batch_size, self.seed, self.backend, self.chunk = batch_size, seed, backend, chunk
        self.device, self.dtype = device, dtype
        self.hyper = self._tensors(algorithm)
        self.counts = fed.label_counts("train") if fed.task == "classification" else np.zeros((fed.clients, 0), int)

    def _tensors(self, algorithm: Algorithm) -> State:
        hyper = algorithm.continuous().items()
        return {k: torch.tensor(v, dtype=self.dtype, device=self.device) for k, v in hyper}

    def using(self, algorithm: Algorithm) -> Cohort:
        """The same clients, data and network under other hyperparameters."""
        other = copy.copy(self)
        other.algorithm, other.hyper = algorithm, other._tensors(algorithm)
        return other

    # -- lanes ------------------------------------------------------------------------------------------------------
    def lanes(self, function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a function of one client to every lane; arguments of dimension None are the same for all."""
        if self.backend == "vmap":
            return torch.vmap(function, in_dims)(*args)
        count = len(tree_leaves([a for a, dim in zip(args, in_dims, strict=True) if dim == 0])[0])
        lane = lambda i: [a if d is None else tree_map(lambda t: t[i], a) for a, d in zip(args, in_dims, strict=True)]  # noqa: E731
        return tree_map(lambda *t: torch.stack(t), *[function(*lane(i)) for i in range(count)])

    def each(self, method: str, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a method of the algorithm to every lane, its continuous hyperparameters bound as tensors."""

        def one(hyper: State, *args: Any) -> Any:
            return getattr(self.algorithm.bind(hyper), method)(*args)

        return self.lanes(one, (None, *in_dims), self.hyper, *args)

    def chunks(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """The clients in parts that fit in memory."""
        for start in range(0, len(clients), self.chunk):
            yield [int(c) for c in clients[start : start + self.chunk]]

    def site(self, clients: Sequence[int]) -> Site:
        """The constants of some clients, a lane each."""
        n, counts = self.fed.train.counts[clients], self.counts[clients]
        return Site(*(torch.as_tensor(a).to(self.device, self.dtype) for a in (n, counts)))

    def keys(self, purpose: int, round: int, clients: Sequence[int]) -> Tensor:
        """A key per client."""
        return rng.keys((self.seed, purpose, round), clients, self.device)

    # -- a round ----------------------------------------------------------------------------------------------------
    def keep(self, shared: State, clients: Sequence[int]) -> State:
        """The kept state of clients that have none yet, a lane each."""
        site, keys = self.site(clients), self.keys(rng.KEEP, 0, clients)
        return self.each("keep", (None, None, 0, 0), self.network.initial, shared, site, keys)

    def train(
        self, shared: State, kept: State, clients: list[int], round: int, epochs: int
    ) -> tuple[State, State, Tensor]:
        """The local work of one chunk of a round's clients: their updates, what they keep, their mean losses."""
        site, keys = self.site(clients), self.keys(rng.NOISE, round, clients)
        carry = self.each("begin", (None, 0, 0, 0), shared, kept, site, keys)
        carry, losses, done = self.steps(carry, shared, self.algorithm.phases(epochs), clients, rng.NOISE, round)
        update, kept = self.each("end", (0, None, 0, 0, 0), carry, shared, kept, site, done)
        return update, kept, losses

    def steps(
        self, carry: State, shared: State, phases: list[Phase], clients: list[int], purpose: int, round: int
    ) -> tuple[State, Tensor, Tensor]:
        """All steps of all phases: the last carry, the mean loss and the number of steps of every lane."""
        site, keys = self.site(clients), self.keys(purpose, round, clients)
        rows = [self.fed.train[c] for c in clients]
        losses = torch.zeros(len(clients), device=self.device, dtype=self.dtype)
        done = torch.zeros_like(losses)
        for number, (epochs, step, per_step) in enumerate(phases):
            if epochs == 0:
                continue
            path = (self.seed, purpose, round, number)
            plan = minibatches(rows, clients, epochs, self.batch_size, per_step, path)
            index, owned = torch.as_tensor(plan.rows).to(self.device), torch.as_tensor(plan.steps).to(self.device)
            one = self.step_of(step)
            for t in range(len(index)):
                batches = tuple(self.data.batch(part) for part in index[t])
                args = (self.hyper, carry, shared, batches, site, rng.fold(rng.fold(keys, number), t))
                moved, value = self.lanes(one, (None, 0, None, 0, 0, 0), *args)
                if t < plan.steps.min():
                    carry, losses = moved, losses + value
                else:  # lanes that are done stop moving
                    going = owned > t
                    carry = {k: torch.where(_wide(going, v), v, carry[k]) for k, v in moved.items()}
                    losses = losses + torch.where(going, value, 0)
            done = done + owned
        return carry, losses / done.clamp_min(1), done

    def step_of(self, step: Step) -> Callable[..., tuple[State, Tensor]]:
        """One client's step with its hyperparameters bound and its loss at hand."""
        name = step.__name__  # type: ignore[attr-defined]

        def one(
            hyper: State, carry: State, shared: State, batches: Any, site: Site, key: Tensor
        ) -> tuple[State, Tensor]:
            algorithm = self.algorithm.bind(hyper)
            offset = label_offset(algorithm, site)
            loss = ClientLoss(self.network, self.likelihood, offset, batched=self.backend == "vmap")
            return getattr(algorithm, name)(carry, shared, batches, site, key, loss)

        return one

    def weights(self, clients: Sequence[int]) -> Tensor:
        """The clients' shares of the server's mean."""
        by_samples = self.algorithm.weights == "samples"
        n = self.fed.train.counts[clients].astype(float) if by_samples else np.ones(len(clients))
        return torch.as_tensor(n / n.sum()).to(self.device, self.dtype)

    # -- a client's own model ---------------------------------------------------------------------------------------
    def personalise(self, shared: State, kept: State, clients: list[int], round: int = 0) -> Distribution:
        """Every client's own distribution over weights, a lane each, exactly as a new client would get it."""
        site, keys = self.site(clients), self.keys(rng.PERSONAL, round, clients)
        carry = self.each("personal", (None, 0, 0, 0), shared, kept, site, keys)
        carry, _, _ = self.steps(carry, shared, self.algorithm.personal_phases(), clients, rng.PERSONAL, round)
        return self.each("own_model", (0,), carry)

    def offsets(self, clients: Sequence[int]) -> Tensor | None:
        """log π_i of some clients, a lane each; None without a label level."""
        return label_offset(self.algorithm, self.site(clients))

    def predict(
        self, models: Distribution, rows: Sequence[np.ndarray], offsets: Tensor | None, keys: Tensor
    ) -> list[Tensor]:
        """For every lane the outputs of its model for its rows under each weight draw: [draws, rows, outputs]."""
        index = torch.as_tensor(padded(rows)).clamp_min(0).to(self.device)
        samples = self.algorithm.predict_samples
        draws = []
        for j in range(draws_of(models, samples)):
            weights = self.lanes(lambda q, key: draw(q, key, j, samples), (0, 0), models, keys)  # noqa: B023
            pieces = [
                self.lanes(
                    self.output, (0, 0, None if offsets is None else 0), weights, self.data.inputs(part), offsets
                )
                for part in index.split(PIECE, 1)
            ]
            draws.append(torch.cat(pieces, 1))
        outputs = torch.stack(draws, 1)
        return [outputs[i, :, : len(own)] for i, own in enumerate(rows)]

    def output(self, weights: Tensor, x: Tensor, offset: Tensor | None) -> Tensor:
        """What one weight vector predicts."""
        return output(self.network, self.likelihood, weights, x, offset)


PIECE = 128  # test rows of a lane that are in flight at once


def output(network: Network, likelihood: Likelihood, weights: Tensor, x: Tensor, offset: Tensor | None) -> Tensor:
    """What a network with these weights predicts for inputs it can take as they are."""
    return likelihood.predict(network(weights, x), network.tail(weights), offset)


def draws_of(model: Distribution, samples: int) -> int:
    """How many weight vectors a prediction averages over."""
    if isinstance(model, Gaussian):
        return max(1, samples)
    return 1 if isinstance(model, Point) else model.weights.shape[-2]


def draw(q: Distribution, key: Tensor, j: int, samples: int) -> Tensor:
    """The j-th of them."""
    if isinstance(q, Gaussian):
        return q.draw(rng.fold(key, j), 1)[0] if samples else q.mean
    return q.mean if isinstance(q, Point) else q.weights[j]


def label_offset(algorithm: Algorithm, site: Site) -> Tensor | None:
    """log π_i, π_i = (counts + α)/(n + Kα): the closed-form posterior mean of a client's label distribution."""
    if algorithm.label_prior == "none" or site.counts.shape[-1] == 0:
        return None
    alpha = algorithm.label_alpha
    return torch.log((site.counts + alpha) / (site.n.unsqueeze(-1) + site.counts.shape[-1] * alpha))


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
