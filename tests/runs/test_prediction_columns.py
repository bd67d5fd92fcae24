"""The columns of predictions: names of classes, values by kind, and their text in a CSV."""

import numpy as np

from fedabml.evaluation.predictions import Checks, Prediction, Regression
from fedabml.likelihoods import Categorical, GaussianNoise
from fedabml.models import build
from fedabml.runs.input_spec import InputSpec
from fedabml.runs.prediction_columns import as_text, class_names, output_columns
from fedabml.vectors import Network


def spec(likelihood, dataset="own"):
    network = Network(build("mlr", [2], 2), likelihood.entries)
    zero, one = np.zeros(()), np.ones(())
    return InputSpec(network, likelihood, None, (2,), zero, one, zero, one, dataset=dataset)


def test_classes_are_named_as_in_the_dataset_or_by_number():
    assert class_names(spec(Categorical(2))) == ("0", "1")
    assert class_names(spec(Categorical(10), "cifar10"))[0] == "airplane"
    assert class_names(spec(GaussianNoise(1))) == ()


def test_columns_of_classes_with_their_checks():
    checks = Checks(0.9, np.array([True, False]), None, [["age is 900"], []], np.array([[True, True], [False, True]]))
    p = Prediction(np.array([[0.5, 0.5], [0.25, 0.75]]), np.zeros(2), checks=checks)
    columns = output_columns(p, spec(Categorical(2)))
    assert list(columns) == ["label", "p_0", "p_1", "entropy", "mutual_information", "set", "alarm", "flags"]
    assert columns["label"] == ["0", "1"] and columns["set"] == [["0", "1"], ["1"]]
    assert columns["alarm"] == [True, False] and columns["p_1"] == [0.5, 0.75]
    assert abs(columns["entropy"][0] - np.log(2)) < 1e-12
    row = {name: as_text(name, values[0]) for name, values in columns.items()}
    assert row["set"] == "0|1" and row["alarm"] == "yes" and row["flags"] == "age is 900" and row["p_0"] == "0.5"


def test_columns_of_two_targets_are_numbered():
    mean = np.array([[1.0, 2.0]])
    p = Regression(mean, mean / 2, mean / 4, np.zeros((1, 1, 4)), Checks(0.9, np.zeros(1, bool), low=mean, high=mean))
    columns = output_columns(p, spec(GaussianNoise(2)))
    assert columns["mean_1"] == [2.0] and columns["low_0"] == [1.0] and columns["alarm"] == [False]
    assert list(columns)[:5] == ["mean_0", "std_0", "model_std_0", "low_0", "high_0"]
