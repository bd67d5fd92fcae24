"""Identifiers, roles of columns, and the federation of a frame."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fedabml
from fedabml.data import read_table
from fedabml.data.encode import features
from fedabml.errors import InputError
from fedabml.serve.bodies import parse_csv_body

pd = pytest.importorskip("pandas")


def frame(n=120, seed=0, **columns):
    rng = np.random.default_rng(seed)
    base = {"site": [f"s{i % 3}" for i in range(n)], "age": rng.integers(20, 90, n), "dose": rng.normal(3, 1, n)}
    return pd.DataFrame({**base, "ill": np.where(rng.random(n) < 0.4, "yes", "no"), **columns})


def read(table, **options):
    return read_table(table, **{"client": "site", "target": "ill", **options})


def test_a_frame_gives_what_its_table_gives():
    options = {"client": "site", "target": "ill", "test_share": 0.3, "seed": 4, "drop": ["dose"]}
    here = fedabml.Federation.from_frame(frame(), **options, dataset="study")
    there = read_table(frame(), **options)
    assert here.hash == there.hash and here.recipe == there.recipe and here.dataset == "study"
    with pytest.raises(InputError, match="DataFrame of pandas; it is"):
        fedabml.Federation.from_frame([[1, 2]], client="a", target="b")


def test_an_id_is_no_feature_but_part_of_the_recipe():
    plain, named = read(frame()), read(frame(patient=[f"p{i}" for i in range(120)]), id="patient")
    np.testing.assert_array_equal(plain.x, named.x)
    assert named.recipe.id == "patient" and "patient" not in named.recipe.feature_names
    assert plain.rows_hash == named.rows_hash and "id" not in plain.recipe.to_json()


@pytest.mark.parametrize("role", ["client", "target", "drop", "dates"])
def test_an_id_has_no_second_role(role):
    options = {"id": "site", "client": "age"} | {role: ["site"] if role in ("drop", "dates") else "site"}
    with pytest.raises(InputError, match="'site' cannot be both"):
        read(frame(), **options)


rng = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.arange(120), True),
        (rng.permutation(120) + 1000, True),
        (np.arange(120) // 3, True),  # numbered within each client
        (np.cumsum(rng.integers(1, 9, 120)), True),  # rising, with holes
        (rng.choice(np.arange(10_000_000, 99_999_999), 120, replace=False), True),
        (np.append(rng.choice(np.arange(100_000, 99_999_999), 119, replace=False), 12_345), True),  # 5 to 8 digits
        ([f"p{i}" for i in range(120)], True),
        ([f"p{i // 2}" for i in range(120)], False),
        (rng.integers(20, 90, 120), False),
        (rng.integers(100, 99_999, 120), False),  # an income
        (np.arange(120) + 0.5, False),
        (np.arange(120) % 2, False),
        (2020 + np.arange(120) % 5, False),
        (np.full(120, 7), False),
    ],
)
def test_columns_that_look_like_identifiers_are_named(values, found):
    notes = read(frame(number=values)).manifest.get("notes", [])
    assert sum("'number' looks like an identifier" in note for note in notes) == found
    if found:
        assert "--id-column number" in notes[0] and "--drop-columns number" in notes[0]
        assert "notes" not in read(frame(number=values), id="number").manifest


def test_the_note_is_one_of_the_run():
    fed = read(frame(number=np.arange(120)))
    setup = fedabml.prepare(fed, "mlr", rounds=1, participation=1.0, device="cpu")
    assert any("'number' looks like an identifier" in note for note in setup.notes)


@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0, 2.0, 3.0]])
def test_whole_numbers_of_a_float_type_are_asked_about_in_tables_folders_and_arrays(tmp_path, values):
    y = np.array(values * 20)
    x = rng.normal(size=(len(y), 2))
    frame = pd.DataFrame({"site": ["a", "b"] * (len(y) // 2), "x": x[:, 0], "y": y})
    np.savez(tmp_path / "a.npz", x=x, y=y)
    ways = {
        "table": lambda **task: read_table(frame, client="site", target="y", **task),
        "folder": lambda **task: fedabml.Federation.from_folder(tmp_path, **task),
        "arrays": lambda **task: fedabml.Federation.from_arrays([(x, y)], **task),
        "owners": lambda **task: fedabml.Federation.from_owners(x.astype("f4"), y, np.zeros(len(y)), **task),
    }
    for name, way in ways.items():
        with pytest.raises(InputError, match=r"float type.*classes or measurements\?.*--task classification") as error:
            way()
        assert ("'y'" in str(error.value)) == (name == "table")
        assert way(task="regression").classes == 0
        assert way(task="classification").task == "classification"


def test_leading_zeros_of_an_id_are_kept(tmp_path):
    table = frame(patient=[f"{i:05d}" for i in range(120)])
    table.to_csv(tmp_path / "t.csv", index=False)
    fed = read_table(tmp_path / "t.csv", client="site", target="ill", id="patient")
    run = fedabml.train(
        fed, "mlr", fedabml.FedAvg(), rounds=1, participation=1.0, epochs=1, device="cpu", evaluate=False
    )
    mine = table[table.site == "s1"]
    posterior = run.prior.personalize(mine.drop(columns="patient"))
    assert posterior.predict(mine.drop(columns="patient")).ids is None
    mine.to_csv(tmp_path / "mine.csv", index=False)
    assert posterior.predict(tmp_path / "mine.csv").ids == mine.patient.tolist()
    renamed = mine.rename(columns={"patient": "case"})
    assert posterior.predict(renamed, id="case").ids == mine.patient.tolist()
    other = run.prior.personalize(renamed, id="case")
    other.save(tmp_path / "posterior.safetensors")
    assert fedabml.load_posterior(tmp_path / "posterior.safetensors").predict(renamed).ids == mine.patient.tolist()
    with pytest.raises(InputError, match=r"no column 'cas'\. Did you mean 'case'"):
        posterior.predict(renamed, id="cas")
    with pytest.raises(InputError, match="no column 'patient'"):
        run.prior.personalize(renamed, id="patient")


def test_a_table_of_several_clients_makes_no_single_posterior(tmp_path):
    table = frame()
    fed = read(table)
    prior = fedabml.train(fed, "mlr", rounds=1, participation=1.0, epochs=1, device="cpu", evaluate=False).prior
    table.to_csv(tmp_path / "all.csv", index=False)
    for learn in (prior.personalize, lambda rows: fedabml.compare_at_site(prior, rows)):
        for rows in (table, tmp_path / "all.csv"):
            way = r"frame\['site'\] == NAME.*personalize RUN --client NAME.*leave 'site' out"
            with pytest.raises(InputError, match=rf"rows of \d+ clients in its column 'site'.*{way}"):
                learn(rows)
    prior.personalize(table[table.site == "s1"], epochs=1)


def wards(values):
    """A table of two sites whose column `ward` has these values in turn."""
    pd = pytest.importorskip("pandas")
    n = 40
    return pd.DataFrame(
        {
            "site": ["a", "b"] * (n // 2),
            "ward": list(values) * (n // len(values)),
            "ill": ["no", "no", "yes", "yes"] * 10,
        }
    )


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_a_word_of_digits_is_the_same_word_in_a_later_file(tmp_path, kind):
    """The later file has the ward 01 alone, which would be read as the number 1."""
    wards(["01", "A1"]).to_csv(tmp_path / "t.csv", index=False)
    recipe = read_table(tmp_path / "t.csv", client="site", target="ill").recipe
    later = wards(["01"]).head(2)
    getattr(later, {"csv": "to_csv", "xlsx": "to_excel"}[kind])(tmp_path / f"new.{kind}", index=False)
    x = features(tmp_path / f"new.{kind}", recipe)
    assert (x[:, recipe.feature_names.index("ward=01")] == 1).all()
    if kind == "csv":
        body = (tmp_path / "new.csv").read_bytes()
        assert parse_csv_body(SimpleNamespace(recipe=recipe), body, 10).x["ward"] == ["01", "01"]


@pytest.mark.parametrize("values", [[1, 2], [1.0, 2.0], [True, False]])
def test_numbers_that_were_words_in_a_frame_are_found_in_a_file(tmp_path, values):
    """With a gap pandas writes 1 as 1.0; True may be written TRUE."""
    table = wards(values).astype({"ward": "category"})
    recipe = read_table(table, client="site", target="ill").recipe
    texts = ["1", "1.0", " 1"] if values[0] is not True else ["True", "TRUE", "true"]
    name = f"ward={'True' if values[0] is True else 1}"
    for text in texts:
        (tmp_path / "new.csv").write_text(f"site,ward\na,{text}\na,{text}\n")
        assert (features(tmp_path / "new.csv", recipe)[:, recipe.feature_names.index(name)] == 1).all()
    x = features(table, recipe)
    assert not x[:, recipe.feature_names.index("ward=other")].any()


def test_an_index_with_a_name_is_a_column(tmp_path):
    table = frame(patient=[f"p{i}" for i in range(120)])
    fed = read(table.set_index("patient"), id="patient")
    assert fed.hash == read(table, id="patient").hash
    table.set_index("patient").to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", id="patient").hash == fed.hash
    with pytest.raises(InputError, match="an index and a column called 'patient'"):
        read(table.set_index("patient", drop=False))


def test_percentages_durations_and_days_are_refused_with_the_way_out():
    for column, says in (
        ([f"{i % 90}%" for i in range(120)], r"holds percentages, such as '0%'.*without the sign"),
        (pd.to_timedelta(np.arange(120), unit="D"), r"holds durations.*pandas.Timedelta\(hours=1\)"),
        (pd.date_range("2020-01-01", periods=120).date, r"holds dates, such as '2020-01-01'.*--date-columns"),
    ):
        with pytest.raises(InputError, match=f"Column 'x' {says}"):
            read(frame(x=column))


def test_an_identifier_is_quoted_for_the_shell():
    (note,) = read(frame(**{"Unnamed: 0": np.arange(120)})).manifest["notes"]
    assert "--id-column 'Unnamed: 0' " in note


def test_training_notes_a_class_of_few_rows_and_words_that_differ_by_capitals():
    n = 60
    died = np.where(np.arange(n) % 2, "yes", "no").astype(object)
    died[7] = "maybe"
    sex = np.random.default_rng(0).choice(["female", "male"], n).astype(object)
    sex[::10] = "Female"
    frame = pd.DataFrame({"site": np.arange(n) % 3, "age": np.arange(n) % 17, "sex": sex, "died": died})
    notes = fedabml.Federation.from_frame(frame, client="site", target="died").manifest["notes"]
    assert any("class 'maybe' has 1 row; is it a typing error?" in note for note in notes)
    assert any("'sex' has the values 'Female' and 'female', which differ only by blanks" in note for note in notes)
    usual = frame.assign(died=np.where(np.arange(n) % 2, "yes", "no"), sex=[text.lower() for text in sex])
    assert "notes" not in fedabml.Federation.from_frame(usual, client="site", target="died").manifest
