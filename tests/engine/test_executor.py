"""What is captured on a GPU, here by graphs that only repeat a function: whole rounds, steps, and the same results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import fedabml
from fedabml.algorithms import make
from fedabml.engine import policy, programs
from fedabml.engine.rounds import Simulation, consider_compiling, run_round
from fedabml.engine.setting import Cohort
from fedabml.evaluation.scoring import evaluate

EVEN, UNEVEN = (16, 16, 16, 16), (5, 24, 16, 9)


class Repeated(programs.Captured):
    """A captured function for a CPU: a replay calls the function again and writes to the first call's outputs."""

    def __init__(self, function, inputs, pool, steps=frozenset()):
        self.buffers, self.steps = programs.clone(inputs), steps
        first = programs.clone(self.buffers)  # a GPU records without computing
        self.outputs, self.graph = function(*first), self
        self.function = function

    def replay(self):
        with torch.no_grad():
            for old, new in zip(tree_leaves(self.outputs), tree_leaves(self.function(*self.buffers)), strict=True):
                if isinstance(old, torch.Tensor):
                    old.set_(new.clone())


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(programs, "Captured", Repeated)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(normalized_bytes=0))  # a GPU takes samples where they lie


def simulation(sizes, algorithm, capture, seed=0):
    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2) for n in sizes]
    setup = fedabml.prepare(
        fedabml.Federation.from_arrays(pairs, pairs), "mlp", algorithm, participation=0.75, epochs=2, batch_size=8,
        seed=seed, device="cpu", dtype="float64", backend="vmap", model_options={"hidden": (3,)}, workers=1, chunk=8,
    )  # fmt: skip
    setup.cohort.executor.capture, setup.cohort.executor.record = capture, False
    return Simulation(setup.cohort)


def captured(sim):
    return {name[0] for name, _ in sim.cohort.executor.graphs}


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=str)
@pytest.mark.parametrize("name", ["fedabml", "scaffold", "perfedavg", "fedrep"])
@pytest.mark.slow
def test_captured_rounds_are_eager_ones(graphs, name, sizes):
    sims = [simulation(sizes, make(name, lr=0.1, lr_decay=0.8), capture) for capture in (True, False)]
    for sim in sims:
        sim.run(3)
    for key, value in sims[1].shared.items():
        torch.testing.assert_close(sims[0].shared[key], value, rtol=0, atol=1e-12)
    assert not sims[0].cohort.executor.refused and not sims[1].cohort.executor.graphs
    assert ("whole_round" in captured(sims[0])) == (sizes == EVEN)
    assert sizes == EVEN or {"begin_round", "schedule_steps", "end_round"} < captured(sims[0])
    scores = [evaluate(sim.cohort, sim.theta, sim.kept_for).summary["nll"] for sim in sims]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


RESUMED = [
    ("scaffold", {}),
    pytest.param("fedpop", {}, marks=pytest.mark.nightly),
    pytest.param("pfedbayes", {}, marks=pytest.mark.nightly),
    ("fedabml", {"aggregate": "moments"}),
    ("fedabml", {"prior_every": "batch"}),
]


def alphabetical(state):
    return {key: state[key] for key in sorted(state)}


@pytest.mark.parametrize("mode", ["captured", "recorded"])
@pytest.mark.parametrize(("name", "hyper"), RESUMED, ids=str)
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_uninterrupted(graphs, name, hyper, mode):
    """Files return names in alphabetical order, and programs take tensors by position."""
    algorithm, kept, states = make(name, lr=0.1, **hyper), {}, []

    def remember(line, state, changed):
        kept.update({client: alphabetical(row) for client, row in changed.items()})
        parts = {part: alphabetical(getattr(state, part)) for part in ("shared", "average", "velocity")}
        states.append(state._replace(**parts, kept=dict(kept)))

    plain = simulation(EVEN, algorithm, False)
    plain.run(7, save=remember)
    resumed = simulation(EVEN, algorithm, mode == "captured")
    executor = resumed.cohort.executor
    executor.record, executor.policy = mode == "recorded", dataclasses.replace(executor.policy, record_after=4)
    resumed = Simulation(resumed.cohort, state=states[1])
    resumed.run(7)
    for key, value in plain.shared.items():
        torch.testing.assert_close(resumed.shared[key], value, rtol=0, atol=1e-12)


def test_long_rounds_and_long_phases_are_cut(graphs, monkeypatch):
    plain = simulation(EVEN, make("fedavg"), False)
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(normalized_bytes=0, round_steps=1, graph_steps=3))
    cut = simulation(EVEN, make("fedavg"), True)
    for sim in (plain, cut):
        sim.run(2)
    assert "whole_round" not in captured(cut) and "step" in captured(cut)
    torch.testing.assert_close(cut.shared["mean"], plain.shared["mean"], rtol=0, atol=1e-12)


def test_runs_side_by_side(graphs):
    pairs = [[simulation(UNEVEN, make("fedabml", lr=lr), capture) for lr in (0.1, 0.05)] for capture in (True, False)]
    for sims in pairs:
        Cohort.join([sim.cohort for sim in sims])
        run_round(sims)
    for ours, plain in zip(*pairs, strict=True):
        torch.testing.assert_close(ours.shared["mean"], plain.shared["mean"], rtol=0, atol=1e-12)


def test_a_round_that_cannot_be_captured_is_taken_step_by_step(graphs, monkeypatch, caplog):
    expected = simulation(EVEN, make("fedavg"), False)
    sim, made = simulation(EVEN, make("fedavg"), True), programs.Captured.__init__

    def refuse(self, function, inputs, pool, steps=frozenset()):
        if steps:
            raise RuntimeError("no round today")
        made(self, function, inputs, pool, steps)

    monkeypatch.setattr(programs.Captured, "__init__", refuse)
    for each in (sim, expected):
        each.run(2)
    assert "no round today" in caplog.text and len(sim.cohort.executor.refused) == 1 and "step" in captured(sim)
    torch.testing.assert_close(sim.shared["mean"], expected.shared["mean"], rtol=0, atol=1e-12)


def test_shapes_that_would_have_to_be_compiled(graphs):
    for sizes, count in ((EVEN, 1), (UNEVEN, 2)):
        sim = simulation(sizes, make("fedavg"), True)
        sim.cohort.executor.undecided = True
        sim.run(2)
        own = sim.cohort.executor
        assert own.shapes_of(frozenset({"step"})) >= min(count, 1) and own.shapes_of(frozenset({"other"})) == 0
        assert consider_compiling([sim], [1e6] * 4, 100) and not own.graphs
        assert own.compile and own.compiled_steps == {"step"} and sim.compiled == 3
