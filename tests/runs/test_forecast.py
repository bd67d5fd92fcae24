"""Forecasts of a run: by hand, near what a run takes, and without a trace."""

import dataclasses
import time
from concurrent.futures import Future

import numpy as np
import pytest

import fedabml
from fedabml.accel.fused_passes import FusedFunction
from fedabml.cli.doctor import described
from fedabml.engine.executor import Executor
from fedabml.engine.rounds import Simulation
from fedabml.runs import forecast
from tests.tiers import nightly_but

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]


def federation(sizes, features=3):
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, features)).astype(np.float32), np.arange(n) % 2) for n in sizes]
    return fedabml.Federation.from_arrays(pairs, classes=2)


def test_an_estimate_by_hand():
    """Ten batches for one client and two for the others; all take part."""
    fed = federation([100, 20, 20, 20])
    words = {"rounds": 7, "participation": 1.0, "epochs": 2, "batch_size": 10, "device": "cpu"}
    setup = fedabml.prepare(fed, "mlr", fedabml.FedAvg(personal_epochs=3), **words)
    found = forecast.estimate(setup, scored=2)
    # 4 lanes for 4 steps, then 1 lane for 16: on a CPU a quarter of the cost each.
    assert found.step > 0 and found.overhead >= 0
    assert found.round == pytest.approx(found.overhead + found.step * (4 + 16 / 4))
    assert found.personal == pytest.approx(found.overhead + found.step * (6 + 24 / 4))
    assert found.predicting == 0 and found.saving > 0 and found.lanes == 4  # there is nothing to predict
    assert found.total == pytest.approx(7 * (found.round + found.saving) + 2 * found.scoring)
    assert found.padding == 0 and found.batch_padding == 0 and found.bytes > 0
    assert found.peak_host_bytes >= found.bytes_before > found.bytes
    # By halves the one long lane would drag others along; a batch of 30 leaves room in the last one.
    other = dataclasses.replace(setup.cohort.algorithm, personal_epochs=0)
    setup = fedabml.prepare(fed, "mlr", other, rounds=1, participation=1.0, epochs=1, batch_size=30, device="cpu")
    found = forecast.estimate(setup, scored=1)
    assert found.scoring == 0 and found.batch_padding == pytest.approx(1 - 160 / (7 * 30))


def test_steps_and_what_comes_around_them_are_separated(monkeypatch):
    """A round of 3 s and .2 s for every step of each of its two chunks."""
    fed, steps = federation([100] * 4), lambda fed: int(fed.train.counts.max()) // 10
    words = {"rounds": 3, "participation": 1.0, "epochs": 1, "batch_size": 10, "device": "cpu", "chunk": 2}
    setup = fedabml.prepare(fed, "mlr", fedabml.FedAvg(personal_epochs=0), **words)
    monkeypatch.setattr(forecast, "SHORT_TRIAL", 10)
    monkeypatch.setattr(forecast, "_trial", lambda setup, fed: (2 * (1.5 + 0.2 * steps(fed)), 2))
    found = forecast.estimate(setup, scored=0)
    assert (found.step, found.overhead) == pytest.approx((0.2, 3))
    assert found.round == pytest.approx(2 * (1.5 + 10 * 0.2)) and found.lanes == 2
    assert found.total == pytest.approx(3 * (found.round + found.saving))
    assert dict(described(setup, found))["a round"] == "7 s, 43 % of it around the steps"
    monkeypatch.setattr(forecast, "SHORT_TRIAL", 0)  # it would take too long
    found = forecast.estimate(setup, scored=0)
    assert (found.step, found.overhead) == pytest.approx((1.7, 0))


def with_tests(sizes, tests):
    draw = np.random.default_rng(0)
    parts = [[(draw.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2) for n in many] for many in (sizes, tests)]
    return fedabml.Federation.from_arrays(*parts, classes=2)


def test_predictions_by_hand(monkeypatch):
    """.5 s of a chunk, and 10 ms of each sample of each of its clients, up to that of the largest."""
    fed = with_tests([20] * 6, [40, 10, 8, 8, 8, 0])
    setup = fedabml.prepare(fed, "mlr", fedabml.FedAvg(), participation=1.0, device="cpu", chunk=2, backend="vmap")
    setup.cohort.workers, scored = 1, []

    def seconds(work):
        work()
        rows = int(scored[-1].fed.test.counts.max())
        return 0.5 + 2 * rows * 0.01

    monkeypatch.setattr(forecast, "_seconds", seconds)
    monkeypatch.setattr(
        forecast, "evaluate_after", lambda epochs, entries, *words, **more: scored.append(entries[0].cohort)
    )
    sim = Simulation(setup.cohort)
    # Five clients have something to predict: chunks of 40 and 10, 8 and 8, 8.
    assert forecast._predicting(sim) == pytest.approx(0.5 * 5 / 2 + 0.01 * (2 * 40 + 2 * 8 + 8))
    assert [int(c.fed.test.counts.max()) for c in scored] == [4, 4, 13]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but(
        {"fedabml", "scaffold"}, ["fedavg", "fedabml", "scaffold", "fedpop", "pfedbayes", "perfedavg", "fedbabu"]
    ),
)
def test_every_kind_of_algorithm_is_predicted_and_saved(name):
    setup = fedabml.prepare(with_tests([20] * 3, [9] * 3), "mlp", fedabml.algorithms.make(name), rounds=1, device="cpu")
    found = forecast.estimate(setup, scored=1)
    assert found.predicting > 0 and found.saving > 0


def test_a_folder_that_cannot_be_written_to_costs_no_estimate(monkeypatch):
    def full(*args, **words):
        raise OSError("no space")

    monkeypatch.setattr(forecast.tempfile, "TemporaryDirectory", full)
    setup = fedabml.prepare(federation([20] * 3), "mlr", fedabml.FedAvg(), device="cpu")
    found = forecast.estimate(setup, scored=0)
    assert found.saving == 0 and found.predicting == 0


@pytest.mark.parametrize("name", ["fedabml", "perfedavg", "fedrep"])
@pytest.mark.nightly
def test_an_estimate_is_near_what_a_run_takes(name):
    """Recorded steps, of three minibatches, of two phases; both on the same machine in the same moments."""
    fed = federation([300] * 20, features=20)
    words = {"rounds": 6, "participation": 0.5, "epochs": 3, "batch_size": 10, "device": "cpu", "backend": "vmap"}

    def seconds(sim):
        start = time.perf_counter()
        sim.step()
        return time.perf_counter() - start

    ratios = []
    near = lambda: 0.55 < np.median(ratios) < 1.7
    while len(ratios) < 3 or (len(ratios) < 15 and not near()):  # others may be at work on the machine
        setup = fedabml.prepare(fed, "mlp", fedabml.algorithms.make(name), **words)
        sim = Simulation(setup.cohort)
        sim.step()
        expected = forecast.estimate(setup, scored=0).round
        ratios.append(expected / min(seconds(sim) for _ in range(4)))  # the least disturbed round
    assert near(), ratios


def test_a_trial_waits_for_the_compiler_and_always_trains_the_same_round(monkeypatch):
    setup = fedabml.prepare(federation([20] * 8), "mlr", fedabml.FedAvg(lr=0.1), participation=0.25, device="cpu")
    seen, step = [], Simulation.step

    def spied(sim):
        seen.append((tuple(sim.draw()), sim.shared["mean"].sum().item()))
        return step(sim)

    monkeypatch.setattr(Simulation, "step", spied)
    monkeypatch.setattr(Executor, "settled", property(lambda executor: len(seen) > 9))
    forecast._trial(setup, setup.cohort.fed)
    assert len(seen) == 10 and len(set(seen)) == 1
    monkeypatch.setattr(forecast, "TRIAL_LIMIT", 0)
    forecast._trial(setup, setup.cohort.fed)
    assert len(seen) == 12


def test_a_program_is_settled_once_its_steps_are_compiled():
    programs, step = Executor(record=True), object.__new__(FusedFunction)
    step.pending = Future()
    assert programs.settled
    programs.recordings["step"] = (None, step)
    assert not programs.settled
    step.pending = None
    assert programs.settled


def test_the_trial_leaves_no_trace():
    fed = federation([30, 25])
    setup = fedabml.prepare(fed, "mlr", fedabml.FedABML(), rounds=2, participation=1.0, batch_size=5, device="cpu")
    before = fed.hash, fed.train.counts.tolist()
    forecast.estimate(setup, 1)
    assert before == (fed.hash, fed.train.counts.tolist()) and setup.cohort.fed is fed
    small = forecast._shortened(fed, 10)
    assert small.train.counts.tolist() == [10, 10]
    assert all(np.array_equal(small.train[i], fed.train[i][:10]) for i in range(2))
