"""The meter: bytes per site and round, with a real nginx."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedabml.federation import init, proxy
from fedabml.federation.meter import LOOK, MAX_LOG, REACTION, Meter, Tail, budget, most_kept, refused_sites
from tests.federation.deployed import APP, WAIT, folder_of, request, until, upstream
from tests.federation.test_proxy import FLEET, needs_nginx

pytestmark = pytest.mark.flower


def append(path, *lines):
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def folder(tmp_path):
    return folder_of(tmp_path, max_message_mb=1)


def test_a_tail_gives_complete_lines_once_and_follows_a_file_that_was_cut(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"a\nb")
    assert tail.lines() == ["a"]
    append(path, "c")
    assert tail.lines() == ["bc"]
    path.write_bytes(b"d\n")
    assert tail.lines() == ["d"]
    assert tail.lines() == []


def test_a_site_beyond_its_budget_is_refused_until_the_next_event(folder):
    meter, most = Meter(folder), budget(folder.settings)
    append(
        meter.log, f"1.0 a push-object 200 {most}", f"1.0 b push-object 401 {9 * most}", "1.0 b push-object 200 x", ""
    )
    assert not meter.look() and meter.refused == frozenset()
    append(meter.log, "1.0 a push-messages 200 1")
    assert meter.look() and meter.refused == {"a"}
    assert meter.refused_file.read_text() == "a 1;\n"
    assert refused_sites(folder) == {"a": f"the proxy refused it: it sent more than {most} bytes in a round"}
    append(meter.log, "1.0 b push-object 413 9")
    assert not meter.look() and "too large" in refused_sites(folder)["b"]
    append(folder.events_file, json.dumps({"event": "other"}), "no JSON", "[1]")
    assert not meter.look() and meter.refused == {"a"}
    append(folder.events_file, json.dumps({"event": "round", "round": 1}))
    assert meter.look() and meter.refused == frozenset() and refused_sites(folder) == {}
    assert meter.refused_file.read_text() == ""


def test_the_bytes_that_a_site_can_store_are_those_of_the_guide(tmp_path):
    settings, small = folder_of(tmp_path).settings, folder_of(tmp_path / "small", max_message_mb=1).settings
    guide = " ".join((Path(__file__).parents[2] / "docs/deploy.md").read_text(encoding="utf-8").split())
    passing = most_kept(settings) - budget(settings)
    assert f"by default {budget(settings) / 1e6:.0f} MB. By default another {passing / 1e6:.0f} MB can pass" in guide
    parts = proxy.large_parts(small) + 1 + 10 * REACTION + proxy.SITE_CONNECTIONS
    messages = 41 + 50 * REACTION
    small_parts = 1001 + 100 * REACTION
    whole = 10_000_000 + parts * (5 * 2**20 + 2**16) + messages * 2**18 + small_parts * 9_999
    assert most_kept(small) == whole and LOOK < REACTION


def test_it_begins_with_what_is_new_and_keeps_logs_small(folder):
    log = proxy.run_folder(folder) / "access.log"
    append(log, f"1.0 a push-object 200 {9 * budget(folder.settings)}")
    meter = Meter(folder)
    assert not meter.look()
    log.write_bytes(b"x" * (MAX_LOG + 1))
    meter.look()
    assert log.stat().st_size == 0


def test_it_notices_a_new_site_and_a_new_certificate(folder):
    meter = Meter(folder)
    assert not meter.look()
    init.add_site(folder, "c", apps=[APP])
    assert meter.look() and not meter.look()
    init.renew(folder)
    assert meter.look() and not meter.look()


@needs_nginx
@pytest.mark.slow
def test_the_process_refuses_a_site_admits_a_new_one_and_leaves_nothing_behind(folder):
    process = subprocess.Popen(proxy.command(folder), stdout=subprocess.DEVNULL)
    pid_file = proxy.run_folder(folder) / "nginx.pid"
    try:
        with upstream(folder):
            until(lambda: pid_file.exists() and _answers(folder, "a", b"x") == 200)
            body, sent = b"x" * 1_000_000, 0
            while (status := _answers(folder, "a", body)) == 200:
                sent += len(body)
                # What passes between two looks is bounded by the rate of large parts.
                assert sent < budget(folder.settings) + (proxy.large_parts(folder.settings) + 10 * WAIT) * len(body)
                time.sleep(0.05)
            assert status == 503 and sent >= 5_000_000
            until(lambda: "a 1;" in (proxy.run_folder(folder) / "refused.map").read_text())
            until(lambda: _answers(folder, "a", b"x") == 503)
            assert _answers(folder, "b", b"x") == 200
            assert request(folder, f"{FLEET}/pull-messages", site="a")[0] == 200
            append(folder.events_file, json.dumps({"event": "round"}))
            until(lambda: _answers(folder, "a", b"x") == 200)
            init.add_site(folder, "c", apps=[APP])
            until(lambda: _answers(folder, "c", b"x") == 200)
            init.remove_site(folder, "b")
            until(lambda: _answers(folder, "b", b"x") == 403)
        master = int(pid_file.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
        until(lambda: not _alive(master))
    finally:
        process.kill()
        process.wait()


@needs_nginx
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the meter", "nginx"])
def test_after_a_kill_the_port_is_free_again(folder, victim):
    process = subprocess.Popen(proxy.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid_file = proxy.run_folder(folder) / "nginx.pid"
    try:
        until(lambda: pid_file.exists() and _answers(folder, "a", b"x") == 502)
        os.kill(process.pid if victim == "the meter" else int(pid_file.read_text()), signal.SIGKILL)
        assert process.wait(WAIT) != 0
        until(lambda: not _listens(folder))
    finally:
        process.kill()
        process.wait()


def test_a_wrong_folder_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "fedabml.federation.meter", str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 2 and "is not a federation's folder" in result.stderr


def _answers(folder, site, body):
    try:
        return request(folder, f"{FLEET}/push-object", body, site=site)[0]
    except OSError:
        return 0


def _listens(folder):
    """Return whether anybody accepts connections. TLS over a dying one would leak Python's socket, so none is tried."""
    try:
        socket.create_connection(("localhost", folder.settings.port), timeout=WAIT).close()
    except OSError:
        return False
    return True


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
