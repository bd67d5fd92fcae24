"""Provenance of results: which code made them, and on which hardware."""

from __future__ import annotations

from ..accel.machine import hardware
from ..version import code

__all__ = ["code", "hardware"]
