"""A federation in one process: real folders, sites and coordinator; orders are passed by a function call."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from fedabml import Federation, engine
from fedabml.algorithms import make
from fedabml.federation.coordinator import Coordinator
from fedabml.federation.folders import Member, ServerFolder, SiteFolder
from fedabml.federation.kept import KeptVersions
from fedabml.federation.messages import Arrival
from fedabml.federation.schema import Schema
from fedabml.federation.settings import Settings, SiteSettings
from fedabml.federation.site import Site
from fedabml.files.sealed import read_tensors

ID = "0123456789abcdef" * 2
SIZES = (7, 12, 16, 21, 25)
CLASSES = 3
KEY = "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n"
SHIFT, SCALE = (0.25,), (1.5,)


def name(number):
    return f"site-{number}"


def pairs(sizes=SIZES, seed=3):
    g = np.random.default_rng(seed)
    return [(g.normal(size=(n, 4)).astype(np.float32), np.arange(n) % CLASSES) for n in sizes]


def schema():
    fixed = {"kind": "arrays", "task": "classification", "classes": [str(c) for c in range(CLASSES)]}
    fixed |= {"shape": [4], "type": "float32", "targets": 1, "shift": list(SHIFT), "scale": list(SCALE)}
    return Schema.of(fixed)


def set_up(folder: Path, sizes=SIZES, **settings):
    """Make the folders of a server and its sites as `init` and `join` would; return them."""
    server = ServerFolder(folder / "server")
    server.make()
    defaults = {"algorithm": "fedavg", "rounds": 3, "participation": 0.6, "epochs": 2, "batch_size": 8, "seed": 1}
    defaults |= {"model_options": {"hidden": [5]}, "round_timeout": 20.0, "min_replies": 1}
    Settings(federation=ID, name="trial", host="localhost", **{**defaults, **settings}).save(server.settings_file)
    schema().save(server.schema_file)
    members = [Member(name(i), i, KEY.format(f"{i:A>60}")) for i in range(len(sizes))]
    server.save_sites(members)
    sites = {}
    for i, (x, y) in enumerate(pairs(sizes)):
        site = SiteFolder(folder / name(i))
        site.make()
        np.savez(site.path / "data.npz", x=x, y=y)
        own = SiteSettings(federation=ID, name=name(i), server="localhost:1", data=str(site.path / "data.npz"))
        own.save(site.settings_file)
        sites[name(i)] = site
    return server, sites


class Wire:
    """A transport that hands orders to sites at once. Its clock moves only while nothing arrives.

    `tamper(order, reply)` returns the arrivals in place of a reply: none for a lost one.
    """

    def __init__(self, server, sites, tamper=None):
        self.keys = {member.name: member.public_key for member in server.sites()}
        self.sites_by_name = {n: Site(folder) for n, folder in sites.items()}
        self.tamper = tamper or (lambda order, reply: [Arrival(order.site, reply)])
        self.now, self.queue, self.sent, self.away = 0.0, [], [], set()
        self.starts = {}  # by site: anything that changes when its node is started anew

    def clock(self):
        return self.now

    def sites(self):
        return {n: key for n, key in self.keys.items() if n not in self.away and n in self.sites_by_name}

    def started(self, site):
        return str(self.starts.get(site, ""))

    def send(self, orders, ttl):
        for order in orders:
            self.sent.append(order)
            if order.site in self.away:
                continue
            reply = self.sites_by_name[order.site].handle(order)
            self.queue += self.tamper(order, reply) if order.kind == "train" else [Arrival(order.site, reply)]

    def receive(self, seconds):
        arrived, self.queue = self.queue, []
        if not arrived:
            self.now += seconds
        return arrived


def lead(server, wire, until="finished"):
    """Run a new coordinator in a folder until an event; return it and all events of this run."""
    events = []

    def on_event(event):
        events.append(event)
        if event["event"] == until:
            server.stop_file.touch()

    server.stop_file.unlink(missing_ok=True)
    coordinator = Coordinator(server, wire, wire.clock, on_event)
    coordinator.run()
    return coordinator, events


def rounds_of(events, kind="round"):
    return [event for event in events if event["event"] == kind]


def simulation(server, card, sizes=SIZES, participants=None, **place):
    """Return the simulator's run with the card's weights and normalisation after all rounds.

    `participants` are the clients of every round, by number; without them they are drawn.
    """
    fed = Federation.from_arrays(pairs(sizes), task="classification", classes=CLASSES, normalize="none")
    spec, settings = card.input_spec, server.settings
    fed = dataclasses.replace(fed, shift=spec.shift, scale=spec.scale)
    setting = dataclasses.replace(card.setting(one_client(fed), 0), federation=fed, identities=None)
    setting = dataclasses.replace(setting, participation=settings.participation)
    where = dataclasses.replace(card.place(), **{"chunk": len(sizes), **place})
    sim = engine.Simulation(engine.Cohort(setting, where))
    for round in range(settings.rounds):
        if participants is not None:
            sim.draw = lambda drawn=participants[round]: list(drawn)
        sim.lines = [*getattr(sim, "lines", []), sim.step()]
    return sim


def one_client(fed):
    rows = fed.train[0]
    return Federation.from_arrays([(fed.x[rows], fed.y[rows])], task=fed.task, classes=fed.classes, normalize="none")


def assert_equal(state, expected, tolerance=0.0):
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if tolerance:
            torch.testing.assert_close(state[key], value, rtol=tolerance, atol=tolerance)
        else:
            assert state[key].dtype == value.dtype
            assert torch.equal(state[key], value), key


def kept_of(coordinator, sites):
    """Return every site's kept state as the server counts it, by number; sites that keep nothing are left out."""
    states = {}
    for number, (site, folder) in enumerate(sites.items()):
        counted = coordinator.saved.counted.get(site, 0)
        path = KeptVersions(folder.state, ID, coordinator.card.digest, number).path(counted)
        if counted and path.is_file() and (state := read_tensors(path)[0]):
            states[number] = state
    return states


def assert_simulated(coordinator, sites, sim, tolerance=0.0):
    """Compare the shared state and every site's kept state with the simulator's."""
    assert_equal(coordinator.saved.state.shared, sim.shared, tolerance)
    kept = kept_of(coordinator, sites)
    assert set(kept) == set(sim.kept.states)
    for client, state in sim.kept.states.items():
        assert_equal(kept[client], state, tolerance)


def hyper_of(algorithm):
    """Return decay, momentum of the server, averages and sample weights, where an algorithm has them."""
    names = {field.name for field in dataclasses.fields(make(algorithm))}
    wanted = {"lr_decay": 0.9, "server_momentum": 0.5, "average": 0.8, "weights": "samples"}
    return {key: value for key, value in wanted.items() if key in names}
