"""What clients keep between rounds: on the device, in memory or, where that does not suffice, in a file."""

from __future__ import annotations

import logging
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ..accel.machine import free_bytes
from ..algorithms.base import State
from ..errors import InputError
from ..files.limits import host_memory
from .checkpoint import packed, unpacked
from .client import initial_kept
from .lanes import Lanes
from .processes import ALONE, World
from .server import state_bytes
from .setting import Cohort

log = logging.getLogger("fedabml")


class Shelf(MutableMapping[int, State]):
    """A mapping of clients to states that lie in a file, a row each, so that they take no memory.

    The file is sparse (a client that was never drawn takes no room) and has no name, so that a crash leaves nothing
    behind: a run is resumed from its checkpoints. It is read and written, not mapped: a write to a full disk is then an
    error that names the folder, where a mapped one would kill the process.
    """

    def __init__(self, like: State, clients: int, folder: Path | None = None):
        self.like = {name: v.cpu() for name, v in like.items()}
        self.size, self.stored, self.lock = state_bytes(like), np.zeros(clients, bool), threading.Lock()
        self.folder = str(folder) if folder and folder.is_dir() else tempfile.gettempdir()
        with self._explaining_errors():
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        weakref.finalize(self, self.file.close)

    def __getitem__(self, client: int) -> State:
        if client not in self:
            raise KeyError(client)
        row = torch.empty(self.size, dtype=torch.uint8)
        with self.lock:  # threads read side by side
            self.file.seek(client * self.size)
            self.file.readinto(row.numpy().data)
        return unpacked(row, self.like)

    def __setitem__(self, client: int, state: State) -> None:
        with self._explaining_errors(), self.lock:
            self.file.seek(client * self.size)
            self.file.write(packed(state, self.like).numpy().data)
            self.file.flush()
        self.stored[client] = True

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self.stored[client] = False

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and 0 <= client < len(self.stored) and bool(self.stored[client])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.stored).tolist())

    def __len__(self) -> int:
        return int(self.stored.sum())

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"What clients keep between rounds does not fit in memory, and cannot be written to a file in "
                f"'{self.folder}': {error.strerror}. Free some space there, or give the run another folder (--out, or "
                "TMPDIR for a run without one). Every finished round is saved, where the run has a folder."
            ) from error


class Kept:
    """What clients keep between rounds: made on demand, never shared between two clients.

    The states stay on the device where those of all clients are a small part of its memory, else on the host. Where
    those of all clients would take more than a quarter of the free memory, they lie in a file of `folder`.
    """

    def __init__(self, cohort: Cohort, folder: Path | None = None, world: World = ALONE):
        self.cohort, self.folder, self.world = cohort, folder, world
        self.states: MutableMapping[int, State] = {}

    @property
    def needed(self) -> bool:
        """Whether this algorithm's clients keep anything."""
        return self.cohort.algorithm.keeps

    def get(self, shared: State, clients: Sequence[int]) -> State:
        """Return the kept states of some clients, a row each, on the device; new clients begin with `shared`."""
        if not self.needed:
            return {}
        missing = [c for c in clients if c not in self.states]
        fresh = initial_kept(Lanes.after_round(self.cohort, shared, missing)) if missing else {}
        if not self.states and missing == list(clients):
            return fresh
        lane = {c: i for i, c in enumerate(missing)}
        rows = [{k: v[lane[c]] for k, v in fresh.items()} if c in lane else self.states[c] for c in clients]
        device = self.cohort.device
        return {name: torch.stack([row[name].to(device) for row in rows]) for name in rows[0]}

    def put(self, clients: Sequence[int], kept: State) -> dict[int, State]:
        """Store what clients keep, a row each; return it by client."""
        if not kept:
            return {}
        size = state_bytes({name: v[0] for name, v in kept.items()}) * self.cohort.fed.clients
        fits = self.cohort.device.type == "cuda" and size <= free_bytes(self.cohort.device) // 32
        kept = kept if fits else {name: v.cpu() for name, v in kept.items()}
        by_client = {c: {name: v[i].clone() for name, v in kept.items()} for i, c in enumerate(clients)}
        self.restore(by_client)
        return by_client

    def restore(self, states: Mapping[int, State]) -> None:
        """Store states by client."""
        if states and not self.states:  # by the first one the size of all is known
            self.states = self._store_for(next(iter(states.values())))
        self.states.update(states)

    def _store_for(self, like: State) -> MutableMapping[int, State]:
        """Return where to hold states like this one."""
        clients, world = self.cohort.fed.clients, self.world
        size = state_bytes(like) * clients * world.local_size // world.size  # of all processes on this machine
        free = host_memory()[1]
        if not free or size <= free // 4 or any(v.is_cuda for v in like.values()):
            return {}
        log.info("What %d clients keep between rounds, up to %.1f GiB, is held in a file.", clients, size / (1 << 30))
        return Shelf(like, clients, self.folder)
