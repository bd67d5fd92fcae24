"""A user's own files are read once for a whole experiment, not once for each of its runs.

Within `reading_once`, `once` returns what an earlier call has read, if the files have not changed since: their names,
sizes and times of change are part of the key. When the outermost `reading_once` ends, everything is dropped, so no data
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
LIMIT = 64  # results kept at most, the oldest dropped first (a table is one for each seed); few where memory is short
_KEPT: OrderedDict[Hashable, Any] = OrderedDict()
_LOCK = threading.Lock()
_open = 0  # how many `reading_once` have begun and not ended

if hasattr(os, "register_at_fork"):  # a child has nobody who would open a lock that is closed
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@contextmanager
def reading_once() -> Iterator[None]:
    """Keeps what `once` reads until the block ends; blocks may be nested, and overlap in threads."""
    global _open
    with _LOCK:
        _open += 1
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if not _open:
                _KEPT.clear()


def once(path: str | os.PathLike[str], options: Hashable, read: Callable[[], T]) -> T:
    """Returns `read()`, or the result of an earlier call with the same path, options and unchanged files.

    The result is shared by all callers, so none of them may write to it.
    """
    if not _open:
        return read()
    key = (os.path.realpath(path), options, _fingerprint(Path(path)))
    with _LOCK:
        if key in _KEPT:
            _KEPT.move_to_end(key)
            return _KEPT[key]
    found = read()
    with _LOCK:
        if _open:
            _KEPT[key] = found
            total, free = host_memory()
            while len(_KEPT) > (LIMIT if free >= total // 4 else 2):  # at least a frame and what is made of it
                _KEPT.popitem(last=False)
    return found


def _fingerprint(path: Path) -> Hashable:
    """What changes with the content of a file, or of the client files in a folder; None where it cannot be read."""
    try:
        if not path.is_dir():
            return _marks(path.stat())
        with os.scandir(path) as entries:
            return tuple(sorted((e.name, *_marks(e.stat())) for e in entries if e.name.endswith(".npz")))
    except OSError:
        return None


def _marks(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
