"""The verdicts of the drill with strangers: the SuperLink's memory after equal floods, and the exit code."""

import pytest

pytest.importorskip("flwr")

from drills import strangers
from drills.strangers import FLOODS, SLACK, last_flood

pytestmark = pytest.mark.flower


def floods(*sizes):
    return [
        {"part": name, "superlink_mb": [before, after]}
        for name, before, after in zip(FLOODS, sizes, sizes[1:], strict=False)
    ]


@pytest.mark.parametrize(
    ("sizes", "bounded"),
    [
        ((150.0, 290.0, 295.0, 297.0), True),
        ((150.0, 290.0, 430.0, 570.0), False),
        ((150.0, 290.0, 430.0, 430.0 + 140 / 4), True),
        ((150.0, 290.0, 430.0, 431.0 + 140 / 4), False),
        ((150.0, 151.0, 151.0, 151.0 + SLACK), True),
        ((150.0, 151.0, 151.0, 152.0 + SLACK), False),
        ((150.0, 290.0, 200.0, 200.0), True),
    ],
)
def test_the_last_flood_may_add_little(sizes, bounded):
    (line,) = last_flood(floods(*sizes))
    assert line["refused"] is bounded and f", {sizes[3] - sizes[2]:.1f} MB" in line["seen"]


def test_fewer_floods_give_no_verdict():
    assert last_flood([{"part": "key", "superlink_mb": [1.0, 2.0]}, *floods(150.0, 290.0, 300.0)]) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"refused_all": False},
        {"theta_equal": False},
        {"twin_equal": False},
        {"restarts": {"superlink": 1}},
        {"left_processes": 2},
    ],
)
def test_a_broken_promise_is_the_exit_code(monkeypatch, tmp_path, broken):
    kept = {"refused_all": True, "theta_equal": True, "twin_equal": True, "restarts": {}, "left_processes": 0}
    out = ["--out", str(tmp_path / "strangers.jsonl")]
    monkeypatch.setattr(strangers, "drill", lambda *arguments: [kept])
    assert strangers.main(out) == 0
    monkeypatch.setattr(strangers, "drill", lambda *arguments: [kept | broken])
    assert strangers.main(out) == 1
