"""The settings of a federation and of a site: checked fields, and a TOML file that people can edit."""

import tomllib

import pytest

from fedabml.errors import InputError
from fedabml.federation.settings import (
    Settings,
    SiteSettings,
    check_host,
    check_name,
    join_address,
    split_address,
)

NEEDED = {"federation": "0123456789abcdef" * 2, "name": "trial", "host": "fed.example.org"}
SITE = {"federation": "0123456789abcdef" * 2, "name": "a", "server": "fed.example.org:8443"}


def test_a_file_gives_the_settings_that_wrote_it(tmp_path):
    options = {"rounds": 7, "participation": 0.3, "hyper": {"lr": 0.03, "label_prior": "none"}, "round_timeout": 12.5}
    settings = Settings.of(NEEDED | options | {"model_options": {"hidden": [8, 8]}})
    settings.save(tmp_path / "federation.toml")
    assert Settings.load(tmp_path / "federation.toml") == settings
    site = SiteSettings.of(SITE | {"data": '/a path/with "quotes" and ü.csv'})
    site.save(tmp_path / "site.toml")
    assert SiteSettings.load(tmp_path / "site.toml") == site


@pytest.mark.parametrize("settings", [Settings.of(NEEDED), SiteSettings.of(SITE)])
def test_every_key_is_in_the_file_below_a_comment(settings):
    text = settings.to_toml()
    lines = text.splitlines()
    assert set(tomllib.loads(text)) == set(settings.to_dict())
    for key in settings.to_dict():
        place = next(i for i, line in enumerate(lines) if line.startswith((f"{key} =", f"[{key}]")))
        assert lines[place - 1].startswith("# ")
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"roudns": 3}, "unknown key 'roudns'. Did you mean 'rounds'?"),
        ({"rounds": 0}, "must be between 1 and"),
        ({"rounds": 1.5}, "must be a whole number"),
        ({"rounds": True}, "must be a whole number"),
        ({"rounds": "5"}, "must be a whole number"),
        ({"participation": 0}, "participation must be above 0"),
        ({"participation": 1.1}, "between 0 and 1"),
        ({"participation": float("nan")}, "must be a finite number"),
        ({"round_timeout": float("inf")}, "must be a finite number"),
        ({"aggregation": "medain"}, "Did you mean 'median'?"),
        ({"algorithm": "fedabm"}, "Did you mean 'fedabml'?"),
        ({"algorithm": "mine.py:FedDyn"}, "no algorithm 'mine.py:FedDyn'; files of code are not accepted"),
        ({"model": "mine.py:Net"}, "no network 'mine.py:Net'; files of code and Hugging Face folders are not accepted"),
        ({"model": ["mlp"]}, "no network"),
        ({"model": "org/name"}, "Hugging Face folders are not accepted"),
        ({"dtype": "bf16"}, "dtype"),
        ({"trim": 0.5}, "between 0 and 0.49"),
        ({"hyper": [1]}, "must be a table"),
        ({"federation": "0" * 31}, "32 hexadecimal digits"),
        ({"federation": "A" * 32}, "32 hexadecimal digits"),
        ({"name": "../x"}, "letters, digits"),
        ({"name": "a\nb"}, "must be a text"),
        ({"host": "fed.example.org:8443"}, "host must be a name"),
        ({"host": "a b"}, "host must be a name"),
        ({"port": 8180}, "two different ports"),
        ({"port": 70000}, "between 1 and 65535"),
        ({"max_message_mb": 5000}, "between 1 and 2000"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_right(change, words):
    with pytest.raises(InputError) as error:
        Settings.of(NEEDED | change, "'federation.toml'")
    assert words in str(error.value) and str(error.value).startswith("'federation.toml'")


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key):
    with pytest.raises(InputError, match=f"has no key '{key}'"):
        Settings.of({name: value for name, value in NEEDED.items() if name != key})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rounds = ", "is not valid TOML"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"# " + b"x" * (300 << 10), "has at most"),
        (b"a" + b".a" * 100 + b" = 1", "nested more than"),
        (b"x = [" * 80 + b"]" * 80, ""),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, words):
    path = tmp_path / "federation.toml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        Settings.load(path)
    assert words in str(error.value)


def test_a_site_allows_nothing_by_default():
    site = SiteSettings.of(SITE)
    assert [value for name, value in site.to_dict().items() if name.startswith("allow_")] == [False] * 4


@pytest.mark.parametrize("name", ["a", "A-1_b", "0", "x" * 63])
def test_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "_a", "a/b", "a.b", "..", "x" * 64, "ä", "a b", "a\n", None, 3])
def test_names_that_are_refused(name):
    with pytest.raises(InputError, match="letters, digits, - and _"):
        check_name(name)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("h:1", ("h", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("10.0.0.1:8443", ("10.0.0.1", 8443)),
        ("a.b-c:2", ("a.b-c", 2)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts and join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        "h",
        "h:0",
        "h:65536",
        ":1",
        "::1:1",
        "[h]:1x",
        "h:-1",
        "h:１",
        "a_b:1",
        "1.2.3:1",
        "-a:1",
        "[fe80::1%eth0]:1",
        5,
        None,
    ],
)
def test_addresses_that_are_refused(address):
    with pytest.raises(InputError):
        split_address(address)


def test_a_host_is_written_in_one_form():
    assert check_host("0:0:0:0:0:0:0:1") == "::1"
    assert Settings.of(NEEDED | {"host": "::1"}).address == "[::1]:8443"


def test_a_key_that_no_version_used_is_no_reason_to_refuse_a_sites_settings(tmp_path, caplog):
    text = SiteSettings.of(SITE).to_toml()
    assert "drop_columns" not in text
    (tmp_path / "site.toml").write_text(text + 'drop_columns = "note"\n')
    for _ in range(2):
        assert SiteSettings.load(tmp_path / "site.toml") == SiteSettings.of(SITE)
    (note,) = [record.getMessage() for record in caplog.records]  # once, however often the file is read
    assert "site.toml': the key 'drop_columns' has no effect. Remove it" in note
