"""Regression on the command line: transforms of the target, noise by input, quantiles."""

import csv

import numpy as np
import pandas as pd
import pytest

import fedabml
from fedabml.data import recipe
from tests.cli.command import run

pytestmark = pytest.mark.usefixtures("one_thread_here")
TABLE = ("--data", "stays.csv", "--client-column", "hospital", "--target-column", "days")
QUICK = ("--model", "mlr", "--rounds", 2, "--participation", 1, "--epochs", 1, "--device", "cpu")


@pytest.fixture
def stays(tmp_path):
    """Stays in three hospitals, in days."""
    g = np.random.default_rng(0)
    age = g.normal(60, 10, 120)
    days = np.exp(1 + (age - 60) / 20 + 0.5 * g.normal(size=120)).round(3)
    frame = pd.DataFrame({"age": age, "hospital": np.repeat(["A", "B", "C"], 40), "days": days})
    frame.to_csv(tmp_path / "stays.csv", index=False)
    frame[frame.hospital == "A"].to_csv(tmp_path / "own.csv", index=False)
    return frame


@pytest.mark.slow
def test_from_a_table_of_durations_to_quantiles(stays, tmp_path):
    run("train", *TABLE, *QUICK, "--target-transform", "boxcox", "--noise-by-input", "--out", "run", "-q")
    said = run("personalize", "run", "--data", "own.csv", "--validation", 0.3, "--out", "own.safetensors").stdout
    assert "90% intervals" in said
    run("predict", "own.safetensors", "--data", "own.csv", "--quantiles", "0.1, 0.5,0.90", "--out", "p.csv")
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    own = fedabml.load_posterior("own.safetensors")
    p = own.predict(tmp_path / "own.csv")
    assert own.input_spec.likelihood.by_input and len(rows) == 40
    for name, expected in {
        "median": p.median,
        "q_0.1": p.quantile(0.1),
        "q_0.9": p.quantile(0.9),
        "mean": p.mean,
    }.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], expected[:, 0], rtol=1e-5)
    assert all(0 <= float(row["low"]) <= float(row["q_0.5"]) <= float(row["high"]) for row in rows)
    run("evaluate", "run")
    run("train", "--resume", "--out", "run", "--rounds", 3, "-q")
    assert fedabml.load_prior("run/shared.safetensors").input_spec.transform == own.input_spec.transform


def test_a_positive_target_has_no_median_of_its_own(stays, tmp_path):
    run("train", *TABLE, *QUICK, "--positive-target", "--out", "run", "-q")
    run("personalize", "run", "--data", "own.csv", "--validation", 0.3, "--out", "own.safetensors")
    run("predict", "own.safetensors", "--data", "own.csv", "--quantiles", "0.001", "--out", "p.csv")
    frame = pd.read_csv(tmp_path / "p.csv")
    assert "median" not in frame and (frame["q_0.001"] >= 0).all() and (frame.low >= 0).all()


def test_rows_of_several_clients_are_predicted_with_a_note(stays):
    run("train", *TABLE, *QUICK, "--out", "run", "-q")
    run("personalize", "run", "--client", "A", "--out", "own.safetensors")
    words = ("predict", "own.safetensors", "--force", "--data")
    note = "Note: Rows of 3 clients in 'hospital': all are predicted with one client's posterior."
    assert note in run(*words, "stays.csv").stderr and "Note" not in run(*words, "own.csv").stderr


@pytest.mark.parametrize("levels", ["", "0.1,0.5"])
def test_quantiles_are_for_a_regression(stays, levels):
    stays.assign(days=np.where(stays.days > 3, "long", "short")).to_csv("stays.csv", index=False)
    run("train", *TABLE, *QUICK, "--out", "run", "-q")
    run("personalize", "run", "--client", "A", "--out", "own.safetensors")
    result = run("predict", "own.safetensors", "--data", "stays.csv", "--quantiles", levels, code=2 if levels else 0)
    assert ("--quantiles are for a regression" in result.stderr) == bool(levels)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*TABLE, "--target-transform", "sqrt"), "target_transform"),
        (("--dataset", "digits", "--target-transform", "log"), "target_transform is for your own data"),
        (("--dataset", "digits", "--positive-target"), "positive_target is for your own data"),
        (("--dataset", "digits", "--noise-by-input"), "noise_by_input is for a regression"),
        ((*TABLE[:5], "hospital", "--client-column", "days", "--target-transform", "log"), "for a regression"),
    ],
)
def test_flags_that_do_not_fit_are_refused(stays, words, says):
    stays.assign(days=stays.index % 3).to_csv("stays.csv", index=False)
    assert says in " ".join(run("train", *words, *QUICK, "--out", "run", code=2).stderr.split())


def test_a_target_that_is_not_positive_is_named(stays):
    stays.loc[45, "days"] = 0
    stays.to_csv("stays.csv", index=False)
    said = " ".join(run("train", *TABLE, *QUICK, "--target-transform", "log", "--out", "run", code=2).stderr.split())
    assert "client 'B' has the target 0, but a log or Box-Cox transform needs targets above 0" in said


@pytest.mark.parametrize("levels", ["1.5", "a", "0.1,x", ",", "0"])
def test_levels_that_are_none_are_refused(levels):
    said = run("predict", "own.safetensors", "--data", "own.csv", "--quantiles", levels, code=2).stderr
    assert "--quantiles needs numbers between 0 and 1" in " ".join(said.split())


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_scored_and_personalised(tmp_path, monkeypatch, caplog):
    """Earlier versions gave words of fewer than five rows features of their own; the table is untouched."""
    words = np.array(["flu", "cold"] * 30, object)
    words[:3] = "disease X"
    frame = pd.DataFrame({"site": ["a", "b"] * 30, "illness": words, "y": ["no", "yes", "yes", "no"] * 15})
    frame.to_csv(tmp_path / "t.csv", index=False)
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "LEAST", 1)
        words = ("--data", "t.csv", "--client-column", "site", "--target-column", "y")
        run("train", *words, *QUICK, "--out", "run", "-q")
    for words in (("evaluate", "run"), ("personalize", "run", "--client", "a", "--out", "a.safetensors")):
        caplog.clear()
        run(*words)
        assert "made by an earlier version" in caplog.text
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text().replace("flu", "gout", 1))
    for words in (("evaluate", "run"), ("personalize", "run", "--client", "a", "--out", "b.safetensors")):
        said = " ".join(run(*words, code=2).output.split())
        assert "have changed: their hash differs" in said and "personalize run --data FILE" in said
