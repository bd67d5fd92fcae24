"""Regular files and folders: written whole or not at all, read with suspicion, locked while a process works in them.

A file is written under a temporary name that nobody can guess and then renamed. Readers accept regular files of a
bounded size; a FIFO, a device or a folder is an `InputError`. `folder_lock` keeps two processes out of one folder.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import InputError

log = logging.getLogger("fedabml")
MAX_TEXT = 64 << 20  # bytes of a JSON or text file
Name = str | os.PathLike[str]
_NO_FOLLOW, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)  # not on every system
_TYPES = {"-": "a file", "d": "a folder", "p": "a FIFO", "s": "a socket", "l": "a link"}  # others are devices


@contextmanager
def explain_errors(path: Name, action: str, advice: str = "") -> Iterator[None]:
    """Turn an OSError into an InputError: what cannot be done to a path (`action`), why, and what to do."""
    try:
        yield
    except OSError as error:
        reason = f"'{path}' cannot be {action}: {error.strerror or error}."
        raise InputError(f"{reason} {advice}".rstrip()) from error


# -- writing --------------------------------------------------------------------------------------------------------
@contextmanager
def write_aside(path: Name, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a binary file that takes its name only once it is complete and flushed to disk.

    An existing regular file is replaced. A symbolic link stays, and the file it points to is replaced; in a folder that
    this process has locked a link is refused. A device, a FIFO and a folder are refused everywhere. Only the owner can
    read a `private` file.
    """
    with explain_errors(path, "written", "Free some space, or choose another place."):
        real = _target(Path(path))
        _make_folder(real.parent)
        aside = real.with_name(f".{real.name[:100]}.{secrets.token_hex(8)}.part")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600 if private else 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(real)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
        with suppress(OSError):  # on systems that can, the rename survives a power cut
            handle = os.open(real.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def write(path: Name, content: str | bytes, *, private: bool = False) -> Path:
    """Write a whole file or nothing. Only the owner can read a `private` file."""
    with write_aside(path, private=private) as file:
        # The text may name a path that is not UTF-8: its strange bytes become visible escapes.
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    return Path(path)


def open_append(path: Name) -> IO[bytes]:
    """Open a regular file to add bytes to its end. Raises InputError for a link, a FIFO or a device."""
    try:
        _make_folder(Path(path).parent)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | _NO_WAIT, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and os.path.lexists(path):
            raise InputError(_not_a_file(path, os.lstat(path).st_mode)) from error
        raise InputError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise InputError(_not_a_file(path, mode))
    return os.fdopen(handle, "ab")


def check_new(*paths: Name, force: bool = False) -> None:
    """Refuse a path that is taken. With `force` a regular file may be there."""
    for path in map(Path, paths):
        with explain_errors(path, "written", "Give another name."):
            exists = _target(path).exists()
        if exists and not force:
            raise InputError(f"'{path}' exists already. Give another name with --out, or replace it with --force.")


def _target(path: Path) -> Path:
    """Return the file that a path leads to, which need not exist. Raises InputError if it is no regular file."""
    try:
        folder = Path(os.path.realpath(path.parent))
        locked = any(folder.is_relative_to(lock.folder) for lock in _locks)
        real = path.resolve() if path.is_symlink() and not locked else path
        mode = real.lstat().st_mode
    except FileNotFoundError:
        return real
    except RuntimeError as error:  # pathlib of Python 3.11 raises it for a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    if not stat.S_ISREG(mode):
        raise InputError(_not_a_file(path, mode))
    return real


def _not_a_file(path: Name, mode: int) -> str:
    return f"'{path}' is {_type(mode)}, not a file, and is left alone. Remove it, or give another name."


def _type(mode: int) -> str:
    """Return what a path is, for error messages."""
    return _TYPES.get(stat.filemode(mode)[0], "a device")


# -- reading --------------------------------------------------------------------------------------------------------
@contextmanager
def open_regular(path: Name, limit: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file of at most `limit` bytes for reading. Raises InputError for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT)
    except FileNotFoundError as error:
        raise InputError(f"There is no file '{path}'.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise InputError(f"'{path}' is {_type(status.st_mode)}, not a file. Give a file's name.")
    with os.fdopen(handle, "rb") as file:
        if limit is not None and status.st_size > limit:
            raise InputError(f"'{path}' has {status.st_size:,} bytes; a file of this kind has at most {limit:,}.")
        with explain_errors(path, "read"):
            yield file


def read_bytes(path: Name, limit: int = MAX_TEXT) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_regular(path, limit) as file:
        return file.read(limit)


def read_text(path: Name, limit: int = MAX_TEXT) -> str:
    """Read a text file in UTF-8 of at most `limit` bytes."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not text in UTF-8 (byte {error.start}); it is damaged or no text.") from error


def readable_name(name: str) -> str:
    """Return a file's name as text for people, tables and JSON: bytes that are not UTF-8 become visible escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def cache_dir() -> Path:
    """Return the folder of what this machine may forget: $FEDABML_CACHE, else ~/.cache/fedabml."""
    named = os.environ.get("FEDABML_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedabml")  # noqa: PTH118
    return Path(os.path.expanduser(named))  # noqa: PTH111  pathlib's raises where there is no such home


# -- folders --------------------------------------------------------------------------------------------------------
class _Lock(NamedTuple):
    """A lock that this process holds on a folder: an open file in it."""

    folder: Path
    path: Path
    file: IO[bytes]

    def stands(self) -> bool:
        """Return whether the lock's file still has its name."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.lstat(self.path))
        except OSError:
            return False


_locks: list[_Lock] = []


@contextmanager
def folder_lock(folder: Name, name: str = ".lock", *, shared: bool = False) -> Iterator[None]:
    """Keep other processes from working in a folder. The folder is made if it does not exist.

    The lock belongs to the system and ends with the process, however that ends. Several processes may hold it `shared`,
    but not beside one that holds it alone (which the library filelock cannot do). A process that finds it held gets an
    InputError. So does a process that writes into a locked folder after the folder was removed or replaced.
    """
    path = Path(os.path.realpath(folder))
    with explain_errors(folder, "written", "Choose another place."):
        new_folders = _make_folder(path)
        if not path.is_dir():
            raise InputError(f"'{folder}' is {_type(path.stat().st_mode)}, not a folder. Give a folder's name.")
    while True:
        lock = _Lock(path, path / name, open_append(path / name))
        if not _acquire(lock.file, shared, folder):
            lock.file.close()
            raise InputError(f"Another process is at work in '{folder}'. Wait for it, or give another folder.")
        if lock.stands():
            break
        lock.file.close()  # the process that held it has removed the file in between
    _locks.append(lock)
    try:
        yield
    finally:
        _locks.remove(lock)
        with lock.file, suppress(OSError):
            if lock.stands() and (not shared or _acquire(lock.file, False, folder)):
                lock.path.unlink()
                for new_folder in new_folders:  # the folders that stayed empty, because nothing was begun
                    new_folder.rmdir()


def _acquire(file: IO[bytes], shared: bool, folder: Name) -> bool:
    """Take the system's lock on an open file; return False if another process holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            if not shared:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        log.warning("'%s' lies on a file system without locks: let no other process write into it.", folder)
    return True


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents, and return those that were made, innermost first.

    A folder that this process has locked is not made again: InputError if it was removed or replaced.
    """
    folder = Path(os.path.realpath(folder))
    held = [lock for lock in _locks if folder.is_relative_to(lock.folder)]
    for lock in held:
        if not lock.stands():
            raise InputError(
                f"'{lock.folder}' was removed or replaced while this process was at work in it. The process stops and "
                "writes nothing more."
            )
    missing = []
    while not folder.exists() and all(folder != lock.folder for lock in held):
        missing.append(folder)
        folder = folder.parent
    for new_folder in reversed(missing):
        new_folder.mkdir(exist_ok=True)
    return missing
