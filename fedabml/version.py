"""The version, once, and the digest of this package's code."""

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def code() -> str:
    """Return a digest of this package's code, which differs for every change, also between versions."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    files = (source for source in package.rglob("*") if source.suffix in (".py", ".c", ".h") and source.is_file())
    for file in sorted(files):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:10]
