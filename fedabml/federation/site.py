"""A site answers the coordinator's orders with the engine's own functions, on data that never leave it.

    reply = Site(SiteFolder(path)).handle(order)

Data and network are built once and stay in memory. A site answers an order that it cannot carry out with a refusal
without values of its rows; its own log has the details.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from ..accel.process import borrowed
from ..algorithms.base import State
from ..arguments import is_whole
from ..engine.client import client_round, initial_kept
from ..engine.lanes import Lanes
from ..engine.setting import Cohort
from ..errors import InputError
from ..files.sealed import write_json
from . import handshake, site_data
from .card import Card
from .folders import SiteFolder
from .kept import KeptLost, KeptVersions
from .messages import ORDER_KINDS, CardMissing, Order, Refusal, Reply
from .replies import ReplyLimits, check_update
from .scores import site_scores

log = logging.getLogger("fedabml")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread within this context: sums over several threads have different bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Site:
    """A site of a federation. `handle` may be called from several threads; orders are carried out one by one."""

    def __init__(self, folder: SiteFolder):
        self.folder = folder
        self._lock = Lock()
        self._card: Card | None = None
        self._cohort: tuple[tuple[str, int], Cohort] | None = None

    def handle(self, order: Order) -> Reply:
        """Carry out an order and return the reply. It never raises: `Reply.error` has the reason of a failure."""
        try:
            with self._lock, borrowed(), one_thread(), torch.no_grad():
                return self._handle(order)
        except KeptLost as error:
            return order.refuse(str(error), facts={"kept": "lost"})
        except CardMissing as error:
            return order.refuse(str(error), facts={"card": "missing"})
        except Refusal as error:
            return order.refuse(str(error))
        except Exception as error:
            log.exception("The order '%s' of round %s could not be carried out.", order.kind, order.round)
            return order.refuse(f"The site failed ({type(error).__name__}); its log has the reason.")

    def _handle(self, order: Order) -> Reply:
        self._check(order)
        if order.kind == "train":
            return self._train(order)
        if order.kind == "prior":
            return self._prior(order)
        if order.kind == "freeze":
            self._card = self._cohort = None
        started = time.perf_counter()
        answer = handshake.answer(order, self.folder)
        return order.reply(**answer, seconds={"work": time.perf_counter() - started})

    def _check(self, order: Order) -> None:
        """Refuse an order that is not meant for this site."""
        settings = self.folder.settings
        if order.kind not in ORDER_KINDS:
            raise Refusal("This version of fedabml does not know such an order.")
        if order.federation != settings.federation:
            raise Refusal("The order belongs to another federation.")
        if order.site != settings.name:
            raise Refusal("The order is meant for another site.")
        numbers = (order.number, order.round, order.attempt, order.counted)
        if not all(is_whole(number) and 0 <= number < 2**31 for number in numbers):
            raise Refusal("The order holds numbers that are no counts.")

    def _current_card(self, order: Order) -> Card:
        """Return the frozen card. Raises Refusal if it is not the order's."""
        if self._card is None:
            if not self.folder.card_file.is_file():
                raise CardMissing("This site has no card yet.")
            self._card = Card.load(self.folder.card_file)
        if order.card != self._card.digest:
            raise Refusal("The order belongs to another card than the one that this site has accepted.")
        return self._card

    # -- training -----------------------------------------------------------------------------------------------------
    def cohort(self, card: Card, number: int) -> Cohort:
        """Return this site's data and network, ready to train as the client `number`."""
        key = (card.digest, number)
        if self._cohort is None or self._cohort[0] != key:
            try:
                fed = site_data.load(self.folder, card)
            except InputError as error:  # the text contains no values of rows
                raise Refusal(f"The data cannot be used: {error}") from error
            self._cohort = key, Cohort(card.setting(fed, number), card.place())
        return self._cohort[1]

    def _train(self, order: Order) -> Reply:
        if not 0 <= order.counted < order.round:
            raise Refusal("The order counts rounds that have not happened.")
        started = time.perf_counter()
        card = self._current_card(order)
        cohort = self.cohort(card, order.number)
        shared = _checked_state(order.tensors, card)
        lanes = Lanes.in_round(cohort, shared, [0], order.round)
        versions = KeptVersions(self.folder.state, order.federation, order.card, order.number)
        kept = initial_kept(lanes)
        keeps = cohort.algorithm.keeps
        if keeps and order.counted:
            like = {name: value[0] for name, value in kept.items()}
            stored = versions.load(order.counted, like)
            kept = {name: value.unsqueeze(0) for name, value in stored.items()} or kept
        ready = time.perf_counter()
        result = client_round(lanes, kept, cohort.setting.epochs)
        update, after = ({n: v[0].clone() for n, v in part.items()} for part in (result.update, result.kept))
        values = [result.losses, *update.values(), *after.values()]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            raise Refusal(f"Training diverged at this site in round {order.round}. {cohort.algorithm.remedy}")
        if keeps:
            versions.save(order.round, after, order.counted)
        seconds = {"setup": ready - started, "work": time.perf_counter() - ready}
        samples, loss = int(cohort.fed.train.counts[0]), float(result.losses[0].double())
        facts = {}
        if order.facts.get("score") is True and self.folder.settings.allow_scores:
            facts = {"scores": site_scores(cohort, shared, kept, order.round - 1)}
            seconds["score"] = time.perf_counter() - ready - seconds["work"]
        return order.reply(samples=samples, loss=loss, tensors=update, seconds=seconds, facts=facts)

    # -- the prior ----------------------------------------------------------------------------------------------------
    def _prior(self, order: Order) -> Reply:
        """Write the newest prior and then its round, so that the round on disk is never newer than the prior."""
        started = time.perf_counter()
        card = self._current_card(order)
        prior = card.prior(_checked_state(order.tensors, card))
        prior.save(self.folder.prior_file)
        facts = {"federation": order.federation, "card": order.card, "round": order.round, "counted": order.counted}
        facts["digest"] = prior.digest
        write_json(self.folder.prior_facts_file, facts)
        return order.reply(facts={"round": order.round}, seconds={"work": time.perf_counter() - started})


def _checked_state(tensors: State, card: Card) -> State:
    """Return the shared state of an order in the algorithm's order of names. Raises Refusal for other tensors."""
    like = card.initial_shared()
    if reason := check_update(tensors, ReplyLimits(), like):
        raise Refusal(f"The order's tensors cannot be used: {reason}.")
    return {name: tensors[name] for name in like}
