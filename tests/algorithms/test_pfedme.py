"""pFedMe against a plain loop, its limits, and the paper's second remark."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import FedABML, FedAvg, PFedMe
from fedabml.algorithms.base import Site
from fedabml.gaussian import Gaussian
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    batches,
    close,
    descend,
    drawn,
    federation,
    models,
    simulate,
    slope,
    tuning,
)


def inner(theta, velocity, w, x, y, lr, lam, momentum):
    velocity = momentum * velocity + slope(theta, x, y) + lam * (theta - w)
    return theta - lr * velocity, velocity


@MOMENTA
@pytest.mark.parametrize(("inner_lr", "beta"), [(None, 1.0), (0.02, 1.4), (0.02, 0.0)])
def test_two_rounds_by_a_plain_loop(inner_lr, beta, momentum):
    lr, lam, k = 0.05, 3.0, 2
    words = {"momentum": momentum, "personal_epochs": 2}
    sim, lines = simulate(PFedMe(lr=lr, lam=lam, k=k, inner_lr=inner_lr, beta=beta, personal_lr=None, **words))
    eta = inner_lr or lr
    shared = START
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            w, theta, velocity = shared, shared, 0.0
            for ((x, y),) in batches(c, t):
                for _ in range(k):
                    theta, velocity = inner(theta, velocity, w, x, y, eta, lam, momentum)
                w = w - lr * lam * (w - theta)
            ends.append(w)
        shared = (1 - beta) * shared + beta * np.mean(ends, 0)
    close(sim.shared["mean"], shared)
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8) and sim.kept.states == {}
    for c in CLIENTS:  # θ_i is scored, not w: the pull is towards w_t, which stays
        theta, velocity = shared, 0.0
        for ((x, y),) in tuning(c, 2):
            theta, velocity = inner(theta, velocity, shared, x, y, eta, lam, momentum)
        close(models(sim).mean[c], theta)
        assert np.abs(theta - shared).max() > 1e-3


@pytest.mark.slow
def test_the_personal_step_size():
    a, b = (models(simulate(PFedMe(**words))[0]).mean for words in ({"personal_lr": 0.01}, {"personal_lr": None}))
    c = models(simulate(PFedMe(lr=0.03, inner_lr=None, personal_lr=0.03))[0]).mean
    assert not torch.equal(a, b) and torch.equal(b, c)


def test_a_strong_pull_keeps_the_personal_model_at_w():
    """λ → ∞ with η_p = 1/λ: θ = w − ∇f/λ, so θ stays at w, and w moves by −ηλ(w − θ) → −η∇f: FedAvg.

    (k = 2, because the first inner step still takes its gradient at the θ of the batch before.)
    """
    gaps, moved = [], []
    plain = simulate(FedAvg(lr=0.1))[0].shared["mean"]
    for lam in (1e3, 1e5):
        sim, _ = simulate(PFedMe(lr=0.1, lam=lam, inner_lr=1 / lam, k=2, personal_lr=None))
        gaps.append((models(sim).mean - sim.shared["mean"]).abs().max().item())
        moved.append((sim.shared["mean"] - plain).abs().max().item())
    assert gaps[1] < 1e-4 and gaps[0] / gaps[1] == pytest.approx(100, rel=0.1)
    assert moved[1] < 1e-4 and moved[0] / moved[1] == pytest.approx(100, rel=0.2)


def test_without_a_pull_w_stays_and_theta_is_plain_sgd():
    sim, _ = simulate(PFedMe(lr=0.1, lam=0, personal_epochs=2, personal_lr=None))
    close(sim.shared["mean"], START, 0)
    for c in CLIENTS:
        close(models(sim).mean[c], descend(START, tuning(c, 2), 0.1))


# -- the paper's second remark --------------------------------------------------------------------------------------
N = 20.0
SITE, KEY = Site(torch.tensor(N).double(), torch.empty(0)), rng.key(3)
A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 3.0]]).double()
B = torch.tensor([1.0, -2.0, 0.5]).double()


def expected(q, batch, key, samples=1):
    """E_q of a quadratic that is shifted in every batch, in closed form: no samples are needed."""
    m = q.mean - batch
    value = 0.5 * m @ A @ m - B @ m
    return value + 0.5 * (A.diagonal() * torch.exp(2 * q.logstd)).sum() if isinstance(q, Gaussian) else value


@MOMENTA
@pytest.mark.parametrize("nu", [-1.0, 0.3])
def test_remark_2_step_by_step(nu, momentum):
    """Explicit KL steps, σ fixed and equal, λ_pFedMe = (λ/n)/σ²: equal to this class after every step."""
    lam, lr, k = 0.7, 0.05, 3
    w = torch.tensor([0.3, -1.0, 0.5]).double()
    bayes = FedABML(
        prior_step="euclidean", prior_every="batch", kl_step="explicit", posterior_std="fixed", k=k, lr=lr, lam=lam,
        momentum=momentum, short_batch="whole",
    )  # fmt: skip
    me = PFedMe(lam=lam / N * np.exp(-2 * nu), k=k, lr=lr, momentum=momentum)
    wide, narrow = {"mean": w, "logstd": torch.full((3,), nu, dtype=torch.float64)}, {"mean": w}
    a, b = bayes.begin(wide, {}, SITE, KEY), me.begin(narrow, {}, SITE, KEY)
    for t in range(6):
        batch = (torch.tensor(0.1 * t).double(),)
        a, _ = bayes.step(a, wide, batch, SITE, KEY, expected)
        b, _ = me.step(b, narrow, batch, SITE, KEY, expected)
        close(a["mean"], b["mean"])
        one, two = (x.end(c, s, {}, SITE, torch.tensor(1.0))[0] for x, c, s in ((bayes, a, wide), (me, b, narrow)))
        close(one["mean"], two["mean"])
        close(one["logstd"], wide["logstd"], 0)
    assert (two["mean"] - w).abs().max() > 1e-3


def test_remark_2_through_the_engine_as_the_posterior_narrows():
    """Real minibatches and a loss that is not quadratic, clients of one size: the gap falls in proportion to σ."""
    fed = federation((6, 6, 6, 6))
    me, _ = simulate(PFedMe(lr=0.05, lam=3.0, k=2), fed=fed)
    gaps = []
    for nu in (-6.0, -9.0):
        bayes = FedABML(
            prior_step="euclidean", prior_every="batch", kl_step="explicit", posterior_std="fixed", k=2, lr=0.05, s=1,
            lam=3.0 * 6 * np.exp(2 * nu), nu0=nu, average=0, server_momentum=0,
        )  # fmt: skip
        gaps.append((simulate(bayes, fed=fed)[0].shared["mean"] - me.shared["mean"]).abs().max().item())
    assert gaps[1] < 1e-3 and gaps[0] / gaps[1] == pytest.approx(np.exp(3), rel=0.2)
