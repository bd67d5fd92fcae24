"""Sizes and times as text, the same on every page and in every command."""

from __future__ import annotations


def size(value: float) -> str:
    """Format a number of bytes in the unit that fits, from B to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def duration(value: float) -> str:
    """Format seconds, as 4.2 s, 3 min 20 s or 2 h 5 min."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"


def clock(seconds: float) -> str:
    """Return a duration as h:mm:ss."""
    rounded = int(seconds + 0.5)
    return f"{rounded // 3600}:{rounded // 60 % 60:02d}:{rounded % 60:02d}"
