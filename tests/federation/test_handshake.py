"""The start protocol in process: one card at the server and all sites, mismatches named, and no value of a row sent."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from fedabml import InputError, algorithms
from fedabml.federation import handshake
from fedabml.federation.card import Card, make_card
from fedabml.federation.folders import SiteFolder
from fedabml.federation.handshake import LEAKS, MOST_SCHEMAS, admit, answer, freeze
from fedabml.federation.pooled import pooled_schema
from fedabml.federation.schema import Column, Schema, draft
from fedabml.federation.settings import SiteSettings
from fedabml.federation.site_data import load
from tests.federation.start import (
    ID,
    SECRET,
    SECRET_NUMBER,
    TABLE,
    Exchange,
    frame,
    make_order,
    make_site,
    make_sites,
    settings,
)

ALL = ["a", "b", "c"]


@pytest.mark.parametrize("normalisation", ["schema", "pooled"])
@pytest.mark.parametrize("kind", ["table", "arrays", "images"])
def test_all_sites_freeze_the_same_card(tmp_path, kind, normalisation):
    sites, schema = make_sites(tmp_path, kind, allow_pooled_sums=normalisation == "pooled")
    exchange, kept = Exchange(sites), []
    frozen = freeze(settings(normalisation=normalisation), schema, exchange, kept.append)
    assert (frozen.accepted, frozen.refused) == (ALL, {})
    assert exchange.kinds == ["describe", *(["sums"] if normalisation == "pooled" else []), "freeze"]
    assert [card.digest for card in kept] == [frozen.card.digest]
    for site in sites.values():
        stored = Card.load(site.card_file)
        assert stored.digest == frozen.card.digest and torch.equal(stored.initial, frozen.card.initial)
        assert load(site, stored).clients == 1
    assert (dict(frozen.card.schema) == schema.to_json()) == (normalisation == "schema")


def test_regression_of_a_table_and_several_labels_of_arrays(tmp_path):
    sites, _ = make_sites(tmp_path, "table", allow_pooled_sums=True, target_column="dose")
    schema = draft(tmp_path / "a.csv", **TABLE | {"target_column": "dose"})
    frozen = freeze(settings(normalisation="pooled", algorithm="ditto"), schema, Exchange(sites))
    assert frozen.accepted == ALL and frozen.card.input_spec.task == "regression"
    assert load(sites["b"], frozen.card).y_scale.shape == (1,)
    (tmp_path / "labels").mkdir()
    sites, _ = make_sites(tmp_path / "labels", "arrays")
    for site in sites.values():
        content = dict(np.load(site.settings.data))
        marks = {name: np.stack([y > 0, y > 1], 1).astype(int) for name, y in content.items() if name[0] == "y"}
        np.savez(site.settings.data, **content | marks)
    schema = draft(sites["a"].settings.data, task="multilabel")
    frozen = freeze(settings(), schema, Exchange(sites))
    assert frozen.accepted == ALL and load(sites["c"], frozen.card).task == "multilabel"


def test_sequences_of_tokens_are_not_scaled(tmp_path):
    sites, _ = make_sites(tmp_path, "arrays")
    for number, site in enumerate(sites.values()):
        tokens = np.random.default_rng(number).integers(0, 20, (24, 6))
        np.savez(site.settings.data, x=tokens, y=np.arange(24) % 2)
    schema = draft(sites["a"].settings.data)
    frozen = freeze(settings(model="text", model_options={"vocabulary": [20]}), schema, Exchange(sites))
    assert frozen.accepted == ALL and frozen.card.input_spec.network.tokens
    assert load(sites["b"], frozen.card).scale == 1.0
    np.savez(tmp_path / "far.npz", x=np.full((24, 6), 20), y=np.arange(24) % 2)
    far = make_site(tmp_path, "far", tmp_path / "far.npz")
    assert admit(frozen.card, settings(), Exchange({"far": far})).accepted == []


def test_start_again_gives_the_same_card_and_is_confirmed(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    first = freeze(settings(), schema, Exchange(sites))
    again = freeze(settings(), schema, Exchange(sites))
    assert again.card.digest == first.card.digest and again.accepted == ALL


def test_sites_that_do_not_match_are_named_and_left_out(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    frame(1).drop(columns="age").to_csv(sites["b"].settings.data, index=False)
    frozen = freeze(settings(min_replies=2), schema, Exchange(sites))
    assert frozen.accepted == ["a", "c"]
    assert frozen.refused == {"b": "The column 'age' is missing."}
    assert not sites["b"].card_file.exists()


def test_start_is_refused_below_min_replies_with_every_reason(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    frame(1).drop(columns="age").to_csv(sites["b"].settings.data, index=False)
    frame(2).assign(ill="maybe").to_csv(sites["c"].settings.data, index=False)
    with pytest.raises(InputError, match=r"1 site.*b: The column 'age' is missing.*c: The target 'ill' has values"):
        freeze(settings(min_replies=2), schema, Exchange(sites))
    assert not any(site.card_file.exists() for site in sites.values())


def test_pooled_sums_need_every_site(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    sites["b"] = make_site(tmp_path, "b2", sites["b"].settings.data)
    exchange = Exchange(sites)
    with pytest.raises(InputError, match=r"do not allow sums: b\. "):
        freeze(settings(normalisation="pooled"), schema, exchange)
    assert exchange.kinds == ["describe"]
    order = make_order("sums", "b", facts={"schema": schema.to_json(), "seed": 0})
    assert "does not allow sums" in answer(order, sites["b"])["error"]


def test_site_that_falls_silent_or_lies_is_left_out(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")

    class Faulty(Exchange):
        def __call__(self, kind, facts, tensors, timeout):
            replies = super().__call__(kind, facts, tensors, timeout)
            if kind == "freeze":
                del replies["a"]
                replies["b"].facts["digest"] = "0" * 64
            return replies

    frozen = freeze(settings(min_replies=1), schema, Faulty(sites))
    assert frozen.accepted == ["c"]
    assert frozen.refused == {"a": "It did not answer in time.", "b": "It did not confirm the card's digest."}


@pytest.mark.parametrize("facts", [{}, {"match": 1}, {"match": "yes", "reasons": 3}, {"reasons": [1, 2]}])
def test_foolish_answers_are_refused_without_a_crash(tmp_path, facts):
    sites, schema = make_sites(tmp_path, "arrays")

    class Foolish(Exchange):
        def __call__(self, kind, facts_sent, tensors, timeout):
            replies = super().__call__(kind, facts_sent, tensors, timeout)
            if kind == "describe":
                replies["b"].facts.clear()
                replies["b"].facts.update(facts)
            return replies

    frozen = freeze(settings(), schema, Foolish(sites))
    assert frozen.refused == {"b": "Its answer to the schema cannot be read."}


def test_hostile_sums_leave_their_site_out(tmp_path):
    allowed = {"allow_pooled_sums": True, "target_column": "ill"}
    sites, schema = make_sites(tmp_path, "table", **allowed)

    class Hostile(Exchange):
        def __call__(self, kind, facts, tensors, timeout):
            replies = super().__call__(kind, facts, tensors, timeout)
            if kind == "sums":
                replies["b"].facts["sums"]["columns"]["age"] = [5, 1e20, 1e20]
            return replies

    frozen = freeze(settings(normalisation="pooled"), schema, Hostile(sites))
    others = freeze(
        settings(normalisation="pooled"), schema,
        Exchange({n: make_site(tmp_path, f"{n}2", sites[n].settings.data, **allowed) for n in "ac"}),
    )  # fmt: skip
    assert frozen.refused == {"b": "Its sums are not those of the schema."}
    assert frozen.card.digest == others.card.digest


# -- later sites ------------------------------------------------------------------------------------------------------
def test_later_site_is_admitted_and_changes_nothing(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    late = {"c": sites.pop("c")}
    card = freeze(settings(normalisation="pooled"), schema, Exchange(sites)).card
    exchange = Exchange(late)
    assert admit(card, settings(), exchange).accepted == ["c"]
    assert exchange.kinds == ["describe", "freeze"]
    assert Card.load(late["c"].card_file).digest == card.digest
    frame(1).drop(columns="age").to_csv(tmp_path / "bad.csv", index=False)
    bad = make_site(tmp_path, "bad", tmp_path / "bad.csv")
    assert admit(card, settings(), Exchange({"bad": bad})).refused == {"bad": "The column 'age' is missing."}


# -- a site's own guard -----------------------------------------------------------------------------------------------
@pytest.fixture
def started(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    return sites, schema, freeze(settings(), schema, Exchange(sites)).card


def test_second_different_card_is_refused(started):
    sites, _, card = started
    tensors, facts = dataclasses.replace(card, seed=1).tensors_and_facts()
    before = sites["a"].card_file.read_bytes()
    given = answer(make_order("freeze", "a", facts=facts, tensors=tensors), sites["a"])
    assert given == {"facts": {}, "error": "This site has stored another card of this federation, and keeps it."}
    assert sites["a"].card_file.read_bytes() == before


def test_card_that_does_not_fit_the_data_is_refused_and_not_stored(started, tmp_path):
    _, _, card = started
    frame(1).drop(columns="age").to_csv(tmp_path / "bad.csv", index=False)
    site = make_site(tmp_path, "bad", tmp_path / "bad.csv")
    tensors, facts = card.tensors_and_facts()
    given = answer(make_order("freeze", "bad", facts=facts, tensors=tensors), site)
    assert given["error"] == "The column 'age' is missing." and not site.card_file.exists()


def test_damaged_and_foreign_cards_are_refused_and_not_stored(started, tmp_path):
    sites, _, card = started
    site = make_site(tmp_path, "new", sites["a"].settings.data)
    tensors, facts = card.tensors_and_facts()
    wrong = [
        (facts | {"federation": "f" * 32}, tensors),
        (facts | {"epochs": 10**9}, tensors),
        (facts, tensors | {"initial": tensors["initial"][:-1]}),
        (facts, tensors | {"initial": tensors["initial"] * float("nan")}),
        (facts | {"schema": {}}, tensors),
        ({}, {}),
        (facts, {}),
    ]
    for given_facts, given_tensors in wrong:
        order = make_order("freeze", "new", facts=copy.deepcopy(given_facts), tensors=given_tensors)
        given = answer(order, site)
        assert given["facts"] == {} and given["error"]
        assert not site.card_file.exists()


def test_no_sums_and_no_other_schema_after_the_freeze(started):
    sites, schema, _ = started
    order = make_order("sums", "a", facts={"schema": schema.to_json(), "seed": 0})
    assert "sends no more sums" in answer(order, sites["a"])["error"]
    other = schema.to_json()
    del other["columns"]["age"]
    given = answer(make_order("describe", "a", facts={"schema": other}), sites["a"])
    assert "compares no other schema" in given["error"]
    assert answer(make_order("describe", "a", facts={"schema": schema.to_json()}), sites["a"])["facts"]["match"]


def test_questions_are_bounded(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    data, site = schema.to_json(), sites["a"]
    for number in range(MOST_SCHEMAS):
        data["columns"]["age"]["shift"] = float(number)
        for _ in range(2):
            assert not answer(make_order("describe", "a", facts={"schema": data}), site)["error"]
    data["columns"]["age"]["shift"] = -1.0
    assert "compares no more" in answer(make_order("describe", "a", facts={"schema": data}), site)["error"]


@pytest.mark.parametrize("guess", ["classes", "another fact of the card"])
def test_cards_that_are_not_stored_are_bounded_too(tmp_path, monkeypatch, guess):
    """A card that does not fit asks as much as a schema: it guesses classes and words, or of texts the vocabulary."""
    monkeypatch.setattr(handshake, "MOST_SCHEMAS", 3)
    sites, schema = make_sites(tmp_path, "table")
    frame(0).assign(ill="rare").to_csv(sites["a"].settings.data, index=False)
    for number in range(5):
        guessed = dataclasses.replace(schema, classes=("no", f"guess-{number}"))
        card = card_of(guessed) if guess == "classes" else card_of(schema, seed=number)
        for _ in range(2):
            reason = offer(sites["a"], card)["error"]
            assert ("not among the schema's classes" if number < 3 else "compares no more") in reason
    data = dataclasses.replace(schema, classes=("no", "rare")).to_json()
    assert "compares no more" in answer(make_order("describe", "a", facts={"schema": data}), sites["a"])["error"]


def card_of(schema, seed=0):
    """The card that `freeze` would make of a schema."""
    return make_card(ID, schema.inputs("test"), algorithm=algorithms.make("fedavg"), model_options={"hidden": [8]},
                     seed=seed, schema=schema.to_json())  # fmt: skip


def sums(site, schema, seed=0):
    """What a site answers to an order for its sums."""
    facts = json.loads(json.dumps({"schema": schema.to_json(), "seed": seed}))
    return answer(make_order("sums", "a", facts=facts), site)


def offer(site, card):
    """What a site answers to an order to store a card."""
    tensors, facts = card.tensors_and_facts()
    return answer(make_order("freeze", "a", facts=facts, tensors=tensors), site)


# -- one set of sums --------------------------------------------------------------------------------------------------
def test_sums_are_given_for_one_seed_one_schema_and_the_same_data(tmp_path):
    """The seed chooses the training rows, so that sums for many seeds would be equations for every row."""
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    site, again = sites["a"], "it can remove state/schemas.json in its folder"
    first = sums(site, schema, seed=3)
    assert first["facts"] and sums(site, schema, seed=3) == first
    assert all(again in sums(site, schema, seed)["error"] for seed in range(3))
    other = dataclasses.replace(schema, columns={"age": schema.columns["age"]})
    scaled = {"age": dataclasses.replace(schema.columns["age"], scale=1e-9)}
    for wrong in (other, dataclasses.replace(schema, columns={**schema.columns, **scaled})):
        given = sums(site, wrong, seed=3)
        assert given["facts"] == {} and again in given["error"]
    table = frame(0)
    frame(0, rows=41).to_csv(site.settings.data, index=False)  # another patient: the difference would be this row
    assert again in sums(site, schema, seed=3)["error"]
    table.to_csv(site.settings.data, index=False)
    assert sums(site, schema, seed=3) == first
    (site.state / "schemas.json").unlink()  # the site allows it
    assert sums(site, schema, seed=4)["facts"]


def test_a_card_must_have_the_seed_and_the_inputs_of_the_sums(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    site = sites["a"]
    given = sums(site, schema, seed=3)["facts"]["sums"]
    pooled = pooled_schema(schema, [given])
    fewer = dataclasses.replace(pooled, columns={"age": pooled.columns["age"]})
    for wrong in (card_of(pooled, seed=4), card_of(fewer, seed=3)):
        assert "another seed or other inputs" in offer(site, wrong)["error"] and not site.card_file.exists()
    assert pooled != schema and offer(site, card_of(pooled, seed=3))["error"] == ""


def test_labels_that_a_schema_calls_inputs_are_not_summed(tmp_path):
    """Sums of a table need the site's own word for its target, which is then no input under any name."""
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True, target_column="", allow_words=True)
    for number, site in enumerate(sites.values()):
        frame(number).assign(ill=np.arange(40) % 2).to_csv(site.settings.data, index=False)
    label = {"ill": Column("number"), "age": schema.columns["age"]}
    words = {"ward": ("north", "south"), "diagnosis": ("no", "yes")}
    schemas = [Schema("table", "classification", words[name], name, label) for name in words]
    exchange = Exchange(sites)
    with pytest.raises(InputError, match=r"do not allow sums: a, b, c.*its own target_column"):
        freeze(settings(normalisation="pooled"), schemas[0], exchange)
    assert exchange.kinds == ["describe"]
    assert "its own target_column" in sums(sites["a"], schemas[0])["error"]
    named = SiteSettings.of(sites["a"].settings.to_dict() | {"target_column": "ill"})
    named.save(sites["a"].settings_file)
    site = SiteFolder(sites["a"].path)
    for schema in schemas:
        given = answer(make_order("describe", "a", facts={"schema": schema.to_json()}), site)
        assert given["facts"]["match"] is False
        assert sums(site, schema)["facts"] == {} and offer(site, card_of(schema))["error"]
    assert not site.card_file.exists()


def test_labels_that_a_schema_calls_numbers_are_summed_only_for_a_regression(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    site = sites["a"]
    frame(0).assign(ill=np.arange(40) % 2).to_csv(site.settings.data, index=False)
    numbers = Schema("table", "regression", (), "ill", schema.columns, target_shift=(0.0,), target_scale=(1.0,))
    assert sums(site, numbers)["facts"]["sums"]["target"][0][0] == 32
    classes = dataclasses.replace(schema, classes=("0", "1"))
    assert "other inputs" in offer(site, card_of(classes))["error"] and not site.card_file.exists()


def test_a_pooled_start_goes_on_after_a_correction_and_a_crash(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True)
    pooled = settings(normalisation="pooled", min_replies=3)
    frame(2).assign(ill=["maybe"] * 20 + ["no"] * 20).to_csv(sites["c"].settings.data, index=False)
    with pytest.raises(InputError, match="c: The target 'ill' has values"):
        freeze(pooled, schema, Exchange(sites))
    schema = dataclasses.replace(schema, classes=("maybe", "no", "yes"))
    cards = []

    def crash(card):
        cards.append(card)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        freeze(pooled, schema, Exchange(sites), crash)
    frozen = freeze(pooled, schema, Exchange(sites))
    assert frozen.accepted == ALL and frozen.card.digest == cards[0].digest
    late = make_site(tmp_path, "late", sites["b"].settings.data)
    assert admit(frozen.card, pooled, Exchange({"late": late})).accepted == ["late"]
    for name in ("schemas.json", "card.safetensors"):  # a site that lost its disk
        (sites["a"].state / name).unlink()
    assert admit(frozen.card, pooled, Exchange({"a": sites["a"]})).accepted == ["a"]


def test_damaged_card_on_disk_is_named(started):
    sites, _, card = started
    sites["a"].card_file.write_bytes(sites["a"].card_file.read_bytes()[:-1])
    tensors, facts = card.tensors_and_facts()
    given = answer(make_order("freeze", "a", facts=facts, tensors=tensors), sites["a"])
    assert "damaged" in given["error"] and str(sites["a"].path) not in given["error"]


def test_foreign_orders_are_refused(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    facts = {"schema": schema.to_json()}
    assert answer(make_order("describe", "a", facts=facts, federation="f" * 32), sites["a"])["error"]
    assert answer(make_order("train", "a", facts=facts), sites["a"])["error"]
    for wrong in ({}, {"schema": None}, {"schema": {"kind": "table"}}, {"schema": [1] * 1000}):
        assert answer(make_order("describe", "a", facts=wrong), sites["a"])["error"]


# -- nothing of a row leaves a site -----------------------------------------------------------------------------------
def plant(table, column, row):
    """Put the secret into one row of a column."""
    table = table.copy()
    secret = SECRET_NUMBER if column in ("age", "dose") else SECRET
    table[column] = table[column].astype(object)
    table.loc[row, column] = secret
    return table


@pytest.mark.parametrize("column", ["patient", "age", "dose", "ward", "admitted", "note", "ill"])
def test_no_value_of_a_row_is_in_any_reply_or_error(tmp_path, column, caplog):
    """A secret word or number in one row, everything allowed: no reply, refusal or card holds it."""
    allowed = {"allow_pooled_sums": True, "allow_medians": True, "allow_words": True, "test_share": 0.0}
    sites, schema = make_sites(tmp_path, "table", **allowed)
    plant(frame(1), column, 3).to_csv(sites["b"].settings.data, index=False)
    exchange = Exchange(sites)
    frozen = freeze(settings(normalisation="pooled"), schema, exchange)
    assert ("b" in frozen.refused) == (column in ("admitted", "ill"))
    _, facts = frozen.card.tensors_and_facts()
    texts = "\n".join([*exchange.texts, json.dumps(facts), *frozen.refused.values()])
    for secret in (SECRET, repr(SECRET_NUMBER), str(int(SECRET_NUMBER)), f"{SECRET_NUMBER:g}"):
        assert secret not in texts
    for name in ("0003", "free text"):  # of identifiers and columns that the schema leaves out
        assert name not in texts


def test_a_value_that_four_rows_share_is_not_sent_either(tmp_path):
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True, allow_words=True, test_share=0.0)
    table = frame(1)
    table.loc[:3, "ward"] = SECRET
    table.to_csv(sites["b"].settings.data, index=False)
    exchange = Exchange(sites)
    freeze(settings(normalisation="pooled"), schema, exchange)
    assert SECRET not in "".join(exchange.texts)


def test_counts_of_labels_stay_local(tmp_path):
    """Sites whose labels differ, and nothing else, send the same texts."""
    sites, schema = make_sites(tmp_path, "table", allow_pooled_sums=True, test_share=0.0)
    first = Exchange(sites)
    freeze(settings(normalisation="pooled"), schema, first)
    for number, site in enumerate(sites.values()):
        site.card_file.unlink()
        frame(number).assign(ill=["yes"] * 35 + ["no"] * 5).to_csv(site.settings.data, index=False)
    second = Exchange(sites)
    freeze(settings(normalisation="pooled"), schema, second)
    assert first.texts == second.texts


def test_unexpected_error_is_kept_in_the_log(tmp_path, monkeypatch, caplog):
    sites, schema = make_sites(tmp_path, "arrays")

    def fail(*_):
        raise InputError(f"row 3 has {SECRET}")

    monkeypatch.setattr(handshake, "mismatches", fail)
    given = answer(make_order("describe", "a", facts={"schema": schema.to_json()}), sites["a"])
    assert SECRET not in given["error"] and SECRET in caplog.text


def test_every_kind_of_answer_is_in_the_list_of_leaks():
    text = " ".join(LEAKS)
    assert all(f"{kind}" in text for kind in ("describe:", "sums", "freeze:", "allow_medians", "allow_words"))
