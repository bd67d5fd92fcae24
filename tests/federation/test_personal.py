"""A site's posterior from the prior on its own disk, for members and for newcomers."""

import re

import numpy as np
import pytest
import torch

from fedabml import InputError, algorithms, load_posterior
from fedabml.engine.client import client_round, initial_kept
from fedabml.engine.client import personalize as personalize_lanes
from fedabml.engine.lanes import Lanes
from fedabml.engine.setting import Cohort
from fedabml.federation import personal
from fedabml.federation.card import make_card
from fedabml.federation.kept import KeptVersions
from fedabml.federation.personal import kept_state, personalize
from fedabml.federation.site_data import load
from fedabml.files.sealed import read_json, write_json
from fedabml.runs import compare_at_site as site_report
from tests.cli.command import run
from tests.federation.start import ID, frame, make_site, make_sites


def trained(sites, schema, algorithm="fedabml", round=1):
    """One round of site a; the prior goes to every site, and what a keeps stays with it."""
    options = {"model_options": {"hidden": [8]}, "batch_size": 10, "class_weights": schema.class_weights}
    made = algorithms.make(algorithm)
    card = make_card(ID, schema.inputs("test"), algorithm=made, schema=schema.to_json(), **options)
    cohort = Cohort(card.setting(load(sites["a"], card), 0), card.place())
    lanes = Lanes.in_round(cohort, card.initial_shared(), [0], round)
    with torch.no_grad():
        result = client_round(lanes, initial_kept(lanes), 1)
    for site in sites.values():
        card.save(site.card_file)
        prior = card.prior(card.initial_shared())
        prior.save(site.prior_file)
        write_json(site.prior_facts_file, {"round": round, "digest": prior.digest})
    kept = {name: value[0].clone() for name, value in result.kept.items()}
    if made.keeps:
        KeptVersions(sites["a"].state, ID, card.digest, 0).save(round, kept, 0)
    return card, cohort, kept


@pytest.mark.parametrize("kind", ["table", "arrays", "images"])
def test_posterior_of_a_newcomer_is_saved_and_predicts(tmp_path, kind):
    sites, schema = make_sites(tmp_path, kind)
    trained(sites, schema)
    out = tmp_path / "posterior.safetensors"
    posterior = personalize(sites["c"].path, out, epochs=1)
    loaded = load_posterior(out)
    data = sites["c"].settings.data
    x = np.load(data)["x_test"] if kind == "arrays" else data
    p, q = posterior.predict(x), loaded.predict(x)
    assert np.array_equal(p.probs, q.probs) and len(p.probs)
    with pytest.raises(InputError, match="exists already"):
        personalize(sites["c"], out)
    personalize(sites["c"], out, force=True, epochs=0)


def test_site_without_card_and_rounds_needs_a_prior_alone(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    trained(sites, schema)
    new = make_site(tmp_path, "new", tmp_path / "b.csv")
    with pytest.raises(InputError, match="has no prior yet"):
        personalize(new)
    new.prior_file.write_bytes(sites["a"].prior_file.read_bytes())
    mine, theirs = personalize(new, epochs=1), personalize(sites["b"], epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(mine.q, theirs.q, strict=True))


def test_validation_aim_and_identifiers_are_passed_on(tmp_path):
    sites, schema = make_sites(tmp_path, "table")
    trained(sites, schema)
    posterior = personalize(sites["b"], validation=0.3, aim="f1", coverage=0.8, epochs=1)
    assert posterior.trust is not None and posterior.trust.trained_on
    write_json(sites["b"].prior_facts_file, {"round": 1, "counted": 0})  # no reply of b's has counted
    assert not personalize(sites["b"], validation=0.3, epochs=1).trust.trained_on
    assert posterior.input_spec.recipe.id == "patient"  # the schema's
    table = frame(2).rename(columns={"patient": "case"})
    table.to_csv(tmp_path / "case.csv", index=False)
    own = make_site(tmp_path, "own", tmp_path / "case.csv", id_column="case")
    own.prior_file.write_bytes(sites["b"].prior_file.read_bytes())
    assert personalize(own, epochs=0).input_spec.recipe.id == "case"
    with pytest.raises(InputError, match="validation"):
        personalize(sites["b"], aim="f1")
    with pytest.raises(InputError, match="takes its data from"):
        personalize(sites["b"], x=frame(0))


@pytest.mark.parametrize("kind", ["table", "arrays"])
def test_values_are_checked_by_the_own_rows_of_a_site_because_a_federated_prior_holds_no_ranges(tmp_path, kind):
    sites, schema = make_sites(tmp_path, kind)
    if kind == "arrays":  # of fewer than 25 rows no value is checked
        own = dict(np.load(sites["b"].settings.data))
        shape, y = own["x_train"].shape[1:], np.resize(own["y_train"], 60)
        own |= {"x_train": np.random.default_rng(0).normal(size=(60, *shape)).astype(np.float32), "y_train": y}
        np.savez(sites["b"].settings.data, **own)
    trained(sites, schema)
    out = tmp_path / "posterior.safetensors"
    posterior = personalize(sites["b"], out, epochs=1)
    usual = frame(1) if kind == "table" else np.load(sites["b"].settings.data)["x_train"]
    checks = posterior.predict(usual).checks
    assert checks.alarm.mean() <= 0.1  # about 5%
    spoiled = usual.assign(dose=9e6) if kind == "table" else np.concatenate([usual[:, :1] + 9e6, usual[:, 1:]], 1)
    alarms = load_posterior(out).predict(spoiled).checks
    assert alarms.alarm.all() and all(("dose" if kind == "table" else "x0") in causes for causes in alarms.causes)


def test_test_rows_take_no_part(tmp_path):
    sites, schema = make_sites(tmp_path, "table", split_by="admitted", test_share=0.3)
    trained(sites, schema)
    before = personalize(sites["b"], epochs=1)
    table = frame(1)
    newest = table["admitted"].sort_values().index[-5:]
    table.loc[newest, "dose"] = 0.0
    table.to_csv(sites["b"].settings.data, index=False)
    after = personalize(sites["b"], epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(before.q, after.q, strict=True))


@pytest.mark.parametrize("algorithm", ["ditto", "fedrep", "apfl", "fedpop", "scaffold", "pfedbayes", "local"])
def test_kept_state_is_used_where_there_is_one(tmp_path, algorithm):
    """The posterior has the bits of the engine's own personalisation from what the site kept."""
    sites, schema = make_sites(tmp_path, "arrays")
    card, _, kept = trained(sites, schema, algorithm)
    prior = card.prior(card.initial_shared())
    assert all(torch.equal(value, kept[name]) for name, value in kept_state(sites["a"], prior).items())
    posterior = personalize(sites["a"], device="cpu")
    fed = load(sites["a"], card)
    lanes = Lanes.after_round(Cohort(card.setting(fed, 0), card.place()), card.initial_shared(), [0])
    with torch.no_grad():
        expected = personalize_lanes(lanes, {name: value.unsqueeze(0) for name, value in kept.items()})
    assert all(torch.equal(a, b[0]) for a, b in zip(posterior.q, expected, strict=True))
    fresh = personalize(sites["a"], use_kept=False)
    with torch.no_grad():
        begun = personalize_lanes(lanes, initial_kept(lanes))
    assert all(torch.equal(a, b[0]) for a, b in zip(fresh.q, begun, strict=True))


def test_versions_that_the_prior_cannot_have_counted_are_left_out(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    card, _, kept = trained(sites, schema, "ditto", round=3)
    versions = KeptVersions(sites["a"].state, ID, card.digest, 0)
    versions.save(4, {name: value + 1 for name, value in kept.items()}, 3)
    prior = card.prior(card.initial_shared())
    assert torch.equal(next(iter(kept_state(sites["a"], prior).values())), next(iter(kept.values())))
    facts = read_json(sites["a"].prior_facts_file)
    for counted, fits in ((4, 4), (3, 3), (2, None)):  # the site's last reply that the server counted
        write_json(sites["a"].prior_facts_file, facts | {"round": 9, "counted": counted})
        found = kept_state(sites["a"], prior)
        expected = None if fits is None else next(iter(kept.values())) + (fits - 3)
        assert (found is None) if expected is None else torch.equal(next(iter(found.values())), expected)
    write_json(sites["a"].prior_facts_file, facts)
    KeptVersions(sites["b"].state, "f" * 32, card.digest, 0).save(2, kept, 0)
    versions.path(3).write_bytes(b"damaged")
    assert kept_state(sites["b"], prior) is None and kept_state(sites["a"], prior) is None


def test_kept_state_of_another_network_is_refused(tmp_path):
    sites, schema = make_sites(tmp_path, "arrays")
    card, _, kept = trained(sites, schema, "ditto")
    prior = card.prior(card.initial_shared())
    with pytest.raises(InputError, match="kept state"):
        prior.personalize(np.zeros((4, 5)), [0, 1, 2, 0], kept={name: value[:-1] for name, value in kept.items()})


@pytest.mark.slow
def test_the_command_uses_one_prior_even_if_a_newer_one_arrives(tmp_path, monkeypatch):
    """The prior that is compared and named is that of the posterior, and rows that nobody compares are read once."""
    sites, schema = make_sites(tmp_path, "table")
    card, *_ = trained(sites, schema)
    first = card.prior(card.initial_shared())
    compared, reads = [], []
    make, compare, read = personal.personalize, site_report.compare_at_site, personal.training_rows

    def make_while_a_prior_arrives(site, *args, **options):
        posterior = make(site, *args, **options)
        newer = card.prior({name: value + 1 for name, value in card.initial_shared().items()})
        newer.save(site.prior_file)
        write_json(site.prior_facts_file, {"round": 2, "digest": newer.digest})
        return posterior

    def compare_and_record(prior, *args, **options):
        compared.append(prior.digest)
        return compare(prior, *args, **options)

    def read_and_record(*args):
        reads.append(args)
        return read(*args)

    monkeypatch.setattr(site_report, "ALONE_EPOCHS", (1,))
    monkeypatch.setattr(personal, "personalize", make_while_a_prior_arrives)
    monkeypatch.setattr(site_report, "compare_at_site", compare_and_record)
    monkeypatch.setattr(personal, "training_rows", read_and_record)
    out = tmp_path / "posterior.safetensors"
    words = ("federation", "personalize", sites["b"].path, "--out", out, "--epochs", 1, "--validation", 0.4)
    said = run(*words, "--device", "cpu").stdout
    assert re.search("serves this site best|has the lowest NLL", said)
    assert "prior       of round 1" in said
    assert compared == [first.digest] == [load_posterior(out).prior]
    reads.clear()
    run(*words, "--device", "cpu", "--no-compare", "--force")
    assert len(reads) == 1 == len(compared)
