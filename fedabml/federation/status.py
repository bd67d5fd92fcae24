"""Collect the status of a federation for its operator: rounds, sites, losses, rejected replies, traffic, time left.

Everything comes from files: the coordinator's events, the supervisor's records and the state of the run. Texts that
sites sent are cleaned of control characters before they are shown anywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import InputError
from ..files.paths import read_bytes
from ..files.sealed import read_json
from . import keys, last_order, pids
from .events import read_tally
from .folders import ServerFolder, SiteFolder
from .logs import last_line, log_of, one_line
from .supervisor import PIDS, SUPERVISOR, Backoff, supervisor_of
from .tally import SHOWN_REJECTIONS, SiteStatus, Tally, table, whole

__all__ = ["ProcessStatus", "SiteFolderStatus", "SiteStatus", "Status", "processes", "read", "read_site", "run_state"]

_NO_CONNECTION = "Connection attempt failed"  # in the last line of a SuperNode's log, until a connection succeeds
RENEW_DAYS = 60  # days before the end of the certificate from which the status asks to renew it


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
    since: float = 0.0  # when it was started last, in seconds since the epoch

    @property
    def keeps_ending(self) -> bool:
        """Whether the process ended several times in a row, and has not run steadily since."""
        steady = self.state == "running" and time.time() - self.since >= Backoff.steady
        return self.failures >= 2 and not steady


@dataclass
class Status:
    """The status of a whole federation at one moment."""

    name: str
    federation: str
    address: str
    state: str
    app: str = ""  # hash of the Flower app of the last run
    certificate: str = ""  # the last day of the server's certificate
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


def read(folder: ServerFolder) -> Status:
    """Return the status of a federation from the files in the operator's folder."""
    settings = folder.check().settings
    status = Status(settings.name, settings.federation, settings.address, "stopped", algorithm=settings.algorithm)
    status.rounds, status.time = settings.rounds, time.time()
    tally = read_tally(folder)
    for member in folder.sites():
        site = tally.sites.get(member.name, SiteStatus(member.name))
        status.sites.append(replace(site, removed=member.removed))
    status.runs, status.rounds_done, status.attempts_repeated = tally.runs, tally.rounds_done, tally.repeated
    status.bytes_down, status.bytes_up, status.damaged_lines = tally.bytes_down, tally.bytes_up, tally.damaged
    status.losses, status.scores, status.problem = tally.losses, tally.scores, tally.problem
    status.rejected, status.reasons = tally.rejected, dict(tally.reasons.most_common(SHOWN_REJECTIONS))
    _describe_times(status, tally)
    _describe_processes(status, folder, tally.last)
    _describe_certificate(status, folder)
    return status


def _describe_times(status: Status, tally: Tally) -> None:
    """Set the time left and the parts of a round from the last rounds."""
    parts = [each.get("server", {}) for each in tally.recent]
    totals = [sum(part.values()) for part in parts if part]
    if totals:
        status.seconds_per_round = statistics.median(totals)
        status.seconds_left = status.seconds_per_round * max(0, status.rounds - status.rounds_done)
        status.split = _medians(parts)
        work = _medians([each.get("site", {}) for each in tally.recent])
        status.split |= {f"site: {name}": seconds for name, seconds in work.items()}


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: statistics.median(part.get(name, 0.0) for part in parts) for name in names}


def _describe_certificate(status: Status, folder: ServerFolder) -> None:
    """Set the day on which the server's certificate expires, and say so in time."""
    try:
        end = keys.expires(read_bytes(folder.server_certificate), "The server's certificate")
    except InputError:  # there is none, or the package cryptography is not installed
        return
    status.certificate = f"{end:%Y-%m-%d}"
    if end.timestamp() - status.time < RENEW_DAYS * 86400:
        warning = f"The server's certificate expires on {status.certificate}. Then no site can connect. Run `renew`."
        status.problem = f"{status.problem} {warning}".strip()


def _describe_processes(status: Status, folder: ServerFolder | SiteFolder, last: str) -> None:
    """Set the federation's state from the processes, the run and the last event."""
    status.processes = processes(folder)
    run = run_state(folder)
    status.app = one_line(run.get("app", ""))
    if not pids.alive(supervisor_of(folder.run)):
        for process in status.processes:
            process.state = "stopped"
        for site in status.sites:
            site.connected = None
        status.state = "finished" if status.rounds_done >= status.rounds > 0 else "stopped"
        return
    status.problem = status.problem or one_line(run.get("message", ""), 600)
    if run.get("state") in ("failed", "gave up"):
        status.state = str(run["state"])
    elif status.rounds_done >= status.rounds:
        status.state = "finished"
    else:
        status.state = "running" if status.rounds_done or last in ("card", "round", "repeat") else "starting"
    for process in status.processes:
        if process.keeps_ending and not status.problem:
            why = last_line(log_of(folder.path, process.name))
            status.problem = f"The process {process.name} ended {process.failures} times in a row: {why}"


@dataclass
class SiteFolderStatus:
    """The status of a site on its own machine. `prior_round` is the round of the newest prior (None: none yet).

    `prior_digest` is the same at all sites that received the same prior. `last_order_time` is in seconds since the
    epoch (None: no order yet). `problem` says why the site takes no part, as far as the site knows.
    """

    name: str
    federation: str
    server: str
    data: str
    state: str
    card: bool
    prior_round: int | None
    prior_digest: str
    allowed: list[str]
    processes: list[ProcessStatus]
    last_order: str = ""
    last_order_time: float | None = None
    problem: str = ""
    time: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON of plain values."""
        return asdict(self)


def read_site(folder: SiteFolder) -> SiteFolderStatus:
    """Return the status of a site from the files in its own folder."""
    settings = folder.check().settings
    operator, found = folder.operator, processes(folder)
    if operator is not None:
        prefix = f"{folder.path.name}-"
        found = [each for each in processes(operator) if each.name in (f"{prefix}supernode", f"{prefix}worker")]
    running = pids.alive(supervisor_of((operator or folder).run)) and (operator is None or bool(found))
    prior: dict[str, Any] = {}
    if folder.prior_file.exists() and folder.prior_facts_file.exists():
        prior = table(read_json(folder.prior_facts_file))
    allowed = [name for name in ("pooled_sums", "medians", "words", "scores") if getattr(settings, f"allow_{name}")]
    for process in found:
        process.state = process.state if running else "stopped"
    state = "running" if running else "stopped"
    known = folder.card_file.exists()
    round, digest = whole(prior.get("round")) if prior else None, str(prior.get("digest", ""))
    about = (settings.name, settings.federation, settings.server, settings.data)
    status = SiteFolderStatus(*about, state, known, round, digest, allowed, found, time=time.time())
    last = last_order.read(folder)
    status.last_order, status.last_order_time = last.kind, last.time if last.kind else None
    status.problem = " ".join(filter(None, [_connection_problem(folder, found) if running else "", last.problem]))
    return status


def _connection_problem(folder: SiteFolder, processes: list[ProcessStatus]) -> str:
    """Return why a running site takes no orders, from its processes and from the SuperNode's log, or an empty text."""
    for process in processes:
        log = folder.run / f"{process.name.rpartition('-')[2]}.log"
        if process.keeps_ending:
            return f"The process {process.name} ended {process.failures} times in a row: {last_line(log)}"
        if log.name == "supernode.log" and _NO_CONNECTION in last_line(log):
            return f"The server cannot be reached, or it refuses this site. The details are in '{log}'."
    return ""


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
                record.name,
                state,
                pid,
                record.restarts,
                record.failures,
                record.last_exit,
                record.next_start,
                record.since,
            )
        )
    return found


def run_state(folder: ServerFolder | SiteFolder) -> dict[str, Any]:
    """Return what `run_keeper` has recorded about the run, or an empty dictionary before the first run."""
    path = folder.run / "run.json"
    try:
        return table(read_json(path)) if path.exists() else {}
    except InputError:
        return {}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
