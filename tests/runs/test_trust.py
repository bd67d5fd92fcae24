"""A posterior that a client may trust: what validation rows say, kept in the file and used by predictions."""

import csv
import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml.cli.use import alarm_lines, posterior_lines, trust_lines
from fedabml.data.ranges import LEAST, LEAST_TAIL, RangeLimits
from fedabml.errors import InputError
from fedabml.evaluation import calibration
from fedabml.evaluation.density import LEAST_ENTROPY, Strangeness
from fedabml.experiments.paper.outside import auroc
from fedabml.files.sealed import read_tensors, write_tensors
from fedabml.runs.compare_at_site import SiteReport, compare_at_site
from fedabml.runs.prior import rows_digest
from fedabml.runs.train import client_rows
from fedabml.runs.trust import TRAINED_ON, Trust
from tests.cli.command import run as command

spec = importlib.util.spec_from_file_location("hospitals", Path(__file__).parents[2] / "examples" / "hospitals.py")
hospitals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hospitals)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hospital():
    """A prior of twelve hospitals; the rows of Hospital A that it may learn from, and others to predict."""
    table = hospitals.patients(0).drop(columns=["risk", "patient"])
    fed = fedabml.read_table(table[table.hospital != "Hospital M"], client="hospital", target="died")
    prior = fedabml.train(fed, "mlr", fedabml.FedABML(), rounds=8, participation=1.0, evaluate=False).prior
    rows = table[table.hospital == "Hospital A"].reset_index(drop=True)
    return prior, rows.iloc[:600].reset_index(drop=True), rows.iloc[600:].reset_index(drop=True)


@pytest.fixture(scope="module")
def posterior(hospital):
    prior, rows, _ = hospital
    return prior.personalize(rows, validation=0.3, aim="recall>=0.8")


def test_the_threshold_finds_what_it_was_chosen_for(hospital, posterior):
    _, _, new = hospital
    died = (new.died == "yes").to_numpy()
    p = posterior.predict(new)
    usual = fedabml.Posterior(posterior.q, posterior.input_spec, posterior.offset, posterior.samples).predict(new)
    assert p.label[died].mean() > 0.6 > usual.label[died].mean()
    assert p.decode() == ["yes" if label else "no" for label in p.label]


def test_sets_cover_the_truth_as_often_as_stated(hospital, posterior):
    _, _, new = hospital
    truth = (new.died == "yes").to_numpy().astype(int)
    checks = posterior.predict(new).checks
    covered = checks.sets[np.arange(len(new)), truth].mean()
    assert checks.coverage == 0.9
    assert (
        abs(covered - 0.9) < 3 * math.sqrt(0.09 / len(new)) + 0.03
    )  # chance in these rows, and in the validation rows
    assert checks.sets.any(1).all()


def test_the_effect_of_a_calibration_is_cross_validated(hospital, posterior):
    prior, rows, new = hospital
    assert posterior.trust.nll_after <= posterior.trust.nll_before + 0.01
    assert 0 < posterior.trust.ece_after < 0.2
    none = prior.personalize(rows, validation=0.3, calibration="none")
    assert none.trust.nll_after == none.trust.nll_before and none.trust.temperature == 1
    plain = fedabml.Posterior(none.q, none.input_spec, none.offset, none.samples).predict(new)
    np.testing.assert_array_equal(none.predict(new).probs, plain.probs)


def test_isotonic_calibration_is_kept_and_its_sets_still_cover(hospital, tmp_path):
    prior, rows, new = hospital
    posterior = prior.personalize(rows, validation=0.5, calibration="isotonic")
    truth, p = (new.died == "yes").to_numpy().astype(int), posterior.predict(new)
    plain = fedabml.Posterior(posterior.q, posterior.input_spec, posterior.offset, posterior.samples).predict(new)
    order = np.argsort(plain.probs[:, 1])
    assert (np.diff(p.probs[order, 1]) >= -1e-12).all() and p.probs.min() > 0
    assert abs(p.probs[:, 1].mean() - truth.mean()) < 3 * math.sqrt(0.2 * 0.8 / len(new)) + 0.03
    assert p.checks.sets[np.arange(len(new)), truth].mean() > 0.9 - 3 * math.sqrt(0.09 / len(new)) - 0.03
    again = fedabml.load_posterior(posterior.save(tmp_path / "p.safetensors"))
    np.testing.assert_array_equal(again.predict(new).probs, p.probs)
    assert again.trust.curves == posterior.trust.curves
    with pytest.raises(InputError, match="An isotonic calibration needs 100 validation rows; here are 60"):
        prior.personalize(rows, validation=0.1, calibration="isotonic")
    with pytest.raises(InputError, match="The calibration is 'platt'"):
        prior.personalize(rows, validation=0.1, calibration="platt")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("creatinine", lambda v: v / 88.4),
        ("heart_rate", lambda v: 10 * v),
        ("age", lambda v: v * 0 - 5),
        ("ward", lambda v: "burns"),
        ("sex", lambda v: v.str.upper()),
    ],
)
def test_a_spoiled_column_raises_an_alarm_and_is_named(hospital, posterior, column, change):
    _, _, new = hospital
    new = new[new.creatinine.notna()].reset_index(drop=True)
    usual, spoiled = (
        posterior.predict(new).checks,
        posterior.predict(new.assign(**{column: change(new[column])})).checks,
    )
    assert usual.alarm.mean() < 0.15
    assert spoiled.alarm.mean() > 0.95
    named = [any(flag.startswith(column) for flag in flags) for flags in spoiled.flags]
    assert np.mean(named) > 0.95


def test_a_value_far_away_is_far_for_the_network_too(hospital, posterior):
    _, _, new = hospital
    for column in ("creatinine", "age", "heart_rate", "sodium"):
        far = posterior.predict(new.assign(**{column: 1000 * new[column]})).checks
        assert far.distance[new[column].notna()].min() > posterior.trust.density_limit


def test_it_is_saved_with_the_posterior(hospital, posterior, tmp_path):
    _, _, new = hospital
    again = fedabml.load_posterior(posterior.save(tmp_path / "p.safetensors"))
    one, other = posterior.predict(new), again.predict(new)
    np.testing.assert_array_equal(one.probs, other.probs)
    np.testing.assert_array_equal(one.checks.sets, other.checks.sets)
    np.testing.assert_allclose(one.checks.distance, other.checks.distance)
    assert one.checks.flags == other.checks.flags and again.trust.threshold == posterior.trust.threshold


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"coverage": 7}, "The coverage is 7; it must lie between 0 and 1"),
        ({"false_alarms": -3}, "The share of false alarms is -3"),
        ({"calibration": "platt"}, "The calibration is 'platt'"),
        ({"aim": "best"}, "aim of the threshold"),
        ({"coverage": 0.8}, "A coverage needs validation rows: give validation=0.2"),
        ({"false_alarms": 0.01}, "A share of false alarms needs validation rows"),
        ({"calibration": "none"}, "A calibration needs validation rows"),
    ],
)
def test_an_option_without_effect_or_out_of_range_is_refused_without_validation_rows(hospital, option, says):
    prior, rows, _ = hospital
    with pytest.raises(InputError, match=says):
        prior.personalize(rows.head(60), **option)


@pytest.mark.parametrize(
    "damage",
    [
        {"temperature": -1},
        {"coverage": 2},
        {"rows": "many"},
        {"ranges": {"age": {}}},
        {"quantile": True},
        {"calibration": "isotonic"},
        {"calibration": "x"},
        {"curves": [[[0.5], [2.0]]], "calibration": "isotonic"},
    ],
)
def test_damage_is_refused(posterior, damage):
    tensors, facts = posterior.trust.pack()
    with pytest.raises((InputError, ValueError, TypeError)):
        Trust.unpack(tensors, facts | damage)


def test_what_cannot_be_fitted_is_refused(hospital):
    prior, rows, _ = hospital
    with pytest.raises(InputError, match="An aim needs validation rows"):
        prior.personalize(rows, aim="f1")
    with pytest.raises(InputError, match="aim of the threshold"):
        prior.personalize(rows, validation=0.2, aim="best")
    with pytest.raises(InputError, match="cannot tell a threshold for 'f1': they have no sample of the class 'yes'"):
        prior.personalize(rows[rows.died == "no"].head(20).reset_index(drop=True), validation=0.3, aim="f1")
    with pytest.raises(InputError, match="too few to hold out"):
        prior.personalize(rows.head(2), validation=0.2)


def test_few_validation_rows_promise_nothing(hospital):
    prior, rows, new = hospital
    small = prior.personalize(rows.head(20), validation=0.2)
    assert small.trust.quantile == math.inf and small.predict(new).checks.sets.all()


def test_a_report_names_what_serves_a_site_best(hospital):
    """A small site gains from the others: what it trains alone is clearly worse."""
    prior, rows, _ = hospital
    report = fedabml.compare_at_site(prior, rows.head(150), validation=0.4)
    assert report.rows == 60 and report.best in ("posterior", "prior")
    mean, half = report.worse["alone"]
    assert mean > 0 and half > 0
    assert mean == pytest.approx(report.nll["alone"] - report.nll[report.best])
    assert (
        re.search("(serves this site best|the lowest NLL): NLL", report.sentence)
        and "training alone is worse by" in report.sentence
    )


def test_differences_within_chance_are_no_verdict():
    nll = {"posterior": 0.33, "prior": 0.32, "alone": 0.31}
    worse = {"posterior": (0.02, 0.03), "prior": (0.01, 0.02)}
    sentence = SiteReport(40, nll, worse).sentence
    assert sentence.startswith("No significant difference at this site; training alone has the lowest NLL: NLL 0.310")
    for half in (0.01, math.nan):  # one difference is significant; so few rows tell nothing
        assert "serves this site best" in SiteReport(40, nll, worse | {"posterior": (0.02, half)}).sentence


def test_a_calibration_that_changes_nothing_has_no_warning():
    line = trust_lines(Trust(40, 0.9, 0.5, nll_before=-1e-9, nll_after=1e-6), False)[1]
    assert "NLL 0.0000 → 0.0000" in line and "rises" not in line
    assert "the NLL rises" in trust_lines(Trust(40, 0.9, 0.5, nll_before=0.1, nll_after=0.2), False)[1]


def test_a_report_judges_the_posterior_that_is_written(hospital, monkeypatch):
    prior, rows, _ = hospital
    monkeypatch.setattr("fedabml.runs.compare_at_site.ALONE_EPOCHS", (1,))
    options = {"epochs": 3, "lr": 0.05, "batch_size": 20, "class_weights": "1,5"}
    report = fedabml.compare_at_site(prior, rows.head(150), validation=0.4, **options)
    written = prior.personalize(rows.head(150), validation=0.4, **options)
    assert report.nll["posterior"] == pytest.approx(written.trust.nll_after, rel=1e-6)  # calibrated, on other rows
    assert report.nll["posterior"] != pytest.approx(written.trust.nll_before, rel=1e-6)


def test_rows_that_are_encoded_have_flags_all_the_same(hospital):
    """The rows of a run's own client are encoded; values of later rows are judged by what all sites hold."""
    prior, rows, new = hospital
    recipe = prior.input_spec.recipe
    x, y = recipe.apply(rows), recipe.encode_target(rows.died)
    posterior = prior.personalize(x, y, encoded=True, validation=0.4)
    assert posterior.trust.range_limits.usual == pytest.approx(recipe.ranges.threshold(0.025))
    assert posterior.trust.strangeness is None
    checks = posterior.predict(new.assign(age=900.0)).checks
    assert checks.alarm.all() and all("age is 900" in texts[0] for texts in checks.flags)
    assert posterior.predict(new).checks.alarm.mean() < 0.1


def test_values_are_flagged_without_validation_rows(hospital, tmp_path):
    """An impossible value makes the prediction certain; only its flag and the alarm tell."""
    prior, rows, new = hospital
    posterior = prior.personalize(rows)
    assert posterior.trust is None
    checks = posterior.predict(new).checks
    assert checks.alarm.mean() <= 0.05 and checks.coverage is None and checks.sets is None
    spoiled = posterior.predict(new.assign(creatinine=9999.0, ward="burns"))
    assert spoiled.entropy.max() < 1e-6 and spoiled.checks.alarm.all()
    assert all({"ward", "creatinine"} <= set(causes) for causes in spoiled.checks.causes)
    assert spoiled.checks.counts["ward"] == len(new)
    assert "ward is 'burns', seen in fewer than 5 rows" in spoiled.checks.flags[0]
    again = fedabml.load_posterior(posterior.save(tmp_path / "p.safetensors"))
    assert again.predict(new).checks.flags == checks.flags
    assert posterior.predict(prior.input_spec.recipe.apply(new), encoded=True).checks is None  # without its columns


def test_what_is_common_at_a_client_is_named_without_an_alarm(hospital, tmp_path):
    """Gaps that the client often has raise no alarm, and hide none: not of a wrong unit, not of an impossible age."""
    prior, rows, new = hospital
    random = np.random.default_rng(0)
    rows, new = (t.assign(age=t.age.mask(random.random(len(t)) < 0.08)) for t in (rows, new))
    posterior = prior.personalize(rows, validation=0.3)
    assert posterior.trust.range_limits.gaps.keys() == {"age"}
    checks = posterior.predict(new).checks
    assert checks.alarm.mean() <= 0.06
    gap = int(np.flatnonzero(new.age.isna() & ~checks.alarm)[0])
    assert checks.flags[gap][0] == "age is missing, seen in fewer than 5 rows (such values are common at this client)"
    known = new[new.creatinine.notna() & new.temperature.notna()].reset_index(drop=True)
    spoils = {"creatinine": known.creatinine * 10, "temperature": known.temperature * 1.8 + 32, "age": 999.0}
    for name, values in spoils.items():
        spoiled = posterior.predict(known.assign(**{name: values})).checks
        assert np.mean([name in causes for causes in spoiled.causes]) > 0.95
    again = fedabml.load_posterior(posterior.save(tmp_path / "p.safetensors"))
    assert again.trust.range_limits == posterior.trust.range_limits
    assert again.predict(new).checks.flags == checks.flags


@pytest.mark.parametrize(
    ("column", "odd", "count", "unseen"),
    [("ward", "rare2", 2, "zzz"), ("ward", "rare2", 20, "zzz"), ("age", np.nan, 2, np.nan)],
)
def test_what_few_rows_of_a_client_have_is_not_common_there(hospital, column, odd, count, unseen):
    """Two odd rows, or many of one odd word, must not silence alarms for words and gaps that the client hardly has."""
    prior, rows, new = hospital
    rows = rows.head(88).assign(age=rows.age.head(88).fillna(60))
    rows.loc[: count - 1, column] = odd
    posterior = prior.personalize(rows, validation=0.3)
    assert column != "ward" or "ward" in posterior.trust.range_limits.values, "the odd rows have raised the limit"
    checks = posterior.predict(new.assign(**{column: unseen})).checks
    assert checks.alarm.all() and all(column in causes for causes in checks.causes)
    assert not any("common at this client" in text for texts in checks.flags for text in texts if column in text)
    usual = posterior.predict(new.assign(**{column: odd})).checks
    assert np.mean([column in causes for causes in usual.causes]) == (count < LEAST)


def test_a_value_that_is_unusual_at_the_client_too_raises_an_alarm(hospital):
    """A client in another unit is used to it; ten times its own values are still an alarm."""
    prior, rows, new = hospital
    rows, new = (t.assign(creatinine=t.creatinine / 88.4) for t in (rows, new[new.creatinine.notna()]))
    posterior = prior.personalize(rows, validation=0.3)
    usual, wrong = (posterior.predict(new.assign(creatinine=k * new.creatinine)).checks for k in (1, 0.001))
    assert usual.alarm.mean() < 0.1 and np.mean(["creatinine" in causes for causes in wrong.causes]) > 0.95


def test_the_single_limit_of_an_earlier_version_does_what_it_did(posterior):
    """Its highest limit was exceeded by what never was, so such values still raise alarms."""
    tensors, facts = posterior.trust.pack()
    old = {name: value for name, value in facts.items() if name != "raised"}
    assert Trust.unpack(tensors, old | {"range_limit": 6.0}).range_limits == RangeLimits(6.0)
    assert Trust.unpack(tensors, old | {"range_limit": 690.8}).range_limits.usual < -math.log(LEAST_TAIL)
    assert Trust.unpack(tensors, facts).range_limits == posterior.trust.range_limits


def test_why_distances_are_not_judged_is_said(hospital, digits, tmp_path):
    prior, rows, _ = hospital
    by_values = "alarms      by values, for at most about 5% of usual rows"
    assert alarm_lines(prior.personalize(rows)) == [
        by_values,
        "limits      those of all sites: made without --validation",
    ]
    recipe = dataclasses.replace(prior.input_spec.recipe, ranges=None)  # as in a deployed federation
    federated = dataclasses.replace(prior, input_spec=dataclasses.replace(prior.input_spec, recipe=recipe))
    assert alarm_lines(federated.personalize(rows)) == [
        by_values,
        "limits      by the client's own rows: made without --validation",
    ]
    assert alarm_lines(federated.personalize(rows.head(12))) == [
        "alarms      none: made without --validation by fewer than 25 rows, too few to tell usual values"
    ]
    assert alarm_lines(prior.personalize(rows.head(30), validation=0.3)) == [
        by_values,
        "distances   not judged: 9 validation rows are too few, 39 suffice",
    ]
    assert alarm_lines(prior.personalize(rows.head(12), validation=0.3)) == [
        by_values,
        "distances   not judged: fewer than 10 rows to train on",
    ]
    assert alarm_lines(digits[0]) == ["alarms      by distances and strangeness, for at most about 5% of usual rows"]
    assert alarm_lines(dataclasses.replace(digits[0], trust=None)) == ["alarms      none: made without --validation"]
    few = dataclasses.replace(digits[0], trust=dataclasses.replace(digits[0].trust, density=None))
    assert alarm_lines(few) == ["alarms      none", "distances   not judged: fewer than 10 rows to train on"]


@pytest.mark.parametrize("rows", [25, 40, 200])
def test_the_own_rows_of_a_client_set_a_limit_that_holds_for_new_rows(rows, tmp_path):
    random = np.random.default_rng(0)
    x, new, y = random.lognormal(size=(rows, 20)), random.lognormal(size=(2000, 20)), np.arange(rows) % 2
    fed = fedabml.Federation.from_arrays([(x, y), (x, y)])
    prior = fedabml.train(fed, "mlr", rounds=1, participation=1.0, epochs=1, evaluate=False).prior
    posterior = prior.personalize(x, y, epochs=1, lr=1e-4)
    path = posterior.save(tmp_path / "p.safetensors")
    again = fedabml.load_posterior(path)
    assert again.range_limit == posterior.range_limit
    assert again.predict(new).checks.alarm.mean() < 0.11
    new[:, 3] *= 1000
    assert again.predict(new).checks.alarm.mean() > 0.99
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, metadata | {"range_limit": None})  # as files of earlier versions
    old = fedabml.load_posterior(path)
    assert old.ranges == posterior.ranges and old.predict(new).checks.alarm.all()
    write_tensors(path, tensors, metadata | {"range_limit": "high"})
    with pytest.raises(InputError, match=r"p\.safetensors"):
        fedabml.load_posterior(path)


def test_the_effect_of_a_calibration_of_several_labels_is_cross_validated():
    """Labels without any signal: fitted on the same rows, a temperature can only seem to help."""
    random = np.random.default_rng(0)
    y, p1 = random.integers(0, 2, (12, 3)), random.uniform(0.2, 0.8, (12, 3))
    p = fedabml.MultiPrediction(np.stack([1 - p1, p1], -1), np.zeros((12, 3)))
    trust = Trust.fit(p, y)
    flat, known, row = p.flat(y, np.arange(12))
    crossed = calibration.cross_calibrated("temperature", flat.probs, known, row)
    assert trust.nll_after == pytest.approx(-np.log(crossed[np.arange(len(known)), known]).mean())
    scaled = calibration.with_temperature(flat.probs, trust.temperature)
    assert trust.nll_after > -np.log(scaled[np.arange(len(known)), known]).mean()
    said = trust_lines(trust, several=True)
    assert "ECE" not in "".join(said) and "rises" not in "".join(said)
    chance, harms = (dataclasses.replace(trust, nll_after=trust.nll_before * by) for by in (1.04, 1.06))
    assert "rises" not in trust_lines(chance, several=True)[1]
    assert "the NLL rises, and --calibration none" in trust_lines(harms, several=True)[1]
    assert trust_lines(trust, several=True)[-1].startswith("coverage    no sets")


def test_a_client_of_the_run_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = hospitals.patients(1).drop(columns="risk")
    table.to_csv("patients.csv", index=False)
    words = [
        "--data",
        "patients.csv",
        "--client-column",
        "hospital",
        "--target-column",
        "died",
        "--model",
        "mlr",
        "--rounds",
        "2",
    ]
    assert "--drop-columns" in command("train", *words, "--out", "run", code=2).output  # the patients' identifiers
    words += ["--drop-columns", "patient"]
    said = command("train", *words, "--participation", 1, "--out", "run").stdout
    assert "fedabml personalize run --data CLIENT.csv --validation 0.3 --out posterior.safetensors" in said
    command("personalize", "run", "--client", "Hospital F", "--validation", 0.3, "--out", "f.safetensors")
    fed = fedabml.read_table(table, client="hospital", target="died", drop=["patient"])
    run = fedabml.train(fed, "mlr", rounds=2, participation=1.0, evaluate=False)
    one, other = run.posterior("Hospital F", validation=0.3), fedabml.load_posterior("f.safetensors")
    new = table[table.hospital == "Hospital F"].head(20)
    np.testing.assert_allclose(one.predict(new).probs, other.predict(new).probs, rtol=1e-4)
    with pytest.raises(InputError, match="no client 'Hospital Z'"):
        run.posterior("Hospital Z")
    assert "one of the two" in command("personalize", "run", code=2).output
    kept = fedabml.train(fed, "mlr", fedabml.algorithms.make("ditto"), rounds=1, evaluate=False)
    with pytest.raises(InputError, match="keep a state of their own"):
        kept.posterior("Hospital F")


@pytest.mark.parametrize("of_table", [True, False])
def test_the_validation_rows_of_a_run_are_those_that_a_client_holds_out(of_table):
    """The prior was trained on the training rows, so what is fitted on them flatters it, which every output says."""
    table = hospitals.patients(1).drop(columns=["risk", "patient"])
    if of_table:
        fed = fedabml.read_table(table, client="hospital", target="died", test_share=0)
    else:
        random = np.random.default_rng(0)
        x = [random.normal(size=(60, 2)).astype(np.float32) for _ in range(3)]
        fed = fedabml.Federation.from_arrays([(own, (own.sum(1) > 0).astype(np.int64)) for own in x])
    how = {"rounds": 2, "participation": 1.0, "evaluate": False}
    plain, held = fedabml.train(fed, "mlr", **how), fedabml.train(fed.hold_out(0.25), "mlr", **how)
    own = held.posterior(1, validation=0.5)
    rows = held.federation.val[1]
    assert own.trust.held_out == rows_digest(fed.x[rows], fed.y[rows]) and own.trust.rows == len(rows)
    assert not own.trust.trained_on and TRAINED_ON not in "".join(posterior_lines(own))
    assert len(client_rows(held.federation, held.prior, 1).x) == len(held.federation.train[1])
    assert held.posterior(1).trust is None
    data = client_rows(held.federation, held.prior, 1, 0.5)
    given = {"encoded": data.encoded, "posterior": own}
    assert TRAINED_ON not in compare_at_site(held.prior, data.x, data.y, data.validation, **given).sentence
    data = client_rows(fed, plain.prior, 1, 0.5)
    seen = plain.posterior(1, validation=0.5)
    assert seen.trust.trained_on and f"caution     {TRAINED_ON}" in posterior_lines(seen)
    assert "on average over new rows" not in "".join(posterior_lines(seen))
    given = {"encoded": data.encoded, "posterior": seen}
    assert compare_at_site(plain.prior, data.x, data.y, data.validation, **given).sentence.endswith(TRAINED_ON)
    with pytest.raises(InputError, match="numbers from 0 to"):
        plain.prior.personalize(data.x, data.y, encoded=data.encoded, validation=[0, 10_000])


def test_what_the_prior_was_trained_on_is_saved(hospital, tmp_path):
    prior, rows, _ = hospital
    posterior = prior.personalize(rows, validation=0.3, trained_on=True)
    assert fedabml.load_posterior(posterior.save(tmp_path / "seen")).trust.trained_on


def test_the_number_of_a_client_is_not_taken_for_a_name_that_is_another_number():
    table = hospitals.patients(1).drop(columns=["risk", "patient"])
    names = {name: str(number) for number, name in enumerate(sorted(table.hospital.unique()), 1)}
    fed = fedabml.read_table(table.assign(hospital=table.hospital.map(names)), client="hospital", target="died")
    run = fedabml.train(fed, "mlr", rounds=1, evaluate=False)
    assert fed.names[1] != "1"
    with pytest.raises(InputError, match=r"numbers as names; give '1'"):
        run.posterior(1)
    by_name = client_rows(fed, run.prior, "1")
    assert set(by_name.x.hospital) == {"1"} and len(client_rows(fed, run.prior, 0).x)


def test_a_client_of_the_run_has_the_limits_of_its_own_rows(tmp_path, monkeypatch):
    """A small hospital often has no age: that is common there, and no alarm, however its rows are named."""
    monkeypatch.chdir(tmp_path)
    table = hospitals.patients(1).drop(columns=["risk", "patient"])
    own = (table.hospital == "Hospital L").to_numpy()
    gaps = own & (np.arange(len(table)) % 5 == 0)
    table = table.assign(age=table.age.mask(gaps))
    table.to_csv("patients.csv", index=False)
    words = ("--data", "patients.csv", "--client-column", "hospital", "--target-column", "died", "--model", "mlr")
    words += ("--test-share", 0, "--no-evaluate", "--rounds", 2, "--participation", 1)
    command("train", *words, "--out", "run")
    fed = fedabml.read_table("patients.csv", client="hospital", target="died", test_share=0)
    run = fedabml.train(fed, "mlr", rounds=2, participation=1.0, evaluate=False)
    rows = table[own].reset_index(drop=True)
    command("personalize", "run", "--client", "Hospital L", "--validation", 0.3, "--no-compare", "--out", "l.pt")
    alike = fedabml.load_prior("run").personalize(rows, validation=0.3)
    with pytest.raises(InputError, match=r"shared\.safetensors"):
        fedabml.load_prior(tmp_path)  # no run's folder
    for posterior in (run.posterior("Hospital L", validation=0.3), fedabml.load_posterior("l.pt")):
        assert posterior.trust.ranges == alike.trust.ranges and posterior.trust.range_limits.gaps.keys() == {"age"}
        checks = posterior.predict(rows).checks
        assert not checks.alarm[rows.age.isna()].any()
        assert any("such values are common at this client" in text for texts in checks.flags for text in texts)


def test_a_regression_has_intervals():
    random = np.random.default_rng(0)
    x = random.normal(size=(1500, 3)).astype(np.float32)
    y = (x.sum(1, keepdims=True) + 0.3 * random.standard_t(4, (1500, 1))).astype(np.float32)
    train = [(x[i::10][:100], y[i::10][:100]) for i in range(10)]
    prior = fedabml.train(fedabml.Federation.from_arrays(train), "mlr", rounds=5, evaluate=False).prior
    posterior = prior.personalize(x[:1000], y[:1000], validation=0.5, coverage=0.8)
    checks = posterior.predict(x[1000:]).checks
    covered = ((checks.low <= y[1000:]) & (y[1000:] <= checks.high)).mean()
    assert covered == pytest.approx(0.8, abs=0.06)
    far = posterior.predict(50 + x[1000:]).checks
    assert far.alarm.all() and checks.alarm.mean() < 0.1


@pytest.mark.parametrize("validation", [0.0, 0.4])
def test_the_numbers_of_a_short_vector_are_checked_like_columns(validation, tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(900, 3)).astype(np.float32)
    y = (x[:, 0] + 0.5 * random.normal(size=900) > 0).astype(int)
    fed = fedabml.Federation.from_arrays([(x[i:300:3], y[i:300:3]) for i in range(3)])
    prior = fedabml.train(fed, "mlr", rounds=2, participation=1.0, evaluate=False).prior
    posterior = prior.personalize(x[:600], y[:600], validation=validation)
    posterior = fedabml.load_posterior(posterior.save(tmp_path / "p.safetensors"))
    usual, spoiled = posterior.predict(x[600:]).checks, posterior.predict(x[600:] * [1, 100, 1]).checks
    assert usual.alarm.mean() < 0.08
    far = np.abs(x[600:, 1]) > 0.1
    assert all("x1" in causes for causes, is_far in zip(spoiled.causes, far, strict=True) if is_far)
    assert "x1 is" in spoiled.flags[int(np.argmax(far))][0]
    wide = fedabml.Federation.from_arrays([(np.tile(x[i:300:3], 22), y[i:300:3]) for i in range(3)])
    prior = fedabml.train(wide, "mlr", rounds=1, evaluate=False).prior
    assert prior.personalize(np.tile(x[:60], 22), y[:60]).predict(np.tile(x[600:], 22)).checks is None


def test_the_command_line_says_what_it_found(hospital, tmp_path):
    prior, rows, new = hospital
    prior.save(tmp_path / "prior.safetensors")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    new.assign(creatinine=new.creatinine / 88.4).to_csv(tmp_path / "new.csv", index=False)
    out = command(
        "personalize", tmp_path / "prior.safetensors", "--data", tmp_path / "rows.csv", "--validation", "0.3", "--aim",
        "f1", "--compare", "--out", tmp_path / "posterior.safetensors",
    ).stdout  # fmt: skip
    assert re.search("serves this site best|has the lowest NLL", out)
    assert (
        "validation  180 rows, held out" in out
        and "for f1 of 'yes', chosen on " in out
        and "coverage    90% sets" in out
        and "rows of 'yes'" in out
        and "recall of 'yes'" in out
    )
    assert "on average over new rows like those held out" in out
    words = [tmp_path / "posterior.safetensors", "--data", tmp_path / "new.csv", "--out", tmp_path / "p.csv"]
    assert "--report" in command("predict", *words, "--report", tmp_path / "p.csv", code=2).output
    said = command("predict", *words, "--report", tmp_path / "p.html").stdout
    lines = list(csv.DictReader((tmp_path / "p.csv").read_text("utf-8").splitlines()))
    assert set(lines[0]) >= {"label", "set", "alarm", "score", "distance", "flags"}
    assert np.mean([line["alarm"] == "yes" for line in lines]) > 0.85  # where creatinine was measured
    assert any("creatinine is" in line["flags"] for line in lines)
    count = sum(line["alarm"] == "yes" for line in lines)
    named = sum("creatinine" in line["flags"] and line["alarm"] == "yes" for line in lines)
    assert f"alarms        {count} of {len(lines)} rows: " in said and f"creatinine {named}" in said
    page = (tmp_path / "p.html").read_text("utf-8")
    assert "Causes of alarms" in page and f"{len(lines)} rows, {count} with an alarm" in page


def test_a_trust_of_an_earlier_version_loads(posterior):
    tensors, facts = posterior.trust.pack()
    old = {k: v for k, v in facts.items() if k not in ("calibration", "curves", "ece_before", "ece_after")}
    trust = Trust.unpack(tensors, old)
    assert trust.kind == "temperature" and trust.temperature == posterior.trust.temperature


@pytest.fixture(scope="module")
def digits():
    """A posterior of a client with digits 0 to 4, checked on rows held out; digits to predict, and those scrambled."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = x.reshape(-1, 1, 8, 8).astype(np.float32)[y < 5], y[y < 5]
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    fed = fedabml.Federation.from_arrays(clients[:2])
    prior = fedabml.train(fed, "mlp", fedabml.FedABML(), rounds=10, participation=1.0, evaluate=False).prior
    posterior = prior.personalize(*(rows[:200] for rows in clients[2]), validation=0.5)
    inside = clients[2][0][200:]
    mixed = np.random.default_rng(0).permutation(64)
    return posterior, inside, inside.reshape(-1, 64)[:, mixed].reshape(inside.shape)


def test_scrambled_images_are_strange(digits):
    posterior, inside, outside = digits
    usual, strange = posterior.predict(inside), posterior.predict(outside)
    assert strange.checks.alarm.mean() > 0.5 > 0.15 > usual.checks.alarm.mean()
    by_strangeness = auroc(usual.checks.strangeness, strange.checks.strangeness)
    assert by_strangeness > 0.9
    assert by_strangeness > auroc(usual.entropy, strange.entropy)


def test_strangeness_is_saved_and_older_files_go_without(digits):
    posterior, _, _ = digits
    tensors, facts = posterior.trust.pack()
    copy = Trust.unpack(tensors, facts)
    assert copy.strangeness == posterior.trust.strangeness
    assert copy.strangeness_limit == posterior.trust.strangeness_limit
    older = {name: value for name, value in facts.items() if not name.startswith("strangeness")}
    assert Trust.unpack(tensors, older).strangeness is None
    for wrong in ([1, 2, 3], [1, 2, 3, 0], [1, 2, 3, math.nan], [1, 2, 3, 4, 5], "abcd"):
        with pytest.raises((TypeError, ValueError)):
            Trust.unpack(tensors, {**facts, "strangeness": wrong})


def convolutions():
    """A small network for digits of 8×8 pixels, with maps of two sizes."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))


@pytest.fixture(scope="module")
def seen():
    """A posterior with feature maps of a client with digits 0 to 4; digits to predict, and their negatives."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = x.reshape(-1, 1, 8, 8).astype(np.float32)[y < 5], y[y < 5]
    fed = fedabml.Federation.from_arrays([(x[:300], y[:300]), (x[300:600], y[300:600])])
    algorithm = fedabml.FedABML(lr=0.1, label_prior="none")
    prior = fedabml.train(fed, convolutions(), algorithm, rounds=10, participation=1.0, evaluate=False).prior
    posterior = prior.personalize(x[600:800], y[600:800], validation=0.5)
    return posterior, x[800:], np.ascontiguousarray(16 - x[800:])


def test_strangeness_looks_at_feature_maps(seen):
    posterior, inside, outside = seen
    trust = posterior.trust
    assert [d.means.shape for d in trust.maps.densities] == [(5, 6), (5, 8)] and len(trust.strangeness.centre) == 4
    usual, strange = posterior.predict(inside), posterior.predict(outside)
    features, plain = posterior.features(inside), dataclasses.replace(posterior, trust=None).predict(inside)
    parts = [trust.density.angle(features.hidden), np.log(np.maximum(plain.entropy, LEAST_ENTROPY))]
    parts += [np.log(distance) for distance in trust.maps.distances(features.maps)]
    scaled = [(p - c) / s for p, c, s in zip(parts, trust.strangeness.centre, trust.strangeness.spread, strict=True)]
    by_hand = np.exp(np.mean(scaled, axis=0))
    np.testing.assert_allclose(usual.checks.strangeness, by_hand, rtol=1e-6)
    found = auroc(usual.checks.strangeness, strange.checks.strangeness)
    former = Strangeness(trust.strangeness.centre[:2], trust.strangeness.spread[:2])
    scores = []
    for x in (inside, outside):
        entropy = dataclasses.replace(posterior, trust=None).predict(x).entropy
        scores.append(former.score(trust.density.angle(posterior.features(x).hidden), entropy))
    assert found > 0.8 and found > auroc(*scores)
    assert usual.checks.alarm.mean() < 0.15 < strange.checks.alarm.mean()


def test_feature_maps_are_saved_and_files_without_keep_their_score(seen, tmp_path):
    posterior, inside, _ = seen
    path = posterior.save(tmp_path / "maps.safetensors")
    again = fedabml.load_posterior(path, model=convolutions()).predict(inside)
    np.testing.assert_array_equal(again.checks.strangeness, posterior.predict(inside).checks.strangeness)
    former = Strangeness(posterior.trust.strangeness.centre[:2], posterior.trust.strangeness.spread[:2])
    older = dataclasses.replace(
        posterior, trust=dataclasses.replace(posterior.trust, maps=None, strangeness=former, strangeness_limit=3.0)
    )
    path = older.save(tmp_path / "older.safetensors")
    _, facts = read_tensors(path)
    assert len(facts["trust"]["strangeness"]) == 4, "the file of a version without maps"
    loaded = fedabml.load_posterior(path, model=convolutions())
    p = loaded.predict(inside)
    assert loaded.trust.maps is None
    plain = dataclasses.replace(loaded, trust=None).predict(inside)
    angle = loaded.trust.density.angle(loaded.features(inside).hidden)
    np.testing.assert_array_equal(p.checks.strangeness, former.score(angle, plain.entropy))
    assert ((p.checks.strangeness > 3) <= p.checks.alarm).all()


def test_damaged_feature_maps_are_refused(seen):
    tensors, facts = seen[0].trust.pack()
    assert Trust.unpack(tensors, facts).strangeness == seen[0].trust.strangeness
    for name in ("map0.means", "map1.whitening"):
        with pytest.raises((TypeError, ValueError)):
            Trust.unpack({n: t for n, t in tensors.items() if n != name}, facts)
        with pytest.raises((TypeError, ValueError)):
            Trust.unpack(tensors | {name: tensors[name][:, :-1]}, facts)
    former = {f"{part}{name}": torch.eye(4) for part in ("", "map0.") for name in ("mean", "background")}
    again = Trust.unpack(tensors | former, facts)
    np.testing.assert_array_equal(again.density.whitening, seen[0].trust.density.whitening)
    without = {n: t for n, t in tensors.items() if not n.startswith("map1")}
    with pytest.raises(ValueError, match="scale"):
        Trust.unpack(without, facts)
