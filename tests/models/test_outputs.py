"""The outputs among what a module returns: named, or refused with a list of what there is."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedabml
from fedabml.errors import InputError
from fedabml.models.outputs import select_output

LOGITS, HIDDEN = torch.zeros(4, 2), torch.ones(4, 7)
Pair = namedtuple("Pair", "hidden logits")


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


@pytest.mark.parametrize(
    ("returned", "place"),
    [
        (LOGITS, None),
        ((HIDDEN, LOGITS), 1),
        ([HIDDEN, LOGITS], -1),
        ({"logits": LOGITS, "loss": None}, "logits"),
        (Output(LOGITS), "logits"),
        (Pair(HIDDEN, LOGITS), "logits"),
        (Pair(HIDDEN, LOGITS), 1),
    ],
)
def test_the_tensor_at_a_place_is_found(returned, place):
    assert select_output(returned, place) is LOGITS


@pytest.mark.parametrize(
    ("returned", "place", "words"),
    [
        ((HIDDEN, LOGITS), None, ["tuple of 0 (shape (4, 7)), 1 (shape (4, 2))", '"output": PLACE', "is 0 or 1"]),
        ({"h": HIDDEN, "logits": LOGITS, "n": 3}, None, ["'h' (shape (4, 7))", "'n' (a int)", "output=logits"]),
        ({"h": HIDDEN}, "logits", ["'h'", "no tensor is at 'logits'"]),
        (Output(LOGITS), "hidden", ["'hidden' (a NoneType)", "no tensor is at 'hidden'"]),
        ((HIDDEN,), 5, ["no tensor is at 5"]),
        (LOGITS, "logits", ["a tensor of shape (4, 2)", "Leave model_options.output out"]),
        (None, None, ["one tensor of outputs", "wrap the model"]),
        (None, 0, ["one tensor of outputs"]),
    ],
)
def test_another_place_is_refused_with_a_list_of_what_there_is(returned, place, words):
    with pytest.raises(InputError) as error:
        select_output(returned, place)
    assert all(word in str(error.value) for word in words), str(error.value)


class Two(nn.Module):
    """A module that returns a dictionary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"hidden": h, "logits": self.head(h)}


class One(Two):
    def forward(self, x):
        return super().forward(x)["logits"]


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_run_with_a_named_output_is_that_of_the_output_alone(backend, tmp_path):
    g = np.random.default_rng(0)
    fed = fedabml.Federation.from_arrays([(g.normal(size=(12, 3)), np.arange(12) % 2) for _ in range(3)])
    options = {"rounds": 2, "participation": 1.0, "epochs": 1, "backend": backend, "device": "cpu", "evaluate": False}
    with pytest.raises(InputError, match=r"'logits'"):
        fedabml.train(fed, Two(), **options)
    run = fedabml.train(fed, Two(), model_options={"output": "logits"}, **options)
    alone = fedabml.train(fed, One(), **options)
    for name, value in alone.prior.shared.items():
        assert torch.equal(run.prior.shared[name], value)
    prior = fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors"), model=Two())
    posterior = prior.personalize(fed.x[:8], fed.y[:8], epochs=1)
    again = fedabml.load_posterior(posterior.save(tmp_path / "posterior.safetensors"), model=Two())
    assert np.array_equal(again.predict(fed.x).probs, posterior.predict(fed.x).probs)
