"""Upload messages so that a killed process can complete them: a private file holds a message until it is complete.

flwr 1.41.0 announces a message before its parts. The receiver waits for the parts: forever for
those of a reply, and for minutes for those of an order. So a process that was killed in between sends exactly the same
message again when it is restarted; the server then asks for the parts that it lacks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from ...errors import InputError
from ...files.paths import open_regular
from ...files.sealed import damaged, parse_sealed, sealed_line
from ..folders import write_secret
from .runtime import Link

MAX_HEAD = 16 << 20
ATTEMPTS = 5


class Upload:
    """Messages with all of their parts, ready to be sent."""

    def __init__(self, request: PushAppMessagesRequest, objects: dict[str, bytes]) -> None:
        self._request, self._objects = request, objects

    @classmethod
    def of(cls, messages: list[Message]) -> Upload:
        """Split messages into parts. A part that several messages share is stored once."""
        objects: dict[str, bytes] = {}
        protos, trees = [], []
        with no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id  # as Flower's own Grid does
                protos.append(message_to_proto(remove_content_from_message(message)))
                trees.append(get_object_tree(message))
                for name, item in get_all_nested_objects(message).items():
                    if name not in objects:
                        objects[name] = item.deflate()
        return cls(PushAppMessagesRequest(messages_list=protos, message_object_trees=trees), objects)

    def belongs_to(self, run_id: int) -> bool:
        """Return whether all messages belong to this run."""
        return all(message.metadata.run_id == run_id for message in self._request.messages_list)

    def send(self, link: Link, run_id: int, node_id: int) -> list[str]:
        """Send everything that the server lacks; return the messages' ids, empty for those that it refused."""
        for attempt in range(ATTEMPTS):
            response = link.call("PushMessages", self._request)
            push = make_push_object_fn_protobuf(
                lambda part: link.call("PushObject", part), Node(node_id=node_id), run_id, response.session_id
            )
            try:
                for name in response.objects_to_push:
                    push(name, self._objects[name])
                break
            except ObjectPushError:  # the part has arrived but its confirmation was lost, or the server has restarted
                if attempt == ATTEMPTS - 1:
                    raise
        return list(response.message_ids)

    def save(self, path: Path) -> None:
        """Write a line of JSON with the sizes, then the request, then the parts."""
        raw = self._request.SerializeToString()
        head = sealed_line(
            {"request": len(raw), "objects": [[name, len(part)] for name, part in self._objects.items()]}
        )
        write_secret(path, b"".join([head.encode(), raw, *self._objects.values()]))

    @classmethod
    def load(cls, path: Path) -> Upload:
        """Read what `save` wrote. Raises InputError for a damaged file."""
        try:
            with open_regular(path) as file:
                facts = parse_sealed(file.readline(MAX_HEAD).decode(), f"'{path}'")
                request = PushAppMessagesRequest.FromString(file.read(facts["request"]))
                objects = {name: file.read(size) for name, size in facts["objects"]}
        except InputError:
            raise
        except Exception as error:  # a damaged head or request may raise anything
            raise InputError(damaged(f"'{path}'")) from error
        if any(hashlib.sha256(part).hexdigest() != name for name, part in objects.items()):
            raise InputError(damaged(f"'{path}'"))
        return cls(request, objects)
