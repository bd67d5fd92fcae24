"""Which estimator FedABML uses unless told otherwise: accuracy, NLL and time of each, on validation data.

    FEDABML_DATA=FOLDER python -m benchmarks.choice [--columns emnist,cifar10] [--seeds 3] [--out results/estimators]

A federation is trained for every column, estimator and seed, all else being equal; a fifth of every client's training
data is held out and scored. Seeds run side by side, finished cells are not run again. The page says what each estimator
gains or loses against `weight s=2`, paired by seed (which also makes the partition).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedabml.experiments.cell import Cell, Result
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.runner import execute
from fedabml.experiments.statistics import interval
from fedabml.files.paths import write
from fedabml.runs.config import RunConfig

BASE = "weight s=2"
ESTIMATORS: dict[str, dict[str, Any]] = {
    BASE: {"estimator": "weight", "s": 2},
    "weight s=1": {"estimator": "weight", "s": 1},
    "weight s=2 antithetic": {"estimator": "weight", "s": 2, "antithetic": True},
    "weight s=5": {"estimator": "weight", "s": 5},
    "local s=1": {"estimator": "local", "s": 1},
    "flipout s=1": {"estimator": "flipout", "s": 1},
}
# What stays the same in a column: the run, the hyperparameters (those of other searches on validation data), and the
# estimators that are tried.
COLUMNS: dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]] = {
    "fashionmnist": (
        {"dataset": "fashionmnist", "clients": 200, "classes_per_client": 2, "model": "mlr"},
        {"lr": 0.0276, "lam": 0.00107, "nu0": -4.0, "personal_epochs": 20, "personal_lr": 0.01},
        ["weight s=2", "weight s=1", "local s=1"],
    ),
    "emnist": (
        {"dataset": "emnist", "clients": 150, "classes_per_client": 3, "model": "mlp"},
        {"lr": 0.12, "lam": 0.0107, "nu0": -3.5, "personal_epochs": 20, "personal_lr": 0.01},
        list(ESTIMATORS),
    ),
    "cifar10": (
        {"dataset": "cifar10", "clients": 100, "classes_per_client": 5, "model": "cnn"},
        {"lr": 0.0562, "lam": 0.01, "nu0": -4.0, "personal_epochs": 1, "personal_lr": 0.001},
        ["weight s=2", "weight s=1", "local s=1"],
    ),
}
HELD_OUT, ROUNDS, FIRST = 0.2, 100, 100  # the first seed, apart from those of test tables
MEASURES = {"accuracy": 100.0, "nll": 1.0, "ece": 1.0}


def cells(column: str, seeds: int, more: dict[str, Any]) -> dict[str, list[Cell]]:
    """By estimator, a cell for every seed."""
    run, hyper, names = COLUMNS[column]
    config = RunConfig(**run, rounds=ROUNDS, validation=HELD_OUT, algorithm="fedabml", **more)
    plain = hyper | {"server_momentum": 0.0}  # as the default was when the cells were made
    made = {name: config.with_changes(hyper=plain | ESTIMATORS[name]) for name in names}
    return {n: [Cell(n, c.with_changes(seed=FIRST + i)) for i in range(seeds)] for n, c in made.items()}


def line(name: str, own: list[Result], base: list[Result]) -> str:
    """A row of a column's table."""
    value = lambda result, measure: float(result.scores[0].summary[measure])  # noqa: E731
    words = [name]
    for measure, scale in MEASURES.items():
        digits = 2 if measure == "accuracy" else 4
        words.append(f"{scale * sum(value(r, measure) for r in own) / len(own):.{digits}f}")
        if measure != "ece":
            gap, half = interval(
                [scale * (value(a, measure) - value(b, measure)) for a, b in zip(own, base, strict=True)]
            )
            words.append(
                "–" if own is base else f"{gap:+.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
            )
    seconds = [sum(r.facts["seconds_training"] for r in results) for results in (own, base)]
    return "| " + " | ".join([*words, f"{seconds[0] / seconds[1]:.2f}"]) + " |"


def table(column: str, found: dict[str, list[Result]]) -> str:
    """What a column's cells say."""
    run, hyper, _ = COLUMNS[column]
    base = found[BASE]
    facts = base[0].facts
    head = ["estimator", "accuracy", f"against {BASE}", "NLL", f"against {BASE}", "ECE", "time of training"]
    rows = [line(name, own, base) for name, own in found.items() if not any(r.error for r in own)]
    rows += [f"| {name} | diverged |" + " |" * 5 for name, own in found.items() if any(r.error for r in own)]
    said = ", ".join(f"{k} {v}" for k, v in hyper.items())
    return "\n".join([
        f"## {column}, {run['clients']} × {run['classes_per_client']} classes, {run['model']}, {len(base)} seeds",
        "",
        f"{said}; {facts['dtype']}, {facts['device']}, torch {facts['versions']['torch']}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *rows,
        "",
    ])  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/estimators"))
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    ledger, parts = Ledger(told.out / "cells.jsonl"), []
    for column in told.columns.split(","):
        asked = cells(column, told.seeds, {"dtype": told.dtype, "compile": told.compile})
        for result in execute([cell for own in asked.values() for cell in own], ledger):
            print(column, result.label, result.seed, result.error or result.scores[0].summary["accuracy"], flush=True)
        parts.append(table(column, {name: [ledger[cell] for cell in own] for name, own in asked.items()}))
        write(told.out / f"{column}.md", parts[-1])
        print(parts[-1], flush=True)


if __name__ == "__main__":
    main()
