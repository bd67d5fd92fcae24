"""`fedabml doctor` tells what is there and what would happen, and its reckoning holds where it can be worked out."""

import dataclasses

import numpy as np
import pytest

import fedabml
from fedabml import doctor
from tests.command import SMALL, run

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]


def federation(sizes, features=3):
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, features)).astype(np.float32), np.arange(n) % 2) for n in sizes]
    return fedabml.Federation.from_arrays(pairs, classes=2)


def test_a_machine_and_a_run(tmp_path):
    said = run("doctor", *SMALL, "--eval-every", 1).stdout
    for word in (
        *(
            "Versions",
            "torch",
            "optuna",
            "Machine",
            "CPU",
            "memory",
            "C compiler",
            "GPU",
            "data folder",
            "digits",
            "mlr",
        ),
        *(
            "backend",
            "vmap",
            "precision",
            "float32",
            "estimator",
            "a round",
            "about 0:00:",
            "padding",
            "a client",
            "Nothing was",
        ),
    ):
        assert word in said, word
    assert list(tmp_path.iterdir()) == []


def test_flags_are_a_runs():
    said = run("doctor", *SMALL, "--algorithm", "fedavg", "--backend", "loop", "--dtype", "float64").stdout
    assert "loop (asked for)" in said and "for checks" in said and "estimator" not in said
    said = run("doctor", *SMALL, "--no-estimate").stdout
    assert "a round" not in said
    assert "no algorithm" in run("doctor", "--algorithm", "fedavgg", code=2).stderr


def test_a_dataset_that_is_not_here_is_not_fetched(tmp_path):
    result = run("doctor", "--dataset", "cifar10", "--data-dir", tmp_path)
    assert "not here yet" in result.stderr and "data get cifar10" in result.stderr and "a round" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_own_data_and_a_model_that_cannot_be_batched():
    class Odd(fedabml.models.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = fedabml.models.nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) if self.layer.weight.sum().item() < 1e9 else x

    setup = fedabml.prepare(federation([8, 8]), Odd(), fedabml.FedAvg(), device="cpu")
    rows = dict(doctor.choices(setup, {"device": "cpu"}))
    assert (
        rows["backend"].startswith("loop (auto: this model cannot be batched") and rows["device"] == "cpu (asked for)"
    )


def test_an_estimate_by_hand():
    """Ten batches for one client and two for the others; all take part, and their two steps are timed."""
    fed = federation([100, 20, 20, 20])
    words = {"rounds": 7, "participation": 1.0, "epochs": 2, "batch_size": 10, "device": "cpu"}
    setup = fedabml.prepare(fed, "mlr", fedabml.FedAvg(personal_epochs=3), **words)
    found = doctor.estimate(setup, scored=2)
    # 4 lanes for 4 steps, then 1 lane for 16: on a CPU a quarter of the cost each.
    assert found.round == pytest.approx(found.step * (4 + 16 / 4))
    assert found.scoring == pytest.approx(found.step * (6 + 24 / 4))
    assert found.total == pytest.approx(7 * found.round + 2 * found.scoring)
    assert found.padding == 0 and found.short == 0 and found.bytes > 0
    # By halves the one long lane would drag others along; a batch of 30 leaves room in the last one.
    other = dataclasses.replace(setup.cohort.algorithm, personal_epochs=0)
    setup = fedabml.prepare(fed, "mlr", other, rounds=1, participation=1.0, epochs=1, batch_size=30, device="cpu")
    found = doctor.estimate(setup, scored=1)
    assert found.scoring == 0 and found.short == pytest.approx(1 - 160 / (7 * 30))


def test_the_trial_leaves_no_trace():
    fed = federation([30, 25])
    setup = fedabml.prepare(fed, "mlr", fedabml.FedABML(), rounds=2, participation=1.0, batch_size=5, device="cpu")
    before = fed.hash, fed.train.counts.tolist()
    doctor.estimate(setup, 1)
    assert before == (fed.hash, fed.train.counts.tolist()) and setup.cohort.fed is fed
    small = doctor._short(fed, 10)
    assert small.train.counts.tolist() == [10, 10]
    assert all(np.array_equal(small.train[i], fed.train[i][:10]) for i in range(2))


def test_without_numbers_from_the_system(monkeypatch):
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert doctor.host_memory() == (0, 0)
    rows, _ = doctor.devices()
    assert "memory" not in dict(rows)


def test_a_run_that_does_not_fit_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "host_memory", lambda: (1000, 10))
    assert "smaller --chunk" in run("doctor", *SMALL).stderr
