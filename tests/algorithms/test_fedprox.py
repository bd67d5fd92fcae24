"""FedProx against a plain loop, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml import rng
from fedabml.algorithms import FedAvg, FedProx, make
from fedabml.engine.plan import minibatches, sample
from fedabml.engine.simulate import Simulation

SIZES, BATCH, EPOCHS, SEED = (5, 9, 4, 2), 3, 2, 6  # this seed draws clients 0 and 1, then 0 and 2, and never 3
CLIENTS = range(len(SIZES))
START = np.array([0.75, -0.5, 0.25])  # a, h, b of y = h·a·x + b + N(0, 1): the body is a, the head h and b
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.7])


def federation(sizes=SIZES):
    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(n, 1)) + 1, g.normal(size=n) + i) for i, n in enumerate(sizes)]
    pairs = [(x.astype(np.float32), y.astype(np.float32)) for x, y in pairs]
    return fedabml.Federation.from_arrays(pairs, task="regression", normalize="none")


def simulate(algorithm, rounds=2, fed=None, **options):
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    nn.utils.vector_to_parameters(torch.tensor(START).float(), module.parameters())
    words = {
        "participation": 0.5, "epochs": EPOCHS, "batch_size": BATCH, "seed": SEED, "device": "cpu", "dtype": "float64",
        "likelihood": fedabml.GaussianNoise(1, 1.0, learn=False),
    }  # fmt: skip
    setup = fedabml.prepare(fed or federation(), module, algorithm, **(words | options))
    sim = Simulation(setup.cohort, participation=setup.participation, epochs=setup.epochs)
    return sim, sim.run(rounds)


def drawn(round):
    return sample(len(SIZES), 0.5, SEED, round)


def batches(client, round, phase=0, epochs=EPOCHS, purpose=rng.NOISE, per_step=1):
    """The very minibatches of a client, a list of (x, y) for every step."""
    fed = federation()
    plan = minibatches([fed.train[client]], [client], epochs, BATCH, per_step, (SEED, purpose, round, phase))
    rows = [[part[part >= 0] for part in step] for step in plan.rows[:, :, 0]]
    return [[(fed.x[r, 0].astype(float), fed.y[r, 0].astype(float)) for r in step] for step in rows]


def slope(w, x, y):
    """∇ of ½ mean (h·a·x + b − y)², by hand."""
    a, h, b = w
    r = h * a * x + b - y
    return np.array([(r * h * x).mean(), (r * a * x).mean(), r.mean()])


def descend(w, steps, lr, momentum=0.0, more=lambda w: 0.0, part=slice(None)):
    """Heavy-ball SGD on one batch a step; `more` is added to the gradient, `part` is what moves."""
    w, velocity = w.copy(), 0.0
    for ((x, y),) in steps:
        velocity = momentum * velocity + (slope(w, x, y) + more(w))[part]
        w[part] = w[part] - lr * velocity
    return w


def tuning(client, epochs):
    return batches(client, 0, epochs=epochs, purpose=rng.PERSONAL)


def models(sim):
    """Every client's own model, as it would be scored."""
    with torch.no_grad():
        return sim.cohort.personalise(sim.theta, sim.kept_for(CLIENTS), list(CLIENTS))


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


@MOMENTA
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_two_rounds_by_a_plain_loop(weights, momentum):
    algorithm = FedProx(lr=0.1, mu=0.8, momentum=momentum, weights=weights, personal_epochs=2, personal_lr=0.05)
    sim, lines = simulate(algorithm)
    w = START
    for t in (1, 2):
        ends = [descend(w, batches(c, t), 0.1, momentum, lambda v, w=w: 0.8 * (v - w)) for c in drawn(t)]
        w = np.average(ends, 0, [SIZES[c] if weights == "samples" else 1 for c in drawn(t)])
    close(sim.shared["mean"], w)
    assert [line["clients"] for line in lines] == [drawn(1), drawn(2)]
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8) and sim.kept.states == {}
    for c in CLIENTS:  # fine-tuning is plain: no pull
        close(models(sim).mean[c], descend(w, tuning(c, 2), 0.05, momentum))


def test_the_global_model_is_scored_without_personal_epochs():
    sim, _ = simulate(make("fedprox", lr=0.1))
    close(models(sim).mean, [sim.shared["mean"].numpy()] * 4, 0)


@MOMENTA
def test_without_a_pull_it_is_fedavg(momentum):
    a, b = (simulate(kind)[0] for kind in (FedProx(mu=0, momentum=momentum), FedAvg(momentum=momentum)))
    assert torch.equal(a.shared["mean"], b.shared["mean"]) and torch.equal(models(a).mean, models(b).mean)
    assert not torch.equal(simulate(FedProx(momentum=momentum))[0].shared["mean"], b.shared["mean"])


def test_a_strong_pull_holds_the_weights():
    """At η ~ 1/μ the steps settle where ∇f = −μ(w − w_t): the move is of order 1/μ."""
    sims = [simulate(FedProx(lr=0.5 / mu, mu=mu), 1)[0] for mu in (1e3, 1e4)]
    moved = [np.abs(sim.shared["mean"].numpy() - START).max() for sim in sims]
    assert 0 < moved[1] < 1e-3 and moved[0] / moved[1] == pytest.approx(10, rel=0.05)
