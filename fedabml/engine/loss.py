"""The loss of a client's weights: the network, the likelihood and the label level behind one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..algorithms.base import Batch
from ..gaussian import Branches, Distribution, Gaussian, Point
from ..likelihoods import Likelihood
from ..vectors import Network
from .noise import ON_WEIGHTS, Noise


@dataclass(frozen=True)
class ClientLoss:
    """The engine's `Loss` for one client, with the network, the likelihood and the client's label level."""

    network: Network
    likelihood: Likelihood
    offset: Tensor | None
    batched: bool = True  # weight samples in one batched program, or one after another
    noise: Noise = ON_WEIGHTS  # where the noise of a Gaussian enters
    class_weights: Tensor | None = None  # [classes]: how often an example of each class counts

    def __call__(self, q: Distribution, batch: Batch, key: Tensor, samples: int = 1) -> Tensor:
        if isinstance(q, Point):
            return self.nll(q.mean, batch, key)
        if isinstance(q, Gaussian) and not self.noise.on_weights:
            draws = self.noise.draws(key, samples, q.mean.dtype)
            return self._mean(lambda *draw: self._noisy(q, batch, *draw), key, *draws)
        if isinstance(q, Branches):
            return self._mean(lambda head, drop: self.nll(head, batch, drop, q.body), key, q.heads)

        def one(weights: Tensor, drop: Tensor) -> Tensor:
            return self.nll(weights, batch, drop)

        if not isinstance(q, Gaussian):
            return self._mean(one, key, q.weights)
        # A CPU gains nothing by more lanes, and would transpose the gradients of a second batched axis.
        draw = q.draws if samples == 1 or q.mean.device.type == "cpu" else q.draw
        return self._mean(one, key, draw(key, samples, self.noise.antithetic))

    def _mean(self, one: Callable[..., Tensor], key: Tensor, draws: Tensor | list[Tensor], *more: Tensor) -> Tensor:
        """Return the mean of `one(draw, key of its dropout, ...)` over draws."""
        if len(draws) == 1:
            return one(draws[0], key, *(m[0] for m in more))
        keys = rng.folds(key, len(draws))
        if self.batched and isinstance(draws, Tensor):
            return torch.vmap(one)(draws, keys, *more).mean()
        return torch.stack([one(*arguments) for arguments in zip(draws, keys, *more, strict=True)]).mean()

    def _noisy(self, q: Gaussian, batch: Batch, key: Tensor, drop: Tensor, sign: Tensor | None = None) -> Tensor:
        """Return the loss of one pass with noise on activations."""
        return self._cost(*self.noise.outputs(self.network, q, batch.x, key, drop, sign), batch)

    def nll(self, weights: Tensor, batch: Batch, key: Tensor, *before: Tensor) -> Tensor:
        """Return the mean −log p(y|x, w) of rows that are not padding; `before` are earlier parts of the weights."""
        parts = [part.to(self.network.dtype) for part in (*before, weights)]
        outputs = self.network.call(self.network.weights(*parts), batch.x, key)
        return self._cost(outputs, self.network.tail(weights), batch)

    def _cost(self, outputs: Tensor, tail: Tensor, batch: Batch) -> Tensor:
        losses = self.likelihood.nll(outputs, batch.y, tail, self.offset)
        if self.class_weights is not None:
            losses = losses * self.class_weights.index_select(0, batch.y)
        return (losses * batch.mask).sum() / batch.mask.sum().clamp_min(1)


def output(network: Network, likelihood: Likelihood, weights: Tensor, x: Tensor, offset: Tensor | None) -> Tensor:
    """Return what a network with these weights predicts for inputs that are normalised already."""
    return likelihood.predict(network(weights, x), network.tail(weights), offset)


def draws_of(model: Distribution, samples: int) -> int:
    """Return how many weight vectors a prediction averages over."""
    if isinstance(model, Gaussian):
        return max(1, samples)
    return 1 if isinstance(model, Point) else model.weights.shape[-2]


def draw(q: Distribution, key: Tensor, j: int, samples: int) -> Tensor:
    """Return the j-th weight vector of a prediction."""
    if isinstance(q, Gaussian):
        return q.draw(rng.fold(key, j), 1)[0] if samples else q.mean
    return q.mean if isinstance(q, Point) else q.weights[j]
