"""The server's resident worker takes ServerApp tasks of the SuperLink and runs the coordinator for them.

`flower-superexec` would run the code of any app that somebody on this machine submits. This worker runs the installed
package's Coordinator for the federation's own app, and refuses every other app without running any of its code. A
worker that was killed resumes the same run after its restart; the coordinator continues from the state it saved. When a
run has ended, the supervisor's keeper submits the next one, or this worker does so itself with `--submit`.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from flwr.supercore.constant import TaskType

from ...errors import InputError
from ...files.paths import folder_lock, read_bytes
from ..folders import ServerFolder
from ..messages import Transport, TransportClosed
from .app import app_hash
from .control import active_runs, register_sites, submit_run
from .places import server_secret, superlink_address
from .runtime import Heartbeat, Link
from .start import prepare_process
from .tasks import ForeignApp, Task, acquire
from .transport import FlowerTransport

log = logging.getLogger("fedabml.federation")

POLL = 0.5  # seconds between two requests for a task
SUBMIT_POLL = 3.0  # seconds between two checks whether a run is active
TASK_FILE = "server_task.json"

Coordinate = Callable[[ServerFolder, Transport], None]


def coordinate(folder: ServerFolder, transport: Transport) -> None:
    """Run the federation's coordinator over a transport."""
    from ..coordinator import Coordinator

    Coordinator(folder, transport).run()


class ServerWorker:
    """The worker runs `coordinate` for the SuperLink's tasks. With `submit` it starts a run whenever none is active."""

    def __init__(self, folder: ServerFolder, coordinate: Coordinate = coordinate, submit: bool = False) -> None:
        self._folder, self._coordinate, self._submit = folder, coordinate, submit
        self._certificate = read_bytes(folder.ca_certificate)
        self._file: Path = folder.run / TASK_FILE
        self._looked = float("-inf")

    def _connect(self, token: str = "") -> Link:
        secret = None if token else server_secret(self._folder)
        return Link.open(
            superlink_address(self._folder),
            self._certificate,
            token=token,
            secret=secret,
            patience=600.0 if token else float("inf"),
        )

    def run(self) -> None:
        """Carry out runs until one ends normally. An error that ends a run is raised."""
        with closing(self._connect()) as link:
            task = Task.load(self._file, self._connect)
            if task is not None:
                log.info("The run %d goes on.", task.run_id)
            while not self._folder.stop_file.exists():
                if task is None:
                    task = acquire(link, TaskType.SERVER_APP, self._connect)
                if task is None:
                    self._start_run()
                    time.sleep(POLL)
                elif self._work(task):
                    return
                task = None

    def _start_run(self) -> None:
        """Start a run if none is active."""
        if not self._submit or time.monotonic() - self._looked < SUBMIT_POLL:
            return
        try:
            register_sites(self._folder)
            if not active_runs(self._folder):
                log.info("The run %d was started.", submit_run(self._folder))
        except InputError as error:
            log.warning("No run could be started: %s", error)
        self._looked = time.monotonic()

    def _work(self, task: Task) -> bool:
        """Carry out one task; return True if the federation has ended normally."""
        try:
            if not task.node_id:  # its input has not been read yet
                task.save(self._file)
                task.pull_input({app_hash(self._folder.app)})
                task.save(self._file)
            with Heartbeat(task.link):
                self._coordinate(self._folder, FlowerTransport(task.link, task.run_id, self._folder))
            task.finish()
        except ForeignApp as refusal:
            log.warning("A run was refused: %s", refusal)
            self._close(task, str(refusal))
            return False
        except TransportClosed as error:
            log.warning("The run %d ended: %s", task.run_id, error)
            self._close(task, str(error))
            return False
        except Exception as error:  # not ProcessStopped: then the file stays, and the next worker continues
            self._close(task, f"{type(error).__name__}: {error}")
            raise
        self._close(task, None)
        return True

    def _close(self, task: Task, error: str | None) -> None:
        if error is not None:
            with suppress(Exception):
                task.finish(error[:1000])
        self._file.unlink(missing_ok=True)
        task.link.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server's worker: `python -m fedabml.federation.flower.server_worker FOLDER`."""
    parser = argparse.ArgumentParser(description="The resident worker of a federation's server")
    parser.add_argument("folder", help="the federation's folder")
    parser.add_argument("--submit", action="store_true", help="start a run whenever none is under way")
    options = parser.parse_args(arguments)
    prepare_process()
    folder = ServerFolder(options.folder).check()
    with folder_lock(folder.run, ".server_worker.lock"):
        ServerWorker(folder, submit=options.submit).run()


if __name__ == "__main__":
    main()
