"""Distributions over a flat weight vector w of length d: a Gaussian with diagonal covariance, a point, samples.

    Gaussian   q(w) = N(m, diag σ²), σ = exp ν        KL[q ‖ p] = Σ ν_p − ν + ½ ((σ² + (m − m_p)²)/σ_p² − 1)
    Point      all mass at m
    Samples    equal mass at S vectors                Branches   the same, for vectors that share their first entries

All are named tuples of tensors, hence pytrees: `torch.func.grad` differentiates with respect to them and `torch.vmap`
gives them a client axis. `mean` is the mean weight vector [d]; `draw(key, samples)` returns weights [samples, d].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rng


def _shapes(parts: Any) -> str:
    """Return a distribution's name and the shapes of its parts; weights are too many to print."""
    shapes = (f"{name} {tuple(part.shape)}" for name, part in parts._asdict().items())
    return f"{type(parts).__name__}({', '.join(shapes)})"


class Gaussian(NamedTuple):
    """N(mean, diag exp(logstd)²), the paper's (m, ν); both have shape [d]."""

    mean: Tensor
    logstd: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    def draw(self, key: Tensor, samples: int, antithetic: bool = False) -> Tensor:
        """Return reparameterised samples w = m + ε∘exp ν, [samples, d]; if antithetic, with ε and −ε in turn."""
        if samples == 1:
            return self.draws(key, 1)[0].unsqueeze(0)
        count = -(-samples // 2) if antithetic else samples
        keys = rng.folds(key, count)
        step = rng.normal(keys, (self.mean.shape[-1],), self.mean.dtype) * self.logstd.exp()
        if antithetic:
            step = torch.stack([step, -step], 1).flatten(0, 1)[:samples]
        return self.mean + step

    def draws(self, key: Tensor, samples: int, antithetic: bool = False) -> list[Tensor]:
        """Return the samples of `draw` as a list of vectors [d], so that derivatives need no sum over an axis."""
        std = self.logstd.exp()

        def noise(j: int) -> Tensor:
            return rng.normal(rng.fold(key, j), (self.mean.shape[-1],), self.mean.dtype)

        if not antithetic:
            return [torch.addcmul(self.mean, noise(j), std) for j in range(samples)]
        steps = [noise(j) * std for j in range(-(-samples // 2))]
        return [self.mean + (step if sign > 0 else -step) for step in steps for sign in (1, -1)][:samples]


class Point(NamedTuple):
    """A single weight vector [d], a Gaussian's limit without variance."""

    mean: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    def draw(self, key: Tensor, samples: int) -> Tensor:
        """Return the vector itself, [1, d], whatever the number of samples."""
        return self.mean.unsqueeze(0)


class Samples(NamedTuple):
    """Equally likely weight vectors [S, d], such as the states of a Markov chain."""

    weights: Tensor

    def __repr__(self) -> str:
        return _shapes(self)

    @property
    def mean(self) -> Tensor:
        return self.weights.mean(0)

    def draw(self, key: Tensor, samples: int) -> Tensor:
        """Return all of them, [S, d], whatever the number of samples."""
        return self.weights


class Branches(NamedTuple):
    """Equally likely weight vectors that begin alike: a body [d_b], then one of the heads [S, d_h]; d = d_b + d_h.

    A loss then computes the body's outputs for a batch once, not for every head.
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
        """Return all of them, [S, d], whatever the number of samples."""
        return self.weights


Distribution = Gaussian | Point | Samples | Branches


def spread(q: Gaussian, p: Gaussian) -> Tensor:
    """Return r = (σ² + (m − m_p)²)/σ_p² of every entry, [d]; 1 where p is exactly as wide as q needs it."""
    return torch.exp(2 * (q.logstd - p.logstd)) + ((q.mean - p.mean) * torch.exp(-p.logstd)) ** 2


def kl(q: Gaussian, p: Gaussian) -> Tensor:
    """Return KL[q ‖ p] in closed form, summed over the last axis."""
    return (p.logstd - q.logstd + 0.5 * (spread(q, p) - 1)).sum(-1)


def moments(mean: Tensor, second: Tensor, centre: Tensor) -> Gaussian:
    """Return the Gaussian with the mean and variance of a mixture.

    `mean` is the average of the components' means, `second` the average of σ_i² + (m_i − centre)². Taking the second
    moment about a centre near the means (the old prior) rather than about 0 avoids cancellation in float32.
    """
    variance = second - (mean - centre) ** 2
    return Gaussian(mean, 0.5 * torch.log(variance.clamp_min(torch.finfo(mean.dtype).tiny)))
