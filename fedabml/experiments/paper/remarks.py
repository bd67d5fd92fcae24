"""Remarks 1 and 2 as executable facts: FedABML contains Per-FedAvg and pFedMe.

Remark 1: with point posteriors, the amortised θ-step and k = 1 on full batches FedABML is exact Per-FedAvg; the
Hessian-free form of it agrees up to O(δ²), and exactly on a quadratic. Remark 2: with explicit KL steps, σ fixed and
equal, and λ_pFedMe = (λ/n)/σ_θ², FedABML is pFedMe, step by step on a quadratic (where antithetic samples make the
expectation exact), and for other losses as σ → 0.

Both are trained by the same engine, full batches, float64, and their server's weights are compared after the last
round: on the toy's quadratics, and with logistic regression (smooth, as O(δ²) needs: a ReLU's kinks have no second
derivative to be close to) on four clients of sixty digits each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from ...data import Federation
from ...engine.rounds import Simulation
from ...report.charts import Axis, Series, scatter
from ...runs.config import JsonDict, RunConfig
from ..cell import Cell
from ..study import Study, dataset
from .experiment import Context, Done, Experiment
from .findings import Findings, Picture, Sheet, power
from .toy import LR, Quadratics

SAME = 1e-9  # relative: rounding of float64 over some rounds, and no more
ROUNDS, STEPS, CLIENTS, SAMPLES = 3, 4, 4, 60
ALPHA, BETA = 0.02, 0.03  # Per-FedAvg's inner and outer step
DELTAS = (0.3, 0.1, 0.03, 0.01)
PULL, K = 3.0, 2  # pFedMe's λ and k
QUADRATIC, LOGISTIC = "quadratic", "logistic"
# What FedABML contains: in the limit of what, and the least order with which the difference must fall there.
LIMITS = {"Per-FedAvg, Hessian-free": ("δ", 1.7), "pFedMe": ("σ", 0.7)}
LOGSTDS = (-3.0, -4.0, -5.0, -6.0, -7.0)


class Weights:
    """A study that records the server's weights in the end."""

    def observe(self, sim: Simulation) -> JsonDict:
        return {"weights": sim.shared["mean"].double().cpu().tolist()}


@dataclass(frozen=True)
class QuadraticWeights(Weights, Quadratics):
    """The toy's quadratics."""


@dataclass(frozen=True)
class DigitWeights(Weights, Study):
    """Clients of equally many digits: λ/n is then the same for all of them, as pFedMe's λ is."""

    def federation(self, config: RunConfig) -> Federation:
        digits = dataset("digits", None)
        parts = [slice(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS)]
        pairs = [(digits.x_train[part], digits.y_train[part].astype(np.int64)) for part in parts]
        return Federation.from_arrays(pairs, pairs, classes=10, dataset="digits")


class Remarks(Experiment):
    """Remarks 1 and 2."""

    title = "Remarks 1 and 2: what FedABML contains"
    partial = False
    claim = "Per-FedAvg and pFedMe are special cases of FedABML: of its outer step, and of its proximal inner step."
    seeds = (1, 1)

    def cells(self, context: Context) -> list[Cell]:
        common = {"rounds": ROUNDS, "participation": 1.0, "batch_size": 1000, "dtype": "float64"}
        cells = []
        for problem, study, n, keys in (
            (QUADRATIC, QuadraticWeights(), 2, {"noise": 1.0, "learn_noise": False}),
            (LOGISTIC, DigitWeights(), SAMPLES, {"model": "mlr"}),
        ):
            for label, (algorithm, hyper, epochs) in _arms(problem, n).items():
                config = context.config(algorithm=algorithm, epochs=epochs, **common, **keys).with_changes(hyper=hyper)
                cells.append(Cell(f"{problem} {label}", config, study=study))
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        comparisons = _comparisons({d.cell.label: np.array(d.result.found["weights"]) for d in finished})
        table = [[f["fact"], f["where"], f["with"], f"{f['difference']:.1e}", f["holds"]] for f in comparisons]
        head = ["FedABML is", "on", "with", "relative difference", "as claimed"]
        note = f"Largest difference of the server's weights after {ROUNDS} rounds, as a share of the largest weight."
        conclusions = [
            f"{sum(f['holds'] != 'no' for f in comparisons)} of {len(comparisons)} comparisons come out as claimed."
        ]
        for name, (symbol, _) in LIMITS.items():
            orders = ", ".join(f"{order:.2f}" for order in _orders(name, comparisons))
            conclusions.append(f"{name}, logistic: the difference falls with order {orders} of {symbol}.")
        return Findings(conclusions, [Sheet("Differences", head, table, [note])], [_picture(comparisons)], comparisons)


def _arms(problem: str, n: int) -> dict[str, tuple[str, JsonDict, int]]:
    """Return by label an algorithm, its hyperparameters and its epochs; Per-FedAvg takes three batches to a step."""
    common: JsonDict = {"label_prior": "none", "average": 0.0, "server_momentum": 0.0, "prior_every": "batch"}
    point = common | {"posterior": "point", "prior_step": "amortised", "lr": ALPHA, "prior_lr": BETA}
    arms: dict[str, tuple[str, JsonDict, int]] = {"amortised": ("fedabml", point, STEPS)}
    for delta in DELTAS:
        arms[f"perfedavg {delta}"] = ("perfedavg", {"lr": BETA, "alpha": ALPHA, "delta": delta}, 3 * STEPS)
    lr = LR if problem == QUADRATIC else BETA
    arms["pfedme"] = ("pfedme", {"lr": lr, "lam": PULL, "k": K}, STEPS)
    gaussian = common | {"lr": lr, "k": K, "s": 2, "kl_step": "explicit", "prior_step": "euclidean"}
    gaussian |= {"posterior_std": "fixed", "prior_std": "fixed", "antithetic": problem == QUADRATIC}
    for nu in LOGSTDS:
        arms[f"explicit {nu}"] = ("fedabml", gaussian | {"nu0": nu, "lam": PULL * n * math.exp(2 * nu)}, STEPS)
    return {label: (name, {"personal_lr": "none"} | hyper, epochs) for label, (name, hyper, epochs) in arms.items()}


def _comparisons(weights: Mapping[str, np.ndarray]) -> list[JsonDict]:
    """Return every comparison, and whether it comes out as the remark says: exactly, or in the limit."""
    comparisons: list[JsonDict] = []
    for problem in (QUADRATIC, LOGISTIC):
        pairs = [("Per-FedAvg, Hessian-free", delta, "amortised", f"perfedavg {delta}") for delta in DELTAS]
        pairs += [("pFedMe", math.exp(nu), f"explicit {nu}", "pfedme") for nu in LOGSTDS]
        for name, value, ours, theirs in pairs:
            a, b = weights[f"{problem} {ours}"], weights[f"{problem} {theirs}"]
            difference, limit_text = float(np.abs(a - b).max() / np.abs(b).max()), f"{LIMITS[name][0]} = {value:.3g}"
            comparison: JsonDict = {
                "fact": name,
                "where": problem,
                "with": limit_text,
                "value": value,
                "difference": difference,
            }
            comparisons.append(comparison | {"holds": "yes" if difference < SAME else "no"})
    for comparison in comparisons:
        if comparison["where"] == LOGISTIC:
            limit = all(order > LIMITS[comparison["fact"]][1] for order in _orders(comparison["fact"], comparisons))
            comparison["holds"] = "yes, in the limit" if limit else "no"
    return comparisons


def _orders(name: str, comparisons: Sequence[JsonDict]) -> list[float]:
    """Return the powers of δ or σ with which the difference falls, between neighbouring values."""
    points = sorted((f["value"], f["difference"]) for f in comparisons if f["fact"] == name and f["where"] == LOGISTIC)
    return [math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in pairwise(points)]


def _picture(comparisons: Sequence[JsonDict]) -> Picture:
    """Draw how the differences fall."""
    series = []
    for name, problem in product(LIMITS, (QUADRATIC, LOGISTIC)):
        points = [f for f in comparisons if f["fact"] == name and f["where"] == problem]
        y = [power(max(f["difference"], 1e-17)) for f in points]
        label = f"{name.split(',')[0]}, over {LIMITS[name][0]}, {problem}"
        series.append(Series(label, y, [power(f["value"]) for f in points]))
    options = {
        "x": Axis("δ or σ", "power"),
        "y": Axis("relative difference", "power"),
        "title": "Limits",
        "connect": True,
    }
    caption = "On a quadratic they are equal to rounding. With logistic regression the difference falls as δ² and as σ."
    return Picture("limits", "How the differences fall", caption, scatter, series, options)
