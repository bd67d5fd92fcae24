"""The proxy's process runs nginx, and bounds the bytes that a site can make the SuperLink keep in a round.

    python -m fedabml.federation.meter DIR

nginx writes a line for every request whose body the SuperLink keeps. The meter adds the bytes per site since the
coordinator's last event. nginx refuses a site beyond its budget (`budget`) until the next event, with status 503, after
which a SuperNode tries again. Until nginx refuses it, a site can exceed its budget by what `proxy.passing` counts: the
parts of one message, ten large parts per second, the connections that are open, and small requests.

The meter also makes nginx read its configuration again when the list of sites or the certificate changes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ..errors import InputError
from ..files.paths import write
from ..files.sealed import read_json, write_json
from . import proxy
from .folders import ServerFolder
from .settings import Settings

LOOK = 0.5  # seconds between two readings of the log
REACTION = 1.0  # seconds until nginx refuses a site beyond its budget: a reading, and nginx's own restart
MAX_LOG = 4 << 20  # bytes of nginx's logs
EVENTS = ("start", "card", "round", "repeat", "prior")  # events of these kinds give every site a new budget


def budget(settings: Settings) -> int:
    """Return the bytes that a site may send between two events: two messages of the largest size, and a margin."""
    return 2 * settings.max_message_mb * 1_000_000 + 8_000_000


def most_kept(settings: Settings) -> int:
    """Return the most bytes that a site can make the SuperLink keep between two events: its budget and the rest."""
    return budget(settings) + proxy.passing(settings, REACTION)


def refused_sites(folder: ServerFolder) -> dict[str, str]:
    """Return why the proxy has refused requests of sites since the last event, by site."""
    try:
        found = read_json(_reasons_file(folder))
    except InputError:  # there is no proxy, as in tests, or it is starting
        return {}
    return {site: reason for site, reason in found.items() if isinstance(reason, str)}


def _reasons_file(folder: ServerFolder) -> Path:
    return proxy.run_folder(folder) / "refused.json"


class Tail:
    """A tail reads new lines of a file that another process appends to. It rereads a file that became shorter."""

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self._path, self._place = path, path.stat().st_size if at_end and path.exists() else 0
        self._rest = b""

    def lines(self, most: int = 16 << 20) -> list[str]:
        """Return the complete lines since the last call, up to a number of bytes."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._place:
                    self._place, self._rest = 0, b""
                file.seek(self._place)
                new = file.read(most)
        except OSError:
            return []
        self._place += len(new)
        *complete, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-65536:]
        return [line.decode("utf-8", "replace") for line in complete]


class Meter:
    """A meter counts the bytes of every site since the last event, and refuses sites that exceed their budget."""

    def __init__(self, folder: ServerFolder) -> None:
        place = proxy.run_folder(folder)
        self.folder, self.budget = folder, budget(folder.settings)
        self.log, self.refused_file = place / "access.log", place / "refused.map"
        self.bytes: Counter[str] = Counter()
        self.refused: frozenset[str] = frozenset()
        self._reasons: dict[str, str] = {}  # by site: why the proxy has refused requests since the last event
        self._requests, self._events = Tail(self.log, at_end=True), Tail(folder.events_file, at_end=True)
        self._watched, self._noted = self._versions(), ("", {"": ""})
        self._note()

    def look(self) -> bool:
        """Read new log lines and events. Returns whether nginx must read its configuration again."""
        if any(_event(line) in EVENTS for line in self._events.lines()):
            self.bytes.clear()
            self._reasons = {}
        for line in self._requests.lines():
            words = line.split(" ")
            if len(words) == 5 and words[3] == "200" and words[4].isdigit():  # the SuperLink keeps no other ones
                self.bytes[words[1]] += int(words[4])
            elif len(words) == 5 and words[3] == "413":
                self._reasons[words[1]] = "the proxy refused a part of its message, which was too large"
        refused = frozenset(site for site, count in self.bytes.items() if count > self.budget)
        versions, changed = self._versions(), refused != self.refused
        if changed:
            for site in refused - self.refused:
                print(f"{site}: {self.bytes[site]} bytes in a round, more than {self.budget}: refused.", flush=True)
            self.refused = refused
        self._reasons |= dict.fromkeys(
            refused, f"the proxy refused it: it sent more than {self.budget} bytes in a round"
        )
        self._note()
        changed, self._watched = changed or versions != self._watched, versions
        for log in (self.log, self.log.with_name("error.log")):
            with suppress(OSError):
                if log.stat().st_size > MAX_LOG:
                    os.truncate(log, 0)  # nginx appends, so it continues at the start
        return changed

    def _note(self) -> None:
        """Write which sites are refused, for nginx, and why, for the coordinator, if this has changed."""
        noted = "".join(f"{site} 1;\n" for site in sorted(self.refused)), self._reasons
        if noted != self._noted:
            write(self.refused_file, noted[0])
            write_json(_reasons_file(self.folder), noted[1])
            self._noted = noted[0], dict(noted[1])

    def _versions(self) -> list[int]:
        files = (self.folder.proxy_file, self.folder.server_certificate)
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


def _event(line: str) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(line).get("event"))
    return ""


def start_nginx(folder: ServerFolder) -> subprocess.Popen[bytes]:
    """Start nginx in the foreground, in a group of its own. It ends when this process does, however that ends."""
    library = ctypes.CDLL(None)
    prepare = None if sys.platform == "darwin" else lambda: library.prctl(1, signal.SIGTERM)
    return subprocess.Popen(proxy.nginx_command(folder), stdin=subprocess.DEVNULL, process_group=0, preexec_fn=prepare)


def stop_nginx(process: subprocess.Popen[bytes]) -> None:
    """End nginx with its workers, which a killed master would leave behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(folder: ServerFolder) -> int:
    """Run nginx and the meter until nginx ends or SIGTERM comes. Returns nginx's exit code, 0 after SIGTERM."""
    proxy.write(folder.check())
    meter, stop = Meter(folder), False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    process = start_nginx(folder)
    try:
        while not stop and process.poll() is None:
            time.sleep(LOOK)
            if meter.look():
                process.send_signal(signal.SIGHUP)
        return 0 if stop else process.returncode or 1
    finally:
        stop_nginx(process)


def main(arguments: list[str]) -> int:
    """Run the proxy of the folder that is the only argument."""
    if len(arguments) != 1:
        print("Usage: python -m fedabml.federation.meter DIR", file=sys.stderr)
        return 2
    try:
        return run(ServerFolder(arguments[0]))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
