"""The paper's networks: their sizes, their seeds, the inputs they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedabml import InputError, models
from fedabml.models import Seeded


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "parameters"),
    [
        ("mlr", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 62, 209_662),
        ("cnn", (3, 32, 32), 10, 307_842),
        ("cnn100", (3, 32, 32), 100, 1_075_044),
    ],
)
def test_parameter_counts_of_the_paper(name, shape, outputs, parameters):
    module = models.build(name, shape, outputs)
    assert count(module) == parameters
    assert module(torch.zeros(2, *shape)).shape == (2, outputs)


def test_resnet18_has_no_running_statistics():
    module = models.build("resnet18", (3, 32, 32), 100)
    assert round(count(module) / 1e6, 1) == 11.2
    assert not list(module.buffers())
    assert module(torch.zeros(1, 3, 16, 16)).shape == (1, 100)


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(0)
    first = models.build("mlp", (4,), 3, seed=1)
    state = torch.random.get_rng_state()
    again = models.build("mlp", (4,), 3, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's generator is left alone
    other = models.build("mlp", (4,), 3, seed=2)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


def test_so_are_those_of_other_layers_and_of_ones_own():
    """A user's class may have attention, whose weights are drawn by another function, and may draw weights itself."""

    def made():
        attention = nn.MultiheadAttention(8, 2).in_proj_weight
        return attention, torch.randn(3), torch.rand(2), torch.randperm(9), torch.empty(4).normal_()

    torch.manual_seed(5)
    expected = made()
    torch.manual_seed(6)
    with Seeded(5):
        seeded = made()
    assert all(torch.equal(a, b) for a, b in zip(expected, seeded, strict=True))


def test_models_take_options_and_vectors():
    module = models.build("mlp", (6,), 1, hidden=(4,))
    assert count(module) == 6 * 4 + 4 + 4 + 1


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cnn", (784,), "16×16"),
        ("cnn", (1, 8, 8), "16×16"),
        ("resnet18", (20,), "needs images"),
        ("resnet", (3,), "Did you mean 'resnet18'"),
    ],
)
def test_what_cannot_be_built_is_refused(name, shape, words):
    with pytest.raises(InputError, match=words):
        models.build(name, shape, 3)


def test_the_smallest_image_of_the_cnn():
    assert models.build("cnn", (1, 16, 16), 3)(torch.zeros(2, 1, 16, 16)).shape == (2, 3)


def test_unknown_options_are_refused():
    with pytest.raises(InputError, match="does not take these options"):
        models.build("mlr", (3,), 2, hidden=(4,))
