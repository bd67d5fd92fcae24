"""Layers with few outputs and many inputs, on a CPU, against torch's own products."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedabml import FedAvg, Federation, train
from fedabml.accel.narrow import Narrow
from tests.accel.test_convolutions import LANES, matrices, same


class TestNarrow:
    """Few outputs of many inputs, on a CPU: the weights come first in the product, and nothing else changes."""

    @staticmethod
    def products(rows, outs, length, bias=True):
        """What is multiplied in a layer of such a shape, whose value and derivatives must be torch's own."""
        operands = matrices((LANES, *rows, length), (LANES, outs, length), (LANES, outs))[: 2 + bias]
        value = lambda *operands: torch.tanh(F.linear(*operands)).view(-1).pow(3).sum()
        made = torch.vmap(torch.func.grad_and_value(value, tuple(range(2 + bias))))
        with Narrow():
            found = made(*operands)
            traced = make_fx(torch.vmap(value))(*operands)
        same(found, made(*operands))
        found = [n for n in traced.graph.nodes if "mm" in str(n.target)]
        return [tuple(n.args[0].meta["val"].shape[1:]) for n in found]

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("outs", [1, 10, 16])
    def test_weights_first(self, outs, bias):
        assert self.products((6,), outs, 256, bias) == [(outs, 256)]

    @pytest.mark.parametrize(("rows", "outs", "length"), [((6,), 17, 256), ((6,), 10, 255), ((2, 3), 10, 300)])
    def test_other_layers_are_left_alone(self, rows, outs, length):
        (first,) = self.products(rows, outs, length)
        assert first in ((*rows, length), (6, length))

    def test_a_module_may_view_what_it_gets(self):
        x, w, b = matrices((6, 300), (5, 300), (5,))
        with Narrow():
            assert F.linear(x, w, b).view(2, -1).shape == (2, 15) and F.linear(x, w).is_contiguous()

    @pytest.mark.parametrize(("model", "wanted"), [(nn.Linear(784, 10), True), (nn.Linear(32, 10), False)])
    def test_only_networks_with_such_layers_have_the_mode(self, model, wanted, monkeypatch):
        """Every operation of a network passes through it, in Python, which takes longer than a small one's products."""
        entered = []
        monkeypatch.setattr(Narrow, "__enter__", lambda self: entered.append(self))
        monkeypatch.setattr(Narrow, "__exit__", lambda self, *error: None)
        x, y = torch.randn(20, model.in_features).numpy(), torch.arange(20).numpy() % 10
        fed = Federation.from_arrays([(x, y)] * 2, normalize="none")
        train(fed, model, FedAvg(), rounds=1, participation=1, epochs=1, evaluate=False, backend="vmap", device="cpu")
        assert bool(entered) == wanted
