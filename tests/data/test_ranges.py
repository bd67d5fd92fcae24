"""What columns usually hold: tail probabilities against closed forms, and every corruption of the hospital table."""

import importlib.util
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedabml.data.ranges import NumberRange, RangeLimits, Ranges, WordRange, gaps_of
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


def flags_of(ranges, columns):
    """For each row a sentence by column whose novelty is beyond the threshold."""
    limit = ranges.threshold()
    return ranges.sentences(columns, {name: found > limit for name, found in ranges.novelties(columns).items()})


def test_usual_rows_are_flagged_as_often_as_stated():
    random = np.random.default_rng(1)
    train, new = ({str(j): random.lognormal(size=n) for j in range(8)} for n in (3000, 20_000))
    share = np.mean([bool(flags) for flags in flags_of(Ranges.fit(train), new)])
    assert 0.03 < share < 0.07  # beyond the last quantile the tail is extrapolated


def test_categories_and_gaps():
    words = WordRange.fit(np.array(["a"] * 180 + ["b"] * 16 + ["c"] * 4, object))
    p = words.tails(np.array(["a", "b", "c", "z", None], object))
    assert p == pytest.approx([1, 0.1, 0.02, 0.02, 0])  # an unknown word is as likely as a rare one
    assert words.reason("B") == "is 'B', seen in fewer than 5 rows; 'b' is known"
    assert WordRange.fit(np.array(["a", "b"] * 100, object)).tails(np.array(["z"], object)).tolist() == [0]
    assert WordRange.fit(np.array(["a", "b"] * 10, object)).tails(np.array(["z"], object))[0] == pytest.approx(0.5 / 21)
    numbers = NumberRange.fit(np.r_[np.random.default_rng(0).normal(size=100), np.full(25, np.nan)])
    assert numbers.tails(np.array([np.nan]))[0] == pytest.approx(0.2)
    assert NumberRange.fit(np.arange(100.0)).tails(np.array([np.nan]))[0] == 0


def test_few_different_numbers_are_categories():
    """A rare 0/1 column flags no usual row, and a year is not rounded away."""
    random = np.random.default_rng(0)
    columns = {f"c{j}": (random.random(3000) < 0.003).astype(float) for j in range(30)}
    columns["year"] = random.integers(2015, 2025, 3000).astype(float)
    ranges = Ranges.fit(columns)
    assert np.mean([bool(flags) for flags in flags_of(ranges, columns)]) < 0.03
    odd = {name: values[:2].copy() for name, values in columns.items()}
    odd["c3"][0], odd["year"][1] = 7.0, 1950.0
    first, second = flags_of(ranges, odd)
    assert first["c3"] == "c3 is '7', seen in fewer than 5 rows"
    assert second["year"] == "year is '1950', seen in fewer than 5 rows"


def test_an_offset_is_not_rounded_away():
    random = np.random.default_rng(1)
    train, new = ({"longitude": random.normal(13.405, 0.05, n)} for n in (3000, 20_000))
    ranges = Ranges.fit(train)
    assert np.mean([bool(flags) for flags in flags_of(ranges, new)]) == pytest.approx(0.05, abs=0.02)
    assert flags_of(ranges, {"longitude": np.array([14.0])})[0]


def test_columns_of_one_value_and_of_few_rows():
    one = Ranges.fit({"a": np.full(150, 3.0)})
    assert one.tails({"a": np.array([3.0, 3.5, -3.0])})["a"].tolist() == [1, 0, 0]
    for rows in (6, 12, 19, 30):
        few = NumberRange.fit(np.random.default_rng(0).normal(size=rows))
        usual = few.tails(np.random.default_rng(1).normal(size=500))
        assert (usual < 0.005).mean() < 0.05  # little is known, so little is unusual


def test_nothing_identifies_a_row():
    """The largest and the smallest value, and a word that one patient has, are not remembered."""
    ages = np.r_[np.random.default_rng(0).integers(30, 80, 500).astype(float), 119.0]
    content = json.dumps(Ranges.fit({"age": ages, "ward": np.array(["x"] * 500 + ["zebra"], object)}).to_json())
    assert "119" not in content and "zebra" not in content


def test_they_are_saved_and_damage_is_refused():
    ranges = Ranges.fit({"n": np.arange(100.0), "w": np.array(["a", "b"] * 50, object)})
    assert isinstance(ranges.columns["n"], NumberRange)
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
    assert np.mean([bool(f) for f in flags_of(ranges, clean)]) < 0.07
    assert np.mean([bool(f) for f in flags_of(ranges, spoiled)]) > 0.9


def test_below_zero_is_impossible_where_it_never_was():
    """One wild value of a usual row must not hide a negative count: nothing is as unusual as the impossible."""
    values = np.random.default_rng(0).lognormal(3, 1, 400)
    ranges = Ranges.fit({"count": values})
    assert ranges.novelty({"count": np.array([-1.0])}) > ranges.novelty({"count": np.array([values.max() * 10])})
    (flags,) = flags_of(ranges, {"count": np.array([-1.0])})
    assert flags["count"] == "count is -1; no value is below zero"
    assert Ranges.from_json(ranges.to_json()) == ranges
    old = {"count": {k: v for k, v in ranges.to_json()["count"].items() if k != "signed"}}
    assert Ranges.from_json(old).columns["count"].signed  # a file of before: only the quantiles count
    assert Ranges.fit({"count": values - 20}).columns["count"].signed
    assert Ranges.fit({"count": values[:50]}).columns["count"].signed  # too few rows to know


@pytest.mark.parametrize("values", [np.array(["a"] * 20_000 + ["b"] * 5, object), np.r_[np.zeros(20_000), np.ones(5)]])
def test_a_category_of_few_among_many_rows_is_saved(values):
    ranges = Ranges.fit({"ward": values})
    content = json.loads(json.dumps(ranges.to_json()))
    assert min(content["ward"]["shares"].values()) == 0.001 and Ranges.from_json(content) == ranges
    rare = min(content["ward"]["shares"], key=content["ward"]["shares"].get)
    content["ward"]["shares"][rare] = 0.0  # as earlier versions wrote it
    assert Ranges.from_json(content) == ranges


def alarms(ranges, limits, columns):
    """Return which rows exceed a limit."""
    novelties = ranges.novelties(columns)
    return np.any([novelty > limits.of(n, gaps_of(columns[n])) for n, novelty in novelties.items()], axis=0)


def test_what_is_common_in_one_column_leaves_alarms_of_the_others():
    """A client without 8% of the ages keeps its false alarms, and alarms for impossible ages and wrong units."""
    random = np.random.default_rng(0)
    train = {name: random.lognormal(3, 0.4, 4000) for name in ("age", "creatinine", "lactate")}
    train["ward"] = random.choice(["a", "b"], 4000).astype(object)
    ranges = Ranges.fit(train)
    rows = {name: values[:2000].copy() for name, values in train.items()}
    for name, gap in (("age", np.nan), ("ward", None)):
        rows[name][random.random(2000) < 0.08] = gap
    own, new = ({name: values[part] for name, values in rows.items()} for part in (slice(300), slice(300, None)))
    assert alarms(ranges, RangeLimits(ranges.threshold(0.05)), new).mean() > 0.14
    limits = ranges.limits(own, 0.05)
    assert set(limits.gaps) == {"age", "ward"} and not {"age", "ward"} & set(limits.values)
    assert alarms(ranges, limits, new).mean() < 0.05
    for name, value in (("age", 999.0), ("age", -1.0), ("creatinine", 500.0), ("ward", "zebra")):
        spoiled = new | {name: np.full(1700, value, new[name].dtype)}
        assert alarms(ranges, limits, spoiled).mean() == 1


def test_limits_rise_only_where_too_many_rows_exceed_them():
    values = np.random.default_rng(0).normal(size=2000)
    ranges = Ranges.fit({"x": values})
    wild = values[:100].clip(-1.5, 1.5)
    wild[0] = 1e6  # one wild row of 100 is allowed, so its value hides nothing
    assert ranges.limits({"x": wild}) == RangeLimits(ranges.threshold())
    few = wild[:10].copy()
    assert ranges.limits({"x": few}) == RangeLimits(ranges.threshold())
    few[1] = 50.0
    raised = ranges.limits({"x": few})
    assert raised.values["x"] == ranges.novelty({"x": few[1:2]})[0] < ranges.novelty({"x": few[:1]})[0]


@pytest.mark.parametrize("rows", [10, 38, 39, 78, 118, 119, 300])
def test_no_fewer_rows_may_exceed_a_limit_where_there_are_more(rows):
    """Of n rows ⌊(n + 1)·2.5%⌋ − 1 may exceed a limit, and always one."""
    ranges = Ranges.fit({"x": np.random.default_rng(0).normal(size=2000)})
    allowed = max(1, int(np.floor((rows + 1) * 0.025 + 1e-9)) - 1)
    values = np.zeros(rows)
    values[:allowed] = 50 + np.arange(allowed)
    assert ranges.limits({"x": values}, 0.025) == RangeLimits(ranges.threshold(0.025))
    values[allowed] = 40.0
    assert ranges.limits({"x": values}, 0.025).values["x"] == ranges.novelty({"x": np.array([40.0])})[0]


@pytest.mark.parametrize(("rows", "gaps", "common"), [(30, 1, False), (30, 2, True), (88, 4, False), (88, 5, True)])
def test_gaps_are_common_if_five_rows_or_a_twentieth_have_them(rows, gaps, common):
    random = np.random.default_rng(0)
    ranges = Ranges.fit({name: random.normal(size=2000) for name in "ab"})
    values = {name: np.zeros(rows) for name in "ab"}
    values["a"][:gaps] = np.nan
    values["b"][-2:] = 50.0  # so that one limit must rise
    assert set(ranges.limits(values).gaps) == ({"a"} if common else set())


def risen_step_by_step(ranges, columns, false_alarms, allowed):
    """Return the limits as their rule has them: the one that the most rows exceed rises past their lowest novelty."""
    usual = ranges.threshold(false_alarms)
    novelties, limits = ranges.novelties(columns), {}
    while True:
        beyond = {}
        for name, novelty in novelties.items():
            missing = gaps_of(columns[name])
            for is_gap in (True, False):
                beyond[name, is_gap] = (novelty > limits.get((name, is_gap), usual)) & (missing == is_gap)
        if np.any(list(beyond.values()), axis=0).sum() <= allowed:
            return RangeLimits(
                usual, *({n: v for (n, gap), v in limits.items() if gap == part} for part in (False, True))
            )
        key = max(beyond, key=lambda k: (beyond[k].sum(), -novelties[k[0]][beyond[k]].min(initial=np.inf)))
        limits[key] = float(novelties[key[0]][beyond[key]].min())


@pytest.mark.parametrize("seed", range(3))
def test_limits_rise_in_the_order_of_their_rule(seed):
    random = np.random.default_rng(seed)
    train = {name: random.lognormal(3, 0.4, 2000) for name in "abc"}
    ranges = Ranges.fit(train | {"w": random.choice(["x", "y"], 2000).astype(object)})
    rows = {name: random.lognormal(3 + 0.8 * random.random(), 0.6, 150) for name in "abc"}
    rows["a"][random.random(150) < 0.08] = np.nan
    rows["w"] = np.where(random.random(150) < 0.04, "z", random.choice(["x", "y"], 150)).astype(object)
    limits = ranges.limits(rows)
    assert len(limits.values) > 1 and limits == risen_step_by_step(ranges, rows, 0.05, 6)


def test_many_rows_beyond_a_limit_take_little_longer_than_few():
    """Four times the rows take about four times as long, not sixteen times."""
    random = np.random.default_rng(0)
    ranges = Ranges.fit({name: random.normal(size=5000) for name in "ab"})
    shortest = []
    for rows in (20_000, 80_000):
        columns = {"a": random.normal(size=rows), "b": 10 + random.normal(size=rows)}
        times = []
        for _ in range(3):
            start = time.process_time()
            ranges.limits(columns)
            times.append(time.process_time() - start)
        shortest.append(min(times))
    assert shortest[1] < 9 * shortest[0]


def test_limits_are_saved_and_damage_is_refused():
    limits = RangeLimits(5.0, {"age": 7.0}, {"ward": 690.0})
    content = json.loads(json.dumps(limits.to_json()))
    assert RangeLimits.from_json(5.0, content) == limits
    for damage in ({"values": {}}, {"values": {"age": math.nan}, "gaps": {}}, {"values": {"age": "x"}, "gaps": {}}):
        with pytest.raises((ValueError, KeyError)):
            RangeLimits.from_json(5.0, damage)
