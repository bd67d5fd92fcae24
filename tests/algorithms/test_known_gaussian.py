"""Bayesian linear regression with known noise: the personalised posterior is the closed-form mean-field one.

The exact posterior is N(μ, P⁻¹) with P = XᵀX/σ² + I/s² and μ = P⁻¹(Xᵀy/σ² + m_θ/s²). Of all Gaussians with a diagonal
covariance the one nearest in KL[q‖·] has the same mean and the diagonal of P as its precisions.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml import FedABML, GaussianNoise, rng
from fedabml.engine.client import begin_personal, take_steps
from fedabml.engine.lanes import Lanes
from fedabml.engine.setting import Cohort, Place, Setting
from fedabml.vectors import Network
from tests.tiers import nightly_but

NOISE, N, D, NU = 0.4, 40, 3, -0.7


def problem():
    g = np.random.default_rng(3)
    x = (g.normal(size=(N, D)) @ np.array([[1, 0.6, 0], [0, 0.8, 0.3], [0, 0, 0.5]])).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + NOISE * g.normal(size=N)).astype(np.float32)
    return x, y


def closed_form(x, y, centre):
    x, y = x.astype(float), y.astype(float)
    precision = x.T @ x / NOISE**2 + np.eye(D) * math.exp(-2 * NU)
    mean = np.linalg.solve(precision, x.T @ y / NOISE**2 + centre * math.exp(-2 * NU))
    return mean, np.diag(precision)


def cohort_of(algorithm, seed=0):
    x, y = problem()
    fed = fedabml.Federation.from_arrays([(x, y)], task="regression", normalize="none")
    module = nn.Linear(D, 1, bias=False)
    nn.init.constant_(module.weight, 0.3)
    likelihood = GaussianNoise(1, NOISE, learn=False)
    return Cohort(
        Setting(algorithm, Network(module), likelihood, fed, batch_size=N, seed=seed),
        Place(torch.device("cpu"), torch.float64, backend="vmap"),
    )


@torch.no_grad()
def personalised(stages, **options):
    """φ from θ through stages of (step size, rate of ν, epochs): the last ones smaller, to average the noise out."""
    shared = {"mean": torch.full((D,), 0.3).double(), "logstd": torch.full((D,), NU).double()}
    carry = None
    for i, (lr, lr_std, epochs) in enumerate(stages):
        algorithm = FedABML(lam=1, s=32, personal_lr=lr, lr_std=lr_std, personal_epochs=epochs, **options)
        cohort = cohort_of(algorithm, seed=i)
        lanes = Lanes.after_round(cohort, shared, [0])
        if carry is None:
            carry = begin_personal(lanes, {})
        carry, _, _ = take_steps(lanes, carry, algorithm.personal_phases(), rng.PERSONAL)
    return carry["mean"][0].numpy(), carry["logstd"][0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kl_step", nightly_but({"implicit"}, ["implicit", "explicit"]))
@pytest.mark.parametrize(
    ("posterior_std", "stages"),
    [
        ("natural", [(0.05, 0.2, 150), (0.005, 0.005, 500)]),
        ("sgd", [(0.05, 0.2, 300), (0.005, 0.02, 500)]),
    ],
)
def test_the_personalised_posterior_is_the_mean_field_solution(posterior_std, stages, kl_step):
    mean, logstd = personalised(stages, posterior_std=posterior_std, kl_step=kl_step)
    expected, precision = closed_form(*problem(), 0.3)
    std = precision**-0.5
    # Tolerances: a tenth of a posterior deviation for the means, 3% for the deviations.
    np.testing.assert_array_less(np.abs(mean - expected) / std, 0.1)
    np.testing.assert_allclose(np.exp(logstd), std, rtol=0.03)
    # The test has power: the prior and the maximum likelihood are many deviations away.
    assert np.abs(expected - 0.3).max() > 10 * std.max()


def test_a_strong_prior_and_few_data_shrink_by_the_right_amount():
    """λ weighs the prior: with a tenth of it the precision of the prior's part is a tenth (a cold posterior)."""
    x, y = problem()
    shared = {"mean": torch.full((D,), 0.3).double(), "logstd": torch.full((D,), NU).double()}
    for lam in (0.1, 1.0, 10.0):
        algorithm = FedABML(lam=lam, lr=0.05, posterior_std="fixed", personal_epochs=1, s=1)
        cohort = cohort_of(algorithm)
        site = type(cohort.site([0]))(*(t[0] for t in cohort.site([0])))
        phi = {name: t.clone() for name, t in shared.items()}
        for _ in range(800):
            # The expectation of the gradient, known in closed form: Xᵀ(Xm − y)/(nσ²).
            slope = torch.as_tensor(x.astype(float).T @ (x.astype(float) @ phi["mean"].numpy() - y) / (N * NOISE**2))
            phi = algorithm.move(phi, {"mean": slope, "logstd": 0 * slope}, shared, site.n, 0.05)
        precision = x.astype(float).T @ x / NOISE**2 + lam * np.eye(D) * math.exp(-2 * NU)
        expected = np.linalg.solve(precision, x.astype(float).T @ y / NOISE**2 + lam * 0.3 * math.exp(-2 * NU))
        np.testing.assert_allclose(phi["mean"].numpy(), expected, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_public_face_finds_the_posterior_mean():
    """`Prior.personalize` itself, in float32: means within .3 posterior deviations."""
    x, y = problem()
    fed = fedabml.Federation.from_arrays([(x, y)], task="regression", normalize="none")
    module = nn.Linear(D, 1, bias=False)
    algorithm = FedABML(lam=1, s=16, personal_lr=0.02, nu0=NU, posterior_std="natural", lr_std=0.05)
    run = fedabml.train(
        fed, module, algorithm, rounds=0, evaluate=False, likelihood=GaussianNoise(1, NOISE, learn=False), device="cpu"
    )
    q = run.prior.personalize(x, y, epochs=300, batch_size=N, device="cpu").q
    expected, precision = closed_form(x, y, module.weight.detach().numpy()[0])
    assert (np.abs(q.mean.numpy() - expected) * precision**0.5).max() < 0.3
    np.testing.assert_allclose(q.logstd.exp().numpy(), precision**-0.5, rtol=0.25)
