"""Downloading a file: resumed where it broke off, from the next mirror where one fails, checked before use."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import InputError
from ..files.paths import open_append, open_regular

Progress = Callable[[int, int | None], None]
"""A callback with the bytes done and, where the server gives it, the total of bytes."""

BLOCK = 1 << 18
TRIES = 3


def download(
    urls: Sequence[str],
    md5: str,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Download the file with this md5 to `path`, from the first of `urls` that has it; return the path.

    What has arrived lies in `path` + ".part", and a later call resumes there. A file with a wrong checksum is removed,
    so `path` itself only ever holds the right one. `timeout` and `pause`, the wait between tries, are in seconds.
    Raises InputError with every address's failure.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    is_new = not path.parent.exists()
    try:
        if path.exists() and digest(path) == md5:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another folder.") from error
    failures = []
    for url in urls:
        for attempt in range(TRIES):
            resumed = part.exists() and part.stat().st_size > 0
            try:
                _fetch(url, part, progress, timeout)
            except (OSError, http.client.HTTPException) as error:
                failure = f"{url}: {getattr(error, 'reason', None) or error}"
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break
                time.sleep(pause if attempt + 1 < TRIES else 0)
                continue
            found_md5 = digest(part)
            if found_md5 == md5:
                part.replace(path)
                return path
            part.unlink()
            failure = f"{url}: the file has the md5 {found_md5} instead of {md5}, so it was removed"
            if not resumed:  # a whole file, and the wrong one: another request would give the same
                break
        failures.append(failure)
    if is_new:
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # which fails, as it should, if something has arrived in it
    raise InputError(f"{path.name} could not be downloaded. {'; '.join(failures)}.")


def digest(path: Path) -> str:
    """Return the md5 of a file, the checksum that the official sources publish."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, progress: Progress | None, timeout: float) -> None:
    """Complete `part`, from its present length if the server allows it, else from the start."""
    received = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedabml"})
    if received:
        request.add_header("Range", f"bytes={received}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and received:  # nothing comes after our bytes: the checksum decides whether they are all
            return
        raise
    with response:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {received}-"):
            if response.status == 206:
                part.unlink()
                raise OSError("the server sent another part of the file than the one requested")
            received = 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length is not None else None
        with open_append(part) as file:
            file.truncate(received)
            while block := response.read(BLOCK):
                file.write(block)
                received += len(block)
                if progress:
                    progress(received, total)
    if total is not None and received < total:
        raise OSError(f"the connection ended after {received} of {total} bytes")
