"""The application: routes, limits of requests, the token, and how requests reach the thread that predicts.

A refusal is `{"detail": sentence}` with a status from 400 to 429, or 503 if predicting takes too long. /ready answers
503 while predictions are not answered. uvicorn answers 503, in plain text, if there are too many connections. The event
loop only receives and answers; the thread of `batching` reads and predicts rows.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..arguments import checks_arguments
from ..errors import InputError, quoted
from ..files.sheets import csv_text
from ..runs.modules import Model
from ..runs.prediction_columns import as_text
from .batching import Answer
from .bodies import PARSERS, TooManyRows
from .openapi import json_value
from .page import PAGE
from .service import Served, ServeOptions, Service

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

log = logging.getLogger("fedabml")
LEAST_TOKEN = 16  # characters of a token
DISCARDED = 4  # times the largest body: up to there a body that is too large is read before it is refused
LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
OPEN = ("/", "/docs", "/health", "/ready")  # paths that need no token: they hold nothing of the posterior
PATHS = (*OPEN, "/predict", "/reload", "/metrics", "/openapi.json")
NO_PACKAGES = "Serving needs FastAPI and uvicorn: pip install fedabml[serve]."


class RequestRefused(Exception):
    """A request that is refused, with its status and the sentence."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


@checks_arguments
def create_app(
    path: str | os.PathLike[str],
    options: ServeOptions | None = None,
    token: str | None = None,
    model: Model | None = None,
) -> FastAPI:
    """Return an ASGI application that predicts with the posterior in a file.

    With a `token`, every request needs the header `Authorization: Bearer TOKEN`; without one, only requests addressed
    to this machine (localhost) are answered, and /reload is refused. `model` is the user's own module, its file or its
    folder, as for `load_posterior`.
    """
    try:
        from fastapi import FastAPI
    except ImportError as error:
        raise InputError(NO_PACKAGES) from error
    if token is not None and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        raise InputError(f"The token must have {LEAST_TOKEN} or more printable ASCII characters.")
    service = Service(path, options or ServeOptions(), model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        watching = asyncio.create_task(_watch(service)) if service.options.watch else None
        yield
        if watching:
            watching.cancel()
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="fedabml", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    _add_routes(app, service)
    _add_gate(app, service, token)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

    async def predict(request: Request) -> Response:
        return await _predict(request, service)

    async def reload(request: Request) -> Response:
        try:
            replaced = await asyncio.to_thread(service.reload)
        except InputError as error:
            raise RequestRefused(409, str(error)) from error
        return _json({"posterior": service.served.digest[:16], "replaced": replaced})

    async def health(request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(request: Request) -> Response:
        return _json({"status": "ready" if service.ready else "not ready"}, 200 if service.ready else 503)

    async def metrics(request: Request) -> Response:
        service.metrics.replace("requests_in_flight", service.in_flight)
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(request: Request) -> Response:
        return _json(service.served.openapi)

    async def docs(request: Request) -> Response:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(PAGE, headers={"content-security-policy": policy, "x-frame-options": "DENY"})

    async def root(request: Request) -> Response:
        return RedirectResponse("docs")

    app.add_route("/predict", predict, methods=["POST"])
    app.add_route("/reload", reload, methods=["POST"])
    for name, function in {"health": health, "ready": ready, "metrics": metrics, "docs": docs}.items():
        app.add_route(f"/{name}", function, methods=["GET"])
    app.add_route("/openapi.json", openapi, methods=["GET"])
    app.add_route("/", root, methods=["GET"])


def _add_gate(app: FastAPI, service: Service, token: str | None) -> None:
    """Check every request before its route, count it afterwards, and turn errors into sentences."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return _json({"detail": str(error)}, error.status, error.headers)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentences = {404: "There is no such page; see /docs.", 405: "This page takes another method; see /docs."}
        return _json({"detail": sentences.get(error.status_code, str(error.detail))}, error.status_code, error.headers)

    app.add_exception_handler(RequestRefused, refused)
    app.add_exception_handler(HTTPException, not_routed)

    class Gate:  # as plain ASGI: a middleware of functions doubles the time of a small request
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await self.app(scope, receive, send)
                return
            begun, path, status = time.perf_counter(), scope["path"], 0

            async def note_status(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                _check_caller(Request(scope), token)
                await self.app(scope, receive, note_status)
            except RequestRefused as error:
                await (await refused(Request(scope), error))(scope, receive, note_status)
            except Exception:
                log.exception("A request to %s failed", path if path in PATHS else "an unknown page")
                if not status:
                    failed = _json({"detail": "The service failed; its log says why."}, 500)
                    await failed(scope, receive, note_status)
            if path == "/predict":
                service.metrics.observe("request_seconds", time.perf_counter() - begun)
            known = path if path in PATHS else "other"
            service.metrics.count("requests_total", path=known, status=str(status))

    app.add_middleware(Gate)


def _check_caller(request: Request, token: str | None) -> None:
    """Refuse a request without the token; without one in use, a request that names another machine.

    The name is what a browser was told to connect to: a page of a stranger's that resolves its own name to this
    machine must not reach a service without a token.
    """
    path = request.scope["path"]  # as routes read it; older versions of starlette take the Host header into url.path
    if token is None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") or (host.count(":") != 1 and "]" not in host) else host.rpartition(":")[0]
        if name.lower() not in LOCAL:
            raise RequestRefused(403, "Without a token the service answers requests to localhost only.")
        if path == "/reload":
            raise RequestRefused(403, "/reload needs a token. Start the service with --token-file.")
        return
    if path in OPEN:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
    if scheme.lower() != "bearer" or not same:
        sentence = "The token is missing or wrong. Send it in the header Authorization: Bearer TOKEN."
        raise RequestRefused(401, sentence, www_authenticate="Bearer")


async def _predict(request: Request, service: Service) -> Response:
    options = service.options
    if parameter := next(iter(request.query_params), None):
        problem = f"/predict takes no parameters in its address, and there is {quoted(parameter)}."
        raise RequestRefused(
            422, f"{problem} Send rows in the body; options are those that the service was started with."
        )
    if service.in_flight >= options.max_requests:
        sentence = f"The service answers {options.max_requests} requests at once. Try again in a moment."
        raise RequestRefused(429, sentence, retry_after="1")
    service.in_flight += 1
    try:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in PARSERS:
            raise RequestRefused(415, f"Send application/json or text/csv as the content-type, not '{kind[:60]}'.")
        body, served = await _body(request, options), service.served
        try:
            assert service.batcher is not None
            waiting = asyncio.wrap_future(service.batcher.submit(served.posterior, kind, body))
            answer = await asyncio.wait_for(waiting, options.timeout)
        except InputError as error:
            raise RequestRefused(413 if isinstance(error, TooManyRows) else 422, str(error)) from error
        except TimeoutError as error:
            sentence = f"The prediction took longer than {options.timeout:g} seconds. Send fewer rows, or try again."
            raise RequestRefused(503, sentence, retry_after="1") from error
    finally:
        service.in_flight -= 1
    service.metrics.count("rows_total", len(next(iter(answer.columns.values()))))
    service.metrics.count("alarms_total", sum(answer.columns.get("alarm", ())))
    return _reply(answer, served, "text/csv" in request.headers.get("accept", ""))


async def _body(request: Request, options: ServeOptions) -> bytes:
    """Return the body; refuse one that is too large before it is in memory, or too slow.

    A body that is up to `DISCARDED` times too large is read and thrown away: a client whose connection is closed while
    it sends may lose the answer.
    """
    from starlette.requests import ClientDisconnect

    sentence = f"The body has more than {options.max_bytes:,} bytes, the most for one request. Send it in parts."
    declared = request.headers.get("content-length", "")
    limit, most = options.max_bytes, DISCARDED * options.max_bytes
    if declared.isdigit() and (len(declared) >= 20 or int(declared) > most):
        raise RequestRefused(413, sentence, connection="close")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(options.timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise RequestRefused(413, sentence, connection="close")
                if size <= limit:
                    body += chunk
    except TimeoutError as error:
        raise RequestRefused(
            408, f"The body did not arrive within {options.timeout:g} seconds.", connection="close"
        ) from error
    except ClientDisconnect as error:
        raise RequestRefused(400, "The client closed the connection before its body was complete.") from error
    if size > limit:
        raise RequestRefused(413, sentence)
    if not body:
        raise RequestRefused(422, 'The body is empty. Send {"rows": [...]} or a CSV; /docs has an example.')
    return bytes(body)


def _reply(answer: Answer, served: Served, as_csv: bool) -> Response:
    """Return the columns as rows of JSON, or as the CSV that `fedabml predict` writes."""
    from fastapi import Response

    columns, headers = answer.columns, {"x-posterior": served.digest[:16]}
    rows = list(zip(*columns.values(), strict=True))
    if as_csv:
        text = csv_text(["row", *columns], ([i, *map(as_text, columns, row)] for i, row in enumerate(rows)))
        return Response(text.encode("utf-8", "backslashreplace"), media_type="text/csv", headers=headers)
    records = [dict(zip(columns, map(json_value, row), strict=True)) for row in rows]
    content: dict[str, Any] = {"posterior": served.digest[:16], "predictions": records}
    return _json(content | ({"ignored": answer.ignored} if answer.ignored else {}), headers=headers)


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    """Return JSON in ASCII: a client's words may hold characters that no encoding takes."""
    from fastapi import Response

    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers=dict(headers or {}), media_type="application/json")


async def _watch(service: Service) -> None:
    """Take a newer posterior into use when its file changes; no error ends the watching."""
    while True:
        await asyncio.sleep(service.options.watch)
        try:
            if service.changed():
                await asyncio.to_thread(service.reload)
        except InputError as error:
            log.warning("The newer posterior is not used: %s", error)
        except OSError:  # the file is being replaced
            continue
        except Exception:  # such as too little memory, or an error of the user's own module
            log.exception("The newer posterior is not used; the service tries again in %g s", service.options.watch)
