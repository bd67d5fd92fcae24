"""Uncertainty: do clients' models know what is not theirs?

Every client predicts its own test data (in), samples of another dataset with the labels it knows (out), and test
samples of classes it never saw (other classes). The paper shows densities of the predictive entropy H = −Σ p log p, one
curve per client, and claims that FedABML's is low inside and high outside. Beside the pictures are numbers: AUROC of
entropy, of mutual information, of 1 − max p and of surprise, pooled and per client; ECE, NLL and Brier of the client's
own data.

With a label level a client gives classes that it never saw almost no probability: that must hurt on other classes. Of a
client whose labels shift away from its counts, so that a share of its samples are of classes that it never saw, the
accuracy is (1 − share) of that on its own classes and the share of that on the others; where the level no longer pays
is said. Entropy under the label level is then the wrong question; surprise (`evaluation.predictions.surprise`) asks the
network alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...data import Federation
from ...engine.client import Lanes, outputs, personalise, predict
from ...engine.rounds import Simulation
from ...engine.setting import Cohort
from ...evaluation.predictions import Prediction, surprise
from ...report.canvas import Series, line_chart
from ...report.frame import Axis, Look
from ...runs.config import RunConfig, Table
from ..cell import Cell
from ..statistics import mean
from ..study import Study
from . import numbers
from .columns import COLUMNS, lent, rows
from .experiment import Desk, Done, Experiment
from .findings import Drawing, Findings, Mean, Sheet, spread
from .outside import OUTSIDE, TITLES, auroc, pairs, with_outside
from .pictures import person
from .table1 import grouped

MOST = 200  # samples of a kind that a client predicts
BINS = 24  # of a density
HEIGHT = 380  # of the pictures
KINDS = {"in": "in-distribution", "out": "out-of-distribution", "other": "other classes"}
MEASURES = {"entropy": "entropy", "mutual_information": "mutual inf.", "doubt": "1 − max p", "surprise": "surprise"}
SAID = ("entropy", "surprise")  # the paper's measure, and the one that a label level does not mislead
LEVELS = np.linspace(0, 1, 51)  # false alarms of the ROC
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)  # of a client's samples that are of classes it never saw
LEVEL = {"fedabml": "fedabml-plain", "fedabml+labels": "fedabml", "fedavg+labels": "fedavg-ft"}  # with it, without it


@dataclass(frozen=True)
class Outside(Study):
    """The configuration's clients, who in the end also look at samples from outside."""

    other: str

    def federation(self, config: RunConfig) -> Federation:
        return with_outside(config, self.other)[0]

    def look(self, sim: Simulation) -> Table:
        cohort = sim.cohort
        seen = [_looks(cohort.fed, client) for client in range(cohort.fed.clients)]
        found: list[dict[str, dict[str, np.ndarray]]] = []
        for begin in range(0, len(seen), cohort.chunk):
            some = list(range(begin, min(begin + cohort.chunk, len(seen))))
            with torch.no_grad():
                lanes = Lanes.of(cohort, sim.theta, some, sim.round)
                models, own = personalise(lanes, sim.kept_for(some)), [np.concatenate(seen[c]) for c in some]
                draws = predict(lanes, models, own)
                alone = draws if lanes.offset is None else outputs(lanes, models, own, None, lanes.keys(rng.PREDICT))
            p = Prediction.of(draws)
            table = {"entropy": p.entropy, "mutual_information": p.mutual_information, "doubt": 1 - p.probs.max(-1)}
            table["surprise"] = _surprise(cohort, some, [len(rows) for rows in own], alone)
            at = 0
            for client in some:
                cuts = at + np.cumsum([0, *map(len, seen[client])])
                parts = dict(zip(KINDS, pairwise(cuts), strict=True))
                found.append({k: {m: v[a:b] for m, v in table.items()} for k, (a, b) in parts.items()})
                y = cohort.fed.y[seen[client][2]]
                found[-1]["other"]["right"] = p.label[cuts[2] : cuts[3]] == y
                at = cuts[-1]
        return _summary(found, math.log(cohort.fed.classes))


def _looks(fed: Federation, client: int) -> list[np.ndarray]:
    """The samples of each kind that a client looks at."""
    dice = np.random.Generator(np.random.PCG64(client))
    first = int(fed.train.index.max(initial=0))
    first = max(first, int(fed.test.index.max()), int(fed.val.index.max(initial=0))) + 1
    mine = fed.label_counts()[client] > 0
    outside = first + np.flatnonzero(mine[fed.y[first:]])
    others = fed.test.index[~mine[fed.y[fed.test.index]]]
    return [dice.permutation(rows)[:MOST] for rows in (fed.test[client], outside, others)]


def _surprise(cohort: Cohort, clients: Sequence[int], rows: Sequence[int], draws: Tensor) -> np.ndarray:
    """Of all the rows, each by its client's own counts of labels; methods without a label level know those, too."""
    counts = torch.as_tensor(cohort.fed.label_counts()[list(clients)]).double()
    counts = counts + cohort.algorithm.smoothing(counts.shape[-1])
    labels = torch.log(counts / counts.sum(-1, keepdim=True))
    each = labels.repeat_interleave(torch.as_tensor(rows), 0)
    return surprise(draws.mean(0, dtype=torch.float64).cpu(), each).numpy()


def _summary(found: Sequence[dict[str, dict[str, np.ndarray]]], top: float) -> Table:
    """AUROCs, densities and ROC curves, ready for JSON."""
    edges = np.linspace(0, top, BINS + 1)
    pooled = {k: {m: np.concatenate([f[k][m] for f in found]) for m in MEASURES} for k in KINDS}
    scores: dict[str, Any] = {}
    for kind in ("out", "other"):
        for m in MEASURES:
            each = [auroc(f["in"][m], f[kind][m]) for f in found if len(f["in"][m]) and len(f[kind][m])]
            both = auroc(pooled["in"][m], pooled[kind][m])
            scores[f"{kind} {m}"] = {"pooled": both, "clients": float(np.mean(each))}
    return {
        "auroc": scores,
        "entropy": {k: float(pooled[k]["entropy"].mean()) for k in KINDS},
        "other_accuracy": float(np.concatenate([f["other"]["right"] for f in found]).mean()),
        "edges": edges.round(5).tolist(),
        "density": {k: [_density(f[k]["entropy"], edges) for f in found] for k in KINDS},
        "roc": {k: _roc(pooled["in"]["entropy"], pooled[k]["entropy"]) for k in ("out", "other")},
    }


def _density(values: np.ndarray, edges: np.ndarray) -> list[float | None]:
    """The height of every bin; unknown of a client without such samples."""
    if not len(values):
        return [None] * (len(edges) - 1)
    return np.histogram(np.clip(values, edges[0], edges[-1]), edges, density=True)[0].round(4).tolist()


def _roc(inside: np.ndarray, outside: np.ndarray) -> list[float]:
    """The share of outside samples found at each share of false alarms."""
    limits = np.quantile(inside, 1 - LEVELS)
    found = (outside[:, None] > limits).mean(0)
    return [0.0, *found[1:-1].round(5).tolist(), 1.0]


class Uncertainty(Experiment):
    """Uncertainty."""

    title = "Uncertainty: inside and outside"
    claim = "FedABML's predictive entropy is low on a client's own data and high on data from outside."
    columns = ("fashionmnist", "mnist", "cifar10-5")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "pfedbayes")
    seeds = (3, 1)

    def cells(self, desk: Desk) -> list[Cell]:
        made = []
        for column, other in pairs(desk, self.columns):
            found = rows(desk, column, self.algorithms)
            whose = ("fedavg-ft", "fedabml") if desk.ask.protocol == "paper" else ("fedavg-ft",)
            for name, config in lent(desk, found, whose).items():
                configs = [config.with_changes(seed=seed) for seed in desk.ask.seed_list]
                made += [Cell(f"{column} {name}", each, study=Outside(other)) for each in configs]
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        protocol, groups = desk.ask.protocol, grouped(done)
        sheets, drawings, records, said = [], [], [], []
        for column in dict.fromkeys(column for column, _ in groups):
            own = {name: cells for (c, name), cells in groups.items() if c == column}
            title = f"{COLUMNS[column].title} against {TITLES[OUTSIDE[column]]}"
            sheets += [*_aurocs(title, own, protocol), _own(title, own, protocol), _shifted(title, own, protocol)]
            drawings += [_rocs(column, title, own, protocol), _shifts(column, own, protocol)]
            drawings += _densities(column, own, protocol)
            records += [_record(column, name, cells) for name, cells in own.items()]
            said += [f"{title}, AUROC of {m}, pooled: {words}." for m in SAID if (words := _order(own, m, protocol))]
            said += _pays(column, own, protocol)
        return Findings(self.title, self.claim, said, sheets, drawings, records, desk.notes)


def _order(own: dict[str, list[Done]], measure: str, protocol: str) -> str:
    """The methods by how well a measure tells the other dataset's samples; nothing where some lack it."""
    found = {name: _mean(cells, f"out {measure}", "pooled") for name, cells in own.items()}
    known = {name: value[0] for name, value in found.items() if value}
    order = sorted(known, key=lambda name: -known[name]) if len(known) == len(own) else []
    return ", ".join(f"{numbers.name(name, protocol)} {known[name]:.3f}" for name in order)


def _mean(cells: Sequence[Done], key: str, of: str) -> Mean | None:
    """None where a cell, made by an earlier version, lacks it."""
    found = [d.result.found["auroc"].get(key, {}).get(of) for d in cells]
    return None if None in found else mean(found)


def _aurocs(title: str, own: dict[str, list[Done]], protocol: str) -> list[Sheet]:
    """A table for samples of the other dataset, and one for classes that a client never saw."""
    made = []
    for kind, heading in (("out", title), ("other", f"{title}: classes never seen")):
        table = [
            [
                numbers.name(name, protocol),
                *(spread(_mean(cells, f"{kind} {m}", "pooled"), 3) for m in MEASURES),
                spread(_mean(cells, f"{kind} entropy", "clients"), 3),
            ]
            for name, cells in own.items()
        ]
        head = ["AUROC", *MEASURES.values(), "entropy, per client"]
        note = "Pooled over clients, but for the last column: the mean of the clients' own."
        made.append(Sheet(heading, head, table, note))
    return made


def _own(title: str, own: dict[str, list[Done]], protocol: str) -> Sheet:
    measures = {"accuracy": 4, "nll": 3, "ece": 3, "brier": 3}
    table = []
    for name, cells in own.items():
        values = [spread(mean([d.result.scores[0].summary[k] for d in cells]), n) for k, n in measures.items()]
        heights = [spread(mean([d.result.found["entropy"][k] for d in cells]), 3) for k in KINDS]
        shifted = spread(mean([d.result.found["other_accuracy"] for d in cells]), 4)
        table.append([numbers.name(name, protocol), *values, *heights, shifted])
    head = ["", *measures, *(f"entropy, {word}" for word in KINDS.values()), "accuracy, other classes"]
    return Sheet(f"{title}: calibration and entropy", head, table, "Mean entropies are in nats.")


def _accuracies(cells: Sequence[Done]) -> tuple[list[float], list[float]]:
    """On classes that clients know and on those they never saw, by seed."""
    own = [d.result.scores[0].summary["accuracy"] for d in cells]
    return own, [d.result.found["other_accuracy"] for d in cells]


def _shifted(title: str, own: dict[str, list[Done]], protocol: str) -> Sheet:
    """Accuracy where a share of a client's samples are of classes that it never saw."""
    table = []
    for name, cells in own.items():
        mixed = [[100 * ((1 - s) * a + s * b) for a, b in zip(*_accuracies(cells), strict=True)] for s in SHARES]
        table.append([numbers.name(name, protocol), *(spread(mean(values)) for values in mixed)])
    head = ["accuracy %", *(f"{s:.0%}" for s in SHARES)]
    note = (
        "By the share of a client's samples that are of classes it never saw: what becomes of it as its labels shift."
    )
    return Sheet(f"{title}: labels that shift", head, table, note)


def _shifts(column: str, own: dict[str, list[Done]], protocol: str) -> Drawing:
    title = f"Labels that shift, {COLUMNS[column].title}"

    def draw(look: Look) -> str:
        ends = {name: [mean(values)[0] for values in _accuracies(cells)] for name, cells in own.items()}
        series = [Series(numbers.name(name, protocol), line, [0.0, 1.0]) for name, line in ends.items()]
        x, y = Axis("samples of classes never seen", "percent", (0, 1)), Axis("accuracy", "percent", (0, 1))
        return line_chart(series, title=title, x=x, y=y, look=replace(look, height=HEIGHT))

    reading = (
        "Accuracy of clients a share of whose samples are of classes that they never saw. The label level takes such"
    )
    reading += " classes for impossible: where its line falls below its twin's, it no longer pays."
    return Drawing(f"shift-{column}", title, reading, draw)


def _pays(column: str, own: dict[str, list[Done]], protocol: str) -> list[str]:
    """Up to which share of other classes the label level pays, for every method that was run with and without it."""
    said = []
    for name, bare in LEVEL.items():
        if name in own and bare in own:
            ends = [[mean(v)[0] for v in _accuracies(own[each])] for each in (name, bare)]
            gain, loss = ends[0][0] - ends[1][0], ends[1][1] - ends[0][1]
            share = gain / (gain + loss) if gain > 0 and loss > 0 else None
            words = "pays at every share" if share is None else f"pays below {share:.1%}"
            who = f"{numbers.name(name, protocol)} {words if gain > 0 else 'does not pay'}"
            said.append(f"{COLUMNS[column].title}, share of classes never seen: by accuracy {who}.")
    return said


def _record(column: str, name: str, cells: Sequence[Done]) -> Table:
    found: Table = {"column": column, "outside": OUTSIDE[column], "algorithm": name, "seeds": len(cells)}
    for kind, m, of in product(("out", "other"), MEASURES, ("pooled", "clients")):
        found[f"auroc_{kind}_{m}_{of}"] = (_mean(cells, f"{kind} {m}", of) or (None,))[0]
    found |= {k: mean([d.result.scores[0].summary[k] for d in cells])[0] for k in ("accuracy", "nll", "ece", "brier")}
    return found | {"other_accuracy": mean([d.result.found["other_accuracy"] for d in cells])[0]}


def _rocs(column: str, title: str, own: dict[str, list[Done]], protocol: str) -> Drawing:
    def draw(look: Look) -> str:
        series = [
            Series(numbers.name(name, protocol), cells[0].result.found["roc"]["out"], LEVELS.tolist())
            for name, cells in own.items()
        ]
        x, y = Axis("false alarms", "percent", (0, 1)), Axis("found", "percent", (0, 1))
        return line_chart(series, title=f"ROC, {title}", x=x, y=y, look=replace(look, height=HEIGHT), diagonal=True)

    reading = "Samples from outside that entropy finds, against own samples that it takes for such; first seed, pooled."
    reading += " The dashed line is chance."
    return Drawing(f"roc-{column}", f"ROC, {title}", reading, draw)


def _densities(column: str, own: dict[str, list[Done]], protocol: str) -> list[Drawing]:
    """A picture per method, all with the same axes."""
    roots = {name: _roots(cells[0].result.found["density"]) for name, cells in own.items()}
    ends = [v for each in roots.values() for curves in each.values() for v in (np.nanmin(curves), np.nanmax(curves))]
    span = (1.02 * min(ends, default=-1.0), 1.02 * max(ends, default=1.0))
    y = Axis("density: inside upwards, outside downwards", "mirror", span)
    return [_density_picture(column, name, own[name][0], roots[name], y, protocol) for name in own]


def _roots(density: dict[str, list[list[float | None]]]) -> dict[str, np.ndarray]:
    """Clients' curves as a `mirror` axis takes them, their mean behind them; nothing of a kind that nobody has."""
    found = {}
    for kind, way in (("in", 1), ("out", -1)):
        curves = np.array(density[kind], float)
        if np.isfinite(curves).any():
            found[kind] = way * np.sqrt([*curves, np.nanmean(curves, 0)])
    return found


def _density_picture(
    column: str, name: str, done: Done, roots: dict[str, np.ndarray], y: Axis, protocol: str
) -> Drawing:
    title = f"{numbers.name(name, protocol)}, {COLUMNS[column].title}"

    def draw(look: Look) -> str:
        edges, series = done.result.found["edges"], []
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        for kind, (*curves, middle) in roots.items():
            # Cells of earlier versions leave clients without such samples out: then nobody knows whose curve is whose.
            whole = len(curves) == done.cell.config.clients
            who = [person(column, client) for client in range(len(curves))] if whole else ()
            many = [curve.tolist() for curve in curves]
            series.append(Series(KINDS[kind], middle.tolist(), middles, many=many, who=who))
        x = Axis("entropy, nats", span=(edges[0], edges[-1]))
        return line_chart(series, title=title, x=x, y=y, look=replace(look, height=HEIGHT))

    reading = "A thin curve per client of the first seed, and their mean: low entropies inside, high ones outside are"
    reading += " what is wanted. Heights are drawn as square roots, so that a peak leaves room for the rest."
    return Drawing(f"entropy-{column}-{name.replace('+', '-')}", f"Entropy, {title}", reading, draw)
