"""The coordinator's transport over a real SuperLink's runtime API, with sites at its fleet API."""

from __future__ import annotations

import shutil
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode

from fedabml.errors import InputError
from fedabml.federation import keys as federation_keys
from fedabml.federation.flower import runtime
from fedabml.federation.flower import transport as module
from fedabml.federation.flower.app import app_hash
from fedabml.federation.flower.runtime import RunEnded
from fedabml.federation.flower.tasks import ForeignApp, Task
from fedabml.federation.flower.transport import FlowerTransport
from fedabml.federation.folders import Member, ServerFolder, write_secret
from fedabml.federation.messages import Arrival, Order, TransportClosed, new_nonce
from fedabml.federation.settings import Settings

from .superlink_api import DATABASE, FleetSite, SuperLinkApi, connected, fleet, until

# The SuperLink runs in this process, and its database library warns about itself.
pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning"),
]
SHARED = {"theta": torch.arange(400_000, dtype=torch.float32)}  # more than travels inside a record


@dataclass
class World:
    """A SuperLink with a run, two registered sites, and the transport."""

    api: SuperLinkApi
    task: Task
    folder: ServerFolder
    keys: dict[str, Any]
    transport: FlowerTransport

    def orders(self, number: int = 1, names: tuple[str, ...] = ("a", "b"), **changes: Any) -> dict[str, Order]:
        first = Order("train", "f" * 32, "c" * 64, "", 0, number, 1, "", tensors=SHARED)
        return {name: replace(first, site=name, nonce=new_nonce(), **changes) for name in names}

    def next(self) -> Arrival:
        arrivals = until(lambda: self.transport.receive(1.0), "an arrival")
        assert len(arrivals) == 1
        return arrivals[0]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty database of a SuperLink, which takes seconds to make."""
    place = tmp_path_factory.mktemp("database")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SuperLinkApi(place, 0, patch).make_database()
    return place / DATABASE


@pytest.fixture
def world(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    shutil.copy(database, tmp_path / DATABASE)
    monkeypatch.setattr(module, "NODES_POLL", 0.1)
    monkeypatch.setattr(module, "GRACE", 1.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    folder = ServerFolder(tmp_path / "server")
    folder.make()
    settings = {"federation": "f" * 32, "name": "t", "host": "localhost", "port": 1, "superlink_port": port}
    Settings.of({**settings, "max_message_mb": 4}).save(folder.settings_file)
    keys = {name: federation_keys.make_site_keys() for name in ("a", "b")}
    folder.save_sites([Member(name, i, key.pem) for i, (name, key) in enumerate(keys.items())])
    for name, key in keys.items():
        write_secret(folder.site_secret(name), key.secret)
    api = SuperLinkApi(tmp_path, port, monkeypatch)
    api.start()
    for name, key in keys.items():
        api.register(name, key.pem)
    task = api.begin_run()
    task.pull_input({app_hash(tmp_path / "app")})
    yield World(api, task, folder, keys, FlowerTransport(task.link, task.run_id, folder))
    task.link.close()
    api.stop()


def double(order: Order) -> Any:
    return order.reply(samples=3, tensors={"theta": 2 * order.tensors["theta"]})


def test_orders_go_out_and_replies_come_as_they_come(world: World) -> None:
    assert world.transport.sites() == {}
    with fleet(world.api, world.keys) as sites:
        assert world.transport.sites() == {name: key.pem for name, key in world.keys.items()}
        orders = world.orders()
        world.transport.send(list(orders.values()), 100.0)
        assert world.transport.receive(0.0) == []
        for name in ("b", "a"):
            order, message = sites[name].receive()
            assert replace(order, tensors={}) == replace(orders[name], tensors={})
            sites[name].answer(message, double(order))
            arrival = world.next()
            assert arrival.sender == name and arrival.reply is not None and arrival.error == ""
            assert torch.equal(arrival.reply.tensors["theta"], 2 * SHARED["theta"])
            assert 1_600_000 < arrival.bytes < 1_610_000
        assert world.transport.receive(0.5) == []


def test_bad_replies_are_refused_and_named(world: World) -> None:
    big = Array("uint8", (6 << 20,), "raw", bytes(6 << 20))
    with fleet(world.api, world.keys) as sites:

        def arrival_of(send: Any) -> Arrival:
            orders = world.orders(names=("a",))
            world.transport.send(list(orders.values()), 100.0)
            order, message = sites["a"].receive()
            while order.nonce != orders["a"].nonce:  # an earlier one, which was sent again
                order, message = sites["a"].receive()
            send(order, message)
            arrival = world.next()
            assert arrival.sender == "a" and arrival.reply is None and arrival.nonce == orders["a"].nonce
            return arrival

        def too_large(order: Order, message: Message) -> None:
            sites["a"].send(Message(RecordDict({"x": ArrayRecord({"data": big})}), reply_to=message))

        def in_anothers_name(order: Order, message: Message) -> None:
            sites["a"].answer(message, replace(double(order), site="b"))

        def empty(order: Order, message: Message) -> None:
            sites["a"].send(Message(RecordDict(), reply_to=message))

        def error(order: Order, message: Message) -> None:
            sites["a"].send(Message(Error(2, "\x1b[2J" + "x" * 10_000), reply_to=message))

        assert "larger than the 4,194,304 bytes" in arrival_of(too_large).error
        assert "not written by the site" in arrival_of(in_anothers_name).error
        assert "not part of the protocol" in arrival_of(empty).error

        def gone(order: Order, message: Message) -> None:
            sites["a"].send(Message(Error(ErrorCode.NODE_UNAVAILABLE, "away"), reply_to=message))

        arrival = arrival_of(error)
        assert "error 2" in arrival.error and len(arrival.error) <= 300 and arrival.error.isprintable()
        assert not arrival.gone and arrival_of(gone).gone


def test_a_slow_upload_does_not_hold_up_others(world: World) -> None:
    with fleet(world.api, world.keys) as sites:
        orders = world.orders()
        world.transport.send(list(orders.values()), 100.0)
        received = {name: sites[name].receive() for name in sites}
        order, message = received["a"]
        sites["a"].answer(message, double(order), parts=1)
        assert world.transport.receive(0.3) == []
        order, message = received["b"]
        sites["b"].answer(message, double(order))
        assert world.next().sender == "b"


def test_an_unfinished_upload_is_asked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED", 0.5)
    with fleet(world.api, world.keys) as sites:
        orders = world.orders(names=("a",))
        world.transport.send(list(orders.values()), 100.0)
        order, message = sites["a"].receive()
        sites["a"].answer(message, double(order), parts=1)
        again, message = _receive_while_polled(world, sites["a"])
        assert again.nonce == order.nonce
        sites["a"].answer(message, double(again))
        assert world.next().reply is not None


def test_an_upload_that_an_outage_has_cut_is_asked_for_again_soon(world: World) -> None:
    """The SuperLink dies during an upload, and announces the reply only after its restart."""
    with fleet(world.api, world.keys) as sites:
        world.transport.send(list(world.orders(names=("a",)).values()), 100.0)
        order, message = sites["a"].receive()
        sites["a"].answer(message, double(order), parts=1)
        world.api.stop()
        threading.Timer(0.5, world.api.start).start()
        again, message = _receive_while_polled(world, sites["a"])
        assert time.monotonic() - world.task.link.last_outage > module.GRACE  # the upload might have gone on
        assert world.task.link.outages and again.nonce == order.nonce
        sites["a"].answer(message, double(again))
        assert world.next().reply is not None


def test_a_forged_reply_does_not_take_the_place_of_the_true_one(world: World) -> None:
    with fleet(world.api, world.keys) as sites:
        orders = world.orders(names=("a",))
        world.transport.send(list(orders.values()), 100.0)
        order, message = sites["a"].receive()
        sites["b"].answer(message, double(order))
        arrival = world.next()
        assert arrival.asked_again and arrival.sender == "a" and "not written by the site" in arrival.error
        again, message = _receive_while_polled(world, sites["a"])
        assert again.nonce == order.nonce
        sites["a"].answer(message, double(again))
        assert world.next().reply is not None


def test_a_site_whose_code_is_always_wrong_is_given_up(world: World) -> None:
    with fleet(world.api, world.keys) as sites:
        world.transport.send(list(world.orders(names=("a",)).values()), 1000.0)
        order, message = sites["a"].receive()
        for number in range(module.UNPROVEN + 1):
            sites["a"].answer(message, replace(double(order), site="b"))
            assert world.next().asked_again == (number < module.UNPROVEN)
            if number < module.UNPROVEN:
                order, message = _receive_while_polled(world, sites["a"])


def _receive_while_polled(world: World, site: FleetSite) -> tuple[Order, Message]:
    """Let the transport look for replies until the site has another order."""

    def look() -> tuple[Order, Message] | None:
        assert world.transport.receive(0.1) == []
        try:
            return site.receive(0.2)
        except AssertionError:
            return None

    found: tuple[Order, Message] = until(look, "the order again")
    return found


def test_a_restarted_supernode_gets_its_order_again(world: World) -> None:
    with connected(world.api, world.keys["a"]) as site:
        world.transport.sites()
        world.transport.send(list(world.orders(names=("a",)).values()), 100.0)
        first, _ = site.receive()
        started = world.transport.started("a")
        assert world.transport.sites() and started == world.transport.started("a") != ""
    with connected(world.api, world.keys["a"]) as site:
        again, message = _receive_while_polled(world, site)
        assert again.nonce == first.nonce and world.transport.started("a") not in ("", started)
        site.answer(message, double(again))
        assert world.next().reply is not None
        assert world.transport.receive(0.5) == [] and not site.has_order()


def test_a_site_that_does_not_answer_is_silent(world: World) -> None:
    """Flower reports an order that has expired as an error, but the site cost a time-out, and so must rest for long."""
    with fleet(world.api, {"a": world.keys["a"]}):
        world.transport.sites()
        world.transport.send(list(world.orders().values()), 1.0)  # b is away
        assert world.transport.receive(3.0) == []


def test_orders_that_expire_while_they_are_sent_end_no_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink answers expired messages with status 500, which otherwise means a wrong request."""
    monkeypatch.setattr(runtime, "_BUSY", 0.0)
    call = world.task.link.call

    def slow_call(method: str, request: Any) -> Any:
        if method == "PushMessages":
            time.sleep(1.5)
        return call(method, request)

    with fleet(world.api, world.keys) as sites:
        world.transport.sites()
        with monkeypatch.context() as patch:
            patch.setattr(world.task.link, "call", slow_call)
            world.transport.send(list(world.orders(1).values()), 1.0)
        assert world.transport.receive(0.3) == [] and not (world.folder.run / module.OUTBOX).exists()
        world.transport.send(list(world.orders(2, names=("a",)).values()), 100.0)
        order, message = sites["a"].receive()
        assert order.round == 2
        sites["a"].answer(message, double(order))
        assert world.next().sender == "a"


def test_an_order_waits_for_a_site_that_is_away(world: World) -> None:
    world.transport.send(list(world.orders(names=("b",)).values()), 100.0)
    assert world.transport.receive(0.3) == []
    with connected(world.api, world.keys["b"]) as site:
        order, message = _receive_while_polled(world, site)
        site.answer(message, double(order))
        assert world.next().reply is not None
    orders = world.orders(names=("b",))
    world.transport.send(list(orders.values()), 100.0)
    arrival = world.next()
    assert arrival.reply is None and arrival.nonce == orders["b"].nonce


def test_a_superlink_that_is_restarted_is_outlived(world: World) -> None:
    with fleet(world.api, world.keys) as sites:
        orders = world.orders()
        world.transport.send(list(orders.values()), 200.0)
        order, message = sites["a"].receive()
        world.api.stop()
        world.api.start()
        sites["a"].answer(message, double(order))
        assert world.next().sender == "a"
        order, message = sites["b"].receive()  # the database kept it
        sites["b"].answer(message, double(order))
        assert world.next().sender == "b"
        assert world.transport.receive(0.5) == []


def test_a_reply_that_the_superlink_lost_is_asked_for_again(world: World) -> None:
    """The SuperLink marks a reply as delivered and dies before its answer arrives."""
    with fleet(world.api, world.keys) as sites:
        world.transport.send(list(world.orders(names=("a",)).values()), 200.0)
        order, message = sites["a"].receive()
        sites["a"].answer(message, double(order))
        pulled = world.task.link.client.PullMessages
        lost = []

        def pull(request: Any) -> Any:
            response = pulled(request)
            if response.messages_list and not lost:
                lost.append(response)
                raise httpx.ReadError("the connection was cut")
            return response

        world.task.link.client.PullMessages = pull  # type: ignore[method-assign]
        again, message = _receive_while_polled(world, sites["a"])
        assert lost and again.nonce == order.nonce
        sites["a"].answer(message, double(again))
        assert world.next().reply is not None


def test_a_killed_process_completes_what_it_was_sending(world: World) -> None:
    """Else SuperNodes wait for minutes for the parts of its orders."""
    outbox, parts = world.folder.run / module.OUTBOX, []
    with fleet(world.api, world.keys) as sites:
        world.transport.sites()
        push = world.task.link.client.PushObject

        def killed(request: Any) -> Any:
            parts.append(request.object_id)
            if len(parts) == 4:
                raise KeyboardInterrupt
            return push(request)

        world.task.link.client.PushObject = killed  # type: ignore[method-assign]
        orders = world.orders()
        with pytest.raises(KeyboardInterrupt):
            world.transport.send(list(orders.values()), 100.0)
        assert outbox.stat().st_mode & 0o77 == 0
        content = outbox.read_bytes()
        world.task.link.client.PushObject = push  # type: ignore[method-assign]
        FlowerTransport(world.task.link, world.task.run_id, world.folder)
        assert not outbox.exists()
        for name, site in sites.items():
            order, _ = site.receive()
            assert order.nonce == orders[name].nonce and torch.equal(order.tensors["theta"], SHARED["theta"])
            assert not site.has_order()
    world.task.finish()
    task = world.api.begin_run()
    task.pull_input({app_hash(world.api.place / "app")})
    for leftover in (content, content[:-1], b"{", b""):  # of another run; damaged
        outbox.write_bytes(leftover)
        FlowerTransport(task.link, task.run_id, world.folder)
        assert not outbox.exists() and task.link.outages == 0
    task.link.close()


def test_a_run_that_has_ended_closes_the_transport(world: World) -> None:
    world.task.finish()
    with pytest.raises(TransportClosed):
        world.transport.sites()
    with pytest.raises(RunEnded):
        world.transport.sites()


def test_a_foreign_run_is_refused(world: World) -> None:
    world.task.finish()
    task = world.api.begin_run()
    with pytest.raises(ForeignApp, match="allowed apps"):
        task.pull_input({"0" * 64})
    task.link.close()


def test_a_site_that_is_removed_while_the_list_is_read_is_left_out(world: World) -> None:
    class Removing(ServerFolder):
        """After the first reading of the list, the operator removes b."""

        def members(self) -> list[Member]:
            found = super().members()
            self.save_sites([replace(site, removed=site.name == "b") for site in self.sites()])
            self.site_secret("b").unlink(missing_ok=True)
            return found

    with fleet(world.api, world.keys):
        transport = FlowerTransport(world.task.link, world.task.run_id, Removing(world.folder.path))
        assert set(transport.sites()) == {"a"}
        world.folder.site_secret("a").unlink()
        with pytest.raises(InputError, match=r"a\.secret"):  # not removed, but its secret is gone
            FlowerTransport(world.task.link, world.task.run_id, world.folder).sites()
