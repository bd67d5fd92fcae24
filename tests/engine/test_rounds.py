"""Rounds that start before the last one is finished: the same runs, and one that diverges leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedabml
from fedabml.algorithms import make
from fedabml.engine import rounds
from fedabml.engine.exchange import may_overlap
from fedabml.engine.rounds import Simulation, run_rounds
from fedabml.errors import TrainingError

ROUNDS = 5


def federation():
    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(12, 4)).astype(np.float32), g.integers(0, 3, 12)) for _ in range(6)]
    return fedabml.Federation.from_arrays(pairs, classes=3)


def simulation(fed, algorithm, seed=0):
    setup = fedabml.prepare(
        fed, "mlr", algorithm, rounds=ROUNDS, participation=0.5, epochs=1, batch_size=4, seed=seed, device="cpu",
        dtype="float64", chunk=6, backend="vmap",
    )  # fmt: skip
    return Simulation(setup.cohort)


@pytest.fixture
def early(monkeypatch):
    """Start the next round before this one is finished, as on a GPU; list how many are in flight at every start."""
    in_flight, counts = [], []
    start, finish = rounds.start_round, rounds.finish_round

    def started(sims):
        round = start(sims)
        in_flight.append(round)
        counts.append(len(in_flight))
        return round

    def finished(round, *args):
        in_flight.remove(round)
        return finish(round, *args)

    monkeypatch.setattr(rounds, "may_overlap", lambda world, kept: True)
    monkeypatch.setattr(rounds, "start_round", started)
    monkeypatch.setattr(rounds, "finish_round", finished)
    return counts


def test_the_run_is_the_same_to_the_bit(monkeypatch, early):
    fed = federation()
    lines = list(
        run_rounds(
            [ahead := simulation(fed, fedabml.FedABML(average=0.5, server_momentum=0.3))], ROUNDS, lambda round: False
        )
    )
    assert max(early) == 2
    monkeypatch.undo()
    plain = simulation(fed, fedabml.FedABML(average=0.5, server_momentum=0.3))
    for round, news in lines:
        line = plain.step()
        assert round == line["round"]
        assert {k: v for k, v in news[0].items() if k != "seconds"} == {k: v for k, v in line.items() if k != "seconds"}
    for one, other in ((ahead.shared, plain.shared), (ahead.server.average, plain.server.average)):
        assert all(torch.equal(one[k], v) for k, v in other.items())
    assert ahead.round == plain.round == ROUNDS


def test_after_a_round_that_is_looked_at_the_server_is_there(early):
    sim = simulation(federation(), fedabml.FedAvg())
    for round, _ in run_rounds([sim], ROUNDS, lambda round: round % 2 == 0):
        assert sim.round == (round if round % 2 == 0 or round == ROUNDS else round + 1)


def test_a_run_that_diverges_ends_where_it_was_sound_and_the_others_go_on(early):
    fed = federation()
    sims = [
        simulation(fed, fedabml.FedAvg(lr=lr, server_momentum=0.1), seed=i) for i, lr in enumerate((0.1, 1.7e308, 0.1))
    ]
    news = [dict(lines) for _, lines in run_rounds(sims, ROUNDS, lambda round: False)]
    last = next(t for t, lines in enumerate(news) if isinstance(lines[1], TrainingError))
    assert [sorted(lines) for lines in news] == [[0, 1, 2]] * (last + 1) + [[0, 2]] * (ROUNDS - last - 1)
    assert last < ROUNDS - 1 and sims[1].round == last
    assert all(torch.isfinite(v).all() for v in sims[1].shared.values())
    alone = simulation(fed, fedabml.FedAvg(lr=0.1, server_momentum=0.1), seed=2)
    alone.run(ROUNDS)
    for k, v in alone.shared.items():
        torch.testing.assert_close(sims[2].shared[k], v, rtol=0, atol=1e-12)


def test_when_all_have_diverged_it_is_over(early):
    sim = simulation(federation(), fedabml.FedAvg(lr=1.7e308))
    with pytest.raises(TrainingError, match="diverged"):
        sim.run(ROUNDS)
    assert sim.round < ROUNDS and all(torch.isfinite(v).all() for v in sim.shared.values())


@pytest.mark.parametrize("by", ["leaving", "a round that fails to start"])
def test_a_caller_who_leaves_early_finds_the_last_finished_round(early, monkeypatch, by):
    fed = federation()
    sim, plain = (simulation(fed, fedabml.FedAvg(lr=0.1, server_momentum=0.3)) for _ in range(2))
    found = run_rounds([sim], ROUNDS, lambda round: False)
    next(found)
    next(found)
    assert sim.round == 3  # the third is in flight
    if by == "leaving":
        found.close()
    else:
        monkeypatch.setattr(rounds, "start_round", lambda sims: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(found)
    monkeypatch.undo()
    plain.step()
    plain.step()
    assert sim.round == 2 and torch.equal(sim.shared["mean"], plain.shared["mean"])
    assert torch.equal(sim.server.velocity["mean"], plain.server.velocity["mean"])


def test_a_callback_sees_the_servers_after_its_own_round(early):
    seen = []
    sim = simulation(federation(), fedabml.FedAvg())
    sim.run(ROUNDS, on_round=lambda line: seen.append((line["round"], sim.round)))
    assert seen == [(t, t) for t in range(1, ROUNDS + 1)]


def test_which_runs_start_a_round_early():
    """A host is not ahead of itself, and what clients keep must be written down first."""
    fed = federation()
    plain, keeping = simulation(fed, fedabml.FedAvg()), simulation(fed, make("ditto"))
    assert not may_overlap(plain.world, plain.kept)
    for sim in (plain, keeping):
        sim.cohort.device = torch.device("cuda")
    assert may_overlap(plain.world, plain.kept) and not may_overlap(keeping.world, keeping.kept)
