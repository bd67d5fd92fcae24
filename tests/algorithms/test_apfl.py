"""APFL against a plain loop; with α fixed at 0 it is FedAvg, at 1 Local only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import APFL, FedAvg, Local
from fedabml.algorithms.base import Site
from fedabml.engine.client import personalize
from fedabml.engine.lanes import Lanes
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    assert_apart,
    batches,
    close,
    drawn,
    models,
    simulate,
    slope,
    tuning,
)


def train(w, v, alpha, steps, lr, rate, momentum, every, still=False):
    """The steps of w, v and α on the same minibatches, each from the values before it."""
    vw = vv = 0.0
    for number, ((x, y),) in enumerate(steps):
        g = slope(alpha * v + (1 - alpha) * w, x, y)
        vw, vv = momentum * vw + slope(w, x, y), momentum * vv + alpha * g
        if every == "batch" or number == 0:
            alpha = float(np.clip(alpha - rate * (v - w) @ g, 0, 1))
        w, v = w if still else w - lr * vw, v - lr * vv
    return w, v, alpha


@MOMENTA
@pytest.mark.parametrize(("alpha_lr", "every"), [(None, "round"), (0.4, "round"), (0.0, "batch"), (None, "batch")])
@pytest.mark.slow
def test_two_rounds_by_a_plain_loop(alpha_lr, every, momentum):
    lr = 0.1
    rate = lr if alpha_lr is None else alpha_lr
    words = {"lr": lr, "alpha": 0.6, "alpha_lr": alpha_lr, "alpha_every": every, "momentum": momentum}
    sim, lines = simulate(APFL(**words))
    w, own = START, [(START, 0.6)] * 4
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            end, *own[c] = train(w, *own[c], batches(c, t), lr, rate, momentum, every)
            ends.append(end)
        w = np.mean(ends, 0)
    close(sim.shared["mean"], w)
    for c in CLIENTS:
        v, alpha = own[c]
        close(sim.kept_for(CLIENTS)["mean"][c], v)
        close(sim.kept_for(CLIENTS)["alpha"][c], alpha)
        close(models(sim).mean[c], alpha * v + (1 - alpha) * w)  # the mixture is scored, with the w of now
    close(models(sim).mean[3], 0.6 * START + 0.4 * w)  # never drawn
    assert set(sim.kept.states) == {0, 1, 2}
    assert (len({float(alpha) for _, alpha in own}) > 1) == (alpha_lr != 0)
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8)

    tuned = sim.cohort.using(APFL(personal_epochs=2, personal_lr=0.03, **words))
    with torch.no_grad():
        moved = personalize(Lanes.after_round(tuned, sim.shared, CLIENTS), sim.kept_for(CLIENTS)).mean
    for c in CLIENTS:  # further epochs move v_i and α_i under the w that was sent
        rate = 0.03 if alpha_lr is None else alpha_lr
        _, v, alpha = train(w, *own[c], tuning(c, 2), 0.03, rate, momentum, every, still=True)
        close(moved[c], alpha * v + (1 - alpha) * w)


def test_a_round_by_hand():
    """f = ½(u − 3)², w = 1, v = 2, α = ½, η = 0.1, so v̄ = 1.5 and ∇f(v̄) = −1.5; then v̄ = 1.76875."""
    algorithm = APFL(lr=0.1, alpha=0.5, alpha_every="batch")
    shared, kept = {"mean": torch.tensor([1.0]).double()}, {"mean": torch.tensor([2.0]).double()}
    kept["alpha"] = torch.tensor(0.5).double()
    site, key = Site(torch.tensor(1.0), torch.empty(0)), rng.key(0)
    loss = lambda q, *_: 0.5 * ((q.mean - 3) ** 2).sum()
    carry = algorithm.begin(shared, kept, site, key)
    for w, v, alpha in [(1.2, 2.075, 0.65), (1.38, 2.15503125, 0.757734375)]:
        carry, _ = algorithm.step(carry, shared, (None,), site, key, loss)
        update, own = algorithm.end(carry, shared, kept, site, torch.tensor(1.0))
        close([update["mean"].item(), own["mean"].item(), own["alpha"].item()], [w, v, alpha], 1e-6)
    once = dataclasses.replace(algorithm, alpha_every="round")  # v̄ is the same in the second step, α is not
    carry = once.begin(shared, kept, site, key)
    for _ in range(2):
        carry, _ = once.step(carry, shared, (None,), site, key, loss)
    close([carry["own.mean"].item(), carry["alpha"].item()], [2.15503125, 0.65], 1e-6)
    assert update.keys() == {"mean"}
    close(algorithm.own_model(carry).mean, [0.65 * v + 0.35 * w], 1e-6)


@pytest.mark.parametrize(("v", "alpha"), [(9.0, 0.0), (-9.0, 1.0)])
def test_alpha_stays_between_0_and_1(v, alpha):
    algorithm = APFL(lr=10.0, alpha=0.5)
    carry = {
        "turn": torch.tensor(1.0),
        "mean": torch.zeros(1).double(),
        "own.mean": torch.tensor([v]).double(),
        "alpha": torch.tensor(0.5).double(),
    }
    loss = lambda q, *_: q.mean.sum()  # a slope of 1: what lies ahead is worse
    assert algorithm.step(carry, {}, (None,), None, rng.key(0), loss)[0]["alpha"] == alpha


@pytest.mark.slow
def test_kept_models_are_apart():
    assert_apart(simulate(APFL(lr=0.1))[0])


@MOMENTA
def test_the_shared_model_is_fedavg_and_alpha_0_scores_it(momentum):
    plain = simulate(FedAvg(lr=0.1, momentum=momentum, personal_epochs=0))[0]
    for alpha in (0.0, 0.5):
        sim, _ = simulate(APFL(lr=0.1, momentum=momentum, alpha=alpha, alpha_lr=0.0))
        assert torch.equal(sim.shared["mean"], plain.shared["mean"])
    sim, _ = simulate(APFL(lr=0.1, momentum=momentum, alpha=0.0, alpha_lr=0.0, personal_epochs=1))
    assert torch.equal(models(sim).mean, models(plain).mean)
    close(sim.kept_for(CLIENTS)["mean"], [START] * 4, 0)  # v has no share, so it does not move


@MOMENTA
def test_alpha_1_is_local_only(momentum):
    words = {"lr": 0.1, "momentum": momentum, "personal_epochs": 1}
    a, b = (simulate(x, 3)[0] for x in (APFL(alpha=1.0, alpha_lr=0.0, **words), Local(**words)))
    assert a.kept.states.keys() == b.kept.states.keys()
    for c in a.kept.states:
        close(a.kept.states[c]["mean"], b.kept.states[c]["mean"], 1e-14)
    close(models(a).mean, models(b).mean, 1e-14)
    assert (a.shared["mean"] - models(a).mean).abs().max() > 0.01
