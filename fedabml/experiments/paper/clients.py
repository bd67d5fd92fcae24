"""Classifying clients by uncertainty, the paper's suggestion: which clients do not belong to this federation?

A tenth of the clients are strangers: their samples come from another dataset. All train together; then the server's
model looks at every client's training inputs, and those whose mean predictive entropy is far above the others' (more
than three robust deviations above the median) are flagged. The federation is trained again without them, and once more
for them alone. Reported are the test accuracy of both groups, before and after, and how well entropy separates
strangers from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import rng
from ...data import Federation, Rows
from ...engine.client import outputs
from ...engine.lanes import Lanes
from ...engine.rounds import Simulation
from ...evaluation.predictions import Prediction
from ...report.charts import Axis, Series, scatter
from ...runs.config import JsonDict, RunConfig
from ..cell import Cell
from ..study import Study
from .experiment import Context, Done, Experiment, by_column, by_label
from .findings import Findings, Mean, Picture, Sheet, listed
from .outside import OUTSIDE, auroc, check_outside, with_outside
from .settings import TITLES, person, systems

SHARE = 0.1  # of the clients are strangers, at least two
DEVIATIONS = 3.0
MAX_SAMPLES = 200  # samples of a client that the server's model looks at
GROUPS = ("inside", "strangers")
DETECTION = {"auroc": ("AUROC", 3), "found": ("found %", 0), "false": ("false alarms %", 0)}  # heads and decimals
# The accuracies of a record: of which training (by all, without the flagged, for them alone), of which group; the head.
ACCURACIES = {
    "inside_before": ("all", "inside", "inside, all train"),
    "inside_without": ("without", "inside", "without the flagged"),
    "strangers_before": ("all", "strangers", "strangers, all train"),
    "strangers_alone": ("for", "strangers", "flagged alone"),
}


@dataclass(frozen=True)
class Strangers(Study):
    """A federation with strangers, trained by all of its clients or by some."""

    other: str
    trained: tuple[int, ...] = ()  # who trains; empty: all

    def federation(self, config: RunConfig) -> Federation:
        everyone = _mixed(config, self.other)[0]
        return everyone.select(self.trained) if self.trained else everyone

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        everyone, strange = _mixed(config, self.other)
        return {name: everyone.select(np.flatnonzero(strange == (name == "strangers")).tolist()) for name in GROUPS}

    def observe(self, sim: Simulation) -> JsonDict:
        """Return the mean entropy of the server's model on every client's training inputs."""
        cohort, prior = sim.cohort, sim.cohort.algorithm.prior(sim.theta)
        assert prior is not None
        lane = type(prior)(*(leaf.unsqueeze(0) for leaf in prior))
        lanes = Lanes.after_round(cohort, sim.theta, [0], sim.round)
        key = cohort.keys(rng.PREDICT, sim.round, [-1])
        rows = [cohort.fed.train[client][:MAX_SAMPLES] for client in range(cohort.fed.clients)]
        with torch.no_grad():
            seen = [Prediction.of(outputs(lanes, lane, [inputs], None, key)).entropy.mean() for inputs in rows]
        return {"entropy": [round(float(v), 5) for v in seen]}


def _mixed(config: RunConfig, other: str) -> tuple[Federation, np.ndarray]:
    """Return the federation in which some clients have samples from outside, and a mask of these clients."""
    fed, first = with_outside(config, other)
    dice = np.random.Generator(np.random.PCG64([config.seed, 103]))
    chosen = dice.permutation(fed.clients)[: max(2, round(SHARE * fed.clients))]
    shares = np.array_split(first + dice.permutation(len(fed.y) - first), len(chosen))  # no sample has two owners
    known_labels = fed.label_counts() > 0
    lists = {split: [fed.rows(split)[c] for c in range(fed.clients)] for split in ("train", "test")}
    for client, pool in zip(chosen, shares, strict=True):
        index = pool[known_labels[client][fed.y[pool]]]
        cut = max(1, round(len(index) * 0.8))
        lists["train"][client] = index[:cut][: fed.train.counts[client]]
        lists["test"][client] = index[cut:][: fed.test.counts[client]]
    train, test = (Rows.of([index.tolist() for index in split]) for split in lists.values())
    return replace(fed, train=train, test=test), np.isin(np.arange(fed.clients), chosen)


def _threshold(entropy: Sequence[float] | np.ndarray) -> float:
    """Return the entropy above which a client is flagged: three robust deviations above the median."""
    middle = np.median(entropy)
    return float(middle + DEVIATIONS * 1.4826 * np.median(np.abs(np.asarray(entropy) - middle)))


def flagged(entropy: Sequence[float]) -> list[int]:
    """Return the clients whose entropy is above the threshold."""
    return np.flatnonzero(np.asarray(entropy) > _threshold(entropy)).tolist()


class Clients(Experiment):
    """Classifying clients by uncertainty."""

    title = "Classifying clients by uncertainty"
    claim = "A client's predictive uncertainty may tell whether it belongs to the federation; no numbers are given."
    columns = ("fashionmnist", "cifar10-5")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft")
    seeds = (3, 3)

    def cells(self, context: Context) -> list[Cell]:
        return [
            cell
            for column, name, config in systems(context, self, check=check_outside)
            for cell in context.seeded(f"{column} {name} all", config, study=Strangers(OUTSIDE[column]))
        ]

    def then(self, context: Context, finished: Sequence[Done]) -> list[Cell]:
        cells = []
        for cell, result in finished:
            if result.error:
                continue
            column, name, _ = cell.label.split()
            bad = flagged(result.found["entropy"])
            rest = [c for c in range(len(result.found["entropy"])) if c not in bad]
            for arm, who in (("without", rest), ("for", bad)):
                if bad and len(who) > 1:
                    study = Strangers(OUTSIDE[column], tuple(who))
                    cells.append(Cell(f"{column} {name} {arm}", cell.config, study=study))
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        conclusions, records, pictures = [], [], []
        for column, groups in by_column(finished).items():
            for name, cells in groups.items():
                arms = {label.split()[2]: arm for label, arm in by_label(cells).items()}
                detected = np.mean([_detection(d, OUTSIDE[column]) for d in arms["all"]], axis=0).tolist()
                record = {"column": column, "algorithm": name} | dict(zip(DETECTION, detected, strict=True))
                record |= {key: _accuracy(arms.get(arm, ()), group) for key, (arm, group, _) in ACCURACIES.items()}
                records.append(record)
                conclusions.append(
                    f"{TITLES[column]}, {context.name(name)}: entropy separates strangers with AUROC "
                    f"{record['auroc']:.3f}; {record['found']:.0%} of them are flagged."
                )
                pictures.append(_entropies(context, column, name, arms["all"][0]))
        percentages = [r | {key: 100 * r[key] for key in ("found", "false")} for r in records]
        heads = {head: (key, digits) for key, (head, digits) in DETECTION.items()}
        heads |= {head: (key, 2) for key, (_, _, head) in ACCURACIES.items()}
        grid = listed(percentages, "", lambda r: f"{TITLES[r['column']]}, {context.named(r)}", heads)
        note = "Accuracies in percent, mean over clients and seeds; a dash where nobody, or only one, was flagged"
        note += ", or runs are missing."
        return Findings(conclusions, [Sheet("Before and after", *grid, [note])], pictures, records)


def _detection(finished: Done, other: str) -> tuple[float, float, float]:
    """Return the AUROC of entropy, the share of strangers flagged, and the share of the others flagged."""
    entropy, strange = np.array(finished.result.found["entropy"]), _mixed(finished.cell.config, other)[1]
    bad = np.isin(np.arange(len(entropy)), flagged(entropy.tolist()))
    return auroc(entropy[~strange], entropy[strange]), float(bad[strange].mean()), float(bad[~strange].mean())


def _accuracy(cells: Sequence[Done], group: str) -> Mean | None:
    """Return the accuracy of a group of clients in percent; None where no run has it."""
    scores = {d.result.seed: s for d in cells for s in d.result.scores if s.on == group and not s.error}
    return Mean({seed: 100 * s.summary["accuracy"] for seed, s in scores.items()}) if scores else None


def _entropies(context: Context, column: str, name: str, finished: Done) -> Picture:
    """Draw the entropy of every client of a run, with the threshold above which it is flagged."""
    title = f"{context.name(name)}, {TITLES[column]}"
    entropy, strange = np.array(finished.result.found["entropy"]), _mixed(finished.cell.config, OUTSIDE[column])[1]
    rank = np.empty(len(entropy))
    rank[np.argsort(entropy)] = np.arange(1, len(entropy) + 1)
    series = []
    for word, mask in (("inside", ~strange), ("strangers", strange)):
        heights, who = entropy[mask].tolist(), [person(column, int(client)) for client in np.flatnonzero(mask)]
        tips = [f"{name}\n{word}: {height:.3f} nats" for name, height in zip(who, heights, strict=True)]
        series.append(Series(word, heights, rank[mask].tolist(), tips, who=who))
    options = {"x": Axis("clients by entropy", "whole"), "y": Axis("mean entropy, nats"), "level": _threshold(entropy)}
    caption = "The mean entropy of the server's model on each client's training inputs; flagged above the dashed line."
    return Picture(f"clients-{column}-{name}", title, caption, scatter, series, options)
