"""Files: written whole or not at all, sealed with a digest, and read with suspicion.

A file is written under a temporary name that nobody can guess and then renamed. Tensors are safetensors and facts are
JSON; both carry `sealed` and `sha256`, so that a damaged file is refused rather than used. Readers take regular files
only, of a bounded size: a FIFO, a device or a file that declares more than it holds ends in an `InputError`.
`folder_lock` keeps two processes from writing into one folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import stat
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError
from .limits import parse_json

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fedabml")

FACTS = "fedabml"  # the entry of a safetensors header that holds our JSON
SEAL = ("sealed", "sha256")  # two keys, so that damage to the name of one does not pass for a file without a digest
MAX_TEXT = 64 << 20  # bytes of a JSON or text file
MAX_HEADER = 32 << 20  # bytes of a safetensors header
_UNSEALED = "0" * 64  # stands for a file's digest while that digest is computed
_ABOVE = "# sha256 of the lines above: "
Name = str | os.PathLike[str]


# -- writing --------------------------------------------------------------------------------------------------------
@contextmanager
def write_aside(path: Name, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Opens a binary file that takes its name only once it is complete and flushed to disk.

    An existing regular file is replaced; a symbolic link stays, and the file it points to is replaced, but in a folder
    that this process has locked links are refused, for nobody but us writes there. Anything else (a device, a FIFO, a
    folder) is refused. A `private` file can be read by its owner alone.
    """
    path, aside = Path(path), None
    try:
        real = _target(path)
        _make_folder(real.parent)
        fresh = real.with_name(f".{real.name[:100]}.{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(fresh, flags, 0o600 if private else 0o666)
        aside = fresh
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(real)
        aside = None
        _sync(real.parent)
    except OSError as error:
        way = "Free some space" if error.errno == errno.ENOSPC else "Choose another place"
        raise InputError(f"'{path}' cannot be written: {error.strerror or error}. {way}.") from error
    finally:
        if aside is not None:
            with suppress(OSError):
                aside.unlink()


def _target(path: Path) -> Path:
    """The file that a path stands for, or will; an InputError where that is no regular file."""
    try:
        folder = Path(os.path.realpath(path.parent))
        ours = any(folder.is_relative_to(lock.folder) for lock in _locks)
        real = path.resolve() if path.is_symlink() and not ours else path
        mode = real.lstat().st_mode
    except FileNotFoundError:
        return real
    except RuntimeError as error:  # what pathlib of Python 3.11 makes of a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    if not stat.S_ISREG(mode):
        raise InputError(_not_a_file(path, mode))
    return real


def open_append(path: Name) -> IO[bytes]:
    """Opens a regular file to add bytes to its end; a link, a FIFO or a device is an InputError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        _make_folder(Path(path).parent)
        handle = os.open(path, flags, 0o666)
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
    """Refuses a path where a file stands already, unless `force` is given, and whatever is no regular file."""
    for path in map(Path, paths):
        try:
            exists = _target(path).exists()
        except OSError as error:
            raise InputError(f"'{path}' cannot be written: {error.strerror or error}. Give another name.") from error
        if exists and not force:
            raise InputError(f"'{path}' exists already. Give another name with --out, or replace it with --force.")


def _not_a_file(path: Name, mode: int) -> str:
    return f"'{path}' is {_kind(mode)}, not a file, and is left alone. Remove it, or give another name."


def _kind(mode: int) -> str:
    """What a path is, in words."""
    kinds = {
        stat.S_ISREG: "a file",
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISLNK: "a link",
    }
    return next((words for test, words in kinds.items() if test(mode)), "a device")


def _sync(folder: Path) -> None:
    """Makes a rename survive a power cut, on systems that can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write(path: Name, content: str | bytes, *, private: bool = False) -> Path:
    """Writes a whole file or nothing."""
    with write_aside(path, private=private) as file:
        # A path that is not UTF-8 may stand in the text: its strange bytes become visible escapes.
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    return Path(path)


def write_json(path: Name, data: Any, indent: int | None = 2) -> Path:
    """Writes JSON, by default so that a person can read it; a dictionary is sealed with its digest."""
    return write(path, json.dumps(sealed(data) if isinstance(data, dict) else data, indent=indent) + "\n")


def sealed_line(data: dict[str, Any]) -> str:
    """The dictionary as a line of a .jsonl file, sealed with its digest."""
    return json.dumps(sealed(data)) + "\n"


def write_tensors(path: Name, tensors: dict[str, Tensor], facts: dict[str, Any], *, private: bool = False) -> Path:
    """Writes tensors, with JSON facts and the digest of the whole file in the header."""
    raw, digest = packed_tensors(tensors, facts)
    return write(path, raw.replace(_UNSEALED.encode(), digest.encode(), 1), private=private)


def packed_tensors(tensors: dict[str, Tensor], facts: dict[str, Any]) -> tuple[bytes, str]:
    """The content of a tensor file before it is sealed, and the digest that seals it."""
    from safetensors.torch import save

    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    raw = save(plain, {FACTS: json.dumps(facts | _seal(_UNSEALED))})
    return raw, hashlib.sha256(raw).hexdigest()


# -- folders --------------------------------------------------------------------------------------------------------
class _Lock(NamedTuple):
    """A lock that this process holds on a folder: an open file in it."""

    folder: Path
    path: Path
    file: IO[bytes]

    def stands(self) -> bool:
        """Whether the lock's file is still where it was when it was locked."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.lstat(self.path))
        except OSError:
            return False


_locks: list[_Lock] = []


@contextmanager
def folder_lock(folder: Name, name: str = ".lock", *, shared: bool = False) -> Iterator[None]:
    """Keeps other processes from working in a folder, which is made where there is none.

    The lock belongs to the system and ends with the process, however that ends. Several processes may hold it `shared`,
    but not beside one that holds it alone. Whoever finds it held gets an InputError, and so does whoever writes into
    the folder after it was removed or replaced: it does not come back with some of its files.
    """
    path = Path(os.path.realpath(folder))
    try:
        made = _make_folder(path)
        if not path.is_dir():
            raise InputError(f"'{folder}' is {_kind(path.stat().st_mode)}, not a folder. Give a folder's name.")
    except OSError as error:
        raise InputError(f"'{folder}' cannot be written: {error.strerror or error}. Choose another place.") from error
    lock = None
    while lock is None or not lock.stands():  # whoever held it may have removed the file in between
        if lock is not None:
            lock.file.close()
        lock = _Lock(path, path / name, open_append(path / name))
        if not _acquire(lock.file, shared, folder):
            lock.file.close()
            raise InputError(f"Another process is at work in '{folder}'. Wait for it, or give another folder.")
    _locks.append(lock)
    try:
        yield
    finally:
        _locks.remove(lock)
        with lock.file, suppress(OSError):
            if lock.stands() and (not shared or _acquire(lock.file, False, folder)):
                lock.path.unlink()
                for each in made:  # those that stayed empty, because nothing was begun
                    each.rmdir()


def _acquire(file: IO[bytes], shared: bool, folder: Name) -> bool:
    """Takes the system's lock on an open file; False where another process has it."""
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
    """Makes a folder and those above it, and returns what was made, innermost first.

    A folder that this process has locked is not made again: an InputError where it was removed or replaced.
    """
    folder = Path(os.path.realpath(folder))
    held = [lock for lock in _locks if lock.folder == folder or lock.folder in folder.parents]
    for lock in held:
        if not lock.stands():
            raise InputError(
                f"'{lock.folder}' was removed or replaced while this process was at work in it. It stops here and "
                "writes nothing more."
            )
    missing = []
    while not folder.exists() and all(folder != lock.folder for lock in held):
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
    return missing


# -- digests --------------------------------------------------------------------------------------------------------
def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """The dictionary with its seal: `sealed`, and the digest of everything else in `sha256`."""
    return {**_seal(_digest(data)), **data}


def unsealed(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The dictionary without its seal; an InputError if its content is not what was sealed.

    What was written before files were sealed has no such keys and is returned as it is.
    """
    rest = _content(data)
    if len(rest) < len(data) and data != rest | _seal(_digest(rest)):
        raise InputError(damaged(where))
    return rest


def _seal(digest: str) -> dict[str, Any]:
    return dict(zip(SEAL, (True, digest), strict=True))


def _content(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in SEAL}


def damaged(where: str) -> str:
    """The sentence for a file whose content does not fit its digest."""
    return f"{where} is damaged or was changed: its content does not fit its SHA-256 digest. Restore it from a copy."


def sealed_text(text: str) -> str:
    """The text with its digest in a comment at the end, for a file that people may edit."""
    content = text.encode("utf-8", "backslashreplace")  # as `write` does
    return f"{content.decode()}{_ABOVE}{hashlib.sha256(content).hexdigest()}\n"


def warn_if_changed(text: str, path: Name) -> None:
    """Logs a warning where the text of a file does not fit the digest at its end."""
    above, mark, digest = text.rpartition(_ABOVE)
    if mark and hashlib.sha256(above.encode()).hexdigest() != digest.strip():
        log.warning("'%s' was changed since it was written. If that was meant, remove its last line.", path)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 digests of those of the named files that are in a folder, to be kept in a sealed file beside them."""
    found = {}
    for name in names:
        if (folder / name).is_file():
            with open_regular(folder / name) as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_digest(content: bytes, digest: Any, where: str) -> bytes:
    """The content, if its digest is this one; where none was kept (None), it cannot be checked."""
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise InputError(damaged(where))
    return content


def _digest(data: dict[str, Any]) -> str:
    """The digest of a dictionary as it is after a journey through JSON."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(data)), sort_keys=True).encode()).hexdigest()


# -- reading --------------------------------------------------------------------------------------------------------
@contextmanager
def open_regular(path: Name, limit: int | None = None) -> Iterator[BufferedReader]:
    """Opens a regular file to read bytes from, of at most `limit` bytes; anything else is an InputError."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        raise InputError(f"There is no file '{path}'.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise InputError(f"'{path}' is {_kind(found.st_mode)}, not a file. Give a file's name.")
    with os.fdopen(handle, "rb") as file:
        if limit is not None and found.st_size > limit:
            raise InputError(f"'{path}' has {found.st_size:,} bytes; a file of this kind has at most {limit:,}.")
        try:
            yield file
        except OSError as error:
            raise InputError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def read_bytes(path: Name, limit: int = MAX_TEXT) -> bytes:
    """Reads a regular file of at most `limit` bytes."""
    with open_regular(path, limit) as file:
        return file.read(limit)


def read_text(path: Name, limit: int = MAX_TEXT) -> str:
    """Reads a text file in UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not text in UTF-8 (byte {error.start}); it is damaged or not ours.") from error


def parse_sealed(text: str, where: str) -> Any:
    """Parses JSON and checks the seal of a dictionary."""
    data = parse_json(text, where)
    return unsealed(data, where) if isinstance(data, dict) else data


def read_json(path: Name) -> Any:
    """Reads JSON and checks the seal of a dictionary."""
    return parse_sealed(read_text(path), f"'{path}'")


def read_tensors(path: Name, only: Container[str] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `write_tensors` wrote; anything else (truncated, foreign, damaged, a pickle) is an InputError.

    All tensors are returned, or only those named. The digest of the whole file is checked either way.
    """
    from safetensors import SafetensorError, safe_open

    facts = check_tensors(path)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}, facts
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:
        raise InputError(_foreign(path, type(error).__name__)) from error


def check_tensors(path: Name) -> dict[str, Any]:
    """Checks the digest of a file that `write_tensors` wrote and returns its facts."""
    with open_regular(path) as file:
        start, header, facts = _header(file, path)
        content, digest = _content(facts), facts.get("sha256")
        if len(content) == len(facts):
            log.info("'%s' was written before files carried a digest, so it cannot be checked for damage.", path)
            return content
        if not isinstance(digest, str) or header.count(digest.encode()) != 1:
            raise InputError(damaged(f"'{path}'"))
        found = hashlib.sha256(start + header.replace(digest.encode(), _UNSEALED.encode()))
        while part := file.read(1 << 20):
            found.update(part)
    if facts != content | _seal(found.hexdigest()):
        raise InputError(damaged(f"'{path}'"))
    return content


def tensors_digest(path: Name) -> str | None:
    """The digest that a file of `write_tensors` carries; None where it was written before files carried one."""
    with open_regular(path) as file:
        return _header(file, path)[2].get("sha256")


def _header(file: IO[bytes], path: Name) -> tuple[bytes, bytes, dict[str, Any]]:
    """The start of a tensor file: the length of its header, the header, and our facts in it."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    header = file.read(length) if length <= MAX_HEADER else b""
    try:
        entries = parse_json(header.decode(), "its header")
        facts = parse_json(entries["__metadata__"][FACTS], "its header")
        facts.get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".") if isinstance(error, InputError) else type(error).__name__
        raise InputError(_foreign(path, reason)) from error
    return start, header, facts


def _foreign(path: Name, reason: str) -> str:
    return (
        f"'{path}' is not a file that fedabml wrote: it is truncated, or of another kind ({reason}). "
        "Only safetensors files are read; pickled checkpoints (.pt, .pth, .pkl) are refused, because loading one "
        "runs code."
    )


# -- names of tensors -----------------------------------------------------------------------------------------------
def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with 'prefix.', without it."""
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(prefix + ".")}


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `group`."""
    return {f"{prefix}.{name}": t for name, t in tensors.items()}


def real(path: Name) -> str:
    """The path without links and from the root, also where links lead in a circle."""
    return os.path.realpath(path)


def readable_name(name: str) -> str:
    """The name of a file as text for people, tables and JSON: bytes that are not UTF-8 become visible escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
