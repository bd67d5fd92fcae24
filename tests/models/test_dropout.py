"""Dropout inside of attention: masks are a function of the key, the same for one client and for many at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedabml import rng
from fedabml.accel.process import quiet_vmap
from fedabml.models.dropout import KeyedDropout
from fedabml.vectors import Network

X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """Self-attention with dropout of its weights alone."""

    def __init__(self, need_weights, batch_first=True, p=0.4):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=p, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Bare(nn.Module):
    """Attention by function, which drops even where the module does not train."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.options = nn.Linear(8, 8), options

    def forward(self, x):
        h = self.linear(x)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.4, **self.options)


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODULES = {
    "heads": lambda: Heads(False),
    "heads with weights": lambda: Heads(True),
    "heads, sequence first": lambda: Heads(False, batch_first=False),
    "function": Bare,
    "causal function": lambda: Bare(is_causal=True),
    "encoder": encoder,
    "encoder, norm first": lambda: encoder(norm_first=True),
}


@pytest.mark.parametrize("kind", MODULES)
def test_masks_are_a_function_of_the_key_alone(kind):
    network = Network(MODULES[kind]())
    network.probe(X)
    assert network.dropout
    call = lambda *key: network(network.initial, X, rng.key(*key))
    torch.manual_seed(5)
    first, state = call(1), torch.random.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(call(1), first)
    assert not torch.equal(call(2), first)
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's own generator is not used


@pytest.mark.parametrize("kind", MODULES)
def test_clients_batched_equal_clients_one_by_one(kind):
    network = Network(MODULES[kind]())
    keys, vectors = rng.keys((1,), range(3)), torch.stack([network.initial, network.initial * 0.5, -network.initial])
    gradient = lambda w, key: torch.func.grad(lambda w: network(w, X, key).square().sum())(w)
    for function in (lambda w, key: network(w, X, key), gradient):
        single = torch.stack([function(w, key) for w, key in zip(vectors, keys, strict=True)])
        torch.testing.assert_close(torch.vmap(function)(vectors, keys), single, rtol=1e-4, atol=1e-5)
    scored = torch.stack([network(w, X) for w in vectors])
    with quiet_vmap():  # torch's own attention is not batched on a CPU
        torch.testing.assert_close(torch.vmap(lambda w: network(w, X))(vectors), scored, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODULES)
def test_nothing_is_dropped_without_a_key(kind):
    module = MODULES[kind]()
    network = Network(module)
    for part in module.modules():
        part.p = part.dropout = (
            0.0 if isinstance(getattr(part, "dropout", None), float) else getattr(part, "dropout", 0)
        )
    if kind.endswith("function"):
        h = module.linear(X)
        expected = F.scaled_dot_product_attention(h, h, h, **module.options)
    else:
        expected = module.eval()(X)
    torch.testing.assert_close(network(network.initial, X), expected)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_dropout_worked_out_by_hand(need_weights):
    module, key, p = Heads(need_weights), rng.key(3), 0.4
    network = Network(module)
    q, k, v = (
        t.view(5, 3, 2, 4).transpose(1, 2)
        for t in F.linear(X, module.attention.in_proj_weight, module.attention.in_proj_bias).chunk(3, -1)
    )
    weights = (q @ k.transpose(-2, -1) / math.sqrt(4)).softmax(-1)
    keep = rng.uniform(rng.fold(key, 1), weights.shape, torch.float32) >= p
    assert 0.4 < keep.double().mean() < 0.8
    mixed = (weights * keep / (1 - p)) @ v
    expected = module.attention.out_proj(mixed.transpose(1, 2).reshape(5, 3, 8))
    torch.testing.assert_close(network(network.initial, X, key), expected)


@pytest.mark.parametrize("mask", ["none", "causal", "words", "numbers", "grouped"])
def test_attention_by_function_is_torchs_where_hardly_anything_is_dropped(mask):
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 3, 8, generator=g) for _ in range(3))
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "words": {"attn_mask": torch.tensor([[True, False, True]] * 3)},
        "numbers": {"attn_mask": torch.randn(3, 3, generator=g), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[mask]
    if mask == "grouped":
        k, v = k[:, :2], v[:, :2]
    with KeyedDropout(rng.key(0)):
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **options)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, **options))


def test_a_row_of_padding_alone_stays_finite():
    x = torch.ones(1, 1, 2, 4)
    with KeyedDropout(rng.key(0)):
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(2, 2, dtype=torch.bool), dropout_p=0.5)
    assert torch.isfinite(out).all()
