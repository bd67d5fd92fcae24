"""Send random requests to the proxy of a federation: random bytes, and Flower's own messages with changed fields.

Every answer has a name: its status, and what tells an expected answer from a finding. Expected are

- any status 4xx: the request was refused by nginx or by the SuperLink;
- 501, 503 and 505 with nginx's own page: a method or version that it does not know, or a limit of requests;
- "200 to itself": the SuperLink accepted a request that names the site's own node or key. The message in it may name
  another sender; Flower does not check that (see `attacks.forged_reply`). What comes of accepted requests is judged by
  θ, the restarts and the memory at the end of the drill;
- "closed" or "not sent": random bytes may be no HTTP at all;
- 500 of the SuperLink to a registered site's changed message, if the SuperLink's log names an error of `REFUSING` for
  it. Flower 1.41.0 refuses impossible values with 400 in most places; where it does not, such an exception ends the
  request. The record counts these errors.

Everything else is a finding: another 200, any other 5xx of the SuperLink, every other exception in its log, and nginx's
500, 502 and 504, which mean that the SuperLink did not answer.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf

from fedabml.federation import proxy
from fedabml.federation.folders import ServerFolder

from .intruder import SERVER, Intruder, message, nodes, runs

OWN = "200 to itself"
UNSENT = ("closed", "not sent")
REFUSING = ("IndexError", "KeyError", "MessageInitializationError", "ValueError")  # Flower's, for impossible values
NGINX = b"<center>nginx</center>"  # in the pages that nginx writes itself
_BY_NGINX = ("501 by nginx", "503 by nginx", "505 by nginx")
_INTEGERS = (0, 1, 2, 2**31, 2**63 - 1)  # and -1, 2**64 - 1 where the type allows them
_REALS = (0.0, -1.0, 0.5, 30.0, 1e9, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "0" * 64, "0" * 63, "x", "\x00", "é" * 40, "../../etc/passwd", "' or 1=1 --", "x" * 9000)


def findings(answers: Counter[str], errors: Counter[str] | None = None) -> list[str]:
    """Return the names of the answers that are not expected, and of the SuperLink's errors that are not.

    `errors` are those that the SuperLink logged while Flower's messages with changed fields were sent to it by a
    registered site; None for random bytes, and for strangers, whose requests must not reach it.
    """
    allowed = {OWN, *_BY_NGINX, *UNSENT}
    found = [name for name in sorted(answers) if name not in allowed and not re.fullmatch("4[0-9][0-9]", name)]
    if errors is None:
        return found
    found += [f"{name} in the SuperLink" for name in sorted(errors) if name not in REFUSING]
    explained = sum(errors[name] for name in REFUSING) >= answers["500"]
    return [name for name in found if name != "500" or not explained]


def logged_errors(text: str) -> Counter[str]:
    """Return how often the SuperLink's log names each kind of error that Flower did not expect."""
    return Counter(re.findall(r"\[UnexpectedError:(\w+)\]", text))


def fuzz(folder: ServerFolder, key: bytes, count: int, messages: bool, threads: int = 4) -> dict[str, Counter[str]]:
    """Send random bytes, or Flower's messages with changed fields; return the answers to a stranger and to a site.

    Half of the requests have the key and a good signature of a registered site; the others have none.
    """
    results: list[Counter[str]] = [Counter() for _ in range(threads)]
    send = changed_messages(folder, key) if messages else random_bytes

    def work(number: int) -> None:
        generator = random.Random(number)
        someone = Intruder(folder, key if number % 2 else None)
        for _ in range(count // threads):
            results[number][send(someone, generator)] += 1
        someone.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if messages:  # what follows begins with a site that is not connected, as before
        insider = Intruder(folder, key)
        insider.send("/v1/fleet/deactivate-node", DeactivateNodeRequest(node_id=nodes(folder)["d"]).SerializeToString())
        insider.close()
    return {"a stranger": sum(results[::2], Counter()), "a registered site": sum(results[1::2], Counter())}


def named(status: int, body: bytes, own: bool = False) -> str:
    """Return the name of an answer; `own` says that the request was a registered site's, in its own name."""
    if status == 200:
        return OWN if own else "200"
    if status == 0:
        return "closed"
    return f"{status} by nginx" if status >= 500 and NGINX in body else str(status)


# -- random bytes -----------------------------------------------------------------------------------------------------
def random_bytes(someone: Intruder, generator: random.Random) -> str:
    """Send a request with a random path, method, headers and body; return the name of the answer."""
    calls = [f"/v1/fleet/{call}" for call in proxy.CALLS]
    others = ["/v1/control/start-run", "/v1/runtime/acquire-task", "/", "/v1/fleet/", "/%00", "/a" * 3000]
    path = generator.choice([*calls, *calls, *others])
    if generator.random() < 0.1:
        place = generator.randrange(1, len(path) + 1)
        path = path[:place] + generator.choice(["%2e%2e/", "//", "?", "\u00e9", ";", "..", "%ff", "~"]) + path[place:]
        path = "".join(mark if mark.isascii() else "%C3%A9" for mark in path)
    method = generator.choice(["POST"] * 8 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH", "XYZZY"])
    size = generator.choice([0, 1, 2, 10, 100, 1000, 10_000, 20_000])
    headers = {}
    if generator.random() < 0.2:
        name = generator.choice(["flwr-public-key", "flwr-signature", "flwr-timestamp", "content-type", "x" * 100])
        headers[name] = generator.choice(["", "x", "A" * 5000, "0", "\u00ff", "2026-01-01T00:00:00+00:00"])
    if generator.random() < 0.02:
        answer = someone.send_bytes(generator.randbytes(generator.randrange(1, 2000)))
        found = re.match(rb"HTTP/1\.[01] ([0-9]{3})", answer)
        return named(int(found[1]) if found else 0, answer)
    try:
        return named(*someone.send(path, generator.randbytes(size), method, headers))
    except (ValueError, UnicodeEncodeError):
        return "not sent"


# -- Flower's messages ------------------------------------------------------------------------------------------------
def changed_messages(folder: ServerFolder, key: bytes) -> Callable[[Intruder, random.Random], str]:
    """Return a function that sends one of Flower's messages with changed fields, and returns the answer's name."""
    known, public = nodes(folder), Intruder(folder, key).public_key
    numbers, own = [SERVER, *known.values(), *runs(folder)], known["d"]

    def send(someone: Intruder, generator: random.Random) -> str:
        call = generator.choice([*proxy.CALLS])
        request = fleet_requests(own, public, runs(folder)[0])[call]
        for _ in range(generator.randrange(4)):  # some stay as they are
            change(request, generator, numbers)
        status, body = someone.send(f"/v1/fleet/{call}", request.SerializeToString())
        return named(status, body, someone.registered and sender(request) in (own, public))

    return send


def fleet_requests(node: int, public: bytes, run: int) -> dict[str, Any]:
    """Return for every call that the proxy passes a well-formed request of a site."""
    own, name = Node(node_id=node), "0" * 64
    order = message(RecordDict({"x": ConfigRecord({"x": b"x" * 100})}), run, node, SERVER, name)
    order.metadata.__dict__["_message_id"] = order.object_id
    push = PushMessagesRequest(
        node=own,
        messages_list=[message_to_proto(remove_content_from_message(order))],
        message_object_trees=[get_object_tree(order)],
    )
    return {
        "activate-node": ActivateNodeRequest(public_key=public, heartbeat_interval=30.0),
        "deactivate-node": DeactivateNodeRequest(node_id=node),
        "send-node-heartbeat": SendNodeHeartbeatRequest(node=own, heartbeat_interval=30.0),
        "pull-messages": PullMessagesRequest(node=own),
        "push-messages": push,
        "get-run": GetRunRequest(node=own, run_id=run),
        "get-fab": GetFabRequest(node=own, run_id=run, hash_str=name),
        "push-object": PushObjectRequest(
            node=own, run_id=run, session_id=name, object_id=name, object_content=b"x" * 100
        ),
        "pull-object": PullObjectRequest(node=own, run_id=run, object_id=name),
        "confirm-message-received": ConfirmMessageReceivedRequest(node=own, run_id=run, message_object_id=name),
    }


def sender(request: Any) -> int | bytes:
    """Return the node or the public key in whose name a request is sent."""
    if isinstance(request, ActivateNodeRequest):
        return bytes(request.public_key)
    return int(request.node_id if isinstance(request, DeactivateNodeRequest) else request.node.node_id)


def change(request: Protobuf, generator: random.Random, numbers: list[int]) -> None:
    """Give one random field of a message, or of a message in it, an odd value; `numbers` name nodes and runs."""
    places: list[tuple[Any, FieldDescriptor]] = []
    left: list[Any] = [request]
    while left:
        part = left.pop()
        places += [(part, field) for field in part.DESCRIPTOR.fields]
        for field, value in part.ListFields():
            if field.message_type is not None:
                left += value if field.is_repeated else [value]
    part, field = generator.choice(places)
    if field.is_repeated:
        _change_list(getattr(part, field.name), field, generator, numbers)
    elif field.message_type is not None:
        part.ClearField(field.name)
    else:
        setattr(part, field.name, _odd(field, generator, numbers))


def _change_list(values: Any, field: FieldDescriptor, generator: random.Random, numbers: list[int]) -> None:
    """Empty a repeated field, double it, or add something to it."""
    what = generator.randrange(3)
    if what == 0:
        del values[:]
    elif what == 1:
        values.extend(list(values))
    elif field.message_type is not None:
        values.add()
    else:
        values.append(_odd(field, generator, numbers))


def _odd(field: FieldDescriptor, generator: random.Random, numbers: list[int]) -> Any:
    """Return an odd value of a field's type."""
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return generator.choice(_REALS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return generator.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = generator.choice(_TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_ENUM)
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    odd = [*_INTEGERS, -1, 2**bits - 1, *numbers, generator.getrandbits(bits)]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    return generator.choice([value for value in odd if low <= value < high])
