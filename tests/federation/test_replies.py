"""What a reply may hold: outliers of a round, times, and texts of strangers."""

from __future__ import annotations

import math

import pytest
import torch

from fedabml.federation import replies
from fedabml.federation.messages import Order, printable
from fedabml.federation.replies import ReplyLimits, check_update, outliers, seconds_of

ORDER = Order("train", "a" * 32, "b" * 64, "one", 0, 1, 1, "c" * 32)


def test_outliers_are_far_from_the_median():
    rows = [torch.tensor([float(value), 0.0]) for value in (0, 1, 2, 3, 50)]
    updates = [{"mean": row} for row in rows]  # the median is 2, the distances are 2, 1, 0, 1, 48, their median is 1
    near, far = ({"mean": torch.tensor([value, 0.0])} for value in (2.0, -8.0))  # the state that the sites were sent
    assert [bool(reason) for reason in outliers(updates, 10, near)] == [False, False, False, False, True]
    assert [bool(reason) for reason in outliers(updates, 48, near)] == [False] * 5
    assert [bool(reason) for reason in outliers(updates, 4, far)] == [False, False, False, False, True]
    assert [bool(reason) for reason in outliers(updates, 5, far)] == [False] * 5  # the median change is 10
    assert outliers(updates, 0, near) == [None] * 5
    assert outliers(updates[-2:], 10, near) == [None, None]
    assert outliers([{}, {}, {}], 10, {}) == [None] * 3


def test_outliers_are_the_same_in_parts_of_any_size(monkeypatch):
    g = torch.Generator().manual_seed(0)
    before = {"mean": torch.randn(7, generator=g), "logstd": torch.randn(2, 2, generator=g)}
    states = [{k: v + i * torch.randn(v.shape, generator=g) for k, v in before.items()} for i in range(1, 7)]
    factors = (0.5, 0.8, 1.1, 1.4)
    whole = [outliers(states, factor, before) for factor in factors]
    assert len({str(reasons) for reasons in whole}) > 2
    monkeypatch.setattr(replies, "CHUNK", 2)
    assert [outliers(states, factor, before) for factor in factors] == whole


@pytest.mark.parametrize("scale", [-10.0, 10.0])
def test_equal_updates_are_never_outliers(scale):
    same = {"mean": torch.ones(3) * scale}
    assert outliers([same, same, same, {"mean": same["mean"] + 1}], 5, same)[:3] == [None] * 3


def test_an_honest_site_among_others_with_the_same_data_is_no_outlier():
    twins = [{"mean": torch.tensor([1.0, value])} for value in (0.0, 1e-7)]
    assert outliers([*twins, {"mean": torch.tensor([-1.0, 0.0])}], 3, {"mean": torch.zeros(2)}) == [None] * 3


def test_an_update_of_no_elements_is_none():
    like = {"mean": torch.zeros(0)}
    assert check_update({"mean": torch.zeros(0)}, ReplyLimits(), like) is None
    assert check_update({}, ReplyLimits(), {}) is None


def test_times_of_a_site_are_numbers_of_known_names():
    given = {"work": 1.23456, "setup": math.nan, "boot": -1, "imports": "2", "other": 5.0}
    assert seconds_of(ORDER.reply(seconds=given)) == {"work": 1.235}
    assert seconds_of(ORDER.reply(seconds=[1])) == {}
    assert seconds_of(ORDER.reply(seconds={"work": 10**400})) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain – ü", "plain – ü"),
        ("a\nb\r\n\tc", "a b c"),
        ("\x1b[31mred\x07", "?[31mred?"),
        ("\u202eback", "?back"),
        ("a\u200bb", "a?b"),
        ("\ud800", "?"),
        (b"bytes", "(a value of type bytes)"),
        (None, "(a value of type NoneType)"),
        ("x" * 1000, "x" * 299 + "…"),
        ("x" * 300, "x" * 300),
    ],
)
def test_texts_of_strangers_are_cleaned(text, expected):
    assert printable(text) == expected


def test_a_reply_repeats_what_identifies_its_order():
    refusal = ORDER.refuse("")
    assert (refusal.site, refusal.nonce, refusal.round, refusal.kind) == ("one", "c" * 32, 1, "train")
    assert refusal.error == "The site gives no reason."
