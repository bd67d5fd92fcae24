"""Archives: what `pack` writes makes a site's folder, and whatever else comes is refused without a trace."""

import gzip
import io
import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedabml.errors import InputError
from fedabml.federation import archive, keys
from fedabml.federation.archive import unpack
from fedabml.federation.folders import SiteFolder
from fedabml.version import __version__
from tests.federation.deployed import APP, folder_of

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.flower


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def contents(server):
    return archive._read(server.archive("a"))


def packed(path, contents, *extra):
    """Write an archive with these contents; `extra` are further entries, each with its content."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for entry, content in extra:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_an_archive_becomes_a_sites_folder(server, tmp_path):
    assert stat.S_IMODE(server.archive("a").stat().st_mode) == 0o600
    site = unpack(server.archive("a"), tmp_path / "a", data=tmp_path / "rows.csv")
    assert (site.settings.name, site.settings.server) == ("a", server.settings.address)
    assert site.settings.federation == server.settings.federation and site.settings.data == str(tmp_path / "rows.csv")
    assert not (site.settings.allow_pooled_sums or site.settings.allow_medians or site.settings.allow_words)
    assert site.apps() == [APP]
    assert keys.public_pem(site.public_key.read_bytes()) == server.sites()[0].public_key
    assert site.secret.read_bytes() == server.site_secret("a").read_bytes()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (site.key, site.secret)] == [0o600, 0o600]
    assert stat.S_IMODE(site.path.stat().st_mode) == 0o700


def test_the_list_of_apps_may_be_edited(server, tmp_path):
    site = unpack(server.archive("a"), tmp_path / "a")
    assert json.loads(site.apps_file.read_text()) == {"apps": [APP]}
    site.apps_file.write_text(site.apps_file.read_text().replace(f'"{APP}"', f'"{APP}", "{"cd" * 32}"'))
    assert site.apps() == [APP, "cd" * 32]


def test_the_readme_has_three_commands_and_the_fingerprint(server, contents):
    text = contents["README.txt"].decode()
    wheel = f"fedabml-{__version__}-py3-none-any.whl"
    for words in (
        f"pip install -c constraints-flower.txt './{wheel}[flower,tables]'",
        "join a.tar.gz --data PATH",
        "federation personalize a",
        "after every 10 rounds",
    ):
        assert words in text
    fingerprint = archive.certificate_fingerprint(server.ca_certificate.read_bytes())
    assert fingerprint in text and server.settings.address in text


def test_a_folder_of_the_same_archive_is_kept_and_that_of_another_is_refused(server, tmp_path):
    site = unpack(server.archive("a"), tmp_path / "a")
    text = site.settings_file.read_text().replace("allow_words = false", "allow_words = true")
    site.settings_file.write_text(text)
    (site.state / "kept-1").write_bytes(b"x")
    again = unpack(server.archive("a"), tmp_path / "a")
    assert again.settings.allow_words and again.settings_file.read_text() == text
    moved = unpack(server.archive("a"), tmp_path / "a", data=tmp_path / "new")
    assert moved.settings.data == str(tmp_path / "new") and moved.settings.allow_words
    assert (site.state / "kept-1").read_bytes() == b"x"
    with pytest.raises(InputError, match="belongs to site a"):
        unpack(server.archive("b"), tmp_path / "a")


@pytest.mark.parametrize("written", ["rows.csv", "../rows.csv"])
def test_joining_again_with_the_same_data_keeps_a_relative_path(server, tmp_path, written):
    """The site's folder can then be moved together with its data."""
    site = unpack(server.archive("a"), tmp_path / "a", data=tmp_path / "old")
    text = site.settings_file.read_text().replace(f'data = "{tmp_path / "old"}"', f'data = "{written}"')
    site.settings_file.write_text(text)
    assert f'data = "{written}"' in text
    unpack(server.archive("a"), tmp_path / "a", data=tmp_path / "a" / written)
    assert site.settings_file.read_text() == text
    unpack(server.archive("a"), tmp_path / "a", data=tmp_path / "new")
    assert SiteFolder(tmp_path / "a").settings.data == str(tmp_path / "new")


INTERRUPTED = """
import os, sys
from pathlib import Path
from fedabml.federation.archive import unpack
left, replace = int(sys.argv[3]), Path.replace
def interrupt(source, target):
    global left
    if not left:
        os._exit(3)
    left -= 1
    return replace(source, target)
Path.replace = interrupt
unpack(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("written", range(6))
def test_an_interrupted_join_is_completed_by_another_one(server, tmp_path, written):
    """The process ends before a file gets its name; an unfinished one lies beside it."""
    command = [sys.executable, "-c", INTERRUPTED, str(server.archive("a")), str(tmp_path / "a"), str(written)]
    assert subprocess.run(command, cwd=ROOT).returncode == 3
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert len(names) == 3 + written and "site.toml" not in names
    if written:
        with pytest.raises(InputError, match="no empty folder"):  # it holds another site's key
            unpack(server.archive("b"), tmp_path / "a")
    site = unpack(server.archive("a"), tmp_path / "a")
    assert site.settings.name == "a" and site.secret.read_bytes() == server.site_secret("a").read_bytes()
    names = {"site.toml", "site.key", "site.secret", "site.pub", "ca.crt", "apps.json", "state", "run"}
    assert {path.name for path in site.path.iterdir()} == names
    assert stat.S_IMODE(site.key.stat().st_mode) == 0o600


def test_a_folder_with_something_else_is_left_alone(server, tmp_path):
    (tmp_path / "x").write_text("mine")
    for place in (tmp_path, tmp_path / "x"):
        with pytest.raises(InputError, match="no empty folder"):
            unpack(server.archive("a"), place)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def entry(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


EXTRA = {
    "another file": (entry("more.txt"), b"x"),
    "settings": (entry("site.toml"), b"allow_words = true"),
    "a way up": (entry("../evil"), b"x"),
    "an absolute path": (entry("/tmp/evil"), b"x"),
    "a file twice": (entry("site.pub"), b"x"),
    "a link": (entry("link", tarfile.SYMTYPE, "/etc/passwd"), b""),
    "a hard link": (entry("link", tarfile.LNKTYPE, "site.key"), b""),
    "a folder": (entry("folder", tarfile.DIRTYPE), b""),
    "a device": (entry("device", tarfile.CHRTYPE), b""),
    "a FIFO": (entry("fifo", tarfile.FIFOTYPE), b""),
}


@pytest.mark.parametrize("what", EXTRA)
def test_an_entry_that_does_not_belong_there_is_refused(contents, tmp_path, what):
    path = packed(tmp_path / "a.tar.gz", contents, EXTRA[what])
    with pytest.raises(InputError, match="that does not belong there"):
        unpack(path, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_names_of_names_without_end_are_refused(tmp_path):
    header = entry("././@LongLink", tarfile.GNUTYPE_LONGNAME).tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(header * 2000))
    with pytest.raises(InputError, match="is no archive"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "a")


def test_a_link_in_the_place_of_a_key_is_refused(contents, tmp_path):
    rest = {name: content for name, content in contents.items() if name != "site.key"}
    path = packed(tmp_path / "a.tar.gz", rest, (entry("site.key", tarfile.SYMTYPE, "/etc/hostname"), b""))
    with pytest.raises(InputError, match="that does not belong there"):
        unpack(path, tmp_path / "a")


def invitation(contents, **changes):
    return {"invitation.json": json.dumps(json.loads(contents["invitation.json"]) | changes).encode()}


CHANGED = {
    "a preset": lambda c: invitation(c, allow_words=True),
    "data": lambda c: invitation(c, data="/etc"),
    "another format": lambda c: invitation(c, format=2),
    "a name that is a path": lambda c: invitation(c, name="../../evil"),
    "a name that is no text": lambda c: invitation(c, name=["a"]),
    "no federation": lambda c: invitation(c, federation="x"),
    "a wrong server": lambda c: invitation(c, server="fed.example.org"),
    "a server with code": lambda c: invitation(c, server="$(reboot):1"),
    "no JSON": lambda c: {"invitation.json": b"{"},
    "bytes": lambda c: {"invitation.json": b"\xff"},
    "deep JSON": lambda c: {"invitation.json": b"[" * 10_000},
    "another private key": lambda c: {"site.key": keys.make_site_keys().private},
    "a damaged private key": lambda c: {"site.key": c["site.key"][:100]},
    "a short secret": lambda c: {"site.secret": b"x"},
    "a certificate of a server": lambda c: {"ca.crt": c["server"]},
    "a damaged certificate": lambda c: {"ca.crt": b"x"},
    "wrong apps": lambda c: {"apps.json": b'{"apps": ["x"]}'},
    "a large file": lambda c: {"README.txt": b"x" * (archive.MAX_FILE + 1)},
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_wrong_content_is_refused(server, contents, tmp_path, what):
    changed = CHANGED[what](contents | {"server": server.server_certificate.read_bytes()})
    path = packed(tmp_path / "a.tar.gz", contents | changed)
    with pytest.raises(InputError):
        unpack(path, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize("name", archive._FILES)
def test_a_missing_file_is_named(contents, tmp_path, name):
    path = packed(tmp_path / "a.tar.gz", {key: value for key, value in contents.items() if key != name})
    with pytest.raises(InputError, match=f"it has no {name}"):
        unpack(path, tmp_path / "a")


def test_a_bomb_and_rubbish_are_refused(server, tmp_path):
    path = tmp_path / "a.tar.gz"
    good = server.archive("a").read_bytes()
    for content in (b"", b"x", gzip.compress(b""), gzip.compress(bytes(100 << 20)), good[: len(good) // 2], good[:-9]):
        path.write_bytes(content)
        with pytest.raises(InputError):
            unpack(path, tmp_path / "a")
    path.write_bytes(b"x" * (archive.MAX_ARCHIVE + 1))
    with pytest.raises(InputError, match="has at most"):
        unpack(path, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_every_damaged_byte_is_refused_or_harmless(server, tmp_path):
    """Flip bits all over an archive: unpacking either fails with an InputError or gives a checked folder."""
    good, path = server.archive("a").read_bytes(), tmp_path / "a.tar.gz"
    for place in range(0, len(good), max(1, len(good) // 60)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        try:
            site = unpack(path, tmp_path / f"site{place}")
        except InputError:
            continue
        keys.check_site_keys(site.key.read_bytes(), site.public_key.read_bytes())
        assert site.settings.federation == server.settings.federation
