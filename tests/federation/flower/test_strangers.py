"""A real SuperLink behind a real nginx: a registered SuperNode connects, and everybody else is refused."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from drills import attacks, strangers
from fedabml.federation import init, keys, operate, proxy
from fedabml.federation.archive import unpack
from fedabml.federation.flower import commands, control
from tests.federation.deployed import WAIT, free_ports, until

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(proxy.find_nginx() is None, reason="nginx is not installed"),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern"),  # Flower calls pathspec by its old name
]


@contextmanager
def process(command, folder, log):
    """Run a command with the environment of a folder, and end it with its children."""
    env = {**os.environ, **commands.environment(folder)}
    with open(log, "wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The folder of a federation whose SuperLink and proxy are running; site a is registered, and b was removed."""
    place = tmp_path_factory.mktemp("strangers")
    ports = dict(zip(("port", "superlink_port"), free_ports(), strict=True))
    folder = init.init(place / "fed", "127.0.0.1", ["a", "b"], apps=["ab" * 32], **ports)
    sites = {name: unpack(folder.archive(name), place / name) for name in ("a", "b")}
    init.remove_site(folder, "b")
    with process(commands.superlink_command(folder), folder, place / "superlink.log"):
        until(operate.health_check(folder, folder.settings.superlink_port), 600)
        assert control.register_sites(folder) == ["a"]
        with process(proxy.command(folder), folder, place / "proxy.log"):
            until(operate.health_check(folder, folder.settings.port), 600)
            yield folder, sites


def test_only_a_registered_key_with_its_signature_passes(server):
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    from drills.intruder import Intruder, stranger

    folder, sites = server
    path = "/v1/fleet/activate-node"
    with ExitStack() as stack:
        a, b = (Intruder(folder, sites[name].key.read_bytes()) for name in ("a", "b"))
        others = [b, stranger(folder), Intruder(folder)]
        for each in (a, *others):
            stack.callback(each.close)
        request = ActivateNodeRequest(public_key=a.public_key, heartbeat_interval=1e9).SerializeToString()
        assert a.send(path, request)[0] == 400  # Flower's answer to an impossible interval: it took the signature
        assert a.send(path, request, headers={"flwr-signature": "AAAA"})[0] == 401
        assert a.send(path, request, headers={"flwr-timestamp": "2020-01-01T00:00:00+00:00"})[0] == 401
        assert [each.send(path, request)[0] for each in others] == [403] * 3
        for other in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/health"):
            assert a.send(other)[0] == 403
        assert a.send("/v1/fleet/register-node", request)[0] == 403


def test_a_real_supernode_connects_through_the_proxy(server):
    folder, sites = server

    def online():
        from flwr.proto.control_pb2 import ListNodesRequest

        with control._control(folder) as client:
            return [node.name for node in client.ListNodes(ListNodesRequest()).nodes_info if node.status == "online"]

    assert online() == []
    log = sites["a"].path / "supernode.log"
    with process(commands.supernode_command(sites["a"]), sites["a"], log) as node:
        until(lambda: online() == ["a"] or node.poll() is not None, 5 * WAIT)
        assert node.poll() is None and online() == ["a"]


def test_the_drill_sees_whether_a_real_supernode_was_refused(server, tmp_path):
    """The verdict comes from the SuperLink's list of nodes: it is "not refused" for a site that may connect."""
    folder, sites = server
    other, key = tmp_path / "other.crt", sites["a"].key
    other.write_bytes(keys.make_authority("other").certificate)
    connected = attacks.real_supernode(folder, tmp_path, "none", folder.ca_certificate, key, 5 * WAIT)
    assert not connected["refused"] and connected["seen"].endswith("nodes: activated")
    refused = attacks.real_supernode(folder, tmp_path, "wrong authority", other, key, 5 * WAIT)
    assert refused["refused"] and refused["seen"].endswith("nodes: not activated")
    unknown = attacks.real_supernode(folder, tmp_path, "unregistered", folder.ca_certificate, sites["b"].key, 5 * WAIT)
    assert unknown["refused"] and unknown["seen"].startswith("403 Forbidden")


def test_a_supernode_that_has_said_nothing_is_not_refused(server, tmp_path):
    folder, sites = server
    silent = attacks.real_supernode(folder, tmp_path, "none", folder.ca_certificate, sites["b"].key, 0.0)
    assert not silent["refused"] and silent["seen"].startswith("no refusal in its log")


def test_the_superlink_listens_on_the_loopback_interface_alone(server):
    folder, _ = server
    with open("/proc/net/tcp", encoding="ascii") as table:
        wanted = f":{folder.settings.superlink_port:04X}"
        rows = [line.split() for line in table][1:]
    listening = {row[1] for row in rows if row[1].endswith(wanted) and row[3] == "0A"}
    assert listening == {f"0100007F{wanted}"} or sys.byteorder == "big"


def test_the_stored_page_of_the_drill_is_that_of_its_record(tmp_path):
    record = Path(shutil.copy(strangers.OUT, tmp_path))
    assert strangers.page(record).read_text() == strangers.OUT.with_suffix(".md").read_text()
