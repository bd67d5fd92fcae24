"""Pooling as a compiler sees it, against torch's own."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedabml.accel.convolutions import Products
from fedabml.accel.operators import compiler_tracing


@pytest.mark.parametrize(
    ("size", "kernel", "ours"),
    [((8, 6), 2, True), ((9, 6), (3, 2), True), ((9, 6), 2, False), ((18, 36), 18, False), ((8, 6), [2], False)],
)
def test_pooling_for_a_compiler_is_that_of_torch(size, kernel, ours):
    x = torch.randn(3, 5, 4, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    x[0] = 0  # the first of many that are the largest

    def value(x):
        return torch.tanh(nn.MaxPool2d(kernel)(torch.relu(x))).pow(2).sum() + nn.functional.max_pool2d(x, kernel).sum()

    with compiler_tracing(), Products():
        made = torch.vmap(torch.func.grad_and_value(value))(x)
        trace = make_fx(torch.vmap(torch.func.grad(value)))(x)
    for one, other in zip(made, torch.vmap(torch.func.grad_and_value(value))(x), strict=True):
        assert torch.equal(one, other)
    assert ours != any("max_pool" in str(node.target) for node in trace.graph.nodes)


def test_pooling_for_a_compiler_keeps_what_is_not_a_number():
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 0, 1] = torch.nan
    with compiler_tracing(), Products():
        assert nn.functional.max_pool2d(x, 2).isnan().flatten().tolist() == [True, False]
        values, places = nn.functional.max_pool2d(x, 2, return_indices=True)
    assert places.flatten().tolist() == [1, 2]
    assert values[0, 0, 0, 1] == 0
