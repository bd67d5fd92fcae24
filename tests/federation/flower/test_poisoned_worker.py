"""The hostile worker of `drills.poison` sends what it claims: each poison is refused for its own reason."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Message, RecordDict

from drills import poison, poisoned_worker
from drills.poisons import POISONS, SCAFFOLD_POISONS
from fedabml.errors import InputError
from fedabml.federation.flower import codec
from fedabml.federation.messages import Order
from fedabml.federation.replies import ReplyLimits, check

pytestmark = pytest.mark.flower
SECRETS = {"a": b"a" * 32, "c": b"c" * 32}
UPDATE = {"mean": torch.arange(6.0), "logstd": torch.zeros(6)}
ORDER = Order("train", "a" * 32, "b" * 64, "c", 2, 7, 1, "c" * 32)
REPLY = ORDER.reply(samples=12, loss=0.5, tensors=UPDATE, seconds={"work": 1.0})
SPECIAL = ("late", "twice", "an earlier reply again")  # honest replies, at the wrong time
LARGE = [name for name in poisoned_worker.WIRE if "100 MB" in name]


def refusal(content: RecordDict) -> str | None:
    """Return why the server refuses a reply with this content."""
    try:
        reply = codec.reply_of(Message(content, 1, codec.MESSAGE_TYPE), SECRETS, 8 << 20)
    except InputError as error:
        return str(error)
    return check(reply, ORDER, ReplyLimits(), UPDATE)


def test_an_honest_reply_is_encoded_as_the_real_worker_does() -> None:
    content = poisoned_worker.encoded(REPLY, SECRETS["c"])
    assert content == codec.reply_content(REPLY, SECRETS["c"])
    assert refusal(content) is None


@pytest.mark.parametrize("name", POISONS)
def test_a_poison_of_the_reply_is_refused_for_its_reason(name: str) -> None:
    reply = dataclasses.replace(REPLY, **POISONS[name][0](REPLY))
    reason = refusal(poisoned_worker.encoded(reply, SECRETS["c"]))
    assert reason is not None and poison.WORDS[name] in reason


@pytest.mark.parametrize("name", [name for name in poisoned_worker.WIRE if name not in LARGE])
def test_a_poison_of_the_message_is_refused_for_its_reason(name: str) -> None:
    reason = refusal(poisoned_worker.WIRE[name](REPLY, SECRETS["c"]))
    words = "another nonce" if name == "an invented nonce" else poison.WORDS[name]  # here without a mailbox
    assert reason is not None and words in reason


@pytest.mark.parametrize("name", LARGE)
def test_large_replies_are_large(name: str) -> None:
    content = poisoned_worker.WIRE[name](REPLY, SECRETS["c"])
    inline = content["fields"]["data"]
    total = len(inline) + (len(content["tensors"]["data"].data) if "tensors" in content else 0)
    assert total >= poisoned_worker.LARGE


def test_every_poison_has_words_of_its_reason() -> None:
    assert poison.WORDS.keys() == {*POISONS, *SCAFFOLD_POISONS, *poisoned_worker.WIRE, *SPECIAL}
    assert poison.DECODED.keys() <= POISONS.keys()
