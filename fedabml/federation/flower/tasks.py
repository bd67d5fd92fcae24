"""Handle tasks of a runtime API in a resident worker: acquire one, read its input, answer, finish.

A task's token is kept in a private file until the task is finished, so that a killed worker continues the same
task when it is restarted, instead of letting it expire after a minute. So is a reply before it is handed over:
a SuperNode of flwr 1.41.0 waits forever for the parts of a reply whose worker died, and becomes inconsistent when
it gets two replies to one order. So a worker hands over exactly the same reply again, and never another one.
"""

from __future__ import annotations

import hashlib
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import SubStatus
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.task_identity import TaskIdentity

from ...errors import InputError
from ...files.paths import read_bytes
from ...files.sealed import parse_sealed, sealed_line
from ..folders import write_secret
from ..messages import TransportClosed
from .objects import Download, inflate
from .runtime import Link, RunEnded
from .uploads import Upload

MAX_FILE = 16 << 20
_NUMBERS = ("task_id", "run_id", "node_id")


class ForeignApp(InputError):
    """The task belongs to an app that is not on the list of allowed apps."""


@dataclass
class Task:
    """A task that this process has acquired, with its own connection."""

    link: Link
    token: str
    task_id: int
    run_id: int
    node_id: int = 0
    message: ProtoMessage | None = None  # the head of the order, without its content
    tree: ObjectTree | None = None
    began: float = 0.0  # when a worker took the order, in seconds since the epoch by the site's own clock

    def pull_input(self, allowed: Collection[str]) -> Any:
        """Read run and context. Raises ForeignApp unless the app's bytes have a hash that is allowed."""
        response = self.link.call("PullTaskInput", PullTaskInputRequest())
        self.run_id, self.node_id = response.run.run_id, response.context.node_id
        self.identify()
        digest = hashlib.sha256(response.fab.content).hexdigest()
        if digest not in allowed or digest != response.fab.hash_str or digest != response.run.fab_hash:
            raise ForeignApp(f"The app with the hash {digest[:16]}… is not on the list of allowed apps.")
        return response

    def identify(self) -> None:
        """Make Flower's messages carry this task's identity."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = self.task_id, self.run_id, self.node_id

    def pull_message(self) -> Message:
        """Read the head of the order; its content is fetched by `pull_content`."""
        response = self.link.call("PullMessages", PullAppMessagesRequest())
        if not response.messages_list:
            raise RunEnded("The task has no message.")
        self.message, self.tree = response.messages_list[0], response.message_object_trees[0]
        self.began = time.time()
        return self.head()

    def head(self) -> Message:
        """Return the order without its content, to be answered."""
        assert self.message is not None
        return message_from_proto(self.message)

    def seconds_left(self) -> float:
        """Return the rest of the order's time to live, counted from when a worker took it."""
        assert self.message is not None
        return self.began + self.message.metadata.ttl - time.time()

    def pull_content(self, limit: int) -> Message:
        """Fetch the whole order, of at most `limit` bytes."""
        assert self.tree is not None
        download = Download(self.link, self.run_id, self.node_id, self.tree, limit)
        if not download.advance():  # a SuperNode creates a task before it has all of a message
            raise Incomplete
        return inflate(download.root, download.contents, limit)

    def push_reply(self, reply: Message, path: Path) -> None:
        """Hand the reply to the SuperNode and confirm the order. The file `path` holds the reply in case of a kill."""
        upload = Upload.of([reply])
        upload.save(path)
        self._send(upload)

    def push_kept_reply(self, path: Path) -> None:
        """Hand over the reply that a worker stored before it was killed."""
        self._send(Upload.load(path))

    def _send(self, upload: Upload) -> None:
        upload.send(self.link, self.run_id, self.node_id)
        if self.tree is not None:
            confirm = ConfirmMessageReceivedRequest(
                node=Node(node_id=self.node_id), run_id=self.run_id, message_object_id=self.tree.object_id
            )
            self.link.call("ConfirmMessageReceived", confirm)

    def refuse(self, code: int, reason: str, path: Path) -> None:
        """Answer the order with a Flower error."""
        self.push_reply(Message(Error(code=code, reason=reason), reply_to=self.head()), path)

    def finish(self, error: str = "") -> None:
        """Report that the task has ended, or failed if an error is given."""
        status = SubStatus.FAILED if error else SubStatus.COMPLETED
        self.link.call("PushTaskOutput", PushTaskOutputRequest(sub_status=status, details=error), patience=30.0)

    # -- on disk ----------------------------------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Store what a restarted worker needs to continue this task."""
        facts = {name: str(getattr(self, name)) for name in ("token", *_NUMBERS, "began")}  # numbers of 64 bits
        for name, part in (("message", self.message), ("tree", self.tree)):
            facts[name] = "" if part is None else b64encode(part.SerializeToString()).decode()
        write_secret(path, sealed_line(facts).encode())

    @classmethod
    def load(cls, path: Path, connect: Callable[[str], Link]) -> Task | None:
        """Return the task in a file if its server still knows it, else None; the file is then removed."""
        if not path.exists():
            return None
        link: Link | None = None
        try:
            facts = parse_sealed(read_bytes(path, MAX_FILE).decode(), f"'{path}'")
            link = connect(facts["token"])
            if link.call("SendTaskHeartbeat", SendTaskHeartbeatRequest()).success:
                task_id, run_id, node_id = (int(facts[name]) for name in _NUMBERS)
                task = cls(link, facts["token"], task_id, run_id, node_id)
                if facts["message"]:
                    task.message = ProtoMessage.FromString(b64decode(facts["message"]))
                    task.tree = ObjectTree.FromString(b64decode(facts["tree"]))
                    task.began = float(facts["began"])
                task.identify()
                return task
        except (InputError, KeyError, TypeError, ValueError, TransportClosed, httpx.HTTPError):
            pass  # the server no longer knows this task
        if link is not None:
            link.close()
        path.unlink(missing_ok=True)
        return None


class Incomplete(Exception):
    """Some parts of the order are not there yet."""


def acquire(link: Link, kind: str, connect: Callable[[str], Link]) -> Task | None:
    """Request a task of this kind, and return it, or None if there is none."""
    response = link.call("AcquireTask", AcquireTaskRequest(supported_task_types=[kind]))
    if not response.HasField("task") or not response.token:
        return None
    return Task(connect(response.token), response.token, response.task.task_id, response.task.run_id)
