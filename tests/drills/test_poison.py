"""The record of poisoned replies: verdicts from the events of rounds, and the page of a record."""

import json
from pathlib import Path

from drills import poison
from drills.poisons import HONEST
from fedabml.runs.provenance import code

RECORD = Path(__file__).resolve().parents[2] / poison.OUT


def event(number, reason="", *, valid=("a", "b"), missing=(), **more):
    rejected = [{"site": "c", "reason": reason, **more}] if reason else []
    common = {"attempt": 1, "seconds": {"wait": 1.0, "merge": 0.5}}
    return {"round": number, "valid": list(valid), "missing": list(missing), "rejected": rejected, **common}


def sent(number, kind, seen=""):
    return {"kind": kind, "round": number, "attempt": 1, "nonce": f"{number:032}", "seen": seen}


def verdict(events, *lines):
    return poison.verdicts(events, list(lines))


def test_a_poison_must_be_rejected_for_its_own_reason():
    good = event(3, "mean holds values that are not finite")
    (line,) = verdict([good], sent(3, "NaN"))
    assert (line["kind"], line["round"], line["rejected"], line["times"], line["seconds"]) == ("NaN", 3, True, 1, 1.5)
    assert "not finite" in line["reason"]
    for bad in (event(3, "its loss is not a finite number"), event(3), event(3, valid=("a", "b", "c"))):
        assert not verdict([bad], sent(3, "NaN"))[0]["rejected"]
    assert not verdict([event(3, "mean holds values that are not finite", valid="abc")], sent(3, "NaN"))[0]["rejected"]


def test_rejections_of_other_sites_do_not_count():
    other = event(3, "mean holds values that are not finite")
    other["rejected"][0]["site"] = "a"
    assert not verdict([other], sent(3, "NaN"))[0]["rejected"]


def test_an_order_that_came_again_is_one_line_with_all_rejections():
    (line,) = verdict([event(3, "the code is wrong", times=4)], *[sent(3, "another's code")] * 4)
    assert (line["times"], line["rejected"]) == (4, True)


def test_a_late_reply_is_missing_and_may_be_rejected_in_a_later_round():
    events = [event(3, missing=["c"]), event(4, "late: it answers round 3, attempt 1", valid="abc")]
    (line,) = verdict(events, sent(3, "late"), sent(4, HONEST))
    assert line["rejected"] and "late: it answers round 3" in line["reason"] and "time-out" in line["reason"]
    assert not verdict([event(3, valid="abc")], sent(3, "late"))[0]["rejected"]


def test_a_reply_that_is_sent_twice_must_count():
    assert verdict([event(3, valid="abc")], sent(3, "twice", "status 200"))[0]["rejected"]
    assert not verdict([event(3)], sent(3, "twice", "status 200"))[0]["rejected"]


def test_a_round_that_has_not_ended_has_no_line():
    assert verdict([event(3, "mean holds values that are not finite")], sent(4, "NaN")) == []


def test_the_page_shows_what_was_not_rejected(tmp_path):
    lines = verdict([event(3, "mean holds values that are not finite"), event(4)], sent(3, "NaN"), sent(4, "Inf"))
    lines[0]["proxy"] = "413: 2"
    lines = [each | {"algorithm": "fedabml"} for each in lines]
    summary = {"summary": True, "algorithm": "fedabml", "code": "0", "hardware": "a machine"}
    summary |= {"rounds": 5, "finite": True, "theta_equal": False, "incomplete": 0, "repeats": 0, "restarts": {"x": 2}}
    summary |= {"coordinators": 1, "left_processes": 0, "counted_again": True, "timeout_s": 20.0}
    record = tmp_path / "poison.jsonl"
    record.write_text("".join(json.dumps(each) + "\n" for each in [*lines, summary]), encoding="utf-8")
    text = poison.page(record).read_text(encoding="utf-8")
    assert "| NaN | mean holds values that are not finite (proxy: 413: 2) | 1 | 1.5 | rejected |" in text
    assert "| Inf |  | 0 | 1.5 | **not rejected** |" in text
    assert "**1 of 2**" in text and "x 2" in text
    text = " ".join(text.split())
    assert "is finite: **yes**" in text and "counted: **no**" in text


def test_an_interrupted_drill_goes_on_with_what_this_code_has_not_recorded():
    lines = [{"algorithm": "ditto", "kind": kind, "code": code()} for kind in ("empty", "late")]
    lines += [{"algorithm": "ditto", "summary": True, "code": code()}]
    lines += [{"algorithm": "fedpop", "kind": "twice", "code": code()}, {"algorithm": "ditto", "kind": "twice"}]
    assert poison.to_do(lines, "ditto", ("empty", "twice", "late", "loss NaN")) == ("twice", "loss NaN")
    assert poison.to_do([], "ditto", ("empty",)) == ("empty",)


def test_federations_with_one_algorithm_share_a_section(tmp_path):
    (line,) = verdict([event(3, "it lacks 'mean'")], sent(3, "empty"))
    summary = {"summary": True, "hardware": "a machine", "rounds": 5, "finite": True, "incomplete": 1, "repeats": 0}
    summary |= {"coordinators": 1, "left_processes": 0, "counted_again": True, "timeout_s": 20.0, "restarts": {"x": 2}}
    parts = [summary | {"theta_equal": True, "code": "0"}, summary | {"theta_equal": False, "code": "1"}]
    lines = [each | {"algorithm": "ditto"} for each in (line, parts[0], line, parts[1])]
    record = tmp_path / "poison.jsonl"
    record.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    text = " ".join(poison.page(record).read_text(encoding="utf-8").split())
    assert text.count("## ditto") == 1 and "Federations: 2, with 10 rounds" in text and "x 4" in text
    assert "counted: **no**" in text and "did not count: 2." in text and "Code: 0, 1." in text


def test_the_stored_page_is_that_of_the_record(tmp_path):
    copy = tmp_path / RECORD.name
    copy.write_bytes(RECORD.read_bytes())
    assert poison.page(copy).read_text(encoding="utf-8") == RECORD.with_suffix(".md").read_text(encoding="utf-8")
