"""Campaigns against the command line: strange words, and strange files in place of those that it reads.

    python -m tests.cli.fuzz words 500        # fuzzed command lines
    python -m tests.cli.fuzz files 500        # malformed files
    python -m tests.cli.fuzz words 1 --first 137    # case 137 again, with its output

A case is a function of its number. It runs in a process of its own, forked from one that has imported everything, so
that a case takes a fraction of a second and its memory is its own. It passes if the command ends in time with code 0 or
2, without a traceback and with less than `MOST_MEMORY` bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MOST_MEMORY = 1 << 30
NET = "Something that was given is too deep"  # the sentence for what no reader has refused
PATIENCE = 120  # seconds of its own processor time after which a case counts as a hang
TINY = shlex.split(
    "--clients 4 --classes-per-client 5 --model mlr --rounds 1 --epochs 1 --participation 0.5 --batch-size 50"
)


class Outcome(NamedTuple):
    """How a case ended: its exit code (None for a hang), its output, its peak memory in bytes, its seconds."""

    words: list[str]
    code: int | None
    output: str
    memory: int
    seconds: float

    @property
    def fault(self) -> str:
        """What is wrong with it, in a word; nothing where all is well."""
        if self.code is None:
            return "hang"
        if "Traceback" in self.output or self.code not in (0, 2):
            return f"traceback, code {self.code}"
        if NET in self.output:
            return "no reader refused it"
        return "memory" if self.memory > MOST_MEMORY else ""


def run(words: list[str], folder: Path) -> Outcome:
    """Runs `fedabml WORDS` in a folder, in a forked process."""
    log = folder / "output.txt"
    begun = time.perf_counter()
    child = os.fork()
    if not child:
        _be(words, folder, log)
    _, status, used = os.wait4(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
    code = None if killed else os.waitstatus_to_exitcode(status)
    output = log.read_text(errors="replace") if log.exists() else ""
    return Outcome(words, code, output, used.ru_maxrss * 1024, time.perf_counter() - begun)


def _be(words: list[str], folder: Path, log: Path) -> None:
    """Becomes the command; never returns."""
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1), os.dup2(handle, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ["FEDABML_CACHE"] = str(folder / "cache")
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
        signal.alarm(10 * PATIENCE)  # one that waits for something uses no processor time
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, encoding="utf-8"))
        sys.argv = ["fedabml", *words]
        from fedabml.__main__ import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def campaign(
    case: Callable[[random.Random, Path, Path], list[str]], count: int, first: int = 0, show: bool = False
) -> list[Outcome]:
    """Runs cases `first` to `first + count`; `case` prepares a folder beside good files and returns the words."""
    faults, most, codes = [], 0, {}
    with tempfile.TemporaryDirectory() as base:
        good = Path(base) / "good"
        from tests.cli.fuzz_cases import prepare

        prepare(good)
        for number in range(first, first + count):
            folder = Path(base) / "case"
            folder.mkdir()
            words = case(random.Random(number), good, folder)
            found = run(words, folder)
            most, codes[found.code] = max(most, found.memory), codes.get(found.code, 0) + 1
            if found.fault or show:
                said = found.output if show else "\n".join(found.output.strip().splitlines()[-25:])
                brief = [word if len(word) < 200 else f"{word[:200]}… ({len(word)} characters)" for word in words]
                print(
                    f"case {number}: {found.fault} {found.seconds:.1f} s {found.memory >> 20} MiB\n  {brief}\n{said}\n",
                    flush=True,
                )
            faults += [found] if found.fault else []
            shutil.rmtree(folder)
    print(f"{count} cases, {len(faults)} faults; codes {codes}; most memory {most >> 20} MiB")
    return faults


if __name__ == "__main__":
    from tests.cli.fuzz_cases import files, words

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("words", "files"))
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    told = parser.parse_args()
    sys.exit(bool(campaign({"words": words, "files": files}[told.kind], told.count, told.first, told.show)))
