"""The machine that a process runs on: names of its hardware, free memory, and transfers to a device."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError


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
        fields = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "model name" in fields:
            return fields["model name"]
        if numbers := [f"{key[4:]} {fields[key]}" for key in ("CPU implementer", "CPU part") if key in fields]:
            return f"{platform.machine()}, {', '.join(numbers)}"
    return platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int:
    """Return how much memory a chunk may take: half of what a GPU has free, on a CPU at most 1 GiB.

    More gains nothing on a CPU. Where several processes share a GPU, $FEDABML_PROCESSES says how many: each takes its
    part of that half.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // (2 * _processes())
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = 1 << 31
    return min(free // 2, 1 << 30)


def _processes() -> int:
    text = os.environ.get("FEDABML_PROCESSES") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"FEDABML_PROCESSES, how many processes share a GPU, must be 1 or more, not '{text}'.")
    return int(text)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device, without waiting for what the device is at work on."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
