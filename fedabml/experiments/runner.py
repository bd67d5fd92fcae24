"""Running cells: `execute` runs those that a ledger lacks.

Cells that differ only in seed and continuous hyperparameters are trained and scored side by side, as lanes of one
program.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..accel.machine import free_bytes
from ..data.once import reading_once
from ..engine.autotune import chunk_of
from ..engine.rounds import Simulation, run_rounds
from ..engine.setting import Cohort
from ..errors import TrainingError
from ..evaluation.scoring import Entry, Evaluation, evaluate_after
from ..runs.prepare import Setup, prepare, resolve_split
from ..runs.provenance import code, hardware
from .cell import Cell, Result, Score, options_by_epochs
from .ledger import Ledger, Unfinished
from .study import PLAIN, entry

FACTS = ("device", "dtype", "backend", "chunk", "partition_hash", "versions", "fedabml", "parameters")
MEASURES = ("accuracy", "rmse", "nll")  # of every client, for paired tests
OnShare = Callable[[float], None]  # called with the share that is done
TOGETHER = 64  # the most cells in a group: an interrupted group is lost


def execute(
    cells: Sequence[Cell],
    ledger: Ledger,
    *,
    on_round: Callable[[list[Cell], float], None] = lambda cells, round: None,
    on_done: Callable[[Result], None] = lambda result: None,
) -> Iterator[Result]:
    """Run the cells that the ledger and those beside it lack; add each to the ledger when it is done, and yield it.

    `on_round(cells, round)` is called after every round of the cells that run together; then, while they are scored,
    with fractions of rounds up to their `work`.
    """
    wanted = {cell.identity: cell for cell in cells if cell.identity not in ledger.results}
    if ledger.closed and any(cell not in ledger for cell in wanted.values()):
        raise Unfinished(f"Runs are missing in '{ledger.path.parent}'.")
    if ledger.closed or not wanted:
        return
    with ledger.locked(), reading_once():
        for identity in wanted:
            if identity in ledger.others and identity not in ledger.results:
                ledger.add(ledger.others[identity])
        for group in groups([cell for cell in wanted.values() if cell not in ledger]):
            for result in run_together(group, on_round):
                ledger.add(result)
                on_done(result)
                yield result


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells in groups that may run together, in the order of their first members."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(_kind(cell), []).append(cell)
    for group in found.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _kind(cell: Cell) -> str:
    """Return what cells that run together have in common: all but seeds and continuous hyperparameters."""
    algorithm = cell.config.algorithm_object()
    apart = {"seed", "partition_seed", "lr", cell.config.algorithm}
    common = {k: v for k, v in cell.config.to_dict(everything=True).items() if k not in apart}
    options = [dataclasses.replace(algorithm, **option).discrete() for option in cell.personal]
    about = [cell.curve, (cell.study or PLAIN).identity]
    return json.dumps([type(algorithm).__name__, algorithm.discrete(), common, options, about], sort_keys=True)


def run_together(cells: Sequence[Cell], on_round: Callable[[list[Cell], float], None]) -> Iterator[Result]:
    """Train and score the cells of one group; those whose samples or networks do not fit run one after another."""
    batches: list[list[tuple[Cell, Setup]]] = []
    for cell in cells:
        setup = prepared(cell)
        batch = next((b for b in batches if _fits(setup.cohort, [s.cohort for _, s in b])), None)
        if batch is None:
            batches.append([(cell, setup)])
        else:
            batch.append((cell, setup))
    while batches:
        batch = batches.pop(0)  # so that its data may go when it is done
        Cohort.join([setup.cohort for _, setup in batch])
        now = [cell for cell, _ in batch]
        yield from _run_batch(batch, lambda round, now=now: on_round(now, round))  # type: ignore[misc]


def _fits(own: Cohort, others: Sequence[Cohort]) -> bool:
    """Whether a cell may be batched with others: their samples fit into one array, and their network is the same.

    A table has other features for every seed, because they are learned from the rows that train: then all of them are
    copied into one array, unless that takes too much memory.
    """
    one = others[0]
    if own.backend != "vmap" or own.network.layout != one.network.layout or own.likelihood != one.likelihood:
        return False
    known = {cohort.data for cohort in others}
    if own.data in known:
        return True
    return own.data.alike(one.data) and sum(data.nbytes for data in {own.data, *known}) <= free_bytes(own.device)


def prepared(cell: Cell) -> Setup:
    """Prepare a cell's run; raise InputError where it cannot run."""
    study, config = cell.study or PLAIN, cell.config
    fed = study.federation(config)
    return prepare(fed, study.network(config, fed), config.algorithm_object(), **config.train_options(fed))


def _run_batch(batch: list[tuple[Cell, Setup]], on_round: Callable[[float], None]) -> Iterator[Result]:
    start, made = time.perf_counter(), code()  # the code when training began
    first = batch[0][1]
    if batch[0][0].config.chunk is None:
        clients = sum(s.cohort.fed.clients for _, s in batch)
        first.cohort.limit.set(chunk_of(first.lane, first.cohort.device, clients))
    study, curve = batch[0][0].study or PLAIN, batch[0][0].curve
    sims = [Simulation(s.cohort) for _, s in batch]
    lines: list[dict[str, Any]] = [{"bytes_up": 0, "bytes_down": 0} for _ in sims]
    errors: dict[int, TrainingError] = {}
    scores: list[list[Score]] = [[] for _ in sims]
    curves: list[list[dict[str, Any]]] = [[] for _ in sims]
    for round, news in run_rounds(sims, first.rounds, lambda round: round in curve):
        for i, line in news.items():
            if isinstance(line, TrainingError):
                errors[i] = line
            else:
                lines[i] = line
        seen = [i for i in news if i not in errors] if round in curve else []
        for i, noted in zip(seen, study.watch([sims[i] for i in seen]) if seen else [], strict=True):
            curves[i].append({"round": round} | noted)
        on_round(round)
    trained, split = time.perf_counter() - start, resolve_split(first.cohort.fed, "auto")
    alive = [i for i in range(len(sims)) if i not in errors]
    audiences = [study.audiences(cell.config, setup.cohort.fed) for cell, setup in batch]
    cohorts = [{name: s.cohort.among(fed) for name, fed in own.items()} for own, s in zip(audiences, sims, strict=True)]
    trainings = options_by_epochs([cell for cell, _ in batch])
    weights = [cohort.fed.clients * (max(training) + 1) for cohort in cohorts[0].values() for training in trainings]
    parts = _part_callbacks(batch[0][0], weights, on_round)
    for name in cohorts[0] if alive else ():
        scored: dict[int, list[Evaluation | TrainingError]] = {}
        for training in trainings:
            last = training[max(training)][0]  # all of them have its other options
            entries = [_entry(sims[i], cohorts[i][name], batch[i][0].personal[last]) for i in alive]
            prior = next((epochs for epochs, numbers in training.items() if 0 in numbers), None)
            found = evaluate_after(tuple(training), entries, split, prior, next(parts))
            scored |= {n: each for numbers, each in zip(training.values(), found, strict=True) for n in numbers}
        for number in sorted(scored):
            for i, each in zip(alive, scored[number], strict=True):
                options = batch[i][0].personal
                scores[i].append(_score(options[number], each, len(options) == 1, name))
    for i, own in enumerate(scores):
        if own and all(score.error for score in own):
            errors[i] = TrainingError(own[0].error)
    looks = [{} if i in errors else study.look(sim) for i, sim in enumerate(sims)]
    share = {"seconds": time.perf_counter() - start, "seconds_training": trained}
    today = {"code": made, "hardware": hardware(batch[0][1].cohort.device), "ended": f"{datetime.now(UTC):%FT%H:%MZ}"}
    for i, (cell, setup) in enumerate(batch):
        facts = {name: setup.config[name] for name in FACTS} | {"split": split, "together": len(batch)} | today
        facts |= {name: value / len(batch) for name, value in share.items()}
        facts |= {"compiled": sims[i].compiled} if sims[i].compiled else {}
        facts |= {name: lines[i][name] for name in ("bytes_up", "bytes_down")}
        facts["rows"] = setup.cohort.fed.rows(split).counts.tolist()  # that every client is scored on
        if cell.config.data or cell.config.drop_small:  # else they are numbered
            facts["names"] = list(setup.cohort.fed.names)
        error = str(errors[i]) if i in errors else None
        config = cell.config.to_dict()
        yield Result(cell.identity, cell.label, config, [] if error else scores[i], facts, error, curves[i], looks[i])


def _part_callbacks(cell: Cell, weights: Sequence[float], on_round: Callable[[float], None]) -> Iterator[OnShare]:
    """Yield a callback for each part of a cell's scoring; together they call `on_round` with fractions of rounds."""
    unit, begin = (cell.work - cell.config.rounds) / sum(weights), float(cell.config.rounds)
    far = begin

    def report(begin: float, length: float, share: float) -> None:
        nonlocal far
        far = max(far, begin + share * length)  # a part that is repeated for lack of memory does not count back
        on_round(far)

    for weight in weights:
        yield partial(report, begin, weight * unit)
        begin += weight * unit


def _entry(sim: Simulation, cohort: Cohort, personal: dict[str, Any]) -> Entry:
    return entry(sim, cohort.using(dataclasses.replace(cohort.algorithm, **personal)) if personal else cohort)


def _score(personal: dict[str, Any], found: Evaluation | TrainingError, each: bool, on: str) -> Score:
    """Return the score of an evaluation; with `each` also those of every client, and the reliability."""
    if isinstance(found, TrainingError):
        return Score(personal, {}, {}, str(found), on)
    clients = {
        name: [None if math.isnan(v) else round(float(v), 5) for v in found.clients[name]]
        for name in MEASURES
        if each and name in found.clients
    }
    bins = found.details.get("reliability", []) if each else []
    sure = [[round(row["confidence"], 5), round(row["accuracy"], 5), row["count"]] for row in bins]
    return Score(personal, found.summary, clients, on=on, reliability=sure)
