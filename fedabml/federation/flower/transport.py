"""Implement the coordinator's Transport over Flower's runtime API: push orders, and poll for replies every 0.2 s.

It differs from Flower's Grid in four ways. There is no pause of 3 s. The size of a reply is checked before the reply is
assembled. Sites are identified by their registered public keys. An order that Flower may have lost is sent again
with the same nonce: when the SuperLink was away, a SuperNode was restarted, or a part of a reply is lost. An order is
also sent again, a few times, when a reply lacks the site's authentication code: another site may have written that
reply, and Flower accepts one reply per message. A site that gets an order twice computes the same reply twice, and the
coordinator counts one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import GetNodesRequest, PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from ...errors import InputError
from ..folders import ServerFolder
from ..macs import read_secret
from ..messages import Arrival, Order, Reply, printable
from . import codec
from .objects import Download, LostMessage, inflate
from .runtime import Link
from .uploads import Upload

log = logging.getLogger("fedabml.federation")

POLL = 0.2  # seconds between two requests for replies
NODES_POLL = 3.0  # seconds between two requests for the list of nodes while replies are outstanding
AFTERMATH = 90.0  # seconds after an outage in which nodes may still seem to be away
GRACE = 30.0  # seconds after an outage before an order without a complete reply is sent again
STALLED = 200.0  # seconds without a new part of a reply; the SuperLink gives an upload up after 180
RESENDS = 10
UNPROVEN = 3  # replies without the site's authentication code after which an order is not sent again
OUTBOX = "orders.outbox"
_LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


@dataclass
class _Pending:
    """An order whose reply is outstanding."""

    order: Order
    node: int
    expires: float  # time.monotonic()
    activated: str  # when its SuperNode was started, as the SuperLink reports it
    outages: int  # of the link, when it was sent
    resends: int = 0
    unproven: int = 0  # replies without the site's authentication code

    def expired(self) -> bool:
        """Return whether nobody waits for the reply any more."""
        return time.monotonic() >= self.expires


@dataclass
class _Incoming:
    """A reply whose parts are being fetched."""

    pending: _Pending
    sender: int
    download: Download
    announced: float  # time.monotonic()


class FlowerTransport:
    """A Transport (see messages) over one run of a federation's app."""

    def __init__(self, link: Link, run_id: int, folder: ServerFolder) -> None:
        self._link, self._run, self._folder = link, run_id, folder
        self._limit = folder.settings.max_message_mb << 20
        self._secrets: dict[str, bytes] = {}  # of the sites
        self._outbox = folder.run / OUTBOX
        self._node = Node(node_id=SUPERLINK_NODE_ID)
        self._pending: dict[str, _Pending] = {}  # by the message's id
        self._lost: list[_Pending] = []  # to be sent again once their SuperNodes are there
        self._incoming: list[_Incoming] = []
        self._names: dict[int, str] = {}  # of nodes, kept when they leave: a late reply still has a sender
        self._activated: dict[int, str] = {}  # of the nodes that are there now
        self._newest: dict[str, str] = {}  # the nonce of each site's newest order
        self._looked = float("-inf")
        self._complete_outbox()

    # -- the coordinator's calls ------------------------------------------------------------------------------------
    def sites(self) -> dict[str, str]:
        """Return the names of the sites that are connected now, with their public keys."""
        keys = {}
        for member in self._folder.members():
            if self._knows_secret(member.name):
                keys[member.public_key] = member.name
        nodes = self._link.call("GetNodes", GetNodesRequest()).nodes
        self._looked = time.monotonic()
        found: dict[str, str] = {}
        self._activated = {}
        for node in nodes:
            key = bytes(node.public_key).decode("ascii", "replace")
            if key in keys:
                found[keys[key]] = key
                self._names[node.node_id] = keys[key]
                self._activated[node.node_id] = node.last_activated_at
        return found

    def started(self, site: str) -> str:
        """Return the identity of a site's node and when it was last activated, as of the last call of `sites`."""
        node = self._node_of(site)
        return "" if node is None else f"{node} {self._activated[node]}"

    def _knows_secret(self, name: str) -> bool:
        """Read a member's secret, unless it is known. Returns False if the member is being removed at this moment."""
        if name not in self._secrets:
            try:
                self._secrets[name] = read_secret(self._folder.site_secret(name))
            except InputError:
                if any(member.name == name for member in self._folder.members()):
                    raise
                return False
        return True

    def send(self, orders: Sequence[Order], ttl: float) -> None:
        """Send orders that are valid for `ttl` seconds. Nothing arrives for those that nobody answers until then."""
        if any(self._node_of(order.site) is None for order in orders):
            self.sites()
        until, batch = time.monotonic() + ttl, []
        for order in orders:
            self._newest[order.site] = order.nonce
            node = self._node_of(order.site)
            batch.append(_Pending(order, -1 if node is None else node, until, "", 0))
        self._push([pending for pending in batch if pending.node >= 0])
        self._lost += [pending for pending in batch if pending.node < 0]

    def receive(self, seconds: float) -> list[Arrival]:
        """Return what has arrived as soon as something has, or nothing after `seconds`."""
        until = time.monotonic() + seconds
        while True:
            arrivals = self._poll()
            left = until - time.monotonic()
            if arrivals or left <= 0:
                return arrivals
            time.sleep(min(POLL, left))

    # -- sending ----------------------------------------------------------------------------------------------------
    def _node_of(self, site: str) -> int | None:
        here = [node for node in self._activated if self._names[node] == site]
        return here[0] if here else None

    def _push(self, batch: list[_Pending]) -> None:
        """Push orders. If the SuperLink went away in between, push them again as new messages.

        Orders that expire meanwhile are dropped: their sites are silent.
        """
        packed: dict[int, codec.Packed] = {}  # orders that share their tensors share their bytes, uploaded once
        while batch := [pending for pending in batch if not pending.expired()]:
            messages = []
            for pending in batch:
                order = pending.order
                if id(order.tensors) not in packed:
                    packed[id(order.tensors)] = codec.Packed(order.tensors)
                content = codec.order_content(order, self._secrets[order.site], packed[id(order.tensors)])
                ttl = max(pending.expires - time.monotonic(), 1.0)
                group = str(order.round)
                messages.append(Message(content, pending.node, codec.MESSAGE_TYPE, ttl=ttl, group_id=group))
            before = self._link.outages
            upload = Upload.of(messages)
            upload.save(self._outbox)
            try:
                names = upload.send(self._link, self._run, SUPERLINK_NODE_ID)
            except ObjectPushError:
                log.info("The upload of orders was interrupted; they are sent again.")
                time.sleep(POLL)
                continue
            except httpx.HTTPStatusError:
                if not any(pending.expired() for pending in batch):
                    raise
                log.info("The SuperLink refused orders of which some had expired; the others are sent again.")
                continue
            self._outbox.unlink(missing_ok=True)
            refused = []
            for pending, name in zip(batch, names, strict=True):
                if name:
                    pending.activated, pending.outages = self._activated.get(pending.node, ""), before
                    self._pending[name] = pending
                else:
                    refused.append(pending)
            self._lost += refused
            return
        self._outbox.unlink(missing_ok=True)

    def _complete_outbox(self) -> None:
        """Complete a push that a kill interrupted, because the receivers wait for the missing parts."""
        if not self._outbox.exists():
            return
        try:
            upload = Upload.load(self._outbox)
            if upload.belongs_to(self._run):  # the SuperLink drops what other runs have left
                upload.send(self._link, self._run, SUPERLINK_NODE_ID)
                log.info("Orders that an earlier process was sending are complete now.")
        except (InputError, ObjectPushError, httpx.HTTPStatusError) as error:
            log.info("Orders of an earlier process could not be completed: %s", type(error).__name__)
        self._outbox.unlink(missing_ok=True)

    # -- receiving --------------------------------------------------------------------------------------------------
    def _poll(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        if self._pending:
            request = PullAppMessagesRequest(message_ids=list(self._pending))
            response = self._link.call("PullMessages", request)
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                arrivals += self._announced(message, tree)
        for incoming in list(self._incoming):
            arrivals += self._fetched(incoming)
        self._resend()
        now = time.monotonic()
        self._lost = [pending for pending in self._lost if not pending.expired()]
        for name in [name for name, pending in self._pending.items() if pending.expires + AFTERMATH < now]:
            del self._pending[name]
        return arrivals

    def _announced(self, message: Any, tree: ObjectTree) -> list[Arrival]:
        """Start to fetch a reply whose head the SuperLink has reported."""
        pending = self._pending.pop(message.metadata.reply_to_message_id, None)
        if pending is None:
            return []
        try:
            download = Download(self._link, self._run, SUPERLINK_NODE_ID, tree, self._limit)
        except InputError as error:
            return self._unproven(pending, str(error))
        self._incoming.append(_Incoming(pending, message.metadata.src_node_id, download, time.monotonic()))
        return []

    def _fetched(self, incoming: _Incoming) -> list[Arrival]:
        """Fetch the available parts of a reply; return the reply once it is complete."""
        pending, download = incoming.pending, incoming.download
        try:
            if not download.advance():
                # an outage after the announcement, or shortly before it, may have cut the upload
                cut = self._link.last_outage > incoming.announced - AFTERMATH
                since = max(download.progress, self._link.last_outage)
                if time.monotonic() - since < (GRACE if cut else STALLED):
                    return []
                raise LostMessage("The reply's sender did not finish the upload.")
            self._incoming.remove(incoming)
            self._confirm(download.root)
            message = inflate(download.root, download.contents, self._limit)
            if message.has_error():
                return self._error(pending, message, download.bytes)
            reply = self._decoded(message)
        except LostMessage as error:
            self._incoming.remove(incoming)
            return self._again(pending, str(error))
        except InputError as error:
            if incoming in self._incoming:
                self._incoming.remove(incoming)
                self._confirm(download.root)
            return self._unproven(pending, str(error), download.bytes)
        self._pending = {name: other for name, other in self._pending.items() if other.order is not pending.order}
        self._lost = [other for other in self._lost if other.order is not pending.order]
        return [Arrival(self._names.get(incoming.sender), reply, "", download.bytes)]

    def _decoded(self, message: Message) -> Reply:
        """Return the reply in a message. Any failure is raised as InputError, so that no bytes can end the run."""
        try:
            return codec.reply_of(message, self._secrets, self._limit)
        except InputError:
            raise
        except Exception as error:
            log.warning("A reply could not be decoded.", exc_info=True)
            raise InputError(f"The reply cannot be read ({type(error).__name__}).") from error

    def _confirm(self, root: str) -> None:
        """Let the SuperLink delete a message."""
        request = ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=root)
        self._link.call("ConfirmMessageReceived", request)

    def _error(self, pending: _Pending, message: Message, size: int) -> list[Arrival]:
        """Handle an error that Flower or the site's worker sent in place of a reply."""
        code, reason = message.error.code, printable(message.error.reason)
        recent = time.monotonic() - self._link.last_outage < AFTERMATH
        if code in _LOST or (code == ErrorCode.NODE_UNAVAILABLE and recent):
            return self._again(pending, reason)
        (arrival,) = _failed(pending, f"Flower's error {code}: {reason}", size)
        return [replace(arrival, gone=code == ErrorCode.NODE_UNAVAILABLE)]

    def _unproven(self, pending: _Pending, reason: str, size: int = 0) -> list[Arrival]:
        """Report a reply that its site may not have written. Send the order again, unless this happened too often."""
        (arrival,) = _failed(pending, reason, size)
        pending.unproven += 1
        if pending.unproven > UNPROVEN or self._again(pending, reason):
            return [arrival]
        return [replace(arrival, asked_again=True)]

    def _again(self, pending: _Pending, reason: str) -> list[Arrival]:
        """Queue an order to be sent again, or report it as failed. The site of an expired one is silent."""
        if pending.expired():
            return []
        if pending.resends >= RESENDS:
            return _failed(pending, reason)
        self._lost.append(pending)
        return []

    def _resend(self) -> None:
        """Send orders again that Flower may have lost."""
        now = time.monotonic()
        if not (self._pending or self._lost) or now - self._looked < NODES_POLL:
            return
        self.sites()
        calm = now - self._link.last_outage > GRACE
        for name, pending in list(self._pending.items()):
            started = self._activated.get(pending.node)
            if pending.resends >= RESENDS or self._newest.get(pending.order.site) != pending.order.nonce:
                continue
            if started is not None and started != pending.activated:  # the SuperNode forgot the order
                self._lost.append(self._pending.pop(name))
            elif calm and pending.outages < self._link.outages:  # the first message may still be answered
                pending.outages = self._link.outages
                self._lost.append(replace(pending))
        ready = []
        self._lost = [p for p in self._lost if self._newest.get(p.order.site) == p.order.nonce]
        for pending in list(self._lost):
            node = self._node_of(pending.order.site)
            if node is not None:
                self._lost.remove(pending)
                pending.node, pending.resends = node, pending.resends + 1
                log.info("The order of round %d is sent to %s again.", pending.order.round, pending.order.site)
                ready.append(pending)
        self._push(ready)


def _failed(pending: _Pending, error: str, size: int = 0) -> list[Arrival]:
    """Report that an order has no reply. The reason is cleaned, because it may contain untrusted text."""
    return [Arrival(pending.order.site, None, printable(error), size, pending.order.nonce)]
