"""Limits for files from strangers: the depth and length of JSON and TOML, the size of numbers and of unpacked content.

Whatever exceeds a limit raises an `InputError` before it costs memory.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from typing import Any

from ..arguments import MAX_INTEGER
from ..errors import InputError

MAX_TOML = 256 << 10  # bytes of a TOML file: tomllib needs quadratic time for some
MAX_DEPTH = 64  # nesting of lists and tables in JSON and TOML
MAX_ITEMS = 10_000_000  # entries of a JSON text: a list needs thirty times the bytes of its text
SMALL, MOST_PACKED = 64 << 20, 100  # a file may declare this many bytes, or this multiple of its own size


def parse_json(text: str, subject: str, loads: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON of bounded depth, length and numbers. Raises InputError for anything else; `loads` may be stricter."""
    if sum(map(text.count, ",[{")) > MAX_ITEMS:
        raise InputError(f"{subject} has more than {MAX_ITEMS:,} entries, more than fedabml writes.")
    return _parse(loads, text, subject, "is not valid JSON; it is truncated or of another program")


def parse_toml(text: str, subject: str) -> dict[str, Any]:
    """Parse TOML of bounded depth and numbers. Raises TOMLDecodeError for wrong grammar, InputError otherwise."""
    if any(line.count(".") > MAX_DEPTH and _parts(line) > MAX_DEPTH for line in text.split("\n")):
        raise InputError(_too_deep(subject))  # tomllib's time and memory are quadratic in a key's parts
    result: dict[str, Any] = _parse(tomllib.loads, text, subject, "has a value that cannot be read")
    return result


def _parse(loads: Callable[[str], Any], text: str, subject: str, problem: str) -> Any:
    """Return `loads(text)`, if it is bounded. `problem` describes other errors than those of TOML's grammar."""
    try:
        return _bounded(loads(text), subject)
    except RecursionError as error:
        raise InputError(_too_deep(subject)) from error
    except (InputError, tomllib.TOMLDecodeError):
        raise
    except ValueError as error:  # in TOML a number with thousands of digits, or an impossible date
        raise InputError(f"{subject} {problem} ({str(error).split(';')[0]}).") from error


def _parts(line: str) -> int:
    """Return the number of parts of the dotted key at the start of a TOML line; 0 if it starts with something else."""
    quote, escaped, parts = "", False, 1
    for mark in line:
        if quote:
            quote = "" if mark == quote and not escaped else quote
            escaped = mark == "\\" and quote == '"' and not escaped
        elif mark == ",":  # the line continues a list
            return 0
        elif mark == "=":
            return parts
        else:
            quote, parts = mark if mark in "\"'" else "", parts + (mark == ".")
    return parts


def _too_deep(subject: str) -> str:
    return f"{subject} has lists or tables nested more than {MAX_DEPTH} deep. Write it flatter."


def _bounded(data: Any, subject: str) -> Any:
    """Return the data. Raises InputError if they are nested too deeply or have a whole number beyond 64 bits."""
    level = [data]
    for _ in range(MAX_DEPTH + 2):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif type(value) is int and abs(value) > MAX_INTEGER:
                raise InputError(
                    f"{subject} has a whole number beyond {MAX_INTEGER}, the largest that fedabml accepts."
                )
        if not below:
            return data
        level = below
    raise InputError(_too_deep(subject))


def check_unpacked(path: str | os.PathLike[str], packed: int, unpacked: int) -> None:
    """Refuse a file of `packed` bytes whose declared content would exhaust the memory."""
    if unpacked > max(SMALL, MOST_PACKED * packed):
        raise InputError(
            f"'{path}' has {packed:,} bytes but declares a content of {unpacked:,}; it is damaged, or packed too "
            f"tightly. Write it again without compression, or in parts."
        )
    free = host_memory()[1]
    if 0 < free < unpacked:
        raise InputError(f"'{path}' holds {unpacked:,} bytes, but only {free:,} bytes of memory are free.")


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory in all and free; zeros if the system does not report them."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0, 0
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # this also counts what caches would give back
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return total, free
