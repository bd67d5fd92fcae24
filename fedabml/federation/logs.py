"""Read the logs of a federation's processes, and make texts from elsewhere safe to show."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import shortened


def one_line(text: Any, limit: int = 300) -> str:
    """Return a text from elsewhere as one printable line of bounded length, without control characters."""
    return shortened("".join(c if c.isprintable() else " " for c in str(text)[: 4 * limit]), limit)


def log_of(folder: Path, name: str) -> Path:
    """Return the log of a process of an operator's or a site's folder. `a-worker` is the worker of the local site a."""
    site, _, rest = name.rpartition("-")
    return folder / "local" / site / "run" / f"{rest}.log" if site else folder / "run" / f"{name}.log"


def tail(log: Path, size: int = 1500) -> str:
    """Return the end of a log as one line."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return one_line(" ".join(file.read().decode(errors="replace").split()), size)
    return "(no log)"


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return one_line(lines[-1].strip()) if lines else "(its log is empty)"
    return "(no log)"
