"""What an experiment was asked for, kept beside its cells: it can be resumed as itself, and as nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files.sealed import read_json, write_json
from ..runs.config import Table, _flat, stored
from .cell import MACHINE


def read(folder: Path, command: str, needed: Collection[str] = ()) -> Table:
    """The request that `fedabml COMMAND` left in a folder, with the keys that are needed."""
    file = folder / f"{command}.json"
    if not file.is_file():
        raise InputError(f"'{folder}' holds nothing to resume: it has no {file.name}. Start without --resume.")
    saved = read_json(file)
    if not isinstance(saved, dict) or not saved.keys() >= {*needed}:
        raise InputError(f"'{file}' is not a request that fedabml {command} wrote. Give another folder with --out.")
    return saved | ({"run": stored(saved["run"])} if isinstance(saved.get("run"), dict) else {})


def claim(
    folder: Path,
    command: str,
    request: Table,
    resume: bool,
    free: Collection[str] = (),
    again: str = "--resume ",
    *,
    look: bool = False,
) -> None:
    """Makes a folder this request's. What was begun there goes on if it asked for the same.

    Keys that are `free` may differ if it is resumed in so many words; where and how `run` is computed always may.
    `again` are the words of the command that goes on with what was begun. Who only comes to `look` changes nothing.
    """
    file = folder / f"{command}.json"
    used = folder.is_dir() and any(not child.name.startswith(".") for child in folder.iterdir())
    if file.exists() or resume:  # looked for after the others: another process may begin the same here
        old, new = _flat(read(folder, command)), _flat(request)
        keys = sorted((old.keys() | new.keys()) - {f"run.{name}" for name in MACHINE})
        differ = [key for key in keys if old.get(key) != new.get(key)]
        bad = [key for key in differ if key not in free]
        words = "; ".join(f"{key} (was {_word(old.get(key))}, now {_word(new.get(key))})" for key in bad or differ)
        if bad or (differ and not resume):
            raise InputError(
                f"'{folder}' was started with other settings: {words}. Resume it as it was "
                f"(fedabml {command} {again}--out {shlex.quote(str(folder))}), or give another folder with --out."
            )
    elif used:
        raise InputError(f"'{folder}' holds other files. {command} wants a folder of its own: give another --out.")
    if not (look and file.exists()):
        write_json(file, request)


def _word(value: Any) -> str:
    return "unset" if value is None else repr(value)
