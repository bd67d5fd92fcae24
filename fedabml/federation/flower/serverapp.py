"""This ServerApp wraps the coordinator for stock Flower deployments with `flower-superexec`.

The environment of the ServerApp's process names the federation's folder. `server_worker` does the same in a process
that never runs an app's code.
"""

from __future__ import annotations

import os
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...errors import InputError
from ..folders import ServerFolder
from .places import FOLDER_VARIABLE
from .runtime import Link
from .server_worker import coordinate
from .transport import FlowerTransport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the coordinator of the federation whose folder the environment names."""
    path = os.environ.get(FOLDER_VARIABLE, "")
    if not path:
        raise InputError(f"The variable {FOLDER_VARIABLE} does not name the federation's folder.")
    client: Any = getattr(grid, "_runtime_client", None)  # Grid itself can neither poll quickly nor bound a reply
    if client is None:
        raise InputError("This ServerApp needs the Grid of a Flower deployment; a simulation has another.")
    folder = ServerFolder(path).check()
    coordinate(folder, FlowerTransport(Link(client), context.run_id, folder))
