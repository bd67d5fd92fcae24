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
from itertools import pairwise
from typing import Any

import numpy as np

from ...data import Federation
from ...engine.rounds import Simulation
from ...report.canvas import Axis
from ...report.charts import Series, scatter
from ...runs.config import RunConfig, Table
from ..cell import Cell
from ..study import Study, dataset
from .experiment import Context, Done, Experiment
from .findings import Findings, Sheet
from .pictures import Picture, picture, power
from .toy import LR, Quadratics

SAME = 1e-9  # relative: rounding of float64 over some rounds, and no more
ROUNDS, STEPS, CLIENTS, SAMPLES = 3, 4, 4, 60
ALPHA, BETA = 0.02, 0.03  # Per-FedAvg's inner and outer step
DELTAS = (0.3, 0.1, 0.03, 0.01)
PULL, K = 3.0, 2  # pFedMe's λ and k
LOGISTIC = "logistic"
LIMITS = {"Per-FedAvg, Hessian-free": "δ", "pFedMe": "σ"}  # what FedABML contains, and in the limit of what
LOGSTDS = (-3.0, -4.0, -5.0, -6.0, -7.0)


class Weights:
    """A study that records the server's weights in the end."""

    def look(self, sim: Simulation) -> Table:
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
        made = []
        for place, study, n, keys in (
            ("quadratic", QuadraticWeights(), 2, {"noise": 1.0, "learn_noise": False}),
            (LOGISTIC, DigitWeights(), SAMPLES, {"model": "mlr"}),
        ):
            for label, (algorithm, hyper, epochs) in _arms(place, n).items():
                config = context.config(algorithm=algorithm, epochs=epochs, **common, **keys).with_changes(hyper=hyper)
                made.append(Cell(f"{place} {label}", config, study=study))
        return made

    def findings(self, context: Context, done: Sequence[Done]) -> Findings:
        facts = _facts({d.cell.label: np.array(d.result.found["weights"]) for d in done})
        table = [[f["fact"], f["where"], f["with"], f"{f['difference']:.1e}", f["holds"]] for f in facts]
        head = ["FedABML is", "on", "with", "relative difference", "as claimed"]
        note = f"Largest difference of the server's weights after {ROUNDS} rounds, as a share of the largest weight."
        conclusions = [f"{sum(f['holds'] != 'no' for f in facts)} of {len(facts)} comparisons come out as claimed."]
        conclusions += [
            f"{name}, logistic: the difference falls with order "
            f"{', '.join(f'{order:.2f}' for order in _orders(name, facts))} of {what}."
            for name, what in LIMITS.items()
        ]
        return Findings(conclusions, [Sheet("Differences", head, table, [note])], [_picture(facts)], facts)


def _arms(place: str, n: int) -> dict[str, tuple[str, Table, int]]:
    """Return by label an algorithm, its hyperparameters and its epochs; Per-FedAvg takes three batches to a step."""
    point: Table = {"posterior": "point", "prior_step": "amortised", "prior_every": "batch", "label_prior": "none"}
    point |= {"lr": ALPHA, "prior_lr": BETA, "average": 0.0, "server_momentum": 0.0}
    made: dict[str, tuple[str, Table, int]] = {"amortised": ("fedabml", point, STEPS)}
    for delta in DELTAS:
        made[f"perfedavg {delta}"] = ("perfedavg", {"lr": BETA, "alpha": ALPHA, "delta": delta}, 3 * STEPS)
    lr = LR if place == "quadratic" else BETA
    made["pfedme"] = ("pfedme", {"lr": lr, "lam": PULL, "k": K}, STEPS)
    for nu in LOGSTDS:
        gaussian: Table = {"lr": lr, "k": K, "s": 2, "nu0": nu, "lam": PULL * n * math.exp(2 * nu)}
        gaussian |= {"kl_step": "explicit"}
        gaussian |= {"posterior_std": "fixed", "prior_std": "fixed", "prior_step": "euclidean", "prior_every": "batch"}
        gaussian |= {"label_prior": "none", "average": 0.0, "antithetic": place == "quadratic", "server_momentum": 0.0}
        made[f"explicit {nu}"] = ("fedabml", gaussian, STEPS)
    return {label: (name, {"personal_lr": "none"} | own, epochs) for label, (name, own, epochs) in made.items()}


def _facts(weights: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return every comparison, and whether it comes out as the remark says."""

    def difference(a: str, b: str) -> float:
        return float(np.abs(weights[a] - weights[b]).max() / np.abs(weights[b]).max())

    facts: list[dict[str, Any]] = []
    for place in ("quadratic", LOGISTIC):
        for delta in DELTAS:
            found = difference(f"{place} amortised", f"{place} perfedavg {delta}")
            facts.append(_fact("Per-FedAvg, Hessian-free", place, "δ", delta, found, place == "quadratic"))
        for nu in LOGSTDS:
            found = difference(f"{place} explicit {nu}", f"{place} pfedme")
            facts.append(_fact("pFedMe", place, "σ", math.exp(nu), found, place == "quadratic"))
    for name in LIMITS:  # of a limit, the order says whether it is one
        least = 1.7 if name != "pFedMe" else 0.7
        limit = all(order > least for order in _orders(name, facts))
        for fact in facts:
            if fact["fact"] == name and fact["where"] == LOGISTIC:
                fact["holds"] = "yes, in the limit" if limit else "no"
    return facts


def _fact(name: str, place: str, symbol: str, value: float, found: float, exact: bool) -> dict[str, Any]:
    holds = ("yes" if found < SAME else "no") if exact else ""
    shown = f"{symbol} = {value:.3g}"
    return {"fact": name, "where": place, "with": shown, "value": value, "difference": found, "holds": holds}


def _orders(name: str, facts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the powers of δ or σ with which the difference falls, between neighbouring values."""
    own = sorted((f["value"], f["difference"]) for f in facts if f["fact"] == name and f["where"] == LOGISTIC)
    return [math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in pairwise(own)]


def _picture(facts: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw how the differences fall."""
    series = []
    for name, symbol in LIMITS.items():
        for place in ("quadratic", LOGISTIC):
            own = [f for f in facts if f["fact"] == name and f["where"] == place]
            y = [power(max(f["difference"], 1e-17)) for f in own]
            label = f"{name.split(',')[0]}, over {symbol}, {place}"
            series.append(Series(label, y, [power(f["value"]) for f in own]))
    axes: Table = {"x": Axis("δ or σ", "power"), "y": Axis("relative difference", "power")}
    caption = "On a quadratic they are equal to rounding. With logistic regression the difference falls as δ² and as σ."
    return picture("limits", "How the differences fall", caption, scatter, series, title="Limits", connect=True, **axes)
