"""Augmented images are those that numpy makes by padding, cutting and mirroring; engines and chunks agree on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import fedabml
from fedabml import FedABML, InputError, rng
from fedabml.algorithms import make
from fedabml.engine.augment import MARGIN, PATH, augmented
from fedabml.engine.noise import _STREAM
from fedabml.engine.rounds import run_round
from fedabml.engine.samples import Data
from fedabml.evaluation.scoring import evaluate
from tests.engine.test_setting import SMALL, assert_close, federation, simulate


def possible(image, augment, black):
    """All that can become of an image [C, H, W], by its bytes."""
    channels, height, width = image.shape
    large = np.broadcast_to(black, (channels, height + 2 * MARGIN, width + 2 * MARGIN)).copy()
    large[:, MARGIN : MARGIN + height, MARGIN : MARGIN + width] = image
    places = range(2 * MARGIN + 1) if "crop" in augment else (MARGIN,)
    cut = [large[:, i : i + height, j : j + width] for i in places for j in places]
    cut += [c[..., ::-1] for c in cut] if "flip" in augment else []
    return [np.ascontiguousarray(c).tobytes() for c in cut]


@pytest.mark.parametrize("augment", ["flip", "crop", "crop-flip"])
@pytest.mark.parametrize("shape", [(3, 10, 12), (1, 6, 5)])
def test_every_crop_and_flip_comes_as_often_as_another(augment, shape):
    image = np.random.default_rng(0).normal(size=shape)
    black = np.arange(1.0, shape[0] + 1).reshape(-1, 1, 1)
    options = possible(image, augment, black)
    assert len(set(options)) == {"flip": 2, "crop": 81, "crop-flip": 162}[augment]
    lanes, rows = 20, 100
    x = torch.from_numpy(image).expand(lanes, rows, *shape)
    seen = augmented(x, rng.keys((3,), range(lanes)), augment, torch.from_numpy(black)).numpy()
    number = {option: i for i, option in enumerate(options)}
    counts = np.bincount([number[one.tobytes()] for one in seen.reshape(-1, *shape)], minlength=len(options))
    assert stats.chisquare(counts).pvalue > 1e-3
    assert len({one.tobytes() for one in seen[0]}) > 1  # each row its own,
    assert (seen[0] != seen[1]).any()  # and each lane


def test_what_lies_around_an_image_is_what_a_network_sees_of_0():
    fed = federation("cnn")
    fed.x[0] = 0
    seen = Data.of(fed, torch.device("cpu"), torch.float64)
    torch.testing.assert_close(seen.black.expand(1, 16, 16), seen.inputs(torch.tensor([0]))[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_steps_see_other_images_and_scores_the_same(monkeypatch):
    """Of mirror images a flip changes nothing; of test rows nothing is ever changed."""
    fed = federation("cnn")
    fed.x[:] = np.concatenate([half := fed.x[..., :8], half[..., ::-1]], -1)
    plain, flipped, cropped = (simulate(fed, "cnn", FedABML(lr=0.05, augment=how)) for how in ("none", "flip", "crop"))
    assert_close(flipped, plain, 0)
    assert (cropped.shared["mean"] - plain.shared["mean"]).abs().max() > 1e-4
    calls, real = [], augmented
    monkeypatch.setattr("fedabml.engine.client.augmented", lambda *args: calls.append(1) or real(*args))
    for epochs in (0, 1):
        cohort = cropped.cohort.using(FedABML(lr=0.05, personal_epochs=epochs, augment="crop"))
        evaluate(cohort, cropped.theta, cropped.kept_for)
        assert bool(calls) == bool(epochs)  # personalising takes steps, predicting none


def test_every_minibatch_of_every_step_has_draws_of_its_own(monkeypatch):
    seen, real = [], augmented
    monkeypatch.setattr(
        "fedabml.engine.client.augmented", lambda x, keys, *more: seen.append(keys) or real(x, keys, *more)
    )
    algorithm = make("perfedavg", lr=0.05, augment="crop", personal_epochs=1)  # several minibatches a step
    sim = simulate(federation("cnn", (20, 24)), "cnn", algorithm, rounds=2, backend="loop")
    trained = len(seen)
    evaluate(sim.cohort, sim.theta, sim.kept_for)
    keys = torch.cat(seen).tolist()
    assert trained >= 8 and len(seen) > trained
    assert len(set(keys)) == len(keys)
    assert PATH >= 2 * _STREAM  # which is the noise's root in a step's key; dropout counts its calls from 0


@pytest.mark.parametrize("name", ["fedabml", "perfedavg"])  # which takes several minibatches a step
@pytest.mark.slow
def test_engines_and_chunks_agree(name):
    fed, algorithm = federation("cnn"), make(name, lr=0.05, augment="crop-flip", personal_epochs=1)
    whole = simulate(fed, "cnn", algorithm)
    for options in ({"backend": "loop"}, {"chunk": 2}):
        other = simulate(fed, "cnn", algorithm, **options)
        assert_close(other, whole, 1e-9)
        a, b = (evaluate(s.cohort, s.theta, s.kept_for) for s in (whole, other))
        np.testing.assert_allclose(a.clients["nll"], b.clients["nll"], atol=1e-8)


@pytest.mark.slow
def test_runs_side_by_side_are_those_alone():
    fed, hyper = federation("cnn"), {"augment": "crop-flip", "personal_epochs": 1}
    runs = [(FedABML(lr=0.03 * (1 + i), **hyper), i) for i in range(2)]
    alone = [simulate(fed, "cnn", a, seed=seed) for a, seed in runs]
    beside = [simulate(fed, "cnn", a, seed=seed, rounds=0) for a, seed in runs]
    for _ in range(3):
        run_round(beside)
    for a, b in zip(alone, beside, strict=True):
        assert_close(a, b, 1e-9)


def test_what_is_no_image_is_refused():
    with pytest.raises(InputError, match=r"augment crop is for images \[C, H, W\]; .* shape \[6\]"):
        simulate(federation("mlp"), "mlp", FedABML(augment="crop"))
    with pytest.raises(InputError, match="augment"):
        FedABML(augment="rotate")


@pytest.mark.slow
def test_a_site_that_joins_augments_too():
    fed = federation("cnn")
    words = {"rounds": 1, "seed": 1, "device": "cpu", "batch_size": 8, "model_options": SMALL["cnn"]}
    x, y, models = fed.x[fed.train[1]], fed.y[fed.train[1]], []
    for how in ("none", "crop-flip"):
        run = fedabml.train(fed, "cnn", FedABML(augment=how, lr=0.0, personal_lr=0.1, personal_epochs=2), **words)
        models.append(run.prior.personalize(x, y).q.mean)
    assert (models[0] - models[1]).abs().max() > 1e-5
