"""How a coordinator leads: draws, waits, rests, over-selection, giving up, joining, stopping and the prior."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

import fedabml
from fedabml.engine.server import draw_clients, theta
from fedabml.errors import InputError, TrainingError
from fedabml.federation import coordinator as leading
from fedabml.federation import status, status_page
from fedabml.federation.coordinator import Coordinator
from fedabml.federation.folders import Member, SiteFolder
from fedabml.federation.messages import Arrival, TransportClosed
from fedabml.federation.settings import SiteSettings
from fedabml.federation.site import Site
from fedabml.files.sealed import write_json
from tests.federation.in_process import ID, KEY, Wire, assert_equal, lead, pairs, rounds_of, set_up, simulation


def lose(*names):
    return lambda order, reply: [] if order.site in names else [Arrival(order.site, reply)]


def test_a_resumed_federation_equals_an_uninterrupted_one(tmp_path):
    settings = {"algorithm": "fedabml", "rounds": 4}
    whole, sites = set_up(tmp_path / "whole", **settings)
    expected, _ = lead(whole, Wire(whole, sites))
    parts, sites = set_up(tmp_path / "parts", **settings)
    for stop in (1, 3):
        wire = Wire(parts, sites)  # new sites, too: nothing but the disk lasts

        def on_event(event, stop=stop):
            if event.get("round") == stop and event["event"] == "round":
                parts.stop_file.touch()

        Coordinator(parts, wire, wire.clock, on_event).run()
        parts.stop_file.unlink()
    coordinator, events = lead(parts, Wire(parts, sites))
    assert [line["round"] for line in rounds_of(events)] == [4]
    for part in ("shared", "average", "velocity"):
        assert_equal(getattr(coordinator.saved.state, part), getattr(expected.saved.state, part))
    assert [line["loss"] for line in coordinator.saved.history] == [line["loss"] for line in expected.saved.history]
    assert coordinator.saved.counted == expected.saved.counted


def test_with_all_sites_alive_the_draw_is_the_simulators(tmp_path):
    server, sites = set_up(tmp_path, rounds=4, participation=0.4)
    _, events = lead(server, Wire(server, sites))
    drawn = [[int(name[-1]) for name in line["sites"]] for line in rounds_of(events)]
    assert drawn == [draw_clients(5, 0.4, 1, round) for round in range(1, 5)]


def slow(wire, seconds):
    """Let every round take some seconds of the wire's clock."""

    def tamper(order, reply):
        wire.now += seconds / len(wire.keys)
        return [Arrival(order.site, reply)]

    return tamper


def test_a_silent_site_rests_and_is_drawn_again_later(tmp_path):
    server, sites = set_up(tmp_path, rounds=5, participation=1.0, rest_rounds=2)
    wire = Wire(server, sites)
    answer = slow(wire, 40.0)  # so that after two rounds Flower has noticed a site that has died
    wire.tamper = lambda o, r: [] if (o.site, o.round) == ("site-4", 1) else answer(o, r)
    _, events = lead(server, wire)
    took_part = ["site-4" in line["sites"] for line in rounds_of(events)]
    assert took_part == [True, False, False, True, True]
    assert rounds_of(events)[0]["missing"] == ["site-4"]
    assert rounds_of(events)[1]["resting"] == ["site-4"]
    assert len([order for order in wire.sent if order.site == "site-4" and order.kind == "train"]) == 3


def test_a_site_that_died_costs_one_time_out_while_flower_lists_it(tmp_path):
    server, sites = set_up(tmp_path, rounds=20, participation=1.0, rest_rounds=2)
    wire = Wire(server, sites)
    answer = slow(wire, 4.0)

    def tamper(order, reply):
        wire.away = {"site-4"} if wire.now > 60 else set()  # 60 s after its death Flower lists it no longer
        return [] if order.site == "site-4" else answer(order, reply)

    wire.tamper = tamper
    _, events = lead(server, wire)
    assert [line["round"] for line in rounds_of(events) if "site-4" in line["sites"]] == [1]
    assert wire.now == pytest.approx(20 + 19 * 3.2)  # one time-out, then rounds of four sites that answer


def test_a_site_that_stays_silent_rests_twice_as_long_each_time(tmp_path):
    server, sites = set_up(tmp_path, rounds=20, participation=1.0, rest_rounds=2)
    wire = Wire(server, sites)
    answer = slow(wire, 50.0)
    wire.tamper = lambda o, r: [] if o.site == "site-4" and o.round < 15 else answer(o, r)
    _, events = lead(server, wire)
    drawn = [line["round"] for line in rounds_of(events) if "site-4" in line["sites"]]
    assert drawn == [1, 4, 9, 18, 19, 20]  # rests of 2, 4 and 8 rounds; then it answers


def test_a_repeated_round_draws_resting_sites_rather_than_too_few(tmp_path):
    server, sites = set_up(tmp_path, rounds=1, participation=0.8, min_replies=3)
    wire = Wire(server, sites)

    def tamper(order, reply):
        number = len([sent for sent in wire.sent if sent.kind == "train"])
        return [] if number in (1, 2) else [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    (failed,), (done,) = rounds_of(events, "repeat"), rounds_of(events)
    assert len(failed["valid"]) == 2 and len(failed["resting"]) == 2
    assert len(done["sites"]) == len(done["valid"]) == 4


@pytest.mark.parametrize("rest", [2, 100])
def test_a_resting_site_whose_node_is_started_anew_is_drawn_at_once(tmp_path, rest):
    server, sites = set_up(tmp_path, rounds=5, participation=1.0, rest_rounds=rest)
    wire = Wire(server, sites)

    def tamper(order, reply):
        if order.site == "site-4" and order.round == 1:
            return []
        if order.round == 2:
            wire.starts["site-4"] = "anew"
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    assert ["site-4" in line["sites"] for line in rounds_of(events)] == [True, False, True, True, True]


def test_a_site_that_fails_at_once_rests_for_the_rounds_only(tmp_path):
    server, sites = set_up(tmp_path, rounds=8, participation=1.0, rest_rounds=1)

    def tamper(order, reply):
        fails = order.site == "site-4" and order.round < 6
        return [Arrival(order.site, None, "no", nonce=order.nonce) if fails else Arrival(order.site, reply)]

    wire = Wire(server, sites, tamper)
    _, events = lead(server, wire)
    assert [line["round"] for line in rounds_of(events) if "site-4" in line["sites"]] == [1, 3, 5, 7, 8]
    assert wire.now < 5


def test_a_site_that_fails_at_once_is_shown_with_its_reason(tmp_path):
    server, sites = set_up(tmp_path, rounds=1, participation=1.0)
    lead(server, Wire(server, sites, failing("site-4")))
    row = status_page.site_rows(status.read(server).sites)[4]
    assert row[-1] == "rests: no"


def test_a_resting_site_that_reconnects_is_drawn_at_once(tmp_path):
    server, sites = set_up(tmp_path, rounds=5, participation=1.0, rest_rounds=100)
    wire = Wire(server, sites)

    def tamper(order, reply):
        if order.site == "site-4" and order.round == 1:
            return []
        if order.site == "site-0":
            wire.away = {"site-4"} if order.round == 2 else set()
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    assert ["site-4" in line["sites"] for line in rounds_of(events)] == [True, False, False, True, True]


def test_a_late_answer_ends_the_rest(tmp_path):
    server, sites = set_up(tmp_path, rounds=4, participation=1.0, rest_rounds=100)
    late = []

    def tamper(order, reply):
        if (order.site, order.round) == ("site-4", 1):
            late.append(Arrival(order.site, reply))
            return []
        return [late.pop(), Arrival(order.site, reply)] if late and order.round == 2 else [Arrival(order.site, reply)]

    _, events = lead(server, Wire(server, sites, tamper))
    assert ["site-4" in line["sites"] for line in rounds_of(events)] == [True, False, True, True]


def test_a_site_that_vanished_is_waited_for_once(tmp_path):
    server, sites = set_up(tmp_path, rounds=4, participation=1.0)
    wire = Wire(server, sites)

    def tamper(order, reply):
        wire.away = {"site-3"} if order.round >= 1 else set()
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    assert ["site-3" in line["sites"] for line in rounds_of(events)] == [True, False, False, False]
    assert rounds_of(events)[0]["missing"] == ["site-3"]
    assert 20 <= wire.now <= 26  # the rest begins when it does not answer, and it is not waited for again


def test_a_site_that_returns_in_time_is_drawn_as_if_it_had_never_left(tmp_path):
    server, sites = set_up(tmp_path, rounds=3, participation=1.0)
    wire = Wire(server, sites)
    names, start = wire.sites, []

    def away_between_rounds():
        if len(rounds_of(events)) == 1 and not start:
            start.append(wire.now)
        gone = start and wire.now < start[0] + 4
        return {name: key for name, key in names().items() if not (gone and name in ("site-1", "site-2"))}

    wire.sites = away_between_rounds
    events = []

    def on_event(event):
        events.append(event)
        if event["event"] == "finished":
            server.stop_file.touch()

    coordinator = Coordinator(server, wire, wire.clock, on_event)
    coordinator.run()
    assert start
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)


def test_an_absent_site_and_a_silent_one_cost_one_time_out_together(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, rounds=2)
    wire = Wire(server, sites)
    began = []

    def tamper(order, reply):
        return [] if (order.round, order.site) == (2, "site-3") else [Arrival(order.site, reply)]

    def note(event):
        if event["event"] == "round":
            began.append(wire.now)
            wire.away = {"site-4"}  # it was there until now
        if event["event"] == "finished":
            server.stop_file.touch()

    wire.tamper = tamper
    Coordinator(server, wire, wire.clock, note).run()
    assert began[1] - began[0] == 20


def test_a_silent_newcomer_costs_one_time_out_and_is_asked_again_much_later(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, rounds=3)
    members = server.sites()
    wire = Wire(server, sites)
    send, ended = wire.send, []
    wire.keys["new"], wire.sites_by_name["new"] = KEY.format("N" * 60), None
    wire.send = lambda orders, ttl: send([order for order in orders if order.site != "new"], ttl)

    def note(event):
        if event["event"] == "round":
            ended.append(wire.now)
            server.save_sites([*members, Member("new", 5, wire.keys["new"])])
        if event["event"] == "finished":
            server.stop_file.touch()

    Coordinator(server, wire, wire.clock, note).run()
    assert ended[1] - ended[0] == 20  # it may have to read all of its data
    assert ended[2] == ended[1]  # later it is asked again


def test_a_newcomer_that_falls_silent_takes_no_time_from_the_others(tmp_path):
    """It answers the first question, reads all of its data for ever, and its node is started anew at every attempt."""
    server, sites = set_up(tmp_path, participation=1.0, rounds=2, attempts=1)
    wire = Wire(server, sites)
    wire.tamper = slow(wire, 12.0)  # of 20 seconds
    send, starts = wire.send, iter(range(10**6))
    newcomer = "site-4"

    def send_to_all_but_the_newcomer(orders, ttl):
        orders = [order for order in orders if order.site != newcomer or order.kind == "describe"]
        wire.starts[newcomer] = next(starts)
        if any(order.kind == "describe" for order in orders):
            wire.now += 3.0
        send(orders, ttl)

    wire.away = {newcomer}
    lead(server, wire, until="card")
    wire.away, wire.send = set(), send_to_all_but_the_newcomer
    _, events = lead(server, wire)
    assert [len(line["valid"]) for line in rounds_of(events)] == [4, 4] and not rounds_of(events, "repeat")


def test_at_least_min_replies_sites_are_drawn_and_must_answer(tmp_path):
    server, sites = set_up(tmp_path, participation=0.2, min_replies=4, attempts=1, rest_rounds=0)
    wire = Wire(server, sites)
    wire.tamper = lambda o, r: [] if o.round == 3 and o.site != "site-0" else [Arrival(o.site, r)]
    events = []
    with pytest.raises(TrainingError, match="4 are needed"):
        Coordinator(server, wire, wire.clock, events.append).run()
    assert [len(line["valid"]) for line in rounds_of(events)] == [4, 4]


def test_too_few_sites_get_no_orders(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, min_replies=4, attempts=1)
    members = server.sites()
    wire = Wire(server, sites)

    def note(event):
        if event["event"] == "round":
            server.save_sites([dataclasses.replace(m, removed=m.number > 2) for m in members])
        if event["event"] == "finished":
            server.stop_file.touch()

    with pytest.raises(TrainingError, match=r"3 of 3 sites are available, and 4 are needed \(min_replies\)"):
        Coordinator(server, wire, wire.clock, note).run()
    assert {order.round for order in wire.sent if order.kind == "train"} == {1}


def test_a_site_that_the_proxy_refused_is_named_with_the_reason(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, rounds=1)
    reasons = {name: f"the proxy refused {name}" for name in ("site-1", "site-2")}

    def tamper(order, reply):
        (server.run / "nginx").mkdir(exist_ok=True)
        write_json(server.run / "nginx/refused.json", reasons)
        return [] if order.site == "site-1" else [Arrival(order.site, reply)]

    _, events = lead(server, Wire(server, sites, tamper))
    (line,) = rounds_of(events)
    assert line["missing"] == ["site-1"] and "site-2" in line["valid"]
    assert line["rejected"] == [{"site": "site-1", "reason": "the proxy refused site-1"}]
    assert status.read(server).reasons == {"the proxy refused site-1": 1}


def test_a_reply_after_the_last_round_is_listed_with_its_reason(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, rounds=1)
    held = []

    def tamper(order, reply):
        if order.site != "site-1":
            return [Arrival(order.site, reply)]
        held.append(Arrival(order.site, reply))
        return []

    wire = Wire(server, sites, tamper)
    receive = wire.receive

    def receive_late(seconds):
        if held and not wire.queue and any(order.kind == "prior" for order in wire.sent):
            return [held.pop()]
        if wire.now > 100:
            server.stop_file.touch()
        return receive(seconds)

    wire.receive = receive_late
    _, events = lead(server, wire, until="late")
    assert rounds_of(events)[0]["missing"] == ["site-1"]
    reason = "late: it answers round 1, attempt 1"
    assert rounds_of(events, "late")[0]["rejected"] == [{"site": "site-1", "reason": reason}]
    assert status.read(server).reasons == {reason: 1}


def test_a_round_with_too_few_replies_is_given_up(tmp_path):
    server, sites = set_up(tmp_path, min_replies=3, participation=1.0, attempts=2)
    wire = Wire(server, sites)
    wire.tamper = lambda o, r: [] if o.round == 2 and o.site != "site-0" else [Arrival(o.site, r)]
    events = []
    with pytest.raises(TrainingError, match="Round 2 was given up after 2 attempts"):
        Coordinator(server, wire, wire.clock, events.append).run()
    assert [event["event"] for event in events][-3:] == ["repeat", "repeat", "gave_up"]
    assert "3 are needed" in events[-1]["reason"]
    wire.tamper = lose()
    coordinator, events = lead(server, wire)  # resumed
    assert [line["round"] for line in rounds_of(events)] == [2, 3]
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)


def failing(*names):
    """Return a wire's `tamper` with sites that answer every order at once with an error."""

    def tamper(order, reply):
        fails = order.site in names
        return [Arrival(order.site, None, "no", nonce=order.nonce) if fails else Arrival(order.site, reply)]

    return tamper


def test_a_site_that_fails_at_once_does_not_end_the_federation_while_another_is_away(tmp_path):
    server, sites = set_up(tmp_path, sizes=(7, 12, 16), rounds=2, participation=1.0, min_replies=2, round_timeout=40.0)
    wire = Wire(server, sites)
    connected, stopped, events = wire.sites, [], []
    wire.tamper = lambda o, r: failing("site-1")(o, r) if o.round == 2 else [Arrival(o.site, r)]

    def note(event):
        events.append(event)
        if event["event"] == "round" and not stopped:
            stopped.append(wire.now)
            wire.away = {"site-2"}
        if event["event"] == "finished":
            server.stop_file.touch()

    def connected_again_after_a_while():
        if stopped and wire.now >= stopped[0] + 30:
            wire.away = set()
        return connected()

    wire.sites = connected_again_after_a_while
    Coordinator(server, wire, wire.clock, note).run()
    (done,) = [line for line in rounds_of(events) if line["round"] == 2]
    assert done["valid"] == ["site-0", "site-2"]
    assert stopped[0] + 30 <= wire.now <= stopped[0] + 35  # nobody waited longer than until it was back


@pytest.mark.parametrize(("timeout", "pause"), [(40.0, 40.0), (3600.0, 90.0)])
def test_attempts_that_fail_at_once_are_a_bounded_time_apart(tmp_path, timeout, pause):
    server, sites = set_up(tmp_path, participation=1.0, min_replies=5, attempts=3, round_timeout=timeout)
    wire, ended = Wire(server, sites, failing("site-1")), []

    def note(event):
        ended.extend([wire.now] if event["event"] in ("card", "repeat") else [])

    with pytest.raises(TrainingError, match="given up after 3 attempts"):
        Coordinator(server, wire, wire.clock, note).run()
    assert np.diff(ended) == pytest.approx([0, pause, pause], abs=1)


def test_a_repeated_attempt_with_enough_other_sites_follows_at_once(tmp_path):
    server, sites = set_up(tmp_path, participation=0.4, min_replies=2, rounds=1)
    wire, failed = Wire(server, sites), set()

    def tamper(order, reply):
        failed.update([order.site] if order.attempt == 1 else [])
        return failing(*failed)(order, reply)

    wire.tamper = tamper
    _, events = lead(server, wire)
    (failure,) = rounds_of(events, "repeat")
    assert set(failure["sites"]) == failed and wire.now < 5


def test_a_failed_site_whose_node_is_started_anew_ends_the_pause(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, min_replies=5, rounds=1, round_timeout=60.0)
    wire = Wire(server, sites)
    started, failed = wire.started, []

    def tamper(order, reply):
        if order.attempt > 1:
            return [Arrival(order.site, reply)]
        failed[:] = [wire.now]
        return failing("site-1")(order, reply)

    def started_after_a_while(site):
        return "anew" if site == "site-1" and failed and wire.now >= failed[0] + 7 else started(site)

    wire.tamper, wire.started = tamper, started_after_a_while
    _, events = lead(server, wire)
    assert len(rounds_of(events, "repeat")) == 1 and failed[0] + 7 <= wire.now <= failed[0] + 10


def test_no_site_at_all_ends_in_bounded_time(tmp_path):
    server, sites = set_up(tmp_path, attempts=2)
    wire = Wire(server, sites)
    lead(server, wire, until="card")
    wire.away, before = set(sites), wire.now
    with pytest.raises(TrainingError, match="given up"):
        lead(server, wire)
    assert wire.now - before <= 2 * 20 + 5


def test_over_selection_takes_the_first_replies(tmp_path):
    server, sites = set_up(tmp_path, participation=0.4, over_select=2, rest_rounds=100)
    wire = Wire(server, sites)
    coordinator, events = lead(server, wire)
    lines = rounds_of(events)
    assert [len(line["sites"]) for line in lines] == [4, 4, 4]
    assert [len(line["valid"]) for line in lines] == [2, 2, 2]
    assert not any(line["resting"] or line["missing"] or line["rejected"] for line in lines)
    assert all(sorted(line["valid"] + line["surplus"]) == line["sites"] for line in lines)
    participants = [[int(name[-1]) for name in line["valid"]] for line in lines]
    sim = simulation(server, coordinator.card, participants=participants)
    assert_equal(coordinator.saved.state.shared, sim.shared)
    assert wire.now < 5  # nobody waited for the others


def test_sites_that_may_still_compute_get_no_prior_between_rounds(tmp_path):
    server, sites = set_up(tmp_path, participation=0.4, over_select=2, prior_every=1)
    _, events = lead(server, Wire(server, sites))
    surplus = {line["round"]: set(line["surplus"]) for line in rounds_of(events)}
    priors = {event["round"]: set(event["sites"]) for event in rounds_of(events, "prior")}
    assert {1, 2} <= priors.keys() and all(
        surplus[number] and not surplus[number] & priors[number] for number in (1, 2)
    )


def test_surplus_replies_that_come_later_are_not_rejected(tmp_path):
    server, sites = set_up(tmp_path, participation=0.4, over_select=2, rounds=4)
    wire = Wire(server, sites)
    held = []

    def tamper(order, reply):
        number = len([sent for sent in wire.sent if sent.kind == "train"]) % 4
        if order.round == 1 and number in (3, 0):  # the last two of four
            held.append(Arrival(order.site, reply))
            return []
        if order.round == 2 and number == 1:
            thief = "site-0" if held[0].sender != "site-0" else "site-1"
            return [dataclasses.replace(held[0], sender=thief), *held, held[0], Arrival(order.site, reply)]
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    lines = rounds_of(events)
    assert len(held) == 2 and lines[0]["surplus"] == sorted(arrival.sender for arrival in held)
    assert not any(line["missing"] or line["resting"] for line in lines)
    # Only what another site writes with a surplus nonce, and a second reply to the same order, is rejected.
    reasons = [each["reason"] for line in lines for each in line["rejected"]]
    assert reasons == ["late: it answers round 1, attempt 1"] * 2


def test_the_order_of_arrival_changes_nothing(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, hyper={"weights": "samples"})
    wire = Wire(server, sites)
    receive = wire.receive
    wire.receive = lambda seconds: receive(seconds)[::-1]
    coordinator, _ = lead(server, wire)
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "krum"])
def test_robust_rules_bear_a_false_site(tmp_path, rule):
    server, sites = set_up(tmp_path, participation=1.0, aggregation=rule, trim=0.2, norm_factor=0.0)

    def tamper(order, reply):
        if order.site == "site-3":
            reply = dataclasses.replace(reply, tensors={k: -1e6 * v for k, v in reply.tensors.items()})
        return [Arrival(order.site, reply)]

    coordinator, events = lead(server, Wire(server, sites, tamper))
    assert all(len(line["valid"]) == 5 for line in rounds_of(events))
    assert coordinator.saved.state.shared["mean"].abs().max() < 10


@pytest.mark.parametrize(("settings", "factor"), [({"norm_factor": 20.0}, -100), ({}, 1e8)])
def test_a_norm_bound_refuses_a_false_site(tmp_path, settings, factor):
    server, sites = set_up(tmp_path, participation=1.0, **settings)

    def tamper(order, reply):
        if order.site == "site-3":
            reply = dataclasses.replace(reply, tensors={k: factor * v for k, v in reply.tensors.items()})
        return [Arrival(order.site, reply)]

    coordinator, events = lead(server, Wire(server, sites, tamper))
    assert [line["rejected"][0]["site"] for line in rounds_of(events)] == ["site-3"] * 3
    sim = simulation(server, coordinator.card, participants=[[0, 1, 2, 4]] * 3)
    assert_equal(coordinator.saved.state.shared, sim.shared)


@pytest.mark.parametrize(("settings", "refused"), [({}, 0), ({"norm_factor": 10.0}, 2)])
def test_the_default_norm_bound_leaves_an_honest_site_of_another_size(tmp_path, settings, refused):
    settings |= {"participation": 1.0, "rounds": 2, "algorithm": "fedabml", "batch_size": 50, "epochs": 5}
    server, sites = set_up(tmp_path, sizes=(20, 20, 20, 20, 2000), **settings)
    for (x, _), site in zip(pairs((20, 20, 20, 20, 2000)), sites.values(), strict=True):
        np.savez(site.path / "data.npz", x=x, y=x[:, :3].argmax(1))  # labels that can be learnt
    _, events = lead(server, Wire(server, sites))
    assert [entry["site"] for line in rounds_of(events) for entry in line["rejected"]] == ["site-4"] * refused


def test_a_connection_with_another_key_is_not_the_site(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0)
    wire = Wire(server, sites)
    wire.keys["site-2"] = KEY.format("Z" * 60)
    _, events = lead(server, wire)
    assert all("site-2" not in line["sites"] for line in rounds_of(events))
    assert not [order for order in wire.sent if order.site == "site-2"]


def test_a_removed_site_is_not_drawn(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0)
    members = server.sites()
    wire = Wire(server, sites)

    def tamper(order, reply):
        if order.round == 1:
            server.save_sites([dataclasses.replace(m, removed=m.number == 4) for m in members])
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    _, events = lead(server, wire)
    assert [len(line["sites"]) for line in rounds_of(events)] == [5, 4, 4]
    assert [order.clients for order in wire.sent if order.kind == "train"] == [5] * 5 + [4] * 8


@pytest.mark.parametrize("answers", [True, False])
def test_a_site_removed_in_a_round_is_not_waited_for_and_does_not_count(tmp_path, answers):
    server, sites = set_up(tmp_path, participation=1.0)
    members = server.sites()
    wire = Wire(server, sites)

    def tamper(order, reply):
        if order.round == 2 and order.site == "site-4":  # the reply of site 3 is on its way, or never comes
            server.save_sites([dataclasses.replace(m, removed=m.number == 3) for m in members])
        lost = order.round == 2 and order.site == "site-3" and not answers
        return [] if lost else [Arrival(order.site, reply)]

    wire.tamper = tamper
    coordinator, events = lead(server, wire)
    lines, others = rounds_of(events), ["site-0", "site-1", "site-2", "site-4"]
    assert [line["valid"] for line in lines] == [[*others[:3], "site-3", "site-4"], others, others]
    assert lines[1]["missing"] == [] and rounds_of(events, "repeat") == []
    reasons = [{"site": "site-3", "reason": "the site was removed"}]
    assert lines[1]["rejected"] == (reasons if answers else [])
    assert wire.now < 5  # seconds; the time-out is 20
    expected = simulation(server, coordinator.card, participants=[range(5), (0, 1, 2, 4), (0, 1, 2, 4)])
    assert_equal(coordinator.saved.state.shared, expected.shared)


def test_a_site_added_later_takes_part_and_gets_the_prior(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0)
    members = server.sites()
    wire = Wire(server, sites)
    new = SiteFolder(tmp_path / "new")
    new.make()
    x, y = pairs((9,), seed=8)[0]
    np.savez(new.path / "data.npz", x=x, y=y)
    SiteSettings(federation=ID, name="new", server="localhost:1", data=str(new.path / "data.npz")).save(
        new.settings_file
    )

    def tamper(order, reply):
        if order.round == 1 and "new" not in wire.keys:
            member = Member("new", 5, KEY.format("N" * 60))
            server.save_sites([*members, member])
            wire.keys["new"], wire.sites_by_name["new"] = member.public_key, Site(new)
        return [Arrival(order.site, reply)]

    wire.tamper = tamper
    coordinator, events = lead(server, wire, until="prior")
    assert [len(line["sites"]) for line in rounds_of(events)] == [5, 6, 6]
    assert rounds_of(events, "admitted")[0]["sites"] == ["new"]
    assert new.prior_file.is_file()
    assert [order.number for order in wire.sent if order.site == "new" and order.kind == "train"] == [5, 5]
    assert coordinator.saved.counted["new"] == 3


def test_a_site_whose_data_do_not_fit_is_named_and_left_out(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0)
    np.savez(sites["site-1"].path / "data.npz", x=np.zeros((6, 9), np.float32), y=np.zeros(6, np.int64))
    _, events = lead(server, Wire(server, sites))
    (refused,) = rounds_of(events, "refused")
    assert list(refused["refused"]) == ["site-1"]
    assert refused["refused"]["site-1"].isprintable()
    assert all("site-1" not in line["sites"] for line in rounds_of(events))


def test_too_few_fitting_sites_are_an_error(tmp_path):
    server, sites = set_up(tmp_path, min_replies=5)
    np.savez(sites["site-1"].path / "data.npz", x=np.zeros((6, 9), np.float32), y=np.zeros(6, np.int64))
    with pytest.raises(InputError, match="site-1"):
        lead(server, Wire(server, sites))
    assert "site-1: x_train has samples of shape" in status.read(server).problem


@pytest.mark.parametrize("moment", ["train", "prior"])
def test_a_site_that_lost_its_disk_gets_the_card_again(tmp_path, moment):
    server, sites = set_up(tmp_path, participation=1.0, algorithm="scaffold", rounds=4)
    wire, lost = Wire(server, sites), sites["site-1"]
    send, done = wire.send, []

    def send_after_a_loss(orders, ttl):
        if not done and any(order.kind == moment and order.round in (2, 4) for order in orders):
            done.append(shutil.rmtree(lost.state))
            lost.make()
            wire.sites_by_name["site-1"] = Site(lost)
        assert len(wire.sent) < 100, "the site is asked again and again in vain"
        send(orders, ttl)

    wire.send = send_after_a_loss
    coordinator, events = lead(server, wire, until="finished" if moment == "train" else "admitted")
    assert done and rounds_of(events, "admitted")[0]["sites"] == ["site-1"]
    counted = [line["round"] for line in rounds_of(events) if "site-1" in line["valid"]]
    assert counted == ([1, 3, 4] if moment == "train" else [1, 2, 3, 4])
    assert lost.card_file.is_file() and "site-1" in coordinator.saved.ready


def test_every_site_has_the_final_prior_and_can_use_it(tmp_path):
    server, sites = set_up(tmp_path, algorithm="fedabml", prior_every=2)
    coordinator, events = lead_to_priors(server, sites)
    final = theta(coordinator.algorithm, coordinator.saved.state)
    for folder in sites.values():
        prior = fedabml.load_prior(folder.prior_file)
        assert_equal(prior.shared, final)
        facts = json.loads(folder.prior_facts_file.read_text())
        assert (facts["round"], facts["federation"], facts["digest"]) == (3, ID, prior.digest)
    assert_equal(fedabml.load_prior(server.prior_file).shared, final)
    assert [event["round"] for event in rounds_of(events, "prior")] == [2, 3]


def lead_to_priors(server, sites):
    events = []

    def on_event(event):
        events.append(event)
        if event["event"] == "prior" and event["round"] == server.settings.rounds:
            server.stop_file.touch()

    wire = Wire(server, sites)
    coordinator = Coordinator(server, wire, wire.clock, on_event)
    coordinator.run()
    return coordinator, events


def test_the_operator_stops_a_waiting_coordinator(tmp_path):
    server, sites = set_up(tmp_path)
    wire = Wire(server, sites)
    wire.away = {"site-0"}
    _, events = lead(server, wire, until="waiting")
    assert [event["event"] for event in events] == ["start", "waiting", "end"]


def test_a_transport_that_ends_ends_the_coordinator(tmp_path):
    server, sites = set_up(tmp_path)
    wire = Wire(server, sites)

    def closed(seconds):
        raise TransportClosed

    wire.receive = closed
    _, events = lead(server, wire)
    assert events[-1]["reason"] == "the transport ended"


def test_two_coordinators_do_not_share_a_folder(tmp_path, monkeypatch):
    server, sites = set_up(tmp_path)
    monkeypatch.setattr(leading, "LOCK_WAIT", 0.5)
    with leading._exclusive_access(server), pytest.raises(InputError, match="Another process"):
        lead(server, Wire(server, sites))


def test_events_are_whole_lines(tmp_path):
    server, sites = set_up(tmp_path)
    server.events_file.write_text('{"event": "cut sho')
    lead(server, Wire(server, sites))
    first, *lines = server.events_file.read_text().splitlines()
    assert first == '{"event": "cut sho'
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == [
        "start",
        "waiting",
        "card",
        "round",
        "round",
        "round",
        "finished",
        "end",
    ]
    line = events[3]
    assert set(line["seconds"]) == {"draw", "wait", "merge", "save"}
    assert set(line["site_seconds"]["site-1" if "site-1" in line["valid"] else line["valid"][0]]) == {"setup", "work"}
    assert line["bytes_up"] > 0
    assert line["bytes_down"] > 0


def test_a_merged_state_that_is_absurd_is_not_taken(tmp_path, monkeypatch):
    server, sites = set_up(tmp_path, attempts=2)
    monkeypatch.setattr(leading, "aggregate", lambda *args: {"mean": torch.full((43,), torch.nan)})
    with pytest.raises(TrainingError, match="not finite"):
        lead(server, Wire(server, sites))


def test_a_server_that_lost_its_state_does_not_begin_anew_by_itself(tmp_path):
    server, sites = set_up(tmp_path)
    wire = Wire(server, sites)
    lead(server, wire)
    for path in server.state.glob("server-*"):
        path.unlink()
    with pytest.raises(InputError, match="Restore it from a backup"):
        lead(server, wire)
    server.events_file.unlink()
    _, events = lead(server, wire)
    assert [line["round"] for line in rounds_of(events)] == [1, 2, 3]


def test_a_kill_between_the_card_and_the_first_state_loses_nothing(tmp_path):
    server, sites = set_up(tmp_path)
    wire = Wire(server, sites)
    lead(server, wire, until="card")
    for path in server.state.glob("server-*"):
        path.unlink()
    coordinator, events = lead(server, wire)
    assert rounds_of(events, "admitted")[0]["sites"] == sorted(sites)
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)
