"""Starting and ending a folder's processes, as far as no Flower is needed. The rest is in flower/test_loopback.py."""

import importlib.util
import os
import socket
import subprocess

import pytest

from fedabml.errors import InputError
from fedabml.federation import operate, pids, rewind
from fedabml.federation.folders import Member, ServerFolder, SiteFolder
from fedabml.federation.settings import Settings, SiteSettings
from fedabml.federation.status import read
from fedabml.files.sealed import write_json
from tests.federation.in_process import Wire, lead, set_up
from tests.federation.test_status import folder as folder
from tests.federation.test_status import key, round_event, write_events

HAS_FLOWER = importlib.util.find_spec("flwr") is not None


@pytest.fixture
def no_extra(monkeypatch):
    """Let commands pass the check for Flower; what they then do needs none."""
    monkeypatch.setattr(operate, "require_extra", lambda: None)


def make_site(path):
    site = SiteFolder(path)
    site.make()
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443").save(site.settings_file)
    return site


def test_a_folder_is_known_by_its_settings(folder, tmp_path):
    assert operate.folder_of(folder.path) == folder and isinstance(operate.folder_of(folder.path), ServerFolder)
    assert isinstance(operate.folder_of(make_site(tmp_path / "a").path), SiteFolder)
    with pytest.raises(InputError, match="neither a federation's folder"):
        operate.folder_of(tmp_path)


def test_local_sites_are_those_that_are_members(folder):
    for name in ("a", "b", "d", "stranger"):  # d was removed
        make_site(folder.path / "local" / name)
    (folder.path / "local/c").mkdir()  # not yet unpacked
    assert [site.path.name for site in operate.local_sites(folder)] == ["a", "b"]


def test_another_user_than_the_folders_starts_and_ends_nothing(folder, no_extra, monkeypatch, tmp_path):
    site, ended = make_site(tmp_path / "a"), []
    monkeypatch.setattr(operate, "down", ended.append)
    monkeypatch.setattr(operate, "is_running", lambda folder: True)
    monkeypatch.setattr(os, "geteuid", lambda: site.state.stat().st_uid + 4321)
    for command in (
        lambda: operate.up(folder.path),
        lambda: operate.resume(folder.path),
        lambda: operate.resume(site.path),
        lambda: operate.join(tmp_path / "a.tar.gz", tmp_path, site.path),
    ):
        with pytest.raises(InputError, match=r"belongs to the user .*systemctl restart"):
            command()
    assert not ended


def test_a_running_folder_is_not_started_twice(folder, no_extra):
    (folder.run / "pids").mkdir()
    pids.Record("supervisor", "running", "", identity=pids.identity(os.getpid())).save(folder.run / "pids")
    with pytest.raises(InputError, match="running already"):
        operate.up(folder.path)


def test_a_site_beside_its_server_is_resumed_and_ended_with_the_server(folder, no_extra):
    site = make_site(folder.path / "local/a")
    for command in (operate.resume, operate.down):
        with pytest.raises(InputError, match=rf"{command.__name__} {folder.path}`"):
            command(site.path)


def test_a_site_whose_data_cannot_be_opened_is_not_resumed(no_extra, monkeypatch, tmp_path):
    site, started = make_site(tmp_path / "a"), []
    monkeypatch.setattr(operate, "start", lambda folder, foreground: started.append(folder))
    data = tmp_path / "rows.csv"
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443", data=str(data)).save(site.settings_file)
    write_json(site.apps_file, {"apps": []})
    with pytest.raises(InputError, match=r"no data at .*rows\.csv.*site\.toml"):
        operate.resume(site.path)
    data.write_bytes(b"\xff\x00" * 50)
    with pytest.raises(InputError, match=r"rows\.csv"):
        operate.resume(site.path)
    assert started == []
    data.write_text("age,ill\n1,0\n2,1\n")
    operate.resume(site.path)
    assert started == [site]


def test_a_running_site_keeps_its_settings_when_it_joins_again(no_extra, tmp_path):
    site = make_site(tmp_path / "a")
    before = site.settings_file.read_bytes()
    (site.run / "pids").mkdir()
    pids.Record("supervisor", "running", "", identity=pids.identity(os.getpid())).save(site.run / "pids")
    with pytest.raises(InputError, match="running already"):
        operate.join(tmp_path / "a.tar.gz", tmp_path, site.path)
    assert site.settings_file.read_bytes() == before


def test_a_site_that_the_federation_does_not_have_is_refused(folder, no_extra, monkeypatch, tmp_path):
    monkeypatch.setattr(operate, "_write_proxy", lambda folder: None)
    for name in ("x", "d"):  # d was removed
        with pytest.raises(InputError, match=f"no site '{name}'; it has a, b, c"):
            operate.up(folder.path, {name: tmp_path})


def test_a_port_in_use_is_named_with_its_key(folder, no_extra, monkeypatch):
    started = []
    monkeypatch.setattr(operate, "_write_proxy", lambda folder: None)
    monkeypatch.setattr(operate, "start", lambda folder, foreground: started.append(folder))
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        port, unused = other.getsockname()[1], free.getsockname()[1]
        free.close()
        settings = Settings(federation="0" * 32, name="x", host="localhost", port=unused, superlink_port=port)
        settings.save(folder.settings_file)
        for command in (operate.up, operate.resume):
            with pytest.raises(InputError, match=f"Port {port} cannot be used.*superlink_port"):
                command(ServerFolder(folder.path).path)
        assert started == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("rounds = 10", "rounds = 0", "rounds"),
        ('model = "mlp"', 'model = "mine.py:Net"', "files of code and Hugging Face folders are not accepted"),
        ("[hyper]", "[hyper]\nlrr = 1", "has no hyperparameter 'lrr'"),
    ],
)
def test_a_wrong_setting_is_noticed_before_anything_is_ended(folder, no_extra, before, after, words):
    text = folder.settings_file.read_text()
    assert before in text
    folder.settings_file.write_text(text.replace(before, after))
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as running:
        try:
            (folder.run / "pids").mkdir()
            for name in ("supervisor", "superlink"):
                pids.Record(name, "running", "", identity=pids.identity(running.pid)).save(folder.run / "pids")
            with pytest.raises(InputError, match=words):
                operate.resume(folder.path)
            assert running.poll() is None and not folder.stop_file.exists()
        finally:
            running.kill()


def test_going_back_is_refused_without_a_state_and_recorded(no_extra, monkeypatch, tmp_path):
    server, sites = set_up(tmp_path, rounds=5)
    lead(server, Wire(server, sites))
    started = []
    monkeypatch.setattr(operate, "_busy_ports", lambda folder: [])
    monkeypatch.setattr(operate, "_write_proxy", lambda folder: None)
    monkeypatch.setattr(operate, "start", lambda folder, foreground: started.append(folder))
    with pytest.raises(InputError, match=r"no state after round 3\. There are states after rounds: 0, 2, 4, 5"):
        operate.resume(server.path, from_round=3)
    with pytest.raises(InputError, match="is a site's folder"):
        rewind.check(sites["site-0"], 3)
    assert started == [] and read(server).rounds_done == 5
    operate.resume(server.path, from_round=2)
    status = read(server)
    assert started == [server] and status.rounds_done == 2 and [round for round, _ in status.losses] == [1, 2]
    assert sorted(path.name for path in server.state.glob("aside-*/*")) == [
        "server-00000004.safetensors",
        "server-00000005.safetensors",
    ]


def test_up_needs_as_many_sites_as_must_reply_until_all_rounds_are_done(folder, no_extra, monkeypatch):
    started = []
    monkeypatch.setattr(operate, "_write_proxy", lambda folder: None)
    monkeypatch.setattr(operate, "_busy_ports", lambda folder: [])
    monkeypatch.setattr(operate, "start", lambda folder, foreground: started.append(folder))
    settings = {"federation": "0" * 32, "name": "x", "host": "localhost", "rounds": 10}
    Settings(**settings, min_replies=4).save(folder.settings_file)
    with pytest.raises(InputError, match=r"has 3 sites, and a round needs the replies of 4.*add-site"):  # d was removed
        operate.up(folder.path)
    assert started == []
    write_events(folder, round_event(10))
    operate.up(folder.path)  # it hands out the prior
    folder.events_file.unlink()
    folder.save_sites([*folder.sites(), Member("e", 4, key(4))])
    operate.up(folder.path)
    assert started == [folder, folder]


def test_what_a_crash_left_is_ended_before_a_new_start(folder, no_extra, monkeypatch):
    started = []
    monkeypatch.setattr(operate, "_busy_ports", lambda folder: [])
    monkeypatch.setattr(operate, "_write_proxy", lambda folder: None)
    monkeypatch.setattr(operate, "start", lambda folder, foreground: started.append(folder))
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as left:
        (folder.run / "pids").mkdir()
        pids.Record("superlink", "running", "t", pids.identity(left.pid)).save(folder.run / "pids")
        operate.resume(folder.path)
        assert left.wait(300) == -9 and started == [folder]


@pytest.mark.skipif(HAS_FLOWER, reason="the start fails only without Flower")
def test_a_supervisor_that_cannot_start_says_why_and_leaves_nothing(folder):
    with pytest.raises(InputError, match=r"could not be started.*flwr"):
        operate.start(folder)
    assert not operate.is_running(folder) and pids.members(pids.records(folder.run / "pids")) == []


def test_the_end_of_a_folder_that_never_ran(folder):
    operate.down(folder.path)
    operate.down(folder.path)
    assert not operate.is_running(folder)
