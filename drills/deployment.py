"""Set up a whole federation on loopback, for drills and tests: TLS, node authentication, nginx, sites with data."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
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
from fedabml.federation.events import read_events
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.init import init
from fedabml.federation.stand_in import stand_in
from fedabml.federation.supervisor import PIDS
from fedabml.files.sealed import read_tensors

CLASSES = 3
SETTINGS: dict[str, Any] = {
    **{"epochs": 1, "batch_size": 8, "seed": 1, "model": "mlp", "model_options": {"hidden": [8]}},
    **{"round_timeout": 30.0, "min_replies": 2, "attempts": 20},
}


@dataclass(frozen=True)
class Deployment:
    """A federation's folder, and its sites' data: by name in the order of their numbers, and as the simulator's."""

    folder: ServerFolder
    paths: dict[str, Path]
    together: Callable[[Card], Federation]  # all data, encoded and normalised as a card says


def free_ports(count: int) -> list[int]:
    """Return ports that no program uses now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def make(
    place: Path,
    sites: Sequence[str] = ("a", "b", "c"),
    *,
    later: Sequence[str] = (),
    samples: int = 20,
    **settings: Any,
) -> Deployment:
    """Make a federation with small arrays in `place`, ready to be started; sites of `later` have data, but no place."""
    generator = np.random.default_rng(3)
    names = [*sites, *later]
    arrays, paths = {}, {name: place / f"{name}.npz" for name in names}
    for i, name in enumerate(names):
        count = samples + 5 * i
        arrays[name] = generator.normal(size=(count, 4)).astype(np.float32), np.arange(count) % CLASSES
        np.savez(paths[name], x=arrays[name][0], y=arrays[name][1])

    def together(card: Card) -> Federation:
        pairs = list(arrays.values())
        return Federation.from_arrays(pairs, task="classification", classes=CLASSES, normalize="none")

    return make_with(place, paths, together, members=sites, **settings)


def make_with(
    place: Path,
    paths: dict[str, Path],
    together: Callable[[Card], Federation],
    *,
    members: Sequence[str] = (),
    **settings: Any,
) -> Deployment:
    """Make a federation with data that lie at these paths; the schema is drafted from those of the first site.

    `members` are the sites that take part from the start, by default all.
    """
    port, superlink_port = free_ports(2)
    chosen = {**SETTINGS, "port": port, "superlink_port": superlink_port, **settings}
    folder = init(place / "federation", "127.0.0.1", list(members or paths), next(iter(paths.values())), **chosen)
    return Deployment(folder, paths, together)


def start_module(name: str, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a module of the drills as a process of its own session, with its output in `log`."""
    root = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))}
    command = [sys.executable, "-m", name, *words]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
        )


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
    return [event for event in read_events(folder) if event and event["event"] in kinds]


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


def kill(folder: ServerFolder, name: str, number: int = signal.SIGKILL) -> pids.Identity:
    """Wait until a process is running, send it a signal, and return its identity."""
    found: pids.Identity = until(lambda: identity(folder, name), 600.0, f"the process {name}")
    if not pids.send_signal(found, number):
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
    card, names = Card.load(deployment.folder.card_file), list(deployment.paths)
    spec = card.input_spec
    norm = {name: getattr(spec, name) for name in ("shift", "scale", "y_shift", "y_scale")}
    fed = dataclasses.replace(deployment.together(card), **norm)
    setting = dataclasses.replace(card.setting(stand_in(spec), 0), federation=fed, identities=None)
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


def differences(deployment: Deployment, participants: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of all tensors on disk whose bits are not the simulator's after rounds of these sites.

    Compared are the server's state and what the sites on this machine keep, in the versions that the server counts.
    """
    saved, simulation = saved_state(deployment.folder), simulate(deployment, participants)
    parts = {
        part: (getattr(saved.state, part), getattr(simulation.server, part))
        for part in ("shared", "average", "velocity")
    }
    for number, name in enumerate(deployment.paths):
        version = SiteFolder(deployment.folder.path / "local" / name).state / f"kept-{saved.counted.get(name, 0)}"
        path = version.with_suffix(".safetensors")
        ours = read_tensors(path)[0] if path.is_file() else {}
        parts[f"kept of {name}"] = ours, simulation.kept.states.get(number, {})
    found = [part for part, (ours, theirs) in parts.items() if ours.keys() != theirs.keys()]
    for part, (ours, theirs) in parts.items():
        found += [f"{part}: {key}" for key in ours.keys() & theirs.keys() if not torch.equal(ours[key], theirs[key])]
    return found


os.environ.setdefault("OMP_NUM_THREADS", "1")  # results have the same bits only with the same number of threads
