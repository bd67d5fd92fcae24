"""Random requests of the drill with strangers: which answers are findings, and what is sent."""

import random
from collections import Counter

import pytest

pytest.importorskip("flwr")

from drills import fuzzing
from fedabml.federation import proxy

pytestmark = pytest.mark.flower
NODE, PUBLIC, RUN = 7, b"a public key", 11


@pytest.mark.parametrize("name", ["400", "401", "412", "503 by nginx", "501 by nginx", "closed", fuzzing.OWN])
def test_refusals_are_expected(name):
    assert fuzzing.findings(Counter({name: 3})) == []


@pytest.mark.parametrize("name", ["200", "204", "307", "500", "503", "500 by nginx", "502 by nginx", "504 by nginx"])
def test_everything_else_is_a_finding(name):
    assert fuzzing.findings(Counter({name: 1, "403": 9})) == [name]


def test_a_500_is_expected_only_with_an_error_that_refuses_a_value():
    log = "[/v1/fleet/push-object][UnexpectedError:KeyError] 7\n[/v1/fleet/x][ApiError:1003] Invalid\n"
    errors = fuzzing.logged_errors(2 * log)
    assert errors == {"KeyError": 2}
    assert fuzzing.findings(Counter({"500": 2}), errors) == []
    assert fuzzing.findings(Counter({"500": 3}), errors) == ["500"]
    assert fuzzing.findings(Counter({"500": 2}), Counter()) == ["500"]
    assert fuzzing.findings(Counter({"400": 2}), Counter({"MemoryError": 1})) == ["MemoryError in the SuperLink"]
    assert fuzzing.findings(Counter({"502 by nginx": 1}), errors) == ["502 by nginx"]


def test_an_answer_is_named_by_its_writer():
    page = b"<html><hr><center>nginx</center></html>"
    assert fuzzing.named(502, page) == "502 by nginx" and fuzzing.named(502, b"{}") == "502"
    assert fuzzing.named(403, page) == "403" and fuzzing.named(0, b"") == "closed"
    assert fuzzing.named(200, b"", own=True) == fuzzing.OWN and fuzzing.named(200, b"") == "200"


def test_every_call_has_a_request_in_the_own_name_of_a_site():
    requests = fuzzing.fleet_requests(NODE, PUBLIC, RUN)
    assert requests.keys() == proxy.CALLS.keys()
    assert {fuzzing.sender(request) for request in requests.values()} == {NODE, PUBLIC}
    assert all(len(request.SerializeToString()) <= proxy.CALLS[call] for call, request in requests.items())


@pytest.mark.parametrize("call", proxy.CALLS)
def test_a_changed_request_is_another_well_formed_request(call):
    generator, seen = random.Random(0), set()
    for _ in range(60):
        request = fuzzing.fleet_requests(NODE, PUBLIC, RUN)[call]
        for _ in range(3):
            fuzzing.change(request, generator, [NODE, RUN])
        content = request.SerializeToString(deterministic=True)
        assert type(request).FromString(content).SerializeToString(deterministic=True) == content
        seen.add((content, fuzzing.sender(request) in (NODE, PUBLIC)))
    assert len(seen) > 5 and {own for _, own in seen} == {True, False}
