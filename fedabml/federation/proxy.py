"""Configure nginx before Flower's SuperLink: it passes the calls of registered SuperNodes, and nothing else.

Flower serves its control and runtime interfaces on the same port as the sites' own, and anyone who reaches them can run
code on the server. So the SuperLink listens on the loopback interface, and this proxy is the only open port. It passes

- POST to the ten paths in `CALLS`, which are those that an authenticated SuperNode of flwr 1.41.0 calls; not those of
  /v1/control and /v1/runtime, not register-node and unregister-node, no query, no other spelling of a path (403);
- requests that name the public key of a registered site (403); the SuperLink verifies the signature;
- bodies that state their length (411) and are at most one part of an array (413).

What is bounded, per site: requests and connections at a time, large parts per second, and by `meter` the bytes of a
round. Per address: requests and connections. What is not bounded here: how many TLS handshakes a stranger begins (a
firewall can), and how much nginx's own connections cost, at most `worker_connections` of them. A registered site can
fill its budget in every round, and the SuperLink keeps what nobody fetches until the run ends: remove such a site.
Someone who knows a site's public key, but not its private key, can use up that site's rate, but not its budget; the
SuperLink refuses each such request.

nginx runs as the user who starts it, root included, and writes files only under `run/nginx`.
"""

from __future__ import annotations

import base64
import ipaddress
import math
import os
import pwd
import resource
import shutil
import socket
import sys
from pathlib import Path

from ..errors import InputError
from ..files.paths import explain_errors
from ..files.paths import write as write_file
from .folders import Member, ServerFolder
from .settings import Settings, join_address

# What flwr/supernode/fleet_http_client.py and fleet_http_connection.py (1.41.0) call, with the most bytes of a body.
PART = 5 << 20  # Flower's largest part of an array
CALLS = {
    "activate-node": 16 << 10,
    "deactivate-node": 16 << 10,
    "send-node-heartbeat": 16 << 10,
    "pull-messages": 16 << 10,
    "push-messages": 256 << 10,  # names of objects, 70 bytes each, without their content
    "get-run": 16 << 10,
    "get-fab": 16 << 10,
    "push-object": PART + (64 << 10),
    "pull-object": 16 << 10,
    "confirm-message-received": 16 << 10,
}
METERED = ("push-messages", "push-object")  # the calls whose bytes the SuperLink keeps
# nginx adds the length of a body by itself; nothing else that a client sends reaches the SuperLink.
_HEADERS = (
    *("content-type", "accept", "flwr-public-key", "flwr-timestamp", "flwr-signature"),
    *("flwr-package-name", "flwr-package-version", "flwr-component-name"),
)
SITE_CONNECTIONS = 16  # a SuperNode uses three at a time
SITE_RATE = 50  # requests per second of a site
SMALL, SMALL_RATE, SMALL_BURST = 9_999, 100, 1000  # bytes of a small part; how many per second, and at once
LARGE_RATE = 10  # larger parts per second; `large_parts` may come at once
MESSAGE_BURST = 40  # messages at once, without their parts; a SuperNode sends one per order
_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/local/bin/nginx", "/opt/homebrew/bin/nginx")


def find_nginx() -> str | None:
    """Return the path of nginx, or None where it is not installed."""
    return shutil.which("nginx") or next((place for place in _PLACES if os.access(place, os.X_OK)), None)


def check() -> str:
    """Return the path of nginx. Raises InputError where it is not installed."""
    found = find_nginx()
    if found is None:
        raise InputError(
            "The proxy needs nginx, which is not installed. Install it, for example with `apt install nginx`. A "
            "federation does not run without it, because Flower alone lets strangers start programs."
        )
    return found


def command(folder: ServerFolder) -> list[str]:
    """Return the command that runs the proxy in the foreground: `meter`, which starts nginx."""
    return [sys.executable, "-m", "fedabml.federation.meter", str(folder.path)]


def nginx_command(folder: ServerFolder) -> list[str]:
    """Return the command that runs nginx itself in the foreground."""
    place = run_folder(folder)
    return [check(), "-p", str(place), "-e", str(place / "error.log"), "-c", str(folder.proxy_file)]


def run_folder(folder: ServerFolder) -> Path:
    """Return the folder of everything that nginx writes."""
    return folder.run / "nginx"


def write(folder: ServerFolder) -> Path:
    """Write the configuration from the settings and the registered sites, make nginx's folder, return the file."""
    text = nginx(folder)
    with explain_errors(folder.path, "written"):
        run_folder(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.proxy_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not folder.proxy_file.is_file() or folder.proxy_file.read_text(encoding="utf-8") != text:
        write_file(folder.proxy_file, text)
    return folder.proxy_file


def nginx(folder: ServerFolder) -> str:
    """Return the configuration of nginx for the settings and the registered sites of a folder."""
    settings, members = folder.settings, folder.members()
    run = run_folder(folder)
    _check_path(folder.path)
    places = "\n".join(
        f"    {kind}_temp_path {_quoted(run / kind)};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    listening = "\n".join(f"        listen {address} ssl;" for address in listen_addresses(settings))
    locations = "\n".join(_location(call, settings, len(members)) for call in CALLS)
    headers = "\n".join(f"        proxy_set_header {name} $http_{name.replace('-', '_')};" for name in _HEADERS)
    connections, files = _connections()
    return _TEMPLATE.format(
        name=settings.name, user=_user(), pid=_quoted(run / "nginx.pid"), error=_quoted(run / "error.log"),
        places=places, keys=_keys(members), buckets=max(4096, 4 * len(members)), listening=listening,
        calls="\n".join(f'        "POST /v1/fleet/{call}" {call};' for call in CALLS),
        metered="|".join(METERED), refused=_quoted(run / "refused*.map"),
        access=_quoted(run / "access.log"), locations=locations, headers=headers,
        certificate=_quoted(folder.server_certificate), key=_quoted(folder.server_key),
        authority=_quoted(folder.ca_certificate), superlink=settings.superlink_port,
        site_rate=SITE_RATE, small_rate=SMALL_RATE, large_rate=LARGE_RATE,
        rate=SITE_RATE * max(1, len(members)), connections=connections, files=files,
    )  # fmt: skip


def large_parts(settings: Settings) -> int:
    """Return how many large parts a site may send at once, beside one more: those of one message.

    They are those of the tensors, which are one array (see `flower.codec`), the fields, and the list of parts.
    """
    return math.ceil((settings.max_message_mb << 20) / PART) + 2


def passing(settings: Settings, seconds: float) -> int:
    """Return the most bytes that a site can make the SuperLink keep in some seconds, whatever its budget.

    nginx lets a burst, one request more, and those of the rate pass; its log has a request when it has ended, so those
    on open connections are added.
    """
    large = large_parts(settings) + 1 + LARGE_RATE * seconds + SITE_CONNECTIONS
    small, messages = SMALL_BURST + 1 + SMALL_RATE * seconds, MESSAGE_BURST + 1 + SITE_RATE * seconds
    return math.ceil(large * CALLS["push-object"] + small * SMALL + messages * CALLS["push-messages"])


def site_header(public_key: str) -> str:
    """Return the value of the header flwr-public-key of a site, whose public key is given as PEM."""
    return base64.b64encode(public_key.encode()).decode()


def listen_addresses(settings: Settings) -> list[str]:
    """Return the addresses to listen on: all, or the loopback ones where the host is a loopback name or address."""
    try:
        local = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        local = settings.host == "localhost"
    hosts = ["127.0.0.1" if local else "0.0.0.0"]
    if _has_ipv6():
        hosts.append("::1" if local else "::")
    return [join_address(host, settings.port) for host in hosts]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _connections() -> tuple[int, int]:
    """Return how many connections nginx may have and how many files it may open, within the system's limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = 9216 if hard == resource.RLIM_INFINITY else min(9216, hard)
    return max(64, (files - 256) // 2), files


def _user() -> str:
    """Return the line that lets nginx's workers run as root if this process does; otherwise an empty text."""
    return f"user {pwd.getpwuid(0).pw_name};\n" if os.geteuid() == 0 else ""


def _keys(members: list[Member]) -> str:
    return "\n".join(f'        "{site_header(member.public_key)}" {member.name};' for member in members)


def _location(call: str, settings: Settings, members: int) -> str:
    lines = [f"client_max_body_size {CALLS[call]};", f"limit_conn sites {SITE_CONNECTIONS};"]
    lines += [f"limit_conn addresses {32 + SITE_CONNECTIONS * members};", "limit_req zone=site burst=200 nodelay;"]
    if call == "push-messages":
        lines.append(f"limit_req zone=messages burst={MESSAGE_BURST} nodelay;")
    lines.append(f"limit_req zone=address burst={200 * max(1, members)} nodelay;")
    if call in METERED:
        lines.insert(0, "if ($refused) { return 503; }")
    if call == "push-object":
        lines += [f"limit_req zone=small burst={SMALL_BURST} nodelay;"]
        lines += [f"limit_req zone=large burst={large_parts(settings)} nodelay;"]
        lines = [line for line in lines if "zone=site" not in line and "zone=address" not in line]
    lines.append(f"proxy_pass https://superlink/v1/fleet/{call};")
    body = "\n".join(f"            {line}" for line in lines)
    return f"        location = /v1/fleet/{call} {{\n{body}\n        }}"


def _check_path(path: Path) -> None:
    if any(mark in str(path) for mark in "\"'\\$;{}*?[]#") or not str(path).isprintable():
        raise InputError(
            f"nginx cannot use the folder '{path}'. Choose a path of letters, digits, spaces, - _ . and /."
        )


def _quoted(path: Path) -> str:
    return f'"{path}"'


_TEMPLATE = """# nginx before Flower's SuperLink, for the federation {name}. fedabml writes it again at every change.
daemon off;
{user}worker_processes 1;
worker_rlimit_nofile {files};
worker_shutdown_timeout 30s;
pid {pid};
error_log {error} crit;
events {{ worker_connections {connections}; }}

http {{
{places}
    server_tokens off;
    default_type text/plain;
    map_hash_bucket_size 512;
    map_hash_max_size {buckets};

    # A request belongs to the registered site whose public key it names; the SuperLink verifies its signature.
    map $http_flwr_public_key $site {{
        default "";
{keys}
    }}
    # The whole request line counts, as it was sent: no query and no other spelling of a path.
    map "$request_method $request_uri" $call {{
        default "";
{calls}
    }}
    map "$site:$call" $metered {{ default 0; "~^.+:({metered})$" 1; }}
    map $site $refused {{ default 0; include {refused}; }}
    map "$http_transfer_encoding:$content_length" $unsized {{ default 1; "~^:[0-9]{{1,9}}$" 0; }}
    map $content_length $small {{ default ""; "~^[0-9]{{1,4}}$" $site; }}
    map $content_length $large {{ default $site; "~^[0-9]{{1,4}}$" ""; }}

    limit_req_status 503;  # a SuperNode tries again after this status, and ends after others
    limit_conn_status 503;
    limit_req_log_level info;
    limit_conn_log_level info;
    limit_req_zone $binary_remote_addr zone=address:2m rate={rate}r/s;
    limit_req_zone $site zone=site:1m rate={site_rate}r/s;
    limit_req_zone $site zone=messages:1m rate={site_rate}r/s;
    limit_req_zone $small zone=small:1m rate={small_rate}r/s;
    limit_req_zone $large zone=large:1m rate={large_rate}r/s;
    limit_conn_zone $site zone=sites:1m;
    limit_conn_zone $binary_remote_addr zone=addresses:2m;

    log_format bytes "$msec $site $call $status $request_length";
    access_log {access} bytes if=$metered;

    client_header_timeout 15s;
    client_body_timeout 30s;
    send_timeout 30s;
    keepalive_timeout 75s;
    keepalive_requests 10000;
    client_header_buffer_size 2k;
    large_client_header_buffers 4 8k;
    client_body_buffer_size 64k;
    reset_timedout_connection on;

    upstream superlink {{
        server 127.0.0.1:{superlink} max_fails=0;
        keepalive 32;
    }}

    server {{
{listening}
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;
        ssl_session_cache shared:tls:2m;
        ssl_session_tickets off;

        if ($call = "") {{ return 403; }}
        if ($site = "") {{ return 403; }}
        if ($unsized) {{ return 411; }}

        proxy_http_version 1.1;
        proxy_pass_request_headers off;
        proxy_set_header Host localhost;
        proxy_set_header Connection "";
{headers}
        proxy_ssl_verify on;
        proxy_ssl_verify_depth 1;
        proxy_ssl_trusted_certificate {authority};
        proxy_ssl_name localhost;
        proxy_ssl_server_name on;
        proxy_ssl_protocols TLSv1.2 TLSv1.3;
        proxy_connect_timeout 5s;
        proxy_send_timeout 60s;
        proxy_read_timeout 60s;
        proxy_next_upstream off;
        proxy_buffers 8 64k;
        proxy_buffer_size 16k;
        proxy_max_temp_file_size 0;

        location / {{ return 403; }}
{locations}
    }}
}}
"""
