"""Compile C with the installed compiler, in the background; everything also works without one, more slowly."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

TIMEOUT = 60  # seconds that a compiler may take
THREADED = 1 << 18  # entries from which several threads share the work
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_COMPILING = threading.Lock()
_FAILED: set[tuple[str, ...]] = set()  # compilers that have failed and are not tried again


def compiler() -> tuple[str, ...] | None:
    """Return the command of the C compiler, $CC or one found under the usual names; None if it has failed before."""
    named = os.environ.get("CC", "").split()
    for name in named[:1] or ("cc", "gcc", "clang"):
        if os.name == "posix" and (path := shutil.which(name)):
            command = (path, *named[1:])
            return None if command in _FAILED else command
    return None


def library(source: str) -> ctypes.CDLL:
    """Compile C source and return the library; raises RuntimeError, OSError or SubprocessError where that fails."""
    command = compiler()
    if command is None:
        raise RuntimeError("there is no C compiler")
    with _COMPILING:
        return _library(source, command)


@cache
def _library(source: str, command: tuple[str, ...]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="fedabml-") as folder:
        code, target = Path(folder, "passes.c"), Path(folder, "passes.so")
        code.write_text(source)
        try:
            call = [*command, *FLAGS, str(code), "-o", str(target), "-lm"]
            subprocess.run(call, check=True, capture_output=True, timeout=TIMEOUT)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError):
            _FAILED.add(command)
            raise


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Call `work` in a daemon thread, which does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fedabml-compiler", daemon=True).start()
    return future


def run_in_threads(run: Callable[[int, int], Any], units: int, entries: int) -> None:
    """Call run(first, last) on ranges that cover all `units`, in torch's number of threads if entries are many."""
    threads = torch.get_num_threads() if entries >= THREADED else 1
    first, *others = pairwise(units * i // threads for i in range(threads + 1))
    waiting = [_pool(threads).submit(run, *part) for part in others]
    try:
        run(*first)
    finally:
        wait(waiting)
    for part in waiting:
        part.result()  # raises what was raised there


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="fedabml-pass")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
