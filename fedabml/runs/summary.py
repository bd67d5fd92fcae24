"""The results of a finished run: summary.json and clients.csv."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data import Federation
from ..engine.rounds import Simulation
from ..evaluation.measures import main_measure
from ..evaluation.scoring import Evaluation
from ..files.sheets import csv_text
from ..gaussian import Gaussian
from ..vectors import LIKELIHOOD

if TYPE_CHECKING:
    from .prepare import Setup

# The scores of a summary, null where a run was not evaluated.
_STRUCTURED = (
    *("accuracy", "exact_match", "nll", "ece", "brier", "entropy", "mutual_information", "accuracy_pooled"),
    *("accuracy_last10", "accuracy_worst_decile", "prior_accuracy", "prior_nll"),
)
SUMMARY_KEYS = {
    "classification": (
        *("accuracy", "nll", "ece", "brier", "entropy", "mutual_information", "accuracy_pooled", "accuracy_last10"),
        *("accuracy_worst_decile", "prior_accuracy", "prior_nll", "prior_level_accuracy", "prior_level_nll"),
    ),
    "regression": ("rmse", "nll", "coverage", "rmse_pooled", "rmse_last10", "prior_rmse", "prior_nll"),
    "multilabel": _STRUCTURED,
    "sequence": _STRUCTURED,
}


def summarise(
    setup: Setup, sim: Simulation, history: list[dict[str, Any]], final: Evaluation | None, split: str, seconds: float
) -> dict[str, Any]:
    """Return the summary of a run: its setting, its scores and its costs."""
    config, fed = setup.config, setup.cohort.fed
    line = history[-1] if history else {"bytes_up": 0, "bytes_down": 0, "loss": None}
    summary = {
        k: config[k] for k in ("dataset", "model", "seed", "rounds", "clients", "parameters", "device", "backend")
    }
    summary |= {"algorithm": config["algorithm"]["name"], "task": fed.task, "split": split, "loss": line["loss"]}
    summary["chunk"] = setup.cohort.chunk  # smaller than at the start if memory did not suffice
    if sim.compiled:
        summary["compiled"] = sim.compiled  # the first round with compiled steps
    main = main_measure(fed.task)
    if final is not None:
        summary |= final.summary | final.details
        summary[f"{main}_last10"] = last_ten(history, setup.rounds, main, final.summary[main])
    else:
        summary |= dict.fromkeys(SUMMARY_KEYS[fed.task])
    width = prior_width(setup, sim)
    if width:
        summary["prior_width"] = width
    if setup.cohort.device.type == "cuda":
        summary["peak_device_bytes"] = torch.cuda.max_memory_allocated(setup.cohort.device)
    costs = {"bytes_up": line.get("bytes_up", 0), "bytes_down": line.get("bytes_down", 0), "seconds": seconds}
    return summary | costs | {"peak_memory_bytes": peak_memory(), "partition_hash": config["partition_hash"]}


def peak_memory() -> int | None:
    """Return the largest memory of this process in bytes; None if the system does not report it."""
    try:  # on Linux getrusage also counts the memory of the parent process
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prior_width(setup: Setup, sim: Simulation) -> list[dict[str, Any]]:
    """Return the mean standard deviation of the prior in every layer: which layers clients may personalise."""
    prior = setup.cohort.algorithm.prior(sim.theta)
    if not isinstance(prior, Gaussian):
        return []
    layout = setup.cohort.network.layout
    if prior.logstd.max() == prior.logstd.min():
        return []  # the widths are those of the start: none was learned
    parts = layout.split(prior.logstd.exp())
    return [
        {"name": name, "mean_std": float(part.mean()), "parameters": part.numel()}
        for name, part in parts.items()
        if name != LIKELIHOOD
    ]


def client_records(fed: Federation, final: Evaluation, split: str) -> list[dict[str, Any]]:
    """Return a record per client: its number, name, sizes and scores, NaN where it has none."""
    sizes = {"n_train": fed.train.counts, f"n_{split}": fed.rows(split).counts}
    columns = {"client": range(fed.clients), "name": fed.names}
    columns |= {name: values.tolist() for name, values in (sizes | final.clients).items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def clients_csv(fed: Federation, final: Evaluation, split: str) -> str:
    """Return clients.csv: the scores of every client, one row each."""
    rows = client_records(fed, final, split)
    texts = ([f"{v:.6g}" if isinstance(v, float) and v == v else "" if v != v else v for v in r.values()] for r in rows)
    return csv_text(list(rows[0]), texts)


def last_ten(history: list[dict[str, Any]], rounds: int, measure: str, final: float | None) -> float | None:
    """Return the mean of a measure over the evaluations of the last ten rounds, the final one among them."""
    late = (line.get("eval", {}) for line in history if rounds - 10 < line["round"] < rounds)
    values = [scores[measure] for scores in late if scores.get(measure) is not None]
    values += [final] if final is not None else []
    return math.fsum(values) / len(values) if values else None
