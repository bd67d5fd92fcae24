"""Executing cells: those that may share a batch are trained and scored side by side, as lanes of one program."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from ..config import RunConfig
from ..data import Dataset, Federation, load
from ..engine.backend import chunk_of
from ..engine.simulate import Simulation, advance
from ..errors import TrainingError
from ..evaluate import Entry, Evaluation, evaluate_together
from ..run import Setup, prepare, resolve_split
from .cells import Cell, Result, Score

FACTS = ("device", "dtype", "backend", "chunk", "partition_hash", "versions", "fedabml", "parameters")
MEASURES = ("accuracy", "rmse", "nll")  # of every client, for paired tests
TOGETHER = 64  # cells in a group at most: an interrupted group is lost


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """The cells in groups that may run together, in the order of their first members."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(_kind(cell), []).append(cell)
    for group in found.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _kind(cell: Cell) -> str:
    """What cells that run together have in common: all but seeds and continuous hyperparameters."""
    algorithm = cell.config.algorithm_object()
    apart = {"seed", "partition_seed", "lr", cell.config.algorithm}
    common = {k: v for k, v in cell.config.to_dict(everything=True).items() if k not in apart}
    options = [dataclasses.replace(algorithm, **option).discrete() for option in cell.personal]
    return json.dumps([type(algorithm).__name__, algorithm.discrete(), common, options], sort_keys=True)


def run_together(cells: Sequence[Cell], on_round: Callable[[list[Cell], int], None]) -> Iterator[Result]:
    """Trains and scores cells of one group. Those that do not share their data, or cannot be batched, go one by one."""
    batches: list[list[tuple[Cell, Setup]]] = []
    for cell in cells:
        fed = federation(cell.config)
        setup = prepare(fed, cell.config.model, cell.config.algorithm_object(), **cell.config.words(fed))
        fits = (b for b in batches if b[0][1].cohort.data is setup.cohort.data and setup.cohort.backend == "vmap")
        batch = next(fits, None)
        if batch is None:
            batches.append([(cell, setup)])
        else:
            batch.append((cell, setup))
    for batch in batches:
        now = [cell for cell, _ in batch]
        yield from _run_batch(batch, lambda round, now=now: on_round(now, round))  # type: ignore[misc]


def _run_batch(batch: list[tuple[Cell, Setup]], on_round: Callable[[int], None]) -> Iterator[Result]:
    start = time.perf_counter()
    first = batch[0][1]
    if batch[0][0].config.chunk is None:
        first.cohort.chunk = chunk_of(first.lane, first.cohort.device, sum(s.cohort.fed.clients for _, s in batch))
    sims = [Simulation(s.cohort, participation=s.participation, epochs=s.epochs) for _, s in batch]
    lines: list[dict[str, Any]] = [{"bytes_up": 0, "bytes_down": 0} for _ in sims]
    errors: dict[int, TrainingError] = {}
    scores: list[list[Score]] = [[] for _ in sims]
    for round in range(1, first.rounds + 1):
        alive = [i for i in range(len(sims)) if i not in errors]
        if not alive:
            break
        for i, line in zip(alive, advance([sims[i] for i in alive]), strict=True):
            if isinstance(line, TrainingError):
                errors[i] = line
            else:
                lines[i] = line
        on_round(round)
    trained, split = time.perf_counter() - start, resolve_split(first.cohort.fed, "auto")
    for number in range(len(batch[0][0].personal)):
        alive = [i for i in range(len(sims)) if i not in errors]
        entries = [_entry(sims[i], batch[i][0].personal[number]) for i in alive]
        for i, found in zip(alive, evaluate_together(entries, split, number == 0) if entries else [], strict=True):
            personal = batch[i][0].personal[number]
            scores[i].append(_score(personal, found, len(batch[i][0].personal) == 1))
    for i, own in enumerate(scores):
        if own and all(score.error for score in own):
            errors[i] = TrainingError(own[0].error)
    share = {"seconds": time.perf_counter() - start, "seconds_training": trained}
    for i, (cell, setup) in enumerate(batch):
        facts = {name: setup.config[name] for name in FACTS} | {"split": split, "together": len(batch)}
        facts |= {name: value / len(batch) for name, value in share.items()}
        facts |= {name: lines[i][name] for name in ("bytes_up", "bytes_down")}
        if cell.config.data or cell.config.drop_small:  # else they are numbered
            facts["names"] = list(setup.cohort.fed.names)
        error = str(errors[i]) if i in errors else None
        yield Result(cell.identity, cell.label, cell.config.to_dict(), [] if error else scores[i], facts, error)


def _entry(sim: Simulation, personal: dict[str, Any]) -> Entry:
    cohort = sim.cohort.using(dataclasses.replace(sim.cohort.algorithm, **personal)) if personal else sim.cohort
    return Entry(cohort, sim.theta, sim.kept_for, sim.round)


def _score(personal: dict[str, Any], found: Evaluation | TrainingError, each: bool) -> Score:
    """A score; `each` says whether that of every client is wanted."""
    if isinstance(found, TrainingError):
        return Score(personal, {}, {}, str(found))
    clients = {
        name: [None if math.isnan(v) else round(float(v), 5) for v in found.clients[name]]
        for name in MEASURES
        if each and name in found.clients
    }
    return Score(personal, found.summary, clients)


@cache
def _dataset(name: str, data_dir: str | None) -> Dataset:
    return load(name, data_dir)


def federation(config: RunConfig) -> Federation:
    """The federation of a configuration; partitions of one dataset share its samples."""
    return config.federation(dataset=None if config.data else _dataset(config.dataset or "digits", config.data_dir))
