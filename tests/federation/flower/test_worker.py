"""A site's resident worker at the runtime API of a real SuperNode."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType

from fedabml.federation import last_order
from fedabml.federation.flower import codec
from fedabml.federation.flower.app import app_hash, bundle, write_app
from fedabml.federation.flower.places import site_secret
from fedabml.federation.flower.runtime import Away, Link, RunEnded
from fedabml.federation.flower.tasks import Incomplete, Task, acquire
from fedabml.federation.flower.worker import MARGIN, REPLY_FILE, TASK_FILE, Worker
from fedabml.federation.folders import SiteFolder, write_secret
from fedabml.federation.messages import Order, Reply
from fedabml.federation.pids import read_record
from fedabml.federation.settings import SiteSettings
from fedabml.federation.supervisor import PIDS, Process, Supervisor
from fedabml.files.sealed import write_json

from .superlink_api import until
from .supernode_api import SuperNodeApi

pytestmark = pytest.mark.flower
SECRET = b"k" * 32
ORDER = Order("train", "a" * 32, "b" * 64, "north", 3, 7, 1, "c" * 32, tensors={"x": torch.arange(5.0)})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def echo(order: Order) -> Reply:
    return order.reply(samples=4, loss=0.5, tensors={"x": 2 * order.tensors["x"]}, seconds={"work": 0.125})


@pytest.fixture
def folder(tmp_path: Path) -> SiteFolder:
    folder = SiteFolder(tmp_path / "site")
    folder.make()
    settings = {"federation": "a" * 32, "name": "north", "server": "localhost:1", "node_port": free_port()}
    SiteSettings.of(settings).save(folder.settings_file)
    write_secret(folder.secret, SECRET)
    write_app(tmp_path / "app")
    write_json(folder.apps_file, {"apps": [app_hash(tmp_path / "app")]})
    return folder


@pytest.fixture
def node(folder: SiteFolder) -> Iterator[SuperNodeApi]:
    api = SuperNodeApi(folder.settings.node_port, site_secret(folder))
    with api.serving():
        yield api


def put(
    node: SuperNodeApi,
    folder: SiteFolder,
    order: Order = ORDER,
    secret: bytes = SECRET,
    run: int = 5,
    ttl: float = 3600.0,
) -> str:
    app = folder.path.parent / "app"
    return node.put(codec.order_content(order, secret), bundle(app), app_hash(app), run, ttl)


def request_task(worker: Worker) -> Task | None:
    link = worker._connect()
    try:
        return acquire(link, TaskType.CLIENT_APP, worker._connect)
    finally:
        link.close()


def next_task(worker: Worker) -> Task:
    task = request_task(worker)
    assert task is not None
    return task


def test_an_order_is_answered(folder: SiteFolder, node: SuperNodeApi) -> None:
    worker = Worker(folder, echo, {"boot": 1.0, "imports": 2.0, "setup": 0.5})
    assert request_task(worker) is None
    for first in (True, False):
        name = put(node, folder, replace(ORDER, round=8 - first), run=5 + first)
        worker.work(next_task(worker))
        (message,) = node.replies()
        assert message.metadata.reply_to_message_id == name
        reply = codec.reply_of(message, {"north": SECRET}, 1 << 20)
        assert torch.equal(reply.tensors["x"], 2 * ORDER.tensors["x"])
        assert reply.samples == 4 and reply.nonce == ORDER.nonce
        started = {"boot": 1.0, "imports": 2.0, "setup": 0.5} if first else {"boot": 0.0, "imports": 0.0}
        assert reply.seconds == {**started, "work": 0.125}
        assert not (folder.run / TASK_FILE).exists()
    assert node.statuses() == ["finished:completed"] * 2


def test_a_foreign_app_is_refused(folder: SiteFolder, node: SuperNodeApi) -> None:
    def never(order: Order) -> Reply:
        raise AssertionError("the order of a foreign app was handled")

    app = bundle(folder.path.parent / "app")
    worker = Worker(folder, never)
    for digest in ("d" * 64, app_hash(folder.path.parent / "app")):  # another app, and another one under our name
        node.put(codec.order_content(ORDER, SECRET), app + b"x", digest, 5 + (digest[0] == "d"))
        worker.work(next_task(worker))
        (message,) = node.replies()
        assert message.has_error() and message.error.code == ErrorCode.INVALID_FAB
        assert "allowed apps" in str(message.error.reason)


def test_bad_orders_get_an_error_and_the_worker_lives(folder: SiteFolder, node: SuperNodeApi) -> None:
    worker = Worker(folder, echo)
    secrets = [b"f" * 32, SECRET, SECRET]  # not the server's; no tensor x, so the handler raises; a good one
    orders = [ORDER, replace(ORDER, tensors={}), ORDER]
    for i, (order, secret) in enumerate(zip(orders, secrets, strict=True)):
        put(node, folder, order, secret, run=5 + i)
        worker.work(next_task(worker))
        (message,) = node.replies()
        assert message.has_error() == (i < 2)
        if i < 2:
            assert message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            assert len(str(message.error.reason)) < 200


def test_the_site_notes_its_last_order_and_a_problem_until_the_next_success(
    folder: SiteFolder, node: SuperNodeApi
) -> None:
    def handle(order: Order) -> Reply:
        if order.kind == "describe":
            return order.reply(facts={"match": False, "reasons": ["The column age is missing."]})
        return order.refuse("The data cannot be read.") if order.round == 8 else echo(order)

    worker, begun = Worker(folder, handle), time.time()
    steps = [
        (replace(ORDER, round=8), SECRET, "train", "The data cannot be read."),
        (ORDER, SECRET, "train", ""),
        (ORDER, b"f" * 32, "train", "An order could not be read or answered: "),
        (replace(ORDER, kind="describe"), SECRET, "describe", "The column age is missing."),
    ]
    for i, (order, secret, kind, problem) in enumerate(steps):
        put(node, folder, order, secret, run=5 + i)
        worker.work(next_task(worker))
        node.replies()
        found = last_order.read(folder)
        assert found.kind == kind and begun <= found.time <= time.time()
        assert found.problem.startswith(problem) and bool(found.problem) == bool(problem)
    app = bundle(folder.path.parent / "app")
    node.put(codec.order_content(ORDER, SECRET), app + b"x", "d" * 64, 20)
    worker.work(next_task(worker))
    assert "allowed apps" in last_order.read(folder).problem
    assert last_order.path(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("moment", ["acquired", "input", "message", "content", "half a reply", "whole reply"])
def test_a_killed_worker_goes_on(folder: SiteFolder, node: SuperNodeApi, moment: str) -> None:
    worker = Worker(folder, echo)
    put(node, folder)
    task = next_task(worker)
    task.save(worker._file)
    if moment != "acquired":
        task.pull_input(folder.apps())
    if moment not in ("acquired", "input"):
        task.pull_message()
        task.save(worker._file)
        order = codec.order_of(task.pull_content(1 << 20), SECRET, 1 << 20)
    if moment.endswith("reply"):
        message = Message(codec.reply_content(echo(order), SECRET), reply_to=task.head())
        calls = []

        def call(method: str, request: Any, patience: float | None = None) -> Any:
            calls.append(method)
            if moment == "half a reply" and calls.count("PushObject") == 2:
                raise KeyboardInterrupt  # the worker is killed here
            return Link.call(task.link, method, request, patience)

        task.link.call = call  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) if moment == "half a reply" else nullcontext():
            task.push_reply(message, worker._reply_file)
        assert (folder.run / REPLY_FILE).stat().st_mode & 0o77 == 0
    task.link.close()
    assert (folder.run / TASK_FILE).stat().st_mode & 0o77 == 0

    successor = Worker(folder, echo)
    again = successor.resume()
    assert again is not None
    successor.work(again)
    (reply,) = node.replies()
    if moment == "input":  # a task's input can be read once
        assert reply.has_error()
    else:
        assert torch.equal(codec.reply_of(reply, {"north": SECRET}, 1 << 20).tensors["x"], 2 * ORDER.tensors["x"])
    assert not (folder.run / TASK_FILE).exists() and not (folder.run / REPLY_FILE).exists()


def test_an_order_that_has_expired_is_answered_with_an_error(folder: SiteFolder, node: SuperNodeApi) -> None:
    """Else a worker that hangs at an order would take the same order up after every restart."""

    def never(order: Order) -> Reply:
        raise AssertionError("an order that has expired was handled")

    worker = Worker(folder, echo)
    put(node, folder, ttl=100.0)
    task = next_task(worker)
    task.pull_input(folder.apps())
    task.pull_message()
    task.began -= 100.0 + MARGIN
    task.save(worker._file)
    task.link.close()
    successor = Worker(folder, never)
    again = successor.resume()
    assert again is not None and again.began == task.began
    successor.work(again)
    (reply,) = node.replies()
    assert reply.has_error() and "Overdue" in str(reply.error.reason)
    assert not (folder.run / TASK_FILE).exists()


HANGING = """
import sys, threading
from fedabml.federation.flower import start, worker
from fedabml.federation.folders import SiteFolder

def handle(order):
    lock = threading.Lock()
    while order.round == 7:
        lock.acquire()  # the second time it waits forever
    return order.reply(samples=4)

worker.MARGIN = 1.0
start.prepare_process()
worker.Worker(SiteFolder(sys.argv[1]), handle).run()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_worker_that_hangs_ends_itself_and_its_successor_answers(folder: SiteFolder, node: SuperNodeApi) -> None:
    process = Process("worker", [sys.executable, "-c", HANGING, str(folder.path)], folder.run / "worker.log")
    supervisor = Supervisor([process], folder.run)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        put(node, folder, ttl=2.0)
        until(lambda: node.statuses() == ["finished:completed"], "the error")
        (refused,) = node.replies()
        assert refused.has_error() and "Overdue" in str(refused.error.reason)
        put(node, folder, replace(ORDER, round=8), run=6)
        until(lambda: node.statuses() == ["finished:completed"] * 2, "the reply")
        (answered,) = node.replies()
        assert codec.reply_of(answered, {"north": SECRET}, 1 << 20).samples == 4
        record = read_record(folder.run / PIDS / "worker.json")
        assert record is not None and (record.restarts, record.last_exit) == (1, "exit code 1")
        assert "in handle" in (folder.run / "worker.log").read_text()  # where it hung
    finally:
        supervisor.stop()
        thread.join(120)


def test_the_parts_of_an_order_are_awaited_while_it_lives(
    folder: SiteFolder, node: SuperNodeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a forged order without parts would end the worker a minute after it has expired."""

    def incomplete(task: Task, limit: int) -> Any:
        raise Incomplete

    monkeypatch.setattr(Task, "pull_content", incomplete)
    worker = Worker(folder, echo)
    put(node, folder, ttl=1.0)
    worker.work(next_task(worker))
    (refused,) = node.replies()
    assert refused.has_error() and "Incomplete" in str(refused.error.reason)


def test_a_forgotten_task_is_dropped(folder: SiteFolder, node: SuperNodeApi) -> None:
    worker = Worker(folder, echo)
    put(node, folder)
    task = next_task(worker)
    task.link.close()
    task.token = "0" * 32
    task.save(worker._file)
    worker._reply_file.write_text("of another task")
    assert worker.resume() is None
    assert not worker._file.exists() and not worker._reply_file.exists()
    worker._file.write_text("{")
    assert worker.resume() is None


def test_a_task_without_the_secret_is_not_given(folder: SiteFolder, node: SuperNodeApi) -> None:
    put(node, folder)
    address = f"127.0.0.1:{folder.settings.node_port}"
    for secret in (None, b"wrong" * 7):
        link = Link.open(address, None, secret=secret)
        with pytest.raises(RunEnded):
            acquire(link, TaskType.CLIENT_APP, lambda token: link)
        link.close()


def test_a_supernode_that_goes_away_is_waited_for(folder: SiteFolder) -> None:
    link = Link.open(f"127.0.0.1:{folder.settings.node_port}", None, secret=site_secret(folder), patience=0.3)
    with pytest.raises(Away):
        acquire(link, TaskType.CLIENT_APP, lambda token: link)
    assert link.outages > 0
    link.close()
    worker = Worker(folder, echo)
    done = threading.Event()

    def first_task() -> None:
        while (task := request_task(worker)) is None:
            time.sleep(0.02)
        worker.work(task)
        done.set()

    thread = threading.Thread(target=first_task, daemon=True)
    thread.start()
    for has_order in (False, True):  # a SuperNode that starts, ends without an order, and starts anew
        api = SuperNodeApi(folder.settings.node_port, site_secret(folder))
        with api.serving():
            if has_order:
                put(api, folder)
                assert done.wait(120)
                assert len(api.replies()) == 1
    thread.join(120)
