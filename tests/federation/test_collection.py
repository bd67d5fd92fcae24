"""Replies are taken once, with the nonce of their own order; errors of a transport end the wait for a site."""

from __future__ import annotations

import dataclasses

from fedabml.federation.collection import MOST_REASONS, Collection, PastNonces
from fedabml.federation.messages import Arrival, Order


def order(site, nonce, round=1):
    return Order("train", "a" * 32, "b" * 64, site, 0, round, 1, nonce)


ONE, TWO = order("one", "1" * 32), order("two", "2" * 32)


def collection(check=lambda reply, order: None, past=None):
    return Collection([ONE, TWO], check, past or PastNonces(), 1000)


def test_an_error_ends_the_wait_for_its_own_order_only():
    found = collection()
    found.take(Arrival("one", None, "gone\x07", nonce="9" * 32))  # of an earlier attempt
    assert found.missing == ["one", "two"]
    found.take(Arrival("two", None, "forged", nonce=ONE.nonce))
    assert found.missing == ["one", "two"]
    found.take(Arrival("one", None, "gone\x07", nonce=ONE.nonce))
    assert found.missing == ["two"]
    assert found.failed == {"one": "gone?"}
    found.take(Arrival("two", None))
    assert found.missing == []
    assert found.failed["two"] == "no reply"
    found.take(Arrival("nobody", None, "x"))
    assert [entry["site"] for entry in found.listed()] == ["two", "one", "two"]


def test_a_site_that_lost_its_connection_has_given_no_reply_to_reject():
    found = collection()
    found.take(Arrival("one", None, "node unavailable", nonce=ONE.nonce, gone=True))
    assert (found.missing, found.unanswered) == (["two"], ["two", "one"])  # nobody waits for it any more
    assert found.failed == {"one": "node unavailable"} and found.listed() == []
    found.take(Arrival("one", ONE.reply()))
    assert found.valid == {} and found.unanswered == ["two", "one"]


def test_a_withdrawn_order_is_not_awaited_and_its_reply_is_rejected():
    found = collection()
    found.take(Arrival("one", ONE.reply()))
    for name in ("one", "two", "stranger"):
        found.withdraw(name)
    assert found.missing == [] and not found.valid and found.withdrawn == {"one", "two"}
    found.take(Arrival("two", TWO.reply()))
    assert not found.valid and [entry["reason"] for entry in found.listed()] == ["the site was removed"] * 2


def test_a_check_that_fails_rejects_the_reply():
    def check(reply, order):
        raise RuntimeError("\x1b")

    found = collection(check)
    found.take(Arrival("one", ONE.reply()))
    assert found.listed() == [{"site": "one", "reason": "it cannot be checked (RuntimeError)"}]
    assert found.missing == ["two"]


def test_what_is_no_text_or_no_table_is_rejected():
    found = collection(lambda reply, order: "wrong")
    for changes in ({"nonce": None}, {"nonce": ["x"]}, {"site": 5}, {"tensors": None}, {"tensors": {"a": "b"}}):
        found.take(Arrival(None, dataclasses.replace(ONE.reply(), **changes)))
    assert [entry["reason"] for entry in found.listed()] == [
        "its nonce was never sent",
        "it is written in the name of site '(a value of type int)'",
        "wrong",
        "twice: this order was answered before",
    ]


def test_a_flood_of_replies_is_listed_in_part():
    found = collection()
    for number in range(5 * MOST_REASONS):
        found.take(Arrival(None, dataclasses.replace(ONE.reply(), site=f"x{number}", nonce="")))
        found.take(Arrival("one", dataclasses.replace(ONE.reply(), nonce="f" * 32)))
    assert len(found.listed()) == MOST_REASONS
    assert found.rejected["one", "its nonce was never sent"] == 5 * MOST_REASONS
    found.take(Arrival("one", ONE.reply()))
    assert list(found.valid) == ["one"]


def test_past_nonces_are_bounded(monkeypatch):
    monkeypatch.setattr("fedabml.federation.collection.MOST_PAST", 3)
    past = PastNonces()
    past.add([order("one", str(number), number) for number in range(5)])
    assert list(past.orders) == ["2", "3", "4"]
    found = collection(past=past)
    found.take(Arrival("one", dataclasses.replace(ONE.reply(), nonce="4")))
    assert found.late == {"one"}
    assert found.listed() == [{"site": "one", "reason": "late: it answers round 4, attempt 1"}]


def test_a_reply_that_its_site_may_not_have_written_leaves_the_order_open():
    found = collection()
    found.take(Arrival("one", None, "its code is wrong", nonce=ONE.nonce, asked_again=True))
    assert found.listed() == [{"site": "one", "reason": "its code is wrong"}]
    assert found.missing == ["one", "two"] and found.failed == {}
    found.take(Arrival("one", ONE.reply()))
    assert list(found.valid) == ["one"]
