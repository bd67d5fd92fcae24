"""Test a federation within one process: malicious sites against aggregation rules, and sites that drop out.

    python -m drills.robustness malicious --seeds 3 --out results/reliability/robustness.jsonl
    python -m drills.robustness dropouts --seeds 1 --out results/reliability/robustness.jsonl
    python -m drills.robustness page --out results/reliability/robustness.jsonl

The coordinator, the sites, their folders and all checks are the real ones; only the network is a function call, and its
clock advances only while the coordinator waits. The data are the embedded digits. Every result is one line of the file.
A result that the file already has is not computed again. `page` writes robustness.md into the same folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedabml
from fedabml.engine import Cohort, Simulation
from fedabml.engine.loss import output
from fedabml.engine.server import theta
from fedabml.errors import TrainingError
from fedabml.federation.coordinator import Coordinator
from fedabml.federation.folders import Member, ServerFolder, SiteFolder
from fedabml.federation.messages import Arrival, Order, Reply
from fedabml.federation.schema import draft
from fedabml.federation.settings import Settings, SiteSettings
from fedabml.federation.site import Site
from fedabml.runs.provenance import code, hardware

from .false_site import falsified
from .robustness_page import (
    ALGORITHMS,
    ATTACKS,
    FALSE,
    LEAST,
    LONG,
    MANY,
    NORM_FACTOR,
    ROUNDS,
    RULES,
    SHARES,
    SITES,
    TIMEOUT,
    TRIM,
    Line,
    key,
    page,
    read,
)

OUT = Path(__file__).resolve().parents[1] / "results/reliability/robustness.jsonl"
ID = "d" * 32
DEFAULTS: dict[str, Any] = {"model_options": {"hidden": [32]}, "epochs": 2, "batch_size": 20}
DEFAULTS |= {"participation": 1.0, "prior_every": 0}
Deliver = Callable[[Order, Reply], list[Arrival]]


class Network:
    """A transport within one process, whose clock advances only while nothing arrives."""

    def __init__(self, server: ServerFolder, sites: dict[str, SiteFolder], deliver: Deliver):
        self.keys = {member.name: member.public_key for member in server.sites()}
        self.workers = {name: Site(folder) for name, folder in sites.items()}
        self.deliver, self.now = deliver, 0.0
        self.away: set[str] = set()
        self.arrived: list[Arrival] = []

    def clock(self) -> float:
        """Return the seconds that the coordinator has waited."""
        return self.now

    def sites(self) -> dict[str, str]:
        """Return the sites that are connected."""
        return {name: key for name, key in self.keys.items() if name not in self.away}

    def send(self, orders: Sequence[Order], ttl: float) -> None:
        """Let the sites carry out their orders."""
        self.away = set()
        for order in orders:
            reply = self.workers[order.site].handle(order)
            self.arrived += self.deliver(order, reply) if order.kind == "train" else [Arrival(order.site, reply)]

    def receive(self, seconds: float) -> list[Arrival]:
        """Return what has arrived, or let time pass."""
        arrived, self.arrived = self.arrived, []
        self.now += 0.0 if arrived else seconds
        return arrived


def federation(sites: int, seed: int) -> fedabml.Federation:
    """Return the digits, divided among a number of sites with different shares of the classes."""
    kind = {"partition": "dirichlet", "alpha": 1.0} if sites <= SITES else {"partition": "iid"}
    return fedabml.federate(fedabml.load("digits"), clients=sites, seed=seed, **kind)


def set_up(place: Path, fed: fedabml.Federation, **settings: Any) -> tuple[ServerFolder, dict[str, SiteFolder]]:
    """Make the folders of a server and of one site for every client."""
    server = ServerFolder(place / "server")
    server.make()
    Settings(federation=ID, name="drill", host="localhost", **(DEFAULTS | settings)).save(server.settings_file)
    pem = "-----BEGIN PUBLIC KEY-----\n{:A>60}\n-----END PUBLIC KEY-----\n"
    server.save_sites([Member(f"site-{i}", i, pem.format(i)) for i in range(fed.clients)])
    whole, paths = write_data(place, fed)
    sites = {name: SiteFolder(place / name) for name in paths}
    for name, site in sites.items():
        site.make()
        own = SiteSettings(federation=ID, name=name, server="localhost:1", data=str(paths[name]))
        own.save(site.settings_file)
    draft(whole).save(server.schema_file)
    return server, sites


def write_data(place: Path, fed: fedabml.Federation) -> tuple[Path, dict[str, Path]]:
    """Write the training rows of every client to a file; return the file of them all and those of the sites."""
    rows = {f"site-{i}": fed.train[i] for i in range(fed.clients)} | {"all": fed.train.index}
    paths = {name: place / f"{name}.npz" for name in rows}
    for name, path in paths.items():
        np.savez(path, x=fed.x[rows[name]], y=fed.y[rows[name]])
    return paths.pop("all"), paths  # the schema is that of all rows: one site alone may lack a class


def lead(server: ServerFolder, network: Network) -> tuple[Coordinator, list[Line]]:
    """Lead a federation through all rounds, or until it gives up; return its coordinator and its events."""
    events: list[Line] = []

    def on_event(event: Line) -> None:
        events.append(event)
        if event["event"] == "finished":
            server.stop_file.touch()

    coordinator = Coordinator(server, network, network.clock, on_event)
    try:
        coordinator.run()
    except TrainingError as error:
        print(error)
    return coordinator, events


def spent(since: float, processor: float) -> Line:
    """Return the wall-clock seconds and the processor seconds since a moment."""
    parts = (time.perf_counter() - since, time.process_time() - processor)
    return dict(zip(("seconds", "processor seconds"), (round(part, 1) for part in parts), strict=True))


@torch.no_grad()
def accuracy(coordinator: Coordinator, fed: fedabml.Federation) -> float:
    """Return the accuracy of the server's own model on the test rows of all clients."""
    rows, card = fed.test.index, coordinator.card
    prior = coordinator.algorithm.prior(theta(coordinator.algorithm, coordinator.saved.state))
    x = card.input_spec.normalized(fed.x[rows], torch.device("cpu"))
    assert prior is not None
    scores = output(coordinator.network, card.input_spec.likelihood, prior.mean, x, None)
    return float((scores.argmax(-1).numpy() == fed.y[rows]).mean())


# -- false sites ------------------------------------------------------------------------------------------------------
def malicious(seeds: int, rounds: int, done: set[str]) -> Iterator[Line]:
    """Yield the accuracy with malicious sites, for every rule, attack and number of such sites."""
    for seed in range(seeds):
        fed = federation(SITES, seed)
        for algorithm in ALGORITHMS:
            for rule in RULES:
                for attack, false in [("none", 0), *((a, n) for a in ATTACKS for n in FALSE if n)]:
                    cell: Line = {"drill": "malicious", "algorithm": algorithm, "rule": rule, "attack": attack}
                    cell |= {"false": false, "seed": seed, "rounds": rounds}
                    if key(cell) not in done:
                        yield cell | attacked(fed, cell)


def attacked(fed: fedabml.Federation, cell: Line) -> Line:
    """Train with sites that multiply the change of the state they were sent, and return the result."""
    began, liars = (time.perf_counter(), time.process_time()), liars_of(cell)
    with tempfile.TemporaryDirectory(prefix="drill") as place:
        coordinator, events = led_with_liars(Path(place), fed, cell)
    lines = [event for event in events if event["event"] in ("round", "repeat")]
    rejected = {(line["round"], entry["site"]) for line in lines for entry in line["rejected"]}
    return {
        "accuracy": round(accuracy(coordinator, fed), 4),
        "rejected false": sum(site in liars for _, site in rejected),
        "rejected honest": sum(site not in liars for _, site in rejected),
        "rounds done": coordinator.round,
        **spent(*began),
    }


def liars_of(cell: Line) -> set[str]:
    """Return the names of the malicious sites, which are the last ones."""
    return {f"site-{i}" for i in range(SITES - cell["false"], SITES)}


def settings_of(cell: Line) -> Line:
    """Return the settings of a federation with malicious sites."""
    bound = cell["rule"] == "mean with norm bound"
    settings: Line = {"aggregation": "mean" if bound else cell["rule"], "norm_factor": NORM_FACTOR if bound else 0.0}
    settings |= {name: cell[name] for name in ("algorithm", "rounds", "seed")}
    return settings | {"trim": TRIM, "min_replies": 5}


def led_with_liars(
    place: Path, fed: fedabml.Federation, cell: Line, counted: Mapping[int, Sequence[str]] | None = None
) -> tuple[Coordinator, list[Line]]:
    """Lead a federation with malicious sites within this process; return its coordinator and its events.

    `counted` names the sites whose replies arrive in a round; in a round without an entry all arrive.
    """
    factor, liars = ATTACKS.get(cell["attack"], 1.0), liars_of(cell)

    def deliver(order: Order, reply: Reply) -> list[Arrival]:
        if counted and order.site not in counted.get(order.round, [order.site]):
            return []
        return [Arrival(order.site, falsified(order, reply, factor) if order.site in liars else reply)]

    settings = settings_of(cell) | ({} if counted is None else {"rest_rounds": 0})  # then every site is always drawn
    server, sites = set_up(place, fed, **settings)
    return lead(server, Network(server, sites, deliver))


# -- sites that drop out ----------------------------------------------------------------------------------------------
def dropouts(seeds: int, rounds: int, done: set[str]) -> Iterator[Line]:
    """Yield the result of a federation of many sites for every share of sites that drop out."""
    for seed in range(seeds):
        fed = federation(MANY, seed)
        for share in SHARES:
            cell: Line = {"drill": "dropouts", "sites": MANY, "share": share, "seed": seed, "rounds": rounds}
            if key(cell) not in done:
                yield cell | dropped(fed, cell)


def dropped(fed: fedabml.Federation, cell: Line) -> Line:
    """Train with SCAFFOLD while a share of the drawn half of the sites drops out; return the result.

    Of the sites that drop out, every second one stays connected and is silent; the others lose the connection until the
    next orders are sent. At the end the state is compared with the simulator's, given the sites that counted.
    """
    seed, share = cell["seed"], cell["share"]
    chance = np.random.default_rng(seed)

    def deliver(order: Order, reply: Reply) -> list[Arrival]:
        if chance.random() >= share:
            return [Arrival(order.site, reply)]
        if chance.random() < 0.5:
            network.away.add(order.site)
        return []

    settings: Line = {
        "algorithm": "scaffold",
        "rounds": cell["rounds"],
        "seed": seed,
        "participation": 0.5,
        "epochs": 1,
    }
    settings |= {"min_replies": LEAST, "attempts": 20, "over_select": 0, "round_timeout": TIMEOUT, "rest_rounds": 1}
    began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="drill") as place:
        server, sites = set_up(Path(place), fed, **settings)
        network = Network(server, sites, deliver)
        coordinator, events = lead(server, network)
        rounds = [event for event in events if event["event"] == "round"]
        valid = [len(event["valid"]) for event in rounds]
        return {
            "rounds done": len(rounds),
            "abandoned": sum(event["event"] == "repeat" for event in events),
            "valid": {"least": min(valid), "median": statistics.median(valid), "most": max(valid)},
            "missing": sum(len(event["missing"]) for event in rounds),
            "accuracy": round(accuracy(coordinator, fed), 4),
            "waited": round(network.now),
            "equal": equals_simulator(coordinator, fed, rounds),
            **spent(*began),
        }


def equals_simulator(coordinator: Coordinator, fed: fedabml.Federation, rounds: Sequence[Line]) -> bool:
    """Return whether the shared state equals, bit by bit, that of the simulator with the sites that counted."""
    card, state = coordinator.card, coordinator.saved.state
    spec = card.input_spec
    fed = dataclasses.replace(fed, **{name: getattr(spec, name) for name in ("shift", "scale", "y_shift", "y_scale")})
    alone = card.setting(spec.federation(fed.x[fed.train[0]], fed.y[fed.train[0]], encoded=True), 0)
    setting = dataclasses.replace(alone, federation=fed, identities=None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sim = Simulation(Cohort(setting, dataclasses.replace(card.place(), chunk=fed.clients)))
        for line in rounds:
            drawn = [int(name.removeprefix("site-")) for name in line["valid"]]
            sim.draw = lambda drawn=drawn: drawn
            sim.step()
    finally:
        torch.set_num_threads(threads)
    return all(torch.equal(value, state.shared[name]) for name, value in sim.shared.items())


def main() -> None:
    """Run drills and append their lines, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("malicious", "dropouts", "page"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="other rounds than the page's, for a trial")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.what != "page":
        done = {key(line) for line in read(options.out)}
        where = {"machine": hardware(torch.device("cpu")), "code": code()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        drill, usual = (malicious, ROUNDS) if options.what == "malicious" else (dropouts, LONG)
        for line in drill(options.seeds, options.rounds or usual, done):
            print(json.dumps(line), flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | where) + "\n")
                file.flush()
                os.fsync(file.fileno())
    print(page(options.out))


if __name__ == "__main__":
    main()
