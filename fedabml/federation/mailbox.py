"""The coordinator's mailbox sends orders, waits a bounded time, and takes replies as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .collection import Check, Collection, PastNonces
from .messages import Order, Transport
from .replies import check_identity

POLL = 1.0  # seconds between two checks for the stop file


class StopRequested(Exception):
    """The coordinator must end, because the operator asked for it."""


class Mailbox:
    """A mailbox sends orders over a transport and collects the replies; a `stop` file ends waits with StopRequested."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        stop: Path,
        max_bytes: int,
        removed: Callable[[], Iterable[str]],
    ):
        self.transport, self.clock, self.stop, self.max_bytes = transport, clock, stop, max_bytes
        self.removed = removed
        self.past = PastNonces()
        self.stray = self._collection([], check_identity)  # what arrives when no reply is awaited

    def _collection(self, orders: Sequence[Order], check: Check, enough: int = 0) -> Collection:
        return Collection(orders, check, self.past, self.max_bytes, enough)

    def collect(self, orders: Sequence[Order], check: Check, timeout: float, enough: int = 0) -> Collection:
        """Send orders and take replies until all sites have answered, `enough` are valid, or the time is up.

        `check` returns why a reply must not count, or None. If `enough` is 0, the call waits for all sites. A site that
        is removed meanwhile is no longer waited for, and what it has answered does not count.
        """
        collection = self._collection(orders, check, enough)
        try:
            deadline = self.clock() + timeout  # sending may take long while the server of messages is away
            self.transport.send(orders, timeout)
            left = timeout
            while collection.missing and not collection.full and left > 0:
                self.check_stop()
                left = deadline - self.clock()  # once it is over, what has arrived by then still counts
                for arrival in self.transport.receive(min(POLL, max(left, 0.0))):
                    collection.take(arrival)
                for name in self.removed():
                    collection.withdraw(name)
        finally:
            collection.close()
        for name in self.removed():  # also those removed while the last reply came
            collection.withdraw(name)
        collection.late |= self.stray.late
        return collection

    def idle(self) -> None:
        """Wait a moment, and record replies that nobody awaits."""
        self.check_stop()
        for arrival in self.transport.receive(POLL):
            self.stray.take(arrival)

    def take_stray(self) -> Collection:
        """Return what arrived when nothing was awaited, and forget it."""
        stray, self.stray = self.stray, self._collection([], check_identity)
        return stray

    def check_stop(self) -> None:
        """Raise StopRequested if the stop file exists."""
        if self.stop.exists():
            raise StopRequested
