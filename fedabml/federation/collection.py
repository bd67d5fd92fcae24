"""Collect the replies to one set of orders: each counts once, and only with the nonce that its site was sent.

Flower accepts a reply that one registered site writes in the name of another, so a reply counts only if the connection,
the name in it and the nonce agree. A false reply never uses up the place of the true one.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .messages import Arrival, Order, Reply, printable

log = logging.getLogger("fedabml")
Check = Callable[[Reply, Order], str | None]
MOST_REASONS = 100  # the most different rejections of one exchange that are listed
REMOVED = "the site was removed"
MOST_PAST = 100_000  # nonces that are remembered, to distinguish late replies from invented ones


class PastNonces:
    """The nonces of earlier orders distinguish late and surplus replies from invented ones."""

    def __init__(self) -> None:
        self.orders: OrderedDict[str, str] = OrderedDict()
        self._surplus: dict[str, str] = {}  # the site by nonce

    def add(self, orders: Iterable[Order]) -> None:
        """Remember the nonces of orders that are no longer awaited."""
        for order in orders:
            self.orders[order.nonce] = f"late: it answers round {order.round}, attempt {order.attempt}"
        while len(self.orders) > MOST_PAST:
            self._surplus.pop(self.orders.popitem(last=False)[0], None)

    def add_surplus(self, orders: Iterable[Order]) -> None:
        """Remember orders among those of `add` whose replies are not needed, because enough others were valid."""
        self._surplus |= {order.nonce: order.site for order in orders if order.nonce in self.orders}

    def take_surplus(self, nonce: object, site: str) -> bool:
        """Return whether this is a site's first reply to an order whose reply is not needed."""
        if not isinstance(nonce, str) or self._surplus.get(nonce) != site:
            return False
        del self._surplus[nonce]
        return True

    def get(self, nonce: str) -> str | None:
        """Return why a reply with this nonce is late, or None if the nonce is unknown."""
        return self.orders.get(nonce)


@dataclass
class Collection:
    """A collection holds the replies to a set of orders, one per site."""

    orders: Sequence[Order]
    check: Check
    past: PastNonces
    max_bytes: int
    enough: int = 0  # valid replies after which further ones are surplus; 0: all sites are needed
    valid: dict[str, Reply] = field(default_factory=dict)  # by site, as they came
    failed: dict[str, str] = field(default_factory=dict)  # by site: why it will not answer
    gone: list[str] = field(default_factory=list)  # sites that lost their connection; they are in `failed`, too
    late: set[str] = field(default_factory=set)  # sites that answered an earlier order
    withdrawn: set[str] = field(default_factory=set)  # sites that were removed meanwhile
    surplus: set[str] = field(default_factory=set)  # sites whose replies are not needed
    bytes_up: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)  # by site and reason

    def __post_init__(self) -> None:
        self._pending = {order.nonce: order for order in self.orders}
        self._all = dict(self._pending)

    @property
    def missing(self) -> list[str]:
        """The sites that have not answered."""
        return [order.site for order in self._pending.values()]

    @property
    def unanswered(self) -> list[str]:
        """The sites that gave no reply: those that have not answered, and those that lost their connection."""
        return self.missing + self.gone

    @property
    def full(self) -> bool:
        """Whether enough replies are valid, so that no further one is needed."""
        return 0 < self.enough <= len(self.valid)

    def take(self, arrival: Arrival) -> None:
        """Count a reply, or reject it with a reason."""
        self.bytes_up += _size(arrival)
        if arrival.reply is None:
            if arrival.asked_again:
                self.reject(arrival.sender, printable(arrival.error))
            else:
                self._take_error(arrival)
            return
        reply = arrival.reply
        order = self._all.get(reply.nonce) if isinstance(reply.nonce, str) else None
        if order is None and arrival.sender and self.past.take_surplus(reply.nonce, arrival.sender):
            self.late.add(arrival.sender)
            return
        if misplaced := self._misplaced(arrival, reply, order):
            self.reject(arrival.sender or reply.site, misplaced)
            return
        assert order is not None
        del self._pending[order.nonce]
        if self.full:
            self.surplus.add(order.site)
            return
        if _size(arrival) > self.max_bytes:
            reason: str | None = f"it has more than {self.max_bytes} bytes"
        else:
            try:
                reason = self.check(reply, order)
            except Exception as error:  # nothing that a stranger sends may end the federation
                log.warning("A reply could not be checked.", exc_info=True)
                reason = f"it cannot be checked ({type(error).__name__})"
        if reason:
            self.reject(order.site, reason)
        else:
            self.valid[order.site] = reply

    def _misplaced(self, arrival: Arrival, reply: Reply, order: Order | None) -> str | None:
        """Return why a reply does not answer a pending order of this site, or None. The order then stays pending."""
        if order is None:
            reason = self.past.get(reply.nonce) if isinstance(reply.nonce, str) else None
            if reason and arrival.sender is not None:
                self.late.add(arrival.sender)
            return reason or "its nonce was never sent"
        if arrival.sender is not None and arrival.sender != order.site:
            return f"it uses the nonce of site {order.site}"
        if reply.site != order.site:
            return f"it is written in the name of site '{printable(reply.site, 63)}'"
        if order.site in self.withdrawn:
            return REMOVED
        return None if order.nonce in self._pending else "twice: this order was answered before"

    def _take_error(self, arrival: Arrival) -> None:
        by_nonce = self._pending.get(arrival.nonce)
        order = by_nonce or next((o for o in self._pending.values() if o.site == arrival.sender), None)
        if order is None or (arrival.nonce and by_nonce is None):  # it belongs to an earlier order
            return
        if arrival.sender is not None and arrival.sender != order.site:
            self.reject(arrival.sender, f"it uses the nonce of site {order.site}")
            return
        del self._pending[order.nonce]
        self.failed[order.site] = printable(arrival.error) or "no reply"
        if arrival.gone:
            self.gone.append(order.site)
        else:
            self.reject(order.site, self.failed[order.site])

    def reject(self, site: object, reason: str) -> None:
        """Record a rejection. If there are very many different ones, only the first are listed."""
        entry = printable(site, 63), reason
        if entry in self.rejected or len(self.rejected) < MOST_REASONS:
            self.rejected[entry] += 1

    def drop(self, site: str, reason: str) -> None:
        """Reject a reply that was valid by itself, because of the other replies."""
        del self.valid[site]
        self.reject(site, reason)

    def withdraw(self, site: str) -> None:
        """Take back the order to a site that was removed; a reply that it has given does not count."""
        if site in self.withdrawn or all(order.site != site for order in self.orders):
            return
        self.withdrawn.add(site)
        self.surplus.discard(site)
        self._pending = {nonce: order for nonce, order in self._pending.items() if order.site != site}
        if site in self.valid:
            self.drop(site, REMOVED)

    def close(self) -> None:
        """End the wait. If enough replies are valid, the sites that have not answered are surplus, not missing."""
        self.past.add(self.orders)
        if self.full:
            self.past.add_surplus(self._pending.values())
            self.surplus |= set(self.missing)
            self._pending = {}

    def listed(self) -> list[dict[str, Any]]:
        """Return the rejections for the file of events."""
        return [
            {"site": site, "reason": reason, **({"times": times} if times > 1 else {})}
            for (site, reason), times in self.rejected.items()
        ]


def _size(arrival: Arrival) -> int:
    """Return the bytes of a message: the transport's count, but at least those of its tensors."""
    tensors = arrival.reply.tensors if arrival.reply is not None else {}
    values = [value for value in tensors.values() if isinstance(value, Tensor)] if isinstance(tensors, dict) else []
    return max(arrival.bytes, sum(value.numel() * value.element_size() for value in values))
