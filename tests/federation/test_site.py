"""A site answers every order; what it cannot carry out it refuses, without values of its rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedabml.federation import site_data
from fedabml.federation.messages import Arrival
from fedabml.federation.site import Site
from tests.federation.in_process import Wire, lead, set_up


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of a federation after its rounds, and the last training order of one site."""
    server, sites = set_up(tmp_path_factory.mktemp("site"), algorithm="scaffold", participation=1.0)
    wire = Wire(server, sites)
    lead(server, wire)
    order = [order for order in wire.sent if order.kind == "train" and order.site == "site-1"][-1]
    return sites["site-1"], order


def nan(state):
    return {name: torch.full_like(value, torch.nan) for name, value in state.items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"federation": "f" * 32}, "another federation"),
        ({"site": "site-2"}, "another site"),
        ({"card": "f" * 64}, "another card"),
        ({"card": ""}, "another card"),
        ({"kind": "run"}, "does not know"),
        ({"round": 0, "counted": 0}, "rounds"),
        ({"round": -1}, "no counts"),
        ({"round": 2**40}, "no counts"),
        ({"counted": 3}, "rounds"),
        ({"number": "one"}, "no counts"),
        ({"number": 3}, "another federation, card or site"),
        ({"counted": 7, "round": 9}, "no longer has"),
        ({"tensors": {}}, "lacks"),
        ({"tensors": {"mean": torch.zeros(3)}}, "lacks"),
        ({"tensors": None}, "failed"),
    ],
)
def test_wrong_orders_are_refused(trained, changes, words):
    folder, order = trained
    versions = sorted(path.name for path in folder.state.iterdir())
    reply = Site(folder).handle(dataclasses.replace(order, **changes))
    assert words in reply.error
    assert not reply.tensors
    assert sorted(path.name for path in folder.state.iterdir()) == versions


def test_states_that_are_not_finite_are_refused(trained):
    folder, order = trained
    for kind in ("train", "prior"):
        reply = Site(folder).handle(dataclasses.replace(order, kind=kind, tensors=nan(order.tensors)))
        assert "not finite" in reply.error


def test_the_same_order_again_gives_the_same_reply(trained):
    folder, order = trained
    first = Site(folder).handle(order)
    second = Site(folder).handle(dataclasses.replace(order, attempt=2, nonce="d" * 32))
    assert not first.error
    assert (second.attempt, second.nonce) == (2, "d" * 32)
    assert all(torch.equal(first.tensors[name], value) for name, value in second.tensors.items())


def test_data_stay_in_memory(trained, monkeypatch):
    folder, order = trained
    site = Site(folder)
    loads = []
    load = site_data.load
    monkeypatch.setattr(site_data, "load", lambda *args: loads.append(1) or load(*args))
    for _ in range(3):
        assert not site.handle(order).error
    assert loads == [1]


def test_a_refusal_holds_nothing_of_the_data(trained, tmp_path):
    folder, order = trained
    content = dict(np.load(folder.path / "data.npz"))
    try:
        np.savez(folder.path / "data.npz", x=content["x"], y=content["y"] + 123456)
        reply = Site(folder).handle(order)
        assert reply.error
        assert "1234" not in reply.error
        assert str(folder.path) not in reply.error
        (folder.path / "data.npz").write_bytes(b"damaged")
        reply = Site(folder).handle(order)
        assert reply.error
        assert str(folder.path) not in reply.error
    finally:
        np.savez(folder.path / "data.npz", **content)


def test_a_site_that_diverges_says_so_and_the_others_go_on(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0, hyper={"lr": 0.1})
    data = dict(np.load(sites["site-2"].path / "data.npz"))
    np.savez(sites["site-2"].path / "data.npz", x=data["x"] * 1e30, y=data["y"])
    wire = Wire(server, sites, lambda order, reply: [Arrival(order.site, reply)])
    coordinator, events = lead(server, wire)
    lines = [event for event in events if event["event"] == "round"]
    assert all("diverged" in line["rejected"][0]["reason"] for line in lines)
    assert torch.isfinite(coordinator.saved.state.shared["mean"]).all()
