"""Orders and replies as Flower messages: every bit survives, and nothing that does not fit gets in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedabml.errors import InputError
from fedabml.federation import proxy
from fedabml.federation.flower import codec
from fedabml.federation.flower.objects import inflate
from fedabml.federation.flower.transport import FlowerTransport
from fedabml.federation.messages import Order, Reply
from fedabml.federation.settings import Settings

pytestmark = pytest.mark.flower
SECRET, OTHER = b"s" * 32, b"o" * 32
TENSORS = {
    "mean": torch.tensor([1.5, -0.0, float("nan"), float("inf"), 1e-45]),
    "scale": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
    "count": torch.tensor(2**62),
    "pixels": torch.arange(256, dtype=torch.uint8),
    "none": torch.zeros(0, 4),
}
ORDER = Order("train", "a" * 32, "b" * 64, "north", 3, 7, 1, "c" * 32, 6, 5, TENSORS, {"lr": 0.1, "ä": [None, True]})
REPLY = ORDER.reply(samples=12, loss=0.1, tensors=TENSORS, facts={"score": 0.5}, seconds={"work": 1, "boot": 0.25})
LIMIT = 1 << 24
FOREIGN = Array("uint8", (0,), "r", b"")


def travelled(content: RecordDict) -> Message:
    """Return a message after its way through Flower's store of objects."""
    message = Message(content, 1, codec.MESSAGE_TYPE)
    objects = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    return inflate(message.object_id, objects, LIMIT)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""

    return list(a) == list(b) and all(
        a[name].shape == b[name].shape and a[name].dtype == b[name].dtype and raw(a[name]) == raw(b[name]) for name in a
    )


@pytest.mark.parametrize("inline", [codec.INLINE, 0])
def test_order_keeps_every_bit(inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "INLINE", inline)
    order = codec.order_of(travelled(codec.order_content(ORDER, SECRET)), SECRET, LIMIT)
    assert same(order.tensors, ORDER.tensors)
    assert replace(order, tensors={}) == replace(ORDER, tensors={})


@pytest.mark.parametrize("loss", [0.1, 0.0, -1e-300, 5e-324, 1.7e308, math.inf, -math.inf])
def test_reply_keeps_every_bit(loss: float) -> None:
    reply = codec.reply_of(
        travelled(codec.reply_content(replace(REPLY, loss=loss), SECRET)), {"north": SECRET, "south": OTHER}, LIMIT
    )
    assert same(reply.tensors, REPLY.tensors)
    assert replace(reply, tensors={}) == replace(REPLY, tensors={}, loss=loss)


def test_a_loss_may_be_nan() -> None:
    content = codec.reply_content(replace(REPLY, loss=math.nan), SECRET)
    assert math.isnan(codec.reply_of(travelled(content), {"north": SECRET}, LIMIT).loss)


def test_few_objects_carry_a_message() -> None:
    """Flower moves every object by a request of its own."""
    small = Message(codec.order_content(ORDER, SECRET), 1, codec.MESSAGE_TYPE)
    assert len(get_all_nested_objects(small)) == 3
    large = replace(ORDER, tensors={"a": torch.zeros(codec.INLINE), "b": torch.ones(4)})
    assert len(get_all_nested_objects(Message(codec.order_content(large, SECRET), 1, codec.MESSAGE_TYPE))) == 6


@pytest.mark.parametrize("megabytes", [1, 16])
def test_the_largest_message_is_one_burst_of_large_parts(megabytes: int) -> None:
    tensors = {f"layer{i}.mean": torch.zeros((megabytes << 20) // 8, dtype=torch.float32) for i in range(2)}
    tensors |= {f"small{i}.mean": torch.zeros(0) for i in range(codec.MAX_TENSORS // 10)}  # long fields
    message = Message(codec.reply_content(replace(REPLY, tensors=tensors), SECRET), 1, codec.MESSAGE_TYPE)
    parts = [len(item.deflate()) for item in get_all_nested_objects(message).values()]
    settings = Settings(federation="d" * 32, name="drill", host="localhost", max_message_mb=megabytes)
    assert 0 < sum(part > proxy.SMALL for part in parts) <= proxy.large_parts(settings)
    assert max(parts) < proxy.CALLS["push-object"] - 1000  # the request names the object, too


def test_a_foreign_code_is_refused() -> None:
    with pytest.raises(InputError, match="not written by the server"):
        codec.order_of(travelled(codec.order_content(ORDER, OTHER)), SECRET, LIMIT)
    content = codec.reply_content(REPLY, OTHER)
    with pytest.raises(InputError, match="not written by the site"):
        codec.reply_of(travelled(content), {"north": SECRET, "south": OTHER}, LIMIT)
    with pytest.raises(InputError, match="not written by the site"):
        codec.reply_of(travelled(content), {"south": OTHER}, LIMIT)


def test_a_changed_tensor_is_refused() -> None:
    content = codec.order_content(ORDER, SECRET)
    data = bytearray(content["fields"]["data"])  # type: ignore[arg-type, index]
    data[0] ^= 1
    content["fields"]["data"] = bytes(data)  # type: ignore[index, call-overload]
    with pytest.raises(InputError, match="not written by the server"):
        codec.order_of(travelled(content), SECRET, LIMIT)


def test_more_bytes_than_the_limit_are_refused() -> None:
    with pytest.raises(InputError, match="at most 10"):
        codec.order_of(travelled(codec.order_content(ORDER, SECRET)), SECRET, 10)


def test_a_type_that_cannot_travel_is_named() -> None:
    with pytest.raises(InputError, match="'half'"):
        codec.order_content(replace(ORDER, tensors={"half": torch.zeros(2, dtype=torch.float16)}), SECRET)


def changed(**changes: Any) -> RecordDict:
    """Return a reply's content whose JSON has other values; `_` removes a field."""
    content = codec.reply_content(REPLY, SECRET)
    fields = json.loads(content["fields"]["json"])  # type: ignore[arg-type, index]
    for name, value in changes.items():
        if value == "_":
            del fields[name]
        else:
            fields[name] = value
    content["fields"]["json"] = json.dumps(fields)  # type: ignore[index, call-overload]
    return content


BAD: dict[str, dict[str, Any]] = {
    "no kind": {"kind": "_"},
    "extra": {"extra": 1},
    "unknown kind": {"kind": "run"},
    "kind is a list": {"kind": []},
    "site is no text": {"site": 3},
    "empty site": {"site": ""},
    "long site": {"site": "x" * 1000},
    "short nonce": {"nonce": "ab"},
    "nonce no hex": {"nonce": "z" * 32},
    "federation": {"federation": None},
    "card": {"card": "b" * 63},
    "round is true": {"round": True},
    "round is 1.0": {"round": 1.0},
    "round too large": {"round": 2**63},
    "samples": {"samples": "12"},
    "loss is a number": {"loss": 0.1},
    "loss is long": {"loss": "0x1." + "0" * 10_000 + "p+0"},
    "loss overflows": {"loss": "0x1.0p+99999"},
    "loss overflows with few digits": {"loss": "0x1.0p+9999"},
    "facts": {"facts": []},
    "deep facts": {"facts": json.loads('{"a":' * 400 + "1" + "}" * 400)},
    "seconds": {"seconds": {"work": -1}},
    "seconds text": {"seconds": {"work": "1"}},
    "many seconds": {"seconds": {str(i): 1 for i in range(100)}},
    "error": {"error": "x" * 100_000},
    "index": {"tensors": {}},
    "entry": {"tensors": [["mean", "float32"]]},
    "dtype": {"tensors": [["mean", "complex64", [5]]]},
    "dtype object": {"tensors": [["mean", ["float32"], [5]]]},
    "name": {"tensors": [["\x00", "float32", [5]]]},
    "negative": {"tensors": [["mean", "float32", [-1]]]},
    "huge": {"tensors": [["mean", "float32", [2**31 - 1] * 16]]},
    "huge and empty": {"tensors": [["mean", "float32", [2**31 - 1] * 15 + [0]]]},
    "empty and huge": {"tensors": [["mean", "float32", [0] + [2**31 - 1] * 3]]},
    "shape bool": {"tensors": [["mean", "float32", [True]]]},
    "too many": {"tensors": [[str(i), "uint8", [0]] for i in range(20_000)]},
    "left over": {"tensors": [["mean", "float32", [1]]]},
    "twice": {"tensors": [["mean", "uint8", [1]], ["mean", "uint8", [1]]]},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_bad_fields_are_refused(changes: dict[str, Any]) -> None:
    message = Message(changed(**changes), 1, codec.MESSAGE_TYPE)
    with pytest.raises(InputError) as caught:
        codec.reply_of(message, {"north": SECRET}, LIMIT)
    assert "not written by" not in str(caught.value)  # the field itself was refused, before the code was compared
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"fields": MetricRecord({"a": 1})}),
        RecordDict({"fields": ConfigRecord({"format": 1})}),
        RecordDict({"fields": ConfigRecord({"format": 2, "json": "{}", "mac": "", "data": b""})}),
        RecordDict({"fields": ConfigRecord({"format": 1, "json": b"{}", "mac": "", "data": b""})}),
        RecordDict({"fields": ConfigRecord({"format": 1, "json": "{", "mac": "", "data": b""})}),
        RecordDict({"fields": ConfigRecord({"format": 1, "json": "[]", "mac": "", "data": b""})}),
        RecordDict({"fields": ConfigRecord({"format": 1, "json": '{"a": NaN}', "mac": "", "data": b""})}),
        RecordDict({"fields": ConfigRecord({"format": 1, "json": "9" * 50_000, "mac": "", "data": b""})}),
        RecordDict({**codec.reply_content(REPLY, SECRET), "more": ConfigRecord()}),
        RecordDict({**codec.reply_content(REPLY, SECRET), "tensors": ConfigRecord()}),
        RecordDict(
            {**codec.reply_content(REPLY, SECRET), "tensors": ArrayRecord({"x": Array("uint8", (0,), "r", b"")})}
        ),
    ],
)
def test_other_contents_are_refused(content: RecordDict) -> None:
    with pytest.raises(InputError):
        codec.reply_of(Message(content, 1, codec.MESSAGE_TYPE), {"north": SECRET}, LIMIT)


def test_an_error_is_no_reply() -> None:
    message = Message(RecordDict(), 1, codec.MESSAGE_TYPE)
    with pytest.raises(InputError, match="no content"):
        codec.reply_of(Message(Error(1, "x"), reply_to=message), {}, LIMIT)


def test_a_wrong_code_type_is_refused() -> None:
    content = codec.reply_content(REPLY, SECRET)
    content["fields"]["mac"] = 5  # type: ignore[index, call-overload]
    with pytest.raises(InputError, match="not written by the site"):
        codec.reply_of(Message(content, 1, codec.MESSAGE_TYPE), {"north": SECRET}, LIMIT)


def test_a_reply_is_not_an_order() -> None:
    assert isinstance(REPLY, Reply)
    with pytest.raises(InputError, match="lacks fields"):
        codec.order_of(Message(codec.reply_content(REPLY, SECRET), 1, codec.MESSAGE_TYPE), SECRET, LIMIT)


def test_whatever_a_reply_raises_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: Any) -> Reply:
        raise RuntimeError("Stride calculation overflowed")

    monkeypatch.setattr(codec, "reply_of", overflow)
    transport = object.__new__(FlowerTransport)
    transport._secrets, transport._limit = {}, LIMIT
    with pytest.raises(InputError, match="cannot be read"):
        transport._decoded(Message(RecordDict(), 1, codec.MESSAGE_TYPE))
