"""Run tests in a network namespace that has the loopback interface and no route.

    python -m drills.offline [--suite federation|core] [--out FILE] [PATH OR OPTION OF PYTEST ...]
    python -m drills.offline page

The suite `federation`, the default, is every test with Flower that `make test` runs; it needs an environment with
Flower. The suite `core` is every other test that `make test` runs; it needs the core's environment. Paths restrict a
suite to a part. The record is the count that pytest reports. Linux lets ordinary users make such a namespace with
`unshare -rn`, unless an administrator has forbidden it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from fedabml.files.sheets import markdown_table
from fedabml.runs.provenance import code, hardware

from .pages import write_page

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results/reliability/offline.jsonl"
SUITES = {  # the marks of a suite's tests, and where they are
    "federation": ("flower and not nightly", ["tests/federation", "tests/drills"]),
    "core": ("not flower and not nightly", ["tests"]),
}
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && test -z "$(ip route)" && exec "$@"', "sh"]


def run_offline(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command without any route, and return its result with its output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([*ALONE, *command], capture_output=True, text=True, env=variables, cwd=ROOT)


def refusal() -> str:
    """Return why this machine cannot run commands without a route, or an empty text."""
    try:
        done = run_offline("true")
    except FileNotFoundError:
        return "this machine has no unshare"
    return "" if done.returncode == 0 else f"this machine makes no network namespace: {done.stderr.strip()}"


def tests_of(suite: str, words: list[str]) -> list[str]:
    """Return pytest's arguments for a suite, or for the part of it at the paths that are among the words."""
    marks, places = SUITES[suite]
    part = any((ROOT / word.partition("::")[0]).exists() for word in words if word and not word.startswith("-"))
    return ["-m", marks, *words, *([] if part else places)]


def counts(output: str) -> dict[str, int]:
    """Return the numbers of the last line of pytest's output, by outcome: passed, skipped, failed, and so on."""
    last = next((line for line in reversed(output.splitlines()) if re.search(r"[0-9]+ \w+.* in [0-9.]+s", line)), "")
    return {outcome: int(number) for number, outcome in re.findall(r"([0-9]+) ([a-z]+)", last.partition(" in ")[0])}


def page(record: Path) -> Path:
    """Write the page of a record into the same folder."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    rows = [
        [
            f"`{line['command']}`",
            ", ".join(f"{number} {outcome}" for outcome, number in line["counts"].items()),
            f"{line['seconds']:.0f}",
            line["code"],
            line["hardware"],
        ]
        for line in lines
    ]
    text = (
        "# Without any network\n\n"
        "Everything runs in a network namespace of its own, with the loopback interface and without any route. Before "
        "the tests, a connection to an address outside must fail with “Network is unreachable”. The tests of the "
        "federation start whole deployments: SuperLink, nginx, executor, SuperNodes and workers. The tests of the core "
        "need no Flower. A test whose dataset is neither embedded nor on the disk is skipped.\n\n"
        f"{markdown_table(['tests', 'outcome', 'seconds', 'code', 'machine'], rows)}\n\n"
        f"Data: `{record.name}`. Reproduce: `python -m drills.offline --suite federation` in an environment with "
        "Flower, and `python -m drills.offline --suite core` in that of the core.\n"
    )
    return write_page(record, text)


def main(arguments: list[str] | None = None) -> int:
    """Run tests, add their count to the record, and write the page. The exit code is that of pytest."""
    parser = argparse.ArgumentParser(prog="python -m drills.offline", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--suite", choices=tuple(SUITES), default="federation")
    options, words = parser.parse_known_args(arguments)
    if words != ["page"]:
        if why := refusal():
            sys.exit(why)
        outside = "import socket; socket.create_connection(('192.0.2.1', 443), 5)"
        assert "Network is unreachable" in run_offline(sys.executable, "-c", outside).stderr
        tests, begun = tests_of(options.suite, words), time.monotonic()
        done = run_offline(sys.executable, "-m", "pytest", *tests)
        print(done.stdout[-4000:], done.stderr[-2000:])
        command = " ".join(["pytest", *(f"'{word}'" if " " in word else word for word in tests)])
        line = {"command": command, "counts": counts(done.stdout), "seconds": round(time.monotonic() - begun, 1)}
        line |= {"code": code(), "hardware": hardware(torch.device("cpu"))}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if done.returncode:
            return done.returncode
    print(page(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
