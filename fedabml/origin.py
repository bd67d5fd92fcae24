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
    package, digest = Path(__file__).parent, hashlib.sha256()
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
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
