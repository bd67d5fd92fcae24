"""The toy: two clients with quadratic losses f = ½xᵀAx − bᵀx, whose optima lie far apart.

The paper shows in a picture, without figures, that FedAvg with 10 steps a round settles away from the target
x* = argmin f₁ + f₂, and that FedABML comes closer and is better after fine-tuning. Here both are the library's own
algorithms on a regression that *is* these quadratics: a linear model without bias, two samples a client, the noise
fixed at 1, full batches, float64. Antithetic weight samples make FedABML's gradients of a quadratic exact. Drawn are
the distance of the server's mean to x* and the clients' loss above their own minimum after 10 steps of fine-tuning, per
round, from five starts.

FedAvg's fixed point has a closed form, which is ours: with P_i = (I − ηA_i)^E it solves Σ (I − P_i)(x − x_i*) = 0. For
10 and 100 steps of 10^−1.5 a round it lies 2.245 and 10.602 away from x*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data import Federation
from ...engine.client import personalize
from ...engine.lanes import ClientGroup, Lanes, join_states
from ...engine.rounds import Simulation
from ...report.charts import Axis, Series, line_chart
from ...runs.config import JsonDict, RunConfig
from ..cell import Cell
from ..study import Study
from .experiment import Context, Done, Experiment, by_label, over_rounds
from .findings import Findings, Mean, Picture, Sheet, listed, over

A = np.array([np.diag([2.0, 15.0]) - 1.5, np.diag([15.0, 2.0]) - 1.5])
B = np.array([[5.0, 10.0], [10.0, 5.0]])
LOCAL = np.linalg.solve(A, B[..., None])[..., 0]  # the clients' own optima
TARGET = np.linalg.solve(A.sum(0), B.sum(0))  # x*
LR = 10**-1.5
STEPS, LONG = 10, 100  # local steps of a round
ROUNDS, QUICK_ROUNDS = 100, 40
START = 5.0  # deviation of the starts


def loss(client: int, x: np.ndarray) -> float:
    """Return a client's loss above its minimum."""
    away = x - LOCAL[client]
    return float(0.5 * away @ A[client] @ away)


def fixed_point(steps: int, lr: float = LR) -> np.ndarray:
    """Return where FedAvg with exact steps settles."""
    rest = np.array([np.eye(2) - np.linalg.matrix_power(np.eye(2) - lr * a, steps) for a in A])
    return np.linalg.solve(rest.sum(0), (rest @ LOCAL[..., None]).sum(0)[:, 0])


@dataclass(frozen=True)
class Quadratics(Study):
    """The two clients. A mean of ½(y − wᵀx)² over two samples with XᵀX/2 = A and Xᵀy/2 = b is f, up to a constant."""

    def federation(self, config: RunConfig) -> Federation:
        return _FEDERATION

    def network(self, config: RunConfig, fed: Federation) -> nn.Module:
        model = nn.Linear(2, 1, bias=False)
        start = np.random.Generator(np.random.PCG64(config.seed)).normal(0, START, (1, 2))
        model.weight.data = torch.from_numpy(start).float()
        return model

    def watch(self, sims: Sequence[Simulation], split: str) -> list[JsonDict]:
        clients = [0, 1]
        with torch.no_grad():
            lanes = Lanes([ClientGroup(sim.cohort, sim.theta, clients, sim.round) for sim in sims])
            tuned = personalize(lanes, join_states([sim.kept_for(clients) for sim in sims])).mean.double().cpu().numpy()
        seen = []
        for sim, means in zip(sims, tuned.reshape(-1, 2, 2), strict=True):
            at = sim.theta["mean"].double().cpu().numpy()
            away = float(np.linalg.norm(at - TARGET))
            seen.append(
                {"x": at.tolist(), "distance": away, "loss": float(np.mean([loss(i, means[i]) for i in clients]))}
            )
        return seen


def _federation() -> Federation:
    x = [math.sqrt(2) * np.linalg.cholesky(a).T for a in A]
    pairs = [(inputs, 2 * np.linalg.solve(inputs.T, b)[:, None]) for inputs, b in zip(x, B, strict=True)]
    return Federation.from_arrays(pairs, pairs, task="regression", normalize="none", dataset="toy")


_FEDERATION = _federation()
_FT = {"lr": LR, "personal_epochs": STEPS, "personal_lr": "none"}
_ABML = _FT | {"personal_lr": LR, "s": 2, "antithetic": True, "label_prior": "none", "average": 0.0, "lam": 1.0}
_ABML |= {"server_momentum": 0.0, "nu0": -1.0}
_PRINTED = {"prior_step": "euclidean", "prior_every": "batch", "prior_std": "learned"}
LONG_ROUNDS = f"FedAvg, {LONG} steps"
ARMS: dict[str, tuple[str, JsonDict]] = {
    "FedAvg": ("fedavg-ft", _FT),
    LONG_ROUNDS: ("fedavg-ft", _FT),
    "FedABML, σ fixed": ("fedabml", _ABML),
    "FedABML, σ learned": ("fedabml", _ABML | {"prior_std": "learned"}),
    "FedABML, as printed": ("fedabml", _ABML | _PRINTED),
}


class Toy(Experiment):
    """The toy."""

    title = "Toy: two quadratic clients"
    partial = False
    claim = (
        "FedAvg with 10 steps a round settles away from the target x*; FedABML comes closer to it, and its clients do "
        "better after fine-tuning. No figures are given."
    )
    seeds = (5, 5)  # a seed is a start

    def cells(self, context: Context) -> list[Cell]:
        cells = []
        for label, (algorithm, hyper) in ARMS.items():
            steps, rounds = STEPS, QUICK_ROUNDS if context.request.quick else ROUNDS
            if label == LONG_ROUNDS:
                steps, rounds = LONG, rounds // 4
            config = context.config(
                algorithm=algorithm, clients=2, noise=1.0, learn_noise=False, rounds=rounds, participation=1.0,
                epochs=steps, batch_size=2, dtype="float64",
            ).with_changes(hyper=hyper)  # fmt: skip
            cells += context.seeded(label, config, curve=tuple(range(1, rounds + 1)), study=Quadratics())
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        groups, records = by_label(finished), []
        for label, cells in groups.items():
            ends = {d.result.seed: d.result.curve[-1] for d in cells}
            distance, after = (Mean({n: end[key] for n, end in ends.items()}) for key in ("distance", "loss"))
            exact = None
            if label.startswith("FedAvg"):
                exact = float(np.linalg.norm(fixed_point(LONG if label == LONG_ROUNDS else STEPS) - TARGET))
            records.append({"arm": label, "distance": distance, "closed_form": exact, "loss": after})
        columns = {"distance to x*": ("distance", 3), "our closed form": ("closed_form", 3)}
        grid = listed(records, "", lambda r: r["arm"], columns | {"loss after 10 steps": ("loss", 2)})
        note = (
            f"After {finished[0].cell.config.rounds} rounds, mean over {over(len(groups['FedAvg']), unit='start')}; "
            "the loss is above the client's own minimum, mean of both clients. x* = (1.364, 1.364)."
        )
        pictures = [_contours(groups), *(_rounds(groups, key) for key in ("distance", "loss"))]
        return Findings(_conclusions(records), [Sheet("Where they settle", *grid, [note])], pictures, records)


def _conclusions(records: Sequence[JsonDict]) -> list[str]:
    """Say whether a FedABML is closer to x* and better fine-tuned than FedAvg, and how each compares with it."""
    ends = {record["arm"]: record for record in records}
    both = [
        label
        for label, end in ends.items()
        if label.startswith("FedABML") and all(end[key] < ends["FedAvg"][key] for key in ("distance", "loss"))
    ]
    texts = ["Not reproduced: no FedABML here is closer to x* than FedAvg and also better after fine-tuning."]
    if both:
        texts = [f"Reproduced by {' and '.join(both)}: closer to x* than FedAvg, and better after fine-tuning."]
    for label in (name for name in ends if name.startswith("FedABML")):
        parts = []
        for key, unit in (("distance", "away from x*"), ("loss", "of loss after 10 steps")):
            gap = ends[label][key] - ends["FedAvg"][key]
            sense = "less" if gap < 0 else "more"
            parts.append(f"{ends[label][key]:.3f} {unit}, {abs(gap):.3f} {sense} than FedAvg")
        texts.append(f"{label}: {'; '.join(parts)}.")
    fixed, learned = ends["FedABML, σ fixed"], ends["FedABML, σ learned"]
    if learned["distance"] > fixed["distance"] and learned["loss"] < fixed["loss"]:
        texts.append("A learned σ moves the mean towards that of the local optima: further from x*, better fine-tuned.")
    return texts


# -- pictures -------------------------------------------------------------------------------------------------------
def _ellipse(client: int, level: float) -> np.ndarray:
    """Return the points where a client's loss is `level` above its minimum."""
    turn = np.linspace(0, 2 * np.pi, 121)
    values, vectors = np.linalg.eigh(A[client])
    circle = np.stack([np.cos(turn), np.sin(turn)], 1)
    return LOCAL[client] + math.sqrt(2 * level) * (circle / np.sqrt(values)) @ vectors.T


def _contours(groups: Mapping[str, Sequence[Done]]) -> Picture:
    """Draw the clients' losses as contours, and the way of the server's mean."""
    series = []
    for client in (0, 1):
        points: list[Any] = [[*LOCAL[client]], [None, None]]
        for level in (2.0, 10.0, 30.0):
            points += [*_ellipse(client, level).tolist(), [None, None]]
        x, y = zip(*points, strict=True)
        series.append(Series(f"loss and optimum of client {client + 1}", y, x, thin=True))
    series.append(Series("x*", [TARGET[1]], [TARGET[0]]))
    for label in (name for name in ("FedAvg", "FedABML, as printed") if name in groups):
        path = [line["x"] for line in groups[label][0].result.curve]
        x, y = zip(*path, (None, None), path[-1], strict=True)
        series.append(Series(label, y, x, thin=True))
    caption = "Contours: a client's loss is 2, 10 and 30 above its minimum. Lines: the server's mean, round by round."
    axes = {"x": Axis("x₁"), "y": Axis("x₂")}
    return Picture("contours", "The two clients", caption, line_chart, series, axes)


def _rounds(groups: Mapping[str, Sequence[Done]], key: str) -> Picture:
    """Draw the distance or the loss per round."""
    title, description = {
        "distance": ("Distance to x* per round", "The distance of the server's mean to x*"),
        "loss": ("Local loss after 10 steps", "A client's loss above its minimum after fine-tuning, mean of both"),
    }[key]
    series = [over_rounds(name, cells, key) for name, cells in groups.items() if name != LONG_ROUNDS]
    caption = f"{description}; mean over {over(len(groups['FedAvg']), ' with its 95% band', 'start')}."
    return Picture(key, title, caption, line_chart, series, {"x": Axis("round", "whole"), "y": Axis(key)})
