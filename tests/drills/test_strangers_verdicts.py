"""The verdicts of the drill with strangers: the SuperLink's memory after equal floods, and the exit code."""

from statistics import median

import pytest

pytest.importorskip("flwr")

from drills import attacks, strangers
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
        ((290.0, 295.0, 297.0, 296.0, 297.0, 296.0, 295.0, 297.0), True),
        ((290.0, 200.0, 250.0, 180.0, 380.0, 180.0, 270.0, 190.0), True),  # single floods add up to 200
        ((190.0, 230.0, 270.0, 310.0, 350.0, 390.0, 430.0, 470.0), False),  # every flood adds as much
        ((155.0, 160.0, 165.0, 170.0, 175.0, 180.0, 185.0, 190.0), False),
        ((153.0, 156.0, 159.0, 162.0, 165.0, 168.0, 171.0, 174.0), True),  # less than 4 MB per flood
        ((*[290.0] * 4, *[290.0 + 140 / 4] * 4), True),
        ((*[290.0] * 4, *[291.0 + 140 / 4] * 4), False),
        ((*[151.0] * 4, *[151.0 + SLACK] * 4), True),
        ((*[151.0] * 4, *[152.0 + SLACK] * 4), False),
    ],
)
def test_later_floods_may_add_little(sizes, bounded):
    (line,) = later_floods(floods(150.0, *sizes))
    assert line["refused"] is bounded and "150.0 MB before" in line["seen"]
    assert f"{median(sizes[4:]) - median(sizes[:4]):+.1f} MB from" in line["seen"]


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


def test_equal_rejections_of_a_round_are_all_counted(monkeypatch, tmp_path):
    reason = "The reply was not written by the site that it names: its code is wrong."
    rejected = [{"site": "a", "reason": reason, "times": 4}, {"site": "b", "reason": reason}]
    events = [{"event": "round", "rejected": [*rejected, {"site": "c", "reason": "late", "times": 9}]}]
    monkeypatch.setattr(attacks, "listed", lambda folder, *kinds: events)
    assert attacks._reasons(tmp_path, "code is wrong") == 5


def test_a_record_that_counted_equal_rejections_once_is_corrected_on_its_page():
    seen = "80 sent, 4 stored by the SuperLink, 1 rejected by the coordinator: the code is wrong"
    rejected = [{"site": "a", "reason": "its code is wrong", "times": 4}, {"site": "a", "reason": "late", "times": 2}]
    rounds = [{"round": 24, "rejected": rejected}, {"round": 25, "rejected": None}]
    assert strangers._seen({"seen": seen, "incomplete_rounds": rounds}) == seen.replace("1 rejected", "4 rejected")
    assert strangers._seen({"seen": seen, "incomplete_rounds": []}) == seen
    assert strangers._seen({"seen": "status 400"}) == "status 400"
