"""A supervisor starts processes in order, restarts them with a back-off, and leaves none behind.

Every process has its own session and its own log of bounded size. `run/pids/NAME.json` holds its identity and state
(`pids.Record`), which is all that `status` reads. The supervisor adopts and reaps orphans of its processes. If it is
killed itself, the system ends its children, and a guard, which waits at a pipe, ends all else that they started. If
both are killed at once, the next start does it.

A killed SuperNode must wait before its restart: for 60 s the SuperLink still takes it for connected and refuses it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ..errors import InputError
from ..files.paths import folder_lock, open_append
from .logs import one_line
from .pids import MARK, Identity, Record, activity, end_leftovers, identity, read_record, records

PIDS = "pids"  # the folder of the records, in the folder `run`
SUPERVISOR = "supervisor"  # the record of the supervisor itself
MAX_LOG = 4 << 20  # bytes of a log; as many more of the part before
_SUBREAPER, _TICK = 36, 0.2  # a number of prctl; seconds between checks of the processes
_STALL = 2.0  # seconds without a check, after which the supervisor knows that it was held up itself
# The child asks to be killed with its parent, unless the parent has gone already, and then becomes the program.
_LAUNCH = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
)


@dataclass(frozen=True)
class Backoff:
    """Seconds before a restart: `first`, then `factor` times as long after every quick failure, at most `most`.

    A process that ran for `steady` seconds begins anew at `first`. `least_after_crash` holds after every end that is
    not a clean exit (code 0).
    """

    first: float = 1.0
    factor: float = 2.0
    most: float = 60.0
    steady: float = 60.0
    least_after_crash: float = 0.0

    def seconds(self, failures: int, clean: bool) -> float:
        """Return the seconds to wait after a number of quick failures in a row (0: the process had run steadily)."""
        wait = min(self.most, self.first * self.factor ** min(failures, 30))
        return wait if clean else max(wait, self.least_after_crash)


@dataclass(frozen=True)
class Process:
    """A process to be kept running. It is started once all processes that it `needs` are healthy.

    `health` returns whether the process works; without it, a running process is healthy. A process is killed and
    restarted if it is not healthy within `boot` seconds, or is later unhealthy for `patience` seconds. So is one that
    does nothing at all for `frozen` seconds: no thread of it computes or wakes up (0: it may). A long computation is
    not nothing. `grace` is its time to end after SIGTERM.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    backoff: Backoff = Backoff()
    health: Callable[[], bool] | None = None
    needs: tuple[str, ...] = ()
    boot: float = 300.0
    patience: float = 60.0
    frozen: float = 0.0
    grace: float = 15.0


class _Child:
    """One process under supervision: at most one instance of it runs."""

    def __init__(self, process: Process, token: str, folder: Path):
        self.process, self._folder = process, folder
        self.record = Record(process.name, "waiting", token)
        self.popen: subprocess.Popen[bytes] | None = None
        self.next_start = 0.0  # on the monotonic clock
        self.well = False
        self.last_well = 0.0
        self.checking = False
        self.activity: tuple[int, int] | None = None
        self.last_active = self.next_activity = 0.0
        self.last_look = 0.0
        self.why = ""  # the supervisor killed it

    def note(self, **changes: object) -> None:
        """Change the record, and write it. A full disk must not end what runs: the record is then written later."""
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        try:
            self.record.save(self._folder)
        except InputError as error:
            print(error, file=sys.stderr, flush=True)

    def start(self) -> None:
        process = self.process
        process.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **process.env, MARK: self.record.token}
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *process.command]
        with open_append(process.log) as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.last_well, self.well, self.why = time.monotonic(), False, ""
        self.last_active = self.last_look = self.last_well
        state = "starting" if process.health else "running"
        self.note(state=state, identity=identity(self.popen.pid), since=time.time(), next_start=0.0)

    def not_started(self, error: Exception) -> None:
        """Record that the system could not start the process (disk full, too many processes), and try later."""
        failures, now = self.record.failures + 1, time.time()
        wait = self.process.backoff.seconds(failures - 1, True)
        self.next_start = time.monotonic() + wait
        self.note(state="waiting", last_exit=one_line(error), failures=failures, next_start=now + wait)

    def ended(self, status: int, stopping: bool) -> None:
        """Note that the process has ended and, unless all are `stopping`, when it is to be started again."""
        code = os.waitstatus_to_exitcode(status)
        text = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text += f" ({self.why})" if self.why else ""
        quick = time.time() - self.record.since < self.process.backoff.steady
        failures = self.record.failures + 1 if quick else 0
        wait = self.process.backoff.seconds(max(failures - 1, 0), code == 0)
        self.popen, self.well, self.next_start = None, False, time.monotonic() + wait
        if stopping:
            self.note(state="stopped", last_exit=text)
            return
        restarts = self.record.restarts + 1
        when = time.time() + wait
        self.note(state="waiting", last_exit=text, failures=failures, restarts=restarts, next_start=when)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group. It is not reaped yet, so that the number is still its own."""
        if self.popen is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)

    def kill(self, why: str) -> None:
        """Kill the process and its group, and remember why, for the record."""
        self.why = why
        self.signal(signal.SIGKILL)

    def check(self) -> None:
        """Kill the process if it has not been healthy or not moved for too long.

        Its health is asked in a thread, so that a slow answer does not delay the supervisor. Time in which the
        supervisor was held up (a paused container, a stopped process) says nothing about the process.
        """
        if self.popen is None:
            return
        now = time.monotonic()
        held_up = now - self.last_look if now - self.last_look > _STALL else 0.0
        self.last_look, self.last_well, self.last_active = now, self.last_well + held_up, self.last_active + held_up
        if self.process.frozen and now >= self.next_activity:
            self.next_activity = now + self.process.frozen / 20
            found = activity(self.popen.pid)
            if found is None or found != self.activity:
                self.activity, self.last_active = found, now
            elif now - self.last_active > self.process.frozen:
                self.kill(f"it had been frozen for {self.process.frozen:.0f} s")
        if self.process.health is None:
            self.well = True
        elif self.well and now - self.last_well > self.process.patience:
            self.well = False
            self.kill(f"it had not been healthy for {self.process.patience:.0f} s")
        elif not self.well and now - self.last_well > self.process.boot:
            self.kill(f"it had not become healthy in {self.process.boot:.0f} s")
        elif not self.checking and (not self.well or now - self.last_well > min(5.0, self.process.patience / 4)):
            self.checking = True
            threading.Thread(target=self._ask, args=(self.popen,), daemon=True).start()

    def _ask(self, asked: subprocess.Popen[bytes]) -> None:
        try:
            if self.process.health is not None and self.process.health() and self.popen is asked:
                self.last_well, self.well = time.monotonic(), True
            else:
                time.sleep(_TICK)
        except Exception:  # if the check raises anything, the process is not healthy
            time.sleep(_TICK)
        finally:
            self.checking = False

    def limit_log(self) -> None:
        """Move a log that has grown too long to NAME.1. The process continues at the start of the emptied one."""
        log = self.process.log
        with suppress(OSError):
            if log.stat().st_size > MAX_LOG:
                with open(log, "rb+") as source, open(log.with_name(log.name + ".1"), "wb") as target:
                    source.seek(max(0, log.stat().st_size - MAX_LOG))
                    shutil.copyfileobj(source, target)
                    source.truncate(0)


class Supervisor:
    """A supervisor keeps processes running until SIGTERM, SIGINT or a call of `stop`; then it ends them in order."""

    def __init__(self, processes: Sequence[Process], run: Path):
        assert len({process.name for process in processes} | {SUPERVISOR}) == len(processes) + 1
        self.run_folder, self.pids, self.token = run, run / PIDS, secrets.token_hex(16)
        self.children = [_Child(process, self.token, self.pids) for process in processes]
        self.stopping = threading.Event()

    def stop(self) -> None:
        """Ask the supervisor to end everything; may be called from any thread or signal handler."""
        self.stopping.set()

    def run(self) -> None:
        """Run until a signal or `stop`. Raises InputError if another supervisor runs in the folder."""
        with folder_lock(self.run_folder, "supervisor.lock"):
            self.pids.mkdir(exist_ok=True)
            end_leftovers(records(self.pids))
            for path in self.pids.glob("*.json"):
                path.unlink()
            own = Record(SUPERVISOR, "running", "", identity=identity(os.getpid()), since=time.time())
            own.save(self.pids)
            ctypes.CDLL(None).prctl(_SUBREAPER, 1)
            self._guard = _start_guard(self.pids, self.token)
            before = _handle_signals(self.stop)
            try:
                for child in self.children:
                    child.note()
                while not self.stopping.wait(_TICK):
                    self._look()
            finally:
                try:
                    self._end()
                finally:
                    for number, handler in before.items():
                        signal.signal(number, handler)
                    with suppress(OSError):
                        _pipe(self._guard).write(b"done")
                    _pipe(self._guard).close()
                    self._guard.wait()
                    ctypes.CDLL(None).prctl(_SUBREAPER, 0)
                    (self.pids / f"{SUPERVISOR}.json").unlink(missing_ok=True)

    def _look(self) -> None:
        """Reap what has ended, check what runs, and start what is due."""
        self._reap()
        well = {child.process.name for child in self.children if child.well}
        for child in self.children:
            child.check()
            if child.well and child.record.state == "starting":
                child.note(state="running")
            child.limit_log()
            due = child.popen is None and time.monotonic() >= child.next_start
            if due and well.issuperset(child.process.needs):
                try:
                    child.start()
                except (OSError, InputError) as error:
                    child.not_started(error)

    def _reap(self) -> None:
        """Reap processes that have ended: the supervisor's own children, and orphans that it has adopted.

        What a session's leader left in its group is ended with it. A guard that was killed is replaced.
        """
        children = {child.popen.pid: child for child in self.children if child.popen is not None}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            child = children.pop(found.si_pid, None)
            if child is None:
                with suppress(ChildProcessError):
                    os.waitpid(found.si_pid, os.WNOHANG)
                if found.si_pid == self._guard.pid:
                    self._guard.returncode = -1
                    _pipe(self._guard).close()
                    self._guard = _start_guard(self.pids, self.token)
                continue
            child.signal(signal.SIGKILL)  # the rest of its group, while its number is still reserved
            assert child.popen is not None
            _, status = os.waitpid(found.si_pid, 0)
            child.popen.returncode = os.waitstatus_to_exitcode(status)
            child.ended(status, self.stopping.is_set())

    def _end(self) -> None:
        """End all processes, each once no running process needs it, within its grace; then end what they left."""
        asked: dict[str, float] = {}
        while running := [child for child in self.children if child.popen is not None]:
            needed = {name for child in running for name in child.process.needs}
            for child in (each for each in running if each.process.name not in needed):
                now = time.monotonic()
                if child.process.name not in asked:
                    asked[child.process.name] = now
                    child.signal(signal.SIGTERM)
                elif now - asked[child.process.name] > child.process.grace:
                    child.signal(signal.SIGKILL)
            self._reap()
            time.sleep(0.02)
        end_leftovers([child.record for child in self.children])
        self._reap()
        for child in self.children:
            child.note(state="stopped", next_start=0.0)


def _handle_signals(stop: Callable[[], None]) -> dict[int, Any]:
    """Let SIGTERM, SIGINT and SIGHUP stop; return the handlers before. Only the main thread has signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, lambda *_: stop()) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _start_guard(pids: Path, token: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedabml.federation.supervisor", str(pids), token]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True, bufsize=0
    )


def guard(pids: Path, token: str) -> None:
    """Wait for the end of the supervisor at the other end of the pipe; end what it left behind, if it was killed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != b"done":
        end_leftovers([record for record in records(pids) if record.token == token])


def supervisor_of(run: Path) -> Identity | None:
    """Return the supervisor that a folder's record names, which need not be alive; None without a record."""
    record = read_record(run / PIDS / f"{SUPERVISOR}.json")
    return record.identity if record else None


if __name__ == "__main__":
    guard(Path(sys.argv[1]), sys.argv[2])
