"""What clients learn from validation data, held against closed forms and known coverage."""

import math

import numpy as np
import pytest
from sklearn import metrics
from sklearn.isotonic import IsotonicRegression

from fedabml.errors import InputError
from fedabml.evaluation.calibration import (
    Aim,
    Calibration,
    choose_threshold,
    conformal_quantile,
    cross_calibrated,
    fit_temperature,
    interval_scores,
    intervals,
    isotonic_fit,
    label_scores,
    label_sets,
    with_temperature,
)


@pytest.mark.parametrize("truth", [0.5, 1.0, 3.0])
def test_a_known_temperature_is_found(truth):
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(4), 40_000)
    right = with_temperature(probs, truth)
    y = (random.random((len(probs), 1)) > right.cumsum(1)).sum(1)
    assert fit_temperature(probs, y) == pytest.approx(truth, rel=0.05)


def test_the_temperature_of_two_outcomes_in_closed_form():
    """Of samples with p = .9 a share .75 is right: the best temperature makes .9 into .75."""
    probs, y = np.tile([0.1, 0.9], (40_000, 1)), np.repeat([1, 0], [30_000, 10_000])
    expected = math.log(9) / math.log(3)
    assert fit_temperature(probs, y) == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(with_temperature(probs[:1], expected)[0], [0.25, 0.75])
    assert fit_temperature(probs[:0], y[:0]) == 1


def test_few_samples_change_little():
    """A calibrated model stays nearly so, also where all of its few validation samples are right."""
    probs, y = np.tile([0.1, 0.9], (10, 1)), np.ones(10, int)
    assert 0.6 < fit_temperature(probs, y) < 1
    random, gains = np.random.default_rng(0), []
    for _ in range(300):
        probs = random.dirichlet([1, 4], 12)
        y = (random.random(12) < probs[:, 1]).astype(int)
        tempered = with_temperature(probs, fit_temperature(probs, y))
        gains.append((probs * (np.log(probs) - np.log(tempered))).sum(1).mean())  # expected NLL, after less before
    assert np.mean(gains) < 0.02


def test_the_threshold_of_the_best_f1():
    random = np.random.default_rng(1)
    y = (random.random(300) < 0.15).astype(int)
    score = np.round(np.clip(0.2 * y + random.random(300) * 0.6, 0, 1), 2)
    chosen = choose_threshold(score, y, Aim.parse("f1"))
    best = max(metrics.f1_score(y, score >= t) for t in np.unique(score))
    assert metrics.f1_score(y, score >= chosen) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_the_threshold_of_a_recall_is_the_highest_that_has_it(share):
    random = np.random.default_rng(2)
    y = (random.random(200) < 0.3).astype(int)
    score = np.round(0.3 * y + 0.7 * random.random(200), 2)
    chosen = choose_threshold(score, y, Aim.parse(f"recall >= {share}"))
    assert metrics.recall_score(y, score >= chosen) >= share
    higher = [t for t in np.unique(score) if t > chosen + 0.005]
    assert all(metrics.recall_score(y, score >= t) < share for t in higher[1:])


def test_the_threshold_of_costs_is_bayes_decision():
    """With calibrated probabilities a miss that costs nine alarms moves the threshold to 1 / (1 + 9)."""
    random = np.random.default_rng(3)
    score = random.random(200_000)
    y = (random.random(len(score)) < score).astype(int)
    assert choose_threshold(score, y, Aim.parse("cost:9,1")) == pytest.approx(0.1, abs=0.02)


def test_where_data_cannot_tell_there_is_no_threshold():
    assert choose_threshold(np.array([0.2, 0.4]), np.array([0, 0]), Aim.parse("f1")) is None
    assert choose_threshold(np.array([0.9, 0.4]), np.array([0, 1]), Aim.parse("precision>=0.9")) is None
    assert choose_threshold(np.array([0.9, 0.4]), np.array([0, 1]), Aim.parse("cost:1,5")) == math.inf


@pytest.mark.parametrize("text", ["recall", "recall>=2", "recall>=x", "f1>=0.5", "cost:1", "cost:-1,2", "", "auc"])
def test_other_aims_are_refused(text):
    with pytest.raises(InputError, match="aim of the threshold"):
        Aim.parse(text)


def test_sets_cover_what_they_promise():
    """The mean coverage over many validation sets of 50 lies between .9 and .9 + 1/51, as the theorem says."""
    random, covered = np.random.default_rng(4), []
    for _ in range(400):
        probs = random.dirichlet(np.ones(5), 150)
        y = (random.random((150, 1)) > probs.cumsum(1)).sum(1)
        quantile = conformal_quantile(label_scores(probs[:50], y[:50]), 0.9)
        covered.append(label_sets(probs[50:], quantile)[np.arange(100), y[50:]].mean())
    assert 0.9 - 0.006 < np.mean(covered) < 0.9 + 1 / 51 + 0.012


def test_intervals_cover_what_they_promise_whatever_the_noise():
    random, covered = np.random.default_rng(5), []
    for _ in range(400):
        std = random.uniform(0.5, 2, 150)
        y = random.standard_t(3, 150) * std
        quantile = conformal_quantile(interval_scores(np.zeros(50), std[:50], y[:50]), 0.8)
        low, high = intervals(np.zeros(100), std[50:], quantile)
        covered.append(((low <= y[50:]) & (y[50:] <= high)).mean())
    assert 0.8 - 0.01 < np.mean(covered) < 0.8 + 1 / 51 + 0.01


def test_too_few_samples_give_everything():
    assert conformal_quantile(np.arange(8.0), 0.9) == math.inf
    assert conformal_quantile(np.arange(9.0), 0.9) == 8
    assert label_sets(np.array([[0.99, 0.01]]), math.inf).all()
    with pytest.raises(InputError, match="coverage is 1"):
        conformal_quantile(np.arange(9.0), 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_isotonic_curves_are_those_of_sklearn(seed):
    """Also with scores that are tied, as those of small networks are."""
    random = np.random.default_rng(seed)
    score = random.random(300) if seed % 2 else random.integers(0, 12, 300) / 11
    target = (random.random(300) < score**2).astype(float)
    x, value = isotonic_fit(score, target)
    new = np.linspace(-0.1, 1.1, 500)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(score, target)
    np.testing.assert_allclose(np.interp(new, x, value), theirs.predict(new), atol=1e-12)
    assert (np.diff(x) > 0).all() and (np.diff(value) >= 0).all()


def distorted(classes, rows, seed=0):
    """Probabilities that are too sure of themselves in a way that no temperature mends, and labels."""
    random = np.random.default_rng(seed)
    right = random.dirichlet(np.ones(classes), rows)
    y = (random.random((rows, 1)) > right.cumsum(1)).sum(1)
    wrong = right.copy()
    wrong[:, -1] = wrong[:, -1] ** 4 * 3
    return wrong / wrong.sum(1, keepdims=True), y


@pytest.mark.parametrize("classes", [2, 4])
def test_isotonic_calibration_mends_what_a_temperature_does_not(classes):
    (probs, y), (new, truth) = distorted(classes, 3000), distorted(classes, 3000, seed=1)
    nll = {}
    for kind in ("none", "temperature", "isotonic"):
        mended = Calibration.fit(kind, probs, y).apply(new)
        np.testing.assert_allclose(mended.sum(1), 1)
        nll[kind] = -np.log(mended[np.arange(len(truth)), truth]).mean()
    assert nll["isotonic"] < nll["temperature"] - 0.01 < nll["none"] - 0.01


def test_a_row_is_cross_calibrated_by_others():
    """Labels without any relation to the scores: in sample, isotonic curves seem to help; across folds they do not."""
    random = np.random.default_rng(0)
    score = random.random(120)
    probs, y = np.stack([1 - score, score], 1) * 0.02 + 0.49, random.integers(0, 2, 120)
    nll = [
        -np.log(p[np.arange(120), y]).mean()
        for p in (probs, Calibration.fit("isotonic", probs, y).apply(probs), cross_calibrated("isotonic", probs, y))
    ]
    assert nll[1] < nll[0] < nll[2]
    assert cross_calibrated("isotonic", probs[:1], y[:1]) == pytest.approx(probs[:1])
