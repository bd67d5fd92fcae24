"""Provenance of results: which code made them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ..accel.machine import hardware

__all__ = ["code", "hardware"]


@functools.cache
def code() -> str:
    """Return a digest of this package's code, which differs for every change, also between versions."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    files = (source for source in package.rglob("*") if source.suffix in (".py", ".c", ".h") and source.is_file())
    for file in sorted(files):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:10]
