"""A cache of a user's own files, so that an experiment reads them once and not once for each of its runs.

Within `reading_once`, `once` returns what an earlier call has read, if the files have not changed since: their names,
sizes and times of change are part of the key. When the outermost `reading_once` ends, the cache is emptied, so no data
stay in memory after a call. Outside of it `once` only reads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..files.limits import host_memory

T = TypeVar("T")
LIMIT = 64  # entries, the oldest dropped first (a table has one for each seed); two where memory is short
_CACHE: OrderedDict[Hashable, Any] = OrderedDict()
_LOCK = threading.Lock()
_open = 0  # the number of `reading_once` blocks that have begun and not ended

if hasattr(os, "register_at_fork"):  # in a child nobody would release a lock that another thread held
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@contextmanager
def reading_once() -> Iterator[None]:
    """Cache what `once` reads until the block ends; blocks may be nested, and overlap in threads."""
    global _open
    with _LOCK:
        _open += 1
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if not _open:
                _CACHE.clear()


def once(path: str | os.PathLike[str], options: Hashable, read: Callable[[], T]) -> T:
    """Return `read()`, or the result of an earlier call with the same path, options and unchanged files.

    All callers share the result, so none of them may write to it.
    """
    if not _open:
        return read()
    key = (os.path.realpath(path), options, _fingerprint(Path(path)))
    with _LOCK:
        if key in _CACHE:
            _CACHE.move_to_end(key)
            return _CACHE[key]
    found = read()
    with _LOCK:
        if _open:
            _CACHE[key] = found
            total, free = host_memory()
            while len(_CACHE) > (LIMIT if free >= total // 4 else 2):  # a frame and the federation made of it
                _CACHE.popitem(last=False)
    return found


def _fingerprint(path: Path) -> Hashable:
    """Return what changes with a file, or with the client files in a folder; None where it cannot be read."""
    try:
        if not path.is_dir():
            return _marks(path.stat())
        with os.scandir(path) as entries:
            return tuple(sorted((e.name, *_marks(e.stat())) for e in entries if e.name.endswith(".npz")))
    except OSError:
        return None


def _marks(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
