"""What columns usually hold: tail probabilities against closed forms, and every corruption of the hospital table."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedabml.data.ranges import NumberRange, Ranges, WordRange
from fedabml.errors import InputError

spec = importlib.util.spec_from_file_location("hospitals", Path(__file__).parents[2] / "examples" / "hospitals.py")
hospitals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hospitals)


def test_tails_of_a_normal_column():
    values = np.random.default_rng(0).normal(size=200_000)
    known = NumberRange.fit(values)
    for z in (0.5, 1.2, 2.2):
        expected = math.erfc(z / math.sqrt(2))
        assert known.tails(np.array([z, -z])) == pytest.approx([expected, expected], rel=0.1)
    far = known.tails(np.array([4.0, 8.0, 1e6, -1e300]))
    assert (far < 1e-3).all() and far[1] < far[0] and (far > 0).all()


def test_usual_rows_are_flagged_as_often_as_stated():
    random = np.random.default_rng(1)
    train, new = ({str(j): random.lognormal(size=n) for j in range(8)} for n in (3000, 20_000))
    share = np.mean([bool(flags) for flags in Ranges.fit(train).flags(new)])
    assert 0.03 < share < 0.07  # beyond the last quantile the tail is extrapolated


def test_categories_and_gaps():
    words = WordRange.fit(np.array(["a"] * 90 + ["b"] * 8 + ["c"] * 2, object))
    p = words.tails(np.array(["a", "b", "c", "z", None], object))
    assert p == pytest.approx([0.98, 0.08, 0.5 / 101, 0.5 / 101, 0.5 / 101])
    assert words.reason("B") == "is 'B', which is unknown; 'b' is known"
    numbers = NumberRange.fit(np.array([1.0, 2.0] * 50 + [np.nan] * 25))
    assert numbers.tails(np.array([np.nan]))[0] == pytest.approx(0.2)
    assert NumberRange.fit(np.arange(100.0)).tails(np.array([np.nan]))[0] < 0.01


def test_columns_of_one_value_and_of_few_rows():
    one = NumberRange.fit(np.full(50, 3.0))
    assert one.tails(np.array([3.0, 3.5, -3.0])) == pytest.approx([1, 0, 0], abs=1e-9)
    few = NumberRange.fit(np.arange(6.0))
    assert few.tails(np.array([1e9])).tolist() == [1.0]  # nothing is known, so nothing is unusual


def test_nothing_identifies_a_row():
    """The largest and the smallest value, and a word that one patient has, are not remembered."""
    ages = np.r_[np.random.default_rng(0).integers(30, 80, 500).astype(float), 119.0]
    content = json.dumps(Ranges.fit({"age": ages, "ward": np.array(["x"] * 500 + ["rare"], object)}).to_json())
    assert "119" not in content and "rare" not in content


def test_they_are_saved_and_damage_is_refused():
    ranges = Ranges.fit({"n": np.arange(100.0), "w": np.array(["a", "b"] * 50, object)})
    content = json.loads(json.dumps(ranges.to_json()))
    assert Ranges.from_json(content) == ranges
    for damage in ({"n": {}}, {"n": content["n"] | {"quantiles": [3, 1]}}, [], {"w": content["w"] | {"missing": 7}}):
        with pytest.raises(InputError, match="damaged"):
            Ranges.from_json(damage)


def columns_of(table):
    numeric = ("age", "creatinine", "lactate", "heart_rate", "sodium", "temperature")
    words = {name: table[name].to_numpy(object) for name in ("sex", "ward", "admission")}
    return {name: table[name].to_numpy(float) for name in numeric} | words


CORRUPTIONS = {
    "creatinine in mg/dl": lambda t: t.assign(creatinine=(t.creatinine / 88.4).round(2)),
    "creatinine times ten": lambda t: t.assign(creatinine=10 * t.creatinine),
    "temperature in Fahrenheit": lambda t: t.assign(temperature=t.temperature * 1.8 + 32),
    "an impossible age": lambda t: t.assign(age=999.0),
    "a ward never seen": lambda t: t.assign(ward="burns"),
    "a category in lower case": lambda t: t.assign(sex=t.sex.str.capitalize()),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_of_the_hospital_table_are_noticed(name):
    table = hospitals.patients(0)
    table = table[table.creatinine.notna() & table.temperature.notna()]
    train, test = table.iloc[::2], table.iloc[1::2]
    ranges = Ranges.fit(columns_of(train))
    clean, spoiled = columns_of(test), columns_of(CORRUPTIONS[name](test))
    scores = np.r_[ranges.novelty(clean), ranges.novelty(spoiled)]
    assert roc_auc_score(np.repeat([0, 1], len(test)), scores) > 0.95
    assert np.mean([bool(f) for f in ranges.flags(clean)]) < 0.07
    assert np.mean([bool(f) for f in ranges.flags(spoiled)]) > 0.9
