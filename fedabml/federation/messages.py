"""Define the coordinator's orders and the sites' replies as plain values, and the transport that carries them.

A transport is Flower's Grid in a deployment and a function call in tests. What a site sends is untrusted:
a text from a site reaches a log, a terminal or a file of events only through `printable`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..algorithms.base import State
from ..errors import InputError

ORDER_KINDS = ("describe", "sums", "freeze", "train", "prior")
MAX_TEXT = 300  # characters of a site's text that are shown


class Refusal(InputError):
    """A site refuses an order. The message may leave the site, so it holds no value of its rows and no path."""


class CardMissing(Refusal):
    """The site has no card: it is new, or it has lost its disk. The server offers the card to it again."""


class TransportClosed(Exception):
    """The transport has ended; nothing can be sent or received any more."""


@dataclass(frozen=True)
class Order:
    """An order is what the coordinator sends to one site."""

    kind: str  # one of ORDER_KINDS
    federation: str  # 32 hexadecimal digits
    card: str  # digest of the frozen card; empty before it is frozen
    site: str
    number: int  # identity of the site, from which its random keys come
    round: int
    attempt: int
    nonce: str  # 32 hexadecimal digits, which only this site is sent
    counted: int = 0  # the last round in which the server counted this site's reply; 0: none
    clients: int = 0  # of the federation
    tensors: State = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def reply(self, **fields: Any) -> Reply:
        """Return a reply to this order, which repeats what identifies it."""
        names = ("kind", "federation", "card", "site", "round", "attempt", "nonce")
        return Reply(**{name: getattr(self, name) for name in names}, **fields)

    def refuse(self, reason: str, **fields: Any) -> Reply:
        """Return a reply that refuses this order."""
        return self.reply(error=printable(reason) or "The site gives no reason.", **fields)


@dataclass(frozen=True)
class Reply:
    """A reply is what a site answers; the first seven fields repeat the order's."""

    kind: str
    federation: str
    card: str
    site: str
    round: int
    attempt: int
    nonce: str
    samples: int = 0  # for training
    loss: float = 0.0  # mean over the site's steps
    tensors: State = field(default_factory=dict)  # train: the update
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # boot, imports, setup, work
    error: str = ""  # a site's own refusal, without values of its rows


@dataclass(frozen=True)
class Arrival:
    """An arrival is what a transport received: a reply, or the reason why there is none."""

    sender: str | None  # the site's name according to the connection, not to the reply; None if unknown
    reply: Reply | None
    error: str = ""  # why there is no reply
    bytes: int = 0  # of the message, if known
    nonce: str = ""  # of the order that an error belongs to, if known
    asked_again: bool = False  # whether the order was sent again, so that its reply is still awaited
    gone: bool = False  # whether there is no reply because the site lost its connection


class Transport(Protocol):
    """A transport connects a coordinator with its sites. Every method may raise TransportClosed."""

    def sites(self) -> dict[str, str]:
        """Return the names of the sites that are connected now, with their public keys (PEM)."""
        ...

    def send(self, orders: Sequence[Order], ttl: float) -> None:
        """Send orders; what is not delivered within `ttl` seconds may be dropped."""
        ...

    def receive(self, seconds: float) -> list[Arrival]:
        """Return what has arrived, as soon as something has, or nothing after `seconds`."""
        ...


@runtime_checkable
class NoticesStarts(Protocol):
    """A transport may also notice that a site was started anew while it seemed to be connected all the time."""

    def started(self, site: str) -> str:
        """Return a text that changes whenever the node of a connected site is started anew or returns."""
        ...


def new_nonce() -> str:
    """Return 32 hexadecimal digits that nobody can guess."""
    return secrets.token_hex(16)


def printable(text: object, limit: int = MAX_TEXT) -> str:
    """Return an untrusted text on one line, without control characters and with at most `limit` characters."""
    if not isinstance(text, str):
        return f"(a value of type {type(text).__name__})"
    words = " ".join(text[: 4 * limit].split())  # line breaks and tabs
    line = "".join(c if c.isprintable() else "?" for c in words)  # escapes, and marks that reverse the direction
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
