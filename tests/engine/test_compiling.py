"""Whether torch.compile pays, decided from the times of the first rounds; and a resumed run compiles as it did."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import fedabml
from fedabml.engine import compiling
from fedabml.engine.checkpoint import Checkpoint
from fedabml.engine.policy import DEFAULT
from fedabml.engine.rounds import Simulation, consider_compiling, run_rounds
from fedabml.errors import InputError
from fedabml.runs.config import RunConfig, read_toml, to_toml, without_commands
from fedabml.runs.folder import Folder
from fedabml.vectors import Layout

MLP = Layout(tuple("abcdef"), ((200, 784), (200,), (200, 200), (200,), (62, 200), (62,)))
CNN = Layout(("w",), ((64, 3, 5, 5),))


def test_it_pays_where_the_rounds_left_save_more_than_it_costs():
    assert compiling.pays([9.0, 0.1, 0.1, 0.1], rounds_left=201, gain=2.0, cost=10.0)
    assert not compiling.pays([9.0, 0.1, 0.1, 0.1], rounds_left=199, gain=2.0, cost=10.0)  # without the first round
    assert not compiling.pays([0.1, 0.1, 5.0, 0.1], rounds_left=199, gain=2.0, cost=10.0)  # nor a disturbed one
    assert compiling.pays([0.2], rounds_left=101, gain=2.0, cost=10.0)  # a run resumed just before has no other
    assert not compiling.pays([1.0, 1.0], rounds_left=0, gain=2.0, cost=1.0)


def test_what_is_expected_is_what_was_measured():
    """docs/speed.md: ten seconds for an MLP, sixty for ResNet-18, for every shape of a step."""
    resnet = Layout(tuple(map(str, range(62))), ((3, 3, 3, 3),) * 62)
    assert compiling.expected_cost(MLP, 1) == pytest.approx(10, abs=1)
    assert compiling.expected_cost(resnet, 1) == pytest.approx(60, abs=2)
    assert compiling.expected_cost(MLP, 3) == 3 * compiling.expected_cost(MLP, 1)
    gains = [
        compiling.expected_gain(*way) for way in ((CNN, torch.float32), (MLP, torch.float32), (MLP, torch.bfloat16))
    ]
    assert gains == sorted(gains) and gains[0] >= 1.5 and gains[-1] <= 3.5


def federation():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 3)).astype(np.float32), rng.integers(0, 2, 6)) for _ in range(4)]
    return fedabml.Federation.from_arrays(clients, clients, classes=2)


def simulation(state=None, auto=True, rounds=6, **words):
    setup = fedabml.prepare(
        federation(), "mlr", fedabml.FedAvg(), rounds=rounds, participation=1.0, epochs=1, batch_size=3, device="cpu",
        backend="vmap", **words,
    )  # fmt: skip
    setup.cohort.executor.undecided = auto  # as on a GPU
    return Simulation(setup.cohort, state=state)


@pytest.mark.parametrize(("seconds", "compiled"), [(0.01, None), (100.0, 1)])
def test_runs_side_by_side_are_compiled_or_not_and_it_is_said(seconds, compiled, caplog):
    caplog.set_level(logging.INFO, "fedabml")
    sims = [simulation(), simulation()]
    consider_compiling(sims, [seconds] * 4, 100)
    for sim in sims:
        programs = sim.cohort.executor
        assert sim.compiled == compiled and programs.compile == bool(compiled) and not programs.undecided
        assert programs.compiled_steps == (frozenset({"step"}) if compiled else None)
    said = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert len(said) == bool(compiled) and all("From round 1 on" in text and "--no-compile" in text for text in said)
    consider_compiling(sims, [1e6] * 4, 10**6)  # it is decided once
    assert sims[0].compiled == compiled


def test_it_is_decided_after_one_round_and_kept_in_the_checkpoint(tmp_path):
    sim, seen = simulation(), []
    for round, _ in run_rounds([sim], 6, lambda round: True):
        seen.append((round, sim.cohort.executor.undecided))
    assert [auto for _, auto in seen] == [round < DEFAULT.decide_round for round, _ in seen]
    folder = Folder(tmp_path)
    for compiled in (None, 5):
        state = Checkpoint(6, sim.shared, sim.server.average, {}, 1.0, 4, {}, compiled)
        folder.save(state, {})
        found = Folder(tmp_path).load_latest()
        assert found.compiled == compiled
        again = simulation(found)
        assert again.compiled == compiled and again.cohort.executor.compile == bool(compiled)
        assert not again.cohort.executor.undecided  # it was decided before
    early = Checkpoint(2, sim.shared, sim.server.average, {}, 1.0, 4)
    assert simulation(early).cohort.executor.undecided and not simulation(found, auto=False).cohort.executor.compile


def test_on_a_cpu_nothing_is_compiled_unless_somebody_says_so(tmp_path):
    words = {"rounds": 6, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "vmap"}
    for given, stored in ((None, "auto"), (False, None)):
        setup = fedabml.prepare(federation(), "mlr", fedabml.FedAvg(), compile=given, **words)
        assert not setup.cohort.executor.compile and not setup.cohort.executor.undecided
        assert setup.config.get("compile") == stored
    assert fedabml.prepare(federation(), "mlr", fedabml.FedAvg(), compile=True, **words).cohort.executor.compile
    with pytest.raises(InputError, match="compile must be"):
        fedabml.prepare(federation(), "mlr", fedabml.FedAvg(), compile="always", **words)
    run = fedabml.train(federation(), "mlr", fedabml.FedAvg(), **words)
    assert "compiled" not in run.summary


def test_a_run_of_an_earlier_version_is_resumed(tmp_path):
    """Its config.json has no word about compiling."""
    words = {"participation": 1.0, "epochs": 1, "device": "cpu", "backend": "vmap", "out": tmp_path / "run"}
    fedabml.train(federation(), "mlr", fedabml.FedAvg(), rounds=2, compile=False, **words)
    again = fedabml.train(federation(), "mlr", fedabml.FedAvg(), rounds=3, resume=True, **words)
    assert len(again.history) == 3


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ('compile = "auto"', None), ("compile = true", True), ("compile = false", False)]
)
def test_the_key_in_a_file(text, value, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    config = RunConfig.of(without_commands(read_toml(tmp_path / "run.toml")))
    assert config.compile is value
    (tmp_path / "again.toml").write_text(to_toml(config.to_dict(everything=True)))
    assert RunConfig.of(without_commands(read_toml(tmp_path / "again.toml"))) == config
    assert {None: "compile" not in config.command(), True: " --compile" in config.command()}.get(
        value, "--no-compile" in config.command()
    )
