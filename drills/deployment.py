"""Set up a whole federation on loopback, for drills and tests: TLS, node authentication, nginx, sites with data."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedabml import Federation, engine
from fedabml.federation import operate, pids, server_state
from fedabml.federation.card import Card
from fedabml.federation.folders import ServerFolder
from fedabml.federation.init import init
from fedabml.federation.status import events
from fedabml.federation.supervisor import PIDS

CLASSES = 3
SETTINGS: dict[str, Any] = {
    **{"epochs": 1, "batch_size": 8, "seed": 1, "model": "mlp", "model_options": {"hidden": [8]}},
    **{"round_timeout": 30.0, "min_replies": 2, "attempts": 20},
}


@dataclass(frozen=True)
class Deployment:
    """A federation's folder and the arrays of its sites, in the order of their numbers."""

    folder: ServerFolder
    arrays: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def paths(self) -> dict[str, Path]:
        """Return the paths of the sites' data by the names of the sites."""
        return {name: self.folder.path.parent / f"{name}.npz" for name in self.arrays}


def free_ports(count: int) -> list[int]:
    """Return ports that no program uses now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def make(place: Path, sites: Sequence[str] = ("a", "b", "c"), *, samples: int = 20, **settings: Any) -> Deployment:
    """Make a federation with small data in `place`, ready to be started."""
    generator = np.random.default_rng(3)
    arrays = {}
    for i, name in enumerate(sites):
        count = samples + 5 * i
        arrays[name] = generator.normal(size=(count, 4)).astype(np.float32), np.arange(count) % CLASSES
        np.savez(place / f"{name}.npz", x=arrays[name][0], y=arrays[name][1])
    port, superlink_port = free_ports(2)
    chosen = {**SETTINGS, "port": port, "superlink_port": superlink_port, **settings}
    folder = init(place / "federation", "127.0.0.1", list(sites), place / f"{sites[0]}.npz", **chosen)
    return Deployment(folder, arrays)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until a condition holds and return its value. Raises TimeoutError if it does not hold in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not come in {seconds:.0f} s")


def listed(folder: ServerFolder, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds, in their order."""
    return [event for event in events(folder) if event and event["event"] in kinds]


def rounds_done(folder: ServerFolder) -> int:
    """Return the number of the last finished round."""
    return max((event["round"] for event in listed(folder, "round")), default=0)


def wait_for_round(folder: ServerFolder, number: int, seconds: float = 1200.0) -> None:
    """Wait until a round is finished."""
    until(lambda: rounds_done(folder) >= number, seconds, f"round {number}")


def identity(folder: ServerFolder, name: str) -> pids.Identity | None:
    """Return a process of the federation if it is running."""
    record = pids.read_record(folder.run / PIDS / f"{name}.json")
    running = record and record.state == "running" and pids.alive(record.identity)
    return record.identity if record and running else None


def kill(folder: ServerFolder, name: str) -> pids.Identity:
    """Wait until a process is running, kill it with SIGKILL, and return its identity."""
    found: pids.Identity = until(lambda: identity(folder, name), 600.0, f"the process {name}")
    if not pids.send_signal(found, signal.SIGKILL):
        raise RuntimeError(f"{name} has ended by itself")
    return found


def end(folder: ServerFolder) -> list[int]:
    """End a federation; return what is left of its processes, which should be nothing."""
    found = pids.records(folder.run / PIDS)
    operate.down(folder.path)
    return [each.pid for each in pids.members(found)]


def saved_state(folder: ServerFolder) -> server_state.Saved:
    """Return the server's state on disk."""
    card, settings = Card.load(folder.card_file), folder.settings
    saved = server_state.load(folder.state, settings.federation, card.digest, card.initial_shared())
    if saved is None:
        raise RuntimeError("the server has saved no state")
    return saved


def simulate(deployment: Deployment, participants: Sequence[Sequence[str]]) -> engine.Simulation:
    """Return the simulator after the given rounds, each with the given sites."""
    card, names = Card.load(deployment.folder.card_file), list(deployment.arrays)
    pairs = list(deployment.arrays.values())
    fed = Federation.from_arrays(pairs, task="classification", classes=CLASSES, normalize="none")
    fed = dataclasses.replace(fed, shift=card.input_spec.shift, scale=card.input_spec.scale)
    first = Federation.from_arrays(pairs[:1], task="classification", classes=CLASSES, normalize="none")
    setting = dataclasses.replace(card.setting(first, 0), federation=fed, identities=None)
    where = dataclasses.replace(card.place(), chunk=len(names))
    simulation = engine.Simulation(engine.Cohort(setting, where))
    for drawn in participants:
        numbers = sorted(names.index(name) for name in drawn)
        simulation.draw = lambda numbers=numbers: list(numbers)  # type: ignore[method-assign]
        simulation.step()
    return simulation


def counted_sites(folder: ServerFolder) -> list[list[str]]:
    """Return, for every round in order, the sites whose replies counted."""
    by_round = {event["round"]: event["valid"] for event in listed(folder, "round")}
    return [by_round[number] for number in sorted(by_round)]


def differences(state: Any, simulation: engine.Simulation) -> list[str]:
    """Return the names of the parts of the server's state whose bits are not the simulator's."""
    found = []
    for part in ("shared", "average", "velocity"):
        ours, theirs = getattr(state, part), getattr(simulation.server, part)
        if ours.keys() != theirs.keys():
            found.append(part)
        found += [f"{part}.{key}" for key in theirs if key in ours and not torch.equal(ours[key], theirs[key])]
    return found


os.environ.setdefault("OMP_NUM_THREADS", "1")  # results have the same bits only with the same number of threads
