"""Name every path of a federation on disk: in the operator's folder (`ServerFolder`) and in a site's (`SiteFolder`).

Creating either object touches no file. `settings`, `sites` and `apps` read files with checks.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from ..arguments import is_whole
from ..errors import InputError, quoted
from ..files.limits import parse_json
from ..files.paths import explain_errors, read_text, write
from ..files.sealed import read_json, write_json
from .settings import Settings, SiteSettings, check_name

MAX_SITES = 10_000
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\n[A-Za-z0-9+/=\n]{40,1000}\n-----END PUBLIC KEY-----\n")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Member:
    """A site as the server knows it. Its random numbers come from `number`, which no other site ever gets again."""

    name: str
    number: int
    public_key: str  # PEM with a line break at its end, exactly as Flower's SuperLink reports it
    removed: bool = False

    @classmethod
    def of(cls, data: Any, subject: str) -> Member:
        """Make a member from JSON. Raises InputError for anything that `ServerFolder.save_sites` does not write."""
        names = {"name", "number", "public_key", "removed"}
        if not isinstance(data, dict) or set(data) != names:
            raise InputError(f"{subject}: a site has the keys {', '.join(sorted(names))}; it is {quoted(data)}.")
        check_name(data["name"], f"{subject}: a site's name")
        if not is_whole(data["number"]) or data["number"] < 0:
            raise InputError(f"{subject}: the number of site {data['name']} must be 0 or more.")
        public = data["public_key"]
        if not isinstance(public, str) or not _PEM.fullmatch(public):
            raise InputError(f"{subject}: the public key of site {data['name']} is no public key in the form PEM.")
        if not isinstance(data["removed"], bool):
            raise InputError(f"{subject}: removed of site {data['name']} must be true or false.")
        return cls(**data)


class _Part:
    """The path of a file or folder that lies in a `_Folder`, as its attribute."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __get__(self, folder: _Folder, owner: type[_Folder]) -> Path:
        return folder.path / self.place


class _Folder:
    """A folder with settings, a `state` that must survive a restart, and a `run` folder that need not.

    Its class says what the folder is, the name of its settings file, and the command that makes one.
    """

    KIND: ClassVar[str]
    SETTINGS: ClassVar[str]
    COMMAND: ClassVar[str]

    state = _Part("state")  # everything that must survive a restart; a backup needs it
    card_file = _Part("state/card.safetensors")  # the frozen card of inputs
    prior_file = _Part("state/prior.safetensors")  # the newest prior
    run = _Part("run")  # process ids, logs, sockets and temporary files of running processes
    stop_file = _Part("run/stop")  # its existence asks the running processes to end
    ca_certificate = _Part("ca.crt")  # of the federation's own authority, which sites trust

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - links stay as the operator wrote them

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and getattr(other, "path", None) == self.path

    def __hash__(self) -> int:
        return hash((type(self), self.path))

    @property
    def settings_file(self) -> Path:
        """The file of the settings, in TOML."""
        return self.path / self.SETTINGS

    def check(self) -> Self:
        """Return the folder itself. Raises InputError unless it has settings."""
        if not self.settings_file.is_file():
            raise InputError(
                f"'{self.path}' is not {self.KIND} folder: it has no {self.SETTINGS}. Make one with `{self.COMMAND}`."
            )
        return self

    def check_owner(self) -> Self:
        """Return the folder itself. Raises InputError if another user made it.

        Files that root writes into such a folder are private to root, so its processes could not read them.
        """
        if self.state.exists() and (owner := self.state.stat().st_uid) != os.geteuid():
            raise InputError(
                f"'{self.path}' belongs to the user {_user(owner)}, and this command runs as {_user(os.geteuid())}. "
                "Run it as the folder's user, for example with `sudo -u`. If systemd runs the folder's processes, use "
                "`systemctl restart` or `systemctl stop`."
            )
        return self

    def make(self) -> None:
        """Make the folder with `state` and `run`, which only the owner can enter."""
        with explain_errors(self.path, "made", "Choose another place."):
            for folder in (self.path, self.state, self.run):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class ServerFolder(_Folder):
    """The operator's folder, which `fedabml federation init` makes."""

    KIND = "a federation's"
    SETTINGS = "federation.toml"
    COMMAND = "fedabml federation init DIR --host NAME --sites a,b,c"

    schema_file = _Part("schema.toml")  # the inputs that every site must have
    sites_file = _Part("sites.json")  # names, numbers and public keys of the sites
    server_certificate = _Part("server.crt")  # signed by the authority
    secrets = _Part("secrets")  # private keys; only the owner can enter it
    ca_key = _Part("secrets/ca.key")  # the authority's. Only `init` and `renew` need it; it may be kept elsewhere
    server_key = _Part("secrets/server.key")  # of the server's certificate
    superexec_secret = _Part("secrets/superexec.secret")  # shared by the SuperLink and the ServerApp's executor
    archives = _Part("archives")  # for the sites. Each holds a private key: hand it over and delete it
    proxy_file = _Part("proxy/nginx.conf")  # the configuration of nginx
    app = _Part("app")  # the Flower app
    database = _Part("state/flower.db")  # the SuperLink's
    events_file = _Part("state/events.jsonl")  # the coordinator's events, one JSON object per line
    old_events_file = _Part("state/events.old.jsonl")  # earlier events, if there were too many for one file

    def site_secret(self, site: str) -> Path:
        """Return the path of the secret that the server shares with one site."""
        return self.secrets / "sites" / f"{check_name(site)}.secret"

    def archive(self, site: str) -> Path:
        """Return the path of a site's archive."""
        return self.archives / f"{check_name(site)}.tar.gz"

    @cached_property
    def settings(self) -> Settings:
        """The settings, read once."""
        return Settings.load(self.check().settings_file)

    def sites(self) -> list[Member]:
        """Return all sites in order of their numbers, removed ones included. The file is read at every call."""
        data, subject = read_json(self.check().sites_file), f"'{self.sites_file}'"
        listed = data.get("sites") if isinstance(data, dict) else None
        if not isinstance(listed, list) or set(data) != {"sites"} or len(listed) > MAX_SITES:
            raise InputError(f"{subject} must be a table with a list 'sites' of at most {MAX_SITES} entries.")
        return _distinct([Member.of(entry, subject) for entry in listed], subject)

    def members(self) -> list[Member]:
        """Return the sites that are not removed, in order of their numbers."""
        return [site for site in self.sites() if not site.removed]

    def save_sites(self, sites: Sequence[Member]) -> None:
        """Write the list of sites."""
        ordered = _distinct(list(sites), "The list of sites")
        write_json(self.sites_file, {"sites": [asdict(site) for site in ordered]})

    def make(self) -> None:
        """Make the folder with its parts; only the owner can enter it."""
        super().make()
        with explain_errors(self.path, "made", "Choose another place."):
            for folder in (self.secrets, self.archives, self.proxy_file.parent, self.app):
                folder.mkdir(mode=0o700, exist_ok=True)


class SiteFolder(_Folder):
    """A site's own folder, which `fedabml federation join` makes from an archive."""

    KIND = "a site's"
    SETTINGS = "site.toml"
    COMMAND = "fedabml federation join ARCHIVE --data PATH"

    key = _Part("site.key")  # the site's private key
    public_key = _Part("site.pub")
    secret = _Part("site.secret")  # shared with the server, for the codes of orders and replies
    apps_file = _Part("apps.json")  # hashes of the Flower apps whose messages this site answers; the site may edit it
    images = _Part("run/images")  # the decoded images of a folder of images; a backup does not need them
    prior_facts_file = _Part("state/prior.json")  # the round of the newest prior

    @cached_property
    def settings(self) -> SiteSettings:
        """The settings, read once; a relative path of the data begins at this folder, wherever a process started."""
        settings = SiteSettings.load(self.check().settings_file)
        if not settings.data:
            return settings
        return replace(settings, data=os.path.abspath(self.path / settings.data))  # noqa: PTH100 - links stay

    def make(self) -> None:
        """Make the folder with `state` and `run`. One that exists becomes private, too: its settings name the data."""
        super().make()
        with suppress(PermissionError):  # a mounted folder may belong to somebody else; keys are private themselves
            self.path.chmod(0o700)

    @property
    def operator(self) -> ServerFolder | None:
        """The operator's folder whose supervisor runs this site: the site's folder lies in its `local`."""
        found = ServerFolder(self.path.parent.parent)
        return found if self.path.parent.name == "local" and found.settings_file.is_file() else None

    def apps(self) -> list[str]:
        """Return the hashes of the allowed apps, each 64 hexadecimal digits.

        A person may edit the file. So a digest in it, which earlier versions wrote, is not checked.
        """
        subject = f"'{self.apps_file}'"
        return check_apps(parse_json(read_text(self.apps_file), subject), subject)


def check_apps(data: Any, subject: str) -> list[str]:
    """Return the hashes in the JSON `{"apps": [hash, …]}`. Raises InputError for anything else."""
    apps = data.get("apps") if isinstance(data, dict) else None
    if not isinstance(apps, list) or not all(isinstance(app, str) and _HASH.fullmatch(app) for app in apps):
        raise InputError(f'{subject} must be {{"apps": [hashes of 64 hexadecimal digits]}}; it is {quoted(data)}.')
    if len(apps) > 100:
        raise InputError(f"{subject} lists {len(apps)} apps; at most 100 are allowed.")
    return apps


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, in a folder that only its owner can enter."""
    with explain_errors(path, "written", "Choose another place."):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, content, private=True)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container need not list its users
        return str(number)


def _distinct(sites: list[Member], subject: str) -> list[Member]:
    """Return sites in order of their numbers. Raises InputError if two share a number, a name or a key."""
    columns: dict[str, list[str | int]] = {
        "name": [site.name.lower() for site in sites],  # some file systems do not distinguish A from a
        "number": [site.number for site in sites],
        "public key": [site.public_key for site in sites],
    }
    for what, values in columns.items():
        if len(set(values)) < len(values):
            raise InputError(f"{subject} has two sites with the same {what}.")
    return sorted(sites, key=lambda site: site.number)
