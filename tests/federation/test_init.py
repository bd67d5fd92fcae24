"""What `init` makes, and how sites are added and removed."""

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedabml.errors import InputError
from fedabml.federation import init, keys, proxy
from fedabml.federation.archive import unpack
from fedabml.federation.folders import ServerFolder
from fedabml.federation.schema import Schema, draft
from tests.cli.command import run
from tests.federation.deployed import APP, folder_of
from tests.federation.start import TABLE, frame

pytestmark = pytest.mark.flower


def test_everything_is_there_and_secrets_are_secret(tmp_path):
    folder = folder_of(tmp_path, sites=("a", "b", "c"), rounds=3, hyper={"lr": 0.05})
    assert folder.settings.rounds == 3 and folder.settings.hyper == {"lr": 0.05}
    assert [(site.name, site.number, site.removed) for site in folder.sites()] == [
        *(("a", 0, False), ("b", 1, False), ("c", 2, False))
    ]
    assert {path.name for path in folder.archives.iterdir()} == {"a.tar.gz", "b.tar.gz", "c.tar.gz"}
    secret = [*folder.secrets.rglob("*.*"), *folder.archives.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret if path.is_file()} == {0o600}
    assert {path.name for path in secret} >= {"ca.key", "server.key", "superexec.secret", "a.secret"}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.proxy_file.read_text() == proxy.nginx(folder)
    assert str(folder.path) in folder.proxy_file.read_text() and ".part" not in folder.proxy_file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["fed"]


def test_no_private_key_of_a_site_stays_outside_its_archive(tmp_path):
    folder = folder_of(tmp_path)
    private = unpack(folder.archive("a"), tmp_path / "a").key.read_bytes()
    for path in folder.path.rglob("*"):
        assert not path.is_file() or private not in path.read_bytes()


def test_two_federations_share_nothing(tmp_path):
    one, two = (folder_of(tmp_path / name) for name in "xy")
    assert one.settings.federation != two.settings.federation
    for name in ("ca_certificate", "ca_key", "server_key", "superexec_secret"):
        assert getattr(one, name).read_bytes() != getattr(two, name).read_bytes()
    assert {site.public_key for site in one.sites()}.isdisjoint(site.public_key for site in two.sites())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sites": ["a", "A"]}, "Two sites are called"),
        ({"sites": ["a", "b/c"]}, "letters, digits"),
        ({"sites": []}, "1 to"),
        ({"host": "no host"}, "host must be"),
        ({"rounds": 0}, "between 1 and"),
        ({"raunds": 1}, "Did you mean 'rounds'"),
        ({"hyper": {"lrr": 1}}, "has no hyperparameter 'lrr'"),
        ({"algorithm": "fedprox", "hyper": {"lr": -1.0}}, "lr"),
        ({"model": "mine.py:Net"}, "files of code and Hugging Face folders are not accepted"),
        ({"name": "a b"}, "letters, digits"),
        ({"apps": ["x"]}, "64 hexadecimal digits"),
    ],
)
def test_a_wrong_argument_leaves_no_trace(tmp_path, arguments, words):
    good = {"host": "localhost", "sites": ["a"], "apps": [APP]}
    with pytest.raises(InputError, match=words):
        init.init(tmp_path / "fed", **(good | arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "fed").mkdir()
    (tmp_path / "fed" / "mine").write_text("x")
    with pytest.raises(InputError, match="no empty folder"):
        folder_of(tmp_path)
    (tmp_path / "fed" / "mine").unlink()
    assert folder_of(tmp_path).sites()


def test_an_empty_folder_is_filled_in_place(tmp_path):
    """It may be mounted, and its parent may be read-only."""
    place = tmp_path / "fed"
    place.mkdir(mode=0o755)
    before = place.stat().st_ino
    with pytest.raises(InputError, match="64 hexadecimal digits"):  # which is noticed late
        init.init(place, "localhost", ["a"], apps=["x"])
    assert place.stat().st_ino == before and list(place.iterdir()) == []
    folder = folder_of(tmp_path)
    assert place.stat().st_ino == before and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert folder.settings.host == "localhost" and folder.proxy_file.read_text() == proxy.nginx(folder)
    assert not list(tmp_path.rglob("*.part"))


def test_a_move_that_fails_midway_leaves_the_folder_empty(tmp_path, monkeypatch):
    place, rename = tmp_path / "fed", Path.rename
    place.mkdir()

    def fail_at_settings(path, target):
        if path.name == "federation.toml":
            assert len(list(place.iterdir())) > 3  # keys and others were moved
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_at_settings)
        with pytest.raises(InputError, match="No space left on device"):
            folder_of(tmp_path)
    assert list(place.iterdir()) == []
    assert folder_of(tmp_path).sites()


def test_one_site_alone_needs_one_reply(tmp_path):
    assert folder_of(tmp_path / "x", sites=["a"]).settings.min_replies == 1
    assert folder_of(tmp_path / "y", sites=["a", "b"]).settings.min_replies == 2


def test_a_site_is_added_with_a_number_of_its_own_and_removed(tmp_path):
    folder = folder_of(tmp_path)
    header = proxy.site_header(folder.sites()[1].public_key)
    assert header in folder.proxy_file.read_text()
    init.remove_site(folder, "b")
    assert header not in folder.proxy_file.read_text()
    assert not folder.archive("b").exists() and not folder.site_secret("b").exists()
    path = init.add_site(folder, "c", apps=[APP])
    assert unpack(path, tmp_path / "c").settings.name == "c"
    assert [(site.name, site.number, site.removed) for site in ServerFolder(folder.path).sites()] == [
        *(("a", 0, False), ("b", 1, True), ("c", 2, False))
    ]
    assert proxy.site_header(folder.sites()[2].public_key) in folder.proxy_file.read_text()
    for name in ("b", "C", "c"):
        with pytest.raises(InputError, match="Two sites are called"):
            init.add_site(folder, name, apps=[APP])
    for name in ("b", "x"):
        with pytest.raises(InputError, match=f"has no site '{name}'. Its sites: a, c"):
            init.remove_site(folder, name)


def test_an_interrupted_removal_is_completed_by_another_one(tmp_path):
    folder = folder_of(tmp_path)
    a, b = folder.sites()
    folder.save_sites([a, replace(b, removed=True)])  # and then the process was killed
    assert init.remove_site(folder, "b").removed
    assert not folder.archive("b").exists() and not folder.site_secret("b").exists()
    assert proxy.site_header(b.public_key) not in folder.proxy_file.read_text()


def test_the_last_site_is_not_removed(tmp_path):
    folder = folder_of(tmp_path)
    init.remove_site(folder, "b")
    with pytest.raises(InputError, match="'a' is the last site"):
        init.remove_site(folder, "a")
    assert [site.name for site in folder.members()] == ["a"] and folder.site_secret("a").exists()


def test_a_renewed_certificate_is_of_the_same_authority_and_the_host_of_the_settings(tmp_path):
    folder = folder_of(tmp_path)
    before = folder.server_certificate.read_bytes()
    text = folder.settings_file.read_text().replace('host = "localhost"', 'host = "new.example.org"')
    folder.settings_file.write_text(text)
    init.renew(folder)
    certificate = keys.read_certificate(folder.server_certificate.read_bytes(), "it")
    assert folder.server_certificate.read_bytes() != before
    certificate.verify_directly_issued_by(keys.read_certificate(folder.ca_certificate.read_bytes(), "it"))
    assert "new.example.org" in certificate.subject.rfc4514_string()
    assert "listen 0.0.0.0:" in folder.proxy_file.read_text()


def test_other_folders_are_named(tmp_path):
    for change in (init.renew, lambda path: init.add_site(path, "a"), lambda path: init.remove_site(path, "a")):
        with pytest.raises(InputError, match="not a federation's folder"):
            change(tmp_path)


def test_the_schema_is_drafted_from_one_sites_data(tmp_path):
    rows = "\n".join(f"{i % 7},{i % 3},{'yes' if i % 2 else 'no'}" for i in range(60))
    (tmp_path / "rows.csv").write_text(f"age,bmi,ill\n{rows}\n")
    folder = init.init(
        tmp_path / "fed", "localhost", ["a"], tmp_path / "rows.csv", apps=[APP], schema_options={"target_column": "ill"}
    )
    assert "ill" in folder.schema_file.read_text()


def test_the_schema_is_read_from_a_file_of_a_site(tmp_path):
    frame(0).to_csv(tmp_path / "a.csv", index=False)
    drafted = draft(tmp_path / "a.csv", **TABLE)
    path = drafted.save(tmp_path / "schema.toml")
    folder = init.init(tmp_path / "fed", "localhost", ["a"], schema=path, apps=[APP])
    assert Schema.load(folder.schema_file) == drafted
    for before, after, words in (
        ('kind = "table"', 'kind = "pickle"', "kind"),
        ('task = "classification"', 'task = "classification"\nrows = [1]', "rows"),
        ("scale = ", "scale = nan #", "age"),
        ("[columns", "[columns", ""),
    ):
        path.write_text(drafted.to_toml().replace(before, after, 1)[: None if words else 300])
        with pytest.raises(InputError, match=rf"schema.toml.*{words}"):
            init.init(tmp_path / "other", "localhost", ["a"], schema=path, apps=[APP])
        assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_command_takes_a_schema_in_place_of_data(tmp_path):
    frame(0).to_csv(tmp_path / "a.csv", index=False)
    path = draft(tmp_path / "a.csv", **TABLE).save(tmp_path / "schema.toml")
    (tmp_path / "a.csv").unlink()
    words = ["federation", "init", tmp_path / "fed", "--host", "localhost", "--sites", "a,b", "--schema", path]
    made = subprocess.run([sys.executable, "-m", "fedabml", *map(str, words)], capture_output=True, text=True)
    assert made.returncode == 0 and "archives/a.tar.gz" in "".join(made.stdout.split()), made.stderr
    assert Schema.load(tmp_path / "fed/schema.toml") == Schema.load(path)


@pytest.mark.slow
def test_the_commands_note_that_fewer_sites_are_there_than_must_reply(tmp_path):
    frame(0).to_csv(tmp_path / "a.csv", index=False)
    path = draft(tmp_path / "a.csv", **TABLE).save(tmp_path / "schema.toml")

    def note(*words):
        return " ".join(run("federation", *words).stdout.split()).partition("Note: ")[2]

    inputs = ("--host", "localhost", "--schema", path, "--set")
    assert note("init", tmp_path / "x", "--sites", "a,b", *inputs, "min_replies=2") == ""
    assert note("init", tmp_path / "y", "--sites", "a,b", *inputs, "min_replies=5").startswith(
        "The federation has 2 sites, and a round needs the replies of 5."
    )
    assert note("remove-site", tmp_path / "x", "b").startswith("The federation has 1 site, and a round needs")


@pytest.mark.slow
def test_the_command_takes_a_positive_class(tmp_path):
    frame(0).drop(columns=["patient", "admitted", "note"]).to_csv(tmp_path / "a.csv", index=False)
    words = [
        "federation",
        "init",
        tmp_path / "fed",
        "--host",
        "localhost",
        "--sites",
        "a",
        "--data",
        tmp_path / "a.csv",
    ]
    words += ["--target-column", "ill", "--positive-class", "no"]
    made = subprocess.run([sys.executable, "-m", "fedabml", *map(str, words)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert Schema.load(tmp_path / "fed/schema.toml").classes == ("yes", "no")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower calls pathspec by its old name
def test_the_app_is_written_and_its_hash_is_what_sites_accept(tmp_path):
    app = pytest.importorskip("fedabml.federation.flower.app")
    folder = init.init(tmp_path / "fed", "localhost", ["a"])
    assert (folder.app / "pyproject.toml").is_file() and not (folder.path / "pyproject.toml").exists()
    for name, path in (("a", folder.archive("a")), ("b", init.add_site(folder, "b"))):
        assert unpack(path, tmp_path / name).apps() == [app.app_hash(folder.app)]
