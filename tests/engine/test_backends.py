"""The table of backends: an entry is all that a new one needs."""

import numpy as np
import pytest
import torch

import fedabml
from fedabml.engine.backends import BACKENDS, Backend
from fedabml.runs import config


def train(backend):
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, 4)).astype(np.float32), draw.integers(0, 3, n)) for n in (9, 20, 14)]
    options = {"rounds": 2, "participation": 1.0, "epochs": 1, "batch_size": 8, "device": "cpu", "dtype": "float64"}
    fed = fedabml.Federation.from_arrays(pairs, pairs, classes=3)
    return fedabml.train(fed, "mlr", fedabml.FedABML(), backend=backend, **options)


@pytest.mark.parametrize("batched", [True, False])
def test_an_entry_of_the_table_trains_a_run(monkeypatch, batched):
    calls = []

    def apply(function, in_dims, args):
        calls.append(in_dims)
        return BACKENDS["vmap"].apply(function, in_dims, args)

    monkeypatch.setitem(BACKENDS, "mine", Backend(apply, batched))
    own, usual = train("mine"), train("loop")
    assert calls and own.summary["backend"] == "mine"
    for name, value in usual.prior.shared.items():
        torch.testing.assert_close(own.prior.shared[name], value, rtol=0, atol=1e-9)


def test_the_command_line_offers_the_table():
    assert config.BACKENDS == ("auto", *BACKENDS) == ("auto", "vmap", "loop")


def test_a_backend_that_is_not_in_the_table_is_refused():
    with pytest.raises(fedabml.InputError, match=r"no backend 'vmpa'.*vmap"):
        train("vmpa")
