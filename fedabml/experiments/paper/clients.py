"""Classifying clients by uncertainty, the paper's suggestion: which clients do not belong to this federation?

A tenth of the clients are strangers: their samples come from another dataset. All train together; then the server's
model looks at every client's training inputs, and those whose mean predictive entropy is far above the others' (more
than three robust deviations above the median) are flagged. The federation is trained again without them, and once more
for them alone: reported is the test accuracy of both groups, before and after, and how well entropy tells strangers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import rng
from ...data import Federation, Rows
from ...engine.client import Lanes, outputs
from ...engine.rounds import Simulation
from ...evaluation.predictions import Prediction
from ...report.canvas import Series, scatter
from ...report.frame import Axis, Look
from ...runs.config import RunConfig, Table
from ..cell import Cell
from ..statistics import mean
from ..study import Study
from . import numbers
from .columns import COLUMNS, rows
from .experiment import Desk, Done, Experiment
from .findings import NONE, Drawing, Findings, Sheet, number, spread
from .outside import OUTSIDE, auroc, pairs, with_outside
from .pictures import person

SHARE = 0.1  # of the clients are strangers, at least two
DEVIATIONS = 3.0
MOST = 200  # samples of a client that the server's model looks at
GROUPS = ("inside", "strangers")


@dataclass(frozen=True)
class Strangers(Study):
    """A federation with strangers; trained by all of its clients, or by some."""

    other: str
    trained: tuple[int, ...] = ()  # who trains; nobody said: all

    def federation(self, config: RunConfig) -> Federation:
        whole = _mixed(config, self.other)[0]
        return whole.select(self.trained) if self.trained else whole

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        whole, strange = _mixed(config, self.other)
        return {name: whole.select(np.flatnonzero(strange == (name == "strangers")).tolist()) for name in GROUPS}

    def look(self, sim: Simulation) -> Table:
        """The entropy of the server's model on every client's training inputs."""
        cohort, prior = sim.cohort, sim.cohort.algorithm.prior(sim.theta)
        assert prior is not None
        lane, lanes = type(prior)(*(leaf.unsqueeze(0) for leaf in prior)), Lanes.of(cohort, sim.theta, [0], sim.round)
        key = cohort.keys(rng.PREDICT, sim.round, [-1])
        rows = [cohort.fed.train[client][:MOST] for client in range(cohort.fed.clients)]
        with torch.no_grad():
            seen = [Prediction.of(outputs(lanes, lane, [own], None, key)).entropy.mean() for own in rows]
        return {"entropy": [round(float(v), 5) for v in seen]}


def _mixed(config: RunConfig, other: str) -> tuple[Federation, np.ndarray]:
    """The federation in which some clients have samples from outside in place of their own, and who they are."""
    fed, first = with_outside(config, other)
    dice = np.random.Generator(np.random.PCG64([config.seed, 103]))
    chosen = dice.permutation(fed.clients)[: max(2, round(SHARE * fed.clients))]
    shares = np.array_split(first + dice.permutation(len(fed.y) - first), len(chosen))  # no sample has two owners
    mine, lists = fed.label_counts() > 0, {s: [fed.rows(s)[c] for c in range(fed.clients)] for s in ("train", "test")}
    for client, pool in zip(chosen, shares, strict=True):
        own = pool[mine[client][fed.y[pool]]]
        cut = max(1, round(len(own) * 0.8))
        lists["train"][client] = own[:cut][: fed.train.counts[client]]
        lists["test"][client] = own[cut:][: fed.test.counts[client]]
    train, test = (Rows.of([own.tolist() for own in lists[split]]) for split in ("train", "test"))
    made = replace(fed, train=train, test=test)
    return made, np.isin(np.arange(fed.clients), chosen)


def flagged(entropy: Sequence[float]) -> list[int]:
    """Those more than three robust deviations above the median."""
    values = np.asarray(entropy)
    middle = np.median(values)
    deviation = 1.4826 * np.median(np.abs(values - middle))
    return np.flatnonzero(values > middle + DEVIATIONS * deviation).tolist()


class Clients(Experiment):
    """Classifying clients by uncertainty."""

    title = "Classifying clients by uncertainty"
    claim = "A client's predictive uncertainty may tell whether it belongs to the federation; no numbers are given."
    columns = ("fashionmnist", "cifar10-5")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft")
    seeds = (3, 3)

    def cells(self, desk: Desk) -> list[Cell]:
        made = []
        for column, other in pairs(desk, self.columns):
            for name, config in rows(desk, column, self.algorithms).items():
                configs = [config.with_changes(seed=seed) for seed in desk.ask.seed_list]
                made += [Cell(f"{column} {name} all", each, study=Strangers(other)) for each in configs]
        return made

    def then(self, desk: Desk, done: Sequence[Done]) -> list[Cell]:
        made = []
        for cell, result in done:
            if result.error:
                continue
            column, name, _ = cell.label.split()
            bad = flagged(result.found["entropy"])
            fine = [c for c in range(len(result.found["entropy"])) if c not in bad]
            for word, who in (("without", fine), ("for", bad)):
                if bad and len(who) > 1:
                    study = Strangers(OUTSIDE[column], tuple(who))
                    made.append(Cell(f"{column} {name} {word}", cell.config, study=study))
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        protocol = desk.ask.protocol
        found: dict[tuple[str, str], dict[str, list[Done]]] = {}
        for each in done:
            column, name, word = each.cell.label.split()
            found.setdefault((column, name), {}).setdefault(word, []).append(each)
        table, records, said = [], [], []
        for (column, name), own in found.items():
            told = [_told(each, OUTSIDE[column]) for each in own["all"]]
            area, hits, alarms = (mean([t[i] for t in told]) for i in range(3))
            scores = {(w, g): _accuracy(own.get(w, ()), g) for w in ("all", "without", "for") for g in GROUPS}
            inside = [scores["all", "inside"], scores["without", "inside"]]
            strange = [scores["all", "strangers"], scores["for", "strangers"]]
            words = [NONE if v is None else spread(v) for v in (*inside, *strange)]
            title = f"{COLUMNS[column].title}, {numbers.name(name, protocol)}"
            table.append([title, number(area[0], 3), number(100 * hits[0], 0), number(100 * alarms[0], 0), *words])
            plain = [None if v is None else v[0] for v in (*inside, *strange)]
            keys = ("inside_before", "inside_without", "strangers_before", "strangers_alone")
            records.append({"column": column, "algorithm": name, "auroc": area[0], "found": hits[0], "false": alarms[0]}
                           | dict(zip(keys, plain, strict=True)))  # fmt: skip
            said.append(
                f"{title}: entropy tells strangers with AUROC {area[0]:.3f}; {hits[0]:.0%} of them are flagged."
            )
        head = ["", "AUROC", "found %", "false alarms %", "inside, all train", "without the flagged"]
        head += ["strangers, all train", "flagged alone"]
        note = "Accuracies in percent, mean over clients and seeds; a dash where nobody, or only one, was flagged"
        note += ", or runs are missing."
        drawings = [_entropies(key, own["all"][0], protocol) for key, own in found.items()]
        sheet = Sheet("Before and after", head, table, note)
        return Findings(self.title, self.claim, said, [sheet], drawings, records, desk.notes)


def _told(done: Done, other: str) -> tuple[float, float, float]:
    """AUROC of entropy, the share of strangers flagged, and the share of the others flagged."""
    entropy, strange = np.array(done.result.found["entropy"]), _mixed(done.cell.config, other)[1]
    bad = np.isin(np.arange(len(entropy)), flagged(entropy.tolist()))
    return auroc(entropy[~strange], entropy[strange]), float(bad[strange].mean()), float(bad[~strange].mean())


def _accuracy(own: Sequence[Done], group: str) -> tuple[float, float | None] | None:
    values = [100 * s.summary["accuracy"] for d in own for s in d.result.scores if s.on == group and not s.error]
    return mean(values) if values else None


def _entropies(key: tuple[str, str], done: Done, protocol: str) -> Drawing:
    column, name = key
    title = f"{numbers.name(name, protocol)}, {COLUMNS[column].title}"

    def draw(look: Look) -> str:
        entropy, strange = np.array(done.result.found["entropy"]), _mixed(done.cell.config, OUTSIDE[column])[1]
        order = np.argsort(entropy)
        rank = np.empty(len(order))
        rank[order] = np.arange(1, len(order) + 1)
        limit = float(np.median(entropy) + DEVIATIONS * 1.4826 * np.median(np.abs(entropy - np.median(entropy))))
        series = []
        for word, mask in (("inside", ~strange), ("strangers", strange)):
            heights, who = entropy[mask].tolist(), [person(column, int(client)) for client in np.flatnonzero(mask)]
            tips = [f"{own}\n{word}: {height:.3f} nats" for own, height in zip(who, heights, strict=True)]
            series.append(Series(word, heights, rank[mask].tolist(), tips, who=who))
        x, y = Axis("clients by entropy", "whole"), Axis("mean entropy, nats")
        return scatter(series, title=title, x=x, y=y, look=look, level=limit)

    reading = "The mean entropy of the server's model on each client's training inputs; flagged above the dashed line."
    return Drawing(f"clients-{column}-{name}", title, reading, draw)
