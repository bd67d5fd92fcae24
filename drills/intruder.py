"""An intruder attacks through the proxy's port: a stranger, or a registered site that turns against the others.

An `Intruder` speaks TLS and HTTP as a SuperNode does, with any key. What an insider could not know (the numbers of
other nodes, of the run and of pending orders) is read from the server's database, in the attacker's favour.
"""

from __future__ import annotations

import http.client
import socket
import sqlite3
import ssl
import time
from base64 import b64encode
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedabml.federation import keys
from fedabml.federation.folders import ServerFolder

PROTOBUF = "application/protobuf"
SERVER = 1  # the number of the SuperLink among the nodes


class Intruder:
    """One connection to the proxy, with a private key in OpenSSH's form, or without a key."""

    def __init__(self, folder: ServerFolder, private: bytes | None = None, authority: Path | None = None) -> None:
        self.folder, self._authority = folder, authority or folder.ca_certificate
        self._key: Any = load_ssh_private_key(private, None) if private else None
        self._connection: http.client.HTTPSConnection | None = None

    @property
    def registered(self) -> bool:
        """Whether there is a key, with which every request is signed."""
        return self._key is not None

    @property
    def public_key(self) -> bytes:
        """The public key as Flower writes it."""
        return public_key_to_bytes(self._key.public_key())

    def headers(self) -> dict[str, str]:
        """Return the headers of a SuperNode with this key, with a fresh signature."""
        if self._key is None:
            return {}
        stamp = now().isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        public = b64encode(self.public_key).decode()
        return {"flwr-public-key": public, "flwr-timestamp": stamp, "flwr-signature": b64encode(signature).decode()}

    def send(
        self, path: str, body: bytes = b"", method: str = "POST", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; return status and body. Status 0: the connection was closed without an answer."""
        given = {"content-type": PROTOBUF, **self.headers(), **(headers or {})}
        reused = self._connection is not None
        status, answer = self._try(path, body, method, given)
        if status == 0 and reused:  # the proxy had closed it while nothing was sent
            status, answer = self._try(path, body, method, given)
        return status, answer

    def _try(self, path: str, body: bytes, method: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            context = ssl.create_default_context(cafile=str(self._authority))
            port = self.folder.settings.port
            self._connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=120, context=context)
        try:
            self._connection.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer may have come before the body was sent
        except ssl.SSLCertVerificationError:
            raise
        except (http.client.HTTPException, ssl.SSLError):
            self.close()
            return 0, b""
        try:
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return 0, b""

    def send_bytes(self, data: bytes) -> bytes:
        """Send raw bytes over TLS and return the start of the answer."""
        context = ssl.create_default_context(cafile=str(self._authority))
        with (
            socket.create_connection(("127.0.0.1", self.folder.settings.port), 60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as end,
            suppress(OSError),
        ):
            end.settimeout(5)
            end.sendall(data)
            return end.recv(4096)
        return b""

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- as a registered site -----------------------------------------------------------------------------------------
    def push(self, message: Message, node: int) -> tuple[int, int, int]:
        """Send a message with its objects; return the status, and how many objects were wanted and stored."""
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        status, body = self.send("/v1/fleet/push-messages", request.SerializeToString())
        if status != 200:
            return status, 0, 0
        response = PushMessagesResponse.FromString(body)
        objects, stored = get_all_nested_objects(message), 0
        for name in response.objects_to_push:
            stored += self.push_object(
                node, message.metadata.run_id, response.session_id, name, objects[name].deflate()
            )
        return status, len(response.objects_to_push), stored

    def push_object(self, node: int, run: int, session: str, name: str, content: bytes) -> bool:
        """Send one object; return whether the SuperLink stored it."""
        request = PushObjectRequest(
            node=Node(node_id=node), run_id=run, session_id=session, object_id=name, object_content=content
        )
        status, body = self.send("/v1/fleet/push-object", request.SerializeToString())
        return status == 200 and PushObjectResponse.FromString(body).stored


def stranger(folder: ServerFolder) -> Intruder:
    """Return an intruder with the authority's certificate and a key that nobody registered."""
    return Intruder(folder, keys.make_site_keys().private)


def message(content: RecordDict, run: int, source: int, target: int, reply_to: str = "", ttl: float = 60.0) -> Message:
    """Return a message with an arbitrary sender, which Flower's own programs never write."""
    made = Metadata(
        run_id=run, message_id="", src_node_id=source, dst_node_id=target, reply_to_message_id=reply_to,
        group_id="", created_at=time.time(), ttl=ttl, message_type="train",
    )  # fmt: skip
    return make_message(metadata=made, content=content)


# -- what the database knows ------------------------------------------------------------------------------------------
def nodes(folder: ServerFolder) -> dict[str, int]:
    """Return the numbers of the nodes by the names of their sites."""
    return {name: number % 2**64 for name, number in _rows(folder, "select name, node_id from node")}


def runs(folder: ServerFolder) -> list[int]:
    """Return the numbers of the runs in the order of their start."""
    return [number % 2**64 for (number,) in _rows(folder, "select run_id from run order by rowid")]


def orders(folder: ServerFolder, node: int) -> list[tuple[str, float]]:
    """Return the pending orders for a node, each with the seconds until it expires."""
    signed = node - 2**64 if node >= 2**63 else node
    query = "select message_id, created_at + ttl from message_ins where dst_node_id = ?"
    return [(name, end - time.time()) for name, end in _rows(folder, query, signed)]


def stored_bytes(folder: ServerFolder) -> int:
    """Return the bytes of all objects that the SuperLink keeps."""
    return int(_rows(folder, "select coalesce(sum(length(content)), 0) from objects")[0][0])


def _rows(folder: ServerFolder, query: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder.database}?mode=ro", uri=True, timeout=60)) as connection:
        return connection.execute(query, values).fetchall()
