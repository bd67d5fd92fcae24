"""Columns of dates: their parts by hand, and how a recipe keeps them."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, timedelta

import numpy as np
import pytest

from fedabml.data import TableRecipe, features, read_table
from fedabml.data.dates import clock, has_times, parse_dates, part_names, part_values
from fedabml.errors import InputError

pd = pytest.importorskip("pandas")


def table(n=60, **columns):
    days = pd.date_range("2023-01-01", periods=n, freq="9D").strftime("%Y-%m-%d")
    base = {"site": [f"s{i % 3}" for i in range(n)], "age": np.arange(n) % 7 + 0.5, "admitted": days}
    return pd.DataFrame({**base, "ill": ["no", "yes"] * (n // 2), **columns})


def read(frame, **options):
    return read_table(frame, **{"client": "site", "target": "ill", **options})


def test_the_parts_of_a_date_by_hand():
    values = parse_dates(pd.Series(["2024-07-02T00:00", None, "1969-12-31T18:00:00", "2023-01-01 06:30"]), "c")
    parts = clock(values)
    np.testing.assert_allclose(parts["year"][[0, 3]], [2024 + 183 / 366, 2023 + 6.5 / 24 / 365])
    assert parts["month"][[0, 2, 3]].tolist() == [6, 11, 0]
    assert parts["weekday"][[0, 2, 3]].tolist() == [1, 2, 6]  # a Tuesday, a Wednesday, a Sunday
    assert parts["hour"][[0, 2, 3]].tolist() == [0, 18, 6.5]
    assert all(math.isnan(each[1]) for each in parts.values())
    assert has_times(values) and not has_times(values[:2])
    one = dict(zip(part_names("c", True), (each[3] for each in part_values(values, True)), strict=True))
    assert one["c month sine"] == 0 and one["c month cosine"] == 1
    assert one["c weekday sine"] == pytest.approx(math.sin(2 * math.pi * 6 / 7))
    assert one["c hour cosine"] == pytest.approx(math.cos(2 * math.pi * 6.5 / 24))


def test_the_parts_agree_with_the_calendar_of_python():
    seconds = np.random.default_rng(0).integers(0, 800 * 365 * 86_400, 500)
    days = [datetime(1600, 1, 1) + timedelta(seconds=int(each)) for each in seconds]
    parts = clock(parse_dates(pd.Series([day.isoformat() for day in days]), "c"))
    found = zip(*(parts[name].astype(int).tolist() for name in ("year", "month", "weekday", "hour")), strict=True)
    assert list(found) == [(day.year, day.month - 1, day.weekday(), day.hour) for day in days]


def test_every_way_to_hold_dates_gives_the_same_values():
    texts = ["2024-01-31", "2024-02-29", None]
    wanted = parse_dates(pd.Series(texts), "c")
    stamps = pd.Series(pd.to_datetime(texts))
    days = pd.Series([date(2024, 1, 31), date(2024, 2, 29), None], dtype=object)
    for column in (stamps, stamps.dt.tz_localize("Europe/Berlin"), days, pd.Series([" 2024-01-31 ", texts[1], ""])):
        np.testing.assert_array_equal(parse_dates(column, "c"), wanted)
    assert str(parse_dates(pd.Series(["2024-01-31T10:30:00,5+02:00"]), "c")[0]) == "2024-01-31T10:30:00"


@pytest.mark.parametrize("wrong", ["31.01.2024", "2024-02-30", "2024-13-01", "20241331", "soon", "2024-01-31T25:00", 5])
def test_anything_but_iso_dates_is_named(wrong):
    with pytest.raises(InputError, match=r"Column 'admitted' has .* in row 2, which is no ISO date such as 2024-01-31"):
        parse_dates(pd.Series(["2024-01-31", wrong], dtype=object), "admitted")


@pytest.mark.parametrize("column", [[19651128, 19401341], [19651128.0, None, 19401341], ["20240131", "unknown"]])
def test_the_wrong_one_of_eight_digits_is_named(column):
    with pytest.raises(InputError, match=rf"has '{column[-1]}' in row {len(column)}, which is no ISO date"):
        parse_dates(pd.Series(column), "born")


def test_dates_are_refused_with_the_way_out_until_a_flag_names_them():
    with pytest.raises(
        InputError, match=r"'admitted' holds dates, such as .*--date-columns.*--split-by.*--drop-columns"
    ):
        read(table())
    with pytest.raises(InputError, match=r"holds dates or times.*--date-columns"):
        read(table(admitted=pd.date_range("2023-01-01", periods=60)))


def test_dates_become_features_that_the_recipe_keeps():
    fed = read(table(), dates=["admitted"])
    names = fed.recipe.feature_names
    assert names == ("age", *part_names("admitted", False)) and "admitted year missing" not in names
    year = fed.x[:, names.index("admitted year")]
    assert (np.diff(year) > 0).all() and abs(year[fed.train.index].mean()) < 1e-5
    again = TableRecipe.from_json(json.loads(json.dumps(fed.recipe.to_json())))
    assert again == fed.recipe
    np.testing.assert_array_equal(features(table(), again), fed.x)
    assert fed.recipe.table_columns == ("age", "admitted")
    assert sorted(fed.recipe.ranges.columns) == sorted(["age", "admitted year", "admitted month", "admitted weekday"])


def test_the_ranges_name_a_date_that_was_never_seen():
    monday = pd.Timestamp("2024-01-01")
    days = [(monday + pd.Timedelta(days=7 * (i // 5) + i % 5)).strftime("%Y-%m-%d") for i in range(600)]
    recipe = read(table(600, admitted=days), dates=["admitted"]).recipe
    odd = pd.DataFrame({"age": [3.5, 3.5], "admitted": ["2025-06-14", "2044-01-04"]})
    columns, limit = recipe.raw_columns(odd), recipe.ranges.threshold()
    marks = {name: found > limit for name, found in recipe.ranges.novelties(columns).items()}
    saturday, far = recipe.ranges.sentences(columns, marks)
    assert saturday == {"admitted weekday": "admitted weekday is 'Saturday', seen in fewer than 5 rows"}
    assert list(far) == ["admitted year"] and "only 2.0% of the values are above" in far["admitted year"]


def test_times_of_day_and_gaps():
    days = pd.date_range("2023-01-01 05:00", periods=60, freq="31h").strftime("%Y-%m-%dT%H:%M").to_numpy(dtype=object)
    days[::7] = None
    fed = read(table(admitted=days), dates="admitted")
    names = fed.recipe.feature_names
    assert "admitted hour sine" in names and sum("missing" in name for name in names) == 1
    assert fed.x[0, names.index("admitted year missing")] == 1 and np.isfinite(fed.x).all()


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({}, {"dates": ["admited"]}, "no column 'admited'. Did you mean 'admitted'"),
        ({}, {"dates": ["admitted"], "drop": ["admitted"]}, "cannot be both left out and a date to learn from"),
        ({"admitted year": 1.5}, {"dates": ["admitted"]}, "both dates in 'admitted' and a column 'admitted year'"),
        ({}, {"split_by": "ill"}, "cannot be both the target and what rows are split by"),
        ({}, {"split_by": "never"}, "no column 'never'"),
        ({"admitted": [None] + ["2024-01-01"] * 59}, {"split_by": "admitted"}, "rows are split, has no value in row 1"),
    ],
)
def test_what_does_not_fit_is_named(columns, options, words):
    with pytest.raises(InputError, match=words):
        read(table(**columns), **options)


def test_a_column_left_out_may_have_the_name_of_a_part():
    frame = table(**{"admitted year": 1.5})
    fed = read(frame, dates="admitted", drop=["admitted year"])
    np.testing.assert_array_equal(fed.x, read(table(), dates="admitted").x)
    np.testing.assert_array_equal(features(frame, fed.recipe), features(table(), fed.recipe))


@pytest.mark.parametrize("change", [{"dates": {"admitted": 1}}, {"dates": {"other": True}}, {"dates": []}, {"id": 3}])
def test_foreign_dates_and_ids_of_a_recipe_are_refused(change):
    content = {**read(table(), dates=["admitted"]).recipe.to_json(), **change}
    with pytest.raises(InputError, match="not the recipe"):
        TableRecipe.from_json(content)


def test_a_new_table_needs_its_dates():
    recipe = read(table(), dates=["admitted"]).recipe
    with pytest.raises(InputError, match="no column 'admitted'"):
        features(table().drop(columns="admitted"), recipe)
    with pytest.raises(InputError, match="no ISO date"):
        features(table(admitted="today"), recipe)


@pytest.mark.parametrize("kind", ["dates", "numbers"])
def test_the_newest_rows_of_each_client_are_its_test_rows(kind):
    rng = np.random.default_rng(0)
    frame = table().sample(frac=1, random_state=1).reset_index(drop=True)
    if kind == "numbers":
        frame["admitted"] = rng.permutation(60)
    fed = read(frame, split_by="admitted", test_share=0.25)
    assert fed.test.counts.tolist() == [5, 5, 5] and fed.recipe.columns == ("age",)
    for i in range(3):
        assert frame.admitted[fed.train[i]].max() < frame.admitted[fed.test[i]].min()
    assert fed.manifest["partition"]["split_by"] == "admitted"
    assert read(frame, split_by="admitted", test_share=0.25, seed=7).rows_hash == fed.rows_hash


def test_a_date_may_split_and_be_learned_from():
    fed = read(table(), split_by="admitted", dates=["admitted"])
    assert "admitted year" in fed.recipe.feature_names


def test_of_rows_at_the_same_time_the_later_one_is_newer():
    fed = read(table(admitted="2024-01-01"), split_by="admitted", test_share=0.1)
    assert [fed.test[i].tolist() for i in range(3)] == [[54, 57], [55, 58], [56, 59]]


def test_rows_are_ordered_in_utc_and_learned_by_the_clock_at_the_place():
    texts = ["2020-01-01T00:30+14:00", "2020-01-01T00:00-10:00"]  # the first one is a day earlier
    column = pd.Series(texts)
    assert [str(day) for day in parse_dates(column, "c")] == ["2020-01-01T00:30:00", "2020-01-01T00:00:00"]
    assert [str(day) for day in parse_dates(column, "c", utc=True)] == ["2019-12-31T10:30:00", "2020-01-01T10:00:00"]
    aware = pd.Series(pd.to_datetime(["2024-07-01 12:00"])).dt.tz_localize("Europe/Berlin")
    assert str(parse_dates(aware, "c", utc=True)[0]) == "2024-07-01T10:00:00"
    fed = read(table(admitted=[texts[i % 2] for i in range(60)]), split_by="admitted", test_share=0.5)
    assert set(fed.test.index % 2) == {1}
    for mixed, says in (("2020-01-01T00:00Z", "in UTC"), ("2020-01-01T00:00", "without a zone")):
        with pytest.raises(InputError, match=f"'c' mixes .*{says}"):
            parse_dates(pd.Series([texts[0], mixed]), "c")


def test_numbers_of_dates_are_dates_where_a_flag_names_them():
    days = pd.date_range("2023-01-01", periods=60, freq="9D")
    numbers = days.strftime("%Y%m%d").astype(int)
    np.testing.assert_array_equal(read(table(admitted=numbers), dates="admitted").x, read(table(), dates="admitted").x)
    notes = read(table(admitted=numbers)).manifest["notes"]
    assert len(notes) == 1 and "'admitted' looks like dates (YYYYMMDD), but is used as a number" in notes[0]
    assert "2023" not in notes[0]  # which may be a birth date
    assert "notes" not in read(table(admitted=np.arange(60) % 7 + 20230199)).manifest
