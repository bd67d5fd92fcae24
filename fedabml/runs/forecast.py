"""A forecast of a run: how long it would take and how much memory it would need, from a few real steps."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accel.machine import free_bytes
from ..algorithms.base import Phase
from ..data import Federation
from ..engine.executor import padding, segments
from ..engine.minibatches import steps_of
from ..engine.rounds import Simulation
from ..engine.server import cohort_size, draw_clients
from ..engine.setting import Cohort
from ..errors import InputError
from ..evaluation.scoring import TrainedRun, evaluate_after
from ..files.limits import host_memory
from .folder import Folder
from .prepare import Setup, resolve_split
from .summary import peak_memory


class Estimate(NamedTuple):
    """What a run will take, roughly: seconds, shares and bytes."""

    step: float  # seconds of one step of a chunk
    lanes: int  # clients of a round in one chunk
    overhead: float  # seconds of a round before and after its steps
    round: float  # seconds of a round
    saving: float  # seconds to save a round: its checkpoint and its line of the history
    personal: float  # seconds to personalise every client once
    predicting: float  # seconds to predict and score every client's samples once
    total: float  # seconds of training, saving and scoring
    padding: float  # share of the steps taken by clients that are already done
    batch_padding: float  # share of a batch that is padding
    bytes: int  # memory of the data and a chunk
    bytes_before: int  # largest memory of this process before the trial: Python, torch and loaded data
    peak_host_bytes: int  # largest memory of the process during the run, on the host
    free: int  # memory that is free

    @property
    def scoring(self) -> float:
        """Seconds to personalise and score every client once."""
        return self.personal + self.predicting


PLANNED_ROUNDS = 10  # rounds whose minibatch plans are counted
FEW, MORE = 1, 4  # minibatches per client in a trial, in multiples of those of a step
SHORT_TRIAL, TRIAL_LIMIT = 0.5, 8.0  # seconds: a trial below the first is repeated with more minibatches; limit of all
FEW_SAMPLES, PREDICTION_LIMIT = 4, 2.0  # samples per client predicted first; seconds that predicting more may take
SAVES = 3  # checkpoints timed; the median counts


def estimate(setup: Setup, scored: float) -> Estimate:
    """Time a few real steps of a chunk of clients, and extrapolate. `scored` is how often all clients are scored.

    A trial trains the clients of the first round on one minibatch each, until its speed is steady, and discards the
    result. A short trial is repeated with four minibatches, which separates the cost per step from the cost per round.
    Predictions are timed on a few samples of each client of a chunk; saving is timed in a temporary folder.
    """
    bytes_before = peak_memory() or 0
    cohort, fed = setup.cohort, setup.cohort.fed
    executor, gpu = cohort.executor, cohort.device.type == "cuda"
    drawn = draw_clients(fed.clients, setup.participation, cohort.seed, 1)
    phases = cohort.algorithm.phases(setup.epochs)
    step_rows = max(p.batches for p in phases) * cohort.batch_size
    short_fed, longer_fed = (_shortened(fed, n * step_rows) for n in (FEW, MORE))
    elapsed, chunk = _trial(setup, short_fed)
    lanes = min(chunk, len(drawn))
    chunks = -(-len(drawn) // lanes)
    short_steps, longer_steps = (
        chunks * int(_steps(cohort, cut, drawn, phases).max()) for cut in (short_fed, longer_fed)
    )
    step, overhead = elapsed / short_steps, 0.0
    if elapsed < SHORT_TRIAL and longer_steps > short_steps:
        step, overhead = _line((short_steps, elapsed), (longer_steps, _trial(setup, longer_fed)[0]))

    def extrapolate(steps: np.ndarray, lanes_at_once: int) -> tuple[float, float]:
        """Return the seconds of the clients' steps, some clients at a time, and the share that is padding."""
        parts = [np.sort(steps[i : i + lanes_at_once])[::-1] for i in range(0, len(steps), lanes_at_once)]
        seconds = overhead / chunks * len(parts)
        for cut in (cut for part in parts for cut in segments(part, executor.smallest_batch)):
            # A step costs in proportion to its clients, but on a GPU not less than that of a small chunk.
            width = max(1.0, cut.lanes / lanes) if gpu and not executor.lanes_cost_time else cut.lanes / lanes
            seconds += (cut.last - cut.first) * step * width
        return seconds, float(np.mean([padding(part, executor.smallest_batch) for part in parts]))

    plans = [
        draw_clients(fed.clients, setup.participation, cohort.seed, t + 1)
        for t in range(min(PLANNED_ROUNDS, max(1, setup.rounds)))
    ]
    rounds = [extrapolate(_steps(cohort, fed, clients, phases), lanes) for clients in plans]
    per_round, waste = (float(np.mean(column)) for column in zip(*rounds, strict=True))
    personal = [phase for phase in cohort.algorithm.personal_phases() if phase.epochs]
    personal_seconds = extrapolate(_steps(cohort, fed, range(fed.clients), personal), chunk)[0] if personal else 0.0
    sim = Simulation(cohort.among(short_fed, chunk=chunk))
    saving, predicting = _saving(sim, sim.step()), _predicting(sim) if scored else 0.0
    counts = fed.train.counts.astype(float)
    width = min(cohort.batch_size, int(counts.max()))
    work = setup.lane_bytes * min(chunk, cohort_size(fed.clients, setup.participation))
    widest = setup.lane_bytes * min(chunk, fed.clients) + _flight(cohort, chunk) if scored else work
    return Estimate(
        step=step,
        lanes=lanes,
        overhead=overhead,
        round=per_round,
        saving=saving,
        personal=personal_seconds,
        predicting=predicting,
        total=setup.rounds * (per_round + saving) + scored * (personal_seconds + predicting),
        padding=waste,
        batch_padding=float(1 - counts.sum() / (np.ceil(counts / width).sum() * width)),
        bytes=(0 if cohort.data.hosted else fed.x.nbytes) + work,
        bytes_before=bytes_before,
        # The allocator keeps freed pages and recorded steps keep their own buffers, so a chunk counts twice.
        peak_host_bytes=max(peak_memory() or 0, bytes_before + (0 if gpu else 2 * widest)),
        free=free_bytes(cohort.device) * 2 if gpu else host_memory()[1],
    )


def _trial(setup: Setup, fed: Federation) -> tuple[float, int]:
    """Return the steady seconds of the first round with these data, and how many clients run at once.

    The chunk is smaller than planned if memory did not suffice. Steps are recorded at once, as in a long run.
    """
    policy = replace(setup.cohort.place.policy, record_after=0)
    brief = setup.cohort.among(fed, policy=policy)
    sim = Simulation(brief)
    first = sim.server

    def timed() -> float:
        sim.return_to(first)
        start = time.perf_counter()
        sim.step()
        if brief.device.type == "cuda":
            torch.cuda.synchronize(brief.device)
        return time.perf_counter() - start

    timed()
    seconds = [timed()]
    while sum(seconds) < TRIAL_LIMIT and not (brief.executor.settled and len(seconds) >= 4):
        seconds.append(timed())
    return float(np.median(seconds[-3:])), brief.chunk


def _saving(sim: Simulation, line: dict[str, Any]) -> float:
    """Return the seconds that saving a round takes, in the working folder if it can be written to."""
    parent = "." if os.access(".", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix=".fedabml-doctor-", dir=parent) as path:
            folder = Folder(Path(path))
            return float(np.median([_seconds(lambda: sim.save(folder.write_round, line)) for _ in range(SAVES)]))
    except (OSError, InputError):  # such as a full disk, which the run itself will report
        return 0.0


def _predicting(sim: Simulation) -> float:
    """Return the seconds that predicting and scoring take, from those of a chunk of clients on a few samples of each.

    If that is quick, more samples are predicted, which separates the cost per sample from the cost per chunk.
    """
    cohort, fed = sim.cohort, sim.cohort.fed
    split = resolve_split(fed, "auto")
    counts = fed.rows(split).counts
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    lanes = min(cohort.chunk, len(counts))

    def scored(rows: int, epochs: int = 0) -> float:
        brief = cohort.among(_shortened(fed, rows, split))
        run = TrainedRun(brief, sim.theta, sim.kept_for, sim.round, limit=lanes)
        times = 1 if brief.device.type == "cpu" else 2  # on a GPU the first run captures the programs
        return [_seconds(lambda: evaluate_after((epochs,), [run], split, prior=epochs)) for _ in range(times)][-1]

    few_rows = min(FEW_SAMPLES, int(counts.max()))
    scored(few_rows, min(1, cohort.algorithm.personal_epochs))  # pays what is done only once, and takes the memory
    elapsed = scored(few_rows)
    more_rows = min(cohort.place.policy.rows_per_lane, int(counts.max()), int(few_rows * PREDICTION_LIMIT / elapsed))
    per_row, overhead = elapsed / (few_rows * lanes), 0.0
    if more_rows > few_rows:
        per_row, overhead = _line((few_rows * lanes, elapsed), (more_rows * lanes, scored(more_rows)))
    width = -(-lanes // cohort.workers)  # clients that are padded to the largest of them
    cells = sum(len(part) * int(part.max()) for part in (counts[i : i + width] for i in range(0, len(counts), width)))
    return overhead * len(counts) / lanes + per_row * cells


def _flight(cohort: Cohort, chunk: int) -> int:
    """Return the bytes of the samples that a CPU predicts at once: raw, normalised and in the network."""
    fed = cohort.fed
    lanes, inputs, activations = min(chunk, fed.clients), math.prod(fed.x.shape[1:]), max(1, cohort.network.activations)
    policy = cohort.place.policy
    rows = max(policy.rows_per_lane, policy.activations_on_cpu // activations // lanes)
    rows = min(rows, int(fed.rows(resolve_split(fed, "auto")).counts.max()))
    return lanes * rows * (2 * inputs + activations) * cohort.dtype.itemsize


def _line(short: tuple[int, float], long: tuple[int, float]) -> tuple[float, float]:
    """Return the seconds of a unit of work, and those that any amount costs, from two measured (units, seconds)."""
    per_unit = max((long[1] - short[1]) / (long[0] - short[0]), 0.1 * short[1] / short[0])
    return per_unit, max(0.0, short[1] - per_unit * short[0])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _steps(cohort: Cohort, fed: Federation, clients: Iterable[int], phases: Sequence[Phase]) -> np.ndarray:
    """Return how many steps each of the clients takes in all phases."""
    counts = fed.train.counts[list(clients)]
    width = min(cohort.batch_size, int(fed.train.counts.max()))
    return np.sum([steps_of(counts, p.epochs, width, p.batches) for p in phases if p.epochs], 0)


def _shortened(fed: Federation, limit: int, split: str = "train") -> Federation:
    """Return the federation with at most `limit` samples per client in a split."""
    rows = fed.rows(split)
    number = np.arange(len(rows.index)) - np.repeat(rows.offsets[:-1], rows.counts)  # of a sample among its client's
    shortened: dict[str, Any] = {split: rows.split(number < limit)[1]}
    return replace(fed, **shortened)
