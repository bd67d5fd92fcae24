"""What registered clients cost beside those of a round, and what padding wastes where clients are unequal.

    python -m benchmarks.scale [--clients 1000,100000,1000000] [--out results/speed]

Every number of clients trains in a process of its own, 100 a round, on the CPU: four samples of eight numbers each from
a file that is mapped, FedABML and Ditto, which keeps a model for every client it has met. It writes scale.md.
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
from fedabml.engine.executor import SMALL, Programs, padding
from fedabml.engine.minibatches import steps_of
from fedabml.files.paths import write
from fedabml.runs.summary import peak_memory

ROUNDS, COHORT, SAMPLES, FEATURES = 22, 100, 4, 8
WARM = 2  # rounds after which one is timed
BATCH, EPOCHS, SIDE = 50, 5, 20  # of the table of padding; SIDE clients run side by side
WAYS = {
    "on a CPU": Programs(capture=False),
    "graphs, large network": Programs(capture=True, heavy=True),
    "graphs, small network": Programs(capture=True),
    "`--compile`, any network": Programs(capture=True, fuse=True, heavy=True),
}


def samples(clients: int, file: Path) -> None:
    """Writes those of all clients."""
    g, shape = np.random.default_rng(0), (SAMPLES * clients, FEATURES)
    x = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    for first in range(0, len(x), 1 << 20):
        x[first : first + (1 << 20)] = g.normal(size=x[first : first + (1 << 20)].shape)


def run(clients: int, algorithm: str, file: Path) -> dict[str, Any]:
    """Trains a federation in this process; what its rounds take."""
    x, y = np.load(file, mmap_mode="r"), np.random.default_rng(0).integers(0, 3, SAMPLES * clients)
    start = time.perf_counter()
    fed = fedabml.Federation.from_owners(x, y, np.repeat(np.arange(clients), SAMPLES))
    ready, ends = time.perf_counter() - start, list[float]()
    fedabml.train(
        fed, "mlp", make(algorithm), model_options={"hidden": (16,)}, rounds=ROUNDS, participation=COHORT / clients,
        epochs=1, evaluate=False, device="cpu", on_round=lambda line: ends.append(time.perf_counter()),
    )  # fmt: skip
    rounds = np.diff(ends)[WARM - 1 :].tolist()
    peak = peak_memory() or 0
    return {"clients": clients, "algorithm": algorithm, "federation": ready, "rounds": rounds, "peak": peak}


def apart(clients: int, algorithm: str) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.scale", "--one", algorithm, "--clients", str(clients)]
        file = Path(folder, "x.npy")
        samples(clients, file)
        words += ["--samples", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def rows_padded(sizes: np.ndarray, idle: float, epochs: int, width: int) -> float:
    """The share of rows computed that are padding, where a share of the steps is `idle`, of clients that were done."""
    return 1 - (1 - idle) * float(epochs * sizes.sum() / (width * steps_of(sizes, epochs, width, 1).sum()))


def wasted() -> list[tuple[str, list[tuple[float, float]]]]:
    """Of some spreads of clients' sizes, for every way to run, the shares of steps and of rows that are padding.

    Steps are those taken for clients that were done; rows are theirs and those that fill short minibatches.
    """
    g, clients = np.random.default_rng(0), 100 * SIDE
    spreads = {
        "equal: 300 each": np.full(clients, 300),
        "300, give or take 50": g.normal(300, 50, clients),
        "93 to 1,150, evenly": g.uniform(93, 1150, clients),
        "log-normal, median 100, σ 1": g.lognormal(np.log(100), 1, clients),
        "log-normal, median 100, σ 2": g.lognormal(np.log(100), 2, clients),
    }
    found = []
    for name, drawn in spreads.items():
        sizes = np.ceil(np.maximum(drawn, 1)).astype(int).reshape(-1, SIDE)
        own = []
        for way in WAYS.values():
            shares = []
            for cohort in sizes:
                width = min(BATCH, int(cohort.max()))
                steps = steps_of(cohort, EPOCHS, width, 1)
                idle = padding(steps, way.least)
                shares.append((idle, rows_padded(cohort, idle, EPOCHS, width)))
            mean = np.mean(shares, 0).tolist()
            own.append((mean[0], mean[1]))
        found.append((name, own))
    return found


def padded() -> list[str]:
    """That as lines of Markdown."""
    return [
        f"\nPadding where {SIDE} clients of unequal size run side by side (batches of {BATCH}, {EPOCHS} epochs): the "
        "share of steps taken for clients that are done / the share of all rows computed that are padding, those of "
        "such steps and those that fill up short minibatches. The batch shrinks with every client that is done, in "
        f"CUDA graphs in coarser steps; in those of a small network to {SMALL} clients or fewer, because a GPU would "
        "hardly run one faster; so it does compiled, on a CPU, too, whatever the network, because every size is "
        "compiled anew.\n",
        f"| samples of a client | {' | '.join(WAYS)} |",
        "|---" * (len(WAYS) + 1) + "|",
        *(
            f"| {name} | {' | '.join(f'{100 * steps:.2g} % / {100 * rows:.2g} %' for steps, rows in own)} |"
            for name, own in wasted()
        ),
    ]


def page(found: list[dict[str, Any]], command: str) -> str:
    """All of it as Markdown."""
    lines = [
        "# Registered clients, and padding\n",
        f"`{command}` on: {', '.join(f'{name} {value}' for name, value in machine(torch.device('cpu')).items())}.\n",
        f"{COHORT} clients a round, {SAMPLES} samples of {FEATURES} numbers each, one epoch, MLP {FEATURES}→16→3, a "
        f"process each; the median of {ROUNDS - WARM} warm rounds.\n",
        "| registered clients | algorithm | federation made in | a warm round | peak memory of the process |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['clients']:,} | {r['algorithm']} | {r['federation']:.2f} s "
        f"| {statistics.median(r['rounds']) * 1e3:.1f} ms | {r['peak'] / 2**30:.2f} GiB |"
        for r in found
    ]
    lines += padded()
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1000,100000,1000000", help="numbers of registered clients")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    told = parser.parse_args()
    numbers = [int(n) for n in told.clients.split(",")]
    if told.one:
        print(json.dumps(run(numbers[0], told.one, told.samples)))
        return
    found = [apart(clients, name) for name in ("fedabml", "ditto") for clients in numbers]
    text = page(found, " ".join(["python -m benchmarks.scale", *sys.argv[1:]]))
    told.out.mkdir(parents=True, exist_ok=True)
    write(told.out / "scale.md", text)
    print(text)


if __name__ == "__main__":
    main()
