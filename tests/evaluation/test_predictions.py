"""Predictions and their uncertainty, by hand and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from fedabml import Prediction, Regression
from fedabml.evaluation.predictions import entropy, surprise


def test_entropy_by_hand():
    assert entropy(np.array([1.0, 0.0])) == 0
    assert entropy(np.full(4, 0.25)) == pytest.approx(math.log(4))
    assert entropy(np.array([0.5, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2))


def test_surprise_by_hand():
    """K Σ π p: the density ratio of an input, by its labels."""
    labels = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).clamp_min(1e-12).log()
    network = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.1, 0.9, 0.0]], dtype=torch.float64)
    wanted = [-math.log(2), 0.0, -math.log(4 * 0.05)]  # twice as likely here, as likely, a fifth as likely
    assert surprise(network, labels).tolist() == pytest.approx(wanted, abs=1e-9)
    # With a label level in the probabilities, it is taken out of each weight sample first.
    pi = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    draws = torch.tensor([[[0.2, 0.3, 0.5]], [[0.6, 0.3, 0.1]]], dtype=torch.float64)
    level = draws * pi / (draws * pi).sum(-1, keepdim=True)
    wanted = -math.log(3 * float((draws.mean(0) * pi).sum()))
    assert Prediction.of(level, pi.log()).surprise[0] == pytest.approx(wanted)
    assert Prediction.of(level).surprise is None


def test_mutual_information_by_hand():
    sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two certain models that disagree: all of it is the weights'
    p = Prediction.of(sure)
    assert p.probs.tolist() == [[0.5, 0.5]]
    assert p.mutual_information[0] == pytest.approx(math.log(2)) and p.entropy[0] == pytest.approx(math.log(2))
    same = Prediction.of(torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]))  # two that agree: none of it is
    assert same.mutual_information[0] == pytest.approx(0, abs=1e-12)
    mixed = Prediction.of(torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]], dtype=torch.float64))
    h = lambda p: -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert mixed.mutual_information[0] == pytest.approx(h(0.7) - (h(0.9) + h(0.5)) / 2)
    assert mixed.label.tolist() == [0]


def test_regression_in_the_units_of_the_data():
    draws = torch.tensor([[[1.0, math.log(0.5)]], [[3.0, math.log(0.5)]]], dtype=torch.float64)
    r = Regression.of(draws, np.array([10.0]), np.array([2.0]))
    assert r.mean.tolist() == [[14.0]] and r.model_std.tolist() == [[2.0]]
    assert r.std[0, 0] == pytest.approx(math.sqrt(1.0 + 4.0))  # noise .5·2, and the spread of the two means


def test_nll_is_that_of_the_mixture():
    g = np.random.default_rng(1)
    draws = torch.tensor(np.concatenate([g.normal(size=(6, 8, 2)), 0.3 * g.normal(size=(6, 8, 2))], -1))
    shift, scale, y = np.array([1.0, -2.0]), np.array([3.0, 0.5]), g.normal(size=(8, 2))
    mean, std = draws[..., :2].numpy() * scale + shift, np.exp(draws[..., 2:].numpy()) * scale
    each = norm.logpdf(y, mean, std).sum(-1)
    np.testing.assert_allclose(Regression.of(draws, shift, scale).nll(y), math.log(6) - logsumexp(each, axis=0))


def test_nll_far_away_stays_finite():
    r = Regression.of(torch.tensor([[[0.0, 0.0]]]), np.zeros(1), np.ones(1))
    assert r.nll(np.array([[1e3]]))[0] == pytest.approx(0.5e6 + 0.5 * math.log(2 * math.pi))


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_batches_are_joined_and_tables_are_read_back(kind: str) -> None:
    draws = torch.rand(3, 10, 4, dtype=torch.float64)
    if kind == "classes":
        make = lambda rows: Prediction.of(draws[:, rows] / draws[:, rows].sum(-1, keepdim=True))
    else:
        make = lambda rows: Regression.of(draws[:, rows], np.zeros(2), np.ones(2))
    whole = make(slice(None))
    joined = type(whole).concatenate([make(slice(0, 4)), make(slice(4, 10))])
    again = type(whole).from_columns(whole.columns(), 2)
    for name in ("probs", "mutual_information") if kind == "classes" else ("mean", "std", "model_std", "draws"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
        assert np.array_equal(getattr(again, name), getattr(whole, name))
    assert whole.finite.all() and whole.finite.shape == (10,)
