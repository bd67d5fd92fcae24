"""Gaussians over a vector, held against torch.distributions, autograd and brute force."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from fedabml import rng
from fedabml.gaussian import Gaussian, Point, Samples, kl, moments, spread


def gaussians(seed=0, d=50):
    g = torch.Generator().manual_seed(seed)
    new = lambda: torch.randn(d, generator=g, dtype=torch.float64)
    return Gaussian(new(), new()), Gaussian(new(), new())


def test_kl_equals_torch_distributions():
    q, p = gaussians()
    expected = kl_divergence(Normal(q.mean, q.logstd.exp()), Normal(p.mean, p.logstd.exp())).sum()
    torch.testing.assert_close(kl(q, p), expected, rtol=1e-12, atol=0)


def test_kl_by_hand():
    q, p = Gaussian(torch.tensor([1.0]), torch.tensor([0.0])), Gaussian(torch.tensor([0.0]), torch.tensor([0.0]))
    assert kl(q, p).item() == 0.5
    assert kl(p, p).item() == 0


def test_kl_has_one_value_per_lane():
    q, p = gaussians(d=6)
    lanes = Gaussian(q.mean.reshape(2, 3), q.logstd.reshape(2, 3))
    others = Gaussian(p.mean.reshape(2, 3), p.logstd.reshape(2, 3))
    assert kl(lanes, others).shape == (2,)
    torch.testing.assert_close(kl(lanes, others).sum(), kl(q, p))


def test_spread_is_the_second_moment_about_the_prior_in_its_own_units():
    q, p = gaussians()
    expected = (q.logstd.exp() ** 2 + (q.mean - p.mean) ** 2) / p.logstd.exp() ** 2
    torch.testing.assert_close(spread(q, p), expected)
    torch.testing.assert_close(spread(p, p), torch.ones(50, dtype=torch.float64))


def test_the_derivatives_of_the_kl_are_those_the_steps_use():
    q, p = gaussians()
    of_q, of_p = torch.func.grad(kl, (0, 1))(q, p)
    precision = torch.exp(-2 * p.logstd)
    torch.testing.assert_close(of_q.mean, precision * (q.mean - p.mean))
    torch.testing.assert_close(of_q.logstd, torch.exp(2 * (q.logstd - p.logstd)) - 1)
    torch.testing.assert_close(of_p.mean, precision * (p.mean - q.mean))
    torch.testing.assert_close(of_p.logstd, 1 - spread(q, p))


@pytest.mark.parametrize("centre", [0.0, 100.0])
def test_moments_of_a_mixture_by_brute_force(centre):
    g = torch.Generator().manual_seed(1)
    means = torch.randn(7, 20, generator=g, dtype=torch.float64) + 3
    stds = torch.rand(7, 20, generator=g, dtype=torch.float64) + 0.1
    fitted = moments(means.mean(0), (stds**2 + (means - centre) ** 2).mean(0), torch.full((20,), centre).double())
    torch.testing.assert_close(fitted.mean, means.mean(0))
    variance = (stds**2).mean(0) + means.var(0, unbiased=False)
    torch.testing.assert_close(torch.exp(2 * fitted.logstd), variance, rtol=1e-9, atol=0)


def test_a_near_centre_keeps_small_variances_in_float32():
    means = torch.full((3, 4), 10.0)
    second = torch.full((4,), 1e-8)
    fitted = moments(means.mean(0), second, torch.full((4,), 10.0))
    torch.testing.assert_close(fitted.logstd.exp(), torch.full((4,), 1e-4))


def test_moments_without_variance_stay_finite():
    zero = torch.zeros(3)
    assert torch.isfinite(moments(zero, zero, zero).logstd).all()


def test_draws_have_the_mean_and_deviation():
    mean, logstd = torch.tensor([2.0, -3.0]).double(), torch.tensor([0.5, -2.0]).double()
    w = Gaussian(mean, logstd).draw(rng.key(0), 40_000)
    assert w.shape == (40_000, 2)
    z = (w - mean) / logstd.exp()
    assert (z.mean(0).abs() < 5 / 200).all() and ((z**2).mean(0) - 1).abs().max() < 5 * (2 / 40_000) ** 0.5
    assert abs((z[:, 0] * z[:, 1]).mean()) < 5 / 200


def test_draws_are_reparameterised_and_sample_by_sample():
    q = Gaussian(torch.zeros(3).double(), torch.zeros(3).double())
    key = rng.key(1)
    noise = q.draw(key, 4)
    assert torch.equal(q.draw(key, 2), noise[:2])  # fewer samples are the first ones
    moved = Gaussian(q.mean + 1, q.logstd + torch.tensor(2.0).log())
    torch.testing.assert_close(moved.draw(key, 4), 1 + 2 * noise)
    slope = torch.func.grad(lambda v: Gaussian(q.mean, v).draw(key, 4).sum())(q.logstd)
    torch.testing.assert_close(slope, noise.sum(0))


def test_points_and_samples():
    w = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(Point(w[0]).draw(rng.key(0), 5), w[:1])
    assert torch.equal(Samples(w).draw(rng.key(0), 5), w)
    assert Samples(w).mean.tolist() == [1.5, 2.5, 3.5]
