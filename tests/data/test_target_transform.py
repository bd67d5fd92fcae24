"""The log and Box-Cox transforms of positive targets, against scipy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fedabml import Federation, InputError, Regression
from fedabml.data.target_transform import TargetTransform, box_cox_power
from fedabml.evaluation.client_scores import regression_rows

SAMPLES = {
    "gamma": stats.gamma(2.0, scale=300).rvs(400, random_state=0),
    "log-normal": stats.lognorm(0.7, scale=5).rvs(400, random_state=1),
    "skewed to the left": stats.beta(5, 1.2).rvs(400, random_state=2) * 1e6,
    "heavy tail": stats.pareto(1.5).rvs(400, random_state=3),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_power_is_the_maximum_likelihood_estimate_of_scipy(name):
    y = SAMPLES[name]
    expected = stats.boxcox(y)[1]
    assert box_cox_power(np.log(y), least=-5) == pytest.approx(expected, abs=1e-4)
    assert box_cox_power(np.log(y)) == pytest.approx(max(0, expected), abs=1e-4)
    assert box_cox_power(np.log(y * 1e-9)) == pytest.approx(max(0, expected), abs=1e-4)  # whatever the unit


def test_a_heavier_tail_than_the_log_normal_takes_the_log():
    assert stats.boxcox(SAMPLES["heavy tail"])[1] < 0
    rule = TargetTransform.fit(SAMPLES["heavy tail"][:, None], "boxcox")
    assert rule.powers == (0.0,) and rule.description == "log"


def test_equal_targets_have_a_transform():
    rule = TargetTransform.fit(np.full((5, 1), 3.0), "boxcox")
    np.testing.assert_allclose(rule.inverse(rule.forward(np.full((5, 1), 3.0))), 3.0)


@pytest.mark.parametrize("kind", ["log", "boxcox"])
def test_a_transform_is_scipys_in_units_of_the_geometric_mean_and_is_inverted(kind):
    y = np.column_stack(list(SAMPLES.values()))[:, :3]
    rule = TargetTransform.fit(y, kind)
    for j, (power, unit) in enumerate(zip(rule.powers, rule.units, strict=True)):
        assert unit == pytest.approx(stats.gmean(y[:, j]))
        np.testing.assert_allclose(rule.forward(y)[:, j], stats.boxcox(y[:, j] / unit, power), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rule.inverse(rule.forward(y)), y, rtol=1e-9)
    assert TargetTransform.from_json(json.loads(json.dumps(rule.to_json()))) == rule


def test_the_slope_is_that_of_the_transform():
    y, step = np.column_stack(list(SAMPLES.values()))[:20, :3], 1e-6
    rule = TargetTransform.fit(y, "boxcox")
    slope = (rule.forward(y * (1 + step)) - rule.forward(y * (1 - step))) / (2 * step * y)
    np.testing.assert_allclose(rule.log_slope(y), np.log(slope).sum(1), rtol=1e-6)
    assert (TargetTransform().log_slope(y) == 0).all()


def test_the_moments_of_the_log_are_the_log_normals():
    mean, std = TargetTransform((0.0,), (4.0,)).moments(np.array([0.3]), np.array([0.8]))
    expected = stats.lognorm(0.8, scale=4 * np.exp(0.3))
    assert (mean[0], std[0]) == (pytest.approx(expected.mean()), pytest.approx(expected.std()))


@pytest.mark.parametrize(
    ("power", "centre", "std"), [(0.5, 0.2, 0.3), (0.25, -1.0, 0.7), (1 / 3, 0.0, 1.0), (1.7, 1.0, 0.2)]
)
def test_the_moments_of_other_powers_are_integrals(power, centre, std):
    rule, normal = TargetTransform((power,), (3.0,)), stats.norm(centre, std)
    y = lambda z: rule.inverse(np.array([z]))[0]
    moment = lambda f: integrate.quad(lambda z: f(y(z)) * normal.pdf(z), centre - 9 * std, centre + 9 * std)[0]
    mean, deviation = rule.moments(np.array([centre]), np.array([std]))
    assert mean[0] == pytest.approx(moment(lambda v: v), rel=1e-4)
    assert deviation[0] == pytest.approx(np.sqrt(moment(lambda v: (v - mean[0]) ** 2)), rel=1e-3)


@pytest.mark.parametrize(("centre", "std"), [(-0.278, 0.4), (0.0, 1.0), (0.3, 0.2), (2.0, 0.1), (-3.0, 0.5)])
def test_the_moments_of_a_positive_target_without_a_transform_are_integrals(centre, std):
    normal = stats.norm(centre, std)
    moment = lambda f: integrate.quad(lambda z: f(z) * normal.pdf(z), 0, max(centre, 0) + 12 * std, points=[1e-3])[0]
    mean, deviation = TargetTransform().moments(np.array([centre]), np.array([std]))
    first = moment(lambda z: z)
    assert mean[0] == pytest.approx(first, rel=1e-6)
    zeros = normal.cdf(0) * first**2
    assert deviation[0] == pytest.approx(np.sqrt(moment(lambda z: (z - first) ** 2) + zeros), rel=1e-6)


def test_the_moments_of_a_positive_target_at_the_extremes():
    centre, std = np.array([-1e6, -50.0, 1e6, 0.0, 3.0, -3.0]), np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    mean, deviation = TargetTransform().moments(centre, std)
    np.testing.assert_allclose(mean, [0, 0, 1e6, 0, 3, 0], atol=1e-300)
    np.testing.assert_allclose(deviation, [0, 0, 1, 0, 0, 0], atol=1e-300)


def test_the_mean_of_a_positive_target_is_not_negative_and_lies_in_its_interval():
    draws = torch.tensor([[[-0.4, -1.0], [1.0, -1.0]], [[-0.2, -1.5], [1.2, -1.0]]])
    plain = Regression.of(draws, np.zeros(1), np.ones(1))
    p = Regression.of(draws, np.zeros(1), np.ones(1), TargetTransform())
    low, high = p.quantile([0.05, 0.95])
    assert plain.mean[0, 0] < 0 <= p.mean.min() and ((low <= p.mean) & (p.mean <= high)).all()
    np.testing.assert_array_equal(p.gaussian(), (plain.mean, plain.std))
    rows = regression_rows(p, np.zeros((2, 1)))
    assert rows["mae"][0] == p.median[0, 0] == 0 and rows["interval_width"][0] == pytest.approx(
        plain.mean[0, 0] + 1.6448536 * plain.std[0, 0]
    )


def test_no_value_comes_back_below_zero():
    z = np.array([[-np.inf], [-50.0], [0.0], [np.inf]])
    for rule in (TargetTransform(), TargetTransform((0.0,), (2.0,)), TargetTransform((0.5,), (2.0,))):
        y = rule.inverse(z)
        assert y[0] == 0 and (y >= 0).all() and y[-1] == np.inf and not np.isnan(y).any()


def federation(y, test=None):
    x = np.random.default_rng(0).normal(size=(len(y), 2))
    half = len(y) // 2
    return Federation.from_arrays([(x[:half], y[:half]), (x[half:], y[half:])], test, names=["north", "south"])


def test_a_federation_keeps_its_targets_and_standardises_the_transformed_ones():
    y = SAMPLES["gamma"].astype(np.float32)
    plain = federation(y)
    fed = plain.with_positive_target("boxcox")
    assert fed.y is plain.y and fed.transform.powers[0] == pytest.approx(stats.boxcox(y)[1], abs=1e-3)
    seen = (fed.model_targets() - fed.y_shift) / fed.y_scale
    assert seen.mean() == pytest.approx(0, abs=1e-6) and seen.std() == pytest.approx(1, abs=1e-6)
    hashes = {f.hash for f in (plain, fed, plain.with_positive_target(), plain.with_positive_target("log"))}
    assert len(hashes) == 4
    assert fed.hold_out(0.2).select([0]).transform == fed.transform


def test_the_power_is_learned_from_training_rows_alone():
    y = SAMPLES["gamma"].astype(np.float32)
    other = (np.zeros((50, 2)), np.full(50, 1e6, np.float32))
    fed, more = federation(y), federation(y, [other, None])
    assert fed.with_positive_target("boxcox").transform == more.with_positive_target("boxcox").transform


@pytest.mark.parametrize(("value", "transform"), [(0.0, "log"), (-2.0, "boxcox"), (-2.0, None)])
def test_targets_out_of_the_domain_are_refused_by_client_and_value(value, transform):
    y = SAMPLES["gamma"].astype(np.float32).copy()
    y[-3] = value
    with pytest.raises(InputError, match=rf"client 'south' has the target {value:g}.*leave the transform"):
        federation(y).with_positive_target(transform)


def test_zero_is_a_positive_target_without_a_transform():
    y = SAMPLES["gamma"].astype(np.float32).copy()
    y[0] = 0
    assert federation(y).with_positive_target().transform == TargetTransform()


def test_samples_of_no_client_may_be_anything():
    y = np.array([-1, 2, 3, 4, 5.5], np.float32)
    x, owner = np.ones((5, 2), np.float32), np.array([0, 1, 1, 1, 1])
    fed = Federation.from_owners(x, y, owner, drop_small=True).with_positive_target("log")
    assert np.isfinite(fed.model_targets()).all()


def test_classes_and_unknown_transforms_are_refused():
    fed = Federation.from_arrays([(np.ones((4, 2)), np.array([0, 1, 0, 1]))])
    with pytest.raises(InputError, match="for a regression"):
        fed.with_positive_target("log")
    with pytest.raises(InputError, match="no target transform 'sqrt'"):
        federation(SAMPLES["gamma"]).with_positive_target("sqrt")


@pytest.mark.parametrize(
    "content",
    [None, {}, {"powers": [1], "units": []}, {"powers": ["a"], "units": [1]}, {"powers": [-1], "units": [1]},
     {"powers": [float("nan")], "units": [1]}, {"powers": [0], "units": [0]}],
)  # fmt: skip
def test_a_damaged_transform_is_refused(content):
    with pytest.raises(InputError, match="damaged"):
        TargetTransform.from_json(content)
