"""Distributions over a flat weight vector: Gaussian with diagonal covariance, and its friends.

All three are named tuples of tensors, hence pytrees: `torch.func.grad` differentiates with respect to them and
`torch.vmap` gives them a client axis. `draw` returns weights of shape [samples, d].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rng


def _shapes(parts: Any) -> str:
    """A distribution by the shapes of its parts: weights are too many to print."""
    shapes = (f"{name} {tuple(part.shape)}" for name, part in parts._asdict().items())
    return f"{type(parts).__name__}({', '.join(shapes)})"


class Gaussian(NamedTuple):
    """N(mean, diag exp(logstd)^2): the paper's (m, ν)."""

    mean: Tensor
    logstd: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    def draw(self, key: Tensor, samples: int, antithetic: bool = False) -> Tensor:
        """Reparameterised samples w = m + ε∘exp ν; if antithetic, with ε and −ε in turn."""
        if samples == 1:
            return self.draws(key, 1)[0].unsqueeze(0)
        count = -(-samples // 2) if antithetic else samples
        keys = rng.folds(key, count)
        step = rng.normal(keys, (self.mean.shape[-1],), self.mean.dtype) * self.logstd.exp()
        if antithetic:
            step = torch.stack([step, -step], 1).flatten(0, 1)[:samples]
        return self.mean + step

    def draws(self, key: Tensor, samples: int, antithetic: bool = False) -> list[Tensor]:
        """The same, each a vector of its own: derivatives have no axis of samples to be summed along."""
        std = self.logstd.exp()
        noise = lambda j: rng.normal(rng.fold(key, j), (self.mean.shape[-1],), self.mean.dtype)  # noqa: E731
        if not antithetic:
            return [torch.addcmul(self.mean, noise(j), std) for j in range(samples)]
        steps = [noise(j) * std for j in range(-(-samples // 2))]
        return [self.mean + (step if sign > 0 else -step) for step in steps for sign in (1, -1)][:samples]


class Point(NamedTuple):
    """A single weight vector: the zero-variance friend of `Gaussian`."""

    mean: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    def draw(self, key: Tensor, samples: int) -> Tensor:
        """The vector itself, once."""
        return self.mean.unsqueeze(0)


class Samples(NamedTuple):
    """Equally likely weight vectors [S, d], such as the states of a chain."""

    weights: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    @property
    def mean(self) -> Tensor:
        return self.weights.mean(0)

    def draw(self, key: Tensor, samples: int) -> Tensor:
        """All of them."""
        return self.weights


class Branches(NamedTuple):
    """Equally likely weight vectors that begin alike: a body [d_b], then one of the heads [S, d_h].

    It is for a loss, which then computes what the body makes of a batch once, not for every head.
    """

    body: Tensor
    heads: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    @property
    def weights(self) -> Tensor:
        return torch.cat([self.body.expand(len(self.heads), -1), self.heads], 1)

    @property
    def mean(self) -> Tensor:
        return torch.cat([self.body, self.heads.mean(0)])

    def draw(self, key: Tensor, samples: int) -> Tensor:
        """All of them."""
        return self.weights


Distribution = Gaussian | Point | Samples | Branches


def spread(q: Gaussian, p: Gaussian) -> Tensor:
    """r = (σ² + (m − m_p)²)/σ_p², elementwise: 1 where p is exactly as wide as q needs it."""
    return torch.exp(2 * (q.logstd - p.logstd)) + ((q.mean - p.mean) * torch.exp(-p.logstd)) ** 2


def kl(q: Gaussian, p: Gaussian) -> Tensor:
    """KL[q ‖ p] in closed form, summed over the vector."""
    return (p.logstd - q.logstd + 0.5 * (spread(q, p) - 1)).sum(-1)


def moments(mean: Tensor, second: Tensor, centre: Tensor) -> Gaussian:
    """The Gaussian with the mean and variance of a mixture.

    `mean` is the average of the components' means, `second` the average of σ_i² + (m_i − centre)². Taking the second
    moment about a centre near the means (the old prior) rather than about 0 avoids cancellation in float32.
    """
    variance = second - (mean - centre) ** 2
    return Gaussian(mean, 0.5 * torch.log(variance.clamp_min(torch.finfo(mean.dtype).tiny)))
