"""FedProx against a plain loop, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedabml.algorithms import FedAvg, FedProx, make
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    SIZES,
    START,
    batches,
    close,
    descend,
    drawn,
    models,
    simulate,
    tuning,
)


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
