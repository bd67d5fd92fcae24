"""The pages of drills are those of their records, and their paragraphs have lines of bounded length."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

from drills import kills, offline, round_time
from drills.pages import WIDTH, wrapped

RELIABILITY = Path(__file__).resolve().parents[2] / "results/reliability"


@pytest.mark.parametrize("page", sorted(RELIABILITY.glob("*.md")), ids=lambda path: path.name)
def test_no_paragraph_has_a_long_line(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


def test_lists_are_indented_and_tables_and_code_stay():
    text = f"# title\n\n- {'word ' * 60}end\n{'x' * 200}\n| {'cell ' * 60}|\n```\n{'code ' * 60}\n```\n"
    lines = wrapped(text).split("\n")
    assert lines[2].startswith("- word") and lines[3].startswith("  word") and max(map(len, lines[2:5])) <= WIDTH
    assert lines[-6:] == text.split("\n")[-6:]
    assert " ".join(wrapped(text).split()) == " ".join(text.split())


def test_the_stored_pages_are_those_of_their_records():
    stored = {module: module.LINES.with_suffix(".md").read_text(encoding="utf-8") for module in (round_time, kills)}
    assert wrapped(round_time.page(round_time.LINES)) == stored[round_time]
    assert kills.page(kills.LINES) == stored[kills]


def test_the_stored_page_of_the_tests_without_a_network_is_that_of_its_record(tmp_path):
    record = tmp_path / offline.OUT.name
    record.write_bytes(offline.OUT.read_bytes())
    assert offline.page(record).read_text(encoding="utf-8") == offline.OUT.with_suffix(".md").read_text(
        encoding="utf-8"
    )


def test_kills_are_listed_by_algorithm_with_the_code_that_was_killed(tmp_path):
    line = {"killed": "superlink", "in_time": True, "longest_wait_s": 1.0, "timeout_s": 300.0, "whole_s": 9.0}
    line |= {"equal": True, "left": 0}
    lines = [line, line | {"algorithm": "ditto", "code": "0a", "hardware": "a machine"}]
    record = tmp_path / "kills.jsonl"
    record.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    text = kills.page(record)
    assert "| superlink | scaffold | 1 | 1 |" in text and "| superlink | ditto | 1 | 1 |" in text
    assert "code 0a on a machine: 1." in text and "no record of code and machine: 1." in text


def test_every_arm_is_in_every_place_equally_often():
    arms = round_time.ARMS
    turns = [round_time.rotated(arms, turn) for turn in range(2 * len(arms))]
    assert all(sorted(order) == sorted(arms) for order in turns)
    assert [sorted(places) for places in zip(*turns, strict=True)] == [sorted([*arms] * 2)] * len(arms)


def test_the_torch_loop_takes_the_place_of_the_engine_in_a_process_per_message(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    from drills.torch_site import TorchSite
    from fedabml.federation import site
    from fedabml.federation.flower import clientapp

    monkeypatch.setattr(site, "Site", site.Site)  # restored afterwards
    (tmp_path / "client_app.py").write_text(round_time._COLD_TORCH, encoding="utf-8")
    module = runpy.run_path(str(tmp_path / "client_app.py"))
    assert module["app"] is clientapp.app and site.Site is TorchSite


def test_the_outcomes_of_tests_without_a_network_make_a_page(tmp_path):
    output = (
        "..s\n=== slowest durations ===\n1.00s call x\n=== 117 passed, 2 skipped, 90 deselected in 61.02s (0:01:01) ==="
    )
    assert offline.counts(output) == {"passed": 117, "skipped": 2, "deselected": 90}
    assert offline.counts("1 failed, 3 passed in 0.12s\n") == {"failed": 1, "passed": 3}
    assert offline.counts("INTERNALERROR> no tests in 3 files") == {}
    line = {"command": "pytest -m 'flower and not nightly' tests", "counts": offline.counts(output), "seconds": 61.0}
    record = tmp_path / "offline.jsonl"
    record.write_text(json.dumps(line | {"code": "0a", "hardware": "a machine"}) + "\n", encoding="utf-8")
    assert "| 117 passed, 2 skipped, 90 deselected | 61 | 0a | a machine |" in offline.page(record).read_text()


def test_a_suite_without_a_network_is_whole_or_restricted_to_paths():
    marks, places = offline.SUITES["core"]
    assert offline.tests_of("core", []) == ["-m", marks, *places]
    assert offline.tests_of("core", ["-n", "2"]) == ["-m", marks, "-n", "2", *places]
    part = ["-x", "tests/drills/test_pages.py::test_no_paragraph_has_a_long_line"]
    assert offline.tests_of("core", part) == ["-m", marks, *part]
    assert all((offline.ROOT / place).is_dir() for _, places in offline.SUITES.values() for place in places)


@pytest.mark.parametrize("code", [0, 1])
def test_the_suite_of_the_core_is_run_without_a_network_and_recorded(tmp_path, monkeypatch, code):
    ran = []

    def run(*command):
        ran.append(command)
        if "-c" in command:
            return subprocess.CompletedProcess(command, 1, "", "OSError: [Errno 101] Network is unreachable")
        return subprocess.CompletedProcess(command, code, "3 passed in 0.12s\n", "")

    monkeypatch.setattr(offline, "run_offline", run)
    monkeypatch.setattr(offline, "refusal", lambda: "")
    record = tmp_path / "offline.jsonl"
    assert offline.main(["--suite", "core", "--out", str(record), "tests/drills"]) == code
    marks, _ = offline.SUITES["core"]
    assert ran[-1][1:] == ("-m", "pytest", "-m", marks, "tests/drills")
    (line,) = [json.loads(text) for text in record.read_text(encoding="utf-8").splitlines()]
    assert (line["command"], line["counts"]) == (f"pytest -m '{marks}' tests/drills", {"passed": 3})
    assert record.with_suffix(".md").exists() is (code == 0)
