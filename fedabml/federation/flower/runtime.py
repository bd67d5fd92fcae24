"""Call Flower's runtime API (of a SuperLink or a SuperNode), and wait while its server is away.

Flower's own retries end the process with SIGINT when a token is no longer valid. A resident worker must outlive that,
so it uses the client without them: a lost connection is tried again with a growing pause, and a token that is no
longer valid raises RunEnded.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any

import httpx
from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient

from ..messages import TransportClosed

log = logging.getLogger("fedabml.federation")

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
PATIENCE = 600.0  # seconds that a call waits for a server that is away
HEARTBEAT = 10.0  # seconds between heartbeats of a task; Flower gives a task up after 60
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_ENDED = (401, 403)
_AWAY = (500, 502, 503, 504)  # 500: the SuperLink's database was busy, or the request is wrong
_BUSY = 20.0  # seconds after which status 500 is treated as a wrong request


class RunEnded(TransportClosed):
    """The run or the task has ended: it was stopped, it expired, or its server no longer knows it."""


class Away(TransportClosed):
    """The server of the runtime API did not come back in the time given."""


class Link:
    """A connection to one runtime API. `outages` counts the calls that found it away."""

    def __init__(self, client: RuntimeHttpClient, patience: float = PATIENCE) -> None:
        self.client = client
        self.patience = patience
        self.outages = 0
        self.last_outage = float("-inf")  # time.monotonic() of the last call that failed

    @classmethod
    def open(
        cls,
        address: str,
        root_certificates: bytes | None,
        *,
        token: str = "",
        secret: bytes | None = None,
        patience: float = PATIENCE,
    ) -> Link:
        """Connect to an address: over TLS if root certificates are given. The token belongs to one task."""
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if token:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        if secret:
            interceptors.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}))
        client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates,
            interceptors=interceptors,
        )
        return cls(client, patience)

    def call(self, method: str, request: Any, patience: float | None = None) -> Any:
        """Call a method by Flower's name. Raises RunEnded, or Away after `patience` seconds without an answer."""
        begin, pause = time.monotonic(), _FIRST_PAUSE
        until = begin + (self.patience if patience is None else patience)
        while True:
            try:
                return getattr(self.client, method)(request)
            except RunNotRunningException as error:
                raise RunEnded("The run is not running.") from error
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                if code in _ENDED:
                    raise RunEnded(f"{method} was answered with {code}: the task is over.") from error
                if code not in _AWAY or (code == 500 and time.monotonic() - begin > _BUSY):
                    raise
                cause: Exception = error
            except httpx.TransportError as error:
                cause = error
            self.outages += 1
            self.last_outage = time.monotonic()
            if self.last_outage + pause > until:
                raise Away(f"{method} got no answer ({type(cause).__name__}).") from cause
            log.debug("%s got no answer (%s); it is tried again.", method, type(cause).__name__)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


class Heartbeat:
    """A thread that keeps a task alive while its worker computes: `with Heartbeat(link): …`.

    It stops when the server answers that the task is over; the worker's own calls find out.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                alive = self._link.call("SendTaskHeartbeat", SendTaskHeartbeatRequest(), patience=HEARTBEAT).success
            except RunEnded:
                alive = False
            except (Away, httpx.HTTPError, ValueError, RuntimeError):
                alive = True  # the server is away, or the worker has closed the link: its own calls decide
            if not alive:
                return
            self._stop.wait(HEARTBEAT)
