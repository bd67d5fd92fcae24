"""`--split`: which rows are scored, and the calibrated measures that rows held out add to test rows."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from fedabml.experiments.cell import Cell
from fedabml.experiments.compare import compare
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.tune import tune
from fedabml.runs.config import RunConfig
from tests.cli.command import run

SMALL = RunConfig(
    clients=6, model="mlr", rounds=2, participation=0.5, epochs=1, batch_size=20, validation=0.3, device="cpu"
)
WORDS = shlex.split("--clients 6 --model mlr --rounds 2 --participation 0.5 --epochs 1 --batch-size 20 --device cpu")
HELD = [*WORDS, "--validation", 0.3]


def test_test_rows_are_scored_beside_rows_held_out_and_calibrated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", *HELD, "--split", "test", "--out", "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["split"] == "test" and summary["temperature"] > 0
    assert summary["nll_calibrated"] != summary["nll"] and "ece_calibrated" in summary
    assert "negative log likelihood, calibrated" in " ".join(run("train", "--resume", "--out", "run").stdout.split())
    run("compare", *HELD, "--split", "test", "--algorithms", "fedavg-ft,local", "--seeds", "1,2", "--out", "table")
    text = (tmp_path / "table/table.md").read_text()
    assert "NLL calibrated" in text and "ECE calibrated" in text
    for row in json.loads((tmp_path / "table/table.json").read_text())["rows"]:
        own = [result for result in Ledger("table/cells.jsonl").results.values() if result.label == row["label"]]
        values = [result.scores[0].summary["nll_calibrated"] for result in own]
        assert row["nll_calibrated"] == pytest.approx(np.mean(values))
        assert all(result.facts["split"] == "test" for result in own)


def test_curves_are_scored_on_the_same_rows(tmp_path):
    config = SMALL.with_changes(algorithm="local", split="test", eval_every=1)
    compare({"local": config}, [1], out=tmp_path)
    (result,) = Ledger(tmp_path / "cells.jsonl").results.values()
    other = config.with_changes(rounds=1, eval_every=0)
    compare({"local": other}, [1], out=tmp_path / "one")
    (one,) = Ledger(tmp_path / "one/cells.jsonl").results.values()
    assert result.curve[0]["accuracy"] == pytest.approx(one.scores[0].summary["accuracy"])


def test_the_split_is_a_part_of_an_identity_only_where_it_is_chosen():
    usual, chosen = (Cell("", SMALL.with_changes(split=split)).identity for split in ("auto", "test"))
    assert '"split":' not in usual and '"split": "test"' in chosen


@pytest.mark.slow
def test_a_search_reads_validation_rows_alone(tmp_path):
    results = [
        tune(SMALL.with_changes(split=split), ["local"], tmp_path / split, trials=1) for split in ("auto", "test")
    ]
    plain, other = ([trial.value for trial in tuned.trials["local"]] for tuned in results)
    assert plain == other
    assert {result.facts["split"] for result in Ledger(tmp_path / "test/cells.jsonl").results.values()} == {"val"}


def test_a_split_without_rows_is_an_error(tmp_path):
    output = run("train", *WORDS, "--split", "val", "--out", tmp_path / "run", code=2).stderr
    assert "no client has val samples" in " ".join(output.split())
