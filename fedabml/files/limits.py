"""Limits of what is read: how deep and how long JSON and TOML may be, how large numbers, how much a file may declare.

Readers of a federation meet files of strangers. What goes beyond a limit is an `InputError`, before it costs memory.
"""

from __future__ import annotations

import json
import os
import tomllib
from typing import Any

from ..arguments import MOST
from ..errors import InputError

MAX_TOML = 256 << 10  # bytes of a TOML file: tomllib takes quadratic time for some of them
MAX_DEPTH = 64  # lists and tables inside each other, in JSON and TOML
MAX_ITEMS = 10_000_000  # entries of one JSON text: a list takes thirty times the bytes of its text
SMALL, MOST_PACKED = 64 << 20, 100  # a file may declare so many bytes, or so many times its own size


def parse_json(text: str, where: str) -> Any:
    """Parses JSON of bounded depth, length and numbers; anything else is an InputError."""
    if sum(map(text.count, ",[{")) > MAX_ITEMS:
        raise InputError(f"{where} has more than {MAX_ITEMS:,} entries, too many to be ours.")
    try:
        return _bounded(json.loads(text), where)
    except RecursionError as error:
        raise InputError(_too_deep(where)) from error
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON ({error}); it is truncated or not ours.") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parses TOML of bounded depth and numbers; a mistake in its grammar is tomllib's own TOMLDecodeError."""
    if any(line.count(".") > MAX_DEPTH and _parts(line) > MAX_DEPTH for line in text.split("\n")):
        raise InputError(_too_deep(where))  # tomllib's time and memory grow with the square of a key's parts
    try:
        found: dict[str, Any] = _bounded(tomllib.loads(text), where)
    except RecursionError as error:
        raise InputError(_too_deep(where)) from error
    except (InputError, tomllib.TOMLDecodeError):
        raise
    except ValueError as error:  # of a number with thousands of digits, or a date that there is not
        raise InputError(f"{where} has a value that cannot be read: {str(error).split(';')[0]}.") from error
    return found


def _parts(line: str) -> int:
    """How many parts a dotted key has that a line of TOML begins with; none where it begins with something else."""
    quote, escaped, parts = "", False, 1
    for mark in line:
        if quote:
            quote = "" if mark == quote and not escaped else quote
            escaped = mark == "\\" and quote == '"' and not escaped
        elif mark == ",":  # of a list, which goes on from the line before
            return 0
        elif mark == "=":
            return parts
        else:
            quote, parts = mark if mark in "\"'" else "", parts + (mark == ".")
    return parts


def _too_deep(where: str) -> str:
    return f"{where} has lists or tables nested more than {MAX_DEPTH} deep. Write it flatter."


def _bounded(data: Any, where: str) -> Any:
    """The data, if they are not nested too deeply and have no whole number beyond 64 bits."""
    level = [data]
    for _ in range(MAX_DEPTH + 2):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif type(each) is int and abs(each) > MOST:
                raise InputError(f"{where} has a whole number beyond {MOST}, the largest that is taken.")
        if not below:
            return data
        level = below
    raise InputError(_too_deep(where))


def check_unpacked(path: str | os.PathLike[str], packed: int, unpacked: int) -> None:
    """Refuses a file of `packed` bytes that declares so much content that reading it would exhaust the memory."""
    if unpacked > max(SMALL, MOST_PACKED * packed):
        raise InputError(
            f"'{path}' has {packed:,} bytes but declares a content of {unpacked:,}; it is damaged, or packed too "
            f"tightly. Write it again without compression, or in parts."
        )
    free = host_memory()[1]
    if 0 < free < unpacked:
        raise InputError(f"'{path}' holds {unpacked:,} bytes, but only {free:,} bytes of memory are free.")


def host_memory() -> tuple[int, int]:
    """Bytes of memory, and those that are free; zeros where the system does not say."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0, 0
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # what caches would give back is free, too
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return total, free
