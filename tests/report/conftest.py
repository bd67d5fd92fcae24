"""Run folders as a training run would write them, with numbers of a realistic kind."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MakeRun = Callable[..., Path]


def build_run(
    folder: Path,
    algorithm: str = "fedabml",
    clients: int = 20,
    rounds: int = 30,
    skill: float = 0.9,
    seed: int = 0,
    regression: bool = False,
    rows: Sequence[int] = (20,),
    level: bool = False,
    **summary: Any,
) -> Path:
    """Write a run folder; `summary` overrides entries of summary.json.

    Clients have the test rows of `rows`, in turn. With `level` the prior is scored with a label level, too.
    """
    rng = np.random.default_rng([seed, len(algorithm), clients])
    folder.mkdir(parents=True)
    ease = np.random.default_rng(7).beta(12, 3, clients)  # of a client's data, whatever the algorithm
    personal = np.clip(skill * (0.7 + 0.3 * ease) + rng.normal(0, 0.02, clients), 0, 1)
    prior = np.clip(personal - rng.beta(2, 6, clients), 0, 1)
    main, second = ("rmse", "coverage") if regression else ("accuracy", "ece")
    cohort = max(1, clients // 4)
    _json(
        folder / "config.json",
        {
            "fedabml": "0.1.0",
            "algorithm": {"name": algorithm, "hyper": {"lr": 0.05, "prior_scale": 0.01, "samples": 4}},
            "dataset": "digits",
            "model": "mlp",
            "seed": seed,
            "rounds": rounds,
            "participation": 0.25,
            "device": "cpu",
            "versions": {"torch": "2.13.0", "numpy": "2.3.1"},
            "partition_hash": f"c0ffee{clients}",
            "command": f"fedabml train --algorithm {algorithm} --seed {seed}",
        },
    )
    lines = []
    for t in range(1, rounds + 1):
        line: dict[str, Any] = {"round": t, "loss": 0.35 + 1.9 * float(np.exp(-t / 8 / skill)) + rng.normal(0, 0.03)}
        line |= {"clients": sorted(rng.choice(clients, cohort, replace=False).tolist()), "seconds": 1.3 * t}
        line |= {"bytes_up": 400_000, "bytes_down": 400_000}  # of one client
        if t % 5 == 0 or t == 1:
            rise = float(1 - np.exp(-t / 6))
            line["eval"] = {
                main: float(personal.mean()) * rise,
                **({f"prior_level_{main}": float((personal.mean() + prior.mean()) / 2) * rise} if level else {}),
                f"prior_{main}": float(prior.mean()) * rise,
                "nll": 0.4,
            }
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    edges = np.linspace(0, 1, 16)
    bins = [
        {
            "low": a,
            "high": b,
            "confidence": (a + b) / 2,
            "accuracy": min(1, (a + b) / 2 * skill),
            "count": int(900 * b**4),
        }
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    entropies = np.linspace(0, 2.3, 16)
    scores: dict[str, Any] = (
        {"rmse": float(personal.mean()), "rmse_pooled": 0.71, "coverage": 0.5, "coverage_pooled": 0.87}
        if regression
        else {
            "accuracy": float(personal.mean()),
            "ece": 0.028,
            "brier": 0.19,
            "accuracy_pooled": float(personal.mean()) + 0.003,
            "accuracy_worst_decile": float(np.sort(personal)[: max(1, clients // 10)].mean()),
            "prior_accuracy": float(prior.mean()),
            "reliability": bins,
            "entropy_histogram": {
                "edges": entropies.tolist(),
                "correct": (900 * np.exp(-entropies[1:] * 2.2)).astype(int).tolist(),
                "wrong": (60 * np.exp(-((entropies[1:] - 1.3) ** 2))).astype(int).tolist(),
            },
        }
    )
    layers = (("fc1.weight", 0.018), ("fc1.bias", 0.011), ("fc2.weight", 0.031), ("fc2.bias", 0.052))
    scores |= {"algorithm": algorithm, "dataset": "digits", "model": "mlp", "seed": seed, "rounds": rounds}
    scores |= {"clients": clients, "task": "regression" if regression else "classification", "nll": 1.35 - skill}
    scores |= {"bytes_up": 400_000, "bytes_down": 400_000, "seconds": 1.3 * rounds, "peak_memory_bytes": 412_000_000}
    scores["prior_width"] = [{"name": n, "mean_std": s * skill, "parameters": 1000} for n, s in layers]
    _json(folder / "summary.json", scores | summary)
    with (folder / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        head = ["client", "name", "n_train", "n_test", main, "nll", f"prior_{main}", "prior_nll", second]
        writer.writerow([*head, *([f"prior_level_{main}"] if level else [])])
        for i in range(clients):
            row = [personal[i], 1.3 - personal[i], prior[i], 2.1 - prior[i], 0.95 - i % 4 / 20 if regression else 0.08]
            row += [(prior[i] + personal[i]) / 2] if level else []
            writer.writerow([i, f"clinic {i}", 40 + i % 60, rows[i % len(rows)], *(f"{v:.4f}" for v in row)])
    held = np.random.default_rng(3).multinomial(50, np.full(10, 0.1), clients) * (np.arange(clients)[:, None] % 3 > 0)
    held[:, 0] += 1
    manifest: dict[str, Any] = {"partition": {"kind": "dirichlet", "alpha": 0.5}, "dataset": "digits", "seed": 0}
    manifest |= {"clients": clients, "samples": {"train": int(held.sum()), "val": 0}, "hash": "c0ffee"}
    manifest["sizes"] = {"train": held.sum(1).tolist()}
    manifest["counts"] = {"train": [[]] * clients if regression else held.tolist()}
    _json(folder / "manifest.json", manifest)
    return folder


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("name", ...)` writes a run folder under the test's own directory; see `build_run`."""
    return lambda name="run", **options: build_run(tmp_path / name, **options)
