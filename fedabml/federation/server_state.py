"""Save and load the server's state: what a new coordinator needs to continue with the next round.

Every round is one sealed file, `server-<round>.safetensors`. The newest two stay, and older ones at growing distances
(`kept_rounds`), so that an operator can go back to a state before a false reply (`go_back`). A file is written under a
temporary name and renamed, so a kill at any moment leaves the state after a whole round. If the newest file is damaged,
the one before it is used.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..algorithms.base import State
from ..arguments import is_whole
from ..engine.server import ServerState
from ..errors import InputError
from ..files.paths import explain_errors
from ..files.sealed import group, prefixed, read_tensors, write_tensors

log = logging.getLogger("fedabml")
HISTORY = 1000  # newest rounds whose losses are stored here; the file of events has all rounds
PARTS = ("shared", "average", "velocity")
_NAME = re.compile(r"server-([0-9]{8})\.safetensors")


@dataclass(frozen=True)
class Saved:
    """The saved state of the server after a round."""

    federation: str
    card: str  # digest of the frozen card
    state: ServerState
    counted: dict[str, int] = field(default_factory=dict)  # by site: the last round in which its reply counted
    ready: tuple[str, ...] = ()  # sites that have accepted the card
    history: tuple[dict[str, Any], ...] = ()  # of the newest rounds: round, loss, sites


def path(folder: Path, round: int) -> Path:
    """Return the file of the state after a round."""
    return folder / f"server-{round:08d}.safetensors"


def kept_rounds(newest: int) -> set[int]:
    """Return the rounds whose states stay on disk when `newest` is the last one.

    A state stays while it is younger than twice the largest power of two that divides its round: after round 100 the
    states of rounds 100, 99, 98, 96, 88, 80, 64 and 0 are there. So about one stays for every doubling of the distance.
    """
    found = {0}
    for power in (1 << bit for bit in range(newest.bit_length())):
        nearest = newest - newest % power
        found |= {nearest, nearest - power}
    return found


def save(folder: Path, saved: Saved) -> Path:
    """Write the state after a round, and delete those that are no longer kept."""
    state = saved.state
    tensors: State = {}
    for name in PARTS:
        tensors |= prefixed(name, getattr(state, name))
    facts = {
        "kind": "server",
        "federation": saved.federation,
        "card": saved.card,
        "round": state.round,
        "order": {name: list(getattr(state, name)) for name in PARTS},  # files sort names
        "counted": saved.counted,
        "ready": sorted(saved.ready),
        "history": list(saved.history[-HISTORY:]),
    }
    written = write_tensors(path(folder, state.round), tensors, facts, private=True)
    for round in {*rounds(folder)} - kept_rounds(state.round):
        with explain_errors(path(folder, round), "deleted"):
            path(folder, round).unlink(missing_ok=True)
    return written


def load(folder: Path, federation: str, card: str, like: State) -> Saved | None:
    """Return the newest state that is undamaged, or None if there is none on disk.

    `like` is the algorithm's shared state. Raises InputError if there are files but none can be used.
    """
    reasons = []
    for round in reversed(rounds(folder)):
        try:
            return read(path(folder, round), federation, card, like)
        except InputError as error:
            reasons.append(str(error))
            log.warning("The server's state after round %d cannot be used: %s", round, error)
    if reasons:
        raise InputError(f"No saved state of the server can be used. {reasons[0]}")
    return None


def go_back(folder: Path, round: int) -> Path | None:
    """Move the states after later rounds into a new folder beside them, newest first; return it, or None if empty."""
    later = [each for each in reversed(rounds(folder)) if each > round]
    if not later:
        return None
    aside = folder / f"aside-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    with explain_errors(aside, "written"):
        aside.mkdir(mode=0o700, exist_ok=True)
        for each in later:
            path(folder, each).rename(path(aside, each))
    return aside


def rounds(folder: Path) -> list[int]:
    """Return the rounds after which a state is on disk, ascending."""
    with explain_errors(folder, "read"):
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def read(file: Path, federation: str, card: str, like: State) -> Saved:
    """Return the state in a file. Raises InputError if it is damaged or not that of this federation and card."""
    tensors, facts = read_tensors(file)
    if (facts.get("kind"), facts.get("federation"), facts.get("card")) != ("server", federation, card):
        raise InputError(f"'{file}' belongs to another federation or another card.")
    try:
        order = facts["order"]
        parts = {name: {key: group(tensors, name)[key] for key in order[name]} for name in PARTS}
        counted, round = dict(facts["counted"]), facts["round"]
        ready, history = tuple(facts["ready"]), tuple(facts["history"])
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"'{file}' lacks something that the state of a server has.") from error
    if file.name != path(file.parent, round).name or not all(is_whole(r) and 0 <= r <= round for r in counted.values()):
        raise InputError(f"'{file}' has numbers of rounds that contradict each other.")
    for name in ("shared", "average"):
        if _types(parts[name]) != _types(like):
            raise InputError(f"'{file}' does not fit the algorithm and the network of the card.")
    if not _types(parts["velocity"]).items() <= _types(like).items():
        raise InputError(f"'{file}' has a momentum that does not fit the algorithm.")
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise InputError(f"'{file}' holds values that are not finite.")
    return Saved(federation, card, ServerState(round, **parts), counted, ready, history)


def _types(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}
