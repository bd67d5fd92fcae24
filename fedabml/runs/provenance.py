"""Where numbers come from: by which code, on what hardware."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from pathlib import Path

import torch


@functools.cache
def code() -> str:
    """Tells one state of this package's code from another, also between two versions."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(each for each in package.rglob("*.py") if each.is_file()):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:10]


def hardware(device: torch.device) -> str:
    """The name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


@functools.cache
def _processor() -> str:
    """Its name or, where Linux tells none (ARM), the numbers of its maker and kind."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":") for line in reversed(lines))  # of several processors the first is told last
        told = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "model name" in told:
            return told["model name"]
        if numbers := [f"{key[4:]} {told[key]}" for key in ("CPU implementer", "CPU part") if key in told]:
            return f"{platform.machine()}, {', '.join(numbers)}"
    return platform.processor() or platform.machine()
