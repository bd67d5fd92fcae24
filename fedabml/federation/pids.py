"""Identify processes by number, start time and boot, because the system reuses numbers alone.

`supervisor` writes a record for every process that it starts. `end_leftovers` ends what a killed supervisor left
behind: the processes of its records, the members of their sessions, and every process with the supervisor's mark
in its environment. Linux only: the facts come from /proc.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files.limits import parse_json
from ..files.paths import read_text, write

MARK = "FEDABML_SUPERVISOR"  # environment variable of every process under a supervisor: the supervisor's token
_LIMIT = 1 << 16  # bytes of a record
_PATIENCE = 30.0  # seconds in which killed processes end


@dataclass(frozen=True)
class Identity:
    """A process: its number, its start in clock ticks since the machine's start, and that start's own identity."""

    pid: int
    start: int
    boot: str


@dataclass(frozen=True)
class Record:
    """A record holds what a supervisor knows about one process, in `run/pids/NAME.json`.

    `state` is waiting, starting, running or stopped. `token` is the supervisor's mark, `next_start` the time of the
    next start while the process waits.
    """

    name: str
    state: str
    token: str
    identity: Identity | None = None
    since: float = 0.0
    restarts: int = 0
    failures: int = 0
    last_exit: str = ""
    next_start: float = 0.0

    def save(self, folder: Path) -> None:
        """Write the record to its file."""
        write(folder / f"{self.name}.json", json.dumps(asdict(self)) + "\n")


def read_record(path: Path) -> Record | None:
    """Return a record, or None if its file is missing or damaged: a damaged file must not end any process."""
    try:
        data: Any = parse_json(read_text(path, _LIMIT), f"'{path}'")
        if data.get("identity") is not None:
            data["identity"] = Identity(**data["identity"])
            if not all(isinstance(getattr(data["identity"], f.name), (int, str)) for f in fields(Identity)):
                return None
        return Record(**data)
    except (InputError, TypeError, AttributeError, OSError):
        return None


def records(folder: Path) -> list[Record]:
    """Return the records in a folder, by name."""
    found = (read_record(path) for path in sorted(folder.glob("*.json")))
    return [record for record in found if record is not None]


def boot() -> str:
    """Return the identifier of the machine's current boot."""
    if sys.platform != "linux":
        raise InputError("A federation's processes are supervised on Linux only.")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """Return state, parent, session and start of a process, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    rest = text.rpartition(")")[2].split()
    return rest[0], int(rest[1]), int(rest[3]), int(rest[19])


def activity(pid: int) -> tuple[int, int] | None:
    """Return the clock ticks that a process has computed and how often its threads were switched to or away.

    Neither changes while a process is frozen; one of them does whenever a thread of it computes or wakes up. Returns
    None if this says nothing: the process waits for a disk, it has ended, or the system does not count.
    """
    switches = 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        for thread in os.scandir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError):  # this thread has ended
                lines = Path(f"{thread.path}/status").read_text(errors="replace").splitlines()
                switches += sum(int(line.split()[1]) for line in lines if "_ctxt_switches:" in line)
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12]), switches) if fields[0] not in "DZX" and switches else None


def identity(pid: int) -> Identity | None:
    """Return the identity of a process that exists."""
    found = _stat(pid)
    return Identity(pid, found[3], boot()) if found else None


def alive(process: Identity | None) -> bool:
    """Return whether exactly this process runs: not another one with its number, and not a zombie."""
    if process is None or process.boot != boot():
        return False
    found = _stat(process.pid)
    return found is not None and found[3] == process.start and found[0] not in "ZX"


def send_signal(process: Identity, number: int) -> bool:
    """Send a signal to exactly this process, by a handle that cannot mean another. Returns False if it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def wait_for_end(process: Identity, seconds: float) -> bool:
    """Wait at most `seconds` for a process to end, and return whether it has."""
    end = time.monotonic() + seconds
    while alive(process):
        left = end - time.monotonic()
        if left <= 0:
            return False
        with suppress(OSError):
            handle = os.pidfd_open(process.pid)
            try:
                select.select([handle], [], [], min(left, 0.2))
            finally:
                os.close(handle)
    return True


def _processes() -> Iterator[tuple[int, tuple[str, int, int, int]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            found = _stat(int(entry.name))
            if found and found[0] not in "ZX":
                yield int(entry.name), found


def _content(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()  # fails for the processes of other users
    except OSError:
        return b""


def members(found: list[Record]) -> list[Identity]:
    """Return the processes that belong to the records: themselves, their sessions, and all with their token.

    A session outlives its leader. A member is accepted only with the token in its environment, or as a process of
    nginx, which overwrites its environment with a title such as `nginx: worker process`.
    """
    now, result = boot(), []
    own = {r.identity.pid: r for r in found if r.identity is not None and r.identity.boot == now}
    tokens = {f"{MARK}={r.token}".encode() for r in found if r.token}
    for pid, (_, _, session, start) in _processes():
        record = own.get(pid)
        exact = record is not None and record.identity is not None and record.identity.start == start
        if not exact:
            leader = own.get(session)
            marked = not tokens.isdisjoint(_content(pid, "environ").split(b"\0"))
            titled = (
                leader is not None
                and leader.identity is not None
                and start >= leader.identity.start
                and _content(pid, "cmdline").startswith(b"nginx: ")
            )
            if not (marked or titled):
                continue
        result.append(Identity(pid, start, now))
    return result


def end_leftovers(found: list[Record]) -> int:
    """Kill every process of the records, and those that they start meanwhile; return how many there were.

    Raises InputError if some do not end.
    """
    ended: set[Identity] = set()
    end = time.monotonic() + _PATIENCE
    while left := members(found):
        if time.monotonic() > end:
            raise InputError(
                f"These processes do not end: {', '.join(str(each.pid) for each in left)}. End them first."
            )
        for each in left:
            send_signal(each, signal.SIGKILL)
        ended.update(left)
        time.sleep(0.05)
    return len(ended)
