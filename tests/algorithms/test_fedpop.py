"""FedPop against a plain loop, and its chain against Gaussians that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import FedPop
from fedabml.algorithms.base import Site
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    SEED,
    SIZES,
    START,
    assert_apart,
    batches,
    close,
    drawn,
    federation,
    models,
    simulate,
    slope,
    tuning,
)

BODY, HEAD = slice(0, 1), slice(1, 3)


def langevin(z, body, mu, s, n, x, y, gamma, key):
    """Exact in the population's pull and noise while the likelihood's gradient is held."""
    noise = rng.normal(rng.fold(key, 0), (2,), torch.float64).numpy()
    target = mu - s**2 * n * slope(np.concatenate([body, z]), x, y)[HEAD]
    decay = np.exp(-gamma / s**2)
    return target + decay * (z - target) + s * np.sqrt(1 - decay**2) * noise


def key_of(purpose, round, client, number):
    return rng.fold(rng.fold(rng.key(SEED, purpose, round, client), 0), number)


@MOMENTA
@pytest.mark.parametrize(("burn", "chain"), [(2, 3), (0, 1)])
@pytest.mark.slow
def test_two_rounds_by_a_plain_loop(burn, chain, momentum):
    lr, gamma = 0.1, 0.004
    words = {"burn": burn, "chain": chain, "nu0": -1.0, "momentum": momentum, "personal_epochs": 3}
    sim, lines = simulate(FedPop(lr=lr, gamma=gamma, personal_lr=None, **words))
    body, mu, s, own = START[BODY], START[HEAD], np.exp(np.full(2, -1.0)), [START[HEAD]] * 4
    for t in (1, 2):
        bodies, all_heads = [], []
        for c in drawn(t):
            b, z, velocity = body, own[c], 0.0
            for number, ((x, y),) in enumerate(batches(c, t)):
                key, heads = key_of(rng.NOISE, t, c, number), []
                for j in range(burn + chain):
                    z = langevin(z, b, mu, s, SIZES[c], x, y, gamma, rng.fold(key, j))
                    heads.append(z)
                heads = heads[burn:]
                velocity = momentum * velocity + np.mean([slope([*b, *h], x, y)[BODY] for h in heads], 0)
                b = b - lr * velocity
            own[c] = z
            bodies.append(b), all_heads.append(heads)
        heads = np.reshape(all_heads, (-1, 2))
        new = mu + 0.5 * (heads.mean(0) - mu)  # two of four clients are drawn: they renew half of the moments
        second = 0.5 * (s**2 + mu**2) + 0.5 * (heads**2).mean(0)
        body, mu, s = np.mean(bodies, 0), new, np.sqrt(second - new**2)
    close(sim.shared["body"], body, 1e-10)
    close(sim.shared["mu"], mu, 1e-10)
    close(sim.shared["logstd"], np.log(s), 1e-8)
    assert set(sim.kept.states) == {0, 1, 2}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (5 * 8, 5 * 8)  # d_b + 2 d_h
    for c in CLIENTS:
        close(sim.kept_for(CLIENTS)["head"][c], own[c], 1e-10)
        visited, z = [own[c]] * chain, own[c]
        for number, ((x, y),) in enumerate(tuning(c, 3)):
            z = langevin(z, body, mu, s, SIZES[c], x, y, gamma, key_of(rng.PERSONAL, 0, c, number))
            visited.append(z)
        expected = [np.concatenate([body, z]) for z in visited[-chain:]]
        close(models(sim).weights[c], expected, 1e-10)  # the last M of the chain, under the shared body


def test_kept_chains_are_apart_and_one_never_drawn_starts_at_the_initial_head():
    sim, _ = simulate(FedPop(lr=0.1, gamma=0.01))
    close(sim.kept_for(CLIENTS)["head"][3], START[HEAD], 0)
    assert not torch.equal(sim.shared["mu"], torch.tensor(START[HEAD]))
    assert_apart(sim)


def test_the_printed_step_to_first_order():
    """z − γ(n∇f + (z − μ)/s²) + √(2γ)ξ: the gap to it falls as γ^1.5, the order of the noise's own next term."""
    z, mu, s, n = np.array([0.4, -1.0]), np.array([0.1, 0.3]), np.array([0.5, 0.8]), 9.0
    shared = {"mu": torch.tensor(mu), "logstd": torch.tensor(np.log(s))}
    carry = {"body": torch.zeros(1).double(), "head": torch.tensor(z)}
    pull = np.array([0.3, -0.2])
    gaps = []
    for gamma in (1e-4, 1e-6):
        algorithm, key = FedPop(), rng.key(4)
        loss = lambda q, *_: torch.tensor(pull) @ q.mean[1:]
        got, _ = algorithm.langevin(carry, shared, None, Site(torch.tensor(n).double(), None), key, loss, gamma)
        noise = rng.normal(rng.fold(key, 0), (2,), torch.float64).numpy()
        printed = z - gamma * (n * pull + (z - mu) / s**2) + np.sqrt(2 * gamma) * noise
        gaps.append(np.abs(got.numpy() - printed).max())
    assert gaps[0] < 1e-4 and gaps[0] / gaps[1] == pytest.approx(1000, rel=0.2)


WIDE = 20_000  # independent chains: the coordinates of one long head


def run_chain(loss, gamma, steps, mu=1.5, s=0.7, n=40.0):
    """The heads of many chains after a number of steps."""
    algorithm, site = FedPop(), Site(torch.tensor(n).double(), None)
    shared = {"mu": torch.full((WIDE,), mu).double(), "logstd": torch.full((WIDE,), np.log(s)).double()}
    carry = {"body": torch.zeros(1).double(), "head": torch.full((WIDE,), -2.0).double()}
    for t in range(steps):
        z, _ = algorithm.langevin(carry, shared, None, site, rng.fold(rng.key(8), t), loss, gamma)
        carry = {**carry, "head": z}
    return carry["head"].numpy()


def assert_gaussian(z, mean, std, bias=0.0):
    """Mean, deviation and tails within five standard errors (`bias`: what the step size adds to the deviation)."""
    assert z.mean() == pytest.approx(mean, abs=5 * std / np.sqrt(WIDE))
    assert z.std() == pytest.approx(std, rel=5 / np.sqrt(2 * WIDE) + bias)
    u = (z - z.mean()) / z.std()
    assert (u**3).mean() == pytest.approx(0, abs=5 * np.sqrt(6 / WIDE))
    assert (u**4).mean() == pytest.approx(3, abs=5 * np.sqrt(24 / WIDE))


@pytest.mark.parametrize(("gamma", "steps"), [pytest.param(0.02, 300, marks=pytest.mark.slow), (0.5, 12), (100.0, 1)])
def test_a_flat_loss_gives_the_population_for_every_step_size(gamma, steps):
    assert_gaussian(run_chain(lambda q, *_: 0 * q.mean.sum(), gamma, steps), 1.5, 0.7)


def quadratic(curvature, n=40.0, best=-1.0):
    """n·f = ½ curvature·(z − best)² in every coordinate."""
    return lambda q, *_: 0.5 * curvature / n * ((q.mean[1:] - best) ** 2).sum()


@pytest.mark.slow
def test_a_quadratic_loss_gives_the_posterior_for_a_small_step():
    curvature, gamma = 3.0, 0.004
    precision = 1 / 0.7**2 + curvature
    mean = (1.5 / 0.7**2 - 1.0 * curvature) / precision
    assert_gaussian(run_chain(quadratic(curvature), gamma, 300), mean, precision**-0.5, bias=gamma * precision)


def test_a_narrow_population_does_not_shift_the_posteriors_mean():
    """γ/s² = 10: the chain forgets at every step, and still its mean is the posterior's."""
    s, curvature = 0.1, 40.0
    mean = (1.5 / s**2 - 1.0 * curvature) / (1 / s**2 + curvature)
    z = run_chain(quadratic(curvature), 0.1, 60, s=s)
    assert z.mean() == pytest.approx(mean, abs=5 * s / np.sqrt(WIDE) * 2)


def test_the_population_is_the_moments_of_all_heads():
    g = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 4, 6, generator=g, dtype=torch.float64) + 2  # clients, M, head
    algorithm = FedPop(chain=4)
    shared = {"body": torch.zeros(2).double(), "mu": torch.ones(6).double(), "logstd": torch.zeros(6).double()}
    updates = [
        algorithm.end({"body": shared["body"] + i, "head": h[-1], "heads": h}, shared, {}, None, None)
        for i, h in enumerate(heads)
    ]
    mean = {name: torch.stack([u[name] for u, _ in updates]).mean(0) for name in updates[0][0]}
    merged = algorithm.merge(shared, mean, 5, 5)
    flat = heads.reshape(20, 6)
    close(merged["mu"], flat.mean(0))
    close(merged["logstd"], flat.std(0, unbiased=False).log())
    close(merged["body"], np.full(2, 2.0))
    assert all(torch.equal(kept["head"], h[-1]) for (_, kept), h in zip(updates, heads, strict=True))
    part = algorithm.merge(shared, mean, 5, 20)  # the other 15 are N(1, 1) still
    close(part["mu"], 0.75 + 0.25 * flat.mean(0))
    close((2 * part["logstd"]).exp(), 0.75 * 2 + 0.25 * (flat**2).mean(0) - part["mu"] ** 2)


def test_a_few_drawn_clients_do_not_narrow_a_population_that_the_data_leave_alone():
    """Heads drawn from the population itself, 5 of 50 clients a round: s stays, where 0.8^30 of s² would be left."""
    g = torch.Generator().manual_seed(1)
    algorithm, wide = FedPop(chain=1), 2000
    shared = {"body": torch.zeros(1).double(), "mu": torch.zeros(wide).double(), "logstd": torch.zeros(wide).double()}
    for _ in range(30):
        heads = shared["mu"] + shared["logstd"].exp() * torch.randn(5, wide, generator=g, dtype=torch.float64)
        second = ((heads - shared["mu"]) ** 2).mean(0)
        shared = algorithm.merge(shared, {"body": shared["body"], "mu": heads.mean(0), "second": second}, 5, 50)
    assert (2 * shared["logstd"]).exp().mean() == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_a_population_of_one_head_keeps_a_width_and_goes_on_learning():
    """One client and M = 1: the spread of a single head is 0, whatever the rounds."""
    algorithm = FedPop(lr=0.1, gamma=1e-3, burn=0, chain=1, floor=-5.0)
    fed = federation((9,))
    heads, losses = [], []
    for rounds in (1, 40):
        sim, lines = simulate(algorithm, rounds, fed=fed, participation=1)
        close(sim.shared["logstd"], [-5.0, -5.0], 0)
        heads.append(sim.shared["mu"]), losses.append(lines[-1]["loss"])
    assert all(torch.isfinite(t).all() for t in sim.shared.values()) and losses[1] < losses[0]
    assert (heads[1] - heads[0]).abs().max() > 0.03  # without a floor z is μ, and stays


@pytest.mark.slow
def test_the_personal_step_size_is_on_the_mean_loss():
    """γ = personal_lr/n: a client's own chain, and nothing of the rounds, depends on it."""
    words = {"lr": 0.1, "gamma": 0.004, "chain": 2, "nu0": -1.0, "personal_epochs": 3}
    sims = [simulate(FedPop(personal_lr=rate, **words))[0] for rate in (None, 0.02, 0.0)]
    for name in sims[0].shared:
        assert torch.equal(sims[0].shared[name], sims[1].shared[name])
    shared, heads = {k: v.numpy() for k, v in sims[1].shared.items()}, sims[1].kept_for(CLIENTS)["head"].numpy()
    for c in CLIENTS:
        visited = [heads[c]]
        for number, ((x, y),) in enumerate(tuning(c, 3)):
            key, s = key_of(rng.PERSONAL, 0, c, number), np.exp(shared["logstd"])
            rate = 0.02 / SIZES[c]
            visited.append(langevin(visited[-1], shared["body"], shared["mu"], s, SIZES[c], x, y, rate, key))
        close(models(sims[1]).weights[c], [[*shared["body"], *z] for z in visited[-2:]], 1e-10)
    assert (models(sims[0]).weights - models(sims[1]).weights).abs().max() > 1e-3
    close(models(sims[2]).weights[:, :, 1:], np.repeat(heads[:, None], 2, 1), 1e-14)  # 0: the chain stands still
