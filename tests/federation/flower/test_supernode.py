"""The SuperNode's pauses, and what it does when the worker is lost with its task. State and loop are Flower's own."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import RunNotRunningException

from fedabml.federation.flower import supernode

from .superlink_api import until
from .supernode_api import SuperNodeApi

pytestmark = pytest.mark.flower
PULL, PUSH = "_pull_and_store_message", "_push_messages"
MAX_WAIT = 120.0  # seconds to wait for a thread
CONTENT = RecordDict({"order": ConfigRecord({"text": "a"})})


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of Flower's loop with the replacements of this package, and short waits for a lost worker."""
    module: Any = importlib.import_module("flwr.supernode.start_client_internal")
    retry = importlib.import_module("flwr.supercore.retry.http_retry")
    for place, name in ((module, "time"), (module, PULL), (module, PUSH), (retry, "MAX_RETRY_DELAY")):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(supernode, "LOST", 0.5)
    monkeypatch.setattr(supernode, "_LOOK", 0.05)
    supernode.shorten_pauses()
    supernode.mend_loop()
    return module


class Node:
    """A SuperNode's state, an order in it, and the messages that the loop sends to the SuperLink."""

    def __init__(self, loop: Any) -> None:
        self.api = SuperNodeApi(0, b"k" * 32)
        self.loop, self.state, self.store = loop, self.api.state, self.api.store
        self.sent: list[Message] = []
        self.pushed: list[str] = []

    def put_order(self, text: str = "a") -> Any:
        """Store an order, and return the task that a worker has begun for it."""
        before = {task.task_id for task in self.state.get_tasks()}
        self.api.put(RecordDict({"order": ConfigRecord({"text": text})}), b"app", "digest")
        (task,) = [task for task in self.state.get_tasks() if task.task_id not in before]
        assert self.state.claim_task(task.task_id) and self.state.activate_task(task.task_id)
        return task

    def take(self) -> str:
        """Claim and begin the only task, as a worker does; return the worker's token."""
        (task,) = self.state.get_tasks(statuses=["pending"])
        token = self.state.claim_task(task.task_id)
        assert token and self.state.activate_task(task.task_id)
        return str(token)

    def forget(self) -> None:
        """Remove all orders and tasks; the run stays known."""
        self.state.msg_store.clear()
        self.state.task_store.clear()

    def lose_worker(self, task: Any) -> None:
        """Let the time for heartbeats of a task run out."""
        self.state.task_token_store[task.task_id].active_until = now() - timedelta(seconds=1)

    def reply(self, order: Message, objects: bool = True) -> Message:
        """Store a reply to an order: with or without its content."""
        reply = Message(order.content or RecordDict(), reply_to=order)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.store.preregister(order.metadata.run_id, get_object_tree(reply))
        if objects:
            for name, item in get_all_nested_objects(reply).items():
                self.store.put(name, item.deflate())
        self.state.store_message(reply)
        return reply

    def orders(self) -> list[Message]:
        """Read the orders, as a worker does."""
        return list(self.state.get_messages_legacy(is_reply=False))

    def send(self, message: Message, tree: Any, _: float) -> tuple[set[str], str]:
        self.sent.append(message)
        names, left = set(), [tree]
        while left:
            names.add(left[-1].object_id)
            left.extend(left.pop().children)
        return names, "session"

    def push(self) -> threading.Thread:
        """Start one step of the loop: wait for a reply, and send it."""
        thread = threading.Thread(
            target=self.loop._push_messages,
            kwargs={
                "state": self.state,
                "object_store": self.store,
                "send": self.send,
                "push_object": lambda run, session, name, content: self.pushed.append(name),
            },
            daemon=True,
        )
        thread.start()
        return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(MAX_WAIT)
    return not thread.is_alive()


@pytest.mark.parametrize("read", [False, True], ids=["before it read the order", "after it read the order"])
def test_a_worker_that_is_lost_with_its_task_gives_an_error(loop: Any, read: bool) -> None:
    node = Node(loop)
    task = node.put_order()
    if read:
        node.orders()
    node.lose_worker(task)
    assert ends(node.push())
    (reply,) = node.sent
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED and reply.metadata.reply_to_message_id
    assert not node.state.msg_store  # nothing of the order is left


def test_a_task_that_was_finished_without_a_reply_gives_an_error(loop: Any) -> None:
    node = Node(loop)
    task = node.put_order()
    node.orders()
    assert node.state.finish_task(task.task_id, "failed", "the reply was refused")
    assert ends(node.push())
    assert [reply.error.code for reply in node.sent] == [ErrorCode.CLIENT_APP_CRASHED]


def test_a_reply_whose_parts_never_come_is_given_up_and_the_next_one_is_sent(loop: Any) -> None:
    node = Node(loop)
    task = node.put_order()
    (order,) = node.orders()
    reply = node.reply(order, objects=False)
    node.lose_worker(task)
    assert ends(node.push())
    assert len(node.sent) == 1 and reply.object_id not in node.pushed and not node.state.msg_store

    node.put_order("b")
    (order,) = node.orders()
    reply = node.reply(order)
    assert ends(node.push())
    assert len(node.sent) == 2 and reply.object_id in node.pushed


def test_an_order_that_nobody_has_taken_is_waited_for(loop: Any) -> None:
    node = Node(loop)
    task = node.put_order()
    looks: list[int] = []
    counted: Callable[..., Any] = node.state.get_tasks

    def get_tasks(**filters: Any) -> Any:
        looks.append(1)
        return counted(**filters)

    node.state.get_tasks = get_tasks
    thread = node.push()
    until(lambda: len(looks) > 40, "many looks")  # in twice LOST at least
    assert thread.is_alive() and not node.sent
    (order,) = node.orders()
    node.reply(order)
    node.state.finish_task(task.task_id, "completed", "")
    assert ends(thread)
    assert len(node.sent) == 1 and not node.sent[0].has_error()


def test_what_is_left_of_an_order_whose_run_ended_is_removed(loop: Any) -> None:
    """Flower keeps the task of such an order, and a worker would wait for the parts of the order."""
    node, gone = Node(loop), Node(loop)
    head = gone.api.put(CONTENT, b"app", "digest")
    (order,) = gone.orders()
    tree = gone.store.get_object_tree(head)
    node.api.put(CONTENT, b"app", "digest")
    node.forget()

    def pull_object(run: int, name: str) -> bytes:
        taken.append(node.take())  # a worker is faster than the news
        raise RunNotRunningException

    taken: list[Any] = []
    received = loop._pull_and_store_message(
        state=node.state,
        object_store=node.store,
        node_config={},
        receive=lambda: (order, tree),
        get_run=None,
        get_fab=None,
        pull_object=pull_object,
        confirm_message_received=None,
        trusted_entities=None,
    )
    assert received is None and taken
    assert not node.state.msg_store and not node.store.get(head)
    assert {task.status.sub_status for task in node.state.get_tasks()} == {"failed"}
    assert not node.state.get_task_by_token(taken[0])


def test_a_late_reply_to_an_earlier_order_does_not_take_the_place_of_a_reply(loop: Any) -> None:
    node = Node(loop)
    first = node.put_order("a")
    (order,) = node.orders()
    late = node.reply(order)
    node.state.finish_task(first.task_id, "completed", "")
    second = node.put_order("b")
    thread = node.push()
    until(lambda: late.object_id in node.pushed, "the late reply")
    (order,) = node.orders()
    reply = node.reply(order)
    node.state.finish_task(second.task_id, "completed", "")
    assert ends(thread)
    assert [message.object_id for message in node.sent] == [late.object_id, reply.object_id]


def test_a_step_without_any_order_ends(loop: Any) -> None:
    """Not even an error can be sent; the loop must ask the SuperLink for the next order."""
    node = Node(loop)
    assert ends(node.push())
    assert not node.sent


def test_pauses_are_short_while_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    seconds_now = [100.0]
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: seconds_now[0])
    pauses = supernode.Pauses(0.25, 1.0)
    for wait, seconds in ((0, 3), (59, 3), (2, 3), (0, 0.5), (0, 3), (61, 3)):
        seconds_now[0] += wait
        pauses.sleep(seconds)
    assert slept == [0.25, 0.25, 1.0, 0.1, 0.25, 1.0]
    assert pauses.time is time.time


def test_flower_still_has_the_names_that_are_replaced(loop: Any) -> None:
    retry = importlib.import_module("flwr.supercore.retry.http_retry")
    assert isinstance(loop.time, supernode.Pauses) and retry.MAX_RETRY_DELAY == supernode.RECONNECT
    assert {getattr(loop, name).__module__ for name in (PULL, PUSH)} == {supernode.__name__}
