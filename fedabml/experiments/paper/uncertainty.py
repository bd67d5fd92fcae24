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

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...data import Federation
from ...engine.client import outputs, personalize, predict
from ...engine.lanes import Lanes
from ...engine.rounds import Simulation
from ...engine.setting import Cohort
from ...evaluation.predictions import Prediction, surprise
from ...report.charts import Axis, Series, line_chart
from ...runs.config import JsonDict, RunConfig
from ..cell import Cell
from ..study import Study
from .experiment import Context, Done, Experiment, by_column, scored
from .findings import Findings, Mean, Picture, Sheet, listed, number
from .outside import OUTSIDE, auroc, check_outside, with_outside
from .outside import TITLES as OUTSIDE_TITLES
from .settings import TITLES, person, systems

MAX_SAMPLES = 200  # samples of a kind that a client predicts
BINS = 24  # of a density
HEIGHT = 380  # of the pictures
INPUT_KINDS = {"in": "in-distribution", "out": "out-of-distribution", "other": "other classes"}
MEASURES = {"entropy": "entropy", "mutual_information": "mutual inf.", "doubt": "1 − max p", "surprise": "surprise"}
CONCLUDED = ("entropy", "surprise")  # the paper's measure, and the one that a label level does not mislead
LEVELS = np.linspace(0, 1, 51)  # false alarms of the ROC
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)  # of a client's samples that are of classes it never saw
LEVEL = {"fedabml": "fedabml-plain", "fedabml+labels": "fedabml", "fedavg+labels": "fedavg-ft"}  # with it, without it
CALIBRATION = {"accuracy": 4, "nll": 3, "ece": 3, "brier": 3}  # measures of a client's own data, and their decimals


@dataclass(frozen=True)
class Outside(Study):
    """The configuration's clients, who in the end also look at samples from outside."""

    other: str

    def federation(self, config: RunConfig) -> Federation:
        return with_outside(config, self.other)[0]

    def observe(self, sim: Simulation) -> JsonDict:
        cohort = sim.cohort
        seen = [_samples_of(cohort.fed, client) for client in range(cohort.fed.clients)]
        clients: list[dict[str, dict[str, np.ndarray]]] = []
        for begin in range(0, len(seen), cohort.chunk):
            chunk_clients = list(range(begin, min(begin + cohort.chunk, len(seen))))
            rows = [np.concatenate(seen[client]) for client in chunk_clients]
            with torch.no_grad():
                lanes = Lanes.after_round(cohort, sim.theta, chunk_clients, sim.round)
                models = personalize(lanes, sim.kept_for(chunk_clients))
                draws = predict(lanes, models, rows)
                without_level = (
                    draws if lanes.offset is None else outputs(lanes, models, rows, None, lanes.keys(rng.PREDICT))
                )
            p = Prediction.of(draws)
            table = {"entropy": p.entropy, "mutual_information": p.mutual_information, "doubt": 1 - p.probs.max(-1)}
            table["surprise"] = _surprise(cohort, chunk_clients, list(map(len, rows)), without_level)
            table["right"] = p.label == cohort.fed.y[np.concatenate(rows)]
            cuts = np.cumsum([0, *(len(part) for client in chunk_clients for part in seen[client])])
            parts = [{name: values[a:b] for name, values in table.items()} for a, b in pairwise(cuts)]
            clients += [
                dict(zip(INPUT_KINDS, parts[i : i + len(INPUT_KINDS)], strict=True))
                for i in range(0, len(parts), len(INPUT_KINDS))
            ]
        return _summary(clients, math.log(cohort.fed.classes))


def _samples_of(fed: Federation, client: int) -> list[np.ndarray]:
    """Return the samples of each kind that a client looks at."""
    dice = np.random.Generator(np.random.PCG64(client))
    first = int(fed.train.index.max(initial=0))
    first = max(first, int(fed.test.index.max()), int(fed.val.index.max(initial=0))) + 1
    own_labels = fed.label_counts()[client] > 0
    outside = first + np.flatnonzero(own_labels[fed.y[first:]])
    others = fed.test.index[~own_labels[fed.y[fed.test.index]]]
    return [dice.permutation(rows)[:MAX_SAMPLES] for rows in (fed.test[client], outside, others)]


def _surprise(cohort: Cohort, clients: Sequence[int], rows: Sequence[int], draws: Tensor) -> np.ndarray:
    """Return the surprise of all rows by their clients' label counts, which methods without a label level know, too."""
    counts = torch.as_tensor(cohort.fed.label_counts()[list(clients)]).double()
    counts = counts + cohort.algorithm.smoothing(counts.shape[-1])
    labels = torch.log(counts / counts.sum(-1, keepdim=True))
    row_labels = labels.repeat_interleave(torch.as_tensor(rows), 0)
    return surprise(draws.mean(0, dtype=torch.float64).cpu(), row_labels).numpy()


def _summary(clients: Sequence[dict[str, dict[str, np.ndarray]]], top: float) -> JsonDict:
    """Return AUROCs, densities and ROC curves, ready for JSON."""
    edges = np.linspace(0, top, BINS + 1)
    pooled = {k: {m: np.concatenate([f[k][m] for f in clients]) for m in MEASURES} for k in INPUT_KINDS}
    scores = {}
    for kind, m in product(("out", "other"), MEASURES):
        client_aurocs = [auroc(f["in"][m], f[kind][m]) for f in clients if len(f["in"][m]) and len(f[kind][m])]
        scores[f"{kind} {m}"] = {
            "pooled": auroc(pooled["in"][m], pooled[kind][m]),
            "clients": float(np.mean(client_aurocs)),
        }
    return {
        "auroc": scores,
        "entropy": {k: float(pooled[k]["entropy"].mean()) for k in INPUT_KINDS},
        "other_accuracy": float(np.concatenate([f["other"]["right"] for f in clients]).mean()),
        "edges": edges.round(5).tolist(),
        "density": {k: [_density(f[k]["entropy"], edges) for f in clients] for k in INPUT_KINDS},
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
    detected = (outside[:, None] > limits).mean(0)
    return [0.0, *detected[1:-1].round(5).tolist(), 1.0]


class Uncertainty(Experiment):
    """Uncertainty inside and outside."""

    title = "Uncertainty: inside and outside"
    claim = "FedABML's predictive entropy is low on a client's own data and high on data from outside."
    columns = ("fashionmnist", "mnist", "cifar10-5")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "pfedbayes")
    seeds = (3, 1)

    def cells(self, context: Context) -> list[Cell]:
        levels = ("fedavg-ft", "fedabml") if context.request.protocol == "paper" else ("fedavg-ft",)
        return [
            cell
            for column, name, config in systems(context, self, levels=levels, check=check_outside)
            for cell in context.seeded(f"{column} {name}", config, study=Outside(OUTSIDE[column]))
        ]

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, groups in by_column(finished).items():
            title = f"{TITLES[column]} against {OUTSIDE_TITLES[OUTSIDE[column]]}"
            column_records = [_record(column, name, cells) for name, cells in groups.items()]
            sheets += _sheets(context, title, column_records)
            first = {name: cells[0] for name, cells in groups.items()}
            pictures += [_rocs(context, column, title, first), _shifts(context, column_records)]
            pictures += _densities(context, column, first)
            orders = {m: _order(context, column_records, m) for m in CONCLUDED}
            conclusions += [f"{title}, AUROC of {m}, pooled: {order}." for m, order in orders.items() if order]
            conclusions += _pays(context, column_records)
            records += column_records
        return Findings(conclusions, sheets, pictures, records)


def _record(column: str, name: str, cells: Sequence[Done]) -> JsonDict:
    """Return the record of a method; an AUROC that a cell of an earlier version lacks is None."""
    record: JsonDict = {"column": column, "outside": OUTSIDE[column], "algorithm": name, "seeds": len(cells)}
    for kind, m, of in product(("out", "other"), MEASURES, ("pooled", "clients")):
        values = {d.result.seed: d.result.found["auroc"].get(f"{kind} {m}", {}).get(of) for d in cells}
        record[f"auroc_{kind}_{m}_{of}"] = None if None in values.values() else Mean(values)
    record |= {key: scored(cells, key) for key in CALIBRATION}
    record["other_accuracy"] = Mean({d.result.seed: d.result.found["other_accuracy"] for d in cells})
    return record | {
        f"entropy_{k}": Mean({d.result.seed: d.result.found["entropy"][k] for d in cells}) for k in INPUT_KINDS
    }


# -- sentences ------------------------------------------------------------------------------------------------------
def _order(context: Context, records: Sequence[JsonDict], measure: str) -> str:
    """Name the methods by how well a measure detects the other dataset's samples; empty where some lack it."""
    key = f"auroc_out_{measure}_pooled"
    if any(r[key] is None for r in records):
        return ""
    return ", ".join(f"{context.named(r)} {r[key]:.3f}" for r in sorted(records, key=lambda r: -r[key]))


def _pays(context: Context, records: Sequence[JsonDict]) -> list[str]:
    """Say up to which share of other classes the label level pays, for every method that ran with and without it."""
    by_name, texts = {r["algorithm"]: r for r in records}, []
    for level, bare in (
        (by_name[name], by_name[bare]) for name, bare in LEVEL.items() if name in by_name and bare in by_name
    ):
        gain = level["accuracy"] - bare["accuracy"]
        loss = bare["other_accuracy"] - level["other_accuracy"]
        pays = f"pays below {gain / (gain + loss):.1%}" if loss > 0 else "pays at every share"
        by_accuracy = f"by accuracy {context.named(level)} {pays if gain > 0 else 'does not pay'}"
        texts.append(f"{TITLES[level['column']]}, share of classes never seen: {by_accuracy}.")
    return texts


# -- tables ---------------------------------------------------------------------------------------------------------
def _sheets(context: Context, title: str, records: Sequence[JsonDict]) -> list[Sheet]:
    """Return the AUROCs, of another dataset and of classes never seen; calibration; and labels that shift."""
    sheets = []
    for kind, heading in (("out", title), ("other", f"{title}: classes never seen")):
        shown = {label: (f"auroc_{kind}_{m}_pooled", 3) for m, label in MEASURES.items()}
        shown["entropy, per client"] = (f"auroc_{kind}_entropy_clients", 3)
        note = "Pooled over clients, but for the last column: the mean of the clients' own."
        sheets.append(Sheet(heading, *listed(records, "AUROC", context.named, shown), [note]))
    shown = {key: (key, digits) for key, digits in CALIBRATION.items()}
    shown |= {f"entropy, {label}": (f"entropy_{kind}", 3) for kind, label in INPUT_KINDS.items()}
    shown["accuracy, other classes"] = ("other_accuracy", 4)
    calibration = listed(records, "", context.named, shown)
    sheets.append(Sheet(f"{title}: calibration and entropy", *calibration, ["Mean entropies are in nats."]))
    return [*sheets, _shifted(context, title, records)]


def _shifted(context: Context, title: str, records: Sequence[JsonDict]) -> Sheet:
    """Return the table of accuracy where a share of a client's samples are of classes that it never saw."""
    table = []
    for record in records:
        other, row = record["other_accuracy"].by_seed, [context.named(record)]
        for share in SHARES:
            mixed = {n: (1 - share) * v + share * other[n] for n, v in record["accuracy"].by_seed.items()}
            row.append(number(Mean(mixed).times(100)))
        table.append(row)
    note = (
        "By the share of a client's samples that are of classes it never saw: what becomes of it as its labels shift."
    )
    return Sheet(f"{title}: labels that shift", ["accuracy %", *(f"{s:.0%}" for s in SHARES)], table, [note])


# -- pictures -------------------------------------------------------------------------------------------------------
def _shifts(context: Context, records: Sequence[JsonDict]) -> Picture:
    """Draw accuracy against the share of classes never seen."""
    series = [Series(context.named(r), [r["accuracy"], r["other_accuracy"]], [0.0, 1.0]) for r in records]
    x, y = Axis("samples of classes never seen", "percent", (0, 1)), Axis("accuracy", "percent", (0, 1))
    caption = (
        "Accuracy of clients a share of whose samples are of classes that they never saw. The label level takes such"
        " classes for impossible: where its line falls below its twin's, it no longer pays."
    )
    column, options = records[0]["column"], {"height": HEIGHT, "x": x, "y": y}
    heading = f"Labels that shift, {TITLES[column]}"
    return Picture(f"shift-{column}", heading, caption, line_chart, series, options)


def _rocs(context: Context, column: str, title: str, first: Mapping[str, Done]) -> Picture:
    """Draw the ROC curve of entropy for every method."""
    levels = LEVELS.tolist()
    series = [Series(context.name(name), d.result.found["roc"]["out"], levels) for name, d in first.items()]
    x, y = Axis("false alarms", "percent", (0, 1)), Axis("found", "percent", (0, 1))
    caption = "Samples from outside that entropy finds, against own samples that it takes for such; first seed, pooled."
    caption += " The dashed line is chance."
    options = {"height": HEIGHT, "diagonal": True, "x": x, "y": y}
    return Picture(f"roc-{column}", f"ROC, {title}", caption, line_chart, series, options)


def _densities(context: Context, column: str, first: Mapping[str, Done]) -> list[Picture]:
    """Draw the densities of entropy, a picture per method, all with the same axes."""
    roots = {name: _roots(d.result.found["density"]) for name, d in first.items()}
    ends = [v for kinds in roots.values() for curves in kinds.values() for v in (np.nanmin(curves), np.nanmax(curves))]
    span = (1.02 * min(ends, default=-1.0), 1.02 * max(ends, default=1.0))
    caption = (
        "A thin curve per client of the first seed, and their mean: low entropies inside, high ones outside are"
        " what is wanted. Heights are drawn as square roots, so that a peak leaves room for the rest."
    )
    pictures = []
    for name, finished in first.items():
        edges, series = finished.result.found["edges"], []
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        for kind, (*curves, middle) in roots[name].items():
            # Cells of earlier versions leave clients without such samples out: then nobody knows whose curve is whose.
            complete = len(curves) == finished.cell.config.clients
            who = [person(column, client) for client in range(len(curves))] if complete else ()
            series.append(
                Series(INPUT_KINDS[kind], middle.tolist(), middles, members=[c.tolist() for c in curves], who=who)
            )
        title, file = f"{context.name(name)}, {TITLES[column]}", f"entropy-{column}-{name.replace('+', '-')}"
        options: JsonDict = {"title": title, "height": HEIGHT, "x": Axis("entropy, nats", span=(edges[0], edges[-1]))}
        options["y"] = Axis("density: inside upwards, outside downwards", "mirror", span)
        pictures.append(Picture(file, f"Entropy, {title}", caption, line_chart, series, options))
    return pictures


def _roots(density: dict[str, list[list[float | None]]]) -> dict[str, np.ndarray]:
    """Return the clients' curves as a `mirror` axis takes them, their mean last; nothing of a kind that nobody has."""
    roots = {}
    for kind, sign in (("in", 1), ("out", -1)):
        curves = np.array(density[kind], float)
        if np.isfinite(curves).any():
            roots[kind] = sign * np.sqrt([*curves, np.nanmean(curves, 0)])
    return roots
