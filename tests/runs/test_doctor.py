"""`fedabml doctor` tells what is there and what would happen, and its reckoning holds where it can be worked out."""

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml.runs import doctor, forecast
from tests.cli.command import SMALL, run

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]


def federation(sizes, features=3):
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, features)).astype(np.float32), np.arange(n) % 2) for n in sizes]
    return fedabml.Federation.from_arrays(pairs, classes=2)


def test_a_machine_and_a_run(tmp_path):
    text = run("doctor", *SMALL, "--eval-every", 1).stdout
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
            "saving",
            "to predict",
            "for the 5 client(s) of a chunk",
            "before the first step",
            "No run was",
        ),
    ):
        assert word in text, word
    assert "flwr" not in text
    assert list(tmp_path.iterdir()) == []


def test_the_choice_that_is_kept_is_reported(tmp_path, monkeypatch):
    """The choice of a backend stays, and where; the trial's own checkpoint does not."""
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = run("doctor", *SMALL).stdout.replace("\n", "")
    assert "backends.json" in text and "measure anew" in text and "Nothing was" not in text
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["backends.json"]
    assert list((tmp_path / "here").iterdir()) == []
    assert "backends.json" not in run("doctor", *SMALL, "--backend", "vmap", "--no-estimate").stdout


def test_flags_are_a_runs():
    text = run("doctor", *SMALL, "--algorithm", "fedavg", "--backend", "loop", "--dtype", "float64").stdout
    assert "loop (as requested)" in text and "for checks" in text and "estimator" not in text
    text = run("doctor", *SMALL, "--no-estimate").stdout
    assert "a round" not in text
    assert "no algorithm" in run("doctor", "--algorithm", "fedavgg", code=2).stderr


def test_a_dataset_that_is_not_here_is_not_fetched(tmp_path):
    result = run("doctor", "--dataset", "cifar10", "--data-dir", tmp_path)
    assert "cifar10 is not here" in result.stderr and "data get cifar10" in result.stderr
    assert "a round" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_own_data_and_a_model_that_cannot_be_batched():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) if self.layer.weight.sum().item() < 1e9 else x

    setup = fedabml.prepare(federation([8, 8]), Odd(), fedabml.FedAvg(), device="cpu")
    rows = dict(doctor.choices(setup, {"device": "cpu"}))
    assert (
        rows["backend"].startswith("loop (auto: this model cannot be batched")
        and rows["device"] == "cpu (as requested)"
    )


def test_which_precision():
    for name, word in (("fedavg", "bf16 ("), ("perfedavg", "float32, not bf16")):
        setup = fedabml.prepare(federation([8]), "mlr", fedabml.algorithms.make(name), device="cpu", dtype="bf16")
        assert dict(doctor.choices(setup, {"dtype": "bf16"}))["precision"].startswith(word)


def test_whose_products(monkeypatch):
    setup = fedabml.prepare(federation([8]), "mlr", fedabml.FedAvg(), device="cpu")
    for arm, on in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(doctor, "uses_arm_library", lambda arm=arm: arm)
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda on=on: on)
        assert ("products" in dict(doctor.choices(setup, {}))) == (arm and not on)


def test_how_steps_are_executed():
    fed = federation([8, 8])
    text = []
    for words in ({"backend": "vmap"}, {"backend": "loop"}, {"backend": "vmap", "compile": True}):
        setup = fedabml.prepare(fed, "mlr", fedabml.FedAvg(), device="cpu", **words)
        text.append(dict(doctor.choices(setup, words))["steps"])
    assert text[0].startswith("recorded") and "compiled" not in text[0]
    assert text[1] == "launched one by one" and "compiled" in text[2]


def test_without_numbers_from_the_system(monkeypatch):
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert doctor.host_memory() == (0, 0)
    rows, _ = doctor.devices()
    assert "memory" not in dict(rows)


def test_a_run_that_does_not_fit_is_noted(monkeypatch):
    monkeypatch.setattr(forecast, "host_memory", lambda: (1000, 10))
    assert "smaller --chunk" in run("doctor", *SMALL).stderr
