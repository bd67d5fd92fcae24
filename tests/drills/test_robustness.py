"""The drills with false sites and with sites that drop out, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drills import robustness, robustness_page
from drills.robustness_page import key, page, read

FOLDER = Path(__file__).parents[2] / "results/reliability"


def test_the_page_is_that_of_its_lines(tmp_path):
    copy = tmp_path / "robustness.jsonl"
    copy.write_bytes((FOLDER / "robustness.jsonl").read_bytes())
    assert page(copy).read_text(encoding="utf-8") == (FOLDER / "robustness.md").read_text(encoding="utf-8")
    lines = read(copy)
    assert all(line["rounds done"] == line["rounds"] and line["equal"] for line in lines if line["drill"] == "dropouts")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_false_site_spoils_the_mean_and_not_the_median():
    fed = robustness.federation(10, 0)
    cell = {"algorithm": "fedavg", "attack": "flips signs, times 10", "false": 1, "seed": 0, "rounds": 4}
    found = {rule: robustness.attacked(fed, cell | {"rule": rule})["accuracy"] for rule in ("mean", "median")}
    assert found["mean"] < 0.3 < 0.5 < found["median"]
    bound = robustness.attacked(fed, cell | {"rule": "mean with norm bound"})
    assert (bound["rejected false"], bound["rejected honest"]) == (4, 0)
    assert bound["accuracy"] > 0.5


@pytest.mark.slow
def test_sites_that_drop_out_leave_the_bits_of_the_simulator(monkeypatch):
    monkeypatch.setattr(robustness, "LEAST", 6)
    fed = robustness.federation(20, 0)
    line = robustness.dropped(fed, {"share": 0.5, "seed": 1, "rounds": 6})
    assert line["equal"]
    assert line["rounds done"] == 6
    assert line["abandoned"] > 0
    assert line["valid"]["least"] >= 6


def test_lines_are_found_again_and_make_a_page(tmp_path):
    first = {"drill": "malicious", "algorithm": "fedavg", "rule": "median", "attack": "none", "false": 0, "seed": 0}
    first |= {"rounds": robustness_page.ROUNDS, "accuracy": 0.5, "machine": "a machine"}
    second = {"drill": "dropouts", "sites": 100, "share": 0.3, "seed": 0, "rounds": robustness_page.LONG}
    second |= {"rounds done": 100, "abandoned": 3, "valid": {"least": 25, "median": 30.5, "most": 36}, "missing": 9}
    second |= {"waited": 60, "equal": True, "accuracy": 0.9}
    path = tmp_path / "robustness.jsonl"
    attacked = first | {"attack": "flips signs, times 10", "false": 2, "accuracy": 0.25, "rounds done": 9}
    others = (first | {"seed": 1, "accuracy": 0.7}, attacked, attacked | {"seed": 1, "rounds done": 20})
    texts = [json.dumps(line) for line in (first, *others, second, first | {"rounds": 1})]
    path.write_text("\n".join(texts) + '\n{"drill": "cut', encoding="utf-8")
    lines = read(path)
    assert len(lines) == 6
    assert len({key(line) for line in lines}) == 6
    text = page(path).read_text(encoding="utf-8")
    assert "| median | 60.0 ± 14.1 |  | 25.0 ± 0.0 (ended after 9, 20 rounds) |" in text
    assert "| median |  | 35.0 ± 14.1 |" in text
    assert "| 30% | 0 | 100 of 100 | 3 | 25 / 30.5 / 36 | 9 | 60 | 90.0 | yes |" in text
    assert "- false sites: code not recorded on a machine, 4 lines\n" in text
    assert "- sites that drop out: code not recorded on not recorded, 1 line\n" in text


def test_the_page_names_the_code_of_every_part(tmp_path):
    line = {"drill": "malicious", "algorithm": "fedavg", "rule": "mean", "attack": "none", "false": 0, "seed": 0}
    line |= {"rounds": robustness_page.ROUNDS, "accuracy": 0.5, "machine": "a machine", "code": "0a"}
    path = tmp_path / "robustness.jsonl"
    lines = [line, line | {"seed": 1}, line | {"seed": 2, "code": "0b"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = page(path).read_text(encoding="utf-8")
    assert "- false sites: code 0a on a machine, 2 lines\n- false sites: code 0b on a machine, 1 line\n" in text
