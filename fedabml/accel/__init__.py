"""What makes the mathematics faster without changing its results, and every switch of the whole process.

| part | what it does | where |
|---|---|---|
| `recorder` | replays a step's plain operations, without the transforms of `torch.func` | recorder.py |
| `passes` | computes elementwise operations of a recorded step in few passes, in C | fused_passes.py, fusible.py |
| `twister` | draws torch's random numbers on a CPU several at a time, in C | mersenne.py, mersenne.c |
| `convolutions` | computes many clients' products as batched ones | convolutions.py, narrow.py, pooling.py |
| `triton` | has GPU kernels for noise, keys, convolutions and products | triton_kernels.py |
| `graphs` | captures steps and rounds as CUDA graphs | engine/programs.py |
| `threads` | gives worker threads on a CPU clients of their own | engine/workers.py |
| `process` | sets torch's, the allocator's and OpenMP's process-wide switches | process.py, this file |

`FEDABML_PLAIN=1` in the environment leaves all of them out; `FEDABML_PLAIN=recorder,twister` leaves out those two.
Switches that decide results (torch's default type, TF32, cuDNN's repeatable algorithms) are set all the same.
Results agree to rounding: 1e-9 in float64 and, for one step, 1e-5 in float32. This file imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SWITCHABLE = ("recorder", "passes", "twister", "convolutions")  # parts that are looked up in every step
PARTS = ("recorder", "passes", "twister", "convolutions", "triton", "graphs", "threads", "process")
WAIT_POLICY = "OMP_WAIT_POLICY"


def _parse(value: str) -> frozenset[str]:
    """Return the parts that a value of $FEDABML_PLAIN leaves out; an InputError names what is no part."""
    names = {name.strip() for name in value.split(",")} - {"", "0"}
    if unknown := names - {*PARTS, "1"}:
        from ..errors import InputError  # here, because this file is imported before Ctrl-C is handled

        raise InputError(f"FEDABML_PLAIN names {', '.join(sorted(unknown))}; use 1, or some of {', '.join(PARTS)}.")
    return frozenset(PARTS if "1" in names else names)


_left_out: frozenset[str] | None = None  # None until $FEDABML_PLAIN is first needed
_owned = False


def left_out() -> frozenset[str]:
    """Return the parts that are not in use; an InputError if $FEDABML_PLAIN names what is no part."""
    global _left_out
    if _left_out is None:
        _left_out = _parse(os.environ.get("FEDABML_PLAIN", ""))
    return _left_out


def enabled(part: str) -> bool:
    """Return whether a part (one of `PARTS`) is in use."""
    return part not in left_out()


def leave_out(parts: Collection[str]) -> None:
    """Leave out these parts from now on, and no others; benchmarks switch `SWITCHABLE` ones between rounds."""
    global _left_out
    _left_out = _parse(",".join(parts))


def own_process() -> None:
    """Declare that the process is ours, as the command line's is: its settings are kept when a call ends.

    To be called before torch is imported, whose threads then sleep while they wait.
    """
    global _owned
    _owned = True
    if enabled("process"):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")


def owns_process() -> bool:
    """Return whether the process is ours (`own_process`)."""
    return _owned


@contextmanager
def threads_sleep_while_waiting() -> Iterator[None]:
    """Let torch's threads sleep while they wait, if torch is first imported within this context.

    Threads that wait by spinning make small steps ten times slower as soon as anything else wants a core; sleeping
    costs nothing measurable otherwise. OpenMP reads the policy when torch is imported, so the environment is the same
    afterwards. A user's own setting is kept.
    """
    if "torch" in sys.modules or WAIT_POLICY in os.environ or not enabled("process"):
        yield
        return
    os.environ[WAIT_POLICY] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ[WAIT_POLICY]


def import_on_use(package: str, homes: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, which imports a public name on first use; so `--help` waits for no torch.

    `homes` has the names by the submodule that defines them. A name that equals its submodule's is the submodule.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with threads_sleep_while_waiting():
            module = import_module(f"{package}.{home_of[name]}")
        value = module if name == home_of[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
