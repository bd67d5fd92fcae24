"""Lost and refused replies, repeated rounds and killed coordinators: kept states stay in step with the server."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedabml.errors import TrainingError
from fedabml.federation import coordinator as leading
from fedabml.federation import rewind
from fedabml.federation.messages import Arrival
from tests.federation.in_process import (
    Wire,
    assert_equal,
    assert_simulated,
    lead,
    rounds_of,
    set_up,
    simulation,
)
from tests.tiers import nightly_but

KEEPERS = nightly_but({"scaffold"}, ("scaffold", "ditto", "fedpop"))
pytestmark = pytest.mark.slow


class Killed(BaseException):
    """Stands for kill -9: nothing of the coordinator runs after it."""


def numbers(names):
    return [int(name.removeprefix("site-")) for name in names]


def assert_in_step(server, sites, coordinator, events):
    """Compare with the simulator whose rounds have the sites that counted, and no others."""
    lines = rounds_of(events)
    participants = [numbers(line["valid"]) for line in lines]
    sim = simulation(server, coordinator.card, participants=participants)
    assert_simulated(coordinator, sites, sim)
    return participants


def losing(wanted):
    """Return a wire's `tamper` that loses the replies of these (round, attempt, site)."""

    def tamper(order, reply):
        return [] if (order.round, order.attempt, order.site) in wanted else [Arrival(order.site, reply)]

    return tamper


@pytest.mark.parametrize("algorithm", KEEPERS)
def test_a_lost_reply_does_not_count_and_a_later_one_starts_from_what_counted(tmp_path, algorithm):
    server, sites = set_up(tmp_path, algorithm=algorithm, rounds=4, participation=1.0, rest_rounds=0)
    wire = Wire(server, sites, losing({(2, 1, "site-1"), (3, 1, "site-1"), (1, 1, "site-3")}))
    coordinator, events = lead(server, wire)
    participants = assert_in_step(server, sites, coordinator, events)
    assert participants == [[0, 1, 2, 4], [0, 2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [line["missing"] for line in rounds_of(events)] == [["site-3"], ["site-1"], ["site-1"], []]
    last = [order for order in wire.sent if order.site == "site-1" and order.kind == "train"][-1]
    assert (last.round, last.counted) == (4, 1)


@pytest.mark.parametrize("algorithm", KEEPERS)
def test_a_refused_reply_leaves_the_kept_state_where_it_was(tmp_path, algorithm):
    server, sites = set_up(tmp_path, algorithm=algorithm, participation=1.0)

    def tamper(order, reply):
        if (order.round, order.site) == (2, "site-1"):
            reply = dataclasses.replace(reply, tensors={k: v * torch.nan for k, v in reply.tensors.items()})
        return [Arrival(order.site, reply)]

    coordinator, events = lead(server, Wire(server, sites, tamper))
    assert assert_in_step(server, sites, coordinator, events)[1] == [0, 2, 3, 4]


@pytest.mark.parametrize("algorithm", KEEPERS)
def test_a_repeated_round_starts_from_the_state_before_it(tmp_path, algorithm):
    server, sites = set_up(tmp_path, algorithm=algorithm, min_replies=3, rest_rounds=0)
    lost = {(2, attempt, f"site-{i}") for attempt in (1, 2) for i in range(5)}
    coordinator, events = lead(server, Wire(server, sites, losing(lost)))
    assert [(line["round"], line["attempt"]) for line in rounds_of(events, "repeat")] == [(2, 1), (2, 2)]
    assert [line["attempt"] for line in rounds_of(events)] == [1, 3, 1]
    assert_in_step(server, sites, coordinator, events)


@pytest.mark.parametrize("moment", ["before the merge", "before the save", "after the save"])
@pytest.mark.parametrize("algorithm", KEEPERS)
def test_a_killed_coordinator_is_followed_by_another_one(tmp_path, monkeypatch, algorithm, moment):
    server, sites = set_up(tmp_path, algorithm=algorithm)
    save, killed, seen = leading.server_state.save, [], []

    def kill_in_round_2(folder, saved):
        if saved.state.round != 2 or killed:
            return save(folder, saved)
        killed.append(True)
        if moment == "after the save":
            save(folder, saved)
        raise Killed

    wire = Wire(server, sites)
    if moment == "before the merge":
        receive = wire.receive

        def kill_while_waiting(seconds):
            if any(order.round == 2 and order.kind == "train" for order in wire.sent) and not killed:
                killed.append(True)
                raise Killed
            return receive(seconds)

        wire.receive = kill_while_waiting
    else:
        monkeypatch.setattr(leading.server_state, "save", kill_in_round_2)
    first = leading.Coordinator(server, wire, wire.clock, seen.append)
    with pytest.raises(Killed):
        first.run()
    assert killed
    coordinator, events = lead(server, wire)
    sim = simulation(server, coordinator.card)
    assert_simulated(coordinator, sites, sim)
    done = [line["round"] for line in rounds_of(seen) + rounds_of(events)]
    assert done == ([1, 3] if moment == "after the save" else [1, 2, 3])


def test_replies_to_a_killed_coordinator_do_not_count(tmp_path):
    server, sites = set_up(tmp_path, algorithm="scaffold", participation=1.0)
    wire = Wire(server, sites)
    receive, state = wire.receive, {}

    def kill_while_waiting(seconds):
        if "kill" not in state and any(order.round == 2 and order.kind == "train" for order in wire.sent):
            state["kill"] = len(wire.queue)
            raise Killed
        return receive(seconds)

    wire.receive = kill_while_waiting
    with pytest.raises(Killed):
        leading.Coordinator(server, wire, wire.clock).run()
    assert state["kill"] == 5
    coordinator, events = lead(server, wire)
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)
    reasons = [entry["reason"] for line in rounds_of(events) for entry in line["rejected"]]
    assert reasons == ["its nonce was never sent"] * 5


def test_a_server_whose_newest_state_is_damaged_goes_on_from_the_one_before(tmp_path):
    server, sites = set_up(tmp_path, algorithm="scaffold", participation=1.0, rounds=4)
    wire = Wire(server, sites)
    events = []

    def stop_after_3(event):
        events.append(event)
        if event["event"] == "round" and event["round"] == 3:
            server.stop_file.touch()

    leading.Coordinator(server, wire, wire.clock, stop_after_3).run()
    newest = server.state / "server-00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3] + b"xxx")
    coordinator, events = lead(server, wire)
    assert [line["round"] for line in rounds_of(events)] == [3, 4]
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)


def losing_kept_state(sites):
    """Return what a wire does to replies: after round 1, site-2 loses its kept state."""

    def lose(order, reply):
        if (order.round, order.site) == (1, "site-2"):
            for path in sites["site-2"].state.glob("kept-*"):
                path.unlink()
        return [Arrival(order.site, reply)]

    return lose


def test_a_site_that_lost_its_kept_state_begins_again(tmp_path):
    server, sites = set_up(tmp_path, algorithm="scaffold", participation=1.0, rounds=3)
    wire = Wire(server, sites, losing_kept_state(sites))
    coordinator, events = lead(server, wire)
    lines = rounds_of(events)
    assert "site-2" not in lines[1]["valid"]
    assert "site-2" in lines[2]["valid"]
    assert "no longer has what it kept" in lines[1]["rejected"][0]["reason"]
    last = [order for order in wire.sent if order.site == "site-2" and order.kind == "train"][-1]
    assert (last.round, last.counted) == (3, 0)
    assert coordinator.saved.counted["site-2"] == 3


def test_a_round_that_a_lost_state_has_spoilt_is_repeated_at_once(tmp_path):
    server, sites = set_up(tmp_path, algorithm="scaffold", participation=1.0, rounds=2, min_replies=5)
    wire = Wire(server, sites, losing_kept_state(sites))
    _, events = lead(server, wire)
    assert [line["round"] for line in rounds_of(events, "repeat")] == [2]
    assert len(rounds_of(events)[1]["valid"]) == 5
    assert wire.now < 5  # the pause before a repeated attempt lasts up to 20 s


@pytest.mark.parametrize("algorithm", KEEPERS)
def test_after_a_poison_a_federation_goes_back_to_the_state_before_it(tmp_path, algorithm):
    settings = {"algorithm": algorithm, "participation": 1.0, "rounds": 13, "epochs": 1, "rest_rounds": 0}
    server, sites = set_up(tmp_path, **settings, norm_factor=0.0, attempts=1, min_replies=5)

    def tamper(order, reply):
        if (order.round, order.site) == (11, "site-2"):
            reply = dataclasses.replace(reply, tensors={k: v * 1e8 for k, v in reply.tensors.items()})
        return [] if order.round == 13 else [Arrival(order.site, reply)]

    with pytest.raises(TrainingError, match=r"Round 1[23] was given up"):
        lead(server, Wire(server, sites, tamper))
    rewind.go_back(server, 8)
    coordinator, events = lead(server, Wire(server, sites))
    assert [line["round"] for line in rounds_of(events)] == [9, 10, 11, 12, 13]
    assert not any(line["rejected"] for line in rounds_of(events))  # no site has lost what it kept
    sim = simulation(server, coordinator.card)
    assert_simulated(coordinator, sites, sim)
