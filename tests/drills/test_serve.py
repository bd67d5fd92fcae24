"""The load on a service: its page says what its records hold, and a short load loses nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drills.serve_page import page, problems

FOLDER = Path(__file__).parents[2] / "results/reliability"


def test_the_page_is_that_of_its_records():
    records = [json.loads(line) for line in (FOLDER / "serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (FOLDER / "serving.md").read_text(encoding="utf-8") == page(records)
    assert [problems(record) for record in records] == [[]] * len(records)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lost": 2}, "2 requests were lost"),
        ({"wrong": 3}, "3 answers were wrong"),
        ({"statuses": {"200": 9, "503": 4}}, "4 answers had a status 5xx"),
        ({"answers_by_posterior": [7]}, "only one of the two posteriors"),
        ({"memory_most": 200 << 20, "memory_first": 100 << 20}, "from 100 to 200 MiB"),
        ({"arm": "wrong", "answers_after": 500}, "answered with 500"),
    ],
)
def test_a_record_that_breaks_a_promise_is_named(changes, words):
    (problem,) = problems(load_record() | changes)
    assert words in problem


def test_the_page_does_not_claim_a_swap_that_the_record_lacks():
    claim = "Both posteriors answered requests, and no request was lost"
    assert claim in page([load_record()])
    for changes in ({"answers_by_posterior": [7]}, {"lost": 1}):
        assert claim not in page([load_record(), load_record() | changes])


def load_record():
    """The stored record of the load."""
    return json.loads((FOLDER / "serving.jsonl").read_text(encoding="utf-8").splitlines()[0])


@pytest.mark.nightly
def test_fifty_clients_for_a_minute(tmp_path):
    """No 5xx, no lost or wrong answer, and the memory of the service does not grow with requests."""
    words = [sys.executable, "-m", "drills.serve", "--arms", "load", "--out", tmp_path / "serving.jsonl"]
    subprocess.run(words, cwd=FOLDER.parents[1], check=True, capture_output=True)
    record = json.loads((tmp_path / "serving.jsonl").read_text())
    assert problems(record) == []


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
    assert problems(wrong) == problems(random) == []
    text = (tmp_path / "serving.md").read_text(encoding="utf-8")
    assert "| wrong, to /predict |" in text and "| random, to every page | 600 |" in text
