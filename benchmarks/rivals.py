"""Race other libraries against ours: the same network, data, minibatches and number of steps, each in its own process.

`python -m benchmarks.cpu --peers VENV` calls it. A federation is written to a folder once: samples, first weights, the
clients of every round, the order of their samples. Every side reads it, trains FedAvg, reports how long its rounds
took, and leaves its last weights. First each side trains for one round that is not timed, without dropout: its weights
must equal ours, or the table says that they differ in place of a ratio. Start to finish is the life of the process,
imports included; a warm round is any but the first. The time that a script takes to prepare its batches is in neither.
"""

from __future__ import annotations

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
from fedabml.bench.workloads import Workload
from fedabml.engine.minibatches import minibatches
from fedabml.engine.server import draw_clients
from fedabml.files.sheets import markdown_table

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
    """Write a workload's federation and the plan of its rounds, exactly as our engine will take them."""
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

    def save(name: str, array: np.ndarray) -> None:
        np.save(folder / f"{name}.npy", array)

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
    """Change some facts in the task of an exported federation."""
    file = folder / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def share(ours: np.ndarray, theirs: np.ndarray, first: np.ndarray) -> float:
    """Return how far weights are apart, as a share of the way that ours have gone."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours - first))


def installed(python: str, package: str) -> bool:
    """Return whether a Python has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def launch(side: str, python: str, folder: Path, limit: float) -> dict[str, Any]:
    """Run one side from start to finish; return its times and weights, or under "error" why there are none."""
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]) if side == "ours" else "", "FLWR_HOME": str(folder / "flwr")}
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # ours sets it itself; the others profit, too, where cores are shared
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    start = time.perf_counter()
    try:
        command = [python, str(HERE / f"run_{side}.py"), str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit:g} s"}
    wall = time.perf_counter() - start
    lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    answer = next((line for line in lines if line.startswith("ANSWER ")), None)
    if answer is None:
        skip = next((line[5:] for line in lines if line.startswith("SKIP ")), None)
        signal = f"killed by signal {-done.returncode}" if done.returncode < 0 else None
        return {"error": signal or skip or " ".join(lines[-1:])[:300] or "no answer"}
    times = json.loads(answer.removeprefix("ANSWER "))
    return {**times, "wall": wall - times["aside"], "weights": np.load(folder / f"last-run_{side}.npy")}


def compare(name: str, work: Workload, peers: str | None, repeats: int, limit: float = 600.0) -> dict[str, Any]:
    """Run all sides of one workload in turns and return the record of the race.

    `peers` is the Python of the other libraries, or None; `limit` is in seconds and for one process.
    """
    record: dict[str, Any] = {"workload": name, "said": work.description, "rounds": ROUNDS, "sides": {}, "skipped": {}}
    pythons = {side: sys.executable if side == "ours" else peers or "" for side in CONTESTS[name]}
    runs: dict[str, list[dict[str, Any]]] = {}
    for side, python in pythons.items():
        if not python:
            record["skipped"][side] = "no --peers VENV was given"
        elif side != "ours" and not installed(python, PACKAGES[side]):
            record["skipped"][side] = f"{PACKAGES[side]} is not installed in {python}"
        else:
            runs[side] = []

    def timed(side: str, folder: Path) -> dict[str, Any] | None:
        """Launch a side that has not failed yet; None where it fails."""
        done = {"error": ""} if side in record["skipped"] else launch(side, pythons[side], folder, limit)
        if done.get("error"):
            record["skipped"][side] = done["error"]
        return None if "error" in done else done

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(work, ROUNDS, folder)
        revise(folder, rounds=1, dropout=False)
        once = {side: done["weights"] for side in runs if (done := timed(side, folder))}
        revise(folder, rounds=ROUNDS, dropout=True)
        for turn in range(repeats):
            for i in range(len(runs)):
                side = list(runs)[(turn + i) % len(runs)]
                if done := timed(side, folder):
                    runs[side].append(done)
        first = np.load(folder / "first.npy")
    for side, all_times in runs.items():
        if not all_times:
            continue
        round1 = share(once["ours"], once[side], first) if "ours" in once else None
        apart = None
        if runs["ours"] and work.model != "pfl":  # dropout draws another mask everywhere
            apart = share(runs["ours"][-1]["weights"], all_times[-1]["weights"], first)
        record["sides"][side] = {
            "wall": statistics.median(t["wall"] for t in all_times),
            "first": statistics.median(t["first"] for t in all_times),
            "warm": statistics.median(s for t in all_times for s in t["warm"]),
            "version": all_times[0].get("version"),
            "round1": round1,
            "limit": LIMITS.get(name, LIMIT),
            "agree": None if round1 is None else round1 <= LIMITS.get(name, LIMIT),
            "apart": apart,
        }
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as a Markdown table."""
    head = (
        *("workload", "library", f"start to finish, {ROUNDS} rounds", "ours is faster by", "warm round"),
        *("ours is faster by", "weights apart after a round (limit)", f"after {ROUNDS}"),
    )
    rows = []
    for record in records:
        ours, name = record["sides"].get("ours"), record["workload"]
        for side, times in record["sides"].items():
            wrong, by, apart, round1 = times.get("agree") is False, dict.fromkeys(("wall", "warm"), "–"), "–", "–"
            if side != "ours":
                if ours is not None:
                    by = {k: "weights differ" if wrong else f"**{times[k] / ours[k]:.2f}×**" for k in by}
                if times.get("round1") is not None:
                    round1 = f"{'**weights differ**: ' * wrong}{times['round1']:.0e} ({times['limit']:.0e})"
                apart = "–" if times.get("apart") is None else f"{times['apart']:.0e}"
            wall, warm = f"{times['wall']:.2f} s", f"{times['warm'] * 1e3:.0f} ms"
            rows.append((name, f"{TITLES[side]} {times['version']}", wall, by["wall"], warm, by["warm"], round1, apart))
        rows += [(name, TITLES[side], f"not run: {why}", *[""] * 5) for side, why in record["skipped"].items()]
    return markdown_table(head, rows)


def python_of(venv: str | None) -> str | None:
    """Return the Python of a virtual environment, given its folder or the Python itself."""
    if venv is None:
        return None
    path = Path(venv)
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.exists():
        raise SystemExit(f"There is no Python at '{python}'.")
    return str(python)
