"""FOLA against a plain loop and against Gaussians that are known: MAP estimates, their curvature, their product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import FOLA, FedAvg
from fedabml.algorithms.base import Batch, Site
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    SIZES,
    START,
    batches,
    close,
    drawn,
    models,
    simulate,
    slope,
    tuning,
)

SITE, KEY = Site(torch.tensor(4.0), torch.empty(0)), rng.key(5)
ROWS = (Batch(None, None, torch.ones(4).double()),)


def train(start, kappa, steps, lr, momentum):
    """MAP steps with the prior's pull taken implicitly, and the mean of |B|·g², by rows."""
    w, velocity, curved, rows = start, 0.0, 0.0, 0
    for ((x, y),) in steps:
        g = slope(w, x, y)
        velocity = momentum * velocity + g
        curved, rows = curved + len(x) * len(x) * g**2, rows + len(x)
        far = lr / (1 - momentum)
        w = (w - lr * velocity + far * kappa * start) / (1 + far * kappa)
    return w, curved / rows


@MOMENTA
@pytest.mark.parametrize(("memory", "weights"), [(1.0, "uniform"), (0.4, "samples"), (0.0, "uniform")])
def test_three_rounds_by_a_plain_loop(memory, weights, momentum):
    lr, lam, eps = 0.1, 0.3, 0.01
    words = {"lam": lam, "eps": eps, "memory": memory, "weights": weights, "momentum": momentum}
    sim, lines = simulate(FOLA(lr=lr, personal_epochs=2, personal_lr=0.03, **words), 3)
    mean, precision, rounds = START, np.full(3, eps), 1.0
    for t in (1, 2, 3):
        ends = [train(mean, lam * precision / rounds, batches(c, t), lr, momentum) for c in drawn(t)]
        share = np.array([SIZES[c] if weights == "samples" else 1 for c in drawn(t)], float)[:, None]
        own = np.array([eps + memory * (precision - eps) + curved for _, curved in ends])
        points = np.array([w for w, _ in ends])
        mean = (share * own * points).sum(0) / (share * own).sum(0)
        precision, rounds = (share * own).sum(0) / share.sum(), memory * rounds + 1
    close(sim.shared["mean"], mean, 1e-10)
    close(sim.shared["precision"], precision, 1e-10)
    close(sim.shared["rounds"], rounds)
    assert rounds == {1.0: 4, 0.0: 1}.get(memory, rounds) and not sim.kept.states
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == ((2 * 3 + 1) * 8, 2 * 3 * 8)
    for c in CLIENTS:  # a MAP estimate under the server's Gaussian
        close(models(sim).mean[c], train(mean, lam * precision / rounds, tuning(c, 2), 0.03, momentum)[0], 1e-10)


def test_the_server_multiplies_gaussians():
    g = np.random.default_rng(0)
    means, own, old = g.normal(size=(5, 4)), g.uniform(0.1, 9, size=(5, 4)), g.normal(size=4)
    share = g.uniform(size=5)
    share /= share.sum()
    algorithm = FOLA(memory=1.0, eps=1e-12)
    shared = {"mean": torch.tensor(old), "precision": torch.full((4,), 1e-12).double(), "rounds": torch.tensor(1.0)}
    total = {"precision": 0, "moved": 0}
    for w, m, c in zip(share, means, own, strict=True):
        carry = {"mean": torch.tensor(m), "curved": torch.tensor(3 * c), "rows": torch.tensor(3.0)}
        update, kept = algorithm.end(carry, shared, {}, SITE, None)
        assert kept == {}
        total = {name: total[name] + w * update[name] for name in total}
    merged = algorithm.merge(shared, total, 5, 5)
    weighed = share[:, None] * own
    close(merged["precision"], weighed.sum(0), 1e-9)
    close(merged["mean"], (weighed * means).sum(0) / weighed.sum(0), 1e-9)


def fit(algorithm, shared, loss, steps):
    """A client's round, without an engine."""
    carry = algorithm.begin(shared, {}, SITE, KEY)
    for t in range(steps):
        carry, _ = algorithm.step(carry, shared, ROWS, SITE, rng.fold(KEY, t), loss)
    return carry, algorithm.end(carry, shared, {}, SITE, torch.tensor(float(steps)))[0]


def quadratic(a, b):
    """f = ½ Σ a(w − b)², the −log of a Gaussian likelihood."""
    return lambda q, *_: 0.5 * (torch.tensor(a) * (q.mean - torch.tensor(b)) ** 2).sum()


@pytest.mark.slow
def test_one_round_on_gaussians_is_exact():
    """Likelihoods N(b_i, 1/a_i): the product of the clients' posteriors has its mode at Σ a_i b_i / Σ a_i."""
    a, b = np.array([[1.0, 9.0], [4.0, 0.5], [2.0, 2.0]]), np.array([[3.0, -1.0], [0.0, 5.0], [1.0, 1.0]])
    algorithm = FOLA(lr=0.1, curvature="hessian", eps=1e-12)
    shared = algorithm.init(torch.zeros(2).double(), None)
    updates = [fit(algorithm, shared, quadratic(*pair), 500)[1] for pair in zip(a, b, strict=True)]
    mean = {name: torch.stack([u[name] for u in updates]).mean(0) for name in updates[0]}
    merged = algorithm.merge(shared, mean, 3, 3)
    close(merged["precision"], a.mean(0), 1e-9)
    close(merged["mean"], (a * b).sum(0) / a.sum(0), 1e-9)
    averaged = np.mean(b, 0)  # FedAvg's answer, which is another
    assert np.abs(averaged - (a * b).sum(0) / a.sum(0)).max() > 0.5


@pytest.mark.parametrize(
    ("momentum", "lam"),
    [
        (0.0, 0.5),
        pytest.param(0.6, 0.5, marks=pytest.mark.slow),
        pytest.param(0.0, 1e9, marks=pytest.mark.slow),
        pytest.param(0.6, 1e9, marks=pytest.mark.nightly),
    ],
)
def test_a_client_finds_its_map_estimate_however_strong_the_prior(lam, momentum):
    a, b, centre, prior = np.array([1.0, 4.0]), np.array([3.0, -1.0]), np.array([0.5, 0.5]), np.array([2.0, 30.0])
    algorithm = FOLA(lr=0.1, lam=lam, momentum=momentum, curvature="hessian")
    shared = {"mean": torch.tensor(centre), "precision": torch.tensor(prior), "rounds": torch.tensor(4.0).double()}
    carry, update = fit(algorithm, shared, quadratic(a, b), 2000 if lam > 1 else 400)
    kappa = lam * prior / 4
    close(carry["mean"], (a * b + kappa * centre) / (a + kappa), 1e-9)
    close(update["precision"], prior + a, 1e-9)


@pytest.mark.slow
@pytest.mark.nightly
def test_probes_give_the_diagonal_of_the_hessian():
    a = torch.tensor([[3.0, 1.0, -0.5], [1.0, 2.0, 0.3], [-0.5, 0.3, 1.0]]).double()
    algorithm, w = FOLA(curvature="hessian"), torch.ones(3).double()
    loss = lambda q, *_: 0.5 * q.mean @ a @ q.mean
    looks = [algorithm.gradient_and_curvature(w, ROWS[0], rng.fold(KEY, t), loss) for t in range(4000)]
    close(torch.stack([curvature for _, curvature, _ in looks]).mean(0), a.diagonal(), 0.1)
    close(looks[0][0], a @ w)
    close(looks[0][2], 0.5 * w @ a @ w)


def test_precision_is_positive_where_the_loss_is_flat_or_bends_down():
    algorithm = FOLA(lr=0.01, curvature="hessian", eps=1e-4)
    shared = algorithm.init(torch.ones(3).double(), None)
    _, update = fit(algorithm, shared, quadratic([0.0, -3.0, 2.0], [0.0, 0.0, 0.0]), 5)
    close(update["precision"], [1e-4, 1e-4, 2 + 1e-4])
    merged = algorithm.merge(shared, update, 1, 1)
    assert torch.isfinite(merged["mean"]).all() and merged["mean"][0] == 1  # nothing known, nothing moved


@MOMENTA
def test_without_a_prior_and_with_equal_precisions_it_is_fedavg(momentum):
    plain = simulate(FedAvg(lr=0.1, momentum=momentum))[0].shared["mean"]
    even = simulate(FOLA(lr=0.1, momentum=momentum, lam=0.0, eps=1e9))[0].shared["mean"]
    close(even, plain, 1e-6)
    assert (simulate(FOLA(lr=0.1, momentum=momentum, lam=0.0))[0].shared["mean"] - plain).abs().max() > 1e-3
