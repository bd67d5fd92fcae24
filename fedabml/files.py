"""Files: written whole or not at all, sealed with a digest, and read with suspicion.

A file is written under a temporary name that nobody can guess and then renamed. Tensors are safetensors and facts are
JSON; both carry `sealed` and `sha256`, so that a damaged file is refused rather than used. Readers take regular files
only, of a bounded size: a FIFO, a device or a file that declares more than it holds ends in an `InputError`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fedabml")

FACTS = "fedabml"  # the entry of a safetensors header that holds our JSON
SEAL = ("sealed", "sha256")  # two keys, so that damage to the name of one does not pass for a file without a digest
MAX_TEXT = 64 << 20  # bytes of a JSON or text file
MAX_HEADER = 32 << 20  # bytes of a safetensors header
_UNSEALED = "0" * 64  # stands for a file's digest while that digest is computed
Name = str | os.PathLike[str]


# -- writing --------------------------------------------------------------------------------------------------------
@contextmanager
def write_aside(path: Name, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Opens a binary file that takes its name only once it is complete and flushed to disk.

    An existing regular file is replaced; a symbolic link stays, and the file it points to is replaced. Anything else
    (a device, a FIFO, a folder) is refused. A `private` file can be read by its owner alone.
    """
    path, aside = Path(path), None
    try:
        real = _target(path)
        real.parent.mkdir(parents=True, exist_ok=True)
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
        real = path.resolve() if path.is_symlink() else path
        mode = real.lstat().st_mode
    except FileNotFoundError:
        return real
    except RuntimeError as error:  # what pathlib of Python 3.11 makes of a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    if not stat.S_ISREG(mode):
        raise InputError(f"'{path}' is {_kind(mode)}, not a file, and is left alone. Give a file's name.")
    return real


def _kind(mode: int) -> str:
    """What a path is, in words."""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISLNK: "a link"}
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
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def write_json(path: Name, data: Any) -> Path:
    """Writes JSON that a person can read; a dictionary is sealed with its digest."""
    return write(path, json.dumps(sealed(data) if isinstance(data, dict) else data, indent=2) + "\n")


def write_tensors(path: Name, tensors: dict[str, Tensor], facts: dict[str, Any], *, private: bool = False) -> Path:
    """Writes tensors, with JSON facts and the digest of the whole file in the header."""
    from safetensors.torch import save

    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    raw = save(plain, {FACTS: json.dumps(facts | _seal(_UNSEALED))})
    digest = hashlib.sha256(raw).hexdigest()
    return write(path, raw.replace(_UNSEALED.encode(), digest.encode(), 1), private=private)


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


def _digest(data: dict[str, Any]) -> str:
    """The digest of a dictionary as it is after a journey through JSON."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(data)), sort_keys=True).encode()).hexdigest()


# -- reading --------------------------------------------------------------------------------------------------------
@contextmanager
def open_regular(path: Name, limit: int | None = None) -> Iterator[IO[bytes]]:
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


def parse_json(text: str, where: str) -> Any:
    """Parses JSON; what is no JSON, nested too deeply or holds an endless number is an InputError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InputError(f"{where} is nested too deeply to be ours.") from error
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON ({error}); it is truncated or not ours.") from error


def read_json(path: Name) -> Any:
    """Reads JSON and checks the seal of a dictionary."""
    data = parse_json(read_text(path), f"'{path}'")
    return unsealed(data, f"'{path}'") if isinstance(data, dict) else data


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
        start = file.read(8)
        length = int.from_bytes(start, "little")
        header = file.read(length) if length <= MAX_HEADER else b""
        try:
            entries = json.loads(header) if len(start) == 8 else None
            facts = json.loads(entries["__metadata__"][FACTS])  # type: ignore[index]
            digest = facts.get("sha256")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(_foreign(path, type(error).__name__)) from error
        content = _content(facts)
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
