"""SCAFFOLD against a plain loop, its limits, and the fixed point that control variates are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedabml
from fedabml import rng
from fedabml.algorithms import FedAvg, Scaffold, make
from fedabml.algorithms.base import Site
from fedabml.gaussian import Point
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    SIZES,
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


@MOMENTA
@pytest.mark.parametrize(("server_lr", "weights"), [(1.0, "uniform"), (0.6, "samples")])
def test_three_rounds_by_a_plain_loop(server_lr, weights, momentum):
    lr, clients, by_samples = 0.1, len(SIZES), weights == "samples"
    algorithm = Scaffold(
        lr=lr, server_lr=server_lr, weights=weights, momentum=momentum, personal_epochs=2, personal_lr=None
    )
    sim, lines = simulate(algorithm, 3)
    x, c, own = START, np.zeros(3), np.zeros((clients, 3))
    for t in (1, 2, 3):
        moves, changes = [], []
        for i in drawn(t):
            steps = batches(i, t)
            y = descend(x, steps, lr, momentum, lambda _, i=i: c - own[i])
            new = own[i] - c + (x - y) / (len(steps) * lr / (1 - momentum))
            moves.append(y - x), changes.append(new - own[i])
            own[i] = new
        x = x + server_lr * np.average(moves, 0, [SIZES[i] for i in drawn(t)] if by_samples else None)
        c = c + len(drawn(t)) / clients * np.mean(changes, 0)
    close(sim.shared["mean"], x)
    close(sim.shared["control"], c)
    close(c, own.mean(0))  # what the server's rule is for, whatever the weights of the moves
    for i in CLIENTS:
        close(sim.kept_for(CLIENTS)["control"][i], own[i])
        close(models(sim).mean[i], descend(x, tuning(i, 2), lr, momentum))  # plain: no control variates
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (6 * 8, (6 + by_samples) * 8)


@pytest.mark.parametrize("name", ["scaffold", "scaffold-ft"])
def test_a_step_size_of_0_is_refused(name):
    """c_i⁺ divides by it; a tiny one is fine."""
    with pytest.raises(fedabml.InputError, match=r"'lr' .*must be at least 1e-12"):
        make(name, lr=0)
    sim, _ = simulate(make(name, lr=1e-12, personal_epochs=0))
    assert all(torch.isfinite(t).all() for t in sim.shared.values()) and sim.shared["control"].abs().max() > 0.01


def test_clients_keep_their_own_control_variates_and_one_never_drawn_keeps_zero():
    sim, _ = simulate(Scaffold(lr=0.1))
    assert set(sim.kept.states) == {0, 1, 2}
    close(sim.kept_for(CLIENTS)["control"][3], np.zeros(3), 0)
    assert_apart(sim)


def test_the_global_model_is_scored_without_personal_epochs():
    sim, _ = simulate(make("scaffold", lr=0.1))
    close(models(sim).mean, [sim.shared["mean"].numpy()] * 4, 0)


@MOMENTA
def test_with_identical_clients_and_full_batches_it_is_fedavg(momentum):
    g = np.random.default_rng(1)
    pair = g.normal(size=(6, 1)).astype(np.float32), g.normal(size=6).astype(np.float32)
    fed = fedabml.Federation.from_arrays([pair] * 3, task="regression", normalize="none")
    options = {"rounds": 4, "fed": fed, "participation": 1, "batch_size": 6, "epochs": 3}
    a, b = (simulate(kind(lr=0.1, momentum=momentum), **options)[0] for kind in (Scaffold, FedAvg))
    close(a.shared["mean"], b.shared["mean"])
    assert a.shared["control"].abs().max() > 0.01  # though c itself is not zero


def test_the_first_round_is_fedavg_and_the_second_is_not():
    a, b = (simulate(kind(lr=0.1), 1)[0].shared["mean"] for kind in (Scaffold, FedAvg))
    close(a, b, 1e-14)
    a, b = (simulate(kind(lr=0.1), 2)[0].shared["mean"] for kind in (Scaffold, FedAvg))
    assert (a - b).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.nightly), 0.5])
def test_two_quadratics_settle_at_the_optimum_of_their_mean(momentum):
    """FedAvg with ten steps a round at lr 10^−1.5 settles 2.245 away from x*; SCAFFOLD goes to x*."""
    one = torch.ones(2, 2).double()
    a = [torch.diag(torch.tensor(d).double()) - 1.5 * one for d in ([2.0, 15.0], [15.0, 2.0])]
    b = [torch.tensor(v).double() for v in ([5.0, 10.0], [10.0, 5.0])]
    best = torch.linalg.solve(a[0] + a[1], b[0] + b[1])
    close(best, [15 / 11, 15 / 11])
    losses = [lambda q, *_, i=i: 0.5 * q.mean @ a[i] @ q.mean - b[i] @ q.mean for i in (0, 1)]
    far = {}
    for kind in (Scaffold, FedAvg):
        algorithm = kind(lr=10**-1.5 * (1 - momentum), momentum=momentum)
        shared = algorithm.init(torch.zeros(2).double(), None)
        site, key = Site(torch.tensor(1.0), torch.empty(0)), rng.key(0)
        kept = [algorithm.keep(shared["mean"], shared, site, key) for _ in losses]
        for _ in range(60 if kind is FedAvg else 150):
            updates = []
            for i, loss in enumerate(losses):
                carry = algorithm.begin(shared, kept[i], site, key)
                for _ in range(10):
                    carry, _ = algorithm.step(carry, shared, (None,), site, key, loss)
                update, kept[i] = algorithm.end(carry, shared, kept[i], site, torch.tensor(10.0))
                updates.append(update)
            mean = {k: (updates[0][k] + updates[1][k]) / 2 for k in updates[0]}
            shared = algorithm.merge(shared, mean, 2, 2)
        far[kind] = (shared["mean"] - best).norm().item()
        assert isinstance(algorithm.own_model(algorithm.personal(shared, kept[0], site, key)), Point)
    assert far[Scaffold] < 1e-6
    assert far[FedAvg] == pytest.approx(2.245, abs=1e-3) if momentum == 0 else far[FedAvg] > 1
