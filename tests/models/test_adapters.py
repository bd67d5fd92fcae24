"""Heads, low-rank changes and lazy layers of any module, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml.errors import InputError
from fedabml.models.adapters import Adapter, LowRank, materialised, merged
from fedabml.vectors import Network

QUICK = {"rounds": 1, "epochs": 1, "device": "cpu", "backend": "loop", "evaluate": False}
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_low_rank_changes_start_at_the_module_and_are_w_plus_ba():
    module = mlp()
    network = Network(Adapter("lora", rank=2, alpha=6.0).apply(module))
    assert network.layout.names == ("0.lora_a", "0.lora_b", "2.weight", "2.bias")
    assert network.layout.size == 2 * 3 + 5 * 2 + 12
    assert torch.equal(network(network.initial, X), module(X))
    vector = torch.linspace(-1, 1, network.layout.size)
    a, b, w, bias = network.layout.split(vector).values()
    hidden = torch.tanh(X @ (module[0].weight + 6 / 2 * b @ a).T + module[0].bias)
    torch.testing.assert_close(network(vector, X), hidden @ w.T + bias)
    plain = merged(network.to_module(vector))
    assert not any(isinstance(part, LowRank) for part in plain.modules())
    torch.testing.assert_close(plain(X), network(vector, X))


class Shared(nn.Module):
    """One linear layer under two names of its own, and within a second part; the head has a second name, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = self.again = nn.Linear(3, 3)
        self.part = nn.Sequential(nn.Tanh(), self.first)
        self.head = self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.again(self.part(self.first(x))))


def test_a_shared_layer_is_changed_once_under_all_its_names():
    adapted = Adapter("lora", rank=2).apply(Shared())
    assert adapted.first is adapted.again is adapted.part[1] and isinstance(adapted.first, LowRank)
    assert adapted.head is adapted.last and isinstance(adapted.head, nn.Linear)
    network = Network(adapted)
    vector = torch.linspace(-1, 1, network.layout.size)
    plain = merged(network.to_module(vector))
    assert not any(isinstance(part, LowRank) for part in plain.modules())
    torch.testing.assert_close(plain(X), network(vector, X))


def test_the_head_alone_is_trained():
    network = Network(Adapter("head").apply(mlp()))
    assert network.layout.names == ("2.weight", "2.bias")
    with pytest.raises(InputError, match="no body to freeze"):
        Adapter("head").apply(nn.Linear(3, 2))


def test_lazy_layers_get_shapes_from_the_data_and_weights_from_the_seed():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    torch.manual_seed(1)
    one = materialised(lazy, [3], seed=5)
    torch.manual_seed(2)
    two, other = materialised(lazy, [3], seed=5), materialised(lazy, [3], seed=6)
    assert one[0].weight.shape == (4, 3) and one[2].weight.shape == (2, 4)
    assert torch.equal(one[0].weight, two[0].weight) and not torch.equal(one[0].weight, other[0].weight)
    assert nn.parameter.is_lazy(lazy[0].weight)  # the user's module is not changed


def test_a_prior_is_loaded_whose_frozen_lazy_layer_was_drawn_from_another_seed(tmp_path):
    g = np.random.default_rng(0)
    fed = fedabml.Federation.from_arrays([(g.normal(size=(6, 3)), np.arange(6) % 2) for _ in range(2)])
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    run = fedabml.train(fed, lazy, train="head", seed=3, **QUICK)
    prior = fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors"), model=lazy)
    body, drawn = (each.input_spec.network.module[0].weight for each in (prior, run.prior))
    assert torch.equal(body, drawn)
    again = fedabml.load_prior(prior.save(tmp_path / "again.safetensors"), model=lazy)
    assert again.input_spec.origin.seed == 3


def test_lazy_batchnorm_is_refused_by_name():
    with pytest.raises(InputError, match=r"layer '1' is a LazyBatchNorm1d.*nn.GroupNorm"):
        materialised(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), [3])
