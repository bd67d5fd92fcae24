"""How much longer does `fedabml compare` take with three seeds than with one, on data of one's own?

    python examples/seeds.py --device cuda --out results/speed/seeds/records.jsonl

Twelve clients, once as a CSV table of hospitals and once as a folder of .npz files; FedABML and FedAvg + FT, a small
network. One seed and three seeds take turns, each a command of its own; the first turn is not counted. Every command
appends a line to `--out`; then the medians and their ratio are printed.
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

import hospitals
import numpy as np

CLIENTS, COLUMNS = 12, 20
COMPARE = ["compare", "--algorithms", "fedabml,fedavg-ft", "--participation", "0.5", "--model", "mlp"]
TABLE = ["--client-column", "hospital", "--target-column", "died"]


def write_table(path: Path, rows: int) -> None:
    """Write a CSV table of patients, `rows` per hospital."""
    hospitals.SIZES = [rows] * (CLIENTS + 1)
    patients = hospitals.patients(0).drop(columns=["risk", "patient"])
    patients[patients.hospital != "Hospital M"].to_csv(path, index=False)


def write_folder(path: Path, rows: int) -> None:
    """Write a .npz file per client with `rows` samples of two classes, a fifth of them for tests."""
    path.mkdir()
    random, cut = np.random.default_rng(0), rows * 4 // 5
    for client in range(CLIENTS):
        x = random.normal(0, 1, (rows, COLUMNS)).astype("float32")
        y = (x[:, :5].sum(1) + client / 6 > 0).astype("int64")
        np.savez(path / f"s{client}.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])


def timed(data: list[str], seeds: int, rounds: int, device: str) -> float:
    """Return the seconds of one command."""
    with tempfile.TemporaryDirectory() as out:
        flags = ["--seeds", str(seeds), "--rounds", str(rounds), "--device", device, "--out", f"{out}/compare"]
        command = [sys.executable, "-m", "fedabml", *COMPARE, *data, *flags]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    """Read the command line, write the data, and time the commands in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000, help="rows per client")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4, help="the first is not counted")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "table.csv", options.rows)
        write_folder(folder / "folder", options.rows)
        data = {"table": [*TABLE, "--data", f"{folder}/table.csv"], "folder": ["--data", f"{folder}/folder"]}
        for turn in range(options.turns):
            for kind, flags in data.items():
                for seeds in (1, 3):
                    seconds = timed(flags, seeds, options.rounds, options.device)
                    line = {"turn": turn, "data": kind, "seeds": seeds, "seconds": round(seconds, 2)}
                    with options.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    print(ratios(options.out))


def ratios(path: Path) -> str:
    """Return a line per kind of data: the medians of the turns that count, and their ratio."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    texts = []
    for kind in dict.fromkeys(line["data"] for line in lines):
        counted = [line for line in lines if line["data"] == kind and line["turn"] > 0]
        one, three = (statistics.median(line["seconds"] for line in counted if line["seeds"] == n) for n in (1, 3))
        texts.append(f"{kind}: one seed {one:.1f} s, three seeds {three:.1f} s, ratio {three / one:.2f}")
    return "\n".join(texts)


if __name__ == "__main__":
    main()
