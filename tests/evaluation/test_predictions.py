"""Predictions and their uncertainty, by hand and against scipy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import lognorm, norm

from fedabml import InputError, Prediction, Regression
from fedabml.data.target_transform import TargetTransform
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


def mixtures(draws=5, rows=7, targets=2, transform=None):
    g = np.random.default_rng(2)
    parts = np.concatenate([g.normal(size=(draws, rows, targets)), g.normal(-0.5, 0.6, (draws, rows, targets))], -1)
    return Regression.of(
        torch.tensor(parts), np.array([1.0, -2.0])[:targets], np.array([3.0, 0.5])[:targets], transform
    )


def test_noise_of_each_input_is_told_apart_from_the_weights():
    """Var y = E[σ²] + Var[m] over weight samples, row by row: 0 where they agree, and by hand where they do not."""
    draws = torch.tensor([[[0.0, 0.0], [1.0, math.log(2)]], [[0.0, 0.0], [3.0, math.log(4)]]], dtype=torch.float64)
    r = Regression.of(draws, np.zeros(1), np.array([10.0]))
    assert r.model_std[:, 0].tolist() == [0, 10] and r.mean[:, 0].tolist() == [0, 20]
    assert r.std[:, 0].tolist() == pytest.approx([10, 10 * math.sqrt((4 + 16) / 2 + 1)])


def test_the_quantile_of_one_gaussian_is_scipys():
    r = mixtures(draws=1)
    for level in (1e-6, 0.1, 0.5, 0.975):
        np.testing.assert_allclose(r.quantile(level), norm.ppf(level, r.mean, r.std), rtol=1e-9)
    np.testing.assert_allclose(r.median, r.mean)


def test_the_quantiles_of_a_mixture_have_their_share_below_them():
    r = mixtures()
    mean, std = np.split(r.draws, 2, -1)
    levels = [0.01, 0.1, 0.5, 0.9, 0.99]
    found = r.quantile(levels)
    assert found.shape == (5, 7, 2) and (np.diff(found, axis=0) > 0).all()
    for level, each in zip(levels, found, strict=True):
        np.testing.assert_allclose(norm.cdf(each, mean, std).mean(0), level, atol=1e-12)
        np.testing.assert_array_equal(each, r.quantile(level))


def test_the_predictions_of_a_transformed_target_are_in_its_own_unit():
    """One Gaussian of the log is a log-normal distribution: its mean, deviation, quantiles and density are scipy's."""
    r = mixtures(draws=1, targets=1, transform=TargetTransform((0.0,), (4.0,)))
    m, s = np.split(r.draws[0], 2, -1)
    expected = lognorm(s, scale=4 * np.exp(m))
    np.testing.assert_allclose(r.mean, expected.mean())
    np.testing.assert_allclose(r.std, expected.std())
    np.testing.assert_allclose(r.quantile([0.1, 0.8]), [expected.ppf(0.1), expected.ppf(0.8)], rtol=1e-6)
    np.testing.assert_allclose(r.median, expected.median())
    y = np.linspace(0.1, 30, 7)[:, None]
    np.testing.assert_allclose(r.nll(y), -expected.logpdf(y)[:, 0])
    assert (r.model_std == 0).all() and r.transformed


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_a_transformed_mixture_has_one_density_and_one_distribution_function(power):
    r = mixtures(targets=1, transform=TargetTransform((power,), (40.0,)))
    low, high = r.quantile([0.6, 0.9])
    inside = low[:, 0] > 1e-3  # elsewhere a part of the share is a y of 0
    low, high = (np.where(inside[:, None], end, [[other]]) for end, other in ((low, 1), (high, 2)))
    y = np.linspace(low, high, 801)
    area = np.trapezoid(np.exp([-r.nll(each) for each in y]), y[:, :, 0], axis=0)
    np.testing.assert_allclose(area[inside], 0.3, rtol=1e-3)
    assert inside.sum() > 3 and (r.quantile(0.001) >= 0).all()


def test_a_positive_target_has_no_quantile_below_zero_and_the_same_density():
    plain, positive = mixtures(), mixtures(transform=TargetTransform())
    np.testing.assert_array_equal(positive.quantile(0.05), np.maximum(plain.quantile(0.05), 0))
    assert (plain.quantile(0.05) < 0).any() and not positive.transformed
    np.testing.assert_array_equal(positive.gaussian(), plain.gaussian())
    assert (plain.mean < 0).any() and (positive.mean >= np.maximum(plain.mean, 0)).all()
    assert (positive.std < plain.std).all()
    np.testing.assert_array_equal(plain.nll(np.ones((7, 2))), positive.nll(np.ones((7, 2))))


def test_tables_of_a_transformed_target_are_read_back():
    whole = mixtures(transform=TargetTransform((0.0, 0.5), (1.0, 2.0)))
    again = replace(Regression.from_columns(whole.columns(), 2), transform=whole.transform)
    joined = Regression.concatenate([whole, whole])
    np.testing.assert_array_equal(again.median, whole.median)
    np.testing.assert_allclose(joined.median, np.concatenate([whole.median] * 2))


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan, "much", [], [0.5, 2], None, [[0.5]]])
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(InputError, match="between 0 and 1, such as"):
        mixtures().quantile(level)
