"""The published pages of speed hold what their records give, and history.csv the ratios of every race."""

from __future__ import annotations

import csv
import shutil

import pytest

from benchmarks.cells import Book, closing, ratios
from benchmarks.draw import RESULTS

MACHINES = sorted(path.stem for path in (RESULTS / "speed").glob("*.jsonl"))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machines_page_is_what_its_records_give(machine, tmp_path, capsys):
    shutil.copy(RESULTS / "speed" / f"{machine}.jsonl", tmp_path)
    closing(Book(tmp_path / f"{machine}.jsonl", "any"))
    drawn = (tmp_path / f"{machine}.md").read_text(encoding="utf-8")
    assert drawn == (RESULTS / "speed" / f"{machine}.md").read_text(encoding="utf-8")
    assert drawn in capsys.readouterr().out


@pytest.mark.parametrize("machine", MACHINES)
def test_the_newest_ratio_of_every_row_stands_in_the_history(machine):
    with open(RESULTS / "speed" / "history.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["machine"] == machine]
    newest = {row["row"]: (row["ratio"], row["commit"]) for row in rows}
    for record in Book(RESULTS / "speed" / f"{machine}.jsonl", "any").records:
        for row, ratio in ratios(record).items():
            assert newest[row] == (f"{ratio:.4g}", record["commit"]), row


def test_the_ratios_of_other_libraries_are_of_both_times():
    sides = {"ours": {"wall": 2.0, "warm": 0.5}, "pfl": {"wall": 5.0, "warm": 1.0}}
    found = ratios({"cell": "peers/mlr", "kind": "peers", "sides": sides})
    assert found == {"peers/mlr/pfl start to finish": 2.5, "peers/mlr/pfl warm round": 2.0}
    assert ratios({"cell": "peers/mlr", "kind": "peers", "sides": {"pfl": sides["pfl"]}}) == {}


def test_a_ratio_names_its_side():
    record = {
        "cell": "loop/mlp/fedabml5/float32",
        "kind": "loop",
        "ratio": {"loop": 3.2, "local": 6.7, "compiled": 9.0},
    }
    row = "loop/mlp/fedabml5/float32"
    assert ratios(record) == {row: 3.2, f"{row} noise on activations": 6.7, f"{row} compiled": 9.0}
