"""The load on a service: its page says what its records hold, and a short load loses nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drills.serve import page

FOLDER = Path(__file__).parents[2] / "results/reliability"


def test_the_page_is_that_of_its_records():
    records = [json.loads(line) for line in (FOLDER / "serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (FOLDER / "serving.md").read_text(encoding="utf-8") == page(records)
    assert all(not r["lost"] and not r["wrong"] and set(r["statuses"]) <= {"200", "422"} for r in records)


@pytest.mark.nightly
def test_fifty_clients_for_a_minute(tmp_path):
    """No 5xx, no lost or wrong answer, and the memory of the service does not grow with requests."""
    words = [sys.executable, "-m", "drills.serve", "--seconds", "60", "--out", tmp_path / "serving.jsonl"]
    subprocess.run(words, cwd=FOLDER.parents[1], check=True, capture_output=True)
    record = json.loads((tmp_path / "serving.jsonl").read_text())
    assert len(record["answers_by_posterior"]) == 2
    assert record["memory_most"] < 1.25 * record["memory_first"]
