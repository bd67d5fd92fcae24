"""Make everything that a deployment needs: `init` at first, and later `add_site`, `remove_site` and `renew`.

`init` builds the operator's folder under another name and renames it when it is complete. An empty folder that exists
may be a mounted one, which cannot be replaced: `init` builds the parts inside it and moves them up, the settings last.
A site's private key exists only in its archive: the server keeps the public key and the secret that both share.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..files.paths import explain_errors, folder_lock, read_bytes, write
from . import archive, keys, proxy
from .folders import MAX_SITES, Member, ServerFolder, write_secret
from .settings import Settings, check_host, check_name

if TYPE_CHECKING:
    from .schema import Schema

_LOCK = ".change.lock"  # held while the list of sites or a certificate changes


def init(
    directory: str | os.PathLike[str],
    host: str,
    sites: Sequence[str],
    data: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    schema_options: dict[str, Any] | None = None,
    schema: str | os.PathLike[str] | None = None,
    apps: Sequence[str] | None = None,
    **settings: Any,
) -> ServerFolder:
    """Make an operator's folder with settings, schema, keys, certificates, the app, the proxy and an archive per site.

    `host` is the name or address by which sites reach this machine, `sites` are their names. The schema is drafted from
    `data`, the data of one site, with `schema_options`, or read from the file `schema`. `apps` are the hashes of the
    Flower apps that sites accept, by default that of the app in the folder. `settings` are keys of federation.toml.
    """
    keys.check()
    folder = ServerFolder(directory)
    names = _checked_names(sites)
    chosen = Settings.of(
        {"federation": secrets.token_hex(16), "name": name or _default_name(folder.path), "host": check_host(host)}
        | _small(settings, len(names)) | settings, "init"
    )  # fmt: skip
    _check_hyper(chosen)
    inputs = _inputs(data, schema_options or {}, schema)
    with explain_errors(folder.path, "made", "Choose another place."):
        exists = folder.path.exists()
        if exists and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise InputError(f"'{folder.path}' exists and is no empty folder. Choose another place.")
        folder.path.parent.mkdir(parents=True, exist_ok=True)
    part = f".{folder.path.name[:100]}.{secrets.token_hex(8)}.part"
    aside = ServerFolder(folder.path / part if exists else folder.path.with_name(part))
    try:
        _fill(aside, chosen, names, inputs, apps)
        with explain_errors(folder.path, "made", "Choose another place."):
            if exists:
                _move_up(aside, folder)
            else:
                aside.path.rename(folder.path)
    finally:
        with suppress(OSError):
            shutil.rmtree(aside.path)
    proxy.write(folder)  # holds absolute paths
    return folder


def add_site(directory: str | os.PathLike[str], name: str, *, apps: Sequence[str] | None = None) -> Path:
    """Add a site to a federation and return the path of its archive. A running proxy reads the new list by itself."""
    folder = ServerFolder(directory).check().check_owner()
    with folder_lock(folder.path, _LOCK):
        sites = folder.sites()
        _checked_names([*(site.name for site in sites), name])
        number = 1 + max((site.number for site in sites), default=-1)
        return _add(folder, sites, name, number, _apps(folder, apps))


def remove_site(directory: str | os.PathLike[str], name: str) -> Member:
    """Mark a site as removed and return it. A running proxy refuses it from then on; its number is not used again.

    A removal that was interrupted is completed by another call. The last site cannot be removed.
    """
    folder = ServerFolder(directory).check().check_owner()
    with folder_lock(folder.path, _LOCK):
        sites = folder.sites()
        found = next((site for site in sites if site.name == check_name(name)), None)
        left = [site.name for site in sites if not site.removed]
        if found is None or (found.removed and not folder.site_secret(name).exists()):
            raise InputError(f"The federation has no site '{name}'. Its sites: {', '.join(left)}.")
        if left == [name]:
            raise InputError(
                f"'{name}' is the last site of the federation. Add another one first, or end the federation with "
                "`fedabml federation down`."
            )
        removed = replace(found, removed=True)
        folder.save_sites([removed if site is found else site for site in sites])
        proxy.write(folder)
        folder.archive(name).unlink(missing_ok=True)
        folder.site_secret(name).unlink(missing_ok=True)  # last: without it, the removal is complete
    return removed


def renew(directory: str | os.PathLike[str]) -> ServerFolder:
    """Make a new key and certificate of the server for the host in federation.toml. Restart the SuperLink afterwards.

    Sites need no new archives, because they trust the authority. Its key must be in secrets/ca.key.
    """
    folder = ServerFolder(directory).check().check_owner()
    with folder_lock(folder.path, _LOCK):
        authority = keys.Certificate(read_bytes(folder.ca_certificate), read_bytes(folder.ca_key))
        _write_certificate(folder, keys.make_server_certificate(authority, folder.settings.host))
        proxy.write(folder)
    return folder


def _move_up(aside: ServerFolder, folder: ServerFolder) -> None:
    """Move all parts of a folder into the empty one around it. The settings come last: with them it is complete.

    If a part cannot be moved, those moved before it are removed: the folder is empty again, and takes another `init`.
    """
    with suppress(PermissionError):  # a mounted folder may belong to somebody else; the parts are private themselves
        folder.path.chmod(0o700)
    moved: list[Path] = []
    try:
        for part in sorted(aside.path.iterdir(), key=lambda path: path == aside.settings_file):
            moved.append(part.rename(folder.path / part.name))
    except BaseException:
        for part in moved:
            with suppress(OSError):
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        raise


def _inputs(
    data: str | os.PathLike[str] | None, options: dict[str, Any], path: str | os.PathLike[str] | None
) -> Schema | None:
    """Return the schema that is drafted from data or read from a file, or None if there is neither."""
    from . import schema

    if path is not None:
        return schema.Schema.load(path)
    return None if data is None else schema.draft(data, **options)


def _fill(
    folder: ServerFolder,
    settings: Settings,
    names: list[str],
    inputs: Schema | None,
    apps: Sequence[str] | None,
) -> None:
    """Write everything but the proxy's configuration."""
    folder.make()
    settings.save(folder.settings_file)
    if inputs is not None:
        inputs.save(folder.schema_file)
    authority = keys.make_authority(settings.name)
    write_secret(folder.ca_key, authority.key)
    write(folder.ca_certificate, authority.certificate)
    _write_certificate(folder, keys.make_server_certificate(authority, settings.host))
    write_secret(folder.superexec_secret, secrets.token_hex(32).encode())
    folder.save_sites([])
    allowed = _apps(folder, apps)
    for number, name in enumerate(names):
        _add(folder, folder.sites(), name, number, allowed, with_proxy=False)


def _add(
    folder: ServerFolder, sites: list[Member], name: str, number: int, apps: list[str], with_proxy: bool = True
) -> Path:
    """Make the keys and the archive of one site, and then list it, so that every listed site has an archive."""
    site = keys.make_site_keys()
    write_secret(folder.site_secret(name), site.secret)
    path = archive.pack(folder, name, site, apps)
    folder.save_sites([*sites, Member(name, number, site.pem)])
    if with_proxy:
        proxy.write(folder)
    return path


def _apps(folder: ServerFolder, apps: Sequence[str] | None) -> list[str]:
    """Return the given hashes, or that of the federation's Flower app, which is written if it does not exist."""
    if apps is not None:
        return list(apps)
    from .flower.app import app_hash, write_app

    if not any(folder.app.iterdir()):
        write_app(folder.app)
    return [app_hash(folder.app)]


def _write_certificate(folder: ServerFolder, certificate: keys.Certificate) -> None:
    write_secret(folder.server_key, certificate.key)
    write(folder.server_certificate, certificate.certificate)


def _checked_names(sites: Sequence[str]) -> list[str]:
    names = [check_name(name) for name in sites]
    twice = next((name for name in names if sum(name.lower() == other.lower() for other in names) > 1), None)
    if twice:
        raise InputError(f"Two sites are called '{twice}' (A and a count as the same). Choose different names.")
    if not 1 <= len(names) <= MAX_SITES:
        raise InputError(f"A federation has 1 to {MAX_SITES} sites; {len(names)} are named.")
    return names


def _default_name(path: Path) -> str:
    name = "".join(mark if mark.isascii() and (mark.isalnum() or mark in "-_") else "-" for mark in path.name)
    return name.strip("-_")[:63] or "federation"


def _small(settings: dict[str, Any], sites: int) -> dict[str, Any]:
    """Return the defaults of a federation with few sites: one site alone cannot give two replies."""
    return {"min_replies": 1} if sites == 1 and "min_replies" not in settings else {}


def _check_hyper(settings: Settings) -> None:
    """Raise InputError for a hyperparameter that the algorithm does not have."""
    from ..algorithms import make

    make(settings.algorithm, **settings.hyper)
