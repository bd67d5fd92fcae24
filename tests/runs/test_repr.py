"""What is printed of an object tells kinds and sizes: no weight, no sample, no line that fills a screen."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedabml
from fedabml import algorithms, gaussian
from fedabml.data import Rows
from fedabml.runs import config
from fedabml.vectors import Network

pytestmark = pytest.mark.usefixtures("one_thread_here")
QUICK = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "loop"}


def objects():
    """Every public kind of object, large enough for its repr to fill a screen."""
    digits = fedabml.load("digits")
    images = fedabml.federate(digits, clients=40, classes_per_client=4)
    rng = np.random.default_rng(0)
    names = [f"a column with a long name, number {i}" for i in range(60)]
    frame = pd.DataFrame(rng.normal(size=(400, 60)), columns=names)
    frame["who"], frame["y"] = np.repeat([*"abcdefghij"], 40), rng.normal(size=400)
    words = frame.assign(y=np.array([f"class {i}" for i in range(100)] * 4))
    table, classes = (fedabml.read_table(each, client="who", target="y") for each in (frame, words))
    assert table.clients == classes.clients == 10
    for fed, x in ((images, digits.x_test), (table, frame), (classes, words)):
        run = fedabml.train(fed, "mlr", fedabml.FedABML(personal_epochs=1), **QUICK)
        client = (digits.x_train[:50], digits.y_train[:50]) if fed is images else (x.assign(who="a"),)
        posterior = run.prior.personalize(*client, epochs=1)
        yield from (fed, fed.train, fed.recipe, run, run.prior, run.prior.input_spec, run.prior.input_spec.network)
        yield from (
            run.prior.input_spec.network.layout,
            run.evaluation,
            posterior,
            posterior.q,
            posterior.predict(x, samples=2),
            run.prior.personalize(*client, epochs=1, validation=0.3).trust,
        )
    yield from (digits, fedabml.prepare(images, "mlr", **QUICK), Network(nn.Linear(500, 500)), Rows.of([[0]] * 5000))
    yield from (gaussian.Samples(torch.randn(20, 5000)), gaussian.Branches(torch.randn(500), torch.randn(9, 5000)))
    yield from (gaussian.Point(torch.randn(5000)), fedabml.Categorical(10), fedabml.GaussianNoise(2))
    yield from (algorithms.make(name) for name in algorithms.REGISTRY)
    yield fedabml.FedABML(lr=0.07, momentum=0.9, personal_epochs=9, weights="samples", average=0.5, predict_samples=99)
    yield config.RunConfig(data="x" * 999, seed=3)


@pytest.mark.slow
def test_every_public_object_prints_a_short_line_without_weights_or_rows():
    for each in objects():
        text = repr(each)
        assert len(text) <= 200 and "\n" not in text, text
        assert not re.search(r"tensor\(|array\(|object at", text) and text.count(".") <= 8, text


@pytest.mark.slow
def test_what_is_printed_says_what_it_is():
    fed = fedabml.federate(fedabml.load("digits"), clients=4, classes_per_client=5)
    assert repr(fed) == "Federation(digits: 4 clients, 1442 train / 0 val / 355 test, shape (1, 8, 8), 10 classes)"
    prior = fedabml.train(fed, "mlr", **QUICK).prior
    posterior = prior.personalize(fedabml.load("digits").x_train[:50], fedabml.load("digits").y_train[:50], epochs=1)
    words = "digits: mlr with 650 weights, inputs (1, 8, 8), 10 classes"
    assert repr(prior) == f"Prior(fedabml; {words}; digest {prior.digest[:16]})"
    assert repr(posterior.q) == "Gaussian(mean (650,), logstd (650,))"
    assert repr(posterior).startswith("Posterior(Gaussian, 10 samples; digits: mlr")
    assert repr(fedabml.FedAvg(lr=0.2)) == "FedAvg(lr=0.2)" and repr(fedabml.FedABML()) == "FedABML()"
