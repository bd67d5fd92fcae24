"""C made by the compiler that is installed, while other things go on: nothing needs it, some are faster with it."""

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

PATIENCE = 60  # seconds that a compiler may take
SHARED = 1 << 18  # entries that several threads share out
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_COMPILING = threading.Lock()
_FAILED: set[tuple[str, ...]] = set()  # compilers that are not asked again


def compiler() -> tuple[str, ...] | None:
    """The command of the C compiler: $CC, or what is found under the usual names; none if it has failed before."""
    asked = os.environ.get("CC", "").split()
    for name in asked[:1] or ("cc", "gcc", "clang"):
        if os.name == "posix" and (path := shutil.which(name)):
            command = (path, *asked[1:])
            return None if command in _FAILED else command
    return None


def library(source: str) -> ctypes.CDLL:
    """The source, compiled."""
    command = compiler()
    if command is None:
        raise RuntimeError("there is no C compiler")
    with _COMPILING:
        return _library(source, command)


@cache
def _library(source: str, command: tuple[str, ...]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="fedabml-") as folder:
        code, made = Path(folder, "passes.c"), Path(folder, "passes.so")
        code.write_text(source)
        try:
            whole = [*command, *FLAGS, str(code), "-o", str(made), "-lm"]
            subprocess.run(whole, check=True, capture_output=True, timeout=PATIENCE)
            return ctypes.CDLL(str(made))
        except (OSError, subprocess.SubprocessError):
            _FAILED.add(command)
            raise


def beside(work: Callable[[], Any]) -> Future[Any]:
    """Does it in a thread of its own, for which nobody waits at the end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fedabml-compiler", daemon=True).start()
    return future


def share(run: Callable[[int, int], Any], units: int, entries: int) -> None:
    """Calls run(first, last) until all units are done; torch's threads share them out where there are many entries."""
    threads = torch.get_num_threads() if entries >= SHARED else 1
    mine, *others = pairwise(units * i // threads for i in range(threads + 1))
    waiting = [_pool(threads).submit(run, *part) for part in others]
    try:
        run(*mine)
    finally:
        wait(waiting)
    for part in waiting:
        part.result()  # or what went wrong there


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="fedabml-pass")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind
