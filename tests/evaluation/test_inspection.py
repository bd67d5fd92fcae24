"""Warnings about a table, each planted by hand, and tables about which there is nothing to warn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedabml
from fedabml.errors import InputError
from fedabml.evaluation.decisions import auroc
from fedabml.evaluation.inspection import _auroc_of_column, _ranks

pd = pytest.importorskip("pandas")
N = 300


def frame(seed=0, **columns):
    rng = np.random.default_rng(seed)
    base = {
        "site": [f"s{i % 3}" for i in range(N)],
        "case": [f"p{i}" for i in range(N)],
        "age": rng.normal(50, 10, N).round(1),
        "dose": np.where(rng.random(N) < 0.2, np.nan, rng.normal(3, 1, N)),
        "sex": rng.choice(["f", "m"], N),
        "ill": np.where(rng.random(N) < 0.4, "yes", "no"),
    }
    return pd.DataFrame({**base, **columns})


def warnings(table, **options):
    return fedabml.inspect_table(table, **{"client": "site", "target": "ill", "id": "case", **options}).warnings


ILL = (frame().ill == "yes").to_numpy()


def test_a_usual_table_has_no_warning():
    assert warnings(frame()) == ()
    assert warnings(frame(ill=np.random.default_rng(3).normal(size=N))) == ()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.where(ILL, "yes", "no"), "'x' equals the target 'ill' in every row. Leave it out (--drop-columns x)"),
        (np.where(ILL, 7, 3), "'x' determines one-to-one the target 'ill'"),
        (np.where(ILL, "a", np.where(np.arange(N) % 2, "b", "c")), "'x' determines the target 'ill'"),
        (ILL + np.random.default_rng(1).normal(0, 0.2, N), "'x' alone nearly predicts 'ill' (AUROC"),
        (~ILL + np.random.default_rng(1).normal(0, 0.2, N), "'x' alone nearly predicts 'ill' (AUROC"),
        (np.where(ILL, np.nan, np.random.default_rng(1).normal(0, 1, N)), "Whether 'x' has a value nearly predicts"),
    ],
)
def test_a_column_that_tells_the_target_is_named(column, words):
    found = warnings(frame(x=column))
    assert len(found) == 1 and words in found[0] and "--drop-columns x" in found[0]
    assert warnings(frame(x=column), drop=["x"]) == ()


@pytest.mark.parametrize(("scale", "words"), [(1.0, "equals the target"), (2.5, "rank correlation 1.000")])
def test_a_column_that_tells_a_measurement_is_named(scale, words):
    amount = np.random.default_rng(2).normal(size=N)
    found = warnings(frame(ill=amount, x=amount * scale))
    assert len(found) == 1 and words in found[0]


def test_a_column_of_many_words_does_not_know_its_own_rows():
    words = [f"w{i % 150}" for i in range(N)]  # two rows each: in sample they would predict well
    assert warnings(frame(x=words)) == ()


def test_three_classes():
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, N)
    table = frame(ill=np.array([*"abc"])[kind], x=np.array([1.0, 0.0, 2.0])[kind] + rng.normal(0, 0.05, N))
    assert ["'x' alone nearly predicts 'ill'" in text for text in warnings(table)] == [True]


def test_the_areas_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, N)
    score = (y + rng.normal(0, 1, N)).round(1)
    assert auroc(score, y == 1) == pytest.approx(roc_auc_score(y, score))
    assert _auroc_of_column(np.zeros(N, int), score, y, 2) >= roc_auc_score(y, score) - 1e-12
    assert _auroc_of_column(rng.integers(0, 5, N), None, y, 2) < 0.65
    from scipy.stats import rankdata

    np.testing.assert_allclose(_ranks(score), rankdata(score))


def test_clients_that_share_rows_and_ids():
    table = frame()
    copies = table[table.site == "s0"].head(15).assign(site="s1")
    found = warnings(pd.concat([table, copies], ignore_index=True))
    assert len(found) == 2
    assert "Clients share identical rows: 's0' and 's1' (17)" in found[0]  # two agree by chance
    assert "15 values of the ID column 'case' occur at more than one client" in found[1]
    assert "p0" not in found[1]
    renamed = copies.assign(case=[f"q{i}" for i in range(15)])  # the same rows under other identifiers
    assert len(warnings(pd.concat([table, renamed], ignore_index=True))) == 1


def test_rows_that_agree_by_chance_are_no_warning():
    rng = np.random.default_rng(0)
    few = pd.DataFrame({c: rng.integers(0, 3, N) for c in "abc"} | {"site": frame().site, "ill": frame().ill})
    assert warnings(few, id=None) == ()


def test_several_rows_of_one_person():
    found = warnings(frame(case=[f"p{i // 6 * 3 + i % 3}" for i in range(N)]))
    assert len(found) == 1 and "150 values of the ID column 'case' occur in several rows of one client" in found[0]


def test_another_unit_at_one_client():
    rng = np.random.default_rng(0)
    value = rng.normal(80, 10, N)
    found = warnings(frame(creatinine=np.where(frame().site == "s1", value / 88.4, value)))
    assert len(found) == 1 and "At 's1' the median of 'creatinine' is 0.8946, elsewhere about 78.07" in found[0]
    assert warnings(frame(creatinine=np.where(frame().site == "s1", value * 1.5, value))) == ()


def test_what_training_would_refuse_is_a_warning(tmp_path):
    days = pd.date_range("2023-01-01", periods=N).strftime("%Y-%m-%d")
    table = frame(admitted=days, number=np.arange(N), note=[f"n{i}" for i in range(N)])
    table.to_csv(tmp_path / "study.csv", index=False)
    found = fedabml.inspect_table(tmp_path / "study.csv", client="site", target="ill", id="case")
    assert ["'admitted' holds dates" in found.warnings[0], "300 different words" in found.warnings[1]] == [True, True]
    assert "'number' looks like an identifier" in found.warnings[2] and len(found.warnings) == 3
    assert repr(found) == "Inspection(study: 300 rows, 3 clients, 9 columns, 3 warnings)"
    content = json.loads(json.dumps(found.to_json()))
    assert content["rows"] == [100, 100, 100] and content["columns"][1]["use"] == "ID"
    assert "p17" not in json.dumps(content) and "n17" not in json.dumps(content)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"no column 'sit'\. Did you mean 'site'"):
        fedabml.inspect_table(frame(), client="sit", target="ill")
    with pytest.raises(InputError, match="'ill' has no value in row 1"):
        fedabml.inspect_table(frame(ill=[None] + ["a"] * (N - 1)), client="site", target="ill")


def test_dates_that_only_some_classes_have_are_a_leak():
    """Only survivors have a date of discharge: no value of it is known before the target."""
    days = pd.Series(pd.Timestamp("2024-01-01") + pd.to_timedelta(np.random.default_rng(1).integers(0, 6e7, N), "s"))
    found = warnings(frame(x=days.where(~ILL).dt.strftime("%Y-%m-%dT%H:%M:%S")), dates="x")
    assert len(found) == 1 and "Whether 'x' has a value nearly predicts 'ill'" in found[0]
    late = days + pd.to_timedelta(np.where(ILL, 4000, 0), "D")
    found = warnings(frame(x=late), dates="x")
    assert len(found) == 1 and "Column 'x' alone nearly predicts 'ill' (AUROC" in found[0]
    assert warnings(frame(x=days), dates="x") == ()


def test_what_training_would_refuse_of_the_target_is_a_warning():
    (found,) = warnings(frame(ill=ILL.astype(float)))
    assert "are they classes or measurements?" in found
    assert warnings(frame(ill=ILL.astype(float)), task="classification") == ()
    assert any("nothing to learn" in text for text in warnings(frame(ill=np.full(N, "no"))))


def test_classes_that_differ_by_blanks_or_capitals_are_named():
    words = np.where(ILL, np.where(np.arange(N) % 5, "yes", "Yes "), "no")
    (found,) = warnings(frame(ill=words))
    assert "has the values 'Yes ' and 'yes', which differ only by blanks or capitals" in found
    fed = fedabml.Federation.from_frame(frame(ill=words), client="site", target="ill", id="case")
    assert found in fed.manifest["notes"]


def test_rows_that_one_client_has_twice_are_named():
    table = frame()
    again = table[table.site == "s1"][:30].assign(case=[f"q{i}" for i in range(30)])
    (found,) = warnings(pd.concat([table, again]))
    assert "60 rows are identical to another one of the same client: 's1' (60). One may train and the other" in found
    few = pd.DataFrame({"site": table.site, "case": table.case, "sex": table.sex, "ill": table.ill})
    assert warnings(few) == ()  # four different rows: chance explains them


def test_numbers_that_look_like_dates_are_named():
    days = pd.Series(pd.date_range("2015-01-01", periods=N)).dt.strftime("%Y%m%d").astype(int)
    (found,) = warnings(frame(day=days))
    assert "'day' looks like dates (YYYYMMDD), but" in found and "2015" not in found and "--date-columns day" in found
    assert warnings(frame(day=days), dates="day") == ()


def test_a_column_whose_name_a_shell_or_a_list_would_split_is_quoted():
    from fedabml.arguments import split_words

    (found,) = warnings(frame(**{"a, b": np.where(ILL, "y", "n")}))
    assert """--drop-columns '"a, b"')""" in found and split_words('"a, b",c') == ["a, b", "c"]


def test_a_class_of_few_rows_is_named_and_one_of_five_is_not():
    words = np.where(ILL, "yes", "no").astype(object)
    words[0], five = "maybe", words.copy()
    five[:5] = "maybe"
    assert "class 'maybe' has 1 row; is it a typing error?" in " ".join(warnings(frame(ill=words)))
    assert warnings(frame(ill=five)) == ()
    numbers = ILL.astype(int)
    numbers[:2] = 9
    assert "class '9' has 2 rows; is it" in " ".join(warnings(frame(ill=numbers)))
    assert "is it a typing error" not in " ".join(warnings(frame(ill=numbers), task="regression"))


def test_words_of_a_feature_that_differ_by_blanks_or_capitals_are_named():
    sex = np.random.default_rng(0).choice(["Female", "female", "male", "MALE "], N)
    (found,) = warnings(frame(sex=sex))
    assert "'sex' has the values 'Female' and 'female', which differ only by blanks or capitals. They count as" in found
    assert found.endswith("Write them alike. So do 1 more of its words.")


@pytest.mark.parametrize(("marks", "named"), [([-999], 1), ([9999], 1), ([-999, 9999], 2)])
def test_a_repeated_value_far_outside_of_all_others_is_named(marks, named):
    age = frame().age.to_numpy(copy=True)
    for i, mark in enumerate(marks):
        age[i::10] = mark
    found = warnings(frame(age=age))
    assert len(found) == named
    for mark, text in zip(marks, found, strict=True):
        assert f"'age' has the value {mark} in 30 rows, far outside of all others (" in text
        assert "does it mark a missing value?" in text


def test_values_that_are_not_repeated_or_not_far_outside_are_usual():
    age = frame().age.to_numpy(copy=True)
    age[:2] = 9999
    assert warnings(frame(age=age)) == ()
    assert warnings(frame(age=np.where(age > 60, 90, age))) == ()
