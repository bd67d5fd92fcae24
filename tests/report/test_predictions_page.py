"""The page of predictions: rows with alarms alone, what raised them, and no markup from the data."""

from __future__ import annotations

import numpy as np
import pytest

from fedabml.evaluation.predictions import Checks, Prediction, Regression
from fedabml.report import predictions_page
from fedabml.report.predictions_page import render_predictions

ROWS = 6
NAMES = {"patient": [f"name{i}" for i in range(ROWS)]}


@pytest.fixture
def p():
    """Six predictions; rows 1 and 4 have alarms, row 4 the more unusual values."""
    alarm = np.isin(np.arange(ROWS), [1, 4])
    flags: list[list[str]] = [[] for _ in range(ROWS)]
    flags[1], flags[4] = ["ward is '<b>x</b>'"], ["age is 999", "creatinine is 9999"]
    causes = [[], ["ward"], [], [], ["age", "creatinine"], []]
    checks = Checks(0.9, alarm, flags=flags, score=np.array([0, 2.0, 0, 0, 5.0, 0]), causes=causes)
    probs = np.linspace(0.1, 0.9, ROWS)
    return Prediction(np.stack([1 - probs, probs], 1), np.zeros(ROWS), np.zeros(ROWS), checks=checks)


def columns_of(p):
    """Return columns as the file of predictions has them."""
    columns = {"label": ["yes" if i else "no" for i in p.label], "p_yes": p.probs[:, 1].tolist()}
    return columns | {"entropy": p.entropy.tolist(), "surprise": [0.25] * ROWS}


def test_it_lists_rows_with_alarms_and_no_others(p):
    page = render_predictions(p, NAMES, columns_of(p), "Predictions for today.csv", "Alarms by values.")
    assert "6 rows, 2 with an alarm" in page and "Alarms by values." in page
    assert page.index("name4") < page.index("name1"), "the most unusual row comes first"
    assert not any(f"name{i}" in page for i in (0, 2, 3, 5))
    assert "age, creatinine" in page and "age is 999; creatinine is 9999" in page
    assert "<b>x</b>" not in page and "&lt;b&gt;x&lt;/b&gt;" in page
    assert "p_yes" not in page and "Entropy with and without an alarm" in page


@pytest.mark.parametrize("name", ["p_id", "q_id", "label_id", "set", "alarm", "probability", "why"])
def test_a_column_that_names_rows_is_listed_whatever_its_name(p, name):
    page = render_predictions(p, {name: NAMES["patient"]}, columns_of(p), "Predictions", "")
    assert f">{name}<" in page and "name4" in page and "name1" in page
    assert "p_yes" not in page and "0.74" in page, "the probability of the predicted label"


def test_of_very_many_rows_the_most_unusual_are_listed(p, monkeypatch):
    monkeypatch.setattr(predictions_page, "MOST_ROWS", 1)
    page = render_predictions(p, NAMES, columns_of(p), "Predictions", "")
    assert "name4" in page and "name1" not in page and "The 1 most unusual of 2 rows" in page


def test_predictions_without_checks_or_alarms_say_so(p):
    columns = columns_of(p)
    unchecked = Prediction(p.probs, p.mutual_information)
    assert "None of these predictions was checked" in render_predictions(unchecked, NAMES, columns, "Predictions", "")
    quiet = Prediction(p.probs, p.mutual_information, checks=Checks(0.9, np.zeros(ROWS, bool), causes=[[]] * ROWS))
    page = render_predictions(quiet, NAMES, columns, "Predictions", "")
    assert "6 rows, 0 with an alarm" in page and not any(name in page for name in NAMES["patient"])


def test_a_regression_shows_its_spread(p):
    mean, std = np.arange(ROWS, dtype=float)[:, None], np.linspace(1, 2, ROWS)[:, None]
    numbers = Regression(mean, std, std, np.zeros((1, ROWS, 2)), checks=p.checks)
    columns = {"mean": mean[:, 0].tolist(), "std": std[:, 0].tolist()}
    page = render_predictions(numbers, {}, columns, "Predictions", "")
    assert "Spread with and without an alarm" in page and "standard deviation" in page
