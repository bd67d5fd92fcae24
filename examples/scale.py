"""Measure what registered clients cost beside those that train in a round.

    python examples/scale.py [--clients 1000,100000,1000000] [--out results/speed]

Every number of clients trains in a process of its own, 100 a round, on the CPU: four samples of eight numbers each from
a memory-mapped file. FedABML keeps nothing between rounds; Ditto keeps a model for every client that has trained. The
page is scale.md. `fedabml doctor` tells what padding wastes where clients have different sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedabml
from fedabml.algorithms import make
from fedabml.bench.measure import machine
from fedabml.files.paths import write
from fedabml.files.sheets import markdown_table
from fedabml.runs.summary import peak_memory

ROUNDS, WARM, COHORT, SAMPLES, FEATURES = 22, 2, 100, 4, 8


def run(clients: int, algorithm: str) -> dict[str, Any]:
    """Train a federation in this process and return what its rounds took, in seconds, and its peak memory in bytes."""
    g, shape = np.random.default_rng(0), (SAMPLES * clients, FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        x = np.lib.format.open_memmap(Path(folder, "x.npy"), mode="w+", dtype=np.float32, shape=shape)
        for first in range(0, len(x), 1 << 20):
            x[first : first + (1 << 20)] = g.normal(size=x[first : first + (1 << 20)].shape)
        y, start, ends = g.integers(0, 3, len(x)), time.perf_counter(), list[float]()
        fed = fedabml.Federation.from_owners(x, y, np.repeat(np.arange(clients), SAMPLES))
        ready = time.perf_counter() - start
        fedabml.train(
            fed, "mlp", make(algorithm), model_options={"hidden": (16,)}, rounds=ROUNDS, participation=COHORT / clients,
            epochs=1, evaluate=False, device="cpu", on_round=lambda line: ends.append(time.perf_counter()),
        )  # fmt: skip
    return {"federation": ready, "rounds": np.diff(ends)[WARM - 1 :].tolist(), "peak": peak_memory() or 0}


def row(clients: int, algorithm: str) -> tuple[str, ...]:
    """Return a row of the table, measured in a process of its own, so that memory is that of this federation alone."""
    command = [sys.executable, __file__, "--one", algorithm, "--clients", str(clients)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    r = json.loads(done.stdout.splitlines()[-1])
    warm = f"{statistics.median(r['rounds']) * 1e3:.1f} ms"
    return f"{clients:,}", algorithm, f"{r['federation']:.2f} s", warm, f"{r['peak'] / 2**30:.2f} GiB"


def main() -> None:
    """Read the arguments, measure every number of clients and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1000,100000,1000000", help="numbers of registered clients")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    args = parser.parse_args()
    numbers = [int(n) for n in args.clients.split(",")]
    if args.one:
        print(json.dumps(run(numbers[0], args.one)))
        return
    facts = ", ".join(f"{name} {value}" for name, value in machine(torch.device("cpu")).items())
    text = "\n".join([
        "# Registered clients\n",
        f"`python examples/scale.py --clients {args.clients}` on: {facts}.\n",
        f"{COHORT} clients a round, {SAMPLES} samples of {FEATURES} numbers each, one epoch, MLP {FEATURES}→16→3, a "
        f"process each; a warm round is the median of {ROUNDS - WARM}.\n",
        markdown_table(
            ("registered clients", "algorithm", "federation made in", "warm round", "peak memory of the process"),
            [row(clients, name) for name in ("fedabml", "ditto") for clients in numbers],
        ),
    ])  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "scale.md", text + "\n")
    print(text)


if __name__ == "__main__":
    main()
