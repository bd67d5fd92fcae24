"""A message's objects are put together only if they fit, and cannot grow beyond the limit."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

from fedabml.errors import InputError
from fedabml.federation.flower import objects
from fedabml.federation.flower.objects import inflate

pytestmark = pytest.mark.flower
LIMIT = 1 << 20


def parts(message: Message) -> dict[str, bytes]:
    return {name: item.deflate() for name, item in get_all_nested_objects(message).items()}


def message_of(data: bytes) -> Message:
    array = Array("uint8", (len(data),), "raw", data)
    return Message(RecordDict({"r": ArrayRecord({"data": array})}), 1, "train")


def test_a_message_is_put_together() -> None:
    message = message_of(b"abc" * 1000)
    result = inflate(message.object_id, parts(message), LIMIT)
    assert result.content["r"]["data"].data == b"abc" * 1000  # type: ignore[index, union-attr]
    assert result.metadata.message_id == message.object_id


def bomb(times: int) -> tuple[str, dict[str, bytes]]:
    """Return a message of some kilobytes whose array names its one part many times."""
    contents = parts(message_of(b"x" * 4096))
    name, content = next((n, c) for n, c in contents.items() if c.startswith(b"Array "))
    head, _, body = content.partition(HEAD_BODY_DIVIDER)
    body = json.dumps(json.loads(body) | {"arraychunk_ids": [0] * times}).encode()
    fields = head.split(b" ")
    new = b" ".join([*fields[:-1], str(len(body)).encode()]) + HEAD_BODY_DIVIDER + body
    contents[get_object_id(new)] = new
    del contents[name]
    return _renamed(contents, name, get_object_id(new))


def _renamed(contents: dict[str, bytes], old: str, new: str) -> tuple[str, dict[str, bytes]]:
    """Rename an object in its parents, up to the message, as its writer would have done."""
    names = {old: new}
    for kind in (b"ArrayRecord ", b"RecordDict ", b"Message "):
        for name, content in list(contents.items()):
            if content.startswith(kind):
                for before, after in names.items():
                    content = content.replace(before.encode(), after.encode())
                del contents[name]
                contents[get_object_id(content)] = content
                names[name] = root = get_object_id(content)
    return root, contents


def test_a_part_named_many_times_is_counted_as_often() -> None:
    root, contents = bomb(3)
    assert len(inflate(root, dict(contents), LIMIT).content["r"]["data"].data) == 3 * 4096  # type: ignore[index, union-attr]
    root, contents = bomb(40_000)
    assert sum(map(len, contents.values())) < LIMIT
    with pytest.raises(InputError, match="at most"):
        inflate(root, contents, LIMIT)
    root, contents = bomb(objects.MAX_OBJECTS + 1)
    with pytest.raises(InputError, match="parts"):
        inflate(root, contents, 1 << 40)


def test_a_part_with_another_name_is_refused() -> None:
    message = message_of(b"abc")
    contents = parts(message)
    name = next(iter(contents))
    contents[name] += b"x"
    with pytest.raises(InputError, match="does not fit its name"):
        inflate(message.object_id, contents, LIMIT)


def test_missing_and_foreign_parts_are_refused() -> None:
    message = message_of(b"abc")
    for name in parts(message):
        contents = parts(message)
        del contents[name]
        with pytest.raises(InputError):
            inflate(message.object_id, contents, LIMIT)
    for junk in (b"", b"\xff" * 100, b"Message x y\x00", b"Message  5\x00hello", b"Array  2\x00{}", b"Nothing  0\x00"):
        with pytest.raises(InputError):
            inflate(get_object_id(junk), {get_object_id(junk): junk}, LIMIT)


def test_something_else_than_a_message_is_refused() -> None:
    array = Array("uint8", (3,), "raw", b"abc")
    contents = {name: item.deflate() for name, item in get_all_nested_objects(array).items()}
    with pytest.raises(InputError, match="not a message"):
        inflate(array.object_id, contents, LIMIT)


def test_a_tree_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_OBJECTS", 10)
    tree = ObjectTree(object_id="0", children=[ObjectTree(object_id=str(i)) for i in range(11)])
    with pytest.raises(InputError, match="more than 10"):
        objects._names(tree)
