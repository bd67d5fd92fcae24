"""Run Flower's own SuperNode with shorter pauses between two requests, and never let it wait for a reply in vain.

flwr 1.41.0 sleeps 3 s when the SuperLink has no message and 0.5 s while it waits for a reply; neither has an option.
This starts the same program with its module's `time` replaced: a pause is short while messages come and go, and
grows to 1 s when none has come for a minute. The SuperNode tries to reach an absent SuperLink at least every 5 s,
instead of every 20 s.

A SuperNode of flwr 1.41.0 takes no further order while it waits for a reply. Two mishaps leave it waiting. This
program mends both:

- The worker is lost after its task has begun and before it has read the order, or before it has handed over its whole
  reply. Once no task is left that could bring the reply, the SuperNode sends an error in place of the reply.
- A run ends while the SuperNode fetches an order. Flower then keeps the order's task, and the worker waits for parts
  of the order that never come. So this program removes what is left of such an order.

If another version of Flower lacks the names that are replaced, its own behaviour stays.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

VARIABLE = "FEDABML_SUPERNODE_POLL"  # seconds; the proxy's rate limit must allow it
SHORT, IDLE = 0.25, 1.0
ACTIVE = 60.0  # seconds after a message in which pauses are short
RECONNECT = 5.0  # most seconds between two tries to reach a SuperLink that is away
LOST = 5.0  # seconds without any task that could bring the awaited reply, after which the wait ends
_REPLY_PAUSE = 0.1
_LOOK = 1.0  # seconds between two looks at the tasks


class NoReply(Exception):
    """No task is left that could bring the awaited reply."""


class Pauses:
    """This object replaces the module `time` in the SuperNode's loop; only `sleep` differs.

    `open_tasks` returns the tasks that may still bring the reply for which the SuperNode waits.
    """

    def __init__(self, short: float = SHORT, idle: float = IDLE) -> None:
        self._short, self._idle = short, max(short, idle)
        self._active = time.monotonic()
        self._looked = self._hopeful = self._active
        self.open_tasks: Callable[[], Any] | None = None

    def sleep(self, seconds: float) -> None:
        """Sleep for a shorter time than Flower asks for. Raises NoReply if the SuperNode waits for a reply in vain."""
        now = time.monotonic()
        if seconds < 1:  # it waits for a reply, so a message has come
            self._active = now
            self._check_hope(now)
            time.sleep(min(seconds, _REPLY_PAUSE))
        else:
            time.sleep(min(seconds, self._short if now - self._active < ACTIVE else self._idle))

    def _check_hope(self, now: float) -> None:
        """Raise NoReply if at every look of the last `LOST` seconds no task was open."""
        if self.open_tasks is None or now - self._looked < _LOOK:
            return
        if self.open_tasks() or now - self._looked > LOST:  # a long time ago: another wait
            self._hopeful = now
        self._looked = now
        if now - self._hopeful >= LOST:
            self._hopeful = now
            raise NoReply("The site's worker was lost with the task.")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    """Run `flower-supernode` with the arguments of this process."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    shorten_pauses()
    mend_loop()
    flower_supernode()


def shorten_pauses() -> None:
    """Replace the names in Flower's modules that decide how long a SuperNode sleeps."""
    with suppress(ImportError, AttributeError, ValueError):
        loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
        if loop.time is time:
            loop.time = Pauses(min(max(float(os.environ.get(VARIABLE, SHORT)), 0.05), 3.0))
    with suppress(ImportError, AttributeError):
        retry: Any = importlib.import_module("flwr.supercore.retry.http_retry")
        retry.MAX_RETRY_DELAY = min(retry.MAX_RETRY_DELAY, RECONNECT)


def mend_loop() -> None:
    """Replace the two steps of Flower's loop by ones that never wait in vain. `shorten_pauses` comes first."""
    with suppress(ImportError, AttributeError):
        loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
        constant: Any = importlib.import_module("flwr.common.constant")
        error = importlib.import_module("flwr.app.error").Error
        lost = error(constant.ErrorCode.CLIENT_APP_CRASHED, "The site's worker was lost with the order.")
        unfinished = [constant.Status.PENDING, constant.Status.STARTING, constant.Status.RUNNING]
        failed, pauses = constant.SubStatus.FAILED, loop.time
        pull, push = loop._pull_and_store_message, loop._push_messages
        if not isinstance(pauses, Pauses):
            return

        def open_tasks(state: Any) -> set[int]:
            return {task.task_id for task in state.get_tasks(statuses=unfinished)}

        def pull_message(state: Any, object_store: Any, **others: Any) -> Any:
            before = open_tasks(state)
            run = pull(state=state, object_store=object_store, **others)
            if run is None and (left := open_tasks(state) - before):
                for task in left:  # first, so that its worker can store no reply any more
                    state.finish_task(task, failed, "The run ended while its order was fetched.")
                for message in state.get_messages_legacy():
                    state.delete_messages(message_ids=[message.metadata.message_id])
                    object_store.delete(message.metadata.message_id)
            return run

        def push_messages(state: Any, **others: Any) -> None:
            pauses.open_tasks = lambda: open_tasks(state)
            push(state=state, **others)
            while getattr(state, "msg_store", None):  # that was a reply to an earlier order; this one has none yet
                push(state=state, **others)

        def push_messages_or_errors(state: Any, **others: Any) -> None:
            try:
                push_messages(state, **others)
            except NoReply:
                state.get_messages_legacy(is_reply=False)  # Flower answers only orders that count as read
                state._store_error_replies({task.run_id for task in state.get_tasks()}, lost)
                with suppress(NoReply):
                    push(state=state, **others)

        loop._pull_and_store_message, loop._push_messages = pull_message, push_messages_or_errors


if __name__ == "__main__":
    main()
