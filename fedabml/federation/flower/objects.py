"""Fetch the parts of a message within a limit of bytes, and assemble them only if the result fits the limit.

Flower stores a message as a tree of objects named by their SHA-256 digest. An array names its parts by index and may
name one part any number of times, so a few kilobytes could become gigabytes: `inflate` adds the sizes up first.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import cast

from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from ...errors import InputError
from .runtime import Link

MAX_OBJECTS = 50_000
OVERHEAD = 1 << 20  # bytes that a message's heads and records may add to its tensors


class Download:
    """A download fetches the objects of one message one by one. `bytes` counts what has arrived."""

    def __init__(self, link: Link, run_id: int, node_id: int, tree: ObjectTree, limit: int) -> None:
        self.root, self.bytes, self.contents = tree.object_id, 0, dict[str, bytes]()
        self._link, self._run, self._node, self._limit = link, run_id, Node(node_id=node_id), limit + OVERHEAD
        self._left = _names(tree)
        self.progress = time.monotonic()  # when the last part arrived

    def advance(self) -> bool:
        """Fetch available parts; return True once all have arrived. Raises InputError if they are lost or too large."""
        while self._left:
            name = self._left[-1]
            request = PullObjectRequest(node=self._node, run_id=self._run, object_id=name)
            response = self._link.call("PullObject", request)
            if not response.object_found:
                raise LostMessage("A part of the message is lost: its sender did not finish the upload.")
            if not response.object_available:
                return False
            content, self.progress = response.object_content, time.monotonic()
            self.bytes += len(content)
            if self.bytes > self._limit:
                self.contents.clear()
                raise InputError(f"The message is larger than the {self._limit - OVERHEAD:,} bytes that are accepted.")
            self.contents[name] = content
            self._left.pop()
        return True


class LostMessage(InputError):
    """A part of a message no longer exists; it must be sent again."""


def _names(tree: ObjectTree) -> list[str]:
    """Return the distinct names in a tree. There is no recursion, so a deep tree is harmless."""
    names: dict[str, None] = {}
    left = [tree]
    while left:
        node = left.pop()
        names[node.object_id] = None
        left.extend(node.children)
        if len(names) + len(left) > MAX_OBJECTS:
            raise InputError(f"The message has more than {MAX_OBJECTS:,} parts.")
    return list(names)


def inflate(root: str, contents: dict[str, bytes], limit: int) -> Message:
    """Assemble a message from its objects. Raises InputError if they do not fit together, or exceed the limit."""
    try:
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != name:  # so that no object can contain itself
                raise InputError("A part of the message does not fit its name.")
        expanded = sum(_expanded(content, contents, limit) for content in contents.values())
        if expanded > limit + OVERHEAD:
            raise InputError(f"The message's arrays have {expanded:,} bytes; at most {limit:,} are accepted.")
        message = inflate_object_from_contents(root, contents)
    except InputError:
        raise
    except Exception as error:  # Flower may raise anything for foreign bytes
        raise InputError(f"The message cannot be read ({type(error).__name__}).") from error
    if not isinstance(message, Message):
        raise InputError("What arrived is not a message.")
    message.metadata.__dict__["_message_id"] = root  # Flower's own readers set it the same way
    return message


def _expanded(content: bytes, contents: dict[str, bytes], limit: int) -> int:
    """Return the total bytes of an array's parts, or 0 for other objects."""
    kind, children, _ = get_object_head_values_from_object_content(content)
    if kind != "Array":
        return 0
    body = json.loads(content[content.find(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :])
    parts = cast(list[int], body["arraychunk_ids"])
    if len(parts) > MAX_OBJECTS:
        raise InputError(f"An array of the message has more than {MAX_OBJECTS:,} parts.")
    sizes = [len(contents[child]) for child in children]
    return sum(sizes[part] for part in parts)
