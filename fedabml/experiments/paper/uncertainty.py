"""Uncertainty: do clients' models know what is not theirs?

Every client predicts its own test data (in), samples of another dataset with the labels it knows (out), and test
samples of classes it never saw (other classes). The paper shows densities of the predictive entropy H = −Σ p log p, one
curve per client, and claims that FedABML's is low inside and high outside. Beside the pictures are numbers: AUROC of
entropy, of mutual information, of 1 − max p and of surprise, pooled and per client; ECE, NLL and Brier of the client's
own data.

With a label level a client gives classes that it never saw almost no probability: that must hurt on other classes. If
a client's labels shift, so that a share s of its samples are of classes that it never saw, its accuracy is (1 − s)
times that on its own classes plus s times that on the others; the conclusions name the share above which the label
level no longer pays. Entropy under the label level is then the wrong measure; surprise
(`evaluation.predictions.surprise`) uses the network alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ...report.canvas import Axis
from ...report.charts import Series, line_chart
from ...runs.config import RunConfig, Table
from ..cell import Cell
from ..statistics import mean
from ..study import Study
from .experiment import Context, Done, Experiment, by_column
from .findings import Findings, Sheet, spread
from .outside import OUTSIDE, auroc, pairs, with_outside
from .outside import TITLES as OUTSIDE_TITLES
from .pictures import Mean, Picture, picture
from .settings import TITLES, person, rows, with_label_level

MOST = 200  # samples of a kind that a client predicts
BINS = 24  # of a density
HEIGHT = 380  # of the pictures
KINDS = {"in": "in-distribution", "out": "out-of-distribution", "other": "other classes"}
MEASURES = {"entropy": "entropy", "mutual_information": "mutual inf.", "doubt": "1 − max p", "surprise": "surprise"}
CONCLUDED = ("entropy", "surprise")  # the paper's measure, and the one that a label level does not mislead
LEVELS = np.linspace(0, 1, 51)  # false alarms of the ROC
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)  # of a client's samples that are of classes it never saw
LEVEL = {"fedabml": "fedabml-plain", "fedabml+labels": "fedabml", "fedavg+labels": "fedavg-ft"}  # with it, without it
Groups = Mapping[str, Sequence[Done]]  # the finished cells of every method


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
    """Return the samples of each kind that a client looks at."""
    dice = np.random.Generator(np.random.PCG64(client))
    first = int(fed.train.index.max(initial=0))
    first = max(first, int(fed.test.index.max()), int(fed.val.index.max(initial=0))) + 1
    mine = fed.label_counts()[client] > 0
    outside = first + np.flatnonzero(mine[fed.y[first:]])
    others = fed.test.index[~mine[fed.y[fed.test.index]]]
    return [dice.permutation(rows)[:MOST] for rows in (fed.test[client], outside, others)]


def _surprise(cohort: Cohort, clients: Sequence[int], rows: Sequence[int], draws: Tensor) -> np.ndarray:
    """Return the surprise of all rows by their clients' label counts, which methods without a label level know, too."""
    counts = torch.as_tensor(cohort.fed.label_counts()[list(clients)]).double()
    counts = counts + cohort.algorithm.smoothing(counts.shape[-1])
    labels = torch.log(counts / counts.sum(-1, keepdim=True))
    each = labels.repeat_interleave(torch.as_tensor(rows), 0)
    return surprise(draws.mean(0, dtype=torch.float64).cpu(), each).numpy()


def _summary(found: Sequence[dict[str, dict[str, np.ndarray]]], top: float) -> Table:
    """Return AUROCs, densities and ROC curves, ready for JSON."""
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
    """Return the height of every bin; None of a client without such samples."""
    if not len(values):
        return [None] * (len(edges) - 1)
    return np.histogram(np.clip(values, edges[0], edges[-1]), edges, density=True)[0].round(4).tolist()


def _roc(inside: np.ndarray, outside: np.ndarray) -> list[float]:
    """Return the share of outside samples found at each share of false alarms."""
    limits = np.quantile(inside, 1 - LEVELS)
    found = (outside[:, None] > limits).mean(0)
    return [0.0, *found[1:-1].round(5).tolist(), 1.0]


class Uncertainty(Experiment):
    """Uncertainty inside and outside."""

    title = "Uncertainty: inside and outside"
    claim = "FedABML's predictive entropy is low on a client's own data and high on data from outside."
    columns = ("fashionmnist", "mnist", "cifar10-5")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "pfedbayes")
    seeds = (3, 1)

    def cells(self, context: Context) -> list[Cell]:
        made = []
        whose = ("fedavg-ft", "fedabml") if context.request.protocol == "paper" else ("fedavg-ft",)
        for column, other in pairs(context, self.columns):
            found = rows(context, column, self.algorithms)
            for name, config in with_label_level(context, found, whose).items():
                made += context.seeded(f"{column} {name}", config, study=Outside(other))
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, own in by_column(done).items():
            title = f"{TITLES[column]} against {OUTSIDE_TITLES[OUTSIDE[column]]}"
            named = {context.name(name): cells for name, cells in own.items()}
            sheets += [*_aurocs(title, named), _calibration(title, named), _shifted(title, named)]
            pictures += [_rocs(column, title, named), _shifts(column, named), *_densities(context, column, own)]
            records += [_record(column, name, cells) for name, cells in own.items()]
            conclusions += [
                f"{title}, AUROC of {m}, pooled: {words}." for m in CONCLUDED if (words := _order(named, m))
            ]
            conclusions += _pays(context, column, own)
        return Findings(conclusions, sheets, pictures, records)


def _record(column: str, name: str, cells: Sequence[Done]) -> Table:
    found: Table = {"column": column, "outside": OUTSIDE[column], "algorithm": name, "seeds": len(cells)}
    for kind, m, of in product(("out", "other"), MEASURES, ("pooled", "clients")):
        found[f"auroc_{kind}_{m}_{of}"] = (_auroc(cells, f"{kind} {m}", of) or (None,))[0]
    found |= {k: _summarised(cells, k)[0] for k in ("accuracy", "nll", "ece", "brier")}
    return found | {"other_accuracy": mean(_accuracies(cells)[1])[0]}


def _auroc(cells: Sequence[Done], key: str, of: str) -> Mean | None:
    """Return a mean AUROC over seeds; None where a cell, made by an earlier version, lacks it."""
    found = [d.result.found["auroc"].get(key, {}).get(of) for d in cells]
    return None if None in found else mean(found)


def _summarised(cells: Sequence[Done], key: str) -> Mean:
    return mean([d.result.scores[0].summary[key] for d in cells])


def _accuracies(cells: Sequence[Done]) -> tuple[list[float], list[float]]:
    """Return the accuracies on classes that clients know and on those they never saw, by seed."""
    own = [d.result.scores[0].summary["accuracy"] for d in cells]
    return own, [d.result.found["other_accuracy"] for d in cells]


# -- sentences ------------------------------------------------------------------------------------------------------
def _order(named: Groups, measure: str) -> str:
    """Name the methods by how well a measure detects the other dataset's samples; empty where some lack it."""
    found = {name: _auroc(cells, f"out {measure}", "pooled") for name, cells in named.items()}
    known = {name: value[0] for name, value in found.items() if value}
    order = sorted(known, key=lambda name: -known[name]) if len(known) == len(named) else []
    return ", ".join(f"{name} {known[name]:.3f}" for name in order)


def _pays(context: Context, column: str, own: Groups) -> list[str]:
    """Say up to which share of other classes the label level pays, for every method that ran with and without it."""
    found = []
    for name, bare in LEVEL.items():
        if name in own and bare in own:
            ends = [[mean(v)[0] for v in _accuracies(own[each])] for each in (name, bare)]
            gain, loss = ends[0][0] - ends[1][0], ends[1][1] - ends[0][1]
            share = gain / (gain + loss) if gain > 0 and loss > 0 else None
            words = "pays at every share" if share is None else f"pays below {share:.1%}"
            who = f"{context.name(name)} {words if gain > 0 else 'does not pay'}"
            found.append(f"{TITLES[column]}, share of classes never seen: by accuracy {who}.")
    return found


# -- tables ---------------------------------------------------------------------------------------------------------
def _aurocs(title: str, named: Groups) -> list[Sheet]:
    """Return a table for samples of the other dataset, and one for classes that a client never saw."""
    made = []
    for kind, heading in (("out", title), ("other", f"{title}: classes never seen")):
        keys = [(f"{kind} {m}", "pooled") for m in MEASURES] + [(f"{kind} entropy", "clients")]
        table = [[name, *(spread(_auroc(cells, *key), 3) for key in keys)] for name, cells in named.items()]
        head = ["AUROC", *MEASURES.values(), "entropy, per client"]
        note = "Pooled over clients, but for the last column: the mean of the clients' own."
        made.append(Sheet(heading, head, table, [note]))
    return made


def _calibration(title: str, named: Groups) -> Sheet:
    """Return the table of the measures on the clients' own data, and of the mean entropies."""
    measures = {"accuracy": 4, "nll": 3, "ece": 3, "brier": 3}
    table = []
    for name, cells in named.items():
        values = [spread(_summarised(cells, k), digits) for k, digits in measures.items()]
        heights = [spread(mean([d.result.found["entropy"][k] for d in cells]), 3) for k in KINDS]
        table.append([name, *values, *heights, spread(mean(_accuracies(cells)[1]), 4)])
    head = ["", *measures, *(f"entropy, {word}" for word in KINDS.values()), "accuracy, other classes"]
    return Sheet(f"{title}: calibration and entropy", head, table, ["Mean entropies are in nats."])


def _shifted(title: str, named: Groups) -> Sheet:
    """Return the table of accuracy where a share of a client's samples are of classes that it never saw."""
    table = []
    for name, cells in named.items():
        mixed = [[100 * ((1 - s) * a + s * b) for a, b in zip(*_accuracies(cells), strict=True)] for s in SHARES]
        table.append([name, *(spread(mean(values)) for values in mixed)])
    head = ["accuracy %", *(f"{s:.0%}" for s in SHARES)]
    note = (
        "By the share of a client's samples that are of classes it never saw: what becomes of it as its labels shift."
    )
    return Sheet(f"{title}: labels that shift", head, table, [note])


# -- pictures -------------------------------------------------------------------------------------------------------
def _shifts(column: str, named: Groups) -> Picture:
    """Draw accuracy against the share of classes never seen."""
    ends = {name: [mean(values)[0] for values in _accuracies(cells)] for name, cells in named.items()}
    series = [Series(name, line, [0.0, 1.0]) for name, line in ends.items()]
    x, y = Axis("samples of classes never seen", "percent", (0, 1)), Axis("accuracy", "percent", (0, 1))
    caption = (
        "Accuracy of clients a share of whose samples are of classes that they never saw. The label level takes such"
        " classes for impossible: where its line falls below its twin's, it no longer pays."
    )
    heading = f"Labels that shift, {TITLES[column]}"
    return picture(f"shift-{column}", heading, caption, line_chart, series, height=HEIGHT, x=x, y=y)


def _rocs(column: str, title: str, named: Groups) -> Picture:
    """Draw the ROC curve of entropy for every method."""
    found = {name: cells[0].result.found["roc"]["out"] for name, cells in named.items()}
    series = [Series(name, curve, LEVELS.tolist()) for name, curve in found.items()]
    axes: Table = {"x": Axis("false alarms", "percent", (0, 1)), "y": Axis("found", "percent", (0, 1))}
    caption = "Samples from outside that entropy finds, against own samples that it takes for such; first seed, pooled."
    caption += " The dashed line is chance."
    options: Table = {"height": HEIGHT, "diagonal": True}
    return picture(f"roc-{column}", f"ROC, {title}", caption, line_chart, series, **options, **axes)


def _densities(context: Context, column: str, own: Groups) -> list[Picture]:
    """Draw the densities of entropy, a picture per method, all with the same axes."""
    roots = {name: _roots(cells[0].result.found["density"]) for name, cells in own.items()}
    ends = [v for each in roots.values() for curves in each.values() for v in (np.nanmin(curves), np.nanmax(curves))]
    span = (1.02 * min(ends, default=-1.0), 1.02 * max(ends, default=1.0))
    y = Axis("density: inside upwards, outside downwards", "mirror", span)
    return [_density_picture(context, column, name, own[name][0], roots[name], y) for name in own]


def _roots(density: dict[str, list[list[float | None]]]) -> dict[str, np.ndarray]:
    """Return the clients' curves as a `mirror` axis takes them, their mean last; nothing of a kind that nobody has."""
    found = {}
    for kind, sign in (("in", 1), ("out", -1)):
        curves = np.array(density[kind], float)
        if np.isfinite(curves).any():
            found[kind] = sign * np.sqrt([*curves, np.nanmean(curves, 0)])
    return found


def _density_picture(
    context: Context, column: str, name: str, done: Done, roots: Mapping[str, np.ndarray], y: Axis
) -> Picture:
    edges, series = done.result.found["edges"], []
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    for kind, (*curves, middle) in roots.items():
        # Cells of earlier versions leave clients without such samples out: then nobody knows whose curve is whose.
        whole = len(curves) == done.cell.config.clients
        who = [person(column, client) for client in range(len(curves))] if whole else ()
        many = [curve.tolist() for curve in curves]
        series.append(Series(KINDS[kind], middle.tolist(), middles, many=many, who=who))
    title = f"{context.name(name)}, {TITLES[column]}"
    caption = (
        "A thin curve per client of the first seed, and their mean: low entropies inside, high ones outside are"
        " what is wanted. Heights are drawn as square roots, so that a peak leaves room for the rest."
    )
    options: Table = {"title": title, "height": HEIGHT, "x": Axis("entropy, nats", span=(edges[0], edges[-1])), "y": y}
    file = f"entropy-{column}-{name.replace('+', '-')}"
    return picture(file, f"Entropy, {title}", caption, line_chart, series, **options)
