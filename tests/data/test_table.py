"""Tables: encoding, splits without leaks, saved recipes, and every table that is refused."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest

from fedabml import inspect_table
from fedabml.data import TableRecipe, features, read_table
from fedabml.data.once import reading_once
from fedabml.data.recipe import Numeric
from fedabml.errors import InputError

pd = pytest.importorskip("pandas")


def frame(n=60, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "site": [f"s{i % 3}" for i in range(n)],
            "age": rng.normal(50, 10, n).round(1),
            "dose": np.where(np.arange(n) % 5 == 0, np.nan, rng.normal(3, 1, n)),
            "sex": np.where(np.arange(n) % 2, "f", "m"),
            "smoker": np.arange(n) % 4 == 0,
            "ill": np.where(np.arange(n) % 3 == 0, "yes", "no"),
        }
    )


def write(path, table):
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return path


def read(tmp_path, table, **options):
    return read_table(write(tmp_path / "t.csv", table), **{"client": "site", "target": "ill", **options})


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_becomes_a_federation(tmp_path, kind):
    path = write(tmp_path / f"study.{kind}", frame())
    fed = read_table(path, client="site", target="ill")
    assert (fed.clients, fed.classes, fed.names, fed.dataset) == (3, 2, ("s0", "s1", "s2"), "study")
    assert fed.train.counts.tolist() == [16] * 3 and fed.test.counts.tolist() == [4] * 3
    assert fed.recipe.class_names == ("no", "yes")
    assert fed.recipe.feature_names == (
        "age", "dose", "dose missing", "sex=f", "sex=m", "sex=other", "smoker=False", "smoker=True", "smoker=other",
    )  # fmt: skip
    assert fed.x.shape == (60, 9) and fed.x.dtype == np.float32 and fed.shift == 0 and fed.scale == 1
    np.testing.assert_allclose(fed.x[fed.train.index, :2].mean(0), 0, atol=1e-5)
    np.testing.assert_array_equal(features(path, fed.recipe), fed.x)


def test_the_positive_class_is_the_second_one(tmp_path):
    """All measures and thresholds of two classes are about class 1, so the choice is an order of the classes."""
    table = frame()
    path = write(tmp_path / "t.csv", table)
    with reading_once():
        usual, chosen = (read_table(path, client="site", target="ill", positive_class=p) for p in ("yes", "no"))
    assert usual.recipe.class_names == ("no", "yes") and chosen.recipe.class_names == ("yes", "no")
    np.testing.assert_array_equal(chosen.y, 1 - usual.y)
    np.testing.assert_array_equal(chosen.test.index, usual.test.index)
    assert usual.hash == read_table(path, client="site", target="ill").hash != chosen.hash
    again = TableRecipe.from_json(json.loads(json.dumps(chosen.recipe.to_json())))
    np.testing.assert_array_equal(again.encode_target(table["ill"]), chosen.y)  # a site that has the prior agrees
    with pytest.raises(InputError, match=r"no class 'dead'.*'no' and 'yes'.*--positive-class"):
        read_table(path, client="site", target="ill", positive_class="dead")
    with pytest.raises(InputError, match=r"has 3 classes.*Leave --positive-class out"):
        read_table(path, client="smoker", target="site", positive_class="s0")
    with pytest.raises(InputError, match=r"has numbers.*Leave --positive-class out"):
        read_table(path, client="site", target="age", positive_class="50")


def test_statistics_know_nothing_of_test_rows(tmp_path):
    table = frame()
    fed = read(tmp_path, table)
    table.loc[fed.test.index, ["age", "dose"]] = 1e6
    table.loc[fed.test.index, "sex"] = "unheard of"
    again = read(tmp_path, table)
    assert again.recipe == fed.recipe
    np.testing.assert_array_equal(again.x[again.train.index], fed.x[fed.train.index])
    assert (again.x[again.test.index][:, fed.recipe.feature_names.index("sex=other")] == 1).all()


def test_the_split_follows_the_seed_and_the_labels(tmp_path):
    one, same, other = (read(tmp_path, frame(), seed=s) for s in (1, 1, 2))
    assert one.rows_hash == same.rows_hash != other.rows_hash
    mixed = frame().assign(site="only")
    assert read(tmp_path, mixed, test_share=0.25).label_counts("test").tolist() == [[10, 5]]
    assert len(read(tmp_path, frame(), test_share=0).test.index) == 0


def test_missing_and_unknown_values_in_new_rows(tmp_path):
    recipe = read(tmp_path, frame()).recipe
    new = pd.DataFrame({"age": [None, "51"], "dose": [None, 2.0], "sex": [None, "x"], "smoker": ["True", None]})
    x = features(new, recipe)
    assert np.isfinite(x).all() and x[:, recipe.feature_names.index("sex=other")].tolist() == [1, 1]
    assert x[:, recipe.feature_names.index("dose missing")].tolist() == [1, 0]
    assert x[0, recipe.feature_names.index("smoker=True")] == 1
    assert x[0, 0] == pytest.approx(
        (recipe.numeric["age"].median - recipe.numeric["age"].mean) / recipe.numeric["age"].std
    )


@pytest.mark.parametrize(
    ("values", "task", "names"),
    [
        (np.arange(60) % 4, "classification", ("0", "1", "2", "3")),
        (np.arange(60) % 2 == 0, "classification", ("False", "True")),
        (np.arange(60), "regression", ()),
        (np.arange(60) / 7, "regression", ()),
    ],
)
def test_the_task_is_read_off_the_target(tmp_path, values, task, names):
    fed = read(tmp_path, frame().assign(ill=values))
    assert fed.task == task and fed.recipe.class_names == names


def test_the_task_can_be_given(tmp_path):
    assert read(tmp_path, frame().assign(ill=np.arange(60) % 2), task="regression").y.dtype == np.float32
    many = read(tmp_path, frame().assign(ill=np.arange(60) % 30), task="classification")
    assert many.classes == 30 and many.recipe.class_names[:3] == ("0", "1", "2")


def test_regression_is_standardised_by_training_targets(tmp_path):
    fed = read(tmp_path, frame().assign(ill=np.random.default_rng(0).normal(7, 3, 60)))
    seen = (fed.y[fed.train.index] - fed.y_shift) / fed.y_scale
    assert abs(seen.mean()) < 1e-5 and abs(seen.std() - 1) < 1e-5


def test_numbered_clients_stand_in_their_order(tmp_path):
    fed = read(tmp_path, frame().assign(site=[10, 9, 100] * 20))
    assert fed.names == ("9", "10", "100")


def test_small_clients(tmp_path):
    table = frame()
    table.loc[0, "site"] = "tiny"
    with pytest.raises(InputError, match=r"'tiny'.*1 training sample.*--drop-small"):
        read(tmp_path, table)
    assert read(tmp_path, table, drop_small=True).names == ("s0", "s1", "s2")
    table.loc[[3, 6], "site"] = "tiny"  # three rows: two to learn from, one to test
    assert read(tmp_path, table).train.counts[-1] == 2


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"client": "sit"}, "no column 'sit'. Did you mean 'site'"),
        ({}, {"target": "il"}, "no column 'il'. Did you mean 'ill'"),
        ({}, {"target": "site"}, "both the client and the target"),
        ({}, {"test_share": 1}, "test share"),
        ({}, {"task": "guess"}, "The task is 'guess'"),
        ({}, {"task": "regression"}, "'ill' has 'yes' in row 1, where a number"),
        ({"ill": np.arange(60) / 7}, {"task": "classification"}, "fractions"),
        ({"age": np.nan}, {}, "'age' has no value"),
        ({"age": [np.inf] + [1.0] * 59}, {}, "'age' has an infinite"),
        ({"age": pd.date_range("2020-01-01", periods=60)}, {}, "'age' holds dates"),
        ({"site": [None] + ["a"] * 59}, {}, "'site' has no value in row 1"),
        ({"ill": ["no", None] * 30}, {}, "'ill' has no value in row 2"),
    ],
)
def test_bad_tables(tmp_path, change, options, words):
    with pytest.raises(InputError, match=words):
        read(tmp_path, frame().assign(**change), **options)


def test_refused_columns(tmp_path):
    many = frame(900).assign(note=[f"n{i}" for i in range(900)])
    with pytest.raises(InputError, match=r"free text.*--id-column"):
        read(tmp_path, many)
    with pytest.raises(InputError, match="too many to be classes"):
        read(tmp_path, frame(3003).assign(ill=[f"n{i}" for i in range(3003)]))
    with pytest.raises(InputError, match="nothing to predict from"):
        read(tmp_path, frame()[["site", "ill"]])
    for values in (pd.date_range("2020-01-01", periods=60), pd.timedelta_range("1h", periods=60)):
        path = write(tmp_path / "t.parquet", frame().assign(age=values))
        with pytest.raises(InputError, match=r"holds (dates or times|durations)"):
            read_table(path, client="site", target="ill")
    path = write(tmp_path / "t.parquet", frame().assign(age=[[1, 2]] * 60))
    with pytest.raises(InputError, match="neither numbers nor words"):
        read_table(path, client="site", target="ill")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.xlsx", b"", "damaged"),
        ("t.xls", b"", "Save its sheet as CSV"),
        ("t.txt", b"", "ends in '.txt'"),
        ("t.csv", b"", "damaged"),
        ("t.csv", b"site,ill,age\n", "no rows"),
        ("t.csv", b"site,ill,age\na,b,c\na,b,c,d,e\n", "damaged"),
        ("t.csv", b"site,ill,age\n\xff\xfe\xff,1,2\n", "damaged"),
        ("t.parquet", b"PAR1 not really", "damaged"),
        ("none.csv", None, "There is no file"),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        read_table(tmp_path / name, client="site", target="ill")
    assert name in str(error.value)


def test_new_tables_that_do_not_fit(tmp_path):
    recipe = read(tmp_path, frame()).recipe
    with pytest.raises(InputError, match=r"no column 'age'\. Did you mean 'aged'"):
        features(frame().rename(columns={"age": "aged"}), recipe)
    with pytest.raises(InputError, match="'old' in row 1, where a number"):
        features(frame().assign(age="old"), recipe)
    with pytest.raises(InputError, match="'maybe' is no known value"):
        recipe.encode_target(pd.Series(["yes", "maybe"]))
    with pytest.raises(InputError, match="missing in row 2"):
        recipe.encode_target(pd.Series(["yes", None]))


def test_a_recipe_survives_json(tmp_path):
    recipe = read(tmp_path, frame()).recipe
    again = TableRecipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    np.testing.assert_array_equal(features(frame(), again), features(frame(), recipe))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"task": "guess"},
        {"columns": ["age"]},
        {"columns": "age"},
        {"numeric": []},
        {"numeric": {"age": {"median": "x", "mean": 0.0, "std": 1.0, "gaps": False}}},
        {"numeric": {"age": {"median": 0.0, "mean": 0.0, "std": 0.0, "gaps": False}}},
        {"numeric": {"age": {"median": 0.0, "mean": float("nan"), "std": 1.0, "gaps": False}}},
        {"numeric": {"age": {"median": 0.0}}},
        {"categories": {"sex": [1, 2]}},
        {"class_names": None},
        {"client": 3},
    ],
)
def test_foreign_recipes_are_refused(tmp_path, change):
    content = {**read(tmp_path, frame()).recipe.to_json(), **change}
    with pytest.raises(InputError, match="not the recipe"):
        TableRecipe.from_json(content)


@pytest.mark.parametrize("content", [None, [], {}, "text"])
def test_things_that_are_no_recipe(content):
    with pytest.raises(InputError, match="not the recipe"):
        TableRecipe.from_json(content)


def test_pandas_is_asked_for_politely(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install fedabml\[tables\]"):
        read_table(tmp_path / "t.csv", client="a", target="b")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda ages: ["unknown", *ages[1:]],
            r"Column 'age': \d+ of \d+ values are numbers, but 'unknown' in row 1 is none",
        ),
        (
            lambda ages: [str(a).replace(".", ",") for a in ages],
            r"comma, such as .20,5.\. Write them with a decimal point",
        ),
    ],
)
def test_a_stray_word_among_numbers_is_named(tmp_path, spoil, message):
    ages = [20.5 + i for i in range(60)]
    table = pd.DataFrame({"site": ["a", "b"] * 30, "age": spoil(ages), "y": ["no", "yes", "no"] * 20})
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match=message):
        read_table(tmp_path / "t.csv", client="site", target="y")


def test_a_spoiled_target_does_not_become_classes(tmp_path):
    days = [str(1.5 * i) for i in range(59)] + ["n/a?"]
    pd.DataFrame({"site": ["a", "b"] * 30, "x": range(60), "y": days}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match=r"Column 'y': 59 of 60 values are numbers, but 'n/a\?' in row 60"):
        read_table(tmp_path / "t.csv", client="site", target="y")


def test_a_target_of_one_value_teaches_nothing(tmp_path):
    pd.DataFrame({"site": ["a", "b"] * 5, "x": range(10), "y": ["no"] * 10}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match="nothing to learn"):
        read_table(tmp_path / "t.csv", client="site", target="y")


def test_blanks_around_a_clients_name_do_not_count(tmp_path):
    table = pd.DataFrame({"site": ["a", "b", "a ", " b"] * 5, "x": range(20), "y": ["no", "yes"] * 10})
    table.to_csv(tmp_path / "t.csv", index=False)
    fed = read_table(tmp_path / "t.csv", client="site", target="y")
    assert fed.names == ("a", "b")
    note = fed.manifest["notes"][0]
    assert "has the client 'a' and 1 more with and without blanks around the name, which count as one" in note
    assert note in inspect_table(tmp_path / "t.csv", client="site", target="y").warnings
    spaced = table.assign(site=[f" {name.strip()} " for name in table.site])
    other = read_table(spaced, client="site", target="y")
    assert other.names == ("a", "b") and "blanks" not in str(other.manifest["notes"])


def test_another_separator_is_recognised(tmp_path):
    (tmp_path / "t.csv").write_text("site;x;y\na;1;no\nb;2;yes\n")
    with pytest.raises(InputError, match="separated by ';'"):
        read_table(tmp_path / "t.csv", client="site", target="y")


@pytest.mark.parametrize("rows", ["a;1,5;no\nb;2,5;yes\n", "a;1;no\nb;2,5;yes\n", "a;1,5;no\nb;2,5,5;yes\n"])
def test_another_separator_is_recognised_beside_decimal_commas(tmp_path, rows):
    (tmp_path / "t.csv").write_text(f"site;x;y\n{rows}")
    with pytest.raises(InputError, match="separated by ';'"):
        read_table(tmp_path / "t.csv", client="site", target="y")


@pytest.mark.parametrize("rows", ["a,1,no,4\nb,2,yes,5\n", "a,1,no,\nb,2,yes,\n"])
def test_rows_with_more_values_than_names_are_refused(tmp_path, rows):
    (tmp_path / "t.csv").write_text(f"site,x,y\n{rows}")
    with pytest.raises(InputError, match="more values in its rows than names of columns"):
        read_table(tmp_path / "t.csv", client="x", target="y")


@pytest.mark.parametrize("rows", [6, 60])
@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["3,14", "2", "-0,5"], r"Column 'c' holds numbers with a comma, such as .*decimal=','"),
        (["1.234,5", "12,0", "7,25"], "numbers with a comma"),
        (["1,234.5", "12,000", "7,250"], "numbers with a comma"),
        (["24.12.2023", "1.1.2024", "31.10.2024"], r"Column 'c' holds dates, such as .*leave it out"),
        (["24/12/2023", "01/01/2024", "31/10/2024 12:30"], "holds dates"),
        (["24.12.23", "01.01.24", "31.10.24"], "holds dates"),
        (["2023-12-24", "2024-01-01T10:00", "2024-10-31"], "holds dates"),
    ],
)
def test_decimal_commas_and_dates_become_no_categories(rows, cells, message):
    table = pd.DataFrame(
        {"site": ["a", "b"] * (rows // 2), "c": cells * (rows // 3), "y": ["no", "yes", "no"] * (rows // 3)}
    )
    with pytest.raises(InputError, match=message):
        read_table(table, client="site", target="y")
    with pytest.raises(InputError, match=message):
        read_table(table, client="site", target="c", task="classification")


@pytest.mark.parametrize(
    "cells", [["1", "2", "1,2"], ["1.2.10", "1.2.9", "2.0.0"], ["a,b", "b", "a"], ["1-2", "3-4", "5-6"]]
)
def test_words_that_only_resemble_numbers_or_dates_stay_categories(cells):
    table = pd.DataFrame({"site": ["a", "b"] * 6, "c": cells * 4, "y": ["no", "yes", "no"] * 4})
    assert "c" in read_table(table, client="site", target="y").recipe.categories


def test_a_client_may_be_a_day():
    days = ["24.12.2023", "2024-01-01"]
    table = pd.DataFrame({"day": days * 6, "x": range(12), "y": ["no", "yes", "no"] * 4})
    assert read_table(table, client="day", target="y").names == tuple(sorted(days))


def test_a_frame_is_read_like_its_file(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["a", "b"] * 20, 0: rng.normal(size=40), "word": [*"uvwx"] * 10, "y": rng.random(40)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    before = frame.copy()
    named = frame.set_index(pd.Index([f"row {i}" for i in range(40)]))
    there, here = (read_table(each, client="site", target="y") for each in (tmp_path / "t.csv", named))
    assert here.hash == there.hash and here.recipe == there.recipe and (here.dataset, there.dataset) == ("table", "t")
    pd.testing.assert_frame_equal(frame, before)
    with pytest.raises(InputError, match=r"The table has no column 'sites'. Did you mean 'site'"):
        read_table(frame, client="sites", target="y")
    with pytest.raises(
        InputError, match=r"path of a .csv, .parquet or .xlsx file or a DataFrame of pandas; it is ndarray"
    ):
        read_table(frame.to_numpy(), client="site", target="y")


def test_a_value_of_fewer_than_five_rows_is_other_and_does_not_travel():
    """A recipe travels with the prior, so it holds no rare disease; recipes of earlier versions keep what they know."""
    words = np.array(["flu", "cold"] * 60, object)
    words[:3], words[3:8] = "disease X", "gout"
    table = pd.DataFrame({"site": ["a", "b"] * 60, "illness": words, "y": ["no", "yes", "yes", "no"] * 30})
    fed = read_table(table, client="site", target="y", test_share=0.0)
    assert fed.recipe.categories["illness"] == ("cold", "flu", "gout") and fed.x[:3].tolist() == [[0, 0, 0, 1]] * 3
    assert "disease X" not in json.dumps(fed.recipe.to_json())
    assert fed.manifest["notes"] == [
        "Column 'illness': 1 of its values have fewer than 5 rows, so they count as 'other'."
    ]
    content = fed.recipe.to_json()
    content["categories"]["illness"] = ["cold", "disease X", "flu", "gout"]
    assert TableRecipe.from_json(content).apply(table)[:3].tolist() == [[0, 1, 0, 0, 0]] * 3


def test_the_median_of_a_recipe_is_rounded():
    values = np.random.default_rng(0).normal(50, 10, 101)
    rule = Numeric.fit(np.r_[values, np.nan])
    assert rule.median == round(float(np.median(values)), 2) != np.median(values)
    ages = np.r_[np.arange(101.0), np.nan]
    assert Numeric.fit(ages).median == 50
    assert Numeric.fit(np.full(3, 1.23456)).median == 1.23456


def test_the_surplus_of_a_wide_table_takes_one_pass(monkeypatch):
    """The columns in use are gathered once, not for every column of the table."""
    recipe = TableRecipe(("age",), {"age": Numeric(0.0, 0.0, 1.0, False)}, {}, "site", "ill", "classification", id="id")
    gathered, columns = [], TableRecipe.table_columns.fget
    monkeypatch.setattr(TableRecipe, "table_columns", property(lambda self: gathered.append(self) or columns(self)))
    extra = [f"extra {i}" for i in range(50)]
    assert recipe.surplus(["age", "site", *extra, "ill", "id"]) == extra
    assert len(gathered) == 1


def test_a_target_that_float32_would_merge_is_refused():
    noise = np.random.default_rng(0).normal(size=60)
    assert read_table(frame().assign(ill=1e4 + noise), client="site", target="ill").task == "regression"
    with pytest.raises(InputError, match=r"column 'ill': float32.*rounds target 0.*Subtract an offset"):
        read_table(frame().assign(ill=1e9 + noise), client="site", target="ill")
