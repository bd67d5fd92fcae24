"""Executing cells: those that may share a batch are trained and scored side by side."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from ..engine.simulate import Simulation
from ..errors import TrainingError
from ..evaluate import Evaluation, evaluate
from ..run import Setup, prepare, resolve_split
from .cells import Cell, Result, Score

FACTS = ("device", "dtype", "backend", "chunk", "partition_hash", "versions", "fedabml", "parameters")
MEASURES = ("accuracy", "rmse", "nll")  # of every client, for paired tests


def groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that run together."""
    return [[cell] for cell in cells]


def run_together(cells: list[Cell], on_round: Callable[[int], None]) -> Iterator[Result]:
    """Trains and scores cells side by side."""
    for cell in cells:
        fed = cell.config.federation()
        setup = prepare(fed, cell.config.model, cell.config.algorithm_object(), **cell.config.words(fed))
        yield _one(cell, setup, on_round)


def _one(cell: Cell, setup: Setup, on_round: Callable[[int], None]) -> Result:
    start = time.perf_counter()
    facts = {name: setup.config[name] for name in FACTS}
    sim = Simulation(setup.cohort, participation=setup.participation, epochs=setup.epochs)
    split, scores = resolve_split(setup.cohort.fed, "auto"), []
    try:
        history = sim.run(setup.rounds, on_round=lambda line: on_round(line["round"]))
        trained = time.perf_counter() - start
        for personal in cell.personal:
            cohort = setup.cohort.using(dataclasses.replace(setup.cohort.algorithm, **personal))
            scores.append(_score(personal, evaluate(cohort, sim.theta, sim.kept_for, split, sim.round)))
    except TrainingError as error:
        return Result(cell.identity, cell.label, cell.config.to_dict(), [], facts, str(error))
    last = history[-1] if history else {"bytes_up": 0, "bytes_down": 0}
    facts |= {name: last[name] for name in ("bytes_up", "bytes_down")}
    facts |= {"split": split, "seconds": time.perf_counter() - start, "seconds_training": trained}
    return Result(cell.identity, cell.label, cell.config.to_dict(), scores, facts)


def _score(personal: dict[str, object], found: Evaluation) -> Score:
    clients = {
        name: [None if math.isnan(v) else round(float(v), 5) for v in found.clients[name]]
        for name in MEASURES
        if name in found.clients
    }
    return Score(personal, found.summary, clients)
