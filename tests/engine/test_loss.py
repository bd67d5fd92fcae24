"""Noise that depends on the input, and a transformed target, through the engine's backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedabml
from fedabml.engine.samples import Data
from fedabml.runs.prepare import prepare

QUICK = {"rounds": 2, "participation": 1.0, "epochs": 2, "batch_size": 8, "device": "cpu", "dtype": "float64"}


def federation(clients=3, rows=20):
    g = np.random.default_rng(0)
    x = g.normal(size=(clients, rows, 2))
    y = np.exp(x[..., 0] + np.exp(0.6 * x[..., 1] - 1.2) * g.normal(size=(clients, rows)))
    parts = [(x[i, :14], y[i, :14]) for i in range(clients)]
    tests = [(x[i, 14:], y[i, 14:]) for i in range(clients)]
    return fedabml.Federation.from_arrays(parts, tests)


@pytest.mark.parametrize("algorithm", [fedabml.FedABML(), fedabml.FedAvg(personal_epochs=2)], ids=["fedabml", "fedavg"])
@pytest.mark.slow
def test_both_backends_learn_the_same_noise(algorithm):
    fed, noise = federation().with_positive_target("boxcox"), fedabml.GaussianNoise(1, by_input=True)
    batched, looped = (
        fedabml.train(fed, "mlp", algorithm, likelihood=noise, backend=b, model_options={"hidden": [5]}, **QUICK)
        for b in ("vmap", "loop")
    )
    for name, value in batched.prior.shared.items():
        torch.testing.assert_close(value, looped.prior.shared[name], rtol=1e-9, atol=1e-9)
    for name in ("rmse", "mae", "nll", "coverage", "pinball", "interval_width", "std", "model_std"):
        assert batched.summary[name] == pytest.approx(looped.summary[name], rel=1e-7)


def test_the_model_learns_the_transformed_target_standardised():
    fed = federation().with_positive_target("log")
    y = Data.of(fed, torch.device("cpu"), torch.float64).y.numpy()
    logs = np.log(fed.y.astype(float))
    train = logs[fed.train.index]
    np.testing.assert_allclose(y, (logs - train.mean(0)) / train.std(0), rtol=1e-5, atol=1e-6)
    plain = Data.of(fed.with_positive_target(), torch.device("cpu"), torch.float64)
    assert plain is not Data.of(fed, torch.device("cpu"), torch.float64)


def test_a_network_by_name_gets_a_head_for_the_noise_and_a_module_is_asked_for_one():
    fed, noise = federation(), fedabml.GaussianNoise(1, by_input=True)
    setup = prepare(fed, "mlr", likelihood=noise, device="cpu")
    assert setup.input_spec.model["outputs"] == 2 and setup.input_spec.outputs == 1
    with pytest.raises(fedabml.InputError, match=r"need \(2,\): the means, then a log deviation"):
        prepare(fed, torch.nn.Linear(2, 1), likelihood=noise, device="cpu")
