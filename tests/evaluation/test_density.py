"""Distances in feature space against closed forms and scikit-learn."""

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf

from fedabml.evaluation.density import FeatureDensity, Maps, Strangeness, shrunk_covariance


@pytest.mark.parametrize(("n", "h"), [(20, 50), (500, 10), (3, 4)])
def test_the_covariance_is_scikit_learn_s(n, h):
    random = np.random.default_rng(0)
    x = random.normal(size=(n, h)) @ random.normal(size=(h, h))
    x -= x.mean(0)
    np.testing.assert_allclose(shrunk_covariance(x), ledoit_wolf(x, assume_centered=True)[0], rtol=1e-9, atol=1e-9)


def test_the_distance_of_a_known_gaussian():
    random = np.random.default_rng(1)
    mean, std = np.array([1.0, -2.0, 3.0]), np.array([0.5, 2.0, 1.0])
    density = FeatureDensity.fit(mean + std * random.normal(size=(200_000, 3)))
    x = random.normal(size=(10, 3))
    expected = (((x - mean) / std) ** 2).sum(1)
    np.testing.assert_allclose(density.distance(x), expected, rtol=0.03)


def test_it_is_the_nearest_class_that_counts_and_distance_grows():
    random = np.random.default_rng(2)
    labels = random.integers(0, 2, 2000)
    features = np.where(labels[:, None] == 1, 5.0, -5.0) + random.normal(size=(2000, 4))
    density = FeatureDensity.fit(features, labels)
    between, one, far = (density.distance(np.full((1, 4), v))[0] for v in (0.0, 5.0, 50.0))
    assert one < 0.1 < between < far


@pytest.mark.parametrize(("rows", "h"), [(42, 200), (300, 64)])
def test_far_inputs_are_far_with_few_samples_too(rows, h):
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, rows)
    features = random.normal(size=(rows, h)) + labels[:, None]
    density = FeatureDensity.fit(features, labels)
    usual = density.distance(random.normal(size=(200, h)) + random.integers(0, 2, (200, 1)))
    far = density.distance(30 * random.normal(size=(200, h)))
    assert far.min() > usual.max()


def test_features_that_never_vary_and_clients_of_one_sample():
    features = np.zeros((30, 5))
    features[:, 0] = np.arange(30)
    density = FeatureDensity.fit(features)
    assert np.isfinite(density.distance(np.ones((2, 5)))).all()
    assert np.isfinite(FeatureDensity.fit(np.ones((1, 3))).distance(np.zeros((2, 3)))).all()


def test_the_angle_to_the_nearest_class_mean():
    features, labels = np.array([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0]]), np.array([0, 0, 1])
    density = FeatureDensity.fit(features, labels)
    inputs = np.array([[7.0, 0.0], [0.0, 0.1], [1.0, 1.0], [-5.0, -5.0], [0.0, 0.0]])
    np.testing.assert_allclose(density.angle(inputs), [0, 0, 1 - 0.5**0.5, 1 + 0.5**0.5, 1], atol=1e-12)


def test_strangeness_adds_both_parts_on_the_scale_of_rows_held_out():
    random = np.random.default_rng(4)
    angle, entropy = random.normal(3, 0.1, 100_000), np.exp(random.normal(-2, 0.5, 100_000))
    strangeness = Strangeness.fit(angle, entropy)
    np.testing.assert_allclose(strangeness.centre, (3, -2), atol=0.01)
    np.testing.assert_allclose(strangeness.spread, (0.1, 0.5), rtol=0.02)
    scores = strangeness.score(np.array([3.0, 3.2, 3.0, 3.2]), np.exp([-2.0, -2.0, -1.0, -1.0]))
    np.testing.assert_allclose(np.log(scores), [0, 1, 1, 2], atol=0.05)


def test_strangeness_of_certain_predictions_and_of_rows_that_are_all_alike():
    strangeness = Strangeness.fit(np.zeros(20), np.zeros(20))
    assert np.isfinite(strangeness.score(np.array([0.0, 1.0]), np.array([0.0, 2.0]))).all()


def test_a_map_is_a_direction_whose_distance_is_mahalanobis_by_hand():
    """Two channels, one class: the directions of (1, 0), (3, 4) and (4, 3), whatever the length of a map."""
    maps = np.array([[5.0, 0.0], [3.0, 4.0], [0.8, 0.6]])
    unit = np.array([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6]])
    mean = np.array([0.8, 1.4 / 3])
    centred = unit - mean
    inverse = np.linalg.inv(shrunk_covariance(centred))
    x = np.array([[0.0, 7.0], [2.0, 0.0]])
    expected = [(u - mean) @ inverse @ (u - mean) for u in (np.array([0.0, 1.0]), np.array([1.0, 0.0]))]
    fitted = Maps.fit([maps, 10 * maps], np.zeros(3, int))
    first, second = fitted.distances([x, 0.1 * x])
    np.testing.assert_allclose(first, expected, rtol=1e-9)
    np.testing.assert_allclose(second, expected, rtol=1e-9)
    assert first[0] > first[1]


def test_strangeness_adds_the_maps_on_the_same_scale():
    """With log-normal distances of deviation .5, a distance e times the usual one is two deviations of one in four."""
    random = np.random.default_rng(5)
    angle, entropy = random.normal(3, 0.1, 100_000), np.exp(random.normal(-2, 0.5, 100_000))
    distances = [np.exp(random.normal(k, 0.5, 100_000)) for k in (1, 4)]
    strangeness = Strangeness.fit(angle, entropy, distances)
    np.testing.assert_allclose(strangeness.centre, (3, -2, 1, 4), atol=0.01)
    np.testing.assert_allclose(strangeness.spread, (0.1, 0.5, 0.5, 0.5), rtol=0.02)
    usual, far = np.exp([1.0, 1.0]), np.exp([4.0, 5.0])
    scores = strangeness.score(np.full(2, 3.0), np.exp([-2.0, -2.0]), [usual, far])
    np.testing.assert_allclose(np.log(scores), [0, 2 / 4], atol=0.02)


def test_maps_find_what_the_last_layer_does_not():
    """Angle and entropy of the strangers are the usual ones; only the second map points elsewhere.

    Both log-distances of Gaussian maps are known in distribution, so the AUROC without maps is 1/2.
    """
    random = np.random.default_rng(6)

    def draw(rows, shift):
        maps = [random.normal(centre, 0.1, (rows, 3)) for centre in ((1, 0, 0), (1, shift, 0))]
        return random.normal(size=rows), np.exp(random.normal(size=rows)), maps

    fitted = Maps.fit(draw(2000, 0.0)[2])
    held, inside, outside = ((a, e, fitted.distances(m)) for a, e, m in (draw(2000, v) for v in (0.0, 0.0, 1.0)))
    without, joined = Strangeness.fit(*held[:2]), Strangeness.fit(*held)

    def auroc(low, high):
        return (low[:, None] < high).mean()

    assert auroc(without.score(*inside[:2]), without.score(*outside[:2])) == pytest.approx(0.5, abs=0.03)
    assert auroc(joined.score(*inside), joined.score(*outside)) > 0.95
