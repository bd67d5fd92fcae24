"""The downloader against a real server on this machine: whole, broken off and resumed, wrong, refused."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedabml.data.download import download
from fedabml.errors import InputError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """/good knows ranges; /plain does not; /short, /breaks and /shifted misbehave; anything else is not there."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        requested = self.headers.get("Range")
        self.server.requests.append((self.path, requested))
        start = int(requested[len("bytes=") : -1]) if requested and self.path != "/plain" else 0
        if self.path == "/wrong":
            return self.answer(200, CONTENT[::-1])
        if self.path not in ("/good", "/plain", "/short", "/breaks", "/shifted"):
            return self.send_error(404)
        if start >= len(CONTENT):
            return self.send_error(416)
        body = CONTENT[start:]
        # /breaks ends the connection after 300 kB each time; /short ends every file early and never has the rest
        sent = {"/breaks": body[:300_000], "/short": body[: max(0, 500_000 - start)]}.get(self.path, body)
        first = start + 7 if self.path == "/shifted" else start
        headers = {"Content-Range": f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}"} if start else {}
        return self.answer(206 if start else 200, sent, len(body), headers)

    def answer(self, status, body, length=None, headers=None):
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.requests = []
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def get(server, tmp_path):
    def fetch(*paths, **options):
        return download([server.url + path for path in paths], MD5, tmp_path / "f.bin", pause=0, **options)

    return fetch


def assert_nothing_left(tmp_path):
    assert not (tmp_path / "f.bin").exists()


def test_a_whole_file_with_progress(get, tmp_path):
    reported = []
    path = get("/good", progress=lambda done, total: reported.append((done, total)))
    assert path.read_bytes() == CONTENT and list(tmp_path.iterdir()) == [path]
    assert reported[-1] == (len(CONTENT), len(CONTENT)) and reported == sorted(reported)


def test_a_file_already_there_is_not_fetched_again(get, server, tmp_path):
    (tmp_path / "f.bin").write_bytes(CONTENT)
    get("/good")
    assert server.requests == []


def test_a_file_of_that_name_with_other_content_is_replaced(get, tmp_path):
    (tmp_path / "f.bin").write_bytes(b"stale")
    assert get("/good").read_bytes() == CONTENT


def test_an_interrupted_download_goes_on(get, server, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT[:400_000])
    assert get("/good").read_bytes() == CONTENT
    assert server.requests == [("/good", "bytes=400000-")]


def test_a_complete_part_needs_only_its_name(get, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT)
    assert get("/good").read_bytes() == CONTENT


def test_a_connection_that_breaks_is_taken_up_again(get, server):
    with pytest.raises(InputError, match="ended after 900000 of 1048576 bytes"):
        get("/breaks")
    assert get("/breaks").read_bytes() == CONTENT  # the second call begins where the first one ended
    assert [requested for _, requested in server.requests] == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_without_ranges_starts_over(get, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(b"x" * 400_000)
    assert get("/plain").read_bytes() == CONTENT


def test_a_stale_part_is_thrown_away(get, server, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(b"x" * 400_000)
    assert get("/good").read_bytes() == CONTENT
    assert [requested for _, requested in server.requests] == ["bytes=400000-", None]


def test_a_server_that_sends_another_range(get, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT[:400_000])
    assert get("/shifted").read_bytes() == CONTENT


def test_a_wrong_file_is_removed(get, tmp_path):
    with pytest.raises(InputError, match=f"instead of {MD5}"):
        get("/wrong")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_never_takes_the_name(get, tmp_path):
    with pytest.raises(InputError, match="of 1048576 bytes"):
        get("/short")
    assert_nothing_left(tmp_path)


def test_the_next_mirror_serves(get, server):
    assert get("/absent", "/wrong", "/good").read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/absent", "/wrong", "/good"]


def test_no_server_at_all(tmp_path):
    with pytest.raises(InputError, match=r"f\.bin could not be downloaded.*refused"):
        download(["http://127.0.0.1:9/f.bin"], MD5, tmp_path / "f.bin", pause=0)
    assert_nothing_left(tmp_path)


def test_a_link_in_place_of_the_part_is_not_written_to(get, tmp_path):
    (tmp_path / "target").write_bytes(b"not ours")
    (tmp_path / "f.bin.part").symlink_to("target")
    with pytest.raises(InputError, match="is a link"):
        get("/good")
    assert (tmp_path / "target").read_bytes() == b"not ours"


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        download(["http://127.0.0.1:9/f.bin"], MD5, tmp_path / "file" / "f.bin", pause=0)
