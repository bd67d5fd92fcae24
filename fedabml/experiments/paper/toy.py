"""The toy: two clients with quadratic losses f = ½xᵀAx − bᵀx, whose optima lie far apart.

The paper shows that FedAvg with 10 steps a round settles away from the target x* = argmin f₁ + f₂, and that FedABML
comes closer and is better after fine-tuning. Here both are the library's own algorithms on a regression that *is* these
quadratics: a linear model without bias, two samples a client, the noise fixed at 1, full batches, float64. Antithetic
weight samples make FedABML's gradients of a quadratic exact. Drawn are the distance of the server's mean to x* and the
clients' loss above their own minimum after 10 steps of fine-tuning, per round, from five starts.

FedAvg's fixed point has a closed form: with P_i = (I − ηA_i)^E it solves Σ (I − P_i)(x − x_i*) = 0.
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
from ...engine.client import ClientGroup, Lanes, join_states, personalise
from ...engine.rounds import Simulation
from ...report.canvas import Series, line_chart
from ...report.frame import Axis, Look
from ...runs.config import RunConfig, Table
from ..cell import Cell
from ..statistics import mean
from ..study import Study
from . import numbers
from .experiment import Desk, Done, Experiment
from .findings import Drawing, Findings, Mean, Sheet, number, over, spread
from .pictures import by_label, over_rounds

A = np.array([np.diag([2.0, 15.0]) - 1.5, np.diag([15.0, 2.0]) - 1.5])
B = np.array([[5.0, 10.0], [10.0, 5.0]])
LOCAL = np.linalg.solve(A, B[..., None])[..., 0]  # the clients' own optima
TARGET = np.linalg.solve(A.sum(0), B.sum(0))  # x*
LR = 10**-1.5
STEPS, LONG = 10, 100  # local steps of a round
ROUNDS, QUICK_ROUNDS = 100, 40
START = 5.0  # deviation of the starts


def loss(client: int, x: np.ndarray) -> float:
    """A client's loss above its minimum."""
    away = x - LOCAL[client]
    return float(0.5 * away @ A[client] @ away)


def fixed_point(steps: int, lr: float = LR) -> np.ndarray:
    """Where FedAvg with exact steps settles."""
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

    def watch(self, sims: Sequence[Simulation]) -> list[Table]:
        both = [0, 1]
        with torch.no_grad():
            lanes = Lanes([ClientGroup(sim.cohort, sim.theta, both, sim.round) for sim in sims])
            tuned = personalise(lanes, join_states([sim.kept_for(both) for sim in sims])).mean.double().cpu().numpy()
        seen = []
        for sim, own in zip(sims, tuned.reshape(-1, 2, 2), strict=True):
            at = sim.theta["mean"].double().cpu().numpy()
            away = float(np.linalg.norm(at - TARGET))
            seen.append({"x": at.tolist(), "distance": away, "loss": float(np.mean([loss(i, own[i]) for i in both]))})
        return seen


def _federation() -> Federation:
    x = [math.sqrt(2) * np.linalg.cholesky(a).T for a in A]
    pairs = [(each, 2 * np.linalg.solve(each.T, b)[:, None]) for each, b in zip(x, B, strict=True)]
    return Federation.from_arrays(pairs, pairs, task="regression", normalize="none", dataset="toy")


_FEDERATION = _federation()
_FT = {"lr": LR, "personal_epochs": STEPS, "personal_lr": "none"}
_ABML = _FT | {"personal_lr": LR, "s": 2, "antithetic": True, "label_prior": "none", "average": 0.0, "lam": 1.0}
_ABML |= {"server_momentum": 0.0}
_PRINTED = {"prior_step": "euclidean", "prior_every": "batch", "prior_std": "learned"}
LONG_ROUNDS = f"FedAvg, {LONG} steps"
ARMS: dict[str, tuple[str, Table]] = {
    "FedAvg": ("fedavg-ft", _FT),
    LONG_ROUNDS: ("fedavg-ft", _FT),
    "FedABML, σ fixed": ("fedabml", _ABML | {"nu0": -1.0}),
    "FedABML, σ learned": ("fedabml", _ABML | {"nu0": -1.0, "prior_std": "learned"}),
    "FedABML, as printed": ("fedabml", _ABML | {"nu0": -1.0} | _PRINTED),
}


class Toy(Experiment):
    """The toy."""

    title = "Toy: two quadratic clients"
    partial = False
    claim = (
        f"FedAvg with 10 steps a round settles {numbers.TOY_DISTANCE[STEPS]} away from the target x*, with 100 steps "
        f"{numbers.TOY_DISTANCE[LONG]:.2f}; FedABML comes closer to it, and its clients do better after fine-tuning."
    )

    seeds = (5, 5)

    def cells(self, desk: Desk) -> list[Cell]:
        made = []
        for label, (algorithm, hyper) in ARMS.items():
            steps, rounds = STEPS, QUICK_ROUNDS if desk.ask.quick else ROUNDS
            if label == LONG_ROUNDS:
                steps, rounds = LONG, rounds // 4
            config = desk.config(
                algorithm=algorithm, clients=2, noise=1.0, learn_noise=False, rounds=rounds, participation=1.0,
                epochs=steps, batch_size=2, dtype="float64",
            ).with_changes(hyper=hyper)  # fmt: skip
            curve = tuple(range(1, rounds + 1))
            made += [
                Cell(label, config.with_changes(seed=seed), curve=curve, study=Quadratics())
                for seed in desk.ask.seed_list  # the starts
            ]
        return made

    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        own = by_label(done)
        ends = {
            label: {key: mean([d.result.curve[-1][key] for d in cells]) for key in ("distance", "loss")}
            for label, cells in own.items()
        }
        exact = {label: _exact(label) for label in own}
        table, records = [], []
        for label, end in ends.items():
            known = exact[label]
            theirs = numbers.TOY_DISTANCE[LONG if label == LONG_ROUNDS else STEPS] if known is not None else None
            words = [spread(end["distance"], 3), number(known, 3), number(theirs, 3), spread(end["loss"], 2)]
            table.append([label, *words])
            records.append({
                "arm": label, "distance": end["distance"][0], "closed_form": known, "paper": theirs,
                "difference": None if theirs is None else end["distance"][0] - theirs, "loss": end["loss"][0],
            })  # fmt: skip
        head = ["", "distance to x*", "closed form", "the paper's", "loss after 10 steps"]
        rounds, starts = done[0].cell.config.rounds, len(own["FedAvg"])
        note = (
            f"After {rounds} rounds, mean over {over(starts, what='start')}; the loss is above the "
            "client's own minimum, mean of both clients. x* = (1.364, 1.364)."
        )
        sheet = Sheet("Where they settle", head, table, note)
        drawings = [_contours(own), *(_rounds(own, key) for key in ("distance", "loss"))]
        return Findings(self.title, self.claim, _said(ends), [sheet], drawings, records, desk.notes)


def _exact(label: str) -> float | None:
    """The closed form of the distance, where there is one."""
    if not label.startswith("FedAvg"):
        return None
    return float(np.linalg.norm(fixed_point(LONG if label == LONG_ROUNDS else STEPS) - TARGET))


def _said(ends: Mapping[str, Mapping[str, Mean]]) -> list[str]:
    """What the run shows, and no more."""
    avg = ends["FedAvg"]
    said = []
    for label in (name for name in ends if name.startswith("FedABML")):
        words = []
        for key, unit in (("distance", "away from x*"), ("loss", "of loss after 10 steps")):
            ours, theirs = ends[label][key][0], avg[key][0]
            sense = "less" if ours < theirs else "more"
            words.append(f"{ours:.3f} {unit}, {abs(ours - theirs):.3f} {sense} than FedAvg")
        said.append(f"{label}: {'; '.join(words)}.")
    fixed, learned = ends["FedABML, σ fixed"], ends["FedABML, σ learned"]
    if learned["distance"][0] > fixed["distance"][0] and learned["loss"][0] < fixed["loss"][0]:
        said.append("A learned σ moves the mean towards that of the local optima: further from x*, better fine-tuned.")
    return said


# -- pictures -------------------------------------------------------------------------------------------------------
def _ellipse(client: int, level: float) -> np.ndarray:
    """The points where a client's loss is so much above its minimum."""
    turn = np.linspace(0, 2 * np.pi, 121)
    values, vectors = np.linalg.eigh(A[client])
    return (
        LOCAL[client] + math.sqrt(2 * level) * (np.stack([np.cos(turn), np.sin(turn)], 1) / np.sqrt(values)) @ vectors.T
    )


def _contours(own: Mapping[str, Sequence[Done]]) -> Drawing:
    def draw(look: Look) -> str:
        series = []
        for client in (0, 1):
            points: list[Any] = [[*LOCAL[client]], [None, None]]
            for level in (2.0, 10.0, 30.0):
                points += [*_ellipse(client, level).tolist(), [None, None]]
            x, y = zip(*points, strict=True)
            series.append(Series(f"loss and optimum of client {client + 1}", y, x, thin=True))
        series.append(Series("x*", [TARGET[1]], [TARGET[0]]))
        for label in (name for name in ("FedAvg", "FedABML, as printed") if name in own):
            path = [line["x"] for line in own[label][0].result.curve]
            x, y = zip(*path, (None, None), path[-1], strict=True)
            series.append(Series(label, y, x, thin=True))
        return line_chart(series, title="The two clients", x=Axis("x₁"), y=Axis("x₂"), look=look)

    reading = "Contours: a client's loss is 2, 10 and 30 above its minimum. Lines: the server's mean, round by round."
    return Drawing("contours", "The two clients", reading, draw)


def _rounds(own: Mapping[str, Sequence[Done]], key: str) -> Drawing:
    shown = {name: cells for name, cells in own.items() if name != LONG_ROUNDS}
    title, what = {
        "distance": ("Distance to x* per round", "The distance of the server's mean to x*"),
        "loss": ("Local loss after 10 steps", "A client's loss above its minimum after fine-tuning, mean of both"),
    }[key]

    def draw(look: Look) -> str:
        series = [over_rounds(name, cells, key) for name, cells in shown.items()]
        return line_chart(series, title=title, x=Axis("round", "whole"), y=Axis(key), look=look)

    starts = over(len(own["FedAvg"]), " with its 95% band", "start")
    return Drawing(key, title, f"{what}; mean over {starts}.", draw)
