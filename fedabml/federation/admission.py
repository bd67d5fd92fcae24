"""On the server's side, agree on one card with all sites, and offer it to sites that join later."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..algorithms.base import State
from ..errors import InputError
from . import handshake
from .card import Card
from .events import Events
from .folders import Member, ServerFolder
from .mailbox import Mailbox
from .messages import Order, Reply, new_nonce, printable
from .replies import check_identity
from .roster import Roster
from .schema import Schema

ADMIT_AGAIN = 10  # rounds until the card is offered again to a site that was left out, unless it reconnects


class Admission:
    """Admission holds the frozen card and writes orders that carry its digest."""

    def __init__(self, folder: ServerFolder, roster: Roster, mailbox: Mailbox, events: Events):
        self.folder, self.roster, self.mailbox, self.events = folder, roster, mailbox, events
        self.settings = folder.settings
        self.card: Card | None = None
        self.refused: dict[str, int] = {}  # by site: the round in which the card is offered to it again

    def read_card(self) -> Card | None:
        """Return the frozen card of the folder, or None if there is none yet."""
        if not self.folder.card_file.is_file():
            return None
        self.card = Card.load(self.folder.card_file)
        if self.card.federation != self.settings.federation:
            raise InputError(f"'{self.folder.card_file}' belongs to another federation.")
        return self.card

    def freeze(self) -> tuple[Card, tuple[str, ...]]:
        """Run the start protocol; return the card, which is then on disk, and the sites that have accepted it.

        The coordinator waits for all sites. With the schema's normalisation it waits at most `round_timeout` seconds
        once enough sites are connected; the others join later.
        """
        self._wait_for_sites()
        schema = Schema.load(self.folder.schema_file)

        def keep(card: Card) -> None:  # saved before any site gets it: a kill must not lead to a second card
            card.save(self.folder.card_file)
            self.card = card

        frozen = handshake.freeze(self.settings, schema, self.exchange_with(None), keep)
        self._report(frozen.refused, 0)
        return frozen.card, tuple(frozen.accepted)

    def _wait_for_sites(self) -> None:
        pooled, clock = self.settings.normalisation == "pooled", self.mailbox.clock
        since: float | None = None
        noted: list[str] | None = None
        while True:
            self.roster.refresh()
            members, connected = self.roster.members, self.roster.connected
            absent = [member.name for member in members if member.name not in connected]
            if absent != noted:
                noted = absent
                self.events.write("waiting", sites=absent)
            enough = len(connected) >= min(self.settings.min_replies, len(members))
            since = (clock() if since is None else since) if enough else None
            waited = since is not None and clock() - since >= self.settings.round_timeout
            if members and (not absent or (waited and not pooled)):
                return
            self.mailbox.idle()

    def admit(self, ready: Collection[str], round: int) -> list[str]:
        """Offer the card to connected sites that have not accepted it; return those that do so now.

        A site may have to read all of its data, so this takes at most a round's time-out. A site that needs longer is
        asked again some rounds later.
        """
        assert self.card is not None
        for name in self.roster.returned:
            self.refused.pop(name, None)
        connected = [m for m in self.roster.members if m.name in self.roster.connected and m.name not in ready]
        waiting = [member for member in connected if self.refused.get(member.name, 0) <= round]
        if not waiting:
            return []
        result = handshake.admit(self.card, self.settings, self.exchange_with(waiting, self.settings.round_timeout))
        silent = {m.name: "no answer" for m in waiting if m.name not in {*result.accepted, *result.refused}}
        self._report({**result.refused, **silent}, round)
        if result.accepted:
            self.events.write("admitted", sites=sorted(result.accepted))
        return list(result.accepted)

    def _report(self, refused: Mapping[str, str], round: int) -> None:
        if refused:
            self.events.write("refused", refused={printable(name, 63): printable(why) for name, why in refused.items()})
        for name in refused:
            self.refused[name] = round + ADMIT_AGAIN

    def exchange_with(
        self, members: Sequence[Member] | None, seconds: float = math.inf
    ) -> Callable[..., dict[str, Reply]]:
        """Return the function by which the start protocol sends orders to these sites, or to all connected ones.

        All of its calls together wait at most some `seconds`.
        """
        until = self.mailbox.clock() + seconds

        def exchange(kind: str, facts: dict[str, Any], tensors: State, timeout: float) -> dict[str, Reply]:
            asked = members or [m for m in self.roster.members if m.name in self.roster.connected]
            orders = [self.order(kind, member, tensors=tensors, facts=facts) for member in asked]
            collection = self.mailbox.collect(orders, check_identity, min(timeout, until - self.mailbox.clock()))
            if collection.rejected or collection.unanswered:
                self.events.write("answers", kind=kind, rejected=collection.listed(), missing=collection.unanswered)
            return collection.valid

        return exchange

    def order(
        self, kind: str, member: Member, round: int = 0, attempt: int = 1, counted: int = 0, **content: Any
    ) -> Order:
        """Return an order for one site, with a nonce of its own; `content` are its tensors and facts."""
        names = (self.settings.federation, self.card.digest if self.card else "", member.name, member.number)
        return Order(kind, *names, round, attempt, new_nonce(), counted, len(self.roster.members), **content)
