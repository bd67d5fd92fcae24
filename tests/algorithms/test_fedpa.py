"""FedPA: its dynamic programme against the dense formula, a plain loop, its limits, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import FedAvg, FedPA
from fedabml.algorithms.base import Site
from fedabml.algorithms.fedpa import posterior_correction
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    batches,
    close,
    descend,
    drawn,
    models,
    simulate,
    slope,
    tuning,
)


def dense(theta, samples, rho):
    """Σ̂⁻¹(θ − μ̂) as the paper writes it, by a solve."""
    x = np.asarray(samples)
    mean, shrink = x.mean(0), 1 / (1 + (len(x) - 1) * rho)
    cov = np.cov(x.T, ddof=1).reshape(x.shape[1], -1) if len(x) > 1 else 0 * np.eye(x.shape[1])
    return np.linalg.solve(shrink * np.eye(x.shape[1]) + (1 - shrink) * cov, theta - mean)


@pytest.mark.parametrize("rho", [0.0, 0.01, 1.0, 100.0])
def test_the_dynamic_programme_is_the_dense_formula(rho):
    g = torch.Generator().manual_seed(0)
    theta, samples = torch.randn(7, generator=g).double(), 2 * torch.randn(5, 7, generator=g).double() + 1
    taken = torch.arange(6).double()
    lanes = torch.vmap(lambda n: posterior_correction(theta, samples, n, rho))(
        taken
    )  # ragged clients: the last n of the rows
    close(lanes[0], np.zeros(7), 0)
    for n in range(1, 6):
        close(lanes[n], dense(theta.numpy(), samples[-n:].numpy(), rho), 1e-9)
        close(posterior_correction(theta, samples, taken[n], rho), lanes[n], 1e-12)


def run_client(algorithm, loss, theta, steps):
    """A client's round, without an engine: its update and its last carry."""
    shared, site, key = algorithm.init(theta, None), Site(torch.tensor(1.0), torch.empty(0)), rng.key(3)
    carry = algorithm.begin(shared, {}, site, key)
    path = []
    for t in range(steps):
        carry, _ = algorithm.step(carry, shared, (None,), site, rng.fold(key, t), loss)
        path.append(carry["mean"].numpy())
    return algorithm.end(carry, shared, {}, site, torch.tensor(float(steps)).double())[0]["delta"], np.array(path)


def test_a_round_by_hand():
    """f = ½(w − 1)² from 0 at η = ½: iterates 1/2, 3/4, 7/8, 15/16; samples 5/8 and 29/32; ρ = 1, so Σ̂ = (1 + S)/2."""
    algorithm = FedPA(lr=0.5, burn=0, window=2, samples=2, rho=1.0, server_lr=0.5)
    theta = torch.zeros(1).double()
    delta, _ = run_client(algorithm, lambda q, *_: 0.5 * ((q.mean - 1) ** 2).sum(), theta, 4)
    mean, variance = 49 / 64, (9 / 32) ** 2 / 2
    assert delta.item() == pytest.approx(-mean / ((1 + variance) / 2), abs=1e-12)
    assert delta.item() == pytest.approx(-1.4729920, abs=1e-6)
    merged = algorithm.merge({"mean": theta}, {"delta": delta}, 1, 1)
    assert merged.keys() == {"mean"} and merged["mean"].item() == pytest.approx(0.7364960, abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_on_a_noisy_quadratic_the_update_is_the_dense_formula_of_its_window_averages(momentum):
    a = torch.tensor([[3.0, 1.0, 0.2], [1.0, 2.0, 0.0], [0.2, 0.0, 1.0]]).double()
    noise = lambda key: rng.normal(key, (3,), torch.float64)
    loss = lambda q, batch, key: 0.5 * q.mean @ a @ q.mean - (torch.ones(3).double() + noise(key)) @ q.mean
    theta = torch.tensor([1.0, -2.0, 0.5]).double()
    for burn, window, most in [(4, 3, 8), (0, 5, 2), (2, 1, 4)]:
        algorithm = FedPA(lr=0.1, momentum=momentum, burn=burn, window=window, samples=most, rho=0.7)
        delta, path = run_client(algorithm, loss, theta, 21)
        after = path[burn:]
        means = [after[j : j + window].mean(0) for j in range(0, len(after) - window + 1, window)]
        close(delta, dense(theta.numpy(), means[-most:], 0.7), 1e-9)


@MOMENTA
@pytest.mark.parametrize(
    ("burn", "window", "samples", "taken"), [(1, 2, 2, (1, 2, 1)), (0, 1, 3, (3, 3, 3)), (4, 1, 2, (0, 2, 0))]
)
def test_two_rounds_by_a_plain_loop(burn, window, samples, taken, momentum):
    """Clients 0, 1 and 2 have 4, 6 and 4 steps: those that are done stop, whatever the others still do."""
    lr, rho, rate = 0.1, 0.8, 0.7
    words = {"burn": burn, "window": window, "samples": samples, "momentum": momentum, "personal_epochs": 2}
    sim, lines = simulate(FedPA(lr=lr, rho=rho, server_lr=rate, personal_lr=None, **words))
    w = START
    for t in (1, 2):
        deltas = []
        for c in drawn(t):
            path, v, velocity = [], w, 0.0
            for ((x, y),) in batches(c, t):
                velocity = momentum * velocity + slope(v, x, y)
                v = v - lr * velocity
                path.append(v)
            after = np.array(path[burn:])
            means = [after[j : j + window].mean(0) for j in range(0, len(after) - window + 1, window)][-samples:]
            assert len(means) == taken[c]
            deltas.append(dense(w, means, rho) if means else w - v)
        w = w - rate * np.mean(deltas, 0)
    close(sim.shared["mean"], w, 1e-10)
    assert not sim.kept.states
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8)
    for c in CLIENTS:  # plain fine-tuning from w_t
        close(models(sim).mean[c], descend(w, tuning(c, 2), lr, momentum), 1e-10)


@MOMENTA
@pytest.mark.parametrize("limit", [{"burn": 0, "window": 1, "samples": 1}, {"burn": 6}, {"burn": 0, "warm": 3}])
def test_one_last_iterate_too_few_steps_and_warm_rounds_are_fedavg(limit, momentum):
    plain = simulate(FedAvg(lr=0.1, momentum=momentum), 3)[0].shared["mean"]
    close(simulate(FedPA(lr=0.1, momentum=momentum, **limit), 3)[0].shared["mean"], plain, 1e-13)


def test_after_the_warm_rounds_it_is_fedpa():
    words = {"lr": 0.1, "burn": 1, "window": 1, "samples": 3, "rho": 1.0}
    a, b = (simulate(algorithm, 2)[0].shared["mean"] for algorithm in (FedAvg(lr=0.1), FedPA(warm=1, **words)))
    assert (a - b).abs().max() > 1e-3
    sim, lines = simulate(FedPA(warm=1, **words), 2)
    assert sim.shared["round"] == 2 and lines[0]["bytes_down"] == 4 * 8 and lines[0]["bytes_up"] == 3 * 8


def test_without_shrinkage_towards_the_covariance_it_is_the_mean_of_the_samples():
    g = torch.Generator().manual_seed(1)
    theta, samples = torch.randn(4, generator=g).double(), torch.randn(6, 4, generator=g).double()
    close(posterior_correction(theta, samples, torch.tensor(6.0).double(), 0.0), theta - samples.mean(0))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_mode_of_the_product_is_where_the_server_rests():
    """Two quadratics with exact posterior samples: at x* the clients' Δ cancel, and FedAvg's are far from doing so."""
    one = np.ones((2, 2))
    a = [np.diag(d) - 1.5 * one for d in ([2.0, 15.0], [15.0, 2.0])]
    b = [np.array(v) for v in ([5.0, 10.0], [10.0, 5.0])]
    best = np.linalg.solve(a[0] + a[1], b[0] + b[1])
    g = np.random.default_rng(0)
    draws = [g.multivariate_normal(np.linalg.solve(m, v), np.linalg.inv(m), 500) for m, v in zip(a, b, strict=True)]
    theta, taken = torch.tensor(best), torch.tensor(500.0).double()
    bayes, plain = (
        sum(posterior_correction(theta, torch.tensor(x), taken, rho) for x in draws).norm() / 2 for rho in (1e6, 0.0)
    )
    size = np.linalg.norm(a[0] @ (best - np.linalg.solve(a[0], b[0])))
    assert bayes < 0.15 * size and plain > 10
