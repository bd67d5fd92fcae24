"""Build the commands that the supervisor starts: SuperLink, executor, SuperNodes, workers.

All processes listen on the loopback interface only. Programs come from the environment that runs this process.
"""

from __future__ import annotations

import os
import sys

from ..folders import ServerFolder, SiteFolder
from . import app
from .control import active_runs, register_sites, run_status, stop_run, submit_run
from .places import FOLDER_VARIABLE, LOOPBACK, SECRET_FILE, node_port, server_secret, site_secret, superlink_address

__all__ = [
    "active_runs",
    "app_hash",
    "environment",
    "message_environment",
    "register_sites",
    "run_status",
    "server_executor_command",
    "stop_run",
    "submit_run",
    "superlink_address",
    "superlink_command",
    "supernode_command",
    "worker_command",
]

_GIVE_MEMORY_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 18),
}
_ROOM = __name__.rpartition(".")[0]


def app_hash(folder: ServerFolder) -> str:
    """Return the hash of the federation's Flower app, which every site must allow."""
    return app.app_hash(folder.app)


def superlink_command(folder: ServerFolder) -> list[str]:
    """Return the command of the SuperLink: TLS, known sites only, a database, and no process of its own."""
    server_secret(folder)
    settings = folder.settings
    return [
        *_flower("flwr.superlink.cli", "flower_superlink"),
        *("--host", LOOPBACK, "--port", str(settings.superlink_port), "--isolation", "process"),
        *("--ssl-ca-certfile", str(folder.ca_certificate), "--ssl-certfile", str(folder.server_certificate)),
        *("--ssl-keyfile", str(folder.server_key), "--database", str(folder.database)),
        *("--superexec-auth-secret-file", str(folder.superexec_secret)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def server_executor_command(folder: ServerFolder) -> list[str]:
    """Return the command of the server's worker, which runs the coordinator and never an app's code."""
    server_secret(folder)
    return [*_python(f"{_ROOM}.server_worker"), str(folder.path)]


def supernode_command(folder: SiteFolder) -> list[str]:
    """Return the command of a site's SuperNode."""
    site_secret(folder)
    return [
        *_python(f"{_ROOM}.supernode"),
        *("--superlink", folder.settings.server, "--root-certificates", str(folder.ca_certificate)),
        *("--auth-supernode-private-key", str(folder.key), "--isolation", "process"),
        *("--host", LOOPBACK, "--port", str(node_port(folder))),
        *("--superexec-auth-secret-file", str(folder.run / SECRET_FILE)),
    ]


def worker_command(folder: SiteFolder) -> list[str]:
    """Return the command of a site's resident worker."""
    site_secret(folder)
    node_port(folder)
    return [*_python(f"{_ROOM}.start"), str(folder.path)]


def environment(folder: ServerFolder | SiteFolder) -> dict[str, str]:
    """Return environment variables that switch telemetry off and put Flower's own files into the folder's `run`."""
    home = folder.run / "flwr"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # for flower-superexec in place of the workers
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        **({FOLDER_VARIABLE: str(folder.path)} if isinstance(folder, ServerFolder) else {}),
    }


def message_environment(folder: ServerFolder | SiteFolder) -> dict[str, str]:
    """Return the environment of a SuperLink or SuperNode, whose threads hold large messages for a moment.

    glibc would keep much of what they free, and a SuperLink would grow under floods of messages. With these settings
    freed memory goes back to the system; `drills.strangers` measures a SuperLink under eight floods. Where the
    environment has a variable MALLOC_…, none is set.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    return environment(folder) | ({} if own else _GIVE_MEMORY_BACK)


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _flower(module: str, function: str) -> list[str]:
    """Return the command of one of Flower's programs, independent of PATH."""
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]
