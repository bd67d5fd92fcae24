"""The runtime API of a real SuperNode in this process, without a SuperLink: orders are put in by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from flwr.app import Context, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

NODE = 77
RUN = 5


class SuperNodeApi:
    """A SuperNode's state, and the server of its runtime API."""

    def __init__(self, port: int, secret: bytes) -> None:
        self.factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
        self.state: Any = self.factory.state()
        self.store: Any = self.factory.objectstore_factory.store()
        self.state.set_node_id(NODE)
        self._app = create_app(state_factory=self.factory, superexec_auth_secret=secret)
        self._port = port

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve the API."""
        server = uvicorn.Server(uvicorn.Config(self._app, port=self._port, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until = time.monotonic() + 120
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until
            time.sleep(0.01)
        yield
        server.should_exit = True
        thread.join(120)

    def put(self, content: RecordDict, app: bytes, digest: str, run_id: int = RUN, ttl: float = 3600.0) -> str:
        """Store an order as a SuperNode does that has received it; return the message's id."""
        run = replace(Run.create_empty(run_id), fab_hash=digest, series_id=run_id)
        context = Context(run_id=run_id, node_id=NODE, node_config={}, state=RecordDict(), run_config={})
        self.state.set_run_series_context(run_id, context)
        self.state.store_run(run)
        true_digest = self.state.store_fab(Fab("", app, {}))
        self.state.fab_store[digest] = Fab(digest, app, {})  # a dishonest SuperNode names an app as it likes
        assert true_digest
        message = Message(content, NODE, "train", ttl=ttl)
        message.metadata.__dict__["_run_id"] = run_id
        message.metadata.__dict__["_message_id"] = message.object_id
        assert self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=run_id, fab_hash=digest) is not None
        self.store.preregister(run_id, get_object_tree(message))
        self.state.store_message(message)
        for name, item in get_all_nested_objects(message).items():
            self.store.put(name, item.deflate())
        return str(message.metadata.message_id)

    def replies(self) -> list[Message]:
        """Return the replies that wait to be sent to the SuperLink."""
        found = []
        for head in self.state.get_messages_legacy(is_reply=True):
            root = head.metadata.message_id
            names, left = [], [self.store.get_object_tree(root)]
            while left:
                node = left.pop()
                names.append(node.object_id)
                left.extend(node.children)
            message = inflate_object_from_contents(root, {name: self.store.get(name) for name in names})
            assert isinstance(message, Message)
            found.append(message)
        return found

    def statuses(self) -> list[str]:
        """Return how the tasks stand."""
        return [f"{task.status.status}:{task.status.sub_status}" for task in self.state.get_tasks()]
