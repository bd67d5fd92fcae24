"""Ditto against a plain loop: the shared model is FedAvg's, the personal one the client's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml.algorithms import Ditto, FedAvg, Local
from fedabml.algorithms.base import Phase
from fedabml.engine.client import personalize
from fedabml.engine.lanes import Lanes
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    assert_apart,
    batches,
    close,
    descend,
    drawn,
    models,
    simulate,
    tuning,
)


class OwnFirst(Ditto):
    """The two phases the other way about: v_i then meets the minibatches that Local's w_i does."""

    def phases(self, epochs):
        return [Phase(epochs, self.own_step), Phase(epochs, self.step)]


@MOMENTA
def test_two_rounds_by_a_plain_loop(momentum):
    lr, lam = 0.1, 0.9
    sim, lines = simulate(Ditto(lr=lr, lam=lam, momentum=momentum, personal_epochs=0))
    w, own = START, [START] * 4
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            ends.append(descend(w, batches(c, t, 0), lr, momentum))
            own[c] = descend(own[c], batches(c, t, 1), lr, momentum, lambda v, w=w: lam * (v - w))  # towards w_t
        w = np.mean(ends, 0)
    close(sim.shared["mean"], w)
    close(models(sim).mean, own)  # v_i is scored, unchanged
    close(models(sim).mean[3], START, 0)  # never drawn
    assert set(sim.kept.states) == {0, 1, 2}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8)
    tuned = sim.cohort.using(Ditto(lr=lr, lam=lam, momentum=momentum, personal_epochs=2, personal_lr=0.03))
    with torch.no_grad():
        moved = personalize(Lanes.after_round(tuned, sim.shared, CLIENTS), sim.kept_for(CLIENTS)).mean
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
    """The same batches: full ones with plain Ditto, minibatches with its phases swapped."""
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
        algorithm = Ditto(lr=1 / lam, lam=lam, personal_epochs=0)
        sim, _ = simulate(algorithm, 1)
        gaps.append(np.abs(models(sim).mean[0].numpy() - START).max())
    assert gaps[1] < 1e-3 and gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)
