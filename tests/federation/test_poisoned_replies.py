"""Poisoned replies: each is rejected with its reason, and θ has the bits of the run without that reply."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from drills.poisons import POISONS
from fedabml.federation.messages import Arrival
from tests.federation.in_process import Wire, assert_equal, lead, rounds_of, set_up, simulation

BAD = "site-2"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """θ after two rounds of which the first lacks one site; and the θ of all sites."""
    server, sites = set_up(tmp_path_factory.mktemp("expected"), **SETTINGS)
    coordinator, _ = lead(server, Wire(server, sites))
    without = simulation(server, coordinator.card, participants=[[0, 1, 3, 4], [0, 1, 2, 3, 4]]).shared
    everyone = simulation(server, coordinator.card).shared
    assert_equal(coordinator.saved.state.shared, everyone)
    return without, everyone


SETTINGS = {"algorithm": "fedabml", "hyper": {"weights": "samples"}, "rounds": 2, "participation": 1.0}


def run(tmp_path, tamper, **settings):
    server, sites = set_up(tmp_path, **(SETTINGS | settings))
    coordinator, events = lead(server, Wire(server, sites, tamper))
    lines = rounds_of(events)
    assert [line["round"] for line in lines] == [1, 2]
    text = (server.events_file).read_text(encoding="utf-8")
    for line in text.splitlines():
        assert all(entry["reason"].isprintable() for entry in json.loads(line).get("rejected", []))
    return coordinator.saved.state.shared, lines


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.slow
def test_a_poisoned_reply_is_rejected_and_changes_nothing(tmp_path, expected, poison):
    change, words = POISONS[poison]

    def tamper(order, reply):
        if (order.round, order.site) == (1, BAD):
            reply = dataclasses.replace(reply, **change(reply))
        return [Arrival(order.site, reply)]

    theta, lines = run(tmp_path, tamper)
    assert_equal(theta, expected[0])
    (entry,) = lines[0]["rejected"]
    assert entry["site"] == BAD
    assert words in entry["reason"]
    assert len(entry["reason"]) < 400
    assert not lines[1]["rejected"]


def test_a_message_beyond_the_limit_is_rejected(tmp_path, expected):
    def tamper(order, reply):
        large = (order.round, order.site) == (1, BAD)
        return [Arrival(order.site, reply, bytes=(100 << 20) + 1 if large else 1000)]

    theta, lines = run(tmp_path, tamper, max_message_mb=100)
    assert_equal(theta, expected[0])
    assert "bytes" in lines[0]["rejected"][0]["reason"]


def test_losses_at_the_limit_do_not_end_the_run(tmp_path):
    def tamper(order, reply):
        loss = {"site-0": 1e12, "site-1": -1e12, "site-2": 1e308, "site-3": 1e308}.get(order.site, reply.loss)
        return [Arrival(order.site, dataclasses.replace(reply, loss=loss))]

    _, lines = run(tmp_path, tamper)
    assert [len(line["rejected"]) for line in lines] == [2, 2]
    assert all(abs(line["loss"]) < 1e12 for line in lines)


def test_a_late_reply_is_rejected(tmp_path, expected):
    late = []

    def tamper(order, reply):
        if (order.round, order.site) == (1, BAD):
            late.append(Arrival(order.site, reply))
            return []
        arrivals = [*late, Arrival(order.site, reply)] if order.round == 2 else [Arrival(order.site, reply)]
        late[:] = [] if order.round == 2 else late
        return arrivals

    theta, lines = run(tmp_path, tamper, rest_rounds=0)
    assert_equal(theta, expected[0])
    assert lines[0]["missing"] == [BAD]
    assert lines[1]["rejected"] == [{"site": BAD, "reason": "late: it answers round 1, attempt 1"}]


def test_a_reply_counts_once(tmp_path, expected):
    theta, lines = run(tmp_path, lambda order, reply: [Arrival(order.site, reply)] * 3)
    assert_equal(theta, expected[1])
    # The last site's copies may come when nothing is awaited any more.
    assert {(e["site"], e["reason"].split(":")[0], e["times"]) for e in lines[0]["rejected"]} == {
        (f"site-{i}", "twice", 2) for i in range(5)
    }


def test_a_reply_in_the_name_of_another_site_neither_counts_nor_takes_its_place(tmp_path, expected):
    seen = {}

    def tamper(order, reply):
        seen[order.round, order.site] = order
        arrivals = [Arrival(order.site, reply)]
        forged = dataclasses.replace(reply, tensors={k: 0 * v for k, v in reply.tensors.items()})
        if order.site == "site-0":  # it writes for site-1 with its own nonce, with an invented one, and by its own name
            arrivals.insert(0, Arrival("site-0", dataclasses.replace(forged, site="site-1")))
            arrivals.insert(0, Arrival("site-0", dataclasses.replace(forged, site="site-1", nonce="0" * 32)))
        if order.site == "site-2":  # it has found the nonce of site-3, which is not asked yet, or of site-1
            nonce = seen[order.round, "site-1"].nonce
            arrivals.insert(0, Arrival("site-2", dataclasses.replace(forged, site="site-1", nonce=nonce)))
        return arrivals

    theta, lines = run(tmp_path, tamper)
    assert_equal(theta, expected[1])
    for line in lines:
        assert line["valid"] == [f"site-{i}" for i in range(5)]
        assert {(entry["site"], entry["reason"]) for entry in line["rejected"]} == {
            ("site-0", "it is written in the name of site 'site-1'"),
            ("site-0", "its nonce was never sent"),
            ("site-2", "it uses the nonce of site site-1"),
        }


@pytest.mark.parametrize(
    ("algorithm", "name", "value", "words"),
    [
        ("fola", "precision", 0.0, "not positive"),
        ("fola", "precision", -1.0, "not positive"),
        ("fola", "precision", 1e-38, "merged alone"),
        ("fedpop", "second", -1.0, "negative"),
        ("scaffold", "share", 0.0, "not positive"),
    ],
)
def test_values_that_the_server_would_divide_by_are_checked(tmp_path, algorithm, name, value, words):
    server, sites = set_up(tmp_path, **(SETTINGS | {"algorithm": algorithm}))

    def tamper(order, reply):
        if (order.round, order.site) == (1, BAD):
            poison = torch.full_like(reply.tensors[name], value)
            reply = dataclasses.replace(reply, tensors=reply.tensors | {name: poison})
        return [Arrival(order.site, reply)]

    coordinator, events = lead(server, Wire(server, sites, tamper))
    assert words in rounds_of(events)[0]["rejected"][0]["reason"]
    sim = simulation(server, coordinator.card, participants=[[0, 1, 3, 4], [0, 1, 2, 3, 4]])
    assert_equal(coordinator.saved.state.shared, sim.shared)
