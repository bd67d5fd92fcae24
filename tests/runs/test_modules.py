"""What files hold of a network: the trained weights, and of a frozen body that the user has only the digest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedabml
from fedabml import models
from fedabml.errors import InputError
from tests.cli.command import run

pytestmark = pytest.mark.slow
QUICK = {"rounds": 2, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "loop", "evaluate": False}
WIDE = 1000  # of the frozen layer
FILE = f"""
import numpy as np
import torch
from torch import nn

class Wide(nn.Sequential):
    def __init__(self, outputs, own_noise=0):
        wide = nn.Linear({WIDE}, {WIDE})
        super().__init__(nn.Linear(3, {WIDE}), nn.ReLU(), wide, nn.ReLU(), nn.Linear({WIDE}, outputs))
        if own_noise:  # which the seed of a run does not decide
            noise = np.random.default_rng().random(({WIDE}, {WIDE}), np.float32)
            wide.weight = nn.Parameter(torch.from_numpy(noise))
"""


@pytest.fixture(autouse=True)
def _no_code_of_others():
    yield
    models.OWN.clear()


def federation():
    g = np.random.default_rng(0)
    return fedabml.Federation.from_arrays([(g.normal(size=(12, 3)), np.arange(12) % 2) for _ in range(2)])


def given(kind, folder, seed):
    """Return the model to train, further options, and the model that a file is loaded with."""
    if kind == "module":
        torch.manual_seed(seed)
        layers = nn.Linear(3, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 2)
        return nn.Sequential(*layers), {}, nn.Sequential(*layers)
    if kind == "code":
        (folder / "mine.py").write_text(FILE)
        return f"{folder / 'mine.py'}:Wide", {"seed": seed}, f"{folder / 'mine.py'}:Wide"
    hidden, weights = [WIDE, WIDE], folder / f"body{seed}.safetensors"
    save_file(models.build("mlp", [3], 2, seed, hidden=hidden).state_dict(), weights)
    return "mlp", {"pretrained": weights, "model_options": {"hidden": hidden}}, str(weights)


@pytest.mark.parametrize("kind", ["module", "weights", "code"])
@pytest.mark.parametrize("train", ["head", pytest.param("lora", marks=pytest.mark.nightly)])
def test_no_file_holds_the_frozen_body(kind, train, tmp_path):
    model, options, again = given(kind, tmp_path, 0)
    fed, adapter = federation(), {"train": train, "lora_rank": 1} if train == "lora" else {"train": train}
    result = fedabml.train(fed, model, out=tmp_path / "run", **adapter, **options, **QUICK)
    posterior = result.posterior(0)
    posterior.save(tmp_path / "posterior.safetensors")
    body, size = 4 * WIDE * WIDE, result.prior.input_spec.network.layout.size
    files = [file for file in tmp_path.rglob("*") if file.is_file() and not file.name.startswith("body")]
    assert {"posterior.safetensors", "shared.safetensors", "round-000002.safetensors"} <= {file.name for file in files}
    assert max(file.stat().st_size for file in files) < 4 * 4 * size + 40_000 < body / 10
    assert all(0 < line["bytes_up"] <= 2 * 4 * size for line in result.history)  # two vectors of each client
    prior = fedabml.load_prior(tmp_path / "run", model=again)
    loaded = fedabml.load_posterior(tmp_path / "posterior.safetensors", model=again)
    expected = posterior.predict(fed.x, device="cpu").probs
    for one in (loaded, prior.personalize(*(a[fed.train[0]] for a in (fed.x, fed.y)), encoded=True, device="cpu")):
        assert np.array_equal(one.predict(fed.x, device="cpu").probs, expected)
        constants = one.input_spec.network.constants
        assert constants.keys() == result.prior.input_spec.network.constants.keys()
        for name, tensor in result.prior.input_spec.network.constants.items():
            assert constants[name].data_ptr() == tensor.data_ptr()  # the body is in memory once


def test_other_weights_and_none_are_refused(tmp_path):
    _, options, weights = given("weights", tmp_path, 0)
    *_, other = given("weights", tmp_path, 1)
    path = fedabml.train(federation(), "mlp", train="head", **options, **QUICK).prior.save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match=r"the frozen weights in 'body0.safetensors'.*--model body0.safetensors"):
        fedabml.load_prior(path)
    with pytest.raises(InputError, match=r"frozen body of 'body0.safetensors'.*'body1.safetensors' has another one"):
        fedabml.load_prior(path, model=other)
    whole = fedabml.train(federation(), "mlp", **options, **QUICK).prior.save(tmp_path / "whole.safetensors")
    with pytest.raises(InputError, match=r"needs no weights of another one.*Leave it out"):
        fedabml.load_prior(whole, model=weights)


def test_a_body_that_the_seed_does_not_decide_is_in_the_file(tmp_path):
    model, _, _ = given("code", tmp_path, 0)
    options = {"train": "head", "model_options": {"own_noise": 1}}
    trained = fedabml.train(federation(), model, **options, **QUICK).prior
    path = trained.save(tmp_path / "prior.safetensors")
    assert path.stat().st_size > 4 * WIDE * WIDE
    assert fedabml.load_prior(path, model=model).input_spec.network.fits(trained.input_spec.network)


def test_a_run_finds_its_frozen_weights_and_a_posterior_is_given_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given("weights", tmp_path, 0)
    fed = federation()
    np.savez(tmp_path / "site.npz", x=fed.x, y=fed.y)
    (tmp_path / "sites").mkdir()
    for client in range(2):
        np.savez(tmp_path / f"sites/{client}.npz", x=fed.x[fed.train[client]], y=fed.y[fed.train[client]])
    words = ["--model", "mlp", "--set", f"model_options.hidden=[{WIDE},{WIDE}]", "--pretrained", "body0.safetensors"]
    words += ["--train", "head", "--rounds", 1, "--device", "cpu", "--no-evaluate"]
    run("train", "--data", "sites", *words, "--out", "run")
    output = run("personalize", "run", "--data", "site.npz", "--device", "cpu").stdout
    weights = str(tmp_path / "body0.safetensors")
    assert f"--model {weights}" in output
    assert "--model body0.safetensors" in run("predict", "posterior.safetensors", "--data", "site.npz", code=2).stderr
    run("predict", "posterior.safetensors", "--data", "site.npz", "--model", weights, "--device", "cpu")
    assert (tmp_path / "predictions.csv").is_file()
