"""Posteriors of several labels and of labelled steps are served as `predict` gives them; padding has no label."""

import csv
import io

import httpx
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

import fedabml
from fedabml import FedABML, InputError, load_posterior
from fedabml.serve import ServeOptions, create_app
from tests.cli.command import run
from tests.serve.running import QUICK, running

WEIGHTS = np.random.default_rng(9).normal(size=(5, 3))
LENGTH, PADDING = 6, 0
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [2]]


def labelled(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 5))
    y = (x @ WEIGHTS + rng.normal(size=(40, 3)) > 0).astype(np.int64)
    y[::9, 1] = -1  # not known
    return x, y


def posterior(task):
    fed = fedabml.Federation.from_arrays([labelled(0), labelled(1)], task=task)
    prior = fedabml.train(fed, "mlr", FedABML(lr=0.05), **QUICK).prior
    return prior.personalize(*labelled(0), validation=0.4, device="cpu")


class Tagger(nn.Module):
    """A class for each token, from the token and the mean of the sentence."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, x, attention_mask):
        words = self.words(x) * attention_mask[..., None]
        return self.head(words + words.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None])


def sentences(seed):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 12, rng.integers(2, LENGTH + 1)) for _ in range(40)]
    tokens[0] = rng.integers(1, 12, LENGTH)
    return [{"tokens": each, "tags": each % 3} for each in tokens]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    torch.manual_seed(0)
    data = {"a": sentences(0), "b": sentences(1)}
    fed = fedabml.Federation.from_datasets(data, x="tokens", y="tags", padding=PADDING, task="sequence")
    prior = fedabml.train(fed, Tagger(), FedABML(lr=0.05), **QUICK).prior
    own = prior.personalize(fed.x[fed.train[0]], fed.y[fed.train[0]], validation=0.4, device="cpu")
    return own.save(tmp_path_factory.mktemp("tagged") / "posterior.safetensors")


@pytest.mark.parametrize("task", ["multilabel", "sequence"])
@pytest.mark.slow
def test_several_answers_are_served_as_predict_gives_them(task, tmp_path):
    path, x = posterior(task).save(tmp_path / "posterior.safetensors"), labelled(7)[0][:4]
    p = load_posterior(path).predict(x, device="cpu")
    with running(path) as (url, _), httpx.Client(base_url=url) as client:
        reply = client.post("/predict", json={"rows": x.tolist()})
        table = client.post("/predict", json={"rows": x.tolist()}, headers={"accept": "text/csv"}).text
        described = client.get("/openapi.json").json()["components"]["schemas"]["Prediction"]["properties"]
        short = client.post("/predict", json={"rows": [[1.0, 2.0]]})
    assert reply.status_code == 200 and short.status_code == 422 and "(2,)" in short.json()["detail"]
    rows = reply.json()["predictions"]
    assert [*rows[0]] == [*described] == table.splitlines()[0].split(",")[1:]
    probs = p.positive if task == "multilabel" else p.probs.max(2)
    assert np.allclose([[row[f"p_{j}"] for j in range(3)] for row in rows], probs, atol=1e-12)
    assert np.allclose([row["entropy"] for row in rows], p.entropy.sum(1))
    assert [row["alarm"] for row in rows] == p.checks.alarm.tolist()
    if task == "multilabel":
        assert [row["labels"] for row in rows] == [[str(j) for j in np.flatnonzero(one)] for one in p.label]
    else:
        assert [[int(row[f"label_{t}"]) for t in range(3)] for row in rows] == p.label.tolist()


def test_steps_of_padding_have_no_label_and_no_part_in_the_entropy(tagged):
    """Sentences of other lengths are filled up: what is predicted for the filling is nobody's answer."""
    padded = np.array([row + [PADDING] * (LENGTH - len(row)) for row in ROWS])
    p = load_posterior(tagged, Tagger()).predict(padded, device="cpu")
    assert p.steps.tolist() == (padded != PADDING).tolist()
    with TestClient(create_app(tagged, ServeOptions(), None, Tagger()), base_url="http://localhost") as client:
        rows = client.post("/predict", json={"rows": ROWS}).json()["predictions"]
        lines = client.post("/predict", json={"rows": ROWS}, headers={"accept": "text/csv"}).text
        too_long = client.post("/predict", json={"rows": [[1] * (LENGTH + 1)]})
        unknown = client.post("/predict", json={"rows": [[99]]})
    for row, tokens, label, probs, entropy in zip(rows, ROWS, p.label, p.probs, p.entropy, strict=True):
        n = len(tokens)
        assert [row[f"label_{t}"] for t in range(LENGTH)] == [*map(str, label[:n]), *[""] * (LENGTH - n)]
        assert np.allclose([row[f"p_{t}"] for t in range(n)], probs[:n].max(1), atol=1e-12)
        assert [row[f"p_{t}"] for t in range(n, LENGTH)] == [None] * (LENGTH - n)
        assert row["entropy"] == pytest.approx(entropy[:n].sum())
    last = list(csv.DictReader(io.StringIO(lines)))[2]
    assert last["label_0"] == str(p.label[2, 0]) and last["label_1"] == last["p_1"] == ""
    assert too_long.status_code == unknown.status_code == 422 and "99" in unknown.json()["detail"]


def test_a_command_says_that_a_module_of_the_users_own_is_needed(tagged):
    with pytest.raises(InputError, match="--model"):
        create_app(tagged)
    assert "--model" in run("serve", tagged, "--port", 0, code=2).output
