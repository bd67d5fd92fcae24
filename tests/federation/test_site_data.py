"""A site's data have the bits of the same client in a simulated federation with the same normalisation."""

import dataclasses
import logging
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from fedabml import Federation, InputError, algorithms, read_table
from fedabml.engine.client import client_round, initial_kept
from fedabml.engine.lanes import Lanes
from fedabml.engine.setting import Cohort, Setting
from fedabml.federation.card import make_card
from fedabml.federation.folders import SiteFolder
from fedabml.federation.messages import Refusal
from fedabml.federation.personal import personalize
from fedabml.federation.schema import Schema
from fedabml.federation.schema_draft import draft_schema
from fedabml.federation.site_data import load, mismatches, open_data
from tests.federation.start import ID, NAMES, SECRET, arrays, frame, make_site, make_sites

NORM = ("shift", "scale", "y_shift", "y_scale")


def card_of(schema, algorithm="fedabml", **options):
    options = {"model_options": {"hidden": [8]}, "batch_size": 10, **options}
    inputs = schema.inputs("test")
    return make_card(ID, inputs, algorithm=algorithms.make(algorithm), schema=schema.to_json(), **options)


def normalised(fed, card):
    """The simulated federation with the card's normalisation."""
    spec = card.input_spec
    return dataclasses.replace(fed, **{name: getattr(spec, name) for name in NORM})


def assert_same(site, simulated, client):
    """The samples of every split, and what a network gets, agree bit for bit."""
    for split in ("train", "test"):
        mine, theirs = site.rows(split)[0], simulated.rows(split)[client]
        assert np.array_equal(site.x[mine], simulated.x[theirs]) and site.x.dtype == simulated.x.dtype
        assert np.array_equal(site.y[mine], simulated.y[theirs]) and site.y.dtype == simulated.y.dtype
    for name in NORM:
        assert np.array_equal(getattr(site, name), getattr(simulated, name))
    assert np.array_equal(site.label_counts()[0], simulated.label_counts()[client])


@pytest.mark.parametrize("other", ["table.csv", "second.npz", "images"])
def test_a_folder_with_an_npz_file_beside_other_data_is_refused(other, tmp_path):
    np.savez(tmp_path / "first.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    (tmp_path / "README.md").write_text("a document")
    assert open_data(tmp_path)["x_train"].shape == (4, 2)
    (tmp_path / other).mkdir() if other == "images" else (tmp_path / other).touch()
    with pytest.raises(InputError, match=rf"holds 'first.npz' and '{other}'.* Name the .npz file itself"):
        open_data(tmp_path)
    assert open_data(tmp_path / "first.npz")["x_train"].shape == (4, 2)


def one_round(cohort, card, client):
    lanes = Lanes.in_round(cohort, card.initial_shared(), [client], 1)
    with torch.no_grad():
        return client_round(lanes, initial_kept(lanes), 2)


def assert_trains_alike(site, simulated, card, client):
    """A round of the site alone has the bits of the same client among the others."""
    alone = Cohort(card.setting(site, client), card.place())
    setting = card.setting(site, client)
    joint = Cohort(Setting(setting.algorithm, setting.network, setting.likelihood, simulated, 10), card.place())
    mine, theirs = one_round(alone, card, 0), one_round(joint, card, client)
    for part in ("update", "kept"):
        states = getattr(mine, part), getattr(theirs, part)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(mine.losses, theirs.losses)


@pytest.mark.parametrize("algorithm", ["fedabml", "scaffold"])
def test_table_is_that_of_the_simulated_client(tmp_path, algorithm):
    """The newest rows are test rows, so that the division does not depend on the other clients' rows."""
    sites, schema = make_sites(tmp_path, "table", split_by="admitted", id_column="patient")
    card = card_of(schema, algorithm)
    frames = [frame(number).assign(hospital=name) for number, name in enumerate(NAMES)]
    path = tmp_path / "all.csv"
    pd.concat(frames).to_csv(path, index=False)
    fed = read_table(
        path, client="hospital", target="ill", id="patient", dates=["admitted"], drop=["note"], split_by="admitted"
    )
    encoded = schema.recipe().apply(pd.read_csv(path))
    simulated = dataclasses.replace(normalised(fed, card), x=encoded)
    for client, site in enumerate(sites.values()):
        mine = load(site, card)
        assert_same(mine, simulated, client)
        assert_trains_alike(mine, simulated, card, client)


def test_random_test_rows_are_those_of_a_table_of_this_site_alone(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    table = frame(1).assign(hospital="b")
    fed = Federation.from_frame(table, client="hospital", target="ill", drop=["patient", "note"], dates=["admitted"])
    site = load(sites["b"], card_of(schema))
    assert [site.rows(s)[0].tolist() for s in ("train", "test")] == [fed.rows(s)[0].tolist() for s in ("train", "test")]
    assert len(site.test.index) == 8


def test_a_target_that_float32_would_merge_is_refused_as_in_a_simulated_table(tmp_path, caplog):
    options = {"target_column": "dose", "drop_columns": "patient,note,admitted,ill"}
    frame(0).to_csv(tmp_path / "fine.csv", index=False)
    card = card_of(draft_schema(tmp_path / "fine.csv", **options))
    fine = make_site(tmp_path, "fine", tmp_path / "fine.csv", target_column="dose")
    assert load(fine, card).task == "regression"
    table = frame(0)
    table.assign(dose=1e9 + table.dose).to_csv(tmp_path / "coarse.csv", index=False)
    coarse = make_site(tmp_path, "coarse", tmp_path / "coarse.csv", target_column="dose")
    with pytest.raises(Refusal, match="cannot be encoded") as refusal:
        load(coarse, card)
    assert "float32, in which fedabml learns, rounds target 0" in caplog.text and "1000" not in str(refusal.value)


def test_arrays_are_those_of_the_simulated_client(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    card = card_of(schema, "ditto")
    for name in NAMES:
        (tmp_path / "folder").mkdir(exist_ok=True)
        np.savez(tmp_path / "folder" / f"{name}.npz", **arrays(NAMES.index(name)))
    simulated = normalised(Federation.from_folder(tmp_path / "folder"), card)
    for client, site in enumerate(sites.values()):
        mine = load(site, card)
        assert_same(mine, simulated, client)
        assert_trains_alike(mine, simulated, card, client)


def test_images_are_those_of_the_simulated_client(tmp_path):
    sites, schema = make_sites(tmp_path, "images")
    card = card_of(schema)
    simulated = normalised(Federation.from_folder(tmp_path / "images"), card)
    for client, site in enumerate(sites.values()):
        mine = load(site, card)
        assert_same(mine, simulated, client)
        assert_trains_alike(mine, simulated, card, client)


def test_decoded_images_stay_in_the_sites_folder(tmp_path, monkeypatch):
    """Deleting the folder deletes them, and a service that may write nowhere else can keep them."""
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path / "home"))
    sites, schema = make_sites(tmp_path, "images")
    card, site = card_of(schema), sites["a"]
    shutil.rmtree(tmp_path / "home", ignore_errors=True)  # what the drafted schema decoded
    load(site, card)
    card.prior(card.initial_shared()).save(site.prior_file)
    personalize(site, epochs=0)
    assert not (tmp_path / "home" / "images").exists()
    (file,) = site.images.iterdir()  # both read the same file
    assert site.images.parent == site.run and site.images.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_target_may_have_another_name_at_a_site(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    frame(1).rename(columns={"ill": "diagnosis"}).to_csv(tmp_path / "renamed.csv", index=False)
    renamed = make_site(tmp_path, "r", tmp_path / "renamed.csv", target_column="diagnosis")
    card = card_of(schema)
    mine, theirs = load(renamed, card), load(sites["b"], card)
    assert np.array_equal(mine.x, theirs.x) and np.array_equal(mine.y, theirs.y)


def test_folder_with_one_npz_stands_for_it(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    (tmp_path / "own").mkdir()
    np.savez(tmp_path / "own" / "data.npz", **arrays(1))
    mine = load(make_site(tmp_path, "own", tmp_path / "own"), card_of(schema))
    assert np.array_equal(mine.x, load(sites["b"], card_of(schema)).x)


def test_words_that_look_like_numbers_stay_words(tmp_path):
    """The operator's schema says that 01 is a word, so a site's file is read that way."""
    _, schema = make_sites(tmp_path, "table")
    data = schema.to_json()
    data["columns"]["ward"]["words"] = ["01", "02"]
    schema = Schema.of(data)
    frame(0).assign(ward=["01", "02"] * 20).to_csv(tmp_path / "w.csv", index=False)
    site = load(make_site(tmp_path, "w", tmp_path / "w.csv"), card_of(schema))
    assert site.x[:, schema.recipe().feature_names.index("ward=01")].sum() == 20


# -- refusals ---------------------------------------------------------------------------------------------------------
def broken(tmp_path, content, name="x.csv", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return make_site(tmp_path, f"x{len(list(tmp_path.iterdir()))}", path, **options)


def test_errors_hold_no_value_and_the_site_logs_the_reason(tmp_path, caplog):
    _, schema = make_sites(tmp_path, "table")
    card = card_of(schema)
    table = frame(1)
    spoiled = {
        "a word among numbers": table.assign(dose=[SECRET, *table["dose"][1:]]),
        "a class": table.assign(ill=[SECRET, *table["ill"][1:]]),
        "a date": table.assign(admitted=[SECRET, *table["admitted"][1:]]),
    }
    for each in spoiled.values():
        site = broken(tmp_path, each.to_csv(index=False))
        with pytest.raises(Refusal) as refused:
            load(site, card)
        assert SECRET not in str(refused.value)
        assert SECRET not in " ".join(mismatches(site, schema))
    unreadable = [b"\x00" + SECRET.encode(), f'age,ill\n1,"{SECRET}\n2', f"a,b\n1,2,3,{SECRET},5\n1\n", ""]
    with caplog.at_level(logging.WARNING, "fedabml"):
        for content in unreadable:
            site = broken(tmp_path, content)
            with pytest.raises(Refusal) as refused:
                load(site, card)
            assert SECRET not in str(refused.value) and str(tmp_path) not in str(refused.value)
    assert "cannot be read" in caplog.text


def test_site_without_data_and_with_a_missing_file_is_refused(tmp_path):
    _, schema = make_sites(tmp_path, "table")
    for data in ("", tmp_path / "no-such.csv", tmp_path / "no-such", tmp_path):
        site = make_site(tmp_path, f"n{len(str(data))}", data)
        [reason] = mismatches(site, schema)
        assert str(tmp_path) not in reason
        with pytest.raises(Refusal):
            load(SiteFolder(site.path), card_of(schema))


def test_split_by_a_missing_column_is_refused(tmp_path):
    _, schema = make_sites(tmp_path, "table")
    site = make_site(tmp_path, "s", tmp_path / "b.csv", split_by="year")
    with pytest.raises(Refusal, match="'year'"):
        load(site, card_of(schema))


def test_card_whose_inputs_are_not_those_of_its_schema_is_refused(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    card = card_of(schema)
    data = schema.to_json()
    data["columns"]["age"]["shift"] += 1
    for other in (data, {**schema.to_json(), "classes": ["no", "yes", "maybe"]}):
        with pytest.raises(Refusal, match="not those of its schema"):
            load(sites["a"], dataclasses.replace(card, schema=other))
