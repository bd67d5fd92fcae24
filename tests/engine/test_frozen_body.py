"""A frozen body is held once: what grows with the clients of a round is what the adapter needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fedabml
from fedabml.algorithms import make
from fedabml.engine.rounds import Simulation
from fedabml.evaluation.scoring import evaluate
from fedabml.files.sealed import read_tensors

pytestmark = pytest.mark.slow
WIDTH, WORDS, LANES = 512, 50, 8


class Classifier(nn.Module):
    """A bag of words with a residual layer whose linear parts are called."""

    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.up, self.down, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 2)

    def forward(self, x):
        x = self.tokens(x)
        return self.head((x + self.down(self.up(self.norm(x)).relu())).mean(1))


def federation(clients):
    g = np.random.default_rng(0)
    parts = [(g.integers(0, WORDS, (4, 2)), np.arange(4) % 2) for _ in range(2 * clients)]
    return fedabml.Federation.from_arrays(parts[:clients], parts[clients:])


def peak(work):
    """Return the most bytes that tensors take while work is done, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(np.cumsum([change for _, change in changes]).max())


@pytest.mark.parametrize("train", ["head", "lora"])
def test_a_client_more_in_a_round_takes_the_memory_of_its_adapter(train):
    """Training and scoring take what `lane_bytes` foretells for a client, to its factor of two; no part of the body."""
    rounds, scores = {}, {}
    for clients in (1, LANES):
        setup = fedabml.prepare(
            federation(clients), Classifier(), fedabml.FedABML(lr=1e-3, personal_lr=1e-3), train=train, lora_rank=1,
            participation=1.0, epochs=1, batch_size=2, device="cpu", backend="vmap", chunk=clients, workers=1,
        )  # fmt: skip
        simulation = Simulation(setup.cohort)
        rounds[clients] = peak(lambda: simulation.run(1))
        scores[clients] = peak(lambda: evaluate(setup.cohort, simulation.theta, simulation.kept_for))
    frozen = sum(tensor.nbytes for tensor in setup.input_spec.network.constants.values())
    for peaks in (rounds, scores):
        assert (peaks[LANES] - peaks[1]) / (LANES - 1) < 2 * setup.lane_bytes < frozen / 10


@pytest.mark.parametrize("name", ["fedabml", "ditto", "scaffold"])
def test_messages_and_states_are_those_of_the_adapter(name, tmp_path):
    """One algorithm of each kind: distributions, a model that clients keep, and control variates."""
    run = fedabml.train(
        federation(2), Classifier(64), make(name), train="lora", lora_rank=1, rounds=1, participation=1.0, epochs=1,
        device="cpu", backend="loop", evaluate=False, out=tmp_path / "run",
    )  # fmt: skip
    network = run.prior.input_spec.network
    size, line = network.layout.size, run.history[0]
    assert 20 * size < sum(tensor.numel() for tensor in network.constants.values())
    assert 0 < max(line["bytes_up"], line["bytes_down"]) <= 2 * 4 * size  # two vectors of each client
    states = [read_tensors(file)[0] for file in (tmp_path / "run").rglob("*.safetensors")]
    assert len(states) == (2 if name == "fedabml" else 3)  # the prior, the server's state, and what clients keep
    assert max(tensor.numel() for state in states for tensor in state.values()) == size
