"""The problem that the rivals' plain loops share: four clients of y = h·a·x + b, by the engine or by hand in numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml import rng
from fedabml.engine.client import personalize
from fedabml.engine.lanes import Lanes
from fedabml.engine.rounds import Simulation
from fedabml.engine.server import draw_clients
from tests.engine.plans import plan_of

SIZES, BATCH, EPOCHS, SEED = (5, 9, 4, 2), 3, 2, 6  # this seed draws clients 0 and 1, then 0 and 2, and never 3
CLIENTS = range(len(SIZES))
START = np.array([0.75, -0.5, 0.25])  # a, h, b of y = h·a·x + b + N(0, 1): the body is a, the head h and b
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.7])


def federation(sizes=SIZES):
    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(n, 1)) + 1, g.normal(size=n) + i) for i, n in enumerate(sizes)]
    pairs = [(x.astype(np.float32), y.astype(np.float32)) for x, y in pairs]
    return fedabml.Federation.from_arrays(pairs, task="regression", normalize="none")


def simulate(algorithm, rounds=2, fed=None, newcomer="initial", **options):
    """Train by the engine. A client without kept state begins at START, as in the plain loops, or at the server's."""
    if hasattr(algorithm, "newcomer"):
        algorithm = dataclasses.replace(algorithm, newcomer=newcomer)
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    nn.utils.vector_to_parameters(torch.tensor(START).float(), module.parameters())
    words = {
        "participation": 0.5, "epochs": EPOCHS, "batch_size": BATCH, "seed": SEED, "device": "cpu", "dtype": "float64",
        "likelihood": fedabml.GaussianNoise(1, 1.0, learn=False),
    }  # fmt: skip
    setup = fedabml.prepare(fed or federation(), module, algorithm, **(words | options))
    sim = Simulation(setup.cohort)
    return sim, sim.run(rounds)


def drawn(round):
    return draw_clients(len(SIZES), 0.5, SEED, round)


def batches(client, round, phase=0, epochs=EPOCHS, purpose=rng.NOISE, per_step=1):
    """The very minibatches of a client, a list of (x, y) for every step."""
    fed = federation()
    plan = plan_of([fed.train[client]], [client], epochs, BATCH, per_step, (SEED, purpose, round, phase))
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
        return personalize(Lanes.after_round(sim.cohort, sim.theta, CLIENTS), sim.kept_for(CLIENTS))


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def assert_apart(sim):
    """No kept tensor shares memory with another, with what is shared, or with the initial weights."""
    place = lambda t: t.untyped_storage().data_ptr()
    kept = [place(t) for own in sim.kept.states.values() for t in own.values()]
    others = [place(t) for t in (*sim.shared.values(), *sim.server.average.values(), sim.cohort.network.initial)]
    assert kept and len(set(kept)) == len(kept) and not set(kept) & set(others)
    one, *rest = sim.kept.states
    before = [{k: t.clone() for k, t in sim.kept.states[c].items()} for c in rest]
    for t in sim.kept.states[one].values():
        t += 100
    assert all(torch.equal(t, b[k]) for c, b in zip(rest, before, strict=True) for k, t in sim.kept.states[c].items())
