"""Call the SuperLink's control API, which listens on the loopback interface only: register sites, start a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from ...errors import InputError
from ...files.paths import read_bytes
from ..folders import ServerFolder
from .app import bundle
from .places import superlink_address


@contextmanager
def _control(folder: ServerFolder) -> Iterator[ControlHttpClient]:
    """Open the control API, and turn its errors into InputErrors."""
    client = ControlHttpClient.from_server_address(
        server_address=superlink_address(folder),
        insecure=False,
        root_certificates=read_bytes(folder.ca_certificate),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr")],
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        text = error.response.text[:300]
        raise InputError(f"The SuperLink refused a request ({error.response.status_code}): {text}") from error
    except httpx.TransportError as error:
        raise InputError(f"The SuperLink does not answer ({type(error).__name__}). Is the federation up?") from error
    finally:
        client.close()


def register_sites(folder: ServerFolder) -> list[str]:
    """Register all sites at the SuperLink and unregister removed ones; return the names of the new ones."""
    with _control(folder) as client:
        known = {
            bytes(node.public_key).decode("ascii", "replace"): node.node_id
            for node in client.ListNodes(ListNodesRequest()).nodes_info
            if node.status != "unregistered"
        }
        added = []
        for site in folder.sites():
            if not site.removed and site.public_key not in known:
                try:
                    client.RegisterNode(RegisterNodeRequest(public_key=site.public_key.encode(), name=site.name))
                    added.append(site.name)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != httpx.codes.PRECONDITION_FAILED:  # another call was faster
                        raise
            elif site.removed and site.public_key in known:
                client.UnregisterNode(UnregisterNodeRequest(node_id=known[site.public_key]))
        return added


def submit_run(folder: ServerFolder) -> int:
    """Start a run of the federation's app, unless one is active, and return the run's id."""
    content = bundle(folder.app)
    digest = hashlib.sha256(content).hexdigest()
    with _control(folder) as client:
        for run in _runs(client):
            if run.fab_hash == digest and run.status.status != Status.FINISHED:
                return int(run.run_id)
        response = client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(digest, content, {}))))
        if not response.HasField("run_id"):
            raise InputError("The SuperLink did not start a run.")
        return int(response.run_id)


def run_status(folder: ServerFolder, run_id: int) -> str:
    """Return the status of a run: pending, starting, running, finished:completed, finished:failed, finished:stopped.

    Raises InputError if there is no such run.
    """
    with _control(folder) as client:
        runs = list(client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict.values())
    if not runs:
        raise InputError(f"The SuperLink knows no run {run_id}.")
    return ":".join(part for part in (runs[0].status.status, runs[0].status.sub_status) if part)


def active_runs(folder: ServerFolder) -> list[int]:
    """Return the ids of the runs that have not finished."""
    with _control(folder) as client:
        return [int(run.run_id) for run in _runs(client) if run.status.status != Status.FINISHED]


def stop_run(folder: ServerFolder, run_id: int) -> None:
    """Ask the SuperLink to stop a run of the federation's app."""
    with _control(folder) as client:
        client.StopRun(StopRunRequest(run_id=run_id))


def _runs(client: ControlHttpClient) -> list[Any]:
    return list(client.ListRuns(ListRunsRequest(limit=1000)).run_dict.values())
