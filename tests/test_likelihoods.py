"""Likelihoods against torch's own losses and distributions."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal
from torch.nn.functional import cross_entropy

from fedabml import Categorical, GaussianNoise, InputError, likelihoods

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 1000.0], [-3.0, 1.0, 1.0]]).double()
Y = torch.tensor([0, 2, 1])
NONE = torch.empty(0)


def test_categorical_equals_cross_entropy():
    got = Categorical(3).nll(LOGITS, Y, NONE, None)
    torch.testing.assert_close(got, cross_entropy(LOGITS, Y, reduction="none"))
    torch.testing.assert_close(Categorical(3).predict(LOGITS, NONE, None), LOGITS.softmax(-1))


def test_the_label_level_multiplies_probabilities():
    prior = torch.tensor([0.7, 0.2, 0.1]).double()
    probs = Categorical(3).predict(LOGITS, NONE, prior.log())
    weighted = prior * LOGITS.softmax(-1)
    torch.testing.assert_close(probs, weighted / weighted.sum(-1, keepdim=True))
    nll = Categorical(3).nll(LOGITS, Y, NONE, prior.log())
    torch.testing.assert_close(nll, -probs.gather(-1, Y[:, None]).log().squeeze(-1))


def test_a_class_that_a_client_lacks_gets_no_push_without_its_share():
    """Its gradient is its probability, which the label level makes as small as its share."""
    logits = torch.zeros(1, 3).double()
    prior = torch.tensor([0.5, 0.499, 0.001]).double()
    slope = torch.func.grad(lambda f: Categorical(3).nll(f, torch.tensor([0]), NONE, prior.log()).sum())(logits)
    torch.testing.assert_close(slope[0], prior - torch.tensor([1.0, 0, 0]).double())


MEANS = torch.tensor([[0.0, 1.0], [2.0, -1.0]]).double()
TARGETS = torch.tensor([[0.5, 1.0], [-1.0, 3.0]]).double()


def test_gaussian_with_fixed_noise():
    noise = GaussianNoise(2, 0.3, learn=False)
    assert noise.entries == 0
    expected = -Normal(MEANS, 0.3).log_prob(TARGETS).sum(-1)
    torch.testing.assert_close(noise.nll(MEANS, TARGETS, NONE, None), expected)
    out = noise.predict(MEANS, NONE, None)
    torch.testing.assert_close(out, torch.cat([MEANS, torch.full_like(MEANS, math.log(0.3))], -1))


def test_gaussian_with_learned_noise():
    noise = GaussianNoise(2, 0.3)
    assert noise.entries == MEANS.shape[1]
    own = torch.full((noise.entries,), 0.7).double()
    expected = -Normal(MEANS, 0.3 * math.exp(0.7)).log_prob(TARGETS).sum(-1)
    torch.testing.assert_close(noise.nll(MEANS, TARGETS, own, None), expected)
    torch.testing.assert_close(noise.predict(MEANS, own, None)[:, 2:], torch.full_like(MEANS, math.log(0.3) + 0.7))
    at_start = noise.nll(MEANS, TARGETS, torch.zeros(1).double(), None)
    torch.testing.assert_close(at_start, GaussianNoise(2, 0.3, learn=False).nll(MEANS, TARGETS, NONE, None))


HEADS = torch.tensor([[0.0, 0.4], [-1.0, 50.0]]).double()


def test_gaussian_with_noise_by_input():
    """Each row has its own deviation, exp(h) near h = 0, never beyond a factor of e²."""
    noise = GaussianNoise(2, 0.3, by_input=True)
    assert (noise.entries, noise.outputs) == (2, 4)
    own, outputs = torch.tensor([0.7, -0.2]).double(), torch.cat([MEANS, HEADS], -1)
    sigma = 0.3 * torch.exp(own + 2 * torch.tanh(HEADS / 2))
    torch.testing.assert_close(noise.nll(outputs, TARGETS, own, None), -Normal(MEANS, sigma).log_prob(TARGETS).sum(-1))
    torch.testing.assert_close(noise.predict(outputs, own, None), torch.cat([MEANS, sigma.log()], -1))
    assert sigma.max() <= 0.3 * math.exp(-0.2 + 2)
    fixed = GaussianNoise(2, 0.3, learn=False, by_input=True)
    expected = -Normal(MEANS, 0.3 * torch.exp(2 * torch.tanh(HEADS / 2))).log_prob(TARGETS).sum(-1)
    torch.testing.assert_close(fixed.nll(outputs, TARGETS, NONE, None), expected)


def test_the_gradient_of_noise_by_input_by_hand():
    """∂/∂f = −(y − f)/σ², ∂/∂h = (1 − (y − f)²/σ²)·(1 − tanh²(h/2)), and the tail's is the sum of (1 − z²)."""
    noise, own = GaussianNoise(2, 0.3, by_input=True), torch.tensor([0.7, -0.2]).double()
    outputs = torch.cat([MEANS, HEADS / 10], -1)
    slope, tail = torch.func.grad(lambda o, t: noise.nll(o, TARGETS, t, None).sum(), (0, 1))(outputs, own)
    sigma = 0.3 * torch.exp(own + 2 * torch.tanh(HEADS / 20))
    z = (TARGETS - MEANS) / sigma
    torch.testing.assert_close(slope[:, :2], -z / sigma)
    torch.testing.assert_close(slope[:, 2:], (1 - z**2) * (1 - torch.tanh(HEADS / 20) ** 2))
    torch.testing.assert_close(tail, (1 - z**2).sum(0))


def test_a_network_without_a_head_for_the_noise_is_refused():
    GaussianNoise(2, by_input=True).check(torch.zeros(3, 4))
    with pytest.raises(InputError, match=r"2 target\(s\) need \(4,\): the means, then a log deviation"):
        GaussianNoise(2, by_input=True).check(torch.zeros(3, 2))


def test_files_of_earlier_versions_and_for_them_have_no_noise_by_input():
    old = {"kind": "GaussianNoise", "targets": 1, "noise": 0.5, "learn": True}
    assert likelihoods.to_json(GaussianNoise(1)) == old
    assert likelihoods.from_json(old) == GaussianNoise(1)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_that_is_none_is_refused(noise):
    with pytest.raises(InputError, match="positive number"):
        GaussianNoise(1, noise)


@pytest.mark.parametrize("outputs", [torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 3, 1)])
@pytest.mark.parametrize("likelihood", [Categorical(3), GaussianNoise(3)])
def test_outputs_that_do_not_fit_are_refused(likelihood, outputs):
    likelihood.check(torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"must be \(3,\)|need \(3,\)"):
        likelihood.check(outputs)


@pytest.mark.parametrize(
    "likelihood", [Categorical(7), GaussianNoise(2, 0.25, learn=False), GaussianNoise(1, by_input=True)]
)
def test_likelihoods_survive_json(likelihood):
    assert likelihoods.from_json(likelihoods.to_json(likelihood)) == likelihood


FOREIGN = {"kind": "GaussianNoise", "targets": 1, "noise": 0.5, "learn": True, "by_input": "yes"}


@pytest.mark.parametrize("data", [{}, {"kind": "Poisson"}, {"kind": "Categorical", "classes": "3"}, FOREIGN])
def test_foreign_json_is_refused(data):
    with pytest.raises(InputError, match="Unknown likelihood"):
        likelihoods.from_json(data)


def test_class_weights_by_hand():
    """Balanced: N/(K N_c), as scikit-learn has it. Numbers are ratios, and the mean over the rows is 1."""
    from sklearn.utils.class_weight import compute_class_weight

    y = np.repeat([0, 1, 2], [70, 20, 10])
    balanced = compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(likelihoods.class_weights("balanced", [70, 20, 10]), balanced)
    for given in ("1,5", [1, 5], [2.0, 10.0]):
        weights = likelihoods.class_weights(given, [80, 20])
        assert weights == pytest.approx((1 / 1.8, 5 / 1.8)) and 80 * weights[0] + 20 * weights[1] == pytest.approx(100)
    assert likelihoods.class_weights("none", [8, 2]) == ()
    assert likelihoods.weighted(Categorical(2), "balanced", [8, 2]) == Categorical(2, (0.625, 2.5))


@pytest.mark.parametrize(
    ("given", "counts", "reason"),
    [
        ("balanced", [5, 0], "class 1 has none"),
        ("1,2,3", [5, 5], "3 class weights for 2 classes"),
        ("1,-2", [5, 5], "positive number"),
        ("1,nan", [5, 5], "positive number"),
        ("heavy", [5, 5], "positive number"),
        ([], [5, 5], "positive number"),
    ],
)
def test_class_weights_that_are_none_are_refused(given, counts, reason):
    with pytest.raises(InputError, match=reason):
        likelihoods.weighted(Categorical(2), given, counts)
    with pytest.raises(InputError, match="Class weights are for rows with one class"):
        likelihoods.weighted(GaussianNoise(1), given, counts)


def test_likelihoods_keep_their_weights_in_json():
    plain, own = Categorical(2), Categorical(2, (0.5, 3.0))
    assert likelihoods.to_json(plain) == {"kind": "Categorical", "classes": 2}  # as files of before have it
    assert likelihoods.from_json(json.loads(json.dumps(likelihoods.to_json(own)))) == own
    with pytest.raises(InputError):
        likelihoods.from_json({"kind": "Categorical", "classes": 2, "weights": [1.0, "2"]})
