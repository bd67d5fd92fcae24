"""Heads, low-rank changes and lazy layers of any module, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedabml.errors import InputError
from fedabml.models.adapters import Adapter, LowRank, materialised, merged
from fedabml.vectors import Network

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
