"""What an experiment was asked for, kept beside its cells: it can be resumed as itself, and as nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from ..errors import InputError
from ..files.sealed import read_json, write_json
from ..runs.config import Table, stored
from ..runs.request import describe, differences
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
        found, machine = differences(read(folder, command), request), {f"run.{name}" for name in MACHINE}
        differ = {key: pair for key, pair in found.items() if key not in machine}
        bad = {key: pair for key, pair in differ.items() if key not in free}
        if bad or (differ and not resume):
            raise InputError(
                f"'{folder}' was started with other settings: {describe(bad or differ)}. Resume it as it was "
                f"(fedabml {command} {again}--out {shlex.quote(str(folder))}), or give another folder with --out."
            )
    elif used:
        raise InputError(f"'{folder}' holds other files. {command} wants a folder of its own: give another --out.")
    if not (look and file.exists()):
        write_json(file, request)
