"""Ports, secrets and commands of the processes."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedabml.errors import InputError
from fedabml.federation import operate
from fedabml.federation.flower import clock, commands
from fedabml.federation.flower.places import node_port, server_secret, site_secret
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.settings import Settings, SiteSettings

pytestmark = pytest.mark.flower


@pytest.fixture
def site(tmp_path: Path) -> SiteFolder:
    folder = SiteFolder(tmp_path / "site")
    folder.make()
    SiteSettings.of({"federation": "a" * 32, "name": "n", "server": "localhost:1"}).save(folder.settings_file)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    folder = ServerFolder(tmp_path / "server")
    folder.make()
    settings = {"federation": "a" * 32, "name": "n", "host": "h", "port": 1, "superlink_port": 2345}
    Settings.of(settings).save(folder.settings_file)
    return folder


def test_a_free_port_is_chosen_once(site: SiteFolder) -> None:
    port = node_port(site)
    assert port == node_port(SiteFolder(site.path)) and 1023 < port < 65536
    for text in ("x", "0", "70000", "٣"):
        (site.run / "node_port").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="holds no port"):
            node_port(site)


def test_secrets_are_made_once_and_private(site: SiteFolder, server: ServerFolder) -> None:
    assert site_secret(site) == site_secret(site) != server_secret(server)
    assert len(site_secret(site)) >= 32
    for path in (site.run / "superexec.secret", server.superexec_secret):
        assert path.stat().st_mode & 0o77 == 0


def test_everything_listens_on_loopback(site: SiteFolder, server: ServerFolder) -> None:
    link, node = commands.superlink_command(server), commands.supernode_command(site)
    for command, port in ((link, 2345), (node, node_port(site))):
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert command[command.index("--port") + 1] == str(port)
        assert command[command.index("--isolation") + 1] == "process"
        assert "--superexec-auth-secret-file" in command and "--insecure" not in command
    assert "--enable-supernode-auth" in link and "--disable-runtime-dependency-installation" in link
    for folder in (site, server):
        environment = commands.environment(folder)
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0" and environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert Path(environment["FLWR_HOME"]).is_relative_to(folder.run)


_MESSAGES = """
import threading
kept = []
def work():
    for _ in range(20):
        messages = [bytearray(4_000_000), bytearray(4_000_000)]
        kept.append(bytearray(3_000))
        messages.pop(0)
        kept.append(bytearray(3_000))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) // 1024)
"""


def _resident_mb(env: dict[str, str]) -> int:
    """Return the resident megabytes of a process whose threads have held 160 messages of 4 MB for a moment."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-I", "-c", _MESSAGES]
    return int(subprocess.run(command, env=others | env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_passed_messages_leave_no_memory_behind(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    usual, ours = commands.environment(server), commands.message_environment(server)
    assert usual.items() < ours.items()
    assert _resident_mb(ours) + 20 < _resident_mb(usual)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")  # the operator's own settings are kept
    assert commands.message_environment(server) == usual


def test_only_those_that_pass_messages_on_give_memory_back(
    site: SiteFolder, server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    server.save_sites([])
    processes = [*operate.server_processes(server), *operate.site_processes(site)]
    giving = {process.name for process in processes if "MALLOC_TRIM_THRESHOLD_" in process.env}
    assert giving == {"superlink", "supernode"} and len(processes) == 6


def test_flower_accepts_the_options(site: SiteFolder, server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own parsers take the commands, so no option is misspelt or gone."""
    node = importlib.import_module("flwr.supernode.cli.flower_supernode")._parse_args_run_supernode()
    command = commands.supernode_command(site)
    assert node.parse_args(command[3:]).superlink == "localhost:1"
    link = importlib.import_module("flwr.superlink.cli.flower_superlink")._parse_args_run_superlink()
    command = commands.superlink_command(server)
    assert link.parse_args(command[3:]).port == 2345


def test_the_age_of_a_process_grows() -> None:
    assert 0.0 <= clock.BOOT <= clock.process_age() < 1e7
