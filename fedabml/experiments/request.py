"""The request of an experiment, kept beside its cells: an experiment can be resumed as itself, and as nothing else.

`compare`, `tune` and `reproduce` each write their request into their folder as JSON and claim the folder with it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path

from ..errors import InputError
from ..files.sealed import read_json, write_json
from ..models import is_folder
from ..runs.config import JsonDict, RunConfig, upgrade_config
from ..runs.request import describe, differences
from .cell import MACHINE


def request_file(folder: Path, command: str) -> Path:
    """Return the file that `fedabml COMMAND` keeps its request in."""
    return folder / ("comparison.json" if command == "compare" else f"{command}.json")


def real_paths(config: RunConfig) -> JsonDict:
    """Return the paths of a run as they hold from every working folder."""
    names = ("data", "pretrained", *(("model",) if is_folder(config.model) else ()))
    return {name: os.path.realpath(path) for name in names if (path := getattr(config, name))}


def read(folder: Path, command: str, needed: Collection[str] = ()) -> JsonDict:
    """Return the request that `fedabml COMMAND` left in a folder; it must have the keys that are `needed`."""
    file = request_file(folder, command)
    if not file.is_file():
        raise InputError(f"'{folder}' holds nothing to resume: it has no {file.name}. Start without --resume.")
    saved = read_json(file)
    if not isinstance(saved, dict) or not saved.keys() >= {*needed}:
        raise InputError(f"'{file}' is not a request that fedabml {command} wrote. Give another folder with --out.")
    return saved | ({"run": upgrade_config(saved["run"])} if isinstance(saved.get("run"), dict) else {})


def begun(folder: Path, command: str) -> bool:
    """Return whether a request was begun in a folder; refuse a folder with other files, hidden ones aside."""
    used = folder.is_dir() and any(not child.name.startswith(".") for child in folder.iterdir())
    if request_file(folder, command).exists():  # looked for last: another process may begin the same here
        return True
    if used:
        raise InputError(f"'{folder}' holds other files. {command} needs a folder of its own: give another --out.")
    return False


def refuse_changes(folder: Path, command: str, saved: JsonDict, request: JsonDict, free: Collection[str]) -> None:
    """Raise InputError where a request differs from the one that a folder was begun with, but for `free` keys."""
    changes = {key: pair for key, pair in differences(saved, request).items() if key not in free}
    if changes:
        again = f"{saved['experiment']} …" if "experiment" in saved else "--resume"
        raise InputError(
            f"'{folder}' was started with other settings: {describe(changes)}. Resume it as it was "
            f"(fedabml {command} {again} --out {shlex.quote(str(folder))}), or give another folder with --out."
        )


def claim(
    folder: Path, command: str, request: JsonDict, resume: bool, free: Collection[str] = (), *, write: bool = True
) -> None:
    """Make a folder this request's; refuse it where another request was begun there.

    With `resume`, keys that are `free` may differ; the keys of `run` that say where and how it is computed always may.
    Without `write` the request is only checked.
    """
    if resume or begun(folder, command):
        may_differ = {f"run.{name}" for name in MACHINE} | ({*free} if resume else set())
        refuse_changes(folder, command, read(folder, command, ("run",)), request, may_differ)
    if write:
        write_json(request_file(folder, command), request)
