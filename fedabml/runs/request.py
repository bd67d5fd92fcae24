"""A request: what a command is to do. It is shown as a shell command, and compared when the command is resumed.

`train`, `compare`, `tune` and `reproduce` keep their request in their folder, so that each can go on as itself only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import shortened

Changes = dict[str, tuple[Any, Any]]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments of a command: a table as `--set TABLE.NAME=VALUE`, a tuple as a repeated flag."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, Mapping):
            for key, item in value.items():
                text = item if isinstance(item, str) else "none" if item is None else json.dumps(item)
                arguments += ["--set", f"{name}.{key}={text}"]
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            for item in value if isinstance(value, tuple) else (value,):
                arguments += [f"--{flag}", str(item)]
    return arguments


def command(name: str, arguments: Iterable[str], out: str | Path | None = None) -> str:
    """Return the shell command `fedabml NAME ARGUMENTS --out OUT`."""
    return shlex.join(["fedabml", name, *arguments, *(["--out", str(out)] if out else [])])


def resume_command(name: str, out: str | Path, more: Iterable[str] = ()) -> str:
    """Return the shell command that goes on with what was begun in a folder; `more` are further flags."""
    return command(name, ["--resume", *more], out)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as one table with dotted keys."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return result


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Return the dotted keys in which two nested tables differ, with both values; a missing value is None."""
    a, b = flat(old), flat(new)
    return {name: (a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)}


def describe(changes: Changes) -> str:
    """Return changes as text: `rounds (was 5, now 9); device (was 'cpu', now unset)`."""

    def as_text(value: Any) -> str:
        return "unset" if value is None else shortened(repr(value), 40)

    return "; ".join(f"{name} (was {as_text(old)}, now {as_text(new)})" for name, (old, new) in changes.items())
