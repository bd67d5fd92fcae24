"""The server's resident worker at a real SuperLink, in a process of its own, with TLS and its secret."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from fedabml.errors import InputError, TrainingError
from fedabml.federation import operate
from fedabml.federation.flower import commands, control, server_worker
from fedabml.federation.flower.app import bundle
from fedabml.federation.flower.runtime import RunEnded
from fedabml.federation.flower.server_worker import TASK_FILE, ServerWorker
from fedabml.federation.folders import ServerFolder, write_secret
from fedabml.federation.init import init
from fedabml.federation.messages import Transport
from tests.federation.deployed import free_ports, until

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
# A worker in another process, whose coordinator writes a line and then waits for its end.
WAITS = """
import sys, time
from fedabml.federation.flower.server_worker import ServerWorker
from fedabml.federation.folders import ServerFolder
def coordinate(folder, transport):
    print("begun", flush=True)
    time.sleep(3600)
ServerWorker(ServerFolder(sys.argv[1]), coordinate).run()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFolder]:
    """An operator's folder whose SuperLink runs."""
    ports = dict(zip(("port", "superlink_port"), free_ports(), strict=True))
    made = init(tmp_path_factory.mktemp("server") / "federation", "127.0.0.1", ["a", "b"], **ports)
    environment = os.environ | commands.environment(made)
    with (
        (made.run / "superlink.log").open("wb") as log,
        subprocess.Popen(commands.superlink_command(made), env=environment, stdout=log, stderr=log) as superlink,
    ):
        answers = operate.health_check(made, made.settings.superlink_port)
        try:
            until(lambda: answers() or superlink.poll() is not None, 600)
            assert superlink.poll() is None, (made.run / "superlink.log").read_text()
            yield made
        finally:
            superlink.kill()


class Coordinators:
    """Notes the transports that a worker's coordinators got."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, folder: ServerFolder, transport: Transport) -> None:
        self.runs.append(run_of(transport))


def run_of(transport: Any) -> int:
    return int(transport._run)


def submit_foreign(folder: ServerFolder, content: bytes, digest: str = "") -> int:
    """Start a run of another app, as anybody on the server's machine can."""
    with control._control(folder) as client:
        return int(client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(digest, content, {})))).run_id)


def test_a_foreign_app_is_refused_and_its_code_never_runs(folder: ServerFolder, tmp_path: Path) -> None:
    app, trace = tmp_path / "app", tmp_path / "trace"
    shutil.copytree(folder.app, app)
    with (app / "fedabml_app/server_app.py").open("a") as code:
        code.write(f"\nopen({str(trace)!r}, 'w').close()\n")
    foreign, coordinators = submit_foreign(folder, bundle(app)), Coordinators()
    own = control.submit_run(folder)
    assert own != foreign
    ServerWorker(folder, coordinators).run()
    assert control.run_status(folder, foreign) == "finished:failed"
    assert coordinators.runs == [own] and control.run_status(folder, own) == "finished:completed"
    assert not trace.exists() and not (folder.run / TASK_FILE).exists()


def flwr(folder: ServerFolder, *words: object) -> str:
    """Run Flower's own command with the environment of a folder; return what it printed."""
    command = [sys.executable, "-c", "from flwr.cli.app import app; app()", *map(str, words)]
    env = os.environ | commands.environment(folder)
    done = subprocess.run(command, cwd=folder.run, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_flowers_own_commands_build_and_run_the_app(folder: ServerFolder) -> None:
    flwr(folder, "build", "--app", folder.app)
    (built,) = folder.run.glob("*.fab")
    assert built.read_bytes() == bundle(folder.app)
    (folder.run / "flwr/config.toml").write_text(
        f'[superlink.trial]\naddress = "{commands.superlink_address(folder)}"\n'
        f'root-certificates = "{folder.ca_certificate}"\n'
    )
    run = json.loads(flwr(folder, "run", folder.app, "trial", "--format", "json"))["run-id"]
    coordinators = Coordinators()
    ServerWorker(folder, coordinators).run()
    assert coordinators.runs == [int(run)] and control.run_status(folder, int(run)) == "finished:completed"


def test_a_worker_without_the_secret_gets_no_task(folder: ServerFolder, tmp_path: Path) -> None:
    shutil.copytree(folder.path, tmp_path / "copy", ignore=shutil.ignore_patterns("run", "state"))
    copy = ServerFolder(tmp_path / "copy")
    copy.make()
    write_secret(copy.superexec_secret, b"0" * 64)
    run, coordinators = control.submit_run(folder), Coordinators()
    with pytest.raises(RunEnded, match="AcquireTask"):
        ServerWorker(copy, coordinators).run()
    assert coordinators.runs == [] and control.run_status(folder, run) == "pending"
    ServerWorker(folder, coordinators).run()
    assert coordinators.runs == [run]


def test_a_killed_worker_is_followed_by_one_with_the_same_run(folder: ServerFolder) -> None:
    run = control.submit_run(folder)
    command = [sys.executable, "-c", WAITS, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        first.send_signal(signal.SIGKILL)
    assert (folder.run / TASK_FILE).exists() and (folder.run / TASK_FILE).stat().st_mode & 0o077 == 0
    assert control.run_status(folder, run) == "running"
    coordinators = Coordinators()
    ServerWorker(folder, coordinators).run()
    assert coordinators.runs == [run] and control.run_status(folder, run) == "finished:completed"
    assert not (folder.run / TASK_FILE).exists() and control.active_runs(folder) == []


def test_a_run_that_was_stopped_ends_and_the_next_one_is_taken(folder: ServerFolder) -> None:
    runs = [control.submit_run(folder)]

    def coordinate(folder: ServerFolder, transport: Transport) -> None:
        if len(runs) == 1:
            control.stop_run(folder, run_of(transport))
            runs.append(control.submit_run(folder))
            transport.receive(0.0)
            transport.sites()
            raise AssertionError("a run that is over answers")
        assert run_of(transport) == runs[1]

    ServerWorker(folder, coordinate).run()
    assert [control.run_status(folder, run) for run in runs] == ["finished:stopped", "finished:completed"]


def test_an_error_of_the_coordinator_fails_the_run_and_is_raised(folder: ServerFolder) -> None:
    run = control.submit_run(folder)

    def coordinate(folder: ServerFolder, transport: Transport) -> None:
        raise TrainingError("Round 3 was given up.")

    with pytest.raises(TrainingError, match="Round 3"):
        ServerWorker(folder, coordinate).run()
    assert control.run_status(folder, run) == "finished:failed" and not (folder.run / TASK_FILE).exists()


def test_a_worker_may_start_the_run_itself_and_ends_at_the_stop_file(folder: ServerFolder) -> None:
    coordinators = Coordinators()
    ServerWorker(folder, coordinators, submit=True).run()
    assert len(coordinators.runs) == 1
    folder.stop_file.touch()
    ServerWorker(folder, coordinators, submit=True).run()
    folder.stop_file.unlink()
    assert len(coordinators.runs) == 1 and control.active_runs(folder) == []


def test_a_folder_that_is_no_federation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_worker, "prepare_process", lambda: None)  # it would change this process's signals
    with pytest.raises(InputError, match="not a federation's folder"):
        server_worker.main([str(tmp_path)])
    with pytest.raises(SystemExit):
        server_worker.main([str(tmp_path), "--unknown"])
