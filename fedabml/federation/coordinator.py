"""The coordinator leads a federation over a transport, from the start protocol to the last prior.

    Coordinator(ServerFolder(path), transport).run()

The engine does the arithmetic: if all sites reply, a round has the same bits as the simulator's with backend `loop` and
one worker. This module adds what a network needs: which sites are drawn, how long a round waits, which replies count,
and a state on disk from which another coordinator continues with the next round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..accel.process import borrowed
from ..algorithms.base import State
from ..engine import server
from ..engine.client import no_update
from ..engine.server import ServerState, client_weights, cohort_size, server_step, state_bytes
from ..engine.setting import Cohort
from ..errors import InputError, TrainingError
from ..files.paths import folder_lock
from . import server_state
from .admission import Admission
from .card import Card
from .collection import Collection
from .events import Event, Events, read_tally
from .folders import Member, ServerFolder
from .mailbox import Mailbox, StopRequested
from .messages import Arrival, Order, Reply, Transport, TransportClosed, printable
from .meter import refused_sites
from .replies import ReplyLimits, check, check_identity, check_update, outliers, seconds_of
from .robust import aggregate
from .roster import Roster, draw
from .scores import check_scores, mean_scores
from .server_state import Saved
from .settings import MOST_PATIENCE
from .stand_in import stand_in

__all__ = ["Arrival", "Coordinator", "StopRequested", "Transport", "TransportClosed"]
LOCK_WAIT = 60.0  # seconds to wait for another coordinator in the same folder to end
RETRY = 30.0  # seconds until a prior is sent again to a site that did not confirm it


class Coordinator:
    """A coordinator leads a federation's rounds. `clock` counts seconds; `on_event` is called with every event."""

    def __init__(
        self,
        folder: ServerFolder,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[Event], None] | None = None,
    ):
        self.folder, self.transport, self.clock = folder, transport, clock
        self.settings = folder.settings
        self.events = Events(folder, on_event)
        self.limits = ReplyLimits(self.settings.max_samples, self.settings.max_message_mb << 20)
        self.roster = Roster(folder, transport, self.settings.rest_rounds, clock)
        self.mailbox = Mailbox(transport, clock, folder.stop_file, self.limits.max_bytes, self.roster.removed)
        self.lost: set[str] = set()  # sites whose kept state is gone
        self.fruitless: set[str] = set()  # sites whose orders of the last attempt brought no valid reply
        self.surplus: set[str] = set()  # sites that may still compute a reply that the last round did not need
        self.without_card: set[str] = set()  # sites that have lost the card, to which it is offered again
        self.admission = Admission(folder, self.roster, self.mailbox, self.events)
        self.card: Card
        self.saved: Saved

    def run(self) -> None:
        """Lead the federation until a stop file appears or the transport ends.

        Raises TrainingError if a round is given up, and InputError if no card can be agreed on.
        """
        with _exclusive_access(self.folder), borrowed(), torch.no_grad():
            try:
                self._start()
                while self.saved.state.round < self.settings.rounds:
                    self._run_round()
                self._hand_out_priors()
                self.events.write("end", reason="stopped", round=self.saved.state.round)
            except (StopRequested, TransportClosed) as error:
                reason = "stopped" if isinstance(error, StopRequested) else "the transport ended"
                self.events.write("end", reason=reason, round=self.round)
            except InputError as error:  # `status` shows which site does not fit, and why
                self.events.write("error", error=printable(str(error), 2000))
                raise

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.saved.state.round if hasattr(self, "saved") else 0

    # -- the start ----------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        """Agree on a card, or read the frozen one, and read the server's state."""
        settings = self.settings
        facts = {"federation": settings.federation, "name": settings.name, "rounds": settings.rounds}
        sites = [member.name for member in self.folder.members()]
        self.events.write("start", **facts, sites=sites, algorithm=settings.algorithm, model=settings.model)
        card = self.admission.read_card()
        ready: tuple[str, ...] = ()
        if card is None:
            card, ready = self.admission.freeze()
        self.card = card
        cohort = Cohort(self.card.setting(stand_in(self.card.input_spec), 0), self.card.place())
        self.algorithm, self.network = cohort.algorithm, cohort.network
        first = server.initial_state(self.algorithm, self.network)
        self.update_like = no_update(cohort, first.shared)
        saved = server_state.load(self.folder.state, settings.federation, self.card.digest, first.shared)
        if saved is None and read_tally(self.folder).rounds_done:
            raise InputError(
                f"'{self.folder.state}' has no state of the server (server-*.safetensors), but rounds were done. "
                "Restore it from a backup. To train anew from the first round, move the files events*.jsonl away."
            )
        self.saved = saved or Saved(settings.federation, self.card.digest, first, ready=ready)
        self.counted = dict(self.saved.counted)
        if saved is None:
            server_state.save(self.folder.state, self.saved)
        self.events.write("card", digest=self.card.digest, round=self.round, ready=sorted(self.saved.ready))

    # -- a round ------------------------------------------------------------------------------------------------------
    def _run_round(self) -> None:
        """Run the next round; repeat it from the same state while too few replies are valid, then give up."""
        number, attempts, reason = self.round + 1, self.settings.attempts, ""
        began = self.clock()
        for attempt in range(1, attempts + 1):
            if attempt > 1:
                self._pause(number, began + min(self.settings.round_timeout, MOST_PATIENCE))
                began = self.clock()
            reason = self._try_round(number, attempt)
            if not reason:
                break
        else:
            self.events.write("gave_up", round=number, attempts=attempts, reason=reason)
            raise TrainingError(
                f"Round {number} was given up after {attempts} attempts: {reason}. The state after round {self.round} "
                "is saved. See `fedabml federation status`, and go on with `fedabml federation resume`. If a false "
                "reply has spoilt that state, go back to an earlier one with --from-round."
            )
        every = self.settings.prior_every
        if every and number % every == 0 and number < self.settings.rounds:
            busy = {m.name for m in self.roster.members if self.roster.rests(m.name, number)} | self.surplus
            ready = [m for m in self.roster.members if m.name in self.saved.ready and m.name not in busy]
            self._send_prior(ready, self.settings.patience)

    def _pause(self, number: int, until: float) -> None:
        """Wait before a repeated attempt until a time of the clock, or until enough sites could give a valid reply.

        A site whose order has just brought no valid reply counts again when its node is started anew or returns. So a
        site that fails at once does not use up all attempts while another one is away for some seconds.
        """
        hopeless = set(self.fruitless)
        while True:
            self.roster.refresh()
            self._admit_newcomers()
            hopeless -= self.roster.returned
            could = {m.name for m in self.roster.members if m.name in self.saved.ready} & self.roster.connected
            could = {name for name in could - hopeless if not self.roster.rests(name, number)}
            if len(could) >= self.settings.min_replies or self.clock() >= until:
                return
            self.mailbox.idle()

    def _try_round(self, number: int, attempt: int) -> str:
        """Try a round once. Return why it failed, or an empty text once the state after it is saved."""
        times = [time.perf_counter()]
        available, deadline = self._available(number, attempt)
        clients, size = self._sizes()
        orders = self._orders(available, size, number, attempt)
        times.append(time.perf_counter())
        enough = size if self.settings.over_select else 0
        collection = self.mailbox.collect(orders, self._check_reply, deadline - self.clock(), enough)
        if collection.withdrawn:
            self.roster.members = [m for m in self.roster.members if m.name not in collection.withdrawn]
            clients, _ = self._sizes()
        self._rest_silent(collection, number)
        self.surplus = set(collection.surplus)
        mended = self.lost | self.without_card  # these can reply at once
        self._forget_lost()
        self._drop_outliers(collection, clients)
        self.fruitless = {order.site for order in orders} - set(collection.valid) - set(collection.surplus) - mended
        times.append(time.perf_counter())
        reason = self._too_few(len(available), clients, len(orders), len(collection.valid))
        state = None if reason else self._merged(collection.valid, clients)
        if state and any(check_update(x, self.limits, self.saved.state.shared) for x in (state.shared, state.average)):
            state, reason = None, "the merged state is not finite, or its numbers are too large"
        times.append(time.perf_counter())
        line = self._line(number, attempt, orders, collection, times)
        if state is None:
            self.events.write("repeat", **line, reason=reason)
            return reason
        self._save_round(state, line)
        line["seconds"]["save"] = round(time.perf_counter() - times[-1], 4)
        self.events.write("round", **line)
        return ""

    def _orders(self, available: Sequence[Member], size: int, number: int, attempt: int) -> list[Order]:
        """Draw sites for an attempt and return their orders; no order if too few can be drawn."""
        settings = self.settings
        drawn = draw(available, size, settings.over_select, self.card.seed, number, attempt)
        scored = bool(settings.score_every) and number % settings.score_every == 0
        content = {"tensors": self.saved.state.shared, "facts": {"score": True} if scored else {}}
        return [
            self.admission.order("train", m, number, attempt, counted=self.counted.get(m.name, 0), **content)
            for m in (drawn if len(drawn) >= settings.min_replies else ())
        ]

    def _rest_silent(self, collection: Collection, number: int) -> None:
        """Let sites rest that gave no reply, or a failed one, and wake those that replied."""
        for name in collection.late.union(collection.valid):
            self.roster.wake(name)
        refused = refused_sites(self.folder)
        for name in collection.missing:
            self.roster.rest(name, number)
            if name in refused:
                collection.reject(name, refused[name])
        for name in collection.failed:
            self.roster.rest(name, number, silent=False)

    def _too_few(self, available: int, clients: int, drawn: int, valid: int) -> str:
        """Return why these numbers of sites and of valid replies make no round, or an empty text."""
        least = self.settings.min_replies
        if not drawn:
            return f"{available} of {clients} sites are available, and {least} are needed (min_replies)"
        return f"{valid} of {drawn} sites gave a valid reply, and {least} are needed" if valid < least else ""

    def _save_round(self, state: ServerState, line: dict[str, Any]) -> None:
        """Save the state after a round, whose facts are `line`."""
        self.counted |= dict.fromkeys(line["valid"], line["round"])
        history = (*self.saved.history, {name: line[name] for name in ("round", "loss", "valid")})
        counted = dict(self.counted)
        saved = replace(self.saved, state=state, counted=counted, history=history[-server_state.HISTORY :])
        server_state.save(self.folder.state, saved)
        self.saved = saved

    def _sizes(self) -> tuple[int, int]:
        """Return how many sites there are, and how many a round draws: at least as many as must reply."""
        clients = len(self.roster.members)
        return clients, max(cohort_size(clients, self.settings.participation), self.settings.min_replies)

    def _available(self, round: int, attempt: int) -> tuple[list[Member], float]:
        """Return the sites that may be drawn, and when the attempt ends.

        The time-out begins when enough sites are there and newcomers have been asked. The time spent on absent sites
        counts, and is bounded. Before, the call waits one time-out for too few sites. Too few have answered an earlier
        attempt, so a repeated round does without resting sites only if the others suffice for a whole draw.
        """
        timeout, least = self.settings.round_timeout, self.settings.min_replies
        began, since = self.clock(), None
        while True:
            self.roster.refresh()
            self._admit_newcomers()
            now = self.clock()
            ready, enough = self.saved.ready, least if attempt == 1 else self._sizes()[1]
            available, absent = self.roster.available(ready, round, enough), self.roster.absent(ready, round)
            if len(available) < least:
                since = None
            elif since is None:
                since = now
            over = now >= (began + timeout if since is None else since + self.settings.patience)
            if over or (since is not None and not absent):
                self.roster.give_up(absent)
                return available, (self.clock() if since is None else since + timeout)
            self.mailbox.idle()

    def _admit_newcomers(self) -> None:
        """Let connected sites that accept the card take part from now on."""
        if accepted := self.admission.admit(self.saved.ready, self.round):
            self.saved = replace(self.saved, ready=tuple(sorted({*self.saved.ready, *accepted})))
            server_state.save(self.folder.state, self.saved)

    def _check_reply(self, reply: Reply, order: Order) -> str | None:
        """Return why a reply is invalid, by itself or because merging it alone gives an invalid state, or None."""
        if reason := check(reply, order, self.limits, self.update_like):
            self._note_loss(reply, order)
            return reason
        reason = check_update(self._state_from_only(reply, order.clients), self.limits, self.saved.state.shared)
        return f"merged alone, {reason}" if reason else None

    def _state_from_only(self, reply: Reply, clients: int) -> State:
        """Return the shared state after a round in which only this reply counts."""
        return self.algorithm.merge(self.saved.state.shared, reply.tensors, 1, max(1, clients))

    def _check_prior(self, reply: Reply, order: Order) -> str | None:
        if reason := check_identity(reply, order):
            return reason
        self._note_loss(reply, order)
        return f"the site refused: {printable(reply.error)}" if reply.error else None

    def _note_loss(self, reply: Reply, order: Order) -> None:
        """Record what a refusing site reports as lost: its kept state or its card."""
        facts = reply.facts if reply.error and isinstance(reply.facts, dict) else {}
        if facts.get("kept") == "lost":
            self.lost.add(order.site)
        if facts.get("card") == "missing":
            self.without_card.add(order.site)

    def _forget_lost(self) -> None:
        """Let sites that lost their kept state begin again; sites without a card must first accept it again."""
        for name in self.lost | self.without_card:
            self.counted.pop(name, None)
        if self.without_card:
            ready = tuple(name for name in self.saved.ready if name not in self.without_card)
            self.saved = replace(self.saved, ready=ready)
        self.lost.clear()
        self.without_card.clear()

    def _drop_outliers(self, collection: Collection, clients: int) -> None:
        names, before = list(collection.valid), self.saved.state.shared
        states = [self._state_from_only(collection.valid[name], clients) for name in names]
        for name, reason in zip(names, outliers(states, self.settings.norm_factor, before), strict=True):
            if reason:
                collection.drop(name, reason)

    def _merged(self, valid: dict[str, Reply], clients: int) -> ServerState:
        """Return the server after the round of these replies, summed in the order of the sites' numbers."""
        replies = [valid[name] for name in sorted(valid, key=self.roster.number)]
        updates = {name: torch.stack([reply.tensors[name] for reply in replies]) for name in self.update_like}
        counts = np.array([reply.samples for reply in replies])
        weights = client_weights(self.algorithm, counts, self.network.initial)
        update = aggregate(self.settings.aggregation, weights, updates, self.settings.trim)
        return server_step(self.algorithm, self.saved.state, update, len(replies), clients)

    def _line(
        self,
        number: int,
        attempt: int,
        orders: Sequence[Order],
        collection: Collection,
        times: Sequence[float],
    ) -> dict[str, Any]:
        """Return the facts about an attempt for the file of events."""
        valid = {name: collection.valid[name] for name in sorted(collection.valid, key=self.roster.number)}
        losses = {name: float(reply.loss) for name, reply in valid.items()}
        parts = {name: round(b - a, 4) for name, a, b in zip(("draw", "wait", "merge"), times, times[1:], strict=False)}
        return {
            "round": number,
            "attempt": attempt,
            "sites": [order.site for order in orders],
            "connected": sorted(self.roster.connected),
            "resting": self.roster.resting(number),
            "valid": list(valid),
            "rejected": collection.listed() + self._strays(),
            "missing": collection.unanswered,
            "surplus": sorted(collection.surplus),
            "loss": math.fsum(losses.values()) / len(losses) if losses else None,
            "losses": losses,
            "scores": mean_scores(check_scores(reply.facts, self.settings.max_samples) for reply in valid.values()),
            "seconds": parts,
            "site_seconds": {name: seconds_of(reply) for name, reply in valid.items()},
            "bytes_down": sum(state_bytes(order.tensors) for order in orders),
            "bytes_up": collection.bytes_up,
        }

    def _strays(self) -> list[dict[str, Any]]:
        """Return the rejections of what arrived while no reply was awaited, such as late replies."""
        return self.mailbox.take_stray().listed()

    # -- the prior ----------------------------------------------------------------------------------------------------
    def _hand_out_priors(self) -> None:
        """Send the final prior to all sites, also to those that return or join later, until the operator stops."""
        self.card.prior(server.theta(self.algorithm, self.saved.state)).save(self.folder.prior_file)
        self.events.write("finished", round=self.round)
        have: set[str] = set()
        again: dict[str, float] = {}
        while True:
            try:
                self.roster.refresh()
                self._admit_newcomers()
                lack = [
                    m for m in self.roster.members if m.name in self.roster.connected and m.name in self.saved.ready
                ]
                lack = [m for m in lack if m.name not in have and self.clock() >= again.get(m.name, -math.inf)]
                if lack:
                    have |= self._send_prior(lack, self.settings.round_timeout)
                    again |= {m.name: self.clock() + RETRY for m in lack}
                self.mailbox.idle()
                if late := self._strays():
                    self.events.write("late", round=self.round, rejected=late)
            except StopRequested:
                return

    def _send_prior(self, members: Sequence[Member], timeout: float) -> set[str]:
        """Send the newest prior to sites; return those that have it now."""
        newest = server.theta(self.algorithm, self.saved.state)
        orders = [
            self.admission.order("prior", m, self.round, counted=self.counted.get(m.name, 0), tensors=newest)
            for m in members
            if m.name in self.roster.connected
        ]
        collection = self.mailbox.collect(orders, self._check_prior, timeout)
        self._forget_lost()
        facts: dict[str, Any] = {"rejected": collection.listed() + self._strays(), "missing": collection.unanswered}
        facts |= {"bytes_down": sum(state_bytes(order.tensors) for order in orders), "bytes_up": collection.bytes_up}
        self.events.write("prior", round=self.round, sites=sorted(collection.valid), **facts)
        return set(collection.valid)


@contextmanager
def _exclusive_access(folder: ServerFolder) -> Iterator[None]:
    """Keep other coordinators out of the folder, after waiting a bounded time for one that is about to end."""
    deadline = time.monotonic() + LOCK_WAIT
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder_lock(folder.state, "coordinator.lock"))
                break
            except InputError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)
        yield
