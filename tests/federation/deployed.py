"""An operator's folder on free ports of this machine, and nginx before a small TLS server, for the room's tests."""

import http.client
import socket
import ssl
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedabml.federation import init, meter, proxy
from fedabml.federation.folders import ServerFolder

APP = "ab" * 32  # the hash of an app
WAIT = 120.0  # seconds; a machine may be five times slower


def free_ports(count=2):
    """Return different free ports: all are held until the last one is found."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def folder_of(path, sites=("a", "b"), **settings) -> ServerFolder:
    ports = dict(zip(("port", "superlink_port"), free_ports(), strict=True))
    return init.init(path / "fed", "localhost", sites, apps=[APP], **(ports | settings))


def until(condition, seconds=WAIT):
    """Wait until a condition holds; return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


class _Upstream(BaseHTTPRequestHandler):
    """A server in the SuperLink's place: it answers every request with 200 and notes what arrived."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet per answer: two would wait for an acknowledgement

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, dict(self.headers), len(body)))
        self.send_response(200)
        self.send_header("server", "upstream/9.9")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_PUT = do_POST

    def log_message(self, *args):
        pass


@contextmanager
def upstream(folder, certificate=None, key=None):
    """Serve TLS on the SuperLink's port; yields the list of requests that arrived."""
    server = ThreadingHTTPServer(("127.0.0.1", folder.settings.superlink_port), _Upstream)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate or folder.server_certificate, key or folder.server_key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error, server.daemon_threads, server.seen = lambda *_: None, True, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def running_nginx(folder):
    """Run nginx itself; yields once it listens."""
    proxy.write(folder)
    process = meter.start_nginx(folder)
    try:
        until(lambda: _listens(folder.settings.port) or process.poll() is not None)
        assert process.poll() is None
        yield process
    finally:
        meter.stop_nginx(process)


def _listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def context_of(folder):
    return ssl.create_default_context(cafile=str(folder.ca_certificate))


def request(folder, path, body=b"", method="POST", site="a", headers=None, context=None):
    """Send one request through the proxy, as a site; return its status and its headers."""
    port = folder.settings.port
    connection = http.client.HTTPSConnection("localhost", port, context=context or context_of(folder), timeout=WAIT)
    key = next((member.public_key for member in folder.sites() if member.name == site), None)
    known = {"flwr-public-key": proxy.site_header(key)} if key else {}
    try:
        connection.request(method, path, body=body, headers=known | (headers or {}))
        response = connection.getresponse()
        response.read()
        return response.status, dict(response.getheaders())
    except (BrokenPipeError, ConnectionResetError):  # nginx answers and closes before the body is sent
        with suppress(OSError, http.client.HTTPException):
            return connection.getresponse().status, {}
        return 0, {}
    finally:
        connection.close()


@contextmanager
def connected(folder, site="a"):
    """Keep one connection to the proxy, as a site; yields a function that posts a body and returns the status."""
    port = folder.settings.port
    connection = http.client.HTTPSConnection("localhost", port, context=context_of(folder), timeout=WAIT)
    key = next((member.public_key for member in folder.sites() if member.name == site), None)
    headers = {"flwr-public-key": proxy.site_header(key)} if key else {}

    def send(path, body):
        connection.request("POST", path, body=body, headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status

    try:
        yield send
    finally:
        connection.close()
