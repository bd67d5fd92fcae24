"""`fedabml serve`: a posterior behind HTTP."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError
from .console import note, print_line
from .options import Config, command, import_code
from .use import quantile_levels

IDLE = 1000  # connections without a request that are kept at once
TOKEN = "FEDABML_TOKEN"  # the environment variable that may hold the token


@command()
def serve(
    posterior: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    watch: float = 0.0,
    unknown: str = "refuse",
    quantiles: str = "",
    max_rows: int = 1000,
    max_bytes: int = 8 << 20,
    max_requests: int = 100,
    timeout: float = 30.0,
    batch_wait: float = 0.002,
    samples: int | None = None,
    seed: int = 0,
    device: str = "auto",
    model: str | None = None,
    config: Config = None,
) -> None:
    """Answer predictions over HTTP with a client's posterior.

    POST /predict takes rows as JSON or CSV and answers with the columns of `fedabml predict`. The page /docs shows an
    example that works. /health, /ready and /metrics (Prometheus) are for whoever runs the service. Requests that arrive
    together are predicted as one batch.

    The service listens on this machine only. Another --host needs a token, in a file or in the environment variable
    FEDABML_TOKEN; requests send it in the header `Authorization: Bearer TOKEN`. Put a proxy with TLS in front of it.

    To use a newer posterior, replace the file and call POST /reload with the token, or start with --watch. No request
    is lost.

    Example: `fedabml serve posterior.safetensors --port 8000`

    Flags:
        posterior (POSTERIOR): A file that `fedabml personalize` wrote.
        host: Address to listen on.
        port: Port to listen on; 0: any free one.
        token_file (FILE): File with the token that requests must send.
        watch (SECONDS): Look this often for a newer posterior in the file. [default: only at /reload]
        unknown (refuse|other): What to do with a word that fewer than five training rows had; other:
            predict it, as `predict` does.
        quantiles (0.1,0.5,0.9): Regression: levels of the predictive distribution to report.
        max_rows: Most rows in a request.
        max_bytes: Most bytes in a request's body.
        max_requests: Most requests at once.
        timeout (SECONDS): Time for a request to arrive, and for its answer.
        batch_wait (SECONDS): Time that a request waits for others, to be predicted with them.
        samples (N): Number of weight samples to average (0: the mean weights). [default: as in training]
        seed: Seed of the weight samples.
        device: auto, cpu or cuda.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise InputError("Serving needs FastAPI and uvicorn: pip install fedabml[serve].") from error
    from ..serve import ServeOptions, create_app

    import_code(model=model)
    token = _token(token_file)
    if token is None and not _is_loopback(host):
        raise InputError(
            f"'{host}' can be reached from other machines, so the service needs a token. Give one with --token-file or "
            f"in the environment variable {TOKEN}, or listen on 127.0.0.1."
        )
    limits: dict[str, Any] = {
        "max_rows": max_rows,
        "max_bytes": max_bytes,
        "max_requests": max_requests,
        "timeout": timeout,
    }
    how: dict[str, Any] = {"samples": samples, "seed": seed, "device": device, "quantiles": quantile_levels(quantiles)}
    options = ServeOptions(**limits, **how, batch_wait=batch_wait, watch=watch, unknown=unknown)
    app = create_app(posterior, options, token, model)
    with _listen(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        print_line(f"posterior   {posterior} ({app.state.service.served.digest[:16]})")
        print_line(f"token       {'required' if token else 'none: this machine only'}")
        print_line(f"serving     http://{name}:{listener.getsockname()[1]}/docs")
        settings = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        settings.timeout_keep_alive, settings.limit_concurrency = 15, max_requests + IDLE
        server = uvicorn.Server(settings)
        with suppress(KeyboardInterrupt):  # uvicorn has answered what was open, and raises the signal again
            server.run(sockets=[listener])
    print_line("Stopped.")


def _token(file: Path | None) -> str | None:
    """Return the token of a file or of the environment; None without either. It is never printed."""
    from ..files.paths import read_text

    if file is None:
        return os.environ.get(TOKEN) or None
    if os.environ.get(TOKEN):
        raise InputError(f"There are two tokens. Give --token-file or {TOKEN}, not both.")
    token = read_text(file, 4096).strip()
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        note(f"Other users can read the token in '{file}'. Run: chmod 600 {file}")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises InputError if it cannot."""
    if not 0 <= port <= 65535:
        raise InputError(f"The port is {port}; it must lie between 0 and 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise InputError(f"The service cannot listen on {host}:{port}: {error.strerror or error}.") from error
