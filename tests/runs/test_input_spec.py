"""Regression that tells rows apart: noise by input, transformed and positive targets, from training to a saved file."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import fedabml
from fedabml.files.sealed import read_tensors, write_tensors

QUICK = {"rounds": 10, "participation": 1.0, "device": "cpu", "model_options": {"hidden": [16]}}


def rows(n, g):
    """Durations whose log has a deviation that grows with the second column."""
    x = g.normal(size=(n, 2)).astype(np.float32)
    return x, np.exp(1 + 0.5 * x[:, 0] + np.exp(0.6 * x[:, 1] - 1.2) * g.normal(size=n)).astype(np.float32)


@pytest.fixture(scope="module")
def fed():
    g = np.random.default_rng(0)
    return fedabml.Federation.from_arrays([rows(150, g) for _ in range(4)], [rows(100, g) for _ in range(4)])


@pytest.fixture(scope="module")
def run(fed):
    noise = fedabml.GaussianNoise(1, by_input=True)
    return fedabml.train(fed.with_positive_target("log"), "mlp", likelihood=noise, **QUICK)


@pytest.mark.slow
def test_the_deviation_follows_the_input(run):
    x = np.array([[0, -1.5], [0, 1.5]], np.float32)
    own = run.posterior("client-0", validation=0.3)
    spread = own.predict(x).gaussian()[1][:, 0]
    assert spread[1] > 3 * spread[0]


def test_prior_and_posterior_are_saved_without_loss(run, tmp_path):
    prior = fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors"))
    assert (prior.input_spec.transform, prior.input_spec.likelihood) == (
        run.prior.input_spec.transform,
        run.prior.input_spec.likelihood,
    )
    x, y = rows(80, np.random.default_rng(1))
    one, two = (each.personalize(x, y, validation=0.3) for each in (run.prior, prior))
    again = fedabml.load_posterior(two.save(tmp_path / "posterior.safetensors"))
    p, q = one.predict(x), again.predict(x)
    for name in ("mean", "std", "model_std", "median"):
        np.testing.assert_array_equal(getattr(p, name), getattr(q, name))
    np.testing.assert_array_equal(p.checks.low, q.checks.low)
    assert "(log)" in repr(again)


def test_an_earlier_version_refuses_what_it_would_read_wrongly(fed, run, tmp_path):
    plain = fedabml.train(fed, "mlr", evaluate=False, **QUICK | {"model_options": {}, "rounds": 1})
    for prior, number in ((plain.prior, 1), (run.prior, 2)):
        facts = read_tensors(prior.save(tmp_path / "prior.safetensors"))[1]
        assert facts["format"] == number and ("transform" in facts) == (number == 2)


def test_an_earlier_version_refuses_class_weights(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32), np.arange(30) % 2
    fed = fedabml.Federation.from_arrays([(x, y)] * 2)
    for weights, number in ((None, 1), ("1,5", 2)):
        prior = fedabml.train(fed, "mlr", rounds=1, evaluate=False, class_weights=weights).prior
        path = prior.save(tmp_path / "prior.safetensors")
        assert read_tensors(path)[1]["format"] == number
        assert fedabml.load_prior(path).input_spec.likelihood == prior.input_spec.likelihood


@pytest.mark.parametrize(
    "change", [{"powers": [0.1, 0.2], "units": [1.0, 1.0]}, {"powers": [9], "units": [1.0]}, "log"]
)
def test_a_damaged_transform_is_refused(run, tmp_path, change):
    path = run.prior.save(tmp_path / "prior.safetensors")
    tensors, facts = read_tensors(path)
    write_tensors(path, tensors, facts | {"transform": change})
    with pytest.raises(fedabml.InputError, match=r"prior\.safetensors.*damaged"):
        fedabml.load_prior(path)


def test_a_site_whose_targets_are_out_of_the_domain_is_refused(run):
    x, y = rows(30, np.random.default_rng(2))
    y[7] = 0
    with pytest.raises(fedabml.InputError, match="y: row 7 has the target 0, but a log or Box-Cox transform needs"):
        run.prior.personalize(x, y)


def test_scores_are_in_the_original_unit(fed, run):
    """RMSE of means, MAE of medians, coverage of the quantiles 5% and 95%, NLL of the targets themselves."""
    cohort = fed.with_positive_target("log")
    values = {name: [] for name in ("rmse", "mae", "nll", "coverage", "interval_width")}
    for i in range(4):
        p = run.posterior(i, seed=0).predict(fed.x[fed.test[i]])
        y = fed.y[fed.test[i]]
        low, high = p.quantile([0.05, 0.95])
        values["rmse"].append(np.sqrt(((p.mean - y) ** 2).mean()))
        values["mae"].append(np.abs(p.median - y).mean())
        values["nll"].append(p.nll(y).mean())
        values["coverage"].append(((low <= y) & (y <= high)).mean())
        values["interval_width"].append((high - low).mean())
    assert cohort.y is fed.y
    for name, each in values.items():  # other minibatches and weight samples than in the run
        assert run.summary[name] == pytest.approx(np.mean(each), rel=0.15, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, "log", "boxcox"])
def test_intervals_of_a_positive_target_cover_and_never_begin_below_zero(fed, transform):
    prior = fedabml.train(fed.with_positive_target(transform), "mlp", evaluate=False, **QUICK).prior
    g = np.random.default_rng(3)
    own = prior.personalize(*rows(400, g), validation=0.5)
    x, y = rows(1000, g)
    checks = own.predict(x).checks
    assert (checks.low >= 0).all() and (checks.high >= checks.low).all()
    inside = ((checks.low[:, 0] <= y) & (y <= checks.high[:, 0])).sum()
    # The validation rows' own chance: coverage is Beta-distributed about 90% (Vovk 2012).
    low, high = stats.betabinom(1000, 181, 20).interval(0.999)
    assert low <= inside <= high


def test_too_few_rows_give_intervals_from_zero_to_infinity(run):
    checks = run.prior.personalize(*rows(12, np.random.default_rng(4)), validation=0.3).predict(np.zeros((1, 2))).checks
    assert checks.low[0, 0] == 0 and checks.high[0, 0] == np.inf
