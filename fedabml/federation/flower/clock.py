"""Measure how long ago this process was started, before anything large is imported."""

from __future__ import annotations

import os
from pathlib import Path


def process_age() -> float:
    """Return the seconds since this process was started, or 0 where the system does not report it."""
    try:
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


BOOT = process_age()  # the package imports this module first
