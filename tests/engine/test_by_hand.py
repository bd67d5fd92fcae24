"""A federation run by hand, with one client's round and one server's step, has the bits of the simulator's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import fedabml
from fedabml import engine
from fedabml.algorithms import REGISTRY, make

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


@torch.no_grad()
@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.slow
def test_a_client_alone_has_the_bits_it_has_among_others(name):
    fed = federation()
    words = {"epochs": 2, "batch_size": 8, "seed": 1, "device": "cpu", "backend": "loop", "rounds": 1}
    cohort = fedabml.prepare(fed, "mlp", make(name), model_options={"hidden": (5,)}, **words).cohort
    shared = engine.initial_state(cohort.algorithm, cohort.network).shared
    among = engine.Lanes.in_round(cohort, shared, range(fed.clients), 2)
    expected = engine.client_round(among, engine.initial_kept(among), 2)
    for client in range(fed.clients):
        rows = fed.train[client]
        pair = (fed.x[rows], fed.y[rows])
        own = fedabml.Federation.from_arrays([pair], task=fed.task, classes=fed.classes, normalize="none")
        own = dataclasses.replace(own, shift=fed.shift, scale=fed.scale)
        setting = dataclasses.replace(cohort.setting, federation=own, identities=(client,))
        alone = engine.Lanes.in_round(engine.Cohort(setting, cohort.place), shared, [0], 2)
        result = engine.client_round(alone, engine.initial_kept(alone), 2)
        assert torch.equal(result.losses[0], expected.losses[client])
        for part, whole in ((result.update, expected.update), (result.kept, expected.kept)):
            assert part.keys() == whole.keys()
            assert all(torch.equal(part[key][0], whole[key][client]) for key in part)


def test_identities_must_be_different_and_as_many_as_clients():
    setting = fedabml.prepare(federation(), "mlp", make("fedavg"), device="cpu").cohort.setting
    for wrong in ((0,), (0, 1, 2, 3, 4, 4), (-1, 0, 1, 2, 3, 4)):
        with pytest.raises(ValueError, match="identities"):
            dataclasses.replace(setting, identities=wrong)


def test_another_federation_has_no_identities():
    cohort = fedabml.prepare(federation(), "mlp", make("fedavg"), device="cpu").cohort
    setting = dataclasses.replace(cohort.setting, identities=(9, 8, 7, 6, 5, 4))
    cohort = engine.Cohort(setting, cohort.place)
    assert cohort.at(chunk=1).setting.identities == (9, 8, 7, 6, 5, 4)
    assert cohort.among(federation()).setting.identities is None
    keys = cohort.keys(0, 1, [0, -1])
    plain = engine.Cohort(dataclasses.replace(setting, identities=None), cohort.place)
    assert keys[1] == plain.keys(0, 1, [-1])[0]
