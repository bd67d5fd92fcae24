"""A real SuperLink's APIs in this process, without TLS, and sites that speak to it as SuperNodes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_connection import http_request_response

from fedabml.federation.flower import codec
from fedabml.federation.flower.app import bundle, write_app
from fedabml.federation.flower.objects import inflate
from fedabml.federation.flower.runtime import Link
from fedabml.federation.flower.tasks import Task, acquire
from fedabml.federation.messages import Order, Reply

LIMIT = 1 << 24
DATABASE = "flower.db"


class SuperLinkApi:
    """A SuperLink with a database, which can be ended and started again under the same address."""

    def __init__(self, place: Path, port: int, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("FLWR_DATABASE", str(place / DATABASE))
        self.place, self.port, self.address = place, port, f"127.0.0.1:{port}"
        self._server: uvicorn.Server | None = None

    def make_database(self) -> None:
        """Make the database's tables."""
        create_app()

    def start(self) -> None:
        """Serve all APIs."""
        config = uvicorn.Config(create_app(), port=self.port, log_level="error", access_log=False, ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 120
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < until
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server; connections are cut."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(120)
            self._server = None

    def connect(self, token: str = "") -> Link:
        """Return a connection to the runtime API."""
        return Link.open(self.address, None, token=token, patience=60.0)

    def _control(self, method: str, request: Any) -> Any:
        version = RuntimeVersionHttpInterceptor(component_name="flwr")
        client = ControlHttpClient.from_server_address(self.address, True, None, [version])
        try:
            return getattr(client, method)(request)
        finally:
            client.close()

    def register(self, name: str, public_key: str) -> None:
        """Register a site."""
        self._control("RegisterNode", RegisterNodeRequest(public_key=public_key.encode(), name=name))

    def begin_run(self) -> Task:
        """Start a run of our app, and take its task."""
        write_app(self.place / "app")
        content = bundle(self.place / "app")
        self._control("StartRun", StartRunRequest(fab=fab_to_proto(Fab("", content, {}))))
        link = self.connect()
        until, task = time.monotonic() + 120, None
        while task is None and time.monotonic() < until:
            task = acquire(link, TaskType.SERVER_APP, self.connect)
        link.close()
        assert task is not None
        return task


class FleetSite:
    """What a SuperNode and its worker do, step by step: the test decides when, and what is sent."""

    def __init__(self, connection: Any, secret: bytes) -> None:
        self.node, self._receive, self._send, _, _, self._pull, self._push, self._confirm = connection
        self.secret = secret

    def receive(self, seconds: float = 60.0) -> tuple[Order, Message]:
        """Wait for an order; return it and its message."""
        until = time.monotonic() + seconds
        while (received := self._receive()) is None:
            assert time.monotonic() < until, "no order came"
            time.sleep(0.02)
        head, tree = received
        run, names, left = head.metadata.run_id, [], [tree]
        while left:
            part = left.pop()
            names.append(part.object_id)
            left.extend(part.children)
        message = inflate(tree.object_id, {name: self._pull(run, name) for name in names}, LIMIT)
        self._confirm(run, tree.object_id)
        return codec.order_of(message, self.secret, LIMIT), message

    def has_order(self) -> bool:
        """Return whether another order waits; it is then taken away."""
        return self._receive() is not None

    def answer(self, to: Message, reply: Reply, *, parts: int | None = None, secret: bytes | None = None) -> None:
        """Send a reply; with `parts` only so many of its objects."""
        self.send(Message(codec.reply_content(reply, secret or self.secret), reply_to=to), parts)

    def send(self, message: Message, parts: int | None = None) -> None:
        """Send a message as a SuperNode does."""
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
        wanted, session = self._send(message, get_object_tree(message), 0.0)
        for name in list(objects)[:parts]:
            if name in wanted:
                self._push(message.metadata.run_id, session, name, objects[name])


@contextmanager
def fleet(api: SuperLinkApi, keys: dict[str, Any]) -> Iterator[dict[str, FleetSite]]:
    """Connect sites; `keys` are what `keys.make_site_keys` made for each."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(connected(api, key)) for name, key in keys.items()}


@contextmanager
def connected(api: SuperLinkApi, key: Any) -> Iterator[FleetSite]:
    """Connect one site."""
    private: Any = load_ssh_private_key(key.private, password=None)
    problem = None
    with http_request_response(api.address, True, None, (private, private.public_key())) as connection:
        try:
            yield FleetSite(connection, key.secret)
        except BaseException as error:  # Flower's context logs exceptions and goes on: a failed assert would be lost
            problem = error
    if problem is not None:
        raise problem


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something holds; return it."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(what)
