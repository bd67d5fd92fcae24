"""This process keeps a run of the federation going on the SuperLink.

It registers the sites, submits a run, and submits another one when a run has ended too early: the new run continues
from the state that the coordinator saved. After several failures in a row without a finished round it stops and records
the reason in `run/run.json`; `fedabml federation resume` begins anew. It is a separate process, because calls to the
SuperLink may take long, and a supervisor must never wait.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..files.sealed import write_json
from .events import read_tally
from .folders import ServerFolder
from .logs import one_line
from .status import run_state

log = logging.getLogger("fedabml")

MOST_FAILURES = 5  # runs in a row that end without a round
ENDS = ("finished", "failed", "gave up")  # states after which no run is submitted
RUN_FILE, REGISTERED_FILE = "run.json", "registered.json"
_EVERY = 1.0  # seconds between checks of the run


class Commands(Protocol):
    """The functions that the keeper needs from `flower.commands`."""

    def register_sites(self, folder: ServerFolder) -> list[str]: ...

    def app_hash(self, folder: ServerFolder) -> str: ...

    def submit_run(self, folder: ServerFolder) -> int: ...

    def run_status(self, folder: ServerFolder, run_id: int) -> str: ...


@dataclass
class SubmittedRun:
    """The content of `run/run.json`. `state` is starting, running or one of `ENDS`; `failures` are those in a row."""

    state: str = "starting"
    id: int = 0
    submitted: int = 0
    failures: int = 0
    rounds: int = 0  # finished when this run was submitted
    message: str = ""
    app: str = ""  # the hash of its Flower app, which every site must allow


class RunKeeper:
    """A keeper keeps one run going; `step` must be called repeatedly."""

    def __init__(self, folder: ServerFolder, commands: Commands, clock: Callable[[], float] = time.monotonic):
        self.folder, self._commands, self._clock = folder, commands, clock
        known = {key: value for key, value in run_state(folder).items() if key in SubmittedRun.__dataclass_fields__}
        self.run = SubmittedRun(**known | {"id": int(known.get("id", 0))})
        self._next, self._registered = 0.0, ""

    def step(self) -> None:
        """Register new sites, and make sure that a run is active. Raises whatever a call of Flower raises."""
        if self.folder.stop_file.exists():
            return
        self._register()
        if self.run.state in ENDS or self._clock() < self._next:
            return
        if self.run.id:
            state = self._commands.run_status(self.folder, self.run.id)
            if not state.startswith("finished"):
                if self.run.message:
                    self.run.message = ""
                    self._save()
                return
            self._ended(state)
        if self.run.state not in ENDS and self._clock() >= self._next:
            self._submit()

    def _register(self) -> None:
        """Register the sites whenever their list has changed; a file shows the supervisor that this has been done."""
        listed = repr(self.folder.sites())
        if listed != self._registered:
            self._commands.register_sites(self.folder)
            self._registered = listed
            write_json(self.folder.run / REGISTERED_FILE, {"time": time.time()})

    def _submit(self) -> None:
        self.run.rounds = read_tally(self.folder).rounds_done
        self.run.id, self.run.app = int(self._commands.submit_run(self.folder)), self._commands.app_hash(self.folder)
        self.run.submitted += 1
        self.run.state, self.run.message = "running", ""
        self._save()
        log.warning("run %s submitted after round %s", self.run.id, self.run.rounds)

    def _ended(self, state: str) -> None:
        """Decide what to do about a run that has ended: another run, after a while, or none."""
        tally = read_tally(self.folder)
        rounds, gave_up = tally.rounds_done, tally.gave_up
        self.run.failures = 0 if rounds > self.run.rounds else self.run.failures + 1
        log.warning("run %s ended (%s) after round %s", self.run.id, one_line(state), rounds)
        self.run.id = 0
        if rounds >= self.folder.settings.rounds and state == "finished:completed":
            self.run.state = "finished"
        elif gave_up:
            self.run.state, self.run.message = "gave up", gave_up
        elif self.run.failures >= MOST_FAILURES:
            self.run.state = "failed"
            self.run.message = (
                f"{self.run.failures} runs in a row ended without finishing a round ({one_line(state)}). Read "
                f"'{self.folder.run}/executor.log', remove the cause, and run `fedabml federation resume`."
            )
        self._next = self._clock() + min(60.0, 2.0**self.run.failures - 1)
        self._save()

    def note(self, error: Exception) -> None:
        """Record the error of a call, which the status shows until a call succeeds."""
        message = f"The last call of the SuperLink failed: {one_line(error, 400)}"
        if self.run.state not in ENDS and self.run.message != message:
            self.run.message = message
            self._save()

    def _save(self) -> None:
        write_json(self.folder.run / RUN_FILE, asdict(self.run) | {"id": str(self.run.id)})  # it has 64 bits


def keep(folder: ServerFolder, commands: Commands) -> None:
    """Keep a run going until the process is ended. An error of a call is logged, and the call is made again."""
    keeper = RunKeeper(folder, commands)
    wait = _EVERY
    while True:
        try:
            keeper.step()
            wait = _EVERY
        except Exception as error:  # the SuperLink is starting, or gone for a while
            log.warning("%s: %s", type(error).__name__, one_line(error, 1000))
            keeper.note(error)
            wait = min(10.0, wait * 1.5)
        time.sleep(wait)


if __name__ == "__main__":
    from .flower import commands

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    keep(ServerFolder(Path(sys.argv[1])), commands)
