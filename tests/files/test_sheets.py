"""No CSV file of the package holds a cell that a spreadsheet would run, whatever clients and classes are called."""

import csv
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedabml.experiments.search_space import GRID
from fedabml.experiments.tune import Trial, _trials_csv
from fedabml.files.sheets import csv_cell, csv_records, csv_text, csv_value
from fedabml.report.read import read_runs
from tests.cli.command import run

HOSTILE = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", " =1", "\t=1", "\r=1", "'=1", "''-x", "＝1")
HARMLESS = ("", "north", "a=b", "'quoted'", "3-4", "-0.5", "+1e-05", "-.5", "1.", "-inf", "nan", "-1E3")


def cells(path):
    """Returns every cell of a CSV file, its header included."""
    with open(path, newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


def runs_as_a_formula(cell):
    """Returns whether a spreadsheet would run a cell; a plain number is none."""
    return bool(re.match(r"\s*[=+@-]", cell)) and not re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", cell)


@pytest.mark.parametrize("text", [*HOSTILE, *HARMLESS])
def test_a_cell_is_quoted_where_it_must_be_and_reads_back_as_it_was(text):
    assert csv_cell(text) == (f"'{text}" if text in HOSTILE else text)
    assert csv_value(csv_cell(text)) == text


def test_numbers_are_written_as_numbers():
    assert csv_text(["a", "=b"], [[-0.5, "-0.5"], [None, True]]) == "a,'=b\n-0.5,-0.5\n,True\n"


def test_errors_of_trials_and_records_of_experiments_are_quoted():
    trial = Trial("fedavg", 0, {}, dict.fromkeys(GRID), "nll", None, None, (0.0, 0.0), 1.0, "=cmd diverged")
    assert "'=cmd diverged" in _trials_csv({"fedavg": [trial]})
    assert csv_records([{"name": "=x", "value": -0.5}, {"more": "-y"}]) == "name,value,more\n'=x,-0.5,\n,,'-y\n"


@pytest.mark.usefixtures("one_thread_here")
@pytest.mark.slow
def test_every_command_writes_names_that_no_spreadsheet_runs():
    rng = np.random.default_rng(0)
    clients, classes = ("=cmd|' /C calc'!A0", "@north", "plain"), ("-yes", "=no")
    frame = pd.DataFrame({"x": rng.normal(size=60), "site": np.repeat(clients, 20), "y": np.tile(classes, 30)})
    frame.to_csv("table.csv", index=False)
    frame[:20].to_csv("one.csv", index=False)
    words = ["--data", "table.csv", "--client-column", "site", "--target-column", "y", "--model", "mlr"]
    words += ["--rounds", 1, "--participation", 1, "--epochs", 1]
    run("train", *words, "--out", "run")
    run("evaluate", "run", "--out", "scores")
    run("personalize", "run", "--data", "one.csv", "--out", "p.safetensors")
    run("predict", "p.safetensors", "--data", "one.csv", "--out", "predictions.csv")
    run("compare", *words, "--algorithms", "fedavg,local", "--seeds", 1, "--out", "comparison")
    files = ["run/clients.csv", "scores/evaluation.csv", "predictions.csv", "comparison/clients.csv"]
    for file in [*files, "comparison/table.csv"]:
        found = cells(file)
        assert not [cell for cell in found if runs_as_a_formula(cell)], file
        assert file.endswith("table.csv") or any(cell.startswith("'") for cell in found), file
    assert {client.name for client in read_runs([Path("run")])[0].clients} == set(clients)
