"""The timing of three seeds beside one: its medians by hand, and the whole command on tiny data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def seeds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import seeds

    return seeds


def test_the_ratio_is_that_of_the_medians_without_the_first_turn(seeds, tmp_path):
    records = tmp_path / "seeds.jsonl"
    times = {1: [100, 2, 4, 3], 3: [1, 6, 5, 9]}
    lines = [{"turn": i, "data": "table", "seeds": n, "seconds": s} for n in times for i, s in enumerate(times[n])]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seeds.ratios(records) == "table: one seed 3.0 s, three seeds 6.0 s, ratio 2.00"


def test_the_page_has_the_records_ratios(seeds):
    page = (ROOT / "results/speed/seeds/README.md").read_text()
    for line in seeds.ratios(ROOT / "results/speed/seeds/records.jsonl").splitlines():
        kind, ratio = line.split(":")[0], line.split()[-1]
        assert f"{ratio} for the {kind}" in page


@pytest.mark.nightly
def test_the_command_times_every_case(tmp_path):
    records = tmp_path / "seeds.jsonl"
    small = ["--rows", "40", "--rounds", "1", "--turns", "2", "--device", "cpu", "--out", str(records)]
    command = [sys.executable, str(ROOT / "examples/seeds.py"), *small]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    cases = [(line["turn"], line["data"], line["seeds"]) for line in map(json.loads, records.read_text().splitlines())]
    assert cases == [(turn, kind, n) for turn in (0, 1) for kind in ("table", "folder") for n in (1, 3)]
    assert result.stdout.count("ratio") == 2
