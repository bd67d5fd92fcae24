"""The verdicts of the drill with strangers: the SuperLink's memory after equal floods, and the exit code."""

import pytest

pytest.importorskip("flwr")

from drills import strangers
from drills.strangers import FLOODS, SLACK, later_floods

pytestmark = pytest.mark.flower


def floods(*sizes):
    return [
        {"part": name, "superlink_mb": [before, after]}
        for name, before, after in zip(FLOODS, sizes, sizes[1:], strict=False)
    ]


@pytest.mark.parametrize(
    ("sizes", "bounded"),
    [
        ((150.0, 290.0, 295.0, 297.0, 296.0, 297.0, 296.0, 295.0, 297.0), True),
        ((150.0, 290.0, 200.0, 250.0, 180.0, 280.0, 200.0, 290.0, 240.0), True),  # single floods add 90
        (tuple(150.0 + 40 * number for number in range(9)), False),  # every flood adds as much
        ((150.0, 170.0, 190.0, 210.0, 290.0, 290.0, 290.0, 290.0, 290.0 + 140 / 4), True),
        ((150.0, 170.0, 190.0, 210.0, 290.0, 290.0, 291.0 + 140 / 4, 290.0, 290.0), False),
        ((150.0, *[151.0] * 7, 151.0 + SLACK), True),
        ((150.0, *[151.0] * 7, 152.0 + SLACK), False),
    ],
)
def test_later_floods_may_add_little(sizes, bounded):
    (line,) = later_floods(floods(*sizes))
    assert line["refused"] is bounded
    assert (
        f"{max(sizes[5:]) - max(sizes[1:5]):+.1f} MB from" in line["seen"] and f"{sizes[0]} MB before" in line["seen"]
    )


def test_fewer_floods_give_no_verdict():
    assert later_floods([{"part": "key", "superlink_mb": [1.0, 2.0]}, *floods(150.0, 290.0, 300.0)]) == []


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
