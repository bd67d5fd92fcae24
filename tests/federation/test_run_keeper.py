"""The keeper of the run, with a small SuperLink in place of Flower's: what it submits, and when it stops."""

import itertools
import json

import pytest

from fedabml.errors import InputError
from fedabml.federation.folders import Member
from fedabml.federation.run_keeper import MOST_FAILURES, REGISTERED_FILE, RunKeeper
from fedabml.federation.status import read, run_state
from fedabml.federation.status_page import facts
from tests.federation.test_status import folder as folder
from tests.federation.test_status import key, round_event, write_events


class Link:
    """Runs by number and their states; `available` is whether the SuperLink answers."""

    def __init__(self):
        self.states, self.registered, self.available = {}, [], True

    def register_sites(self, folder):
        self._answer()
        self.registered.append([site.name for site in folder.members()])

    def app_hash(self, folder):
        return "a" * 64

    def submit_run(self, folder):
        self._answer()
        self.states[len(self.states) + 1] = "running"
        return len(self.states)

    def run_status(self, folder, run_id):
        self._answer()
        return self.states[run_id]

    def _answer(self):
        if not self.available:
            raise InputError("no SuperLink")


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def clock():
    """A clock that advances by more than any wait at every look."""
    now = iter(range(0, 10**9, 100))
    return lambda: next(now)


def test_sites_are_registered_before_the_run_and_when_their_list_changes(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    for _ in range(3):
        keeper.step()
    assert link.registered == [["a", "b", "c"]] and link.states == {1: "running"}
    assert (folder.run / REGISTERED_FILE).exists()
    folder.save_sites([*folder.sites(), Member("e", 9, key(9))])
    keeper.step()
    assert link.registered[-1] == ["a", "b", "c", "e"] and len(link.states) == 1


def test_the_status_shows_the_apps_hash(folder, link, clock):
    assert "app" not in dict(facts(read(folder)))
    RunKeeper(folder, link, clock).step()
    assert dict(facts(read(folder)))["app"] == "a" * 64


def test_a_run_that_fails_is_followed_by_another(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    keeper.step()
    for number in range(1, 3 * MOST_FAILURES):  # every run finishes a round, so that they may go on for ever
        write_events(folder, *(round_event(n) for n in range(1, number + 1)))
        link.states[number] = "finished:failed"
        keeper.step()
        assert run_state(folder)["failures"] == 0
    assert len(link.states) == 3 * MOST_FAILURES and keeper.run.state == "running"


def test_runs_that_finish_no_round_are_not_repeated_for_ever(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    for _ in range(3 * MOST_FAILURES):
        keeper.step()
        link.states = dict.fromkeys(link.states, "finished:failed")
    assert len(link.states) == MOST_FAILURES
    assert run_state(folder)["state"] == "failed" and "executor.log" in run_state(folder)["message"]


def test_quick_failures_wait_longer_and_longer(folder, link):
    now = [0.0]
    keeper = RunKeeper(folder, link, lambda: now[0])
    submitted = []
    while len(submitted) < 4:
        before = len(link.states)
        keeper.step()
        if len(link.states) > before:
            submitted.append(now[0])
            link.states = dict.fromkeys(link.states, "finished:failed")
        now[0] += 0.5
    waits = [b - a for a, b in itertools.pairwise(submitted)]
    assert waits == sorted(waits) and waits[-1] >= 7


def test_a_coordinator_that_gave_up_is_left_alone(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    keeper.step()
    write_events(folder, round_event(1), {"event": "gave_up", "reason": "round 2: one reply"})
    link.states[1] = "finished:failed"
    for _ in range(5):
        keeper.step()
    assert len(link.states) == 1
    assert run_state(folder)["state"] == "gave up" and run_state(folder)["message"] == "round 2: one reply"


@pytest.mark.parametrize("number", [7, 2**64 - 1], ids=["small", "64 bits"])
def test_a_keeper_that_was_killed_goes_on_with_the_same_run(folder, link, clock, monkeypatch, number):
    """Flower draws the numbers of runs from all of 64 bits; numbers in files have 63."""
    monkeypatch.setattr(link, "submit_run", lambda folder: link.states.update({number: "running"}) or number)
    RunKeeper(folder, link, clock).step()
    keeper = RunKeeper(folder, link, clock)
    keeper.step()
    assert link.states == {number: "running"} and keeper.run.id == number and keeper.run.submitted == 1
    assert run_state(folder)["state"] == "running"


def test_errors_of_calls_change_nothing(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    link.available = False
    with pytest.raises(InputError, match="no SuperLink"):
        keeper.step()
    assert run_state(folder) == {} and not (folder.run / REGISTERED_FILE).exists()
    link.available = True
    keeper.step()
    link.available = False
    with pytest.raises(InputError, match="no SuperLink"):
        keeper.step()
    link.available = True
    keeper.step()
    assert link.states == {1: "running"}


def test_nothing_is_submitted_once_the_operator_stops(folder, link, clock):
    folder.stop_file.touch()
    RunKeeper(folder, link, clock).step()
    assert link.states == {} and json.dumps(run_state(folder)) == "{}"


def test_a_last_round_whose_event_a_kill_prevented_is_done(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    keeper.step()
    write_events(folder, round_event(9), {"event": "start"}, {"event": "card", "round": 10})
    link.states[1] = "finished:completed"
    keeper.step()
    assert run_state(folder)["state"] == "finished"


def test_a_federation_that_is_done_needs_no_further_run(folder, link, clock):
    keeper = RunKeeper(folder, link, clock)
    keeper.step()
    write_events(folder, *(round_event(n) for n in range(1, 11)))
    link.states[1] = "finished:completed"
    keeper.step()
    keeper.step()
    assert len(link.states) == 1 and run_state(folder)["state"] == "finished"
