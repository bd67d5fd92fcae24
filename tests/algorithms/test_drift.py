"""Local steps corrected for drift: against a plain loop, by hand, and the fixed point that control variates are for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedabml
from fedabml import FedABML, rng
from fedabml.algorithms import PFedBayes
from fedabml.algorithms.base import Batch, Site
from fedabml.experiments.cell import Cell
from fedabml.runs.config import RunConfig
from tests.algorithms.problem import CLIENTS, MOMENTA, SIZES, START, assert_apart, batches, close, drawn, models, slope
from tests.algorithms.problem import simulate as engine

KEY = rng.key(0)
WHOLE = Batch(torch.empty(1), torch.empty(1), torch.ones(1).double())
POINT = {"posterior": "point", "lr": 0.1, "average": 0.0, "server_momentum": 0.0}
KINDS = pytest.mark.parametrize("drift", ["control", "server"])


def local(w, steps, n, lr, momentum, turn):
    """Heavy-ball SGD, a short minibatch's step by its rows: where it ends, and Σ η/(1 − momentum)."""
    w, velocity, way = w.copy(), 0.0, 0.0
    for ((x, y),) in steps:
        velocity = momentum * velocity + turn(slope(w, x, y))
        rate = lr * len(x) / min(3, n)
        w, way = w - rate * velocity, way + rate / (1 - momentum)
    return w, way


@MOMENTA
@pytest.mark.parametrize(("rho", "weights"), [(1.0, "uniform"), (1.5, "samples")])
@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_control_variates_by_a_plain_loop(rho, weights, momentum, backend):
    share, by_samples = 0.6, weights == "samples"
    words = POINT | {"rho": rho, "weights": weights, "momentum": momentum}
    sim, lines = engine(FedABML(drift="control", drift_share=share, **words), 3, backend=backend)
    m, c, own = START, np.zeros(3), np.zeros((len(SIZES), 3))
    for t in (1, 2, 3):
        moves, changes = [], []
        for i in drawn(t):
            turn = lambda g, i=i: g + share * (c - own[i])
            end, way = local(m, batches(i, t), SIZES[i], 0.1, momentum, turn)
            new = (m - end) / way - share * (c - own[i])
            moves.append(end - m), changes.append(new - own[i])
            own[i] = new
        m = m + rho * np.average(moves, 0, [SIZES[i] for i in drawn(t)] if by_samples else None)
        c = c + len(drawn(t)) / len(SIZES) * np.mean(changes, 0)
    close(sim.shared["mean"], m)
    close(sim.shared["control"], c)
    close(c, own.mean(0))
    close(sim.kept_for(CLIENTS)["control"], own)
    assert set(sim.kept.states) == {i for t in (1, 2, 3) for i in drawn(t)} and np.abs(own).max() > 0.1
    assert_apart(sim)
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (6 * 8, (6 + by_samples) * 8)


@MOMENTA
@pytest.mark.parametrize(("rho", "weights"), [(1.0, "uniform"), (1.5, "samples")])
@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_the_servers_direction_by_a_plain_loop(rho, weights, momentum, backend):
    share = 0.6
    words = POINT | {"rho": rho, "weights": weights, "momentum": momentum}
    sim, lines = engine(FedABML(drift="server", drift_share=share, **words), 3, backend=backend)
    m, c = START, np.zeros(3)
    for t in (1, 2, 3):
        turn = lambda g, c=c: (1 - share) * g + share * c
        ends = [local(m, batches(i, t), SIZES[i], 0.1, momentum, turn) for i in drawn(t)]
        p = [SIZES[i] for i in drawn(t)] if weights == "samples" else None
        moved, way = np.average([e - m for e, _ in ends], 0, p), np.average([w for _, w in ends], 0, p)
        m, c = m + rho * moved, -moved / way
    close(sim.shared["mean"], m)
    close(sim.shared["control"], c)
    assert not sim.kept.states and np.abs(c).max() > 0.1
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (6 * 8, 4 * 8)


# -- the fixed point -----------------------------------------------------------------------------------------------
ONE = torch.ones(2, 2).double()
HESSIANS = [torch.diag(torch.tensor(d).double()) - 1.5 * ONE for d in ([2.0, 15.0], [15.0, 2.0])]
SLOPES = [torch.tensor(v).double() for v in ([5.0, 10.0], [10.0, 5.0])]
LOSSES = [lambda q, *_, i=i: 0.5 * q.mean @ HESSIANS[i] @ q.mean - SLOPES[i] @ q.mean for i in (0, 1)]
BEST = torch.linalg.solve(HESSIANS[0] + HESSIANS[1], SLOPES[0] + SLOPES[1])
SITE = Site(torch.tensor(20.0).double(), torch.empty(0))


def settled(algorithm, steps, rounds):
    """Where the rounds of two clients with other optima settle, for given numbers of steps."""
    shared = algorithm.init(torch.zeros(2).double(), None)
    kept = [algorithm.keep(shared["mean"], shared, SITE, KEY) for _ in LOSSES]
    velocity = {}
    for _ in range(rounds):
        updates = []
        for i, loss in enumerate(LOSSES):
            carry = algorithm.begin(shared, kept[i], SITE, KEY)
            for _ in range(steps):
                carry, _ = algorithm.step(carry, shared, (WHOLE,), SITE, KEY, loss)
            update, kept[i] = algorithm.end(carry, shared, kept[i], SITE, torch.tensor(float(steps)))
            updates.append(update)
        mean = {k: (updates[0][k] + updates[1][k]) / 2 for k in updates[0]}
        shared, velocity = algorithm.apply_server_momentum(shared, algorithm.merge(shared, mean, 2, 2), velocity)
    return shared, kept


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["gaussian", "point"])
@pytest.mark.parametrize("steps", [1, 5, pytest.param(10, marks=pytest.mark.nightly)])
def test_control_variates_settle_at_the_optimum_of_all_whatever_the_number_of_steps(steps, posterior):
    """And whatever λ, ρ and β: the KL's pull is 0 at the prior's mean."""
    words = {"lr": 10**-1.5, "lam": 0.5, "nu0": -1.0, "posterior": posterior, "rho": 1.2, "server_momentum": 0.2}
    shared, kept = settled(FedABML(drift="control", drift_share=1.0, **words), steps, 150)
    assert (shared["mean"] - BEST).abs().max() < 1e-6
    for i in (0, 1):  # c_i is the client's gradient there, and c their mean, 0
        torch.testing.assert_close(kept[i]["control"], HESSIANS[i] @ BEST - SLOPES[i], rtol=0, atol=1e-5)
    assert shared["control"].abs().max() < 1e-5
    plain, _ = settled(FedABML(**words), steps, 60)
    assert ((plain["mean"] - BEST).abs().max() < 1e-6) == (steps == 1)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_part_of_the_correction_takes_a_part_of_the_drift():
    kinds = [FedABML(drift="control", drift_share=a, lr=10**-1.5, posterior="point") for a in (0.0, 0.5, 1.0)]
    far = [(settled(kind, 10, 120)[0]["mean"] - BEST).norm().item() for kind in kinds]
    assert far[0] > 1.2 * far[1] and far[1] > 0.1 and far[2] < 1e-6


@pytest.mark.slow
def test_the_servers_direction_drifts_as_a_shorter_step_does():
    """At rest c = 0, and (1 − α) g is what is left: a shorter step's fixed point."""
    words = {"posterior": "point", "server_momentum": 0.0}
    turned, _ = settled(FedABML(drift="server", drift_share=0.6, lr=0.02, **words), 10, 80)
    short, _ = settled(FedABML(lr=0.4 * 0.02, **words), 10, 80)
    torch.testing.assert_close(turned["mean"], short["mean"], rtol=0, atol=1e-8)
    assert turned["control"].abs().max() < 1e-8


# -- by hand -------------------------------------------------------------------------------------------------------
def test_a_clients_c_is_the_mean_of_its_gradients_and_of_the_pull():
    """Two minibatches of 2 and 1 rows, k = 2, a KL that pulls: c_i⁺ = Σ η_j (g_j + κ(m_j − m_θ))/Σ η_j."""
    n = torch.tensor(3.0).double()
    site = Site(n, torch.empty(0))
    algorithm = FedABML(drift="control", drift_share=0.7, lr=0.2, lam=0.3, nu0=-0.5, k=2, s=1)
    shared = algorithm.init(torch.tensor([1.0, -2.0]).double(), None)
    shared["control"] = torch.tensor([0.3, 0.1]).double()
    kept = {"control": torch.tensor([-0.2, 0.4]).double()}
    carry, curvature, kappa = algorithm.begin(shared, kept, site, KEY), torch.tensor([2.0, 3.0]).double(), 0.1 * np.e
    m, total, way = shared["mean"], 0.0, 0.0
    for count in (2, 1):
        batch = Batch(torch.empty(2), torch.empty(2), (torch.arange(2) < count).double())
        carry, _ = algorithm.step(carry, shared, (batch,), site, KEY, lambda q, *_: 0.5 * q.mean**2 @ curvature)
        rate = 0.2 * count / 2
        for _ in range(2):
            g = curvature * m
            gone = m - rate * (g + 0.7 * (shared["control"] - kept["control"]))
            new = (gone + rate * kappa * shared["mean"]) / (1 + rate * kappa)
            total, way, m = total + rate * (g + kappa * (new - shared["mean"])), way + rate, new
    close(carry["mean"], m)
    _, after = algorithm.end(carry, shared, kept, site, torch.tensor(2.0))
    close(after["control"], total / way)


# -- what stays ----------------------------------------------------------------------------------------------------
@KINDS
def test_no_share_of_the_correction_leaves_the_prior_as_it_is(drift):
    words = POINT | {"server_momentum": 0.4}
    a, b = engine(FedABML(drift=drift, drift_share=0.0, **words), 3)[0], engine(FedABML(**words), 3)[0]
    assert torch.equal(a.shared["mean"], b.shared["mean"])


@KINDS
def test_the_first_round_of_control_variates_is_as_without(drift):
    words = POINT | {"posterior": "gaussian"}
    a, b = engine(FedABML(drift=drift, **words), 1)[0], engine(FedABML(**words), 1)[0]
    assert torch.equal(a.shared["mean"], b.shared["mean"]) == (drift == "control")
    assert a.shared["control"].abs().max() > 0.01


@KINDS
def test_personal_steps_are_not_corrected(drift):
    """A client's model is the posterior under the prior θ, whatever c is and whatever it keeps."""
    sim, _ = engine(FedABML(drift=drift, lr=0.1, personal_epochs=2), 3)
    plain, _ = engine(FedABML(lr=0.1, personal_epochs=2), 3)
    average = {name: sim.server.average[name] for name in ("mean", "logstd")}
    plain.return_to(plain.server._replace(average=average))
    for a, b in zip(models(sim), models(plain), strict=True):
        assert torch.equal(a, b)


def test_without_it_nothing_is_kept_or_sent_and_cells_are_known_as_before():
    sim, lines = engine(FedABML(lr=0.1), 1)
    assert not sim.kept.needed and sim.shared.keys() == {"mean", "logstd"}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (6 * 8, 6 * 8)
    assert "drift" not in Cell("fedabml", RunConfig(algorithm="fedabml")).identity
    corrected = RunConfig(algorithm="fedabml", hyper={"drift": "control"})
    assert json.loads(Cell("fedabml", corrected).identity)[0]["fedabml"]["drift"] == "control"
    assert FedABML(drift="control").keeps and not FedABML(drift="server").keeps and PFedBayes().keeps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"drift": "control", "prior_every": "batch"}, "prior_every round"),
        ({"drift": "server", "prior_step": "euclidean"}, "prior_step natural"),
        ({"drift": "server", "rho": 0.0}, "rho above 0"),
        ({"drift": "control", "lr": 0.0}, "lr above 0"),
        ({"drift": "momentum"}, "drift"),
    ],
)
def test_what_contradicts_is_refused(words, message):
    with pytest.raises(fedabml.InputError, match=message):
        FedABML(**words)


@KINDS
def test_with_moments_the_prior_moves_as_with_the_mean(drift):
    words = POINT | {"posterior": "gaussian", "rho": 1.5, "drift": drift}
    a, b = (engine(FedABML(aggregate=kind, **words), 3)[0].shared for kind in ("mean", "moments"))
    close(a["mean"], b["mean"])
    close(a["control"], b["control"])
