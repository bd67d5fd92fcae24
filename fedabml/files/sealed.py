"""Sealed files: JSON, lines of JSON, editable text and tensors that carry the SHA-256 digest of their content.

A dictionary is sealed by two keys, `sealed` and `sha256`; tensors are safetensors files with our JSON metadata,
sealed in the same way, in their header. A file whose content does not fit its digest is refused. Files written before
digests were introduced have no such keys, and are read unchecked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import InputError
from .limits import parse_json
from .paths import Name, open_regular, read_text, write

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fedabml")

FACTS = "fedabml"  # the entry of a safetensors header that holds our JSON
SEAL = ("sealed", "sha256")  # two keys, so that damage to the name of one does not pass for a file without a digest
MAX_HEADER = 32 << 20  # bytes of a safetensors header
_UNSEALED = "0" * 64  # stands for a file's digest while that digest is computed
_ABOVE = "# sha256 of the lines above: "


# -- dictionaries and text ------------------------------------------------------------------------------------------
def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary with its seal: `sealed`, and the digest of everything else in `sha256`."""
    stored = json.loads(json.dumps(data))  # the digest is that of the content as a reader of the JSON sees it
    return {**_seal(hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()), **data}


def unsealed(data: dict[str, Any], subject: str) -> dict[str, Any]:
    """Return a dictionary without its seal. Raises InputError if its content does not fit its digest."""
    content = _content(data)
    if len(content) < len(data) and data != sealed(content):
        raise InputError(damaged(subject))
    return content


def _seal(digest: str) -> dict[str, Any]:
    return dict(zip(SEAL, (True, digest), strict=True))


def _content(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in SEAL}


def damaged(subject: str) -> str:
    """Return the sentence for a file whose content does not fit its digest."""
    return f"{subject} is damaged or was changed: its content does not fit its SHA-256 digest. Restore it from a copy."


def write_json(path: Name, data: Any, indent: int | None = 2) -> Path:
    """Write JSON; a dictionary is sealed with its digest."""
    return write(path, json.dumps(sealed(data) if isinstance(data, dict) else data, indent=indent) + "\n")


def sealed_line(data: dict[str, Any]) -> str:
    """Return a dictionary as a line of a .jsonl file, sealed with its digest."""
    return json.dumps(sealed(data)) + "\n"


def parse_sealed(text: str, subject: str) -> Any:
    """Parse JSON and check the seal of a dictionary."""
    data = parse_json(text, subject)
    return unsealed(data, subject) if isinstance(data, dict) else data


def read_json(path: Name) -> Any:
    """Read JSON and check the seal of a dictionary."""
    return parse_sealed(read_text(path), f"'{path}'")


def sealed_text(text: str) -> str:
    """Return a text with its digest in a comment at the end, for a file that people may edit."""
    content = text.encode("utf-8", "backslashreplace")  # as `write` does
    return f"{content.decode()}{_ABOVE}{hashlib.sha256(content).hexdigest()}\n"


def warn_if_changed(text: str, path: Name) -> None:
    """Log a warning if the text of a file does not fit the digest at its end."""
    above, mark, digest = text.rpartition(_ABOVE)
    if mark and hashlib.sha256(above.encode()).hexdigest() != digest.strip():
        log.warning("'%s' was changed since it was written. If you changed it on purpose, remove its last line.", path)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of those named files that are in a folder, to be kept in a sealed file beside them."""
    result = {}
    for name in names:
        if (folder / name).is_file():
            with open_regular(folder / name) as file:
                result[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return result


def check_digest(content: bytes, digest: Any, subject: str) -> bytes:
    """Return the content if it has this digest, or if no digest was kept (None). Raises InputError otherwise."""
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise InputError(damaged(subject))
    return content


# -- tensors --------------------------------------------------------------------------------------------------------
def write_tensors(path: Name, tensors: dict[str, Tensor], metadata: dict[str, Any], *, private: bool = False) -> Path:
    """Write tensors to a safetensors file, with JSON metadata and the digest of the whole file in the header."""
    raw, digest = packed_tensors(tensors, metadata)
    return write(path, raw.replace(_UNSEALED.encode(), digest.encode(), 1), private=private)


def packed_tensors(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> tuple[bytes, str]:
    """Return the content of a tensor file before it is sealed, and the digest that seals it."""
    from safetensors.torch import save

    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    raw = save(copies, {FACTS: json.dumps(metadata | _seal(_UNSEALED))})
    return raw, hashlib.sha256(raw).hexdigest()


def read_tensors(path: Name) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote: its tensors and its metadata.

    The digest of the whole file is checked first. Raises InputError for a damaged, truncated or foreign file.
    """
    from safetensors import SafetensorError, safe_open

    metadata = check_tensors(path)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:
        raise InputError(_foreign(path, type(error).__name__)) from error


def check_tensors(path: Name) -> dict[str, Any]:
    """Check the digest of a file that `write_tensors` wrote, and return its metadata."""
    with open_regular(path) as file:
        start, header, metadata = _header(file, path)
        content, digest = _content(metadata), metadata.get("sha256")
        if len(content) == len(metadata):
            log.info("'%s' was written before files carried a digest, so it cannot be checked for damage.", path)
            return content
        if not isinstance(digest, str) or header.count(digest.encode()) != 1:
            raise InputError(damaged(f"'{path}'"))
        computed = hashlib.sha256(start + header.replace(digest.encode(), _UNSEALED.encode()))
        while part := file.read(1 << 20):
            computed.update(part)
    if metadata != content | _seal(computed.hexdigest()):
        raise InputError(damaged(f"'{path}'"))
    return content


def tensors_digest(path: Name) -> str | None:
    """Return the digest that a file of `write_tensors` carries; None if it was written before files carried one."""
    with open_regular(path) as file:
        return _header(file, path)[2].get("sha256")


def _header(file: IO[bytes], path: Name) -> tuple[bytes, bytes, dict[str, Any]]:
    """Read the start of a tensor file: the eight bytes of its header's length, the header, and our metadata in it."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    header = file.read(length) if length <= MAX_HEADER else b""
    try:
        entries = parse_json(header.decode(), "its header")
        metadata = parse_json(entries["__metadata__"][FACTS], "its header")
        metadata.get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".") if isinstance(error, InputError) else type(error).__name__
        raise InputError(_foreign(path, reason)) from error
    return start, header, metadata


def _foreign(path: Name, reason: str) -> str:
    return (
        f"'{path}' is not a file that fedabml wrote: it is truncated, or of another kind ({reason}). fedabml reads "
        "safetensors files only and refuses pickled checkpoints (.pt, .pth, .pkl), because loading one runs code."
    )


def group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with 'prefix.', without the prefix."""
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(prefix + ".")}


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with 'prefix.' before their names; the inverse of `group`."""
    return {f"{prefix}.{name}": t for name, t in tensors.items()}


def tensor_bytes(tensor: Tensor) -> memoryview | bytes:
    """Return the values of a tensor as bytes, the last dimension fastest, for a digest or a message."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
