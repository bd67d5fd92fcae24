"""Frozen weights are held once by all networks that have the same, and by nobody else."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from fedabml.models import bodies
from fedabml.models.adapters import Adapter
from fedabml.vectors import Network


def module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2))


def network(seed=0, train="head"):
    return Network(Adapter(train).apply(module(seed)))


def places(network):
    """Return where the frozen parameters of a network lie in memory, by name."""
    return {name: tensor.data_ptr() for name, tensor in network.constants.items()}


def test_networks_with_the_same_body_share_its_memory_wherever_they_are():
    one, same, other = network(), network(), network(seed=1)
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert tuple(places(one)) == names and places(one) == places(same) and one.fits(same)
    assert not one.fits(other) and places(one)["0.weight"] != places(other)["0.weight"]
    for device, dtype in (("cpu", torch.float32), ("cpu", torch.float64), ("meta", torch.float32)):
        moved, again = one.to(device, dtype), same.to(device, dtype)
        assert [p is q for p, q in zip(moved.module.parameters(), again.module.parameters(), strict=True)][:6] == [
            1
        ] * 6
        assert moved.module[0].weight.dtype == dtype and moved.module[0].weight.device.type == device
    assert places(one.to("cpu", torch.float64).to("cpu", torch.float32)) == places(one)


def test_values_that_were_rounded_are_not_those_of_the_body():
    given = module().double()
    with torch.no_grad():
        given[0].weight.div_(3)  # with more digits than float32 has
    exact = Network(Adapter("head").apply(given))
    rounded = exact.to("cpu", torch.float32)
    expected, weight = exact.constants["0.weight"].clone(), rounded.constants["0.weight"].double()
    del exact
    gc.collect()
    again = rounded.to("cpu", torch.float64)
    assert torch.equal(again.constants["0.weight"], weight) and not torch.equal(weight, expected)
    assert torch.equal(Network(Adapter("head").apply(given)).constants["0.weight"], expected)


def test_nobody_else_shares_it():
    given = module()
    one, x = Network(Adapter("head").apply(given)), torch.ones(2, 3)
    before, plain = one(one.initial, x), one.to_module(one.initial)
    other = one.with_constants({**one.constants, "0.weight": torch.zeros(4, 3)})
    with torch.no_grad():
        for parameter in (*given.parameters(), *plain.parameters()):
            parameter.zero_()
    assert torch.equal(one(one.initial, x), before) and not other.fits(one)
    assert len(list(plain.parameters())) == 8  # two layers with equal weights stay two


def test_it_is_given_back_with_the_last_network():
    gc.collect()
    before, one = len(bodies._HELD), network(seed=7)
    moved = one.to("cpu", torch.float64)
    assert len(bodies._HELD) > before
    del one, moved
    gc.collect()
    assert len(bodies._HELD) == before


def test_threads_share_it():
    one, seen = network(), []
    thread = threading.Thread(target=lambda: seen.append(one._module_of_thread()))
    thread.start()
    thread.join()
    assert seen[0] is not one.module and seen[0][0].weight is one.module[0].weight


def test_an_embedding_that_writes_to_its_own_weight_keeps_it_for_itself():
    def made():
        torch.manual_seed(0)
        return Network(Adapter("head").apply(nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 2))))

    one, other = made(), made()
    before = one.constants["0.weight"].clone()
    other.with_tokens(True)(other.initial, torch.tensor([0, 1]))
    assert torch.equal(one.constants["0.weight"], before) and not torch.equal(other.constants["0.weight"], before)


def test_complex_weights_of_a_copy_in_another_type_are_not_those_of_the_network():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([1.0 + 2.0j]), requires_grad=False)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x) * self.phase.real

    network = Network(Complex())
    with pytest.warns(UserWarning, match="imaginary"):
        network.to("cpu", torch.float64)
    assert network.constants["phase"].dtype == torch.complex64 and network.constants["phase"].item() == 1 + 2j
