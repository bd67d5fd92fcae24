"""The supervisor with real processes: it runs in a process of its own, and its children are small programs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedabml.federation import pids
from fedabml.federation.supervisor import Backoff, supervisor_of

ROOT = Path(__file__).resolve().parents[2]
MAX_WAIT = 300  # seconds to wait for an event: a loaded machine may take very long
PROGRAM = """
import json, sys
from pathlib import Path
from fedabml.errors import InputError
from fedabml.federation import pids, supervisor
from fedabml.federation.supervisor import Backoff, Process, Supervisor
run, children = Path(sys.argv[1]), json.loads(sys.argv[2])
supervisor.MAX_LOG = 10_000
full = Path(sys.argv[3])  # while this file exists, the disk is full
def refuse(function):
    def call(path, *args, **options):
        if full.exists():
            raise InputError(f"'{path}' cannot be written: No space left on device.")
        return function(path, *args, **options)
    return call
pids.write, supervisor.open_append = refuse(pids.write), refuse(supervisor.open_append)
made = []
for each in children:
    backoff = Backoff(**each.pop("backoff", {"first": 0.05, "most": 0.2}))
    flag = each.pop("healthy", None)
    health = (lambda flag=flag: Path(flag).exists()) if flag else None
    each["needs"] = tuple(each.get("needs", ()))
    made.append(Process(log=run / f"{each['name']}.log", backoff=backoff, health=health, **each))
Supervisor(made, run).run()
"""
SLEEP = ["sleep", "1000"]
# A leader with a child in its session, and one that has left the session.
FAMILY = [
    "sh",
    "-c",
    "sleep 1001 & setsid sleep 1002 & wait",
]


@pytest.fixture
def start(tmp_path):
    """Start a supervisor of these children in a folder; whatever happens, nothing of it is left."""
    begun = []

    def begin(*children, **options):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), json.dumps(children), str(tmp_path / "full")]
        begun.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()
    pids.end_leftovers(pids.records(tmp_path / "run/pids"))


def until(condition, what="an event"):
    """Wait until a condition holds, and return its value."""
    end = time.monotonic() + MAX_WAIT
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


def record(run, name, **facts):
    """The record of a process, once it is running and has these facts."""

    def found():
        each = pids.read_record(run / f"pids/{name}.json")
        facts_hold = each and all(getattr(each, key) == value for key, value in facts.items())
        return each if facts_hold and each.identity else None

    return until(found, f"{name} with {facts}")


def family(run, name="family", size=3):
    """The processes of a record: the leader, its child and the one that left."""

    def found():
        each = pids.read_record(run / f"pids/{name}.json")
        members = pids.members([each]) if each else []
        return members if len(members) >= size else None

    return until(found, "the family")


def test_sigterm_ends_everything_and_reaps_it(tmp_path, start):
    supervisor = start({"name": "one", "command": SLEEP}, {"name": "family", "command": FAMILY})
    members = [record(tmp_path / "run", "one", state="running").identity, *family(tmp_path / "run")]
    assert all(map(pids.alive, members)) and pids.alive(supervisor_of(tmp_path / "run"))
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(MAX_WAIT) == 0, supervisor.stderr.read()
    assert not any(map(pids.alive, members))
    assert {each.state for each in pids.records(tmp_path / "run/pids")} == {"stopped"}
    assert supervisor_of(tmp_path / "run") is None


def test_kill_9_of_the_supervisor_leaves_no_orphans(tmp_path, start):
    supervisor = start({"name": "one", "command": SLEEP}, {"name": "family", "command": FAMILY})
    members = [record(tmp_path / "run", "one", state="running").identity, *family(tmp_path / "run")]
    supervisor.kill()
    until(lambda: not any(map(pids.alive, members)), "the end of all")


def test_the_next_start_ends_what_is_left_if_supervisor_and_guard_were_killed(tmp_path, start):
    supervisor = start({"name": "family", "command": FAMILY})
    members = family(tmp_path / "run")
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    leader = pids.read_record(tmp_path / "run/pids/family.json").identity.pid
    guards = [int(pid) for pid in children if b"federation.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 1 and leader not in guards
    os.kill(supervisor.pid, signal.SIGSTOP)  # so that it does not replace the guard
    os.kill(guards[0], signal.SIGKILL)
    supervisor.kill()
    until(lambda: sum(map(pids.alive, members)) == 2, "the end of the leader")  # the system ends the direct child
    start({"name": "one", "command": SLEEP})
    record(tmp_path / "run", "one", state="running")
    assert not any(map(pids.alive, members))


def test_a_guard_that_was_killed_is_replaced(tmp_path, start):
    supervisor = start({"name": "one", "command": SLEEP})
    child = record(tmp_path / "run", "one", state="running").identity

    def guards():
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        return {int(pid) for pid in children} - {child.pid}

    (first,) = until(guards)
    os.kill(first, signal.SIGKILL)
    until(lambda: guards() and guards() != {first}, "another guard")
    assert pids.alive(child)


def test_a_second_supervisor_is_refused_and_harms_nothing(tmp_path, start):
    start({"name": "one", "command": SLEEP})
    child = record(tmp_path / "run", "one", state="running").identity
    second = start({"name": "one", "command": SLEEP})
    assert second.wait(MAX_WAIT) == 1 and "Another process is at work" in second.stderr.read()
    assert pids.alive(child)


def test_a_process_that_dies_is_restarted(tmp_path, start):
    start({"name": "one", "command": SLEEP})
    first = record(tmp_path / "run", "one", state="running")
    os.kill(first.identity.pid, signal.SIGKILL)
    second = record(tmp_path / "run", "one", state="running", restarts=1)
    assert second.identity != first.identity and second.last_exit == "signal SIGKILL"
    assert not pids.alive(first.identity) and pids.alive(second.identity)


def test_after_a_crash_the_wait_is_longer_than_after_a_clean_end(tmp_path, start):
    wait = {"first": 0.01, "most": 0.01, "least_after_crash": 1000}
    start(
        {"name": "crash", "command": ["sh", "-c", "exit 3"], "backoff": wait},
        {"name": "clean", "command": ["true"], "backoff": wait},
    )
    until(lambda: record(tmp_path / "run", "clean").restarts >= 2, "two clean ends")
    crashed = record(tmp_path / "run", "crash", restarts=1, state="waiting")
    assert crashed.last_exit == "exit code 3" and crashed.next_start - crashed.since >= 1000


def test_a_full_disk_ends_nothing_that_runs(tmp_path, start):
    supervisor = start({"name": "one", "command": SLEEP}, {"name": "two", "command": SLEEP})
    first, other = (record(tmp_path / "run", name, state="running").identity for name in ("one", "two"))
    (tmp_path / "full").touch()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: "No space left" in supervisor.stderr.readline(), "a complaint")  # neither log nor record
    assert pids.alive(other) and supervisor.poll() is None
    (tmp_path / "full").unlink()
    until(lambda: record(tmp_path / "run", "one", state="running").identity != first, "another start")
    assert pids.alive(other)


def test_the_wait_grows_with_every_quick_failure_up_to_a_limit():
    backoff = Backoff(first=1, factor=2, most=5, least_after_crash=3)
    assert [backoff.seconds(failures, True) for failures in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.seconds(failures, False) for failures in range(5)] == [3, 3, 4, 5, 5]
    assert backoff.seconds(10**6, True) == 5


def test_a_process_waits_for_what_it_needs(tmp_path, start):
    flag = tmp_path / "flag"
    start(
        {"name": "first", "command": SLEEP, "healthy": str(flag)},
        {"name": "second", "command": SLEEP, "needs": ["first"]},
    )
    record(tmp_path / "run", "first", state="starting")
    assert pids.read_record(tmp_path / "run/pids/second.json").identity is None
    flag.touch()
    record(tmp_path / "run", "first", state="running")
    record(tmp_path / "run", "second", state="running")


def test_the_end_is_in_order_and_does_not_wait_for_ever(tmp_path, start):
    """What a process needs ends after it; one that ignores SIGTERM is killed after its grace."""
    wait = f"touch {tmp_path}/$0; while :; do sleep 0.05; done"
    note = f"trap 'echo $0 >> {tmp_path}/ended; exit' TERM; {wait}"
    supervisor = start(
        {"name": "first", "command": ["sh", "-c", note, "first"]},
        {"name": "second", "command": ["sh", "-c", note, "second"], "needs": ["first"]},
        {"name": "deaf", "command": ["sh", "-c", f"trap '' TERM; {wait}", "deaf"], "grace": 0.5},
    )
    for name in ("first", "second", "deaf"):
        record(tmp_path / "run", name, state="running")
        until((tmp_path / name).exists, f"the trap of {name}")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(MAX_WAIT) == 0, supervisor.stderr.read()
    assert (tmp_path / "ended").read_text().split() == ["second", "first"]
    assert pids.read_record(tmp_path / "run/pids/deaf.json").last_exit == "signal SIGKILL"


def test_a_process_that_is_no_longer_well_is_killed_and_restarted(tmp_path, start):
    flag = tmp_path / "flag"
    flag.touch()
    start({"name": "one", "command": SLEEP, "healthy": str(flag), "patience": 0.5})
    first = record(tmp_path / "run", "one", state="running")
    flag.unlink()
    second = record(tmp_path / "run", "one", restarts=1)
    assert second.last_exit == "signal SIGKILL (it had not been healthy for 0 s)" and not pids.alive(first.identity)


POLLS = ["sh", "-c", "while :; do sleep 0.1; done"]
COMPUTES = [sys.executable, "-c", "import re; re.match('(a+)+b', 60 * 'a')"]  # one call that does not end


@pytest.mark.slow
def test_a_frozen_process_is_killed_and_restarted_and_one_that_computes_is_not(tmp_path, start):
    """The second process holds the interpreter in one call, so that no other thread of it could give a sign."""
    start(
        {"name": "polls", "command": POLLS, "frozen": 5},
        {"name": "computes", "command": COMPUTES, "frozen": 5},
    )
    first, other = (record(tmp_path / "run", name, state="running") for name in ("polls", "computes"))
    begin = time.monotonic()
    until(lambda: time.monotonic() - begin > 7, "some time")
    assert record(tmp_path / "run", "polls") == first
    os.kill(first.identity.pid, signal.SIGSTOP)
    second = record(tmp_path / "run", "polls", state="running", restarts=1)
    assert second.last_exit == "signal SIGKILL (it had been frozen for 5 s)"
    assert not pids.alive(first.identity) and pids.alive(second.identity)
    assert record(tmp_path / "run", "computes") == other


@pytest.mark.slow
def test_a_supervisor_that_was_held_up_blames_no_process(tmp_path, start):
    """As in a container that is paused: nobody has moved."""
    flag = tmp_path / "flag"
    flag.touch()
    watched = {"name": "polls", "command": POLLS, "frozen": 5, "healthy": str(flag), "patience": 5}
    supervisor = start(watched)
    first = record(tmp_path / "run", "polls", state="running")
    for process in (first.identity.pid, supervisor.pid):
        os.kill(process, signal.SIGSTOP)
    begin = time.monotonic()
    until(lambda: time.monotonic() - begin > 7, "some time")
    for process in (supervisor.pid, first.identity.pid):
        os.kill(process, signal.SIGCONT)
    until(lambda: time.monotonic() - begin > 10, "some more time")
    assert record(tmp_path / "run", "polls") == first


@pytest.mark.slow
def test_logs_are_bounded(tmp_path, start):
    run = tmp_path / "run"
    start({"name": "one", "command": ["sh", "-c", "while :; do echo 0123456789; sleep 0.0001; done"]})
    until(lambda: (run / "one.log.1").exists(), "a second log")
    for _ in range(20):
        assert (run / "one.log.1").stat().st_size <= 10_000 + 11 * 100_000
        time.sleep(0.05)
    lines = (run / "one.log.1").read_text().splitlines()
    assert set(lines[1:-1]) <= {"0123456789"}


def test_a_program_that_does_not_exist_is_named_in_its_log(tmp_path, start):
    start({"name": "one", "command": ["/none/such"]})
    until(lambda: record(tmp_path / "run", "one").failures >= 2)
    assert "/none/such: No such file" in (tmp_path / "run/one.log").read_text()


def test_a_number_that_is_reused_is_not_signalled(tmp_path):
    with subprocess.Popen(SLEEP) as other:
        try:
            real = pids.identity(other.pid)
            assert pids.alive(real)
            for wrong in (
                pids.Identity(real.pid, real.start - 1, real.boot),
                pids.Identity(real.pid, real.start, "another boot"),
            ):
                assert not pids.alive(wrong) and not pids.send_signal(wrong, signal.SIGKILL)
                assert pids.end_leftovers([pids.Record("one", "running", "token", wrong)]) == 0
            assert pids.alive(real)
            assert pids.end_leftovers([pids.Record("one", "running", "", real)]) == 1
        finally:
            other.kill()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"name": "a", "state": "b", "token": "", "identity": {"pid": []}}', "7"]
)
def test_a_damaged_record_ends_nothing(tmp_path, text):
    (tmp_path / "one.json").write_text(text)
    assert pids.records(tmp_path) == []
