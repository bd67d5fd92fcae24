"""The file of events is bounded, and nothing that the status counts is lost when it begins anew."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest

from fedabml.federation import events, tally
from fedabml.federation.events import Events, read_events, read_tally
from fedabml.federation.status import read
from fedabml.federation.status_page import page, rejected_rows
from tests.federation.test_status import EVIL, round_event
from tests.federation.test_status import folder as folder


def history(rounds):
    """Events of a long federation with every kind of trouble."""
    draw = random.Random(1)
    yield {"event": "start"}
    yield {"event": "waiting", "sites": ["c"]}
    for number in range(1, rounds + 1):
        valid = draw.sample("abc", draw.randint(1, 3))
        rejected = [{"site": draw.choice(["a", "d", EVIL]), "reason": draw.choice(["not finite", "late", EVIL])}]
        more = {"valid": valid, "missing": draw.sample("abc", 1), "rejected": rejected * draw.randint(0, 2)}
        more |= {
            "sites": ["a", "b", "c"],
            "resting": draw.sample("abc", 1),
            "losses": dict.fromkeys(valid, draw.random()),
        }
        if draw.random() < 0.2:
            yield {**round_event(number, **more), "event": "repeat"}
        if draw.random() < 0.1:
            yield {"event": "gave_up", "round": number, "reason": f"round {number}"}
            yield {"event": "start"}
        if draw.random() < 0.1:
            yield {"event": "prior", "round": number, "sites": ["b"], "missing": ["a"], "rejected": []}
        scores = {"scores": {"accuracy": draw.random()}} if number % 7 == 0 else {}
        yield round_event(number, loss=draw.random(), **more, **scores)
    yield {"event": "error", "error": "the last word"}


def write(folder, lines):
    writer = Events(folder)
    for line in lines:
        facts = {key: value for key, value in line.items() if key not in ("event", "time")}
        writer.write(line["event"], **facts)


def shown(folder):
    return {key: value for key, value in read(folder).as_json().items() if key != "time"}


def test_a_bounded_file_tells_what_an_unbounded_one_does(folder, monkeypatch):
    write(folder, history(150))
    everything, progress = shown(folder), read_tally(folder)
    assert not folder.old_events_file.exists()
    size = folder.events_file.stat().st_size
    folder.events_file.unlink()
    monkeypatch.setattr(events, "MOST_BYTES", 8_000)
    write(folder, history(150))
    assert shown(folder) == everything and read_tally(folder) == progress
    assert everything["rounds_done"] == 150 and len(everything["losses"]) == 150 and everything["runs"] > 5
    longest = 12_000  # bytes of a tally and of an event
    for path in (folder.events_file, folder.old_events_file):
        assert 0 < path.stat().st_size < 8_000 + longest < size / 3
    assert {path.name for path in folder.state.iterdir()} == {"events.jsonl", "events.old.jsonl"}


def test_the_old_file_holds_the_events_just_before(folder, monkeypatch):
    monkeypatch.setattr(events, "MOST_BYTES", 3_000)
    monkeypatch.setattr(events, "time", SimpleNamespace(time=itertools.count().__next__))
    write(folder, history(40))
    old = [json.loads(line) for line in folder.old_events_file.read_text().splitlines()]
    first, *new = list(read_events(folder))
    assert first["event"] == old[0]["event"] == "tally"
    assert old[-1]["time"] < first["time"] < new[0]["time"]
    rounds = [each["round"] for each in old + new if each["event"] == "round"]
    assert rounds == list(range(rounds[0], 41)) and 3 <= len(rounds) < 20


def test_a_kill_before_the_new_file_took_its_name_loses_nothing(folder, monkeypatch):
    write(folder, history(5))
    before = shown(folder)
    folder.old_events_file.hardlink_to(folder.events_file)
    monkeypatch.setattr(events, "MOST_BYTES", 1_000)
    write(folder, [round_event(6, rejected=[])])
    after = shown(folder)
    assert after["rounds_done"] == 6 and after["bytes_down"] == before["bytes_down"] + 100
    assert len(folder.events_file.read_text().splitlines()) == 2


def test_losses_are_thinned_and_the_newest_stays(folder, monkeypatch):
    monkeypatch.setattr(tally, "MOST_LOSSES", 10)
    write(folder, (round_event(number) for number in range(1, 101)))
    rounds = [number for number, _ in read(folder).losses]
    assert len(rounds) <= 10 and rounds[-1] == 100 and rounds == sorted(set(rounds))


@pytest.mark.parametrize("key", ["sites", "losses", "scores", "recent", "rejected", "reasons", "runs", "problem"])
@pytest.mark.parametrize("value", [None, 7, "x", [1], {"a": 1}, [["x", "y"]], [{"site": 3}], {"a": {"note": [EVIL]}}])
def test_a_damaged_tally_does_not_break_the_status(folder, key, value):
    facts = read_tally(folder).to_json() | {key: value}
    folder.events_file.write_text(json.dumps({"event": "tally", **facts}) + "\n")
    write(folder, [round_event(2)])
    status = read(folder)
    assert status.rounds_done == 2
    json.dumps(status.as_json(), allow_nan=False)
    assert EVIL not in page(status) and all(text.isprintable() for row in rejected_rows(status) for text in row)


def test_a_file_system_without_hard_links_keeps_the_old_file_as_a_copy(folder, monkeypatch):
    def refuse(source, target):
        raise OSError("no hard links")

    write(folder, history(40))
    everything = shown(folder)
    folder.events_file.unlink()
    monkeypatch.setattr(events, "MOST_BYTES", 3_000)
    monkeypatch.setattr(events.os, "link", refuse)
    write(folder, history(40))
    assert shown(folder) == everything and folder.old_events_file.read_bytes().endswith(b"\n")


def test_a_rejection_that_was_repeated_counts_as_often(folder):
    rejected = [{"site": "a", "reason": "late", "times": 3}, {"site": "a", "reason": "wrong shape"}]
    write(folder, [round_event(1, rejected=rejected)])
    tally = read_tally(folder)
    assert tally.reasons == {"late": 3, "wrong shape": 1} and tally.sites["a"].rejected == 4
