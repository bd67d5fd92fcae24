"""Pooled sums: the moments are those of the pooled data, and no site's sums are believed unchecked."""

import copy
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from fedabml.data.dates import clock, parse_dates
from fedabml.data.images import site_files
from fedabml.federation.pooled import check_sums, pooled_schema, site_sums
from fedabml.federation.schema import draft
from fedabml.federation.site_data import divide, read
from tests.federation.start import TABLE, arrays, frame, make_sites


def sums_of(sites, schema):
    facts = [site_sums(schema, read(site.settings, schema), site.settings, 0) for site in sites.values()]
    assert [check_sums(schema, each, 1000) for each in facts] == [""] * len(facts)
    return json.loads(json.dumps(facts))


def test_moments_of_a_table_are_those_of_the_pooled_training_rows(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    pooled = pooled_schema(schema, sums_of(sites, schema))
    parts = []
    for site in sites.values():
        table = read(site.settings, schema)
        parts.append(table.iloc[divide(site.settings, "ill", True, table, 0)[0].index])
    together = pd.concat(parts)
    together["admitted"] = clock(parse_dates(together["admitted"], "admitted"))["year"]
    for name in ("age", "dose", "admitted"):
        values, column = together[name].dropna().to_numpy(float), pooled.columns[name]
        assert abs(column.shift / values.mean() - 1) < 1e-12
        assert abs(column.scale / values.std() - 1) < 1e-12
        assert column.fill == column.shift  # no site allows medians
    assert pooled.columns["ward"] == schema.columns["ward"]


def test_moments_of_arrays_and_regression_targets(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    pooled = pooled_schema(schema, sums_of(sites, schema))
    x = np.concatenate([arrays(number)["x_train"] for number in range(3)]).astype(np.float64)
    assert np.abs(np.array(pooled.shift) / x.mean(0) - 1).max() < 1e-12
    assert np.abs(np.array(pooled.scale) / x.std(0) - 1).max() < 1e-12


def test_moments_of_images_are_exact(tmp_path):
    sites, schema = make_sites(tmp_path, "images")
    pooled = pooled_schema(schema, sums_of(sites, schema))
    recipe = schema.image_recipe()
    folders = [site.settings.data for site in sites.values()]
    x = np.concatenate([recipe.read([each.file for each in site_files(type(tmp_path)(f))]) for f in folders])
    assert pooled.shift == (pytest.approx(x.mean(dtype=np.float64), rel=1e-14),)
    assert pooled.scale == (pytest.approx(x.astype(np.float64).std(), rel=1e-14),)


def test_regression_target_is_pooled(tmp_path):
    sites, _ = make_sites(tmp_path, "table")
    schema = draft(tmp_path / "a.csv", **TABLE | {"target_column": "dose", "drop_columns": ["note", "ill"]})
    pooled = pooled_schema(schema, sums_of(sites, schema))
    parts = [frame(n)["dose"].to_numpy() for n in range(3)]
    rows = [divide(site.settings, "dose", False, frame(n), 0)[0].index for n, site in enumerate(sites.values())]
    values = np.concatenate([part[index] for part, index in zip(parts, rows, strict=True)])
    assert pooled.target_shift[0] == pytest.approx(values.mean(), rel=1e-12)
    assert pooled.target_scale[0] == pytest.approx(values.std(), rel=1e-12)


def test_large_mean_costs_no_digits(tmp_path):
    """Years and 10⁶ + noise: sums about the schema's shift keep what plain squares would lose."""
    sites, schema = make_sites(tmp_path, "table")
    for number, site in enumerate(sites.values()):
        table = frame(number)
        table["dose"] = 1e6 + np.random.default_rng(number).normal(0, 1e-2, len(table))
        table.to_csv(site.settings.data, index=False)
    schema = draft(tmp_path / "a.csv", **TABLE)
    schema_dose = pooled_schema(schema, sums_of(sites, schema)).columns["dose"]
    rows = [read(site.settings, schema) for site in sites.values()]
    values = np.concatenate(
        [t["dose"].to_numpy()[divide(s.settings, "ill", True, t, 0)[0].index]
         for t, s in zip(rows, sites.values(), strict=True)]
    )  # fmt: skip
    exact = np.array(values, np.longdouble)
    assert abs(schema_dose.scale / float(exact.std()) - 1) < 1e-7


def test_constant_column_is_left_unscaled(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    for number, site in enumerate(sites.values()):
        frame(number).assign(dose=0.1).to_csv(site.settings.data, index=False)
    dose = pooled_schema(schema, sums_of(sites, schema)).columns["dose"]
    assert dose.shift == pytest.approx(0.1, rel=1e-12) and dose.scale == 1.0


def test_columns_with_few_values_are_left_out(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    table = frame(1)
    table.loc[4:, "dose"] = np.nan
    table.to_csv(sites["b"].settings.data, index=False)
    facts = sums_of(sites, schema)
    assert facts[1]["columns"]["dose"] == [0, 0.0, 0.0]
    assert facts[0]["columns"]["dose"][0] == 32


def test_medians_and_words_only_where_allowed_and_rare_words_never(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_medians=True, allow_words=True, test_share=0.0)
    table = frame(1)
    table["ward"] = ["east"] * 5 + ["rare"] * 4 + ["north"] * 31
    table.to_csv(sites["b"].settings.data, index=False)
    facts = sums_of(sites, schema)
    assert [each["words"]["ward"] for each in facts] == [[], ["east"], []]
    assert all(abs(each["medians"]["age"] - frame(n)["age"].median()) < 1 for n, each in enumerate(facts))
    pooled = pooled_schema(schema, facts)
    assert pooled.columns["ward"].words == ("north", "south", "east")
    assert pooled.columns["age"].fill == facts[1]["medians"]["age"]  # the median of three
    (tmp_path / "closed").mkdir()
    closed, _ = make_sites(tmp_path / "closed", "table")
    assert all(each["medians"] == {} == each["words"] for each in sums_of(closed, schema))


def test_a_median_is_rounded_whatever_scale_the_server_names(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_medians=True, test_share=0.0)
    tiny = dataclasses.replace(schema.columns["age"], scale=1e-9)
    facts = sums_of(sites, dataclasses.replace(schema, columns={**schema.columns, "age": tiny}))
    for number, each in enumerate(facts):
        ages = frame(number)["age"]
        steps = each["medians"]["age"] / (ages.std(ddof=0) / 20)
        assert steps == pytest.approx(round(steps), abs=1e-3)
        assert abs(each["medians"]["age"] - ages.median()) > 1e-3


HOSTILE = [
    lambda f: f["columns"].pop("age"),
    lambda f: f["columns"].update(more=[5, 0.0, 1.0]),
    lambda f: f["columns"].update(age=[5, 0.0]),
    lambda f: f["columns"].update(age=[5.5, 0.0, 1.0]),
    lambda f: f["columns"].update(age=[-5, 0.0, 1.0]),
    lambda f: f["columns"].update(age=[10**9, 0.0, 1.0]),
    lambda f: f["columns"].update(age=[5, float("nan"), 1.0]),
    lambda f: f["columns"].update(age=[5, 1e40, 1e90]),
    lambda f: f["columns"].update(age=[5, 0.0, -1.0]),
    lambda f: f["columns"].update(age=[5, 100.0, 1.0]),  # S² > n Q
    lambda f: f["columns"].update(age="5"),
    lambda f: f.update(more=1),
    lambda f: f.pop("medians"),
    lambda f: f["medians"].update(age=float("inf")),
    lambda f: f["medians"].update(ward=1.0),
    lambda f: f["words"].update(age=["a"]),
    lambda f: f["words"].update(ward=["a\n[31m"]),
    lambda f: f["words"].update(ward=["x" * 10_000]),
    lambda f: f["words"].update(ward=[f"{i}" for i in range(1000)]),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_sums_are_refused(tmp_path, number):
    sites, schema = make_sites(tmp_path, "table")
    facts = copy.deepcopy(sums_of(sites, schema)[0])
    HOSTILE[number](facts)
    assert check_sums(schema, facts, 1000)
    assert check_sums(schema, None, 1000) and check_sums(schema, [], 1000)


def test_hostile_histograms_are_refused(tmp_path):
    _, schema = make_sites(tmp_path, "images")
    good = [0] * 256
    spoiled = [[[value, *good[1:]]] for value in (-1, 0.5, 10**15, "1", None)]
    for wrong in ([good, good], [good[:-1]], *spoiled, good, None):
        assert check_sums(schema, {"bytes": wrong}, 1000)
    assert check_sums(schema, {"bytes": [good]}, 1000) == ""
