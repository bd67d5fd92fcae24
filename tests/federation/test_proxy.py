"""The proxy with a real nginx: what it passes, and everything else refused."""

import http.client
import ssl
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedabml.errors import InputError
from fedabml.federation import init, keys, proxy
from fedabml.federation.folders import ServerFolder, write_secret
from tests.federation.deployed import connected, context_of, folder_of, request, running_nginx, until, upstream

pytestmark = pytest.mark.flower
needs_nginx = pytest.mark.skipif(proxy.find_nginx() is None, reason="nginx is not installed")
FLEET = "/v1/fleet"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A proxy before a server that answers everything, for the tests that change nothing."""
    folder = folder_of(tmp_path_factory.mktemp("proxy"), max_message_mb=1)
    with upstream(folder) as seen, running_nginx(folder):
        yield folder, seen


@needs_nginx
@pytest.mark.parametrize("call", proxy.CALLS)
def test_each_call_of_a_supernode_passes(running, call):
    folder, seen = running
    headers = {"flwr-signature": "c2ln", "flwr-timestamp": "now", "content-type": "application/protobuf"}
    headers |= {"authorization": "x", "x-forwarded-for": "1.2.3.4", "cookie": "c=1"}
    status, answer = request(folder, f"{FLEET}/{call}", b"body", headers=headers)
    path, arrived, length = seen[-1]
    assert (status, path, length) == (200, f"{FLEET}/{call}", 4)
    assert {name.lower() for name in arrived} == {
        *("host", "content-length", "flwr-public-key", "flwr-signature", "flwr-timestamp", "content-type"),
        *(["accept-encoding", "accept"] if "accept" in {name.lower() for name in arrived} else []),
    }
    assert "9.9" not in answer["Server"] and not any(mark.isdigit() for mark in answer["Server"])


REFUSED = {
    "the root": ("POST", "/"),
    "health": ("GET", "/health"),
    "the description": ("GET", "/openapi.json"),
    "control": ("POST", "/v1/control/start-run"),
    "runtime": ("POST", "/v1/runtime/acquire-task"),
    "registration": ("POST", f"{FLEET}/register-node"),
    "unregistration": ("POST", f"{FLEET}/unregister-node"),
    "another method": ("GET", f"{FLEET}/pull-messages"),
    "a method to write": ("PUT", f"{FLEET}/push-object"),
    "a query": ("POST", f"{FLEET}/pull-messages?x=1"),
    "a slash at the end": ("POST", f"{FLEET}/pull-messages/"),
    "two slashes": ("POST", "/v1//fleet/pull-messages"),
    "a way up": ("POST", "/v1/control/../fleet/pull-messages"),
    "an escaped way up": ("POST", "/v1/control/%2e%2e/fleet/pull-messages"),
    "an escaped letter": ("POST", "/v1/fleet/%70ull-messages"),
    "capital letters": ("POST", "/V1/FLEET/PULL-MESSAGES"),
    "a whole address": ("POST", "https://localhost/v1/control/start-run"),
    "a path behind": ("POST", f"{FLEET}/pull-messages/../../control/start-run"),
    "the old interface": ("POST", "/flwr.proto.Fleet/PullMessages"),
}


@needs_nginx
@pytest.mark.parametrize("what", REFUSED)
def test_every_other_request_is_refused(running, what):
    folder, seen = running
    before = len(seen)
    method, path = REFUSED[what]
    assert request(folder, path, b"x", method=method)[0] == 403
    assert len(seen) == before


@needs_nginx
def test_an_unknown_key_is_refused(running):
    folder, seen = running
    before = len(seen)
    stranger = proxy.site_header(keys.make_site_keys().pem)
    for headers in ({}, {"flwr-public-key": stranger}, {"flwr-public-key": ""}, {"flwr-public-key": "a"}):
        assert request(folder, f"{FLEET}/pull-messages", site=None, headers=headers)[0] == 403
    assert len(seen) == before


@needs_nginx
@pytest.mark.parametrize("call", proxy.CALLS)
def test_a_body_beyond_the_limit_is_refused(running, call):
    folder, seen = running
    before = len(seen)
    assert request(folder, f"{FLEET}/{call}", b"x" * (proxy.CALLS[call] + 1))[0] in (413, 0)
    assert len(seen) == before
    assert request(folder, f"{FLEET}/{call}", b"x" * proxy.CALLS[call])[0] == 200
    assert len(seen) == before + 1


@needs_nginx
def test_a_body_of_unknown_length_is_refused(running):
    folder, _ = running
    assert request(folder, f"{FLEET}/push-object", iter([b"a", b"b"]))[0] == 411


@needs_nginx
def test_plain_http_is_refused(running):
    folder, seen = running
    before = len(seen)
    connection = http.client.HTTPConnection("localhost", folder.settings.port, timeout=120)
    connection.request("POST", f"{FLEET}/pull-messages", b"", {})
    assert connection.getresponse().status == 400
    connection.close()
    assert len(seen) == before


@needs_nginx
def test_old_tls_is_refused_and_a_client_with_another_authority_refuses_the_proxy(running, tmp_path):
    folder, _ = running
    other = tmp_path / "other.crt"
    other.write_bytes(keys.make_authority("other").certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        request(folder, FLEET, context=ssl.create_default_context(cafile=str(other)))
    old = context_of(folder)
    with pytest.warns(DeprecationWarning, match="TLS"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        request(folder, FLEET, context=old)


@needs_nginx
def test_it_listens_on_the_loopback_interface_alone_for_a_local_host(running):
    folder, _ = running
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listening = "0A"  # the state, as the kernel writes it
    addresses = [line[1].split(":") for line in lines if line[3] == listening]
    own = {address for address, port in addresses if int(port, 16) == folder.settings.port}
    assert own
    assert own <= {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1


@needs_nginx
def test_everything_that_nginx_writes_is_in_its_folder_and_no_stranger_fills_its_log(running):
    folder, _ = running
    log = proxy.run_folder(folder) / "access.log"
    before = log.stat().st_size
    with connected(folder, site=None) as send:
        assert {send(f"{FLEET}/push-messages", b"x") for _ in range(50)} == {403}
        assert {send("/v1/control/start-run", b"x") for _ in range(50)} == {403}
    assert log.stat().st_size == before
    assert (proxy.run_folder(folder) / "nginx.pid").is_file()


@needs_nginx
def test_large_parts_of_a_site_are_limited_and_those_of_another_are_not(tmp_path):
    folder = folder_of(tmp_path, max_message_mb=1)
    most = proxy.large_parts(folder.settings)
    with upstream(folder) as seen, running_nginx(folder):
        with connected(folder) as send:
            for _ in range(200 + most):  # small ones are not counted as large
                assert send(f"{FLEET}/push-object", b"x") == 200
            statuses, body = [], b"x" * 20_000
            while statuses.count(503) < 3:
                statuses.append(send(f"{FLEET}/push-object", body))
                assert len(statuses) < 50_000
        assert set(statuses) == {200, 503}
        assert statuses[: most + 1] == [200] * (most + 1)
        assert request(folder, f"{FLEET}/push-object", body, site="b")[0] == 200
        assert len(seen) == 200 + most + statuses.count(200) + 1


@needs_nginx
def test_messages_of_a_site_are_limited_and_those_of_another_are_not(tmp_path):
    folder = folder_of(tmp_path, max_message_mb=1)
    with upstream(folder), running_nginx(folder):
        with connected(folder) as send:
            for _ in range(proxy.MESSAGE_BURST):  # polls leave the messages their own burst
                assert send(f"{FLEET}/pull-messages", b"x") == 200
            statuses = []
            while statuses.count(503) < 3:
                statuses.append(send(f"{FLEET}/push-messages", b"x"))
                assert len(statuses) < 50_000
        assert set(statuses) == {200, 503}
        assert statuses[: proxy.MESSAGE_BURST + 1] == [200] * (proxy.MESSAGE_BURST + 1)
        assert request(folder, f"{FLEET}/push-messages", b"x", site="b")[0] == 200


@needs_nginx
def test_a_server_with_a_certificate_of_another_authority_gets_nothing(tmp_path):
    folder = folder_of(tmp_path)
    false = keys.make_server_certificate(keys.make_authority("false"), "localhost")
    certificate, key = tmp_path / "false.crt", tmp_path / "false.key"
    certificate.write_bytes(false.certificate)
    write_secret(key, false.key)
    with upstream(folder, certificate, key) as seen, running_nginx(folder):
        assert request(folder, f"{FLEET}/pull-messages")[0] == 502
        assert seen == []


@needs_nginx
def test_a_site_that_was_removed_is_refused_after_nginx_read_its_file_again(tmp_path):
    import signal

    folder = folder_of(tmp_path)
    with upstream(folder), running_nginx(folder) as process:
        assert request(folder, f"{FLEET}/pull-messages", site="b")[0] == 200
        init.remove_site(folder, "b")
        process.send_signal(signal.SIGHUP)
        until(lambda: request(folder, f"{FLEET}/pull-messages", site="b")[0] == 403)
        assert request(folder, f"{FLEET}/pull-messages", site="a")[0] == 200


def test_the_calls_are_those_of_the_installed_flower():
    """Every path that Flower's SuperNode can call is in the list, but the two of nodes that register themselves."""
    source = pytest.importorskip("flwr.supernode.fleet_http_client")
    import re
    from pathlib import Path

    paths = set(re.findall(r'path="/v1/fleet/([a-z-]+)"', Path(source.__file__).read_text(encoding="utf-8")))
    assert paths == set(proxy.CALLS) | {"register-node", "unregister-node"}


def test_flower_sends_parts_that_fit():
    constants = pytest.importorskip("flwr.common.constant")
    assert constants.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == proxy.PART


def test_a_path_that_nginx_would_read_as_code_is_refused(tmp_path):
    folder = folder_of(tmp_path)
    moved = folder.path.rename(tmp_path / 'fed"; load_module x; #')
    with pytest.raises(InputError, match="nginx cannot use the folder"):
        proxy.nginx(ServerFolder(moved))


def test_a_public_host_is_served_on_all_addresses(tmp_path):
    folder = init.init(tmp_path / "fed", "fed.example.org", ["a"], apps=["ab" * 32], port=8443)
    assert proxy.listen_addresses(folder.settings)[0] == "0.0.0.0:8443"
    assert "listen 0.0.0.0:8443 ssl;" in proxy.nginx(folder)


def test_a_missing_nginx_is_named(monkeypatch):
    monkeypatch.setattr(proxy, "find_nginx", lambda: None)
    with pytest.raises(InputError, match="nginx, which is not installed"):
        proxy.check()
