"""Which step sizes algorithms have unless others are given: validation scores of every algorithm on five small tasks.

    FEDABML_DATA=FOLDER python -m benchmarks.defaults [--algorithms fedabml,fedavg-ft] [--out results/defaults]

Every algorithm gets the same budget: four step sizes, two seeds and, on each trained federation, the same grid of
personal epochs and step sizes; all else is its default. A fifth of every client's training data is held out and scored;
test data are never read. A task's score is accuracy in percent, or for regression 100 (1 − RMSE/σ) with σ the deviation
of the target. The page has, for every algorithm, the present default, the best of the grid over all tasks, and what the
best of each task alone would give. Finished cells are not run again. The tables come from scikit-learn.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedabml.data import Federation
from fedabml.errors import InputError
from fedabml.experiments.cell import Cell, Result
from fedabml.experiments.compare import FORMER, FORMER_OWN
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper.newcomers import few
from fedabml.experiments.runner import execute
from fedabml.experiments.study import Study, federation
from fedabml.files.paths import write
from fedabml.runs.config import RunConfig

ALGORITHMS = (
    *("fedabml", "fedavg-ft", "local", "ditto", "fedabml-plain", "scaffold-ft", "fedprox-ft", "perfedavg", "apfl"),
    *("fedrep", "fedbabu", "pfedme", "fedpop", "pfedbayes", "fedpa", "fola"),
)
SEEDS = (100, 101)
RATES = (0.01, 0.03, 0.1, 0.3)
EPOCHS = (0, 5)
PERSONAL = (None, 0.003, 0.01, 0.03, 0.1)  # none: what the algorithm takes unless it is given one
SHARE = 0.2
SHOWN = ((0.03, 0, None), (0.03, 5, None), (0.1, 0, None), (0.1, 5, 0.03))  # former defaults, and those of today


@dataclass(frozen=True)
class Part(Study):
    """The first clients of a federation, with so many training samples each."""

    clients: int
    samples: int

    def federation(self, config: RunConfig) -> Federation:
        whole = federation(config.with_changes(validation=0.0)).select(range(self.clients))
        return few(whole, self.samples, config.seed).hold_out(config.validation, config.seed)


@dataclass(frozen=True)
class Bundled(Study):
    """A table of scikit-learn, its rows sorted by one column and cut into clients of equal size."""

    table: str
    column: int
    clients: int

    def federation(self, config: RunConfig) -> Federation:
        from sklearn import datasets

        found = getattr(datasets, f"load_{self.table}")()
        x = found.data.astype(np.float32)
        y = found.target.astype(np.float32) if self.table == "diabetes" else found.target.astype(np.int64)
        parts = np.array_split(np.argsort(x[:, self.column], kind="stable"), self.clients)
        pairs = [(x[part], y[part]) for part in parts]
        return Federation.from_arrays(pairs, dataset=self.table).hold_out(config.validation, config.seed)


TASKS: dict[str, tuple[dict[str, Any], Study | None]] = {
    "digits-few, MLP": ({"dataset": "digits-few", "clients": 40, "classes_per_client": 5}, None),
    "FashionMNIST, MLR": ({"dataset": "fashionmnist", "clients": 200, "model": "mlr"}, Part(40, 100)),
    "EMNIST, MLP": (
        {"dataset": "emnist", "clients": 150, "classes_per_client": 3, "model_options": {"hidden": [64]}},
        Part(30, 60),
    ),
    "breast cancer, MLP": ({}, Bundled("breast_cancer", 1, 20)),
    "diabetes, MLP": ({}, Bundled("diabetes", 0, 20)),
}
RUN: dict[str, Any] = {"model": "mlp", "rounds": 20, "participation": 0.25, "validation": SHARE}


def cells(task: str, algorithm: str) -> list[Cell]:
    """The runs of an algorithm on a task."""
    setting, study = TASKS[task]
    before = FORMER | FORMER_OWN.get(algorithm, {})  # whatever the defaults are today, a cell stays the same
    options = tuple({"personal_epochs": e, "personal_lr": p} for e in EPOCHS for p in (PERSONAL if e else (None,)))
    return [
        Cell(f"{task}: {algorithm}", config, options, study=study)
        for seed in SEEDS
        for lr in RATES
        for config in [RunConfig(**RUN | setting, algorithm=algorithm, hyper=before | {"lr": lr}, seed=seed)]
    ]


def scores(results: Sequence[Result]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """By (lr, personal_epochs, personal_lr): score and NLL, means over seeds; a setting that diverged has none."""
    found = defaultdict(list)
    for result in results:
        algorithm = result.config.get("algorithm", RunConfig.algorithm)
        for score in result.scores:
            if not score.error:
                main = 100 * (score.summary["accuracy"] if "accuracy" in score.summary else _skill(score.summary))
                key = (result.config[algorithm]["lr"], score.personal["personal_epochs"], score.personal["personal_lr"])
                found[key].append((main, score.summary["nll"]))
    return {key: tuple(np.mean(v, axis=0)) for key, v in found.items() if len(v) == len(SEEDS)}


def _skill(summary: dict[str, Any]) -> float:
    from sklearn.datasets import load_diabetes

    return 1 - summary["rmse"] / float(load_diabetes().target.std())


def page(results: Iterable[Result]) -> str:
    """A row per algorithm: mean scores over its tasks, of the former and the common step sizes and of the best."""
    groups: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        task, name = result.label.split(": ")
        groups[name][task].append(result)
    lines = [
        "# Default step sizes, by validation data",
        "",
        "`python -m benchmarks.defaults`: mean score over the tasks (accuracy in percent; for regression",
        "100 (1 − RMSE/σ)), mean NLL in brackets. A setting is lr, personal epochs, personal lr (none: the algorithm's",
        "own rule). – : diverged on some task. FedRep, FedBABU and FedPop have four tasks, for MLR has no body.",
        "",
        "| algorithm | " + " | ".join(map(_words, SHOWN)) + " | best of the grid | best of each task alone |",
        "|---" * (len(SHOWN) + 3) + "|",
    ]
    for name in (name for name in ALGORITHMS if name in groups):
        tasks = [scores(own) for own in groups[name].values()]
        mean = {k: np.mean([t[k] for t in tasks], axis=0) for k in tasks[0] if all(k in t for t in tasks)}
        best = max(mean, key=lambda k: mean[k][0])
        alone = np.mean([max(v[0] for v in t.values()) for t in tasks])
        cells = [f"{mean[k][0]:.2f} ({mean[k][1]:.3f})" if k in mean else "–" for k in (*SHOWN, best)]
        lines.append(f"| {name} | {' | '.join(cells)}: {_words(best)} | {alone:.2f} |")
    return "\n".join(lines) + "\n"


def _words(setting: tuple[Any, ...]) -> str:
    return ", ".join("none" if value is None else f"{value:g}" for value in setting)


def main() -> None:
    """Runs what is missing, then writes cells.jsonl and defaults.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--out", type=Path, default=Path("results/defaults"))
    words = parser.parse_args()
    ledger = Ledger(words.out / "cells.jsonl")
    for algorithm in words.algorithms.split(","):
        for task in TASKS:
            try:
                for result in execute(cells(task, algorithm), ledger):
                    print(result.label, result.config, f"{result.facts['seconds']:.1f} s", flush=True)
            except InputError as error:  # some algorithms need a network with a body and a head
                print(f"{task}: {algorithm} is left out. {error}", flush=True)
    write(words.out / "defaults.md", page(ledger.results.values()))


if __name__ == "__main__":
    main()
