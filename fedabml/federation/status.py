"""Collect the status of a federation for its operator: rounds, sites, losses, rejected replies, traffic, time left.

Everything comes from files: the coordinator's events, the supervisor's records and the state of the run. Texts that
sites sent are cleaned of control characters before they are shown anywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import InputError
from ..files.limits import parse_json
from ..files.paths import open_regular
from ..files.sealed import read_json
from . import pids
from .folders import ServerFolder, SiteFolder
from .logs import clean, last_line, log_of
from .supervisor import PIDS, SUPERVISOR, supervisor_of

MAX_EVENTS = 1 << 30  # bytes of the file of events
_RECENT = 10  # rounds whose median time and split are shown
_SHOWN_REASONS = 20


@dataclass
class SiteStatus:
    """One site as the server sees it. `last_round` is the last round in which its reply counted (0: none yet)."""

    name: str
    connected: bool | None = None
    last_round: int = 0
    resting: bool = False
    counted: int = 0
    missed: int = 0
    rejected: int = 0
    removed: bool = False
    prior_round: int | None = None
    loss: float | None = None
    note: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class ProcessStatus:
    """One process of this folder's supervisor."""

    name: str
    state: str
    pid: int = 0
    restarts: int = 0
    failures: int = 0
    last_exit: str = ""
    next_start: float = 0.0


@dataclass
class Status:
    """The status of a whole federation at one moment."""

    name: str
    federation: str
    address: str
    state: str
    problem: str = ""
    algorithm: str = ""
    rounds: int = 0
    rounds_done: int = 0
    attempts_repeated: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    sites: list[SiteStatus] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds_per_round: float | None = None
    seconds_left: float | None = None
    split: dict[str, float] = field(default_factory=dict)
    runs: int = 0
    processes: list[ProcessStatus] = field(default_factory=list)
    damaged_lines: int = 0
    time: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON of plain values; numbers that are not finite become null."""
        return _finite(asdict(self))


def events(folder: ServerFolder) -> Iterator[dict[str, Any] | None]:
    """Yield the coordinator's events in order; a damaged line gives None. An unfinished last line is left out."""
    if not folder.events_file.exists():
        return
    with open_regular(folder.events_file, MAX_EVENTS) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                event = parse_json(line.decode(), "a line of events")
                yield event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
            except (InputError, UnicodeDecodeError):
                yield None


def read(folder: ServerFolder) -> Status:
    """Return the status of a federation from the files in the operator's folder."""
    settings = folder.check().settings
    status = Status(settings.name, settings.federation, settings.address, "stopped", algorithm=settings.algorithm)
    status.rounds, status.time = settings.rounds, time.time()
    sites = {m.name: SiteStatus(m.name, removed=m.removed) for m in folder.sites()}
    status.sites = list(sites.values())
    reasons: Counter[str] = Counter()
    rounds: list[dict[str, Any]] = []
    last = ""
    for event in events(folder):
        if event is None:
            status.damaged_lines += 1
            continue
        last = event["event"]
        _count_bytes(status, event)
        if last == "start":
            status.runs += 1
        elif last == "round":
            rounds.append(event)
        elif last == "repeat":
            status.attempts_repeated += 1
        if last in ("round", "card", "finished"):  # a kill may come after the save of a round and before its event
            status.rounds_done = max(status.rounds_done, _whole(event.get("round")))
        if last in ("round", "repeat", "waiting", "prior"):
            _count_sites(sites, event)
        for rejected in _list(event.get("rejected")):
            reason = {key: clean(rejected.get(key, ""), 200) for key in ("site", "reason")}
            reasons[reason["reason"]] += 1
            status.rejected.append({"round": _whole(event.get("round")), **reason})
            if reason["site"] in sites:
                sites[reason["site"]].rejected += 1
        for name, reason_text in _dict(event.get("refused")).items():
            if name in sites:
                sites[name].note = clean(reason_text)
        if last in ("gave_up", "error"):
            status.problem = clean(event.get("error") or event.get("reason") or event.get("message") or "", 600)
        elif last in ("round", "start"):
            status.problem = ""
    status.reasons = dict(reasons.most_common(_SHOWN_REASONS))
    status.rejected = status.rejected[-_SHOWN_REASONS:]
    _describe_rounds(status, rounds)
    _describe_processes(status, folder, last)
    return status


def _describe_rounds(status: Status, rounds: list[dict[str, Any]]) -> None:
    losses = ((_whole(e.get("round")), _number(e.get("loss"))) for e in rounds)
    status.losses = [(number, loss) for number, loss in losses if loss is not None]
    if rounds:
        scores = next((found for event in reversed(rounds) if (found := _dict(event.get("scores")))), {})
        status.scores = {clean(k, 40): v for k, x in scores.items() if (v := _number(x)) is not None}
    recent = rounds[-_RECENT:]
    parts = [{k: v for k, x in _dict(e.get("seconds")).items() if (v := _number(x)) is not None} for e in recent]
    totals = [sum(part.values()) for part in parts if part]
    if totals:
        status.seconds_per_round = statistics.median(totals)
        status.seconds_left = status.seconds_per_round * max(0, status.rounds - status.rounds_done)
        status.split = {
            k: statistics.median(p.get(k, 0.0) for p in parts) for k in dict.fromkeys(k for p in parts for k in p)
        }
        work = [_slowest(e) for e in recent]
        for name in dict.fromkeys(k for each in work for k in each):
            status.split[f"site: {clean(name, 40)}"] = statistics.median(each.get(name, 0.0) for each in work)


def _slowest(event: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the site that took longest in a round, by part."""
    found = []
    for seconds in _dict(event.get("site_seconds")).values():
        found.append({k: v for k, x in _dict(seconds).items() if (v := _number(x)) is not None})
    return max(found, key=lambda each: sum(each.values()), default={})


def _count_sites(sites: dict[str, SiteStatus], event: dict[str, Any]) -> None:
    """Update the sites' status from an event about a round."""
    number, kind = _whole(event.get("round")), event["event"]
    for name in _names(event.get("valid"), sites):
        if kind == "round":
            sites[name].last_round, sites[name].counted = number, sites[name].counted + 1
            sites[name].note = ""
    for name in _names(event.get("missing"), sites):
        sites[name].missed += kind != "prior"
    for name, loss in _dict(event.get("losses")).items():
        if name in sites:
            sites[name].loss = _number(loss)
    if kind == "waiting":
        absent = set(_names(event.get("sites"), sites))
        for name, site in sites.items():
            site.connected = name not in absent
    if kind == "prior":
        for name in _names(event.get("sites"), sites):
            sites[name].connected, sites[name].prior_round = True, number
    if "connected" in event:
        connected = set(_names(event["connected"], sites))
        for name, site in sites.items():
            site.connected = name in connected
    if "resting" in event:
        resting = set(_names(event["resting"], sites))
        for name, site in sites.items():
            site.resting = name in resting
    for name, seconds in _dict(event.get("site_seconds")).items():
        if name in sites:
            sites[name].seconds = {clean(k, 40): v for k, x in _dict(seconds).items() if (v := _number(x)) is not None}


def _describe_processes(status: Status, folder: ServerFolder | SiteFolder, last: str) -> None:
    """Set the federation's state from the processes, the run and the last event."""
    status.processes = processes(folder)
    run = run_state(folder)
    if not pids.alive(supervisor_of(folder.run)):
        for process in status.processes:
            process.state = "stopped"
        for site in status.sites:
            site.connected = None
        status.state = "finished" if status.rounds_done >= status.rounds > 0 else "stopped"
        return
    status.problem = status.problem or clean(run.get("message", ""), 600)
    if run.get("state") in ("failed", "gave up"):
        status.state = str(run["state"])
    elif status.rounds_done >= status.rounds:
        status.state = "finished"
    else:
        status.state = "running" if status.rounds_done or last in ("card", "round", "repeat") else "starting"
    for process in status.processes:
        if process.failures >= 2 and not status.problem:
            why = last_line(log_of(folder.path, process.name))
            status.problem = f"The process {process.name} ended {process.failures} times in a row: {why}"


@dataclass
class SiteFolderStatus:
    """The status of a site on its own machine. `prior_round` is the round of the newest prior (None: none yet)."""

    name: str
    federation: str
    server: str
    data: str
    state: str
    card: bool
    prior_round: int | None
    allowed: list[str]
    processes: list[ProcessStatus]

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON of plain values."""
        return asdict(self)


def read_site(folder: SiteFolder) -> SiteFolderStatus:
    """Return the status of a site from the files in its own folder."""
    settings = folder.check().settings
    running = pids.alive(supervisor_of(folder.run))
    prior = None
    if folder.prior_file.exists() and folder.prior_facts_file.exists():
        prior = _whole(_dict(read_json(folder.prior_facts_file)).get("round"))
    allowed = [name for name in ("pooled_sums", "medians", "words", "scores") if getattr(settings, f"allow_{name}")]
    found = processes(folder)
    for process in found:
        process.state = process.state if running else "stopped"
    state = "running" if running else "stopped"
    known = folder.card_file.exists()
    return SiteFolderStatus(
        settings.name, settings.federation, settings.server, settings.data, state, known, prior, allowed, found
    )


def processes(folder: ServerFolder | SiteFolder) -> list[ProcessStatus]:
    """Return the processes that a folder's supervisor has noted, in order of their names."""
    found = []
    for record in pids.records(folder.run / PIDS):
        if record.name == SUPERVISOR:
            continue
        running = pids.alive(record.identity)
        pid = record.identity.pid if record.identity and running else 0
        state = "stopped" if record.state in ("running", "starting") and not running else record.state
        found.append(
            ProcessStatus(
                record.name, state, pid, record.restarts, record.failures, record.last_exit, record.next_start
            )
        )
    return found


def run_state(folder: ServerFolder | SiteFolder) -> dict[str, Any]:
    """Return what `run_keeper` has recorded about the run, or an empty dictionary before the first run."""
    path = folder.run / "run.json"
    try:
        return _dict(read_json(path)) if path.exists() else {}
    except InputError:
        return {}


# -- values that may be anything ------------------------------------------------------------------------------------
def _count_bytes(status: Status, event: dict[str, Any]) -> None:
    status.bytes_down += _whole(event.get("bytes_down"))
    status.bytes_up += _whole(event.get("bytes_up"))


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _names(value: Any, known: Iterable[str]) -> list[str]:
    listed = value if isinstance(value, list | dict) else []
    return [name for name in listed if isinstance(name, str) and name in known]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
