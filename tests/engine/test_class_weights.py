"""Class weights in training: the loss by hand, and a row of weight two is a row that occurs twice."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedabml
from fedabml.algorithms import make
from fedabml.algorithms.base import Batch
from fedabml.engine.loss import ClientLoss
from fedabml.errors import InputError
from fedabml.gaussian import Point
from fedabml.likelihoods import Categorical
from fedabml.models import build
from fedabml.vectors import Network

QUICK = {"rounds": 3, "participation": 1.0, "epochs": 2, "batch_size": 1000, "dtype": "float64", "device": "cpu"}


def rows(seed=0, n=60):
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 4)).astype(np.float32)
    return x, (x[:, 0] + random.normal(size=n) > 1).astype(int)


def test_the_loss_is_that_of_torch_with_weights():
    network = Network(build("mlr", [4], 2, 0))
    x, y = rows()
    weights, mask = torch.tensor([0.5, 3.0]), torch.ones(60)
    mask[50:] = 0
    loss = ClientLoss(network, Categorical(2, (0.5, 3.0)), None, class_weights=weights)
    batch = Batch(torch.as_tensor(x), torch.as_tensor(y), mask)
    logits = network.module(torch.as_tensor(x[:50]))
    by_torch = F.cross_entropy(logits, torch.as_tensor(y[:50]), weights, reduction="sum") / 50
    torch.testing.assert_close(loss(Point(network.initial), batch, torch.zeros(2).long()), by_torch)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_a_weight_of_two_is_a_row_that_occurs_twice(backend):
    """With whole batches of one client both minimise the same function."""
    x, y = rows()
    results = []
    for data, weights in (((x, y), "1,2"), ((np.r_[x, x[y == 1]], np.r_[y, y[y == 1]]), None)):
        fed = fedabml.Federation.from_arrays([data], normalize="none")
        run = fedabml.train(
            fed, "mlr", make("fedavg-ft"), class_weights=weights, backend=backend, evaluate=False, **QUICK
        )
        results.append(run.prior.shared["mean"])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_weights_raise_the_probability_of_a_rare_class_and_travel_with_the_prior(tmp_path):
    fed = fedabml.Federation.from_arrays([rows(seed) for seed in range(4)], [rows(seed, 200) for seed in range(4, 8)])
    options = QUICK | {"rounds": 10, "dtype": "float32"}
    plain, balanced = (
        fedabml.train(fed, "mlr", fedabml.FedABML(), class_weights=w, evaluate=False, **options)
        for w in (None, "balanced")
    )
    assert balanced.config["likelihood"]["weights"] and "weights" not in plain.config["likelihood"]
    x, y = rows(9, 100)
    prior = fedabml.load_prior(balanced.prior.save(tmp_path / "prior.safetensors"))
    assert prior.input_spec.likelihood.weights == balanced.prior.input_spec.likelihood.weights
    shares = [p.personalize(x, y).predict(x).probs[:, 1].mean() for p in (plain.prior, prior)]
    assert shares[1] > shares[0] + 0.1  # weights shift the base rate: calibrate afterwards
    own = prior.personalize(x, y, class_weights="none", epochs=50, lr=0.1).predict(x).probs[:, 1].mean()
    assert own < shares[1]
    with pytest.raises(InputError, match="class 1 has none"):
        prior.personalize(x[y == 0], y[y == 0], class_weights="balanced")
