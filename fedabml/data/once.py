"""A cache of a user's own files, so that an experiment reads them once and not once for each of its runs.

Within `reading_once`, `once` returns what an earlier call has read, if the files have not changed since: their names,
sizes and times of change are part of the key. When the last `reading_once` ends, the cache is emptied, so no data stay
in memory after a call. Outside of it `once` only reads. Threads need no lock here: each step on a dictionary is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..files.limits import host_memory

T = TypeVar("T")
LIMIT = 64  # entries, the oldest dropped first (a table has one for each seed); two where memory is short
_CACHE: dict[Hashable, Any] = {}  # the most recently used last
_OPEN: set[object] = set()  # the `reading_once` blocks that have begun and not ended


@contextmanager
def reading_once() -> Iterator[None]:
    """Cache what `once` reads until the block ends; blocks may be nested, and overlap in threads."""
    block = object()
    _OPEN.add(block)
    try:
        yield
    finally:
        _OPEN.discard(block)
        if not _OPEN:
            _CACHE.clear()


def once(path: str | os.PathLike[str], options: Hashable, read: Callable[[], T]) -> T:
    """Return `read()`, or the result of an earlier call with the same path, options and unchanged files.

    All callers share the result, so none of them may write to it.
    """
    if not _OPEN:
        return read()
    key = (os.path.realpath(path), options, _file_stamp(Path(path)))
    content = _CACHE.pop(key) if key in _CACHE else read()
    if _OPEN:
        _CACHE[key] = content
        total, free = host_memory()
        limit = LIMIT if free >= total // 4 else 2  # a table's columns and the federation made of them
        for oldest in list(_CACHE)[:-limit]:
            _CACHE.pop(oldest, None)
    return content


def _file_stamp(path: Path) -> Hashable:
    """Return name, inode, size and times of a file, or of the clients' files in a folder; None if it is unreadable."""
    try:
        files = (sorted(path.glob("*.npz")) or sorted(path.rglob("*.*"))) if path.is_dir() else [path]
        statuses = [(str(file), file.stat()) for file in files]
    except OSError:
        return None
    return tuple(
        (name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in statuses
    )
