"""Files: written to a temporary name and renamed, read with suspicion. Tensors are safetensors; facts are JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .data.files import write_aside
from .errors import InputError

FACTS = "fedabml"  # the entry of a safetensors header that holds our JSON


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes a whole file or nothing: aside, flushed to disk, renamed."""
    with write_aside(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def write_json(path: str | os.PathLike[str], data: Any) -> Path:
    """Writes JSON that a person can read."""
    return write(path, json.dumps(data, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads JSON, or says what is wrong with the file."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"Cannot read '{path}': {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"'{path}' is not valid JSON ({error}); it is truncated or not ours.") from error


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Writes tensors with JSON facts in the header, one file."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return write(path, save(plain, {FACTS: json.dumps(facts)}))


def read_tensors(
    path: str | os.PathLike[str], only: Container[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `write_tensors` wrote; anything else (truncated, foreign, a pickle) is an InputError.

    All tensors are read, or only those named.
    """
    if not Path(path).is_file():
        raise InputError(f"There is no file '{path}'.")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {})[FACTS])
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise InputError(
            f"'{path}' is not a file that fedabml wrote: it is truncated, or of another kind ({type(error).__name__}). "
            "Only safetensors files are read; pickled checkpoints (.pt, .pth, .pkl) are refused, because loading one "
            "runs code."
        ) from error
    if not isinstance(facts, dict):
        raise InputError(f"'{path}' carries a header that fedabml did not write.")
    return tensors, facts


def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with 'prefix.', without it."""
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(prefix + ".")}


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `group`."""
    return {f"{prefix}.{name}": t for name, t in tensors.items()}
