"""The one list of measures: its formats, headings and directions."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import fedabml
from fedabml.evaluation.measures import (
    COMPARED,
    MEASURES,
    POOLED,
    decimals,
    in_words,
    main_measure,
    tuning_measures,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0.000"), (0.000385, "0.000385"), (0.0122, "0.0122"), (0.5, "0.500"), (-2.64, "-2.640"), (2e-6, "2.00e-06")],
)
def test_small_numbers_keep_three_digits(value: float, words: str) -> None:
    assert decimals(value) == words


def test_a_measure_has_one_heading_and_two_formats() -> None:
    accuracy, nll = MEASURES["accuracy"], MEASURES["nll"]
    assert (accuracy.heading, accuracy.title, nll.heading) == ("accuracy %", "Accuracy", "NLL")
    assert (accuracy.cell(0.81234), accuracy.format(0.81234), nll.cell(0.5)) == ("81.23", "81.2%", "0.500")


def test_the_lowest_distance_is_the_best_value() -> None:
    best = {key: min(values, key=MEASURES[key].distance) for key, values in
            {"accuracy": (0.2, 0.9), "nll": (0.1, 2.0), "coverage": (0.7, 0.88, 1.0)}.items()}  # fmt: skip
    assert best == {"accuracy": 0.9, "nll": 0.1, "coverage": 0.88}
    assert [MEASURES[key].better for key in ("accuracy", "rmse", "coverage", "entropy")] == [1, -1, 0, 0]


def test_every_measure_that_is_compared_is_declared() -> None:
    assert {key for keys in COMPARED.values() for key in keys} | {*POOLED, *POOLED.values()} <= set(MEASURES)
    assert all(key == measure.key for key, measure in MEASURES.items())
    assert (main_measure("classification"), main_measure("regression")) == ("accuracy", "rmse")


def test_a_likelihood_of_densities_may_be_above_one() -> None:
    assert min((-2.0, -1.0, 0.5), key=MEASURES["nll"].distance) == -2.0


@pytest.mark.parametrize(("task", "classes"), [("classification", 2), ("classification", 3), ("regression", 0),
                                               ("multilabel", 2), ("sequence", 2), ("sequence", 3)])  # fmt: skip
def test_tune_offers_every_measure_of_a_summary_that_has_a_direction(task: str, classes: int) -> None:
    random = np.random.default_rng(0)
    shape = (40, 2) if task in ("multilabel", "sequence") else (40,)

    def rows() -> tuple[np.ndarray, np.ndarray]:
        y = random.integers(0, classes, shape) if classes else random.normal(size=shape)
        return random.normal(size=(40, 3)).astype("float32"), y

    fed = fedabml.Federation.from_arrays([rows(), rows()], [rows(), rows()], task=task)
    steps = nn.Sequential(nn.Linear(3, 2 * max(classes, 1)), nn.Unflatten(1, (2, max(classes, 1))))
    model = steps if task == "sequence" else nn.Linear(3, classes or 1)
    summary = fedabml.train(fed, model, fedabml.FedAvg(), rounds=1, epochs=1, device="cpu").summary
    scored = {key for key in MEASURES.keys() & summary.keys() if MEASURES[key].target is not None}
    of_models = {key for key in scored if not key.startswith("prior") and not key.endswith("_last10")}
    of_models = {key for key in of_models if MEASURES[key].unit in ("percent", "number")}
    offered = tuning_measures(task, classes)
    assert set(offered) == of_models and offered[0] == main_measure(task)


def test_sensitivity_names_its_specificity() -> None:
    chosen = in_words(MEASURES["sensitivity"], {"specificity": 0.975})
    assert "a specificity of 97.5% or more" in chosen.name and "at most 2.5% false alarms" in chosen.meaning
    assert in_words(MEASURES["recall"], {"specificity": 0.975}) is MEASURES["recall"]


def test_measures_of_the_positive_class_name_it() -> None:
    """With `died` and `survived`, recall is of `survived`: nobody should have to guess that."""
    of_two = {"class_names": ["died", "survived"], "specificity": 0.9}
    for key in ("recall_pooled", "recall", "precision", "f1", "average_precision", "sensitivity"):
        measure = in_words(MEASURES[key], of_two)
        assert all("'survived'" in words for words in (measure.name, measure.label)), measure
        assert measure.name.endswith(MEASURES[key].name.partition(",")[2]) and "positive" not in measure.meaning
        assert in_words(MEASURES[key], {"class_names": ["a", "b", "c"]}) is MEASURES[key]
    assert in_words(MEASURES["auroc"], of_two) is MEASURES["auroc"]  # the same for either class
    assert in_words(MEASURES["recall"], {"class_names": ["0", "1"]}).label == "recall of class 1"
