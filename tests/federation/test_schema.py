"""The schema: drafted from one site without rare words, written and read unchanged, and hostile ones refused."""

import copy

import numpy as np
import pytest

from fedabml import InputError
from fedabml.federation.schema import Schema, check, draft
from tests.federation.start import SECRET, SECRET_NUMBER, TABLE, arrays, frame, make_sites, write_images


@pytest.mark.parametrize("kind", ["table", "arrays", "images"])
def test_draft_is_written_and_read_unchanged_and_fits_its_site(tmp_path, kind):
    from fedabml.federation.site_data import mismatches

    sites, schema = make_sites(tmp_path, kind)
    assert Schema.load(schema.save(tmp_path / "schema.toml", ["A note."])) == schema
    assert Schema.of(schema.to_json()) == schema
    assert [mismatches(site, schema) for site in sites.values()] == [[], [], []]


def test_draft_of_a_table_has_kinds_words_and_round_numbers(tmp_path):
    _, schema = make_sites(tmp_path, "table")
    assert {name: column.kind for name, column in schema.columns.items()} == {
        "age": "number", "dose": "number", "ward": "words", "admitted": "date",
    }  # fmt: skip
    assert schema.classes == ("no", "yes")
    assert schema.columns["ward"].words == ("north", "south")
    age, values = schema.columns["age"], frame(0)["age"]
    assert age.gaps and not schema.columns["dose"].gaps
    assert abs(age.shift - values.mean()) < 0.25 * values.std() and abs(age.scale / values.std() - 1) < 0.05
    assert age.shift == round(age.shift) and len(f"{age.scale:g}") <= 3


def test_rare_words_and_single_numbers_never_enter_a_draft(tmp_path):
    table = frame(0)
    table.loc[:3, "ward"] = SECRET  # four rows: one too few
    table.loc[5, "dose"] = SECRET_NUMBER
    table.loc[:3, "ill"] = f"{SECRET}-2"
    table.to_csv(tmp_path / "a.csv", index=False)
    text = draft(tmp_path / "a.csv", **TABLE).to_toml()
    assert SECRET not in text
    assert f"{SECRET_NUMBER:g}" not in text and str(int(SECRET_NUMBER)) not in text
    table.loc[:4, "ward"] = SECRET
    table.to_csv(tmp_path / "a.csv", index=False)
    assert SECRET in draft(tmp_path / "a.csv", **TABLE).to_toml()


def test_identifiers_and_columns_with_few_values_are_refused_with_the_way_out(tmp_path):
    table = frame(0)
    table.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match="--drop-columns patient"):
        draft(tmp_path / "a.csv", target_column="ill", date_columns="admitted")
    table.loc[4:, "dose"] = np.nan
    table.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match="--drop-columns dose"):
        draft(tmp_path / "a.csv", **TABLE)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "--target-column"),
        ({"target_column": "il"}, "Did you mean 'ill'"),
        (TABLE | {"drop_columns": "ill"}, "two uses"),
        (TABLE | {"image_size": 8}, "image_size"),
        (TABLE | {"task": "multilabel"}, "several targets"),
    ],
)
def test_draft_refuses_options_that_do_not_fit(tmp_path, options, reason):
    frame(0).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match=reason):
        draft(tmp_path / "a.csv", **options)


def test_draft_of_a_regression_and_of_images(tmp_path):
    frame(0).drop(columns="ill").to_csv(tmp_path / "a.csv", index=False)
    schema = draft(tmp_path / "a.csv", **TABLE | {"target_column": "dose"})
    assert (schema.task, schema.classes, len(schema.target_shift)) == ("regression", (), 1)
    write_images(tmp_path / "images", 0)
    schema = draft(tmp_path / "images", image_size=4)
    assert (schema.shape, schema.classes, schema.resized) == ((1, 4, 4), ("cat", "dog"), True)
    assert (schema.shift, schema.scale) == ((127.5,), (127.5,))


def test_recipe_of_the_schema_encodes_by_its_numbers(tmp_path):
    _, schema = make_sites(tmp_path, "table")
    table, recipe = frame(1), schema.recipe()
    x = recipe.apply(table)
    age, names = schema.columns["age"], recipe.feature_names
    values = table["age"].fillna(age.fill).to_numpy()
    assert np.array_equal(x[:, names.index("age")], ((values - age.shift) / age.scale).astype(np.float32))
    assert np.array_equal(x[:, names.index("age missing")], table["age"].isna().to_numpy(np.float32))
    table["ward"] = "never seen"
    assert recipe.apply(table)[:, names.index("ward=other")].all()


# -- what does not fit ------------------------------------------------------------------------------------------------
def check_table(tmp_path, change):
    _, schema = make_sites(tmp_path, "table")
    table = frame(1)
    return check(schema, change(table))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.drop(columns="age"), "The column 'age' is missing."),
        (lambda t: t.drop(columns="ill"), "The column 'ill' (the target) is missing."),
        (lambda t: t.assign(age=SECRET), "The column 'age' should hold numbers, and does not."),
        (lambda t: t.assign(dose=np.inf), "The column 'dose' should hold numbers, and does not."),
        (lambda t: t.assign(admitted="31.1.2024"), "The column 'admitted' should hold ISO dates, and does not."),
        (lambda t: t.assign(ward=0.5), "The column 'ward' should hold words, and does not."),
        (lambda t: t.assign(ward=SECRET), "The column 'ward' has none of the words that the schema lists."),
        (lambda t: t.assign(ill=SECRET), "The target 'ill' has values that are not among the schema's classes."),
        (lambda t: t.assign(ill=None), "The target 'ill' has rows without a value."),
        (lambda t: t.iloc[:1], "There are fewer than two rows."),
    ],
)
def test_table_that_does_not_fit_is_named_by_its_columns(tmp_path, change, reason):
    assert check_table(tmp_path, change) == [reason]


def test_more_columns_and_unknown_words_fit(tmp_path):
    assert check_table(tmp_path, lambda t: t.assign(more=SECRET, ward=["north"] * 20 + [SECRET] * 20)) == []


def test_rare_word_is_not_confirmed_by_a_schema_that_guesses_it(tmp_path):
    """A server that asks for one word learns the same whether one row has it or none."""
    _, schema = make_sites(tmp_path, "table")
    data = schema.to_json()
    data["columns"]["ward"]["words"] = [SECRET]
    guess, without, one = Schema.of(data), frame(1), frame(1)
    one.loc[0, "ward"] = SECRET
    assert check(guess, without) == check(guess, one) != []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x_train": np.zeros((24, 4))}, "shape (4,)"),
        ({"x_train": np.zeros((24, 5), np.uint8)}, "float32"),
        ({"x_train": np.full((24, 5), np.nan)}, "not finite"),
        ({"y_train": np.full(24, 3)}, "not among the schema's classes"),
        ({"y_train": np.full(24, 0.5)}, "not among the schema's classes"),
        ({"y_train": np.zeros(23)}, "different numbers"),
        ({"y_train": np.zeros((24, 2))}, "1 for each sample"),
        ({"y_test": np.full(6, -1)}, "y_test has labels"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, change, reason):
    _, schema = make_sites(tmp_path, "arrays")
    data = arrays(1)
    change = {k: v.astype(np.uint8) if reason == "float32" else v for k, v in change.items()}
    if reason == "float32":
        change["x_train"] = np.zeros((24, 1, 5), np.uint8)
    [found] = check(schema, data | change)
    assert reason in found


def test_images_that_do_not_fit(tmp_path):
    from PIL import Image

    from fedabml.data.images import site_files

    _, schema = make_sites(tmp_path, "images")
    folder = tmp_path / "images" / "b"
    Image.new("RGB", (8, 8)).save(folder / "cat" / f"{SECRET}.png")
    (folder / SECRET).mkdir()
    Image.new("L", (8, 8)).save(folder / SECRET / "0.png")
    found = check(schema, site_files(folder))
    assert len(found) == 2 and SECRET not in " ".join(found)
    assert check(schema, arrays(0)) == ["The data are of the kind arrays, but the schema is for images."]


# -- hostile schemas --------------------------------------------------------------------------------------------------
def changed(data, path, value):
    *keys, last = path
    for key in keys:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["kind"], "pickle"),
        (["task"], "sequence"),
        (["task"], 3),
        (["more"], 1),
        (["classes"], []),
        (["classes"], ["yes"]),
        (["classes"], ["yes", "yes"]),
        (["classes"], "yes"),
        (["classes"], [str(i) for i in range(2000)]),
        (["target"], ""),
        (["target"], "age"),
        (["id"], "age"),
        (["id"], 3),
        (["columns"], {}),
        (["columns"], []),
        (["columns", "age"], {"kind": "number"}),
        (["columns", "age", "kind"], "text"),
        (["columns", "age", "scale"], 0),
        (["columns", "age", "scale"], float("nan")),
        (["columns", "age", "shift"], 1e300),
        (["columns", "age", "shift"], "3"),
        (["columns", "age", "gaps"], 1),
        (["columns", "age", "words"], ["a"]),
        (["columns", "ward", "words"], []),
        (["columns", "ward", "words"], [f"{i}" for i in range(300)]),
        (["columns", "ward", "words"], ["x" * 10_000]),
        (["target_shift"], [0.0]),
        (["class_weights"], [1.0]),
        (["class_weights"], [1.0, -1.0]),
    ],
)
def test_hostile_schema_of_a_table_is_refused(tmp_path, path, value):
    _, schema = make_sites(tmp_path, "table")
    data = copy.deepcopy(schema.to_json())
    changed(data, path, value)
    with pytest.raises(InputError, match="schema"):
        Schema.of(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["shape"], [10**9]),
        (["shape"], []),
        (["shape"], [0]),
        (["type"], "float64"),
        (["type"], "uint8"),
        (["shift"], [0.0, 1.0]),
        (["scale"], [-1.0] * 5),
        (["targets"], 0),
        (["columns"], {}),
    ],
)
def test_hostile_schema_of_arrays_is_refused(tmp_path, path, value):
    _, schema = make_sites(tmp_path, "arrays")
    data = schema.to_json()
    changed(data, path, value)
    with pytest.raises(InputError, match="schema"):
        Schema.of(data)


@pytest.mark.parametrize("path", ["mode", "height", "resized", "classes"])
def test_hostile_schema_of_images_is_refused(tmp_path, path):
    _, schema = make_sites(tmp_path, "images")
    for value in (None, -1, 10**12, "Z", []):
        with pytest.raises(InputError, match="schema"):
            Schema.of(schema.to_json() | {path: value})


def test_damaged_file_is_refused(tmp_path):
    (tmp_path / "schema.toml").write_text("kind = [")
    with pytest.raises(InputError, match="not valid TOML"):
        Schema.load(tmp_path / "schema.toml")
