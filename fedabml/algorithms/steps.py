"""Steps that algorithms share: a proximal pull, steps of Gaussian posteriors and priors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..gaussian import Gaussian, spread
from ..vectors import plus
from .base import Algorithm, Batch, State

Number = float | Tensor


def batch_fraction(batch: Batch, n: Tensor) -> Tensor:
    """Return |B|/min(b, n), [], the part of a whole minibatch: b is the batch size, n the number of samples.

    An epoch cuts n = qb + r samples into q batches of b and a last one of r. Let L_B be the mean over a batch B plus
    (λ/n) KL. If all steps were η, each sample of the last batch would count b/r times: with n = 101 and b = 50, one
    sample counts as much as fifty others. The mean of only r samples also varies more and has more curvature, so that
    its step explodes at an η that suits b. With steps of η|B|/b each sample counts once: at one φ,
    Σ_B η(|B|/b) ∇L_B = η(n/b) ∇[mean of all n + (λ/n) KL]. The fraction is exactly 1 for every whole minibatch, which
    includes that of a client with n ≤ b.
    """
    return batch.mask.sum(-1) / n.clamp(1, batch.mask.shape[-1])


def proximal_step(mean: Tensor, direction: Tensor, centre: Tensor, kappa: Tensor, lr: Number) -> Tensor:
    """Return the mean after a step along −direction with a proximal pull κ(m − centre) taken implicitly.

    m ← (m − η g + ηκ·centre)/(1 + ηκ): the fixed point of the explicit step m − η(g + κ(m − centre)), but stable for
    every κ, where the explicit one diverges at ηκ ≥ 2.
    """
    weight = plus(kappa.new_ones(()), lr, kappa).reciprocal()
    return torch.lerp(centre, plus(mean, lr, direction, -1), weight)


def proximal_momentum_step(
    algorithm: Algorithm, carry: State, gradient: Tensor, centre: Tensor, kappa: Tensor, lr: Number
) -> tuple[Tensor, State]:
    """Return the new mean and the optimiser's new state after a `proximal_step` with momentum.

    A buffer at rest holds g/(1 − momentum), so the pull takes the longer step too: the fixed point stays. Adam has no
    implicit form: its gradient contains the pull.
    """
    if algorithm.optimiser == "adam":
        direction, state = algorithm.momentum_step(carry, gradient + kappa * (carry["mean"] - centre))
        return plus(carry["mean"], lr, direction, -1), state
    if not algorithm.momentum:
        return proximal_step(carry["mean"], gradient, centre, kappa, lr), {}
    direction, buffer = algorithm.momentum_step(carry, gradient)
    damping = 1 - algorithm.momentum
    return proximal_step(carry["mean"], damping * direction, centre, kappa, lr / damping), buffer


def blend(old: State, new: State, beta: Number) -> State:
    """Return (1 − β)·old + β·new, β = `beta`."""
    return {name: (1 - beta) * old[name] + beta * new[name] for name in old}


def natural_logstd(logstd: Tensor, gradient: Tensor, prior: Tensor, weight: Number, rho: Number) -> Tensor:
    """Return ν after a natural-gradient step, taken in the precision so that σ stays positive.

    1/σ² ← (1 − ρ)/σ² + ρ(1/σ_θ² + g_ν/(weight·σ²)), where g_ν is the likelihood's gradient (≈ curvature·σ²) and weight
    = λ/n; its fixed point is the ELBO's. A noisy negative precision is cut at 0, and σ grows tenfold at most.
    """
    target = torch.exp(2 * (logstd - prior)) + gradient / weight
    return logstd - 0.5 * torch.log((1 - rho + rho * target.clamp_min(0)).clamp_min(0.01))


def natural_prior(
    theta: Gaussian, q: Gaussian, rho: Number, rho_std: Number, hyper: Number = 0.0, nu0: Number = 0.0
) -> Gaussian:
    """Return θ after m_θ ← m_θ + ρ(m − m_θ), ν_θ ← ν_θ + ½ log(1 + ρ_ν(r − 1)), r at the old m_θ.

    A hyper-prior, h = `hyper`, has (r + h exp 2(ν₀ − ν_θ))/(1 + h) for r: the mode of σ_θ² under a scaled inverse χ².
    """
    r = (spread(q, theta) + hyper * torch.exp(2 * (nu0 - theta.logstd))) / (1 + hyper)
    logstd = theta.logstd + 0.5 * torch.log1p(rho_std * (r - 1))
    return Gaussian(theta.mean + rho * (q.mean - theta.mean), logstd)


def euclidean_prior(theta: Gaussian, q: Gaussian, rate: Number, implicit: bool) -> Gaussian:
    """Return θ − rate·∇_θ KL, ∂m = (m_θ − m)/σ_θ², ∂ν = 1 − r; the implicit form takes the gradient at the new θ.

    Implicit in ν: ν' = ν − c(1 − R e^{−2ν'}) with R = σ² + (m − m_θ)², which Lambert's W solves.
    """
    kappa = torch.exp(-2 * theta.logstd)
    if not implicit:
        mean = theta.mean - rate * kappa * (theta.mean - q.mean)
        return Gaussian(mean, theta.logstd - rate * (1 - spread(q, theta)))
    mean = proximal_step(theta.mean, torch.zeros_like(q.mean), q.mean, kappa, rate)
    start = theta.logstd - rate
    log_z = torch.log(2 * rate * spread(q, theta)) + 2 * (theta.logstd - start)
    return Gaussian(mean, start + 0.5 * lambert_w(log_z))


def lambert_w(log_z: Tensor) -> Tensor:
    """Return Lambert's W(z) for z = exp(log_z) ≥ 0, by Newton's method on y + log y = log z."""
    log_z = log_z.clamp_min(math.log(torch.finfo(log_z.dtype).tiny) + 1)  # smaller is 0 to this type
    y = torch.where(log_z < 1, torch.exp(log_z.clamp_max(1)) / (1 + torch.exp(log_z.clamp_max(1))), log_z.clamp_min(1))
    for _ in range(6):
        y = y / (1 + y) * (1 + log_z - torch.log(y))
    return y
