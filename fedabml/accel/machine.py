"""The machine that a process runs on: the names of its processor and of its GPUs."""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


@functools.cache
def _processor() -> str:
    """Return the processor's name or, where Linux knows none (ARM), the numbers of its maker and kind."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":") for line in reversed(lines))  # the first of several processors comes last
        facts = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "model name" in facts:
            return facts["model name"]
        if numbers := [f"{key[4:]} {facts[key]}" for key in ("CPU implementer", "CPU part") if key in facts]:
            return f"{platform.machine()}, {', '.join(numbers)}"
    return platform.processor() or platform.machine()
