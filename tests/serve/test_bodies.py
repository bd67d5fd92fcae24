"""Bodies of requests without a service: names that stand twice, and sequences of tokens of different lengths."""

import json
import time

import numpy as np
import pytest
import torch
from torch import nn

from fedabml.errors import InputError
from fedabml.gaussian import Point
from fedabml.likelihoods import Categorical
from fedabml.runs.input_spec import InputSpec
from fedabml.runs.posterior import Posterior
from fedabml.serve.bodies import PARSERS, read_rows
from fedabml.serve.openapi import description, example_body, example_row
from fedabml.vectors import Network
from tests.serve.test_openapi import posterior


class Masked(nn.Module):
    """The mean embedding of the tokens that are not padding; without any, it is 0 / 0."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x, attention_mask):
        mask = attention_mask[..., None].to(torch.float32)
        return self.head((self.embedding(x) * mask).sum(1) / mask.sum(1))


def tokens(padding):
    torch.manual_seed(0)
    network = Network(Masked(), 0, pad=padding).with_tokens(True)
    zero, one = np.zeros(()), np.ones(())
    spec = InputSpec(network, Categorical(2), None, (4,), zero, one, zero, one)
    return Posterior(Point(network.initial), spec, None)


def test_a_name_that_stands_twice_is_found_in_linear_time():
    names = [f"name{i}" for i in range(15_000)]
    body = json.dumps({"rows": [dict.fromkeys(names, 1)]}).replace("}]", ', "name14999": 1}]').encode()
    begun = time.process_time()
    with pytest.raises(InputError, match="'name14999' twice"):
        PARSERS["application/json"](posterior((3,)).input_spec, body, 1)
    assert time.process_time() - begun < 0.5  # comparing each with all before takes seconds


@pytest.mark.parametrize("padding", [0, 3])
def test_the_example_of_tokens_is_not_padding(padding):
    own = tokens(padding)
    assert padding not in example_row(own.input_spec)
    rows = PARSERS["application/json"](own.input_spec, example_body(own.input_spec), 1)
    assert np.isfinite(own.predict_inputs(read_rows(own, [rows], True), device="cpu").probs).all()


def test_short_sequences_of_tokens_are_padded_as_predict_does():
    own, sequences = tokens(0), [[5, 6], [1, 2, 3, 4], [7]]
    expected = own.predict(sequences, device="cpu").probs
    text = "\n".join(",".join(map(str, each)) for each in sequences)
    for kind, body in (("application/json", json.dumps({"rows": sequences})), ("text/csv", text)):
        rows = PARSERS[kind](own.input_spec, body.encode(), 3)
        assert (own.predict_inputs(read_rows(own, [rows], True), device="cpu").probs == expected).all()
    columns = {"label": ["0"]}
    content = description(own, columns, 7)["paths"]["/predict"]["post"]["requestBody"]["content"]
    row = content["application/json"]["schema"]["properties"]["rows"]["items"]
    assert (row["minItems"], row["maxItems"]) == (1, 4)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1, 2, 3, 4, 5], "at most 4"),
        ([], "no token but padding"),
        ([0, 0], "no token but padding"),
        ([1.5], "whole numbers"),
        ([1e300], "whole numbers"),
        ([10**30], "whole number"),
        ([-1], "outside"),
        ([None], "whole numbers"),
        (["a"], "whole numbers"),
        ([[1], [1, 2]], "shape"),
        ([[1]], "shape"),
        ({"a": 1}, "numbers"),
        (1, "shape"),
    ],
)
def test_what_is_wrong_with_tokens_is_said(row, words):
    with pytest.raises(InputError, match=words):
        PARSERS["application/json"](tokens(0).input_spec, json.dumps({"rows": [row]}).encode(), 1)
