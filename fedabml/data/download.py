"""Fetching a file whole: resumed where it broke off, from the next mirror where one fails, checked before use."""

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
"""Called with the bytes done and, where the server says so, the bytes in all."""

BLOCK = 1 << 18
TRIES = 3


def download(
    urls: str | Sequence[str],
    md5: str,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Puts the file with this md5 at `path`, from the first of `urls` that can give it.

    What has arrived lies in `path` + ".part": a later call goes on from there. A file of the wrong checksum is removed,
    and `path` itself only ever holds the right one. `pause` is the wait between tries, in seconds.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    made = not path.parent.exists()
    try:
        if path.exists() and digest(path) == md5:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another folder.") from error
    failures = []
    for url in [urls] if isinstance(urls, str) else urls:
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
            got = digest(part)
            if got == md5:
                part.replace(path)
                return path
            part.unlink()
            failure = f"{url}: the file has the md5 {got} instead of {md5}, so it was removed"
            if not resumed:  # a whole file, and the wrong one: asking again would give the same
                break
        failures.append(failure)
    if made:
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # which fails, as it should, if something has arrived in it
    raise InputError(f"{path.name} could not be downloaded. {'; '.join(failures)}.")


def digest(path: Path) -> str:
    """The md5 of a file: the checksum that the official sources publish."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, progress: Progress | None, timeout: float) -> None:
    """Brings `part` to its full length, from where it stands if the server allows."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedabml"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing after what we have: the checksum will tell whether that is all
            return
        raise
    with response:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            if response.status == 206:
                part.unlink()
                raise OSError("the server sent another part of the file than was asked for")
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with open_append(part) as file:
            file.truncate(done)
            while block := response.read(BLOCK):
                file.write(block)
                done += len(block)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
