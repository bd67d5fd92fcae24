"""The label level: π_i, the distribution of a client's labels, from its own counts n_y of K classes.

    dirichlet   π_i = (n_y + α)/(n + Kα), the posterior mean under a symmetric Dirichlet prior
    sparse      a client has s of the K classes, s about Kρ ± τ, and α is that of its own classes alone:
                p(labels) = Σ_s p(s) · C(K − m, s − m)/C(K, s) · Γ(sα)/Γ(sα + n) · Π_{n_y > 0} Γ(n_y + α)/Γ(α)
                with m classes seen and p(s) ∝ exp(−(s − Kρ)²/2τ²); π_i is the posterior mean, in which the classes
                not seen share what the sum over s leaves them

A joint p(x, y) = p(x|y) π_i(y) predicts p_i(y|x) ∝ exp f(x)_y · E[π_i(y) | counts]: the posterior mean is exact, and
f, trained with log π_i added, needs no division by the labels of training. Where few samples of a client miss some of
its classes, a Dirichlet fitted to clients with many samples has an α near 0 and all but excludes them; `sparse` knows
from the other clients how many classes to expect.

`choose` maximises the marginal likelihood of all clients over a fixed grid. It needs a sum over clients alone: each
would evaluate `log_evidence` of its own counts there, and its counts stay with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Site
from ..errors import InputError

SHARES = tuple(10 ** (k / 10) for k in range(-20, 1))  # ρ of the grid: 0.01 to 1
SPREADS = tuple(0.5 * 2**k for k in range(6))  # τ of the grid: 0.5 to 16 classes
ALPHAS = tuple(10 ** (k / 10) for k in range(-30, 21))  # α of the grid: 0.001 to 100
FLOOR = 1e-3  # chance of a label that follows no rule; without it a new class has infinite NLL
MOST_CLIENTS = 1000  # whose evidence is summed; of more clients, so many at equal distances


def label_offset(algorithm: Algorithm, site: Site) -> Tensor | None:
    """Return log π_i [classes] of a client, or None for an algorithm without a label level."""
    if algorithm.label_prior == "none" or site.counts.shape[-1] == 0:
        return None
    classes = site.counts.shape[-1]
    alpha = algorithm.smoothing(classes)
    if algorithm.label_prior == "dirichlet":
        return torch.log((site.counts + alpha) / (site.n.unsqueeze(-1) + classes * alpha))
    level = sparse_level(site.counts.double(), algorithm.label_share, algorithm.label_spread, alpha)
    return level.log().to(site.counts.dtype)


def sparse_level(counts: Tensor, share: Tensor | float, spread: Tensor | float, alpha: Tensor | float) -> Tensor:
    """Return π [..., classes] of counts [..., classes] under `sparse`, with `FLOOR` spread evenly over the classes."""
    classes, n = counts.shape[-1], counts.sum(-1, keepdim=True)
    seen, sizes, alpha = _seen(counts), _sizes(counts), _tensor(alpha, counts)
    by_size = _labels_by_size(counts, alpha) + _size_prior(counts, share, spread).log()
    weights = torch.softmax(by_size, -1) / (n + sizes * alpha)  # of s, over its normaliser
    missed = (weights * (sizes - seen).clamp_min(0) * alpha).sum(-1, keepdim=True) / (classes - seen).clamp_min(1)
    level = torch.where(counts > 0, (counts + alpha) * weights.sum(-1, keepdim=True), missed)
    return (1 - FLOOR) * level + FLOOR / classes


def log_evidence(counts: Tensor, shares: Sequence[float], spreads: Sequence[float], alphas: Sequence[float]) -> Tensor:
    """Return log p(labels of a client, in their order) of counts [..., classes] under `sparse`, on a grid.

    The result is [..., alphas, shares, spreads]: what a client gives to the sum of all clients.
    """
    labels = _labels_by_size(counts.unsqueeze(-2), torch.tensor(alphas).to(counts).unsqueeze(-1))
    greatest = labels.amax(-1, keepdim=True)
    priors = torch.stack([_size_prior(counts, share, spread) for share in shares for spread in spreads], -1)
    sums = greatest + torch.log(torch.exp(labels - greatest) @ priors)
    return sums.unflatten(-1, (len(shares), len(spreads)))


def choose(counts: np.ndarray) -> dict[str, Any]:
    """Return ρ, τ and α of the grid that maximise the sum of the clients' log evidence; counts [clients, classes].

    They are returned by the names of their hyperparameters.
    """
    sampled_counts = torch.as_tensor(counts[:: -(-len(counts) // MOST_CLIENTS)]).double()
    sums = [log_evidence(part, SHARES, SPREADS, ALPHAS).sum(0) for part in sampled_counts.split(50)]
    total = torch.stack(sums).sum(0)
    alpha, share, spread = np.unravel_index(int(total.flatten().argmax()), total.shape)
    return {"label_share": SHARES[share], "label_spread": SPREADS[spread], "label_alpha": ALPHAS[alpha]}


def _sizes(counts: Tensor) -> Tensor:
    """Return s = 1..K, how many classes a client may have."""
    return torch.arange(1, counts.shape[-1] + 1, dtype=counts.dtype, device=counts.device)


def _seen(counts: Tensor) -> Tensor:
    """Return m [..., 1], how many classes a client's samples show."""
    return (counts > 0).sum(-1, keepdim=True).to(counts.dtype)


def _tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a hyperparameter as a tensor with the type and device of another."""
    # Filled on the device: a copy from the host cannot be captured in a CUDA graph.
    return value.to(like) if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def _size_prior(counts: Tensor, share: Tensor | float, spread: Tensor | float) -> Tensor:
    """Return p(s) for every s; `FLOOR` of it is spread evenly."""
    distance = (_sizes(counts) - counts.shape[-1] * _tensor(share, counts)) / _tensor(spread, counts)
    return (1 - FLOOR) * torch.softmax(-(distance**2) / 2, -1) + FLOOR / counts.shape[-1]


def _labels_by_size(counts: Tensor, alpha: Tensor) -> Tensor:
    """Return log C(K − m, s − m)/C(K, s) + log p(labels | the client's s classes) for every s; −∞ where s < m."""
    n, seen, sizes = counts.sum(-1, keepdim=True), _seen(counts), _sizes(counts)
    classes = torch.full_like(seen, counts.shape[-1])
    subsets = torch.lgamma(classes - seen + 1) - torch.lgamma((sizes - seen).clamp_min(0) + 1)
    subsets = subsets + torch.lgamma(sizes + 1) - torch.lgamma(classes + 1)
    log_factors = torch.where(counts > 0, torch.lgamma(counts + alpha) - torch.lgamma(alpha), 0)
    labels = torch.lgamma(sizes * alpha) - torch.lgamma(sizes * alpha + n) + log_factors.sum(-1, keepdim=True)
    return torch.where(sizes >= seen, subsets + labels, -torch.inf)


def require_chosen(algorithm: Algorithm) -> None:
    """Refuse a sparse label level whose ρ and α nobody has chosen, as at a site that knows its own counts alone."""
    if algorithm.label_prior == "sparse" and not algorithm.label_share:
        raise InputError(
            "label_prior sparse has no label_share yet. Training in one process chooses it from all clients' labels; "
            "where labels stay at their sites, set label_share, label_spread and label_alpha, or label_prior dirichlet."
        )
