"""Other libraries beside ours: the same network, data, minibatches and number of steps, each in a process of its own.

    python -m benchmarks.rivals --peers VENV        # a virtual environment with flwr[simulation], pfl[pytorch], ...

A federation is written to a folder once: samples, first weights, the clients of every round, the order of their
samples. Every side reads it, trains FedAvg, tells how long its rounds took, and leaves its last weights. First each
trains for one round that is not timed, without dropout: its weights must be ours, or the table says that they differ in
place of a ratio. Start to finish is the life of the process, imports included; a warm round is any but the first. The
time that a script takes to make batches ready for its library is in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedabml import FedAvg, rng
from fedabml.bench.measure import setup_of
from fedabml.bench.workloads import Workload, workload
from fedabml.engine.minibatches import minibatches
from fedabml.engine.server import draw_clients

HERE = Path(__file__).parent / "peers"
TITLES = {
    "ours": "fedabml",
    "loop": "plain PyTorch, client by client",
    "flower": "Flower simulation",
    "pfl": "pfl",
    "fedlab": "FedLab",
    "fedjax": "FedJAX",
}
PACKAGES = {"flower": "flwr", "pfl": "pfl", "fedlab": "fedlab", "fedjax": "fedjax", "loop": "torch"}
ROUNDS = 5
# The share of a round's way by which weights may be apart after it, all in float32. The CNN's way is short: a plain
# loop in float32 ends 4e-2 of it from the same loop in float64, which is ours in float64 to 2e-8.
LIMIT, LIMITS = 1e-2, {"cnn": 1e-1}
# The bare loop has races of its own (fedabml.bench); Flower's case has it beside the libraries.
MODELS = ("mlr", "mlp", "cnn", "pfl", "resnet18")
CONTESTS = {"mlp100": tuple(TITLES), **dict.fromkeys(MODELS, ("ours", "flower", "pfl", "fedlab", "fedjax"))}


def export(work: Workload, rounds: int, folder: Path) -> None:
    """Writes a workload's federation and the plan of its rounds, exactly as our engine will take them."""
    import torch

    fed, lr = work.federation(), work.lr
    setup = setup_of(work, fed, FedAvg(lr=lr), "cpu", "float32")
    cohort = [draw_clients(work.clients, work.cohort / work.clients, 0, t + 1) for t in range(rounds)]
    places = torch.arange(work.samples).expand(work.cohort, -1)
    sizes = np.full(work.cohort, work.samples)
    order = []
    for t, clients in enumerate(cohort):
        keys = rng.keys((0, rng.NOISE, t + 1, 0, rng.SHUFFLE), clients)
        plan = minibatches(places, torch.as_tensor(sizes), keys, work.epochs, work.batch, 1)
        order.append(plan[:, 0].transpose(0, 1).numpy())
    save = lambda name, array: np.save(folder / f"{name}.npy", array)  # noqa: E731
    save("x", fed.x.reshape(work.clients, work.samples, *work.shape))
    save("y", fed.y.reshape(work.clients, work.samples))
    save("shift", fed.shift)
    save("scale", fed.scale)
    save("cohort", np.array(cohort))
    save("order", np.stack(order))
    weights = list(setup.cohort.network.layout.split(setup.cohort.network.initial).values())
    for i, w in enumerate(weights):
        save(f"w{i}", w.numpy())
    save("first", setup.cohort.network.initial.numpy())
    facts = {
        "model": work.name, "classes": work.classes, "rounds": rounds, "batch": work.batch, "lr": lr,
        "epochs": work.epochs, "arrays": len(weights), "dropout": True,
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(facts))


def revise(folder: Path, **facts: Any) -> None:
    """Changes what a federation's task says."""
    file = folder / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def share(ours: np.ndarray, theirs: np.ndarray, first: np.ndarray) -> float:
    """How far weights are apart, as a share of the way that ours have gone."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours - first))


def installed(python: str, package: str) -> bool:
    """Whether a Python has a package."""
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", ask], check=False, capture_output=True).returncode == 0


def launch(side: str, python: str, folder: Path, limit: float) -> dict[str, Any]:
    """One side from start to finish: its answer, or why there is none."""
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]) if side == "ours" else ""}
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # ours sets it itself; the others profit, too, where cores are shared
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    if side != "ours":
        env["FLWR_HOME"] = str(folder / "flwr")
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [python, str(HERE / f"run_{side}.py"), str(folder)],
            env=env, capture_output=True, text=True, timeout=limit, check=False, cwd=folder,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit:g} s"}
    wall = time.perf_counter() - start
    lines = (done.stdout + "\n" + done.stderr).splitlines()
    answer = next((line for line in lines if line.startswith("ANSWER ")), None)
    if answer is None:
        if done.returncode < 0:
            return {"error": f"killed by signal {-done.returncode}"}
        skip = next((line[5:] for line in lines if line.startswith("SKIP ")), None)
        return {"error": skip or " ".join([line for line in lines if line.strip()][-1:])[:300] or "no answer"}
    told = json.loads(answer.removeprefix("ANSWER "))
    return {**told, "wall": wall - told["aside"], "weights": np.load(folder / f"last-run_{side}.npy")}


def compare(name: str, work: Workload, peers: str | None, repeats: int, limit: float = 600.0) -> dict[str, Any]:
    """All sides of one workload, in turns: a record for a table."""
    pythons = {side: sys.executable if side == "ours" else peers or "" for side in CONTESTS[name]}
    record: dict[str, Any] = {"workload": name, "said": work.said, "rounds": ROUNDS, "sides": {}, "skipped": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(work, ROUNDS, folder)
        runs: dict[str, list[dict[str, Any]]] = {}
        for side, python in pythons.items():
            if not python:
                record["skipped"][side] = "no --peers VENV was given"
            elif side != "ours" and not installed(python, PACKAGES[side]):
                record["skipped"][side] = f"{PACKAGES[side]} is not installed in {python}"
            else:
                runs[side] = []
        revise(folder, rounds=1, dropout=False)
        once: dict[str, np.ndarray] = {}
        for side in runs:
            told = launch(side, pythons[side], folder, limit)
            if "error" in told:
                record["skipped"][side] = told["error"]
            else:
                once[side] = told["weights"]
        revise(folder, rounds=ROUNDS, dropout=True)
        for turn in range(repeats):
            for i in range(len(runs)):
                side = list(runs)[(turn + i) % len(runs)]
                if side in record["skipped"]:
                    continue
                told = launch(side, pythons[side], folder, limit)
                if "error" in told:
                    record["skipped"][side] = told["error"]
                else:
                    runs[side].append(told)
        first = np.load(folder / "first.npy")
        for side, told_all in runs.items():
            if not told_all:
                continue
            round1 = share(once["ours"], once[side], first) if "ours" in once else None
            apart = None
            if runs["ours"] and work.model != "pfl":  # dropout draws another mask everywhere
                apart = share(runs["ours"][-1]["weights"], told_all[-1]["weights"], first)
            record["sides"][side] = {
                "wall": statistics.median(t["wall"] for t in told_all),
                "first": statistics.median(t["first"] for t in told_all),
                "warm": statistics.median(s for t in told_all for s in t["warm"]),
                "version": told_all[0].get("version"),
                "round1": round1,
                "limit": LIMITS.get(name, LIMIT),
                "agree": None if round1 is None else round1 <= LIMITS.get(name, LIMIT),
                "apart": apart,
            }
    return record


def table(records: list[dict[str, Any]]) -> list[str]:
    """The records as lines of Markdown."""
    lines = [
        f"| workload | library | start to finish, {ROUNDS} rounds | ours is faster by | warm round | ours is faster by "
        f"| weights apart after a round (limit) | after {ROUNDS} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        ours = record["sides"].get("ours")
        for side, told in record["sides"].items():
            wrong = told.get("agree") is False
            by = lambda what, told=told, side=side, ours=ours, wrong=wrong: (  # noqa: E731
                "–"
                if side == "ours" or ours is None
                else "weights differ"
                if wrong
                else f"**{told[what] / ours[what]:.2f}×**"
            )
            round1, apart = (
                "–" if side == "ours" or told.get(name) is None else f"{told[name]:.0e}" for name in ("round1", "apart")
            )
            said = round1 if round1 == "–" else f"{'**weights differ**: ' * wrong}{round1} ({told['limit']:.0e})"
            lines.append(
                f"| {record['workload']} | {TITLES[side]} {told['version']} | {told['wall']:.2f} s | {by('wall')} "
                f"| {told['warm'] * 1e3:.0f} ms | {by('warm')} | {said} | {apart} |"
            )
        lines += [
            f"| {record['workload']} | {TITLES[side]} | not run: {why} | | | | | |"
            for side, why in record["skipped"].items()
        ]
    return lines


def python_of(venv: str | None) -> str | None:
    """The Python of a virtual environment, given its folder or the Python itself."""
    if venv is None:
        return None
    path = Path(venv)
    found = path / "bin" / "python" if path.is_dir() else path
    if not found.exists():
        raise SystemExit(f"There is no Python at '{found}'.")
    return str(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="virtual environment of the other libraries, or its Python")
    parser.add_argument("--only", help="workloads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    told = parser.parse_args()
    names = told.only.split(",") if told.only else list(CONTESTS)
    records = []
    for name in names:
        work = workload(name, "quick" if told.quick else "cpu")
        records.append(compare(name, work, python_of(told.peers), told.repeats))
        print("\n".join(table(records[-1:])), flush=True)


if __name__ == "__main__":
    main()
