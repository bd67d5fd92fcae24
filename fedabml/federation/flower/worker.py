"""A site's resident worker keeps modules and data in memory, and answers the orders of the site's SuperNode.

Flower would start a fresh process for each message and run the code that came with it. This worker takes the tasks of
a SuperNode that was started with `--isolation process`, checks the hash of the task's app against the site's list
(`apps.json`), and answers with the installed package's `Site.handle`. The app's code is never run. The worker
answers a bad order with an error, waits for a SuperNode that is away, and continues its task after a kill.

A worker that hangs keeps its task alive, because the thread of its heartbeats goes on. So it ends itself some time
after the order has expired. The supervisor starts another one, which answers the order with an error.
"""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType

from .. import last_order
from ..folders import SiteFolder
from ..macs import read_secret
from ..messages import Order, Reply
from . import codec
from .places import node_address, site_secret
from .runtime import Heartbeat, Link
from .tasks import ForeignApp, Incomplete, Task, acquire

log = logging.getLogger("fedabml.federation")

POLL, IDLE_POLL = 0.1, 0.5  # seconds between two requests for a task
ACTIVE = 60.0  # seconds after a task in which the requests are frequent
MARGIN = 60.0  # seconds that a worker may still compute after an order's time to live
LIMIT = 2 << 30  # bytes of an order: the server is the site's partner, but a mistake must not fill the memory
TASK_FILE, REPLY_FILE = "task.json", "task.reply"


class Worker:
    """A worker answers the tasks of one SuperNode with `handle`, until a signal ends the process."""

    def __init__(
        self, folder: SiteFolder, handle: Callable[[Order], Reply], started: dict[str, float] | None = None
    ) -> None:
        self._folder, self._handle = folder, handle
        self._address, self._secret = node_address(folder), site_secret(folder)
        self._key = read_secret(folder.secret)
        self._started = dict(started or {})  # seconds of this process's start, reported with its first reply
        self._file, self._reply_file = folder.run / TASK_FILE, folder.run / REPLY_FILE

    def _connect(self, token: str = "") -> Link:
        if token:
            return Link.open(self._address, None, token=token, patience=30.0)
        return Link.open(self._address, None, secret=self._secret, patience=float("inf"))

    def run(self) -> None:
        """Answer tasks until the process is asked to end."""
        link, active = self._connect(), time.monotonic()
        task = self.resume()
        while True:
            if task is None:
                task = acquire(link, TaskType.CLIENT_APP, self._connect)
            if task is None:
                time.sleep(POLL if time.monotonic() - active < ACTIVE else IDLE_POLL)
                continue
            self.work(task)
            task, active = None, time.monotonic()

    def resume(self) -> Task | None:
        """Return the task that a killed worker left, or None if the SuperNode no longer knows it."""
        task = Task.load(self._file, self._connect)
        if task is None:
            self.forget()
        return task

    def work(self, task: Task) -> None:
        """Carry out one task. No error in a task ends the worker."""
        try:
            task.save(self._file)
            with Heartbeat(task.link):
                error = self._answer(task)
            self._reply_file.unlink(missing_ok=True)  # from here on nobody may hand it over again
            task.finish(error)
        except Exception as problem:  # not ProcessStopped: then the files stay, and the next worker continues
            log.warning("A task was given up: %s: %s", type(problem).__name__, problem)
            if not self._reply_file.exists():  # else a second reply would follow the first
                self._give_up(task)
        self.forget()
        task.link.close()

    def forget(self) -> None:
        """Remove the stored files of a task."""
        self._reply_file.unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _give_up(self, task: Task) -> None:
        """Answer with an error, so that the SuperNode continues; if that fails too, the task expires after a minute."""
        with suppress(Exception):
            if task.message is None:
                task.pull_message()
            reason = "The site's worker could not take the order up."
            task.refuse(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason, self._reply_file)
            task.finish(reason)

    def _answer(self, task: Task) -> str:
        """Answer the task's order. Return why its app was refused, or an empty text."""
        if self._reply_file.exists():
            task.push_kept_reply(self._reply_file)
            return ""
        if task.message is None:
            try:
                task.pull_input(self._folder.apps())
            except ForeignApp as refusal:
                log.warning("A task was refused: %s", refusal)
                last_order.note_problem(self._folder, str(refusal))
                task.pull_message()
                task.refuse(ErrorCode.INVALID_FAB, str(refusal), self._reply_file)
                return str(refusal)
            task.pull_message()
            task.save(self._file)
        try:
            with _limit(task.seconds_left() + MARGIN):
                order = codec.order_of(_content(task), self._key, LIMIT)
                content = self._reply(order)
        except Exception as problem:
            log.warning("An order could not be read or answered: %s: %s", type(problem).__name__, problem)
            last_order.note_problem(self._folder, f"An order could not be read or answered: {problem}")
            reason = f"The site's worker could not answer the order ({type(problem).__name__})."
            task.refuse(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason, self._reply_file)
            return ""
        task.push_reply(Message(content, reply_to=task.head()), self._reply_file)
        return ""

    def _reply(self, order: Order) -> RecordDict:
        """Return the content of the site's reply, with the seconds of this process's start if it is the first."""
        reply = self._handle(order)
        last_order.note_reply(self._folder, order, reply)
        seconds = {"boot": 0.0, "imports": 0.0, **reply.seconds}
        for name, value in self._started.items():
            seconds[name] = seconds.get(name, 0.0) + value
        content = codec.reply_content(replace(reply, seconds=seconds), self._key)
        self._started = {}
        return content


class Overdue(Exception):
    """An order has expired, so that its reply would be dropped."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End this process if the context is not left within some seconds, and log where its threads then are.

    A thread of the interpreter could not do it while other code holds the lock of the interpreter.
    """
    if seconds <= 0:
        raise Overdue
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _content(task: Task) -> Message:
    """Return the order's message once all of its parts are there. Raises Incomplete if the order expires before."""
    until = time.monotonic() + task.seconds_left()
    while True:
        try:
            return task.pull_content(LIMIT)
        except Incomplete:  # the SuperNode creates a task before it has all of a message
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
