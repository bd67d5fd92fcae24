"""Write and read the archive that an operator hands to a site: the server's address, the site's keys, a short guide.

    README.txt  invitation.json  ca.crt  site.key  site.pub  site.secret  apps.json        (NAME.tar.gz, mode 0600)

`pack` writes it; `unpack` makes a site's folder of it. An archive is untrusted input: it is read in memory with limits,
only these names are accepted, and each content is checked. It never decides what the site allows: `unpack` writes
`site.toml` itself and allows nothing in it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

from ..errors import InputError, quoted
from ..files.limits import parse_json
from ..files.paths import explain_errors, read_bytes, write
from ..files.sealed import unsealed
from ..version import __version__
from . import keys
from .folders import ServerFolder, SiteFolder, check_apps, write_secret
from .settings import SiteSettings, check_name

FORMAT = 1
MAX_ARCHIVE, MAX_CONTENT, MAX_FILE = 256 << 10, 1 << 20, 64 << 10  # bytes: packed, unpacked, of one file
_FILES = ("README.txt", "invitation.json", "ca.crt", "site.key", "site.pub", "site.secret", "apps.json")
_INVITATION = {"format": int, "federation": str, "federation_name": str, "name": str, "server": str}
_README = """Site {name} of the federation {title}

Keep this archive secret: it holds the private key of this site. Delete it once the site has joined.
Your data stay on your machine. Nothing is allowed beyond training: see site.toml in the site's folder.

1. Install:        python -m pip install -c constraints-flower.txt './{wheel}[flower,tables]'
                   Your operator gives you both files, too. For .xlsx files add excel, for images add images.
2. Join:           fedabml federation join {name}.tar.gz --data PATH
3. Personalise:    fedabml federation personalize {name}
                   This works as soon as the server has sent a prior: {priors}.

PATH is your table, .npz file or folder. Join connects to {server} and to nothing else, and needs no open port.
The authority's certificate (ca.crt) has the SHA-256 fingerprint
{fingerprint}
Ask your operator for it over another channel, and compare.
"""


def pack(folder: ServerFolder, name: str, site: keys.SiteKeys, apps: list[str]) -> Path:
    """Write the archive of one site into the operator's folder and return its path. Only the owner can read it."""
    settings, authority = folder.settings, read_bytes(folder.ca_certificate, MAX_FILE)
    invitation = {"format": FORMAT, "federation": settings.federation, "federation_name": settings.name}
    invitation |= {"name": check_name(name), "server": settings.address}
    words = {"name": name, "title": settings.name, "server": settings.address}
    words["fingerprint"] = certificate_fingerprint(authority)
    words["wheel"] = f"fedabml-{__version__}-py3-none-any.whl"
    every = settings.prior_every
    words["priors"] = f"after every {every} rounds, and at the end" if every else "at the end of training"
    contents = {
        "README.txt": _README.format(**words).encode(),
        "invitation.json": (json.dumps(invitation, indent=2) + "\n").encode(),
        "ca.crt": authority,
        "site.key": site.private,
        "site.pub": site.public,
        "site.secret": site.secret,
        "apps.json": (json.dumps({"apps": check_apps({"apps": apps}, "The list of apps")}, indent=2) + "\n").encode(),
    }
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for file in _FILES:
            entry = tarfile.TarInfo(file)
            entry.size, entry.mode = len(contents[file]), 0o600
            tar.addfile(entry, io.BytesIO(contents[file]))
    path = folder.archive(name)
    write_secret(path, buffer.getvalue())
    return path


def certificate_fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 fingerprint of a certificate in the form PEM, in the notation that people compare."""
    keys.check()
    from cryptography.hazmat.primitives import hashes

    return keys.read_certificate(certificate, "The certificate").fingerprint(hashes.SHA256()).hex(":").upper()


def unpack(
    archive: str | os.PathLike[str], folder: str | os.PathLike[str], data: str | os.PathLike[str] | None = None
) -> SiteFolder:
    """Make a site's folder from an archive, and write the path `data` into its settings.

    A folder made earlier from the same archive keeps its settings and its state. One that an interrupted call left
    half-made is completed. Raises InputError for an archive that `pack` did not write, and for a folder that holds
    something else.
    """
    contents, subject = _read(archive), f"'{archive}'"
    invitation = _invitation(contents["invitation.json"], subject)
    _check_contents(contents, subject)
    made: dict[str, Any] = {key: invitation[key] for key in ("federation", "name", "server")}
    if data is not None:
        made["data"] = os.path.abspath(data)  # noqa: PTH100 - links stay as the site wrote them
    settings, site = SiteSettings.of(made, subject), SiteFolder(folder)
    if site.settings_file.exists():
        return _kept(site, settings, contents, subject)
    with explain_errors(site.path, "read"):
        if site.path.exists() and not _clear_unfinished(site, contents["site.key"]):
            raise InputError(f"'{site.path}' exists and is no empty folder. Give another one with --folder.")
    site.make()
    write_secret(site.key, contents["site.key"])
    write_secret(site.secret, contents["site.secret"])
    write(site.public_key, contents["site.pub"])
    write(site.ca_certificate, contents["ca.crt"])
    write(site.apps_file, contents["apps.json"])
    settings.save(site.settings_file)  # written last: a folder with settings is complete
    return site


def _clear_unfinished(site: SiteFolder, key: bytes) -> bool:
    """Return whether a folder without settings is empty, or holds what an interrupted `unpack` of this key has left.

    Half-written files are then deleted, because they may hold a part of the key.
    """
    if not site.path.is_dir() or (site.key.exists() and read_bytes(site.key, MAX_FILE) != key):
        return False
    whole = {site.key, site.secret, site.public_key, site.ca_certificate, site.apps_file}
    names, half = {path.name for path in whole | {site.settings_file}}, []
    for path in site.path.iterdir():
        if path.name.endswith(".part") and any(path.name.startswith(f".{name}.") for name in names):
            half.append(path)
        elif path not in whole and not (path in (site.state, site.run) and path.is_dir() and not any(path.iterdir())):
            return False
    for path in half:
        path.unlink()
    return True


def _kept(site: SiteFolder, settings: SiteSettings, contents: dict[str, bytes], subject: str) -> SiteFolder:
    """Return a folder made earlier, with the new path of its data. Raises InputError if the archive is not its own."""
    old = site.settings
    same = (old.federation, old.name) == (settings.federation, settings.name)
    if not same or read_bytes(site.public_key, MAX_FILE) != contents["site.pub"]:
        raise InputError(
            f"'{site.path}' belongs to site {old.name} of another federation or with another key, not to {subject}. "
            "Give another folder with --folder."
        )
    if settings.data and settings.data != old.data:
        SiteSettings.of(old.to_dict() | {"data": settings.data}).save(site.settings_file)
        return SiteFolder(site.path)
    return site


def _read(archive: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read an archive into memory. Raises InputError unless it has exactly the expected files."""
    subject, contents = f"'{archive}'", dict[str, bytes]()
    foreign = f"{subject} is no archive of `fedabml federation init`, or it is damaged"
    packed = read_bytes(archive, MAX_ARCHIVE)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            raw = stream.read(MAX_CONTENT + 1)
        if len(raw) > MAX_CONTENT:
            raise InputError(f"{subject} unpacks to more than {MAX_CONTENT:,} bytes. It is no archive of a site.")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            for entry in tar:
                if not entry.isreg() or entry.name not in _FILES or entry.name in contents or entry.size > MAX_FILE:
                    raise InputError(f"{foreign}: it has an entry {quoted(entry.name)} that does not belong there.")
                file = tar.extractfile(entry)
                contents[entry.name] = file.read(MAX_FILE) if file else b""
                if len(contents[entry.name]) != entry.size:
                    raise InputError(f"{foreign}: {entry.name} is cut short.")
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{foreign} ({type(error).__name__}).") from error
    if missing := [name for name in _FILES if name not in contents]:
        raise InputError(f"{foreign}: it has no {', '.join(missing)}.")
    return contents


def _invitation(content: bytes, subject: str) -> dict[str, Any]:
    """Return the facts of an invitation. Raises InputError for an unknown or missing key, so nothing can be preset."""
    try:
        data = parse_json(content.decode(), f"{subject}: invitation.json")
    except UnicodeDecodeError as error:
        raise InputError(f"{subject}: invitation.json is not text in UTF-8.") from error
    if not isinstance(data, dict) or set(data) != set(_INVITATION):
        raise InputError(f"{subject}: invitation.json must have the keys {', '.join(_INVITATION)} and no other.")
    for key, kind in _INVITATION.items():
        if type(data[key]) is not kind:
            raise InputError(f"{subject}: {key} of invitation.json is {quoted(data[key])}.")
    if data["format"] != FORMAT:
        raise InputError(f"{subject} has the format {data['format']}; this version of fedabml reads {FORMAT}.")
    return data


def _check_contents(contents: dict[str, bytes], subject: str) -> None:
    """Raise InputError unless the keys belong together, the certificate is an authority's and the apps are hashes."""
    from cryptography import x509

    keys.check_site_keys(contents["site.key"], contents["site.pub"])
    if len(contents["site.secret"]) != keys.SECRET_BYTES:
        raise InputError(f"{subject}: site.secret must have {keys.SECRET_BYTES} bytes.")
    certificate = keys.read_certificate(contents["ca.crt"], f"{subject}: ca.crt")
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        is_authority = False
    if not is_authority:
        raise InputError(f"{subject}: ca.crt is no certificate of an authority.")
    try:
        apps = parse_json(contents["apps.json"].decode(), f"{subject}: apps.json")
    except UnicodeDecodeError as error:
        raise InputError(f"{subject}: apps.json is not text in UTF-8.") from error
    check_apps(unsealed(apps, subject) if isinstance(apps, dict) else apps, f"{subject}: apps.json")
