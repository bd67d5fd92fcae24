"""Lists of experiments, several at a time on one machine: how many small runs share one GPU.

    python -m benchmarks.queue LIST... --out DIR [--workers 5] [--data DIR] [--minutes 25]

A line of a list is `NAME NEEDS: COMMAND ; COMMAND ...`: commands of fedabml (or `python ...`), one after another until
one fails, which begin once the datasets that they need (`cifar10,svhn`, or `-`) are in the folder of data. In a command
OUT is DIR/NAME. What a chain prints is in DIR/NAME.log; DIR/queue.jsonl says when it began and how it ended. The same
command again goes on where it was stopped, with what had failed or was changed, too. Lists are read again before every
chain, so they can grow. At the end of its time, at Ctrl-C or where it is killed (SIGTERM), every command is interrupted
as by Ctrl-C and keeps what is finished; the exit code is 1 if a chain failed. On an NVIDIA GPU start MPS first
(`nvidia-cuda-mps-control -d`), or processes have it by turns; all its processes are then stopped together, never one of
them (docs/speed.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

GRACE = 20.0  # seconds that an interrupted command has to save what it has
PAUSE = 0.5


class Chain(NamedTuple):
    """A line of a list."""

    name: str
    needs: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    line: str


def chains(text: str) -> list[Chain]:
    """The chains of a list; a line that begins with # is a remark."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        head, colon, rest = line.partition(":")
        words = head.split()
        commands = tuple(tuple(shlex.split(part)) for part in rest.split(" ; "))
        if not colon or len(words) != 2 or not all(commands):
            raise SystemExit(f"A line of a list is NAME NEEDS: COMMAND ; COMMAND ..., not '{line}'.")
        needs = () if words[1] == "-" else tuple(words[1].split(","))
        found.append(Chain(words[0], needs, commands, line.strip()))
    return found


class Queue:
    """Chains of some lists, taken in their order by whoever asks next."""

    def __init__(self, lists: list[Path], out: Path, data: Path, workers: int, until: float):
        self.told: list[Chain] = []
        self.lists, self.out, self.data, self.workers, self.until = lists, out, data, workers, until
        self.lock, self.begun, self.running = threading.Lock(), set[str](), dict[str, subprocess.Popen[bytes]]()
        self.stopped, self.failed, self.book = False, 0, out / "queue.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        if self.book.exists():
            lines = [json.loads(line) for line in self.book.read_text().splitlines()]
            self.begun |= {line["line"] for line in lines if line["code"] == 0}
        self.read()

    def next(self) -> Chain | None:
        """A chain that nobody has begun and whose data are here; None where there is none now."""
        with self.lock:
            for each in self.left():
                if all((self.data / f"{name}.npz").exists() for name in each.needs):
                    self.begun.add(each.line)
                    return each
        return None

    def left(self) -> list[Chain]:
        """What is not begun. A list that cannot be read now, being written perhaps, is as it was."""
        with contextlib.suppress(SystemExit):
            self.read()
        return [each for each in self.told if each.line not in self.begun]

    def read(self) -> None:
        """The lists as they are now."""
        if missing := [str(file) for file in self.lists if not file.is_file()]:
            raise SystemExit(f"There is no list {', '.join(missing)}.")
        self.told = [each for file in self.lists for each in chains(file.read_text(encoding="utf-8"))]
        names = [each.name for each in self.told]
        if twice := {name for name in names if names.count(name) > 1}:
            raise SystemExit(f"Two chains have one name: {', '.join(sorted(twice))}.")

    def run(self, chain: Chain) -> None:
        """All commands of a chain, or up to the first that fails."""
        start, code = time.time(), -1
        environment = os.environ | {"FEDABML_DATA": str(self.data), "FEDABML_PROCESSES": str(self.workers)}
        with open(self.out / f"{chain.name}.log", "ab") as log:
            for command in chain.commands:
                words = [re.sub(r"\bOUT\b", str(self.out / chain.name), word) for word in command]
                call = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", "fedabml", *words])]
                log.write(f"$ {shlex.join(words)}\n".encode())
                log.flush()
                with self.lock:
                    if self.stopped:
                        code = -1
                        break
                    process = subprocess.Popen(
                        call, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                    self.running[chain.name] = process
                code = process.wait()
                if code:
                    break
        with self.lock:
            self.running.pop(chain.name, None)
            self.failed += code != 0
            line = {"chain": chain.name, "began": round(start), "seconds": round(time.time() - start, 1), "code": code}
            line["line"] = chain.line
            with open(self.book, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{chain.name}: {'done' if code == 0 else f'code {code}'}, {line['seconds']} s", flush=True)

    def work(self) -> None:
        """One worker: chain after chain until there are none, or the time is over."""
        while not self.stopped:
            chain = self.next()
            if chain is not None:
                self.run(chain)
            elif not self.left():
                return
            else:
                time.sleep(PAUSE)

    def stop(self) -> None:
        """Interrupts what runs, and kills what does not heed it."""
        with self.lock:
            self.stopped = True
            running = list(self.running.values())
        for number in (signal.SIGINT, signal.SIGKILL):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
            end = time.time() + GRACE
            while time.time() < end and any(process.poll() is None for process in running):
                time.sleep(PAUSE)

    def serve(self) -> None:
        """All of it; to be called in the main thread."""
        both = (signal.SIGINT, signal.SIGTERM)  # a shell's background job ignores the first; ours must not
        before = [signal.signal(number, signal.default_int_handler) for number in both]
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(self.workers)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and time.time() < self.until:
                time.sleep(PAUSE)
        finally:
            for number in both:  # once is enough
                signal.signal(number, signal.SIG_IGN)
            self.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for number, handler in zip(both, before, strict=True):
                signal.signal(number, handler)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDABML_DATA") or "~/.cache/fedabml/data"))
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    told = parser.parse_args()
    until = time.time() + 60 * told.minutes
    queue = Queue(told.lists, told.out.resolve(), told.data.expanduser().resolve(), told.workers, until)
    queue.serve()
    raise SystemExit(queue.failed > 0)


if __name__ == "__main__":
    main()
