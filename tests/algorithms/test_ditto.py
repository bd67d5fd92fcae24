"""Ditto against a plain loop: the shared model is FedAvg's, the personal one the client's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml import rng
from fedabml.algorithms import Ditto, FedAvg, Local
from fedabml.algorithms.base import Phase
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


def assert_apart(sim):
    """No kept tensor shares memory with another, with what is shared, or with the initial weights."""
    place = lambda t: t.untyped_storage().data_ptr()
    kept = [place(t) for own in sim.kept.states.values() for t in own.values()]
    others = [place(t) for t in (*sim.shared.values(), *sim.average.values(), sim.cohort.network.initial)]
    assert kept and len(set(kept)) == len(kept) and not set(kept) & set(others)
    one, *rest = sim.kept.states
    before = [{k: t.clone() for k, t in sim.kept.states[c].items()} for c in rest]
    for t in sim.kept.states[one].values():
        t += 100
    assert all(torch.equal(t, b[k]) for c, b in zip(rest, before, strict=True) for k, t in sim.kept.states[c].items())


class OwnFirst(Ditto):
    """The two phases the other way about: v_i then meets the minibatches that Local's w_i does."""

    def phases(self, epochs):
        return [Phase(epochs, self.own_step), Phase(epochs, self.step)]


@MOMENTA
def test_two_rounds_by_a_plain_loop(momentum):
    lr, lam = 0.1, 0.9
    sim, lines = simulate(Ditto(lr=lr, lam=lam, momentum=momentum))
    w, own = START, [START] * 4
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            ends.append(descend(w, batches(c, t, 0), lr, momentum))
            own[c] = descend(own[c], batches(c, t, 1), lr, momentum, lambda v, w=w: lam * (v - w))  # towards w_t
        w = np.mean(ends, 0)
    close(sim.shared["mean"], w)
    close(models(sim).mean, own)  # v_i is scored, as it is
    close(models(sim).mean[3], START, 0)  # never drawn
    assert set(sim.kept.states) == {0, 1, 2}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8)
    tuned = sim.cohort.using(Ditto(lr=lr, lam=lam, momentum=momentum, personal_epochs=2, personal_lr=0.03))
    with torch.no_grad():
        moved = tuned.personalise(sim.shared, sim.kept_for(CLIENTS), list(CLIENTS)).mean
    for c in CLIENTS:  # and further epochs go on with v_i, the pull included
        close(moved[c], descend(own[c], tuning(c, 2), 0.03, momentum, lambda v: lam * (v - w)))


def test_kept_models_are_apart():
    assert_apart(simulate(Ditto(lr=0.1))[0])


@MOMENTA
def test_the_shared_model_is_fedavg_whatever_the_personal_one_does(momentum):
    plain = simulate(FedAvg(lr=0.1, momentum=momentum))[0].shared["mean"]
    for lam in (0.0, 5.0):
        assert torch.equal(simulate(Ditto(lr=0.1, lam=lam, momentum=momentum))[0].shared["mean"], plain)


@MOMENTA
@pytest.mark.parametrize("kind", [Ditto, OwnFirst])
def test_without_a_pull_it_is_local_only(kind, momentum):
    """The same batches: full ones with Ditto as it is, minibatches with its phases swapped."""
    options = {"batch_size": 9} if kind is Ditto else {}
    a, b = (
        simulate(kind(lr=0.1, momentum=momentum, personal_epochs=e, **more), 3, **options)[0]
        for kind, e, more in ((kind, 1, {"lam": 0.0}), (Local, 1, {}))
    )
    assert a.kept.states.keys() == b.kept.states.keys()
    for c in a.kept.states:
        close(a.kept.states[c]["mean"], b.kept.states[c]["mean"])
    close(models(a).mean, models(b).mean)
    assert (a.shared["mean"] - models(a).mean).abs().max() > 0.01


def test_a_strong_pull_holds_the_personal_model_at_w():
    gaps = []
    for lam in (1e3, 1e4):  # at η = 1/λ a step sets v to w_t − η∇f(v)
        algorithm = Ditto(lr=1 / lam, lam=lam)
        sim, _ = simulate(algorithm, 1)
        gaps.append(np.abs(models(sim).mean[0].numpy() - START).max())
    assert gaps[1] < 1e-3 and gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)
