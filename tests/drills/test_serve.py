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
    assert all(not r["wrong"] and not r.get("lost") and "5" not in {s[0] for s in r["statuses"]} for r in records)


@pytest.mark.nightly
def test_fifty_clients_for_a_minute(tmp_path):
    """No 5xx, no lost or wrong answer, and the memory of the service does not grow with requests."""
    words = [sys.executable, "-m", "drills.serve", "--arms", "load", "--out", tmp_path / "serving.jsonl"]
    subprocess.run(words, cwd=FOLDER.parents[1], check=True, capture_output=True)
    record = json.loads((tmp_path / "serving.jsonl").read_text())
    assert len(record["answers_by_posterior"]) == 2
    assert record["memory_most"] < 1.25 * record["memory_first"]


@pytest.mark.nightly
@pytest.mark.slow
def test_wrong_and_random_requests_leave_the_memory_as_it_is(tmp_path):
    words = [sys.executable, "-m", "drills.serve", "--arms", "wrong,random", "--turns", "2", "--requests", "600"]
    subprocess.run(
        [*words, "--out", tmp_path / "serving.jsonl"], cwd=FOLDER.parents[1], check=True, capture_output=True
    )
    wrong, random = [json.loads(line) for line in (tmp_path / "serving.jsonl").read_text().splitlines()]
    assert wrong["requests"] == 2 * wrong["cases"] and wrong["answers_after"] == 200
    assert random["requests"] == 600 and {"/predict", "/reload", "/metrics", "no page"} <= set(random["pages"])
    for record in (wrong, random):
        assert record["memory_most"] < 1.25 * record["memory_first"]
    text = (tmp_path / "serving.md").read_text(encoding="utf-8")
    assert "| wrong, to /predict |" in text and "| random, to every page | 600 |" in text
