"""A request: what a command is to do. It is shown as a shell command, and compared when the command is resumed.

`train`, `compare`, `tune` and `reproduce` keep their request in their folder, so that each can go on as itself only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import short

Changes = dict[str, tuple[Any, Any]]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line: a table as `--set TABLE.NAME=VALUE`, a tuple as a repeated flag."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, Mapping):
            for key, each in value.items():
                words += ["--set", f"{name}.{key}={toml_value(each)}"]
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            for each in value if isinstance(value, tuple) else (value,):
                words += [f"--{flag}", str(each)]
    return words


def toml_value(value: Any) -> str:
    """Return a value as it is typed after `--set NAME=`."""
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def command(name: str, words: Iterable[str], out: str | Path | None = None) -> str:
    """Return the shell command `fedabml NAME WORDS --out OUT`."""
    return shlex.join(["fedabml", name, *words, *(["--out", str(out)] if out else [])])


def resume_command(name: str, out: str | Path) -> str:
    """Return the shell command that goes on with what was begun in a folder."""
    return command(name, ["--resume"], out)


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
    return "; ".join(f"{name} (was {_value(old)}, now {_value(new)})" for name, (old, new) in changes.items())


def _value(value: Any) -> str:
    return "unset" if value is None else short(repr(value), 40)
