"""The folders of a server and a site: paths, lists that are checked, secrets that only the owner can read."""

import stat

import pytest

from fedabml.errors import InputError
from fedabml.federation.folders import Member, ServerFolder, SiteFolder, write_secret
from fedabml.federation.settings import Settings, SiteSettings
from fedabml.files.sealed import write_json
from tests.federation.test_settings import NEEDED, SITE


def pem(letter):
    return f"-----BEGIN PUBLIC KEY-----\n{letter * 64}\n-----END PUBLIC KEY-----\n"


@pytest.fixture
def folder(tmp_path):
    folder = ServerFolder(tmp_path / "fed")
    folder.make()
    Settings.of(NEEDED).save(folder.settings_file)
    return folder


def test_only_the_owner_enters(folder):
    parts = (folder.path, folder.secrets, folder.state, folder.run, folder.archives, folder.app)
    assert [stat.S_IMODE(part.stat().st_mode) for part in parts] == [0o700] * len(parts)
    write_secret(folder.site_secret("a"), b"x")
    assert stat.S_IMODE(folder.site_secret("a").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.site_secret("a").parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("written", "meant"), [("rows.csv", "north/rows.csv"), ("../rows.csv", "rows.csv")])
def test_a_relative_path_of_data_begins_at_the_sites_folder(tmp_path, monkeypatch, written, meant):
    site = SiteFolder(tmp_path / "north")
    site.make()
    SiteSettings.of(SITE | {"data": written}).save(site.settings_file)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert site.settings.data == str(tmp_path / meant)


def test_an_absolute_path_of_data_and_none_stay_as_they_are(tmp_path):
    for data in ("", str(tmp_path / "rows.csv")):
        site = SiteFolder(tmp_path / f"north{len(data)}")
        site.make()
        SiteSettings.of(SITE | {"data": data}).save(site.settings_file)
        assert site.settings.data == data


def test_a_sites_folder_that_exists_becomes_private(tmp_path):
    place = tmp_path / "north"
    place.mkdir()
    place.chmod(0o755)
    SiteFolder(place).make()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_sites_are_kept_in_order_of_their_numbers(folder):
    sites = [Member("b", 1, pem("b")), Member("a", 0, pem("a")), Member("c", 2, pem("c"), True)]
    folder.save_sites(sites)
    assert [site.name for site in folder.sites()] == ["a", "b", "c"]
    assert [site.name for site in folder.members()] == ["a", "b"]
    assert set(folder.sites()) == set(sites)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Member("A", 1, pem("b")), "same name"),
        (Member("b", 0, pem("b")), "same number"),
        (Member("b", 1, pem("a")), "same public key"),
    ],
)
def test_two_sites_must_differ(folder, second, words):
    with pytest.raises(InputError, match=words):
        folder.save_sites([Member("a", 0, pem("a")), second])


GOOD = {"name": "a", "number": 0, "public_key": pem("a"), "removed": False}


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"sites": {}},
        {"sites": [GOOD], "more": 1},
        {"sites": [1]},
        {"sites": [{**GOOD, "name": "../a"}]},
        {"sites": [{**GOOD, "number": -1}]},
        {"sites": [{**GOOD, "number": True}]},
        {"sites": [{**GOOD, "public_key": 'x" y; }'}]},
        {"sites": [{**GOOD, "public_key": pem('"')}]},
        {"sites": [{**GOOD, "removed": 1}]},
        {"sites": [{**GOOD, "extra": 1}]},
        {"sites": [GOOD, GOOD]},
    ],
)
def test_a_list_that_init_did_not_write_is_refused(folder, data):
    write_json(folder.sites_file, data)
    with pytest.raises(InputError, match=r"sites\.json"):
        folder.sites()


def test_a_changed_list_is_refused(folder):
    folder.save_sites([Member("a", 0, pem("a"))])
    text = folder.sites_file.read_text()
    folder.sites_file.write_text(text.replace("a" * 64, "b" * 64))
    with pytest.raises(InputError, match="does not fit its SHA-256 digest"):
        folder.sites()


def test_another_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="not a federation's folder"):
        ServerFolder(tmp_path).settings  # noqa: B018
    with pytest.raises(InputError, match="not a site's folder"):
        SiteFolder(tmp_path).settings  # noqa: B018


@pytest.mark.parametrize("data", [[], {"apps": "a" * 64}, {"apps": ["A" * 64]}, {"apps": ["a" * 63]}, {"apps": [1]}])
def test_wrong_app_hashes_are_refused(tmp_path, data):
    site = SiteFolder(tmp_path)
    write_json(site.apps_file, data)
    with pytest.raises(InputError, match="hashes of 64 hexadecimal digits"):
        site.apps()


def test_a_list_of_apps_that_an_earlier_version_sealed_may_be_edited(tmp_path):
    site = SiteFolder(tmp_path)
    write_json(site.apps_file, {"apps": ["a" * 64]})
    site.apps_file.write_text(site.apps_file.read_text().replace("a" * 64, "b" * 64))
    assert site.apps() == ["b" * 64]


def test_a_sites_folder(tmp_path):
    site = SiteFolder(tmp_path / "a")
    site.make()
    SiteSettings.of(SITE).save(site.settings_file)
    write_json(site.apps_file, {"apps": ["a" * 64]})
    assert site.check() == SiteFolder(str(tmp_path / "a")) and site.settings.name == "a"
    assert site.apps() == ["a" * 64]
    assert site != ServerFolder(site.path) and hash(site) == hash(SiteFolder(site.path))
