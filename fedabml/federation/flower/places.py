"""Return ports, addresses and shared secrets of a federation's processes on one machine."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from ...errors import InputError
from ...files.paths import read_bytes, read_text, write
from ..folders import ServerFolder, SiteFolder, write_secret

LOOPBACK = "127.0.0.1"
FOLDER_VARIABLE = "FEDABML_FEDERATION"  # the federation's folder, for the plain ServerApp
NODE_PORT_FILE = "node_port"
SECRET_FILE = "superexec.secret"


def superlink_address(folder: ServerFolder) -> str:
    """Return where the SuperLink listens, on the loopback interface."""
    return f"{LOOPBACK}:{folder.settings.superlink_port}"


def node_port(folder: SiteFolder) -> int:
    """Return the port of a site's SuperNode: that of the settings, or a free one, chosen once and stored in `run`."""
    if folder.settings.node_port:
        return folder.settings.node_port
    path = folder.run / NODE_PORT_FILE
    if path.exists():
        text = read_text(path, 100).strip()
        if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
            return int(text)
        raise InputError(f"'{path}' holds no port. Remove it; another port is then chosen.")
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    folder.run.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, f"{port}\n")
    return port


def node_address(folder: SiteFolder) -> str:
    """Return where a site's SuperNode serves its worker, on the loopback interface."""
    return f"{LOOPBACK}:{node_port(folder)}"


def shared_secret(path: Path) -> bytes:
    """Return the secret in a file that only the owner can read; create the file if it does not exist."""
    if not path.exists():
        write_secret(path, secrets.token_hex(32).encode())
    return read_bytes(path, 4096)


def site_secret(folder: SiteFolder) -> bytes:
    """Return the secret that a site's SuperNode and worker share."""
    return shared_secret(folder.run / SECRET_FILE)


def server_secret(folder: ServerFolder) -> bytes:
    """Return the secret that the SuperLink and the server's worker share."""
    return shared_secret(folder.superexec_secret)
