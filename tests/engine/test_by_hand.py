"""A federation run by hand, with one client's round and one server's step, has the bits of the simulator's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedabml
from fedabml import engine
from fedabml.algorithms import make

ROUNDS = 3
CASES = {
    "fedabml": ("fedabml", {}),
    "scaffold": ("scaffold", {"lr_decay": 0.9}),
    "ditto": ("ditto", {}),
    "fedavg": ("fedavg", {"server_momentum": 0.5, "average": 0.9, "weights": "samples"}),
}


def federation():
    g = np.random.default_rng(3)
    sizes = (7, 12, 16, 21, 25, 30)
    pairs = [(g.normal(size=(n, 4)).astype(np.float32), np.arange(n) % 3) for n in sizes]
    return fedabml.Federation.from_arrays(pairs, pairs)


@torch.no_grad()
def run_by_hand(cohort):
    """Train one client at a time; return the server's state, what clients keep and the mean loss of every round."""
    setting, kept, losses = cohort.setting, {}, []
    algorithm, fed = setting.algorithm, setting.federation
    state = engine.initial_state(algorithm, cohort.network)
    for round in range(1, ROUNDS + 1):
        clients = engine.draw_clients(fed.clients, setting.participation, setting.seed, round)
        results = []
        for client in clients:
            lanes = engine.Lanes.in_round(cohort, state.shared, [client], round)
            own = kept[client] if client in kept else engine.initial_kept(lanes)
            results.append(engine.client_round(lanes, own, setting.epochs))
            kept[client] = results[-1].kept
        weights = engine.client_weights(algorithm, fed.train.counts[clients], cohort.network.initial)
        updates = {name: torch.cat([result.update[name] for result in results]) for name in results[0].update}
        update = engine.weighted_sum(weights, updates)
        state = engine.server_step(algorithm, state, update, len(clients), fed.clients)
        losses.append(np.mean([result.losses.item() for result in results]))
    return state, kept, losses


@pytest.mark.parametrize("case", CASES)
def test_a_federation_by_hand_is_bit_equal_to_training(case):
    name, hyper = CASES[case]
    sims, words = [], {"participation": 0.5, "epochs": 2, "batch_size": 8, "seed": 1, "device": "cpu"}
    words |= {"rounds": ROUNDS, "backend": "loop", "model_options": {"hidden": (5,)}}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads sum the updates of their own clients first
    try:
        run = fedabml.train(
            federation(), "mlp", make(name, **hyper), on_start=lambda setup, sim: sims.append(sim), **words
        )
        setup = fedabml.prepare(federation(), "mlp", make(name, **hyper), **words)
        state, kept, losses = run_by_hand(setup.cohort)
    finally:
        torch.set_num_threads(threads)
    theta = engine.theta(setup.cohort.algorithm, state)
    assert theta.keys() == run.prior.shared.keys()
    assert all(torch.equal(theta[key], value) for key, value in run.prior.shared.items())
    assert losses == pytest.approx([line["loss"] for line in run.history], rel=1e-12)
    stored = sims[0].kept.states
    assert set(stored) == (set(kept) if setup.cohort.algorithm.keeps else set())
    assert all(torch.equal(kept[client][key][0], value) for client, own in stored.items() for key, value in own.items())


def test_the_server_alone():
    """θ moves by the mean of updates; momentum repeats half of the last step; the average is over the rounds so far."""
    algorithm = make("fedavg", server_momentum=0.5, average=0.9)
    state = engine.ServerState(0, {"mean": torch.zeros(1)}, {"mean": torch.zeros(1)}, {})
    seen = []
    for value in (1.0, 2.0):
        state = engine.server_step(algorithm, state, {"mean": torch.tensor([value])}, 2, 10)
        seen.append((state.round, state.shared["mean"].item(), state.average["mean"].item()))
    assert seen == [(1, 1.0, 1.0), (2, 2.5, 1.75)]
    mean = engine.weighted_sum(torch.tensor([0.25, 0.75]), {"mean": torch.tensor([[4.0], [8.0]])})
    assert mean["mean"].item() == 7.0
