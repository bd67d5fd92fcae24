"""Accuracy on real data: every method tuned with one budget on validation data, then scored once on test data.

    python -m benchmarks.accuracy tune  --column fashionmnist --cells results/core/fashionmnist.jsonl --workers 8
    python -m benchmarks.accuracy test  --column fashionmnist --cells results/core/fashionmnist.jsonl --seeds 5
    python -m benchmarks.accuracy table --column fashionmnist --cells results/core/fashionmnist.jsonl
    python -m benchmarks.accuracy picture --column cifar10-5 --cells results/core/cifar10-5.jsonl --out picture.svg

A cell is one trained federation; it is one JSON line, written when it is done, and never run twice. Tuning trains each
of a method's configurations once (seed 100, a fifth of every client's training data held out) and scores all personal
options on the held-out part; the best accuracy there is what `test` trains, on all training data, with seeds 0, 1, ...
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedabml import algorithms
from fedabml.data import federate, load
from fedabml.engine.rounds import Simulation
from fedabml.evaluation.scoring import evaluate
from fedabml.runs.prepare import prepare

TUNING_SEED = 100
Cell = dict[str, Any]


def grid(**choices: list[Any]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: an algorithm, the configurations it is trained with, the personal options tried on each."""

    algorithm: str
    training: list[dict[str, Any]]
    personal: list[dict[str, Any]]


def options(epochs: list[int], rates: list[float]) -> list[dict[str, Any]]:
    """Personal options."""
    return [{"personal_epochs": e, "personal_lr": r} for e in epochs for r in rates]


ZERO = [{"personal_epochs": 0}]
LEARNED = {"prior_std": "learned", "rho_std": 0.1, "posterior_std": "natural", "lr_std": 0.05}
RATES = [0.01, 0.02, 0.03, 0.05, 0.1]
LAMBDAS = [1.0, 0.1, 0.01]
BAYES = {"s": 2, "average": 0.8}
# What was the default when the cells were made; it is no part of them.
MEANT: dict[str, dict[str, Any]] = {"fedabml": {"estimator": "weight", "short_batch": "whole", "server_momentum": 0.0}}
FASHION = options([1, 5, 20, 50], [0.003, 0.01, 0.03])
CIFAR = options([1, 5], [0.003, 0.01, 0.03]) + options([10], [0.01])
COLUMNS: dict[str, dict[str, Any]] = {
    "fashionmnist": {
        "dataset": "fashionmnist", "clients": 200, "classes_per_client": 2, "model": "mlr", "chunk": 200,
        "methods": {
            "Local only": Method("local", grid(lr=RATES), ZERO + FASHION),
            "FedAvg + fine-tuning": Method("fedavg-ft", grid(lr=[0.003, *RATES], average=[0.8]), FASHION),
            "FedABML": Method("fedabml", [
                *({"lr": r, "nu0": v, "lam": 0.01, **BAYES} for r in (0.01, 0.03, 0.1) for v in (-5.0, -4.0, -3.0)),
                *({"lr": 0.03, "nu0": v, "lam": lam, **BAYES, **LEARNED} for v in (-3.0, -4.0) for lam in LAMBDAS),
            ], ZERO + options([5, 20, 50], [0.001, 0.003, 0.01, 0.03])),
        },
    },
    "cifar10-5": {
        "dataset": "cifar10", "clients": 100, "classes_per_client": 5, "model": "cnn", "chunk": 25,
        "methods": {
            "FedABML, no label level": Method("fedabml", [
                {"lr": r, "label_prior": "none", "average": 0.8, **more}
                for r, more in [(0.0562, {"nu0": -4.0, "lam": 0.01, "s": 4}),
                                (0.0562, {"nu0": -4.0, "lam": 0.001, "s": 4}),
                                (0.0316, {"nu0": -4.0, "lam": 0.001, "s": 4}),
                                (0.0562, {"nu0": -3.5, "lam": 0.01, "s": 4}),
                                (0.0562, {"nu0": -4.0, "lam": 0.01, "s": 2, **LEARNED})]], CIFAR),
            "FedABML": Method("fedabml", [
                {"lr": r, "average": av, "lam": 0.01, **more}
                for r, av, more in [(0.0562, 0.8, {"nu0": -4.0, "s": 4}), (0.1, 0.8, {"nu0": -4.0, "s": 4}),
                                    (0.0562, 0.9, {"nu0": -4.0, "s": 4}), (0.0562, 0.8, {"nu0": -3.5, "s": 4}),
                                    (0.0562, 0.8, {"nu0": -4.0, "s": 2, **LEARNED})]],
                ZERO + options([1, 5], [0.001, 0.003, 0.01])),
            "FedAvg + fine-tuning": Method("fedavg-ft", [
                {"lr": r, "average": av}
                for r, av in [(0.0178, 0.8), (0.0316, 0.8), (0.0562, 0.8), (0.1, 0.8), (0.0316, 0.0)]], CIFAR),
        },
    },
}  # fmt: skip
PAPER = {"fashionmnist": {"Local only": 95.52, "FedAvg + fine-tuning": 96.50, "FedABML": 96.57},
         "cifar10-5": {"Local only": 57.08, "FedAvg + fine-tuning": 72.45, "FedABML": 75.34}}  # fmt: skip


def run_cell(job: tuple[str, Cell, int]) -> list[Cell]:
    """Trains one configuration and scores its personal options."""
    column, cell, rounds = job
    spec, start = COLUMNS[column], time.perf_counter()
    seed, tuning = cell["seed"], cell["stage"] == "tune"
    data = load(spec["dataset"])
    fed = federate(data, clients=spec["clients"], classes_per_client=spec["classes_per_client"], seed=seed)
    fed = fed.hold_out(0.2, seed) if tuning else fed
    algorithm = algorithms.make(cell["algorithm"], **MEANT.get(cell["algorithm"], {}), **cell["training"])
    words: Any = {"rounds": rounds, "participation": 0.1, "epochs": 5, "batch_size": 50, "seed": seed, "dtype": "tf32"}
    setup = prepare(fed, spec["model"], algorithm, chunk=spec["chunk"], **words)
    sim = Simulation(setup.cohort, participation=0.1, epochs=5)
    facts = {k: setup.config[k] for k in ("device", "backend", "chunk", "partition_hash", "versions", "fedabml")}
    rows = []
    try:
        sim.run(rounds)
        trained = time.perf_counter() - start
        for personal in cell["personal"]:
            cohort = setup.cohort.using(dataclasses.replace(algorithm, **personal))
            found = evaluate(cohort, sim.theta, sim.kept_for, "val" if tuning else "test", rounds)
            own = [] if tuning else np.round(found.clients["accuracy"], 4).tolist()
            score = {k: v for k, v in found.summary.items() if not isinstance(v, list)}
            rows.append({**cell, "personal": personal, "summary": score, "clients": own, "seconds": trained, **facts})
    except Exception as error:  # a diverging configuration is a result too
        rows.append({**cell, "personal": None, "error": f"{type(error).__name__}: {error}"})
    return rows


def read(path: Path) -> list[Cell]:
    """The finished cells."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def identity(cell: Cell) -> str:
    """What makes a trained federation the same."""
    return json.dumps([cell[k] for k in ("stage", "method", "algorithm", "training", "seed", "rounds")], sort_keys=True)


def best(cells: list[Cell], method: str) -> Cell:
    """The configuration with the highest validation accuracy (ties: the lower NLL)."""
    own = [c for c in cells if c["stage"] == "tune" and c["method"] == method and "error" not in c]
    return max(own, key=lambda c: (round(c["summary"]["accuracy"], 4), -c["summary"]["nll"]))


def jobs(column: str, stage: str, seeds: int, rounds: int, done: list[Cell], only: list[str]) -> list[Cell]:
    """The cells of a stage that are not finished."""
    wanted = []
    for name, method in COLUMNS[column]["methods"].items():
        if only and name not in only:
            continue
        common = {"stage": stage, "method": name, "algorithm": method.algorithm, "rounds": rounds}
        if stage == "tune":
            for training in method.training:
                wanted.append({**common, "training": training, "personal": method.personal, "seed": TUNING_SEED})
        else:
            chosen = best(done, name)
            for seed in range(seeds):
                wanted.append(
                    {**common, "training": chosen["training"], "personal": [chosen["personal"]], "seed": seed}
                )
    finished = {identity(c) for c in done}
    return [c for c in wanted if identity(c) not in finished]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half of the 95% interval over seeds (Student)."""
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), float(half)


def chosen_tests(cells: list[Cell]) -> dict[str, dict[int, Cell]]:
    """By method and seed, the test cells of the configurations that the validation data chose."""
    picked = {name: best(cells, name) for name in {c["method"] for c in cells}}
    chosen = lambda c: all(c[k] == picked[c["method"]][k] for k in ("training", "personal"))  # noqa: E731
    tests = [c for c in cells if c["stage"] == "test" and "error" not in c and chosen(c)]
    by: dict[str, dict[int, Cell]] = {}
    for c in tests:
        by.setdefault(c["method"], {})[c["seed"]] = c
    return by


def picture(cells: list[Cell]) -> str:
    """Every client's accuracy under FedABML and under FedAvg + fine-tuning, one dot per client and seed."""
    from fedabml.report.canvas import Axis, Series, scatter

    by = chosen_tests(cells)
    rival, ours = by["FedAvg + fine-tuning"], by["FedABML"]
    series = [Series(f"seed {s}", ours[s]["clients"], rival[s]["clients"]) for s in sorted(rival.keys() & ours.keys())]
    x, y = (Axis(f"accuracy under {name}", "percent", (0.4, 1.0)) for name in ("FedAvg + fine-tuning", "FedABML"))
    return scatter(series, title="Test accuracy of every client", x=x, y=y, diagonal=True)


def table(column: str, cells: list[Cell]) -> str:
    """A Markdown table of the test cells, and FedABML's paired differences to the others."""
    from scipy import stats

    lines = [
        "| method | accuracy | paper | NLL | ECE | Brier | worst decile | chosen on validation data |",
        "|---|" + "---|" * 7,
    ]
    by = chosen_tests(cells)
    for name, own in by.items():
        one = next(iter(own.values()))
        pick = lambda k, own=own: interval(np.array([c["summary"][k] for c in own.values()]))  # noqa: E731
        mean, half = pick("accuracy")
        words = ", ".join(f"{k}={v}" for k, v in {**one["training"], **one["personal"]}.items())
        lines.append(
            f"| {name} | {100 * mean:.2f} ± {100 * half:.2f} | {PAPER[column].get(name, '–')} | {pick('nll')[0]:.4f} | "
            f"{pick('ece')[0]:.4f} | {pick('brier')[0]:.4f} | {100 * pick('accuracy_worst_decile')[0]:.1f} | {words} |"
        )
    first = by.get("FedABML", {})
    for name, own in by.items():
        both = sorted(first.keys() & own.keys())
        if name == "FedABML" or len(both) < 2:
            continue
        pairs = np.array([np.array(first[s]["clients"]) - np.array(own[s]["clients"]) for s in both]) * 100
        mean, half = interval(pairs.mean(1))
        seeds_p = stats.ttest_rel(*[[np.mean(m[s]["clients"]) for s in both] for m in (first, own)]).pvalue
        clients_p = stats.wilcoxon(pairs.ravel(), zero_method="zsplit").pvalue
        lines.append(
            f"\nFedABML − {name}: {mean:+.2f} ± {half:.2f} points over {len(both)} seeds; paired t-test over seeds "
            f"p = {seeds_p:.3g}, Wilcoxon over {pairs.size} clients p = {clients_p:.3g}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tune", "test", "table", "picture"])
    parser.add_argument("--column", choices=COLUMNS, required=True)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("picture.svg"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--method", action="append", default=[], help="only this method (repeatable)")
    args = parser.parse_args()
    done = read(args.cells)
    if args.stage == "table":
        print(table(args.column, done))
        return
    if args.stage == "picture":
        args.out.write_text(picture(done))
        return
    todo = jobs(args.column, args.stage, args.seeds, args.rounds, done, args.method)
    args.cells.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1" if args.workers > 1 else "2")
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool, open(args.cells, "a") as out:
        work = pool.imap_unordered(run_cell, [(args.column, c, args.rounds) for c in todo])
        for number, rows in enumerate(work, 1):
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            top = max((r["summary"]["accuracy"] for r in rows if "summary" in r), default=float("nan"))
            what = rows[0].get("error", f"best accuracy {top:.4f}, trained in {rows[0].get('seconds', 0):.0f} s")
            print(
                f"{number}/{len(todo)} {rows[0]['method']} {rows[0]['training']} seed {rows[0]['seed']}: {what}",
                flush=True,
            )


if __name__ == "__main__":
    main()
