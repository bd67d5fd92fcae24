"""Running cells: `execute` runs those that a ledger lacks.

Cells that differ only in seed and continuous hyperparameters are trained and scored side by side, as lanes of one
program.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..accel.machine import free_bytes
from ..data.once import reading_once
from ..engine.autotune import chunk_of
from ..engine.rounds import Simulation, run_rounds
from ..engine.setting import Cohort
from ..errors import InputError, TrainingError
from ..evaluation.decisions import MOST_COLUMNS
from ..evaluation.measures import OF_CLIENTS
from ..evaluation.scoring import Evaluation, evaluate_after
from ..runs.config import JsonDict, RunConfig
from ..runs.prepare import Setup, prepare, resolve_split
from ..runs.provenance import code, hardware
from .cell import Cell, Result, Score, options_by_epochs
from .ledger import Ledger, Unfinished
from .study import PLAIN, Study, trained_run

if TYPE_CHECKING:
    from ..data import Federation
    from ..data.download import Progress

FACTS = ("device", "dtype", "backend", "chunk", "partition_hash", "versions", "fedabml", "parameters")
TOGETHER = 64  # the most cells in a group: an interrupted group is lost
OnRound = Callable[[float], None]
Outcomes = Sequence[Evaluation | TrainingError]


def ignore(*_: Any) -> None:
    """Do nothing: the callback of whoever does not follow an experiment."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that `compare`, `tune` and `reproduce` call as they go on.

    `download(done, total)` follows the download of a dataset, and `note` takes a text for the user. `start` is called
    with the cells to run and the number of finished ones; `expect` with `Cell.estimated_rounds` of a search's cells and
    the number of finished ones, again whenever it needs more or fewer. `round(cells, round)` follows every round of
    the cells that run together and then, while they are scored, fractions of rounds up to their `estimated_rounds`.
    `done` is called with every result, `trial` with every trial of a search, and again if it is refused or confirmed.
    `search` is called with its run before a search of the paper's experiments, and returns the callbacks to use there.
    """

    download: Progress | None = None
    note: Callable[[str], None] = ignore
    start: Callable[[list[Cell], int], None] = ignore
    expect: Callable[[list[float], int], None] = ignore
    round: Callable[[list[Cell], float], None] = ignore
    done: Callable[[Result], None] = ignore
    trial: Callable[[Any], None] = ignore  # of `fedabml.experiments.search.Trial`
    search: Callable[[RunConfig], Callbacks] = lambda plan: Callbacks()


SILENT = Callbacks()


def execute(cells: Sequence[Cell], ledger: Ledger, callbacks: Callbacks = SILENT) -> list[Result]:
    """Run the cells that the ledger and those beside it lack, and return the results of all cells, in their order.

    Each is added to the ledger when it is done. Raises `Unfinished` if cells are missing in a ledger that is closed.
    """
    once = {cell.identity: cell for cell in cells}
    todo = [cell for cell in once.values() if cell not in ledger]
    if ledger.closed and todo:
        raise Unfinished(f"Runs are missing in '{ledger.path.parent}'.")
    if cells:
        callbacks.start(todo, len(once) - len(todo))
    if not ledger.closed and not once.keys() <= ledger.results.keys():
        with ledger.locked(), reading_once():
            for identity in once:
                if identity in ledger.others and identity not in ledger.results:
                    ledger.add(ledger.others[identity])
            for group in groups([cell for cell in todo if cell not in ledger]):
                for result in run_together(group, callbacks.round):
                    ledger.add(result)
                    callbacks.done(result)
    return [ledger[cell] for cell in cells]


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells in groups that may run together, in the order of their first members."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(_in_common(cell), []).append(cell)
    for group in alike.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _in_common(cell: Cell) -> str:
    """Return what cells that run together have in common: all but seeds and continuous hyperparameters."""
    algorithm = cell.config.algorithm_object()
    apart = {"seed", "partition_seed", "lr", cell.config.algorithm}
    common = {k: v for k, v in cell.config.to_dict(everything=True).items() if k not in apart}
    options = [replace(algorithm, **option).discrete() for option in cell.personal]
    study = [cell.curve, (cell.study or PLAIN).identity]
    return json.dumps([type(algorithm).__name__, algorithm.discrete(), common, options, study], sort_keys=True)


def run_together(cells: Sequence[Cell], on_round: Callable[[list[Cell], float], None]) -> Iterator[Result]:
    """Train and score the cells of one group; those whose samples or networks do not fit run one after another."""
    batches: list[dict[Cell, Setup]] = []
    for cell in cells:
        study, config = cell.study or PLAIN, cell.config
        fed = study.federation(config)
        network = study.network(config, fed)
        setup = prepare(fed, network, config.algorithm_object(), **config.train_options(fed))
        batch = next((b for b in batches if _fits(setup.cohort, [s.cohort for s in b.values()])), None)
        if batch is None:
            batches.append(batch := {})
        batch[cell] = setup
    while batches:
        batch = batches.pop(0)  # so that its data may go when it is done
        yield from _run_batch(list(batch), list(batch.values()), partial(on_round, list(batch)))


def _fits(cohort: Cohort, others: Sequence[Cohort]) -> bool:
    """Return whether a cell may be batched with others: samples fit into one array, and the network is the same.

    Frozen weights belong to the network: those that are drawn from a seed differ between seeds. A table has other
    features for every seed, because they are learned from the rows that train: then the samples of all cells are copied
    into one array, unless that takes too much memory.
    """
    first, data = others[0], cohort.data
    if not cohort.batched or cohort.likelihood != first.likelihood or not cohort.network.fits(first.network):
        return False
    loaded = {other.data for other in others}
    if data in loaded:
        return True
    together = sum(part.nbytes for part in {data, *loaded})
    return data.alike(first.data) and together <= free_bytes(cohort.device)


def refusals(fed: Federation, rows: Mapping[str, RunConfig], study: Study = PLAIN) -> tuple[dict[str, str], list[str]]:
    """Return by label why rows cannot run on a federation, and the notes of those that can."""
    refused: dict[str, str] = {}
    notes: dict[str, None] = {}
    for label, config in rows.items():
        try:
            network = study.network(config, fed)
            setup = prepare(fed, network, config.algorithm_object(), **config.train_options(fed))
            notes |= dict.fromkeys(setup.notes)
        except InputError as error:
            refused[label] = str(error)
    return refused, list(notes)


def _run_batch(cells: Sequence[Cell], setups: Sequence[Setup], on_round: OnRound) -> Iterator[Result]:
    """Train and score cells side by side, and yield their results."""
    Cohort.join([setup.cohort for setup in setups])
    start, revision = time.perf_counter(), code()  # the code when training began
    first, study = setups[0], cells[0].study or PLAIN
    if cells[0].config.chunk is None:
        clients = sum(setup.cohort.fed.clients for setup in setups)
        first.cohort.limit.set(chunk_of(first.lane_bytes, first.cohort.device, clients))
    sims = [Simulation(setup.cohort) for setup in setups]
    split = resolve_split(first.cohort.fed, cells[0].config.split)
    traffic, curves, errors = _train(sims, first.rounds, cells[0].curve, study, split, on_round)
    trained = time.perf_counter() - start
    alive = [i for i in range(len(sims)) if i not in errors]
    scores = _score([cells[i] for i in alive], [sims[i] for i in alive], study, split, on_round) if alive else []
    scores_of = dict(zip(alive, scores, strict=True))
    errors |= {i: str(scores[0].error) for i, scores in scores_of.items() if scores and all(s.error for s in scores)}
    observations = {i: study.observe(sim) for i, sim in enumerate(sims) if i not in errors}
    common = {
        "split": split, "together": len(cells), "code": revision, "hardware": hardware(first.cohort.device),
        "ended": f"{datetime.now(UTC):%FT%H:%MZ}", "seconds": (time.perf_counter() - start) / len(cells),
        "seconds_training": trained / len(cells),
    }  # fmt: skip
    for i, (cell, setup, sim) in enumerate(zip(cells, setups, sims, strict=True)):
        record = {name: setup.config[name] for name in FACTS} | common | traffic[i]
        record["rows"] = setup.cohort.fed.rows(split).counts.tolist()  # that every client is scored on
        record |= {"compiled": sim.compiled} if sim.compiled else {}
        record["train_rows"] = setup.cohort.fed.train.counts.tolist()
        if cell.config.data or cell.config.drop_small or study.given:  # else they are numbered
            record["names"] = list(setup.cohort.fed.names)
        if setup.cohort.fed.classes == 2:
            record["class_names"] = list(setup.cohort.fed.class_names)
        own_scores, config = [] if i in errors else scores_of[i], cell.config.to_dict()
        yield Result(
            cell.identity, cell.label, config, own_scores, record, errors.get(i), curves[i], observations.get(i, {})
        )


def _train(
    sims: Sequence[Simulation], rounds: int, curve: Sequence[int], study: Study, split: str, on_round: OnRound
) -> tuple[list[JsonDict], list[list[JsonDict]], dict[int, str]]:
    """Train runs side by side; return for each the bytes up and down and its curve, and the errors of diverged ones."""
    traffic: list[JsonDict] = [{"bytes_up": 0, "bytes_down": 0} for _ in sims]
    curves: list[list[JsonDict]] = [[] for _ in sims]
    errors: dict[int, str] = {}
    for round, news in run_rounds(sims, rounds, lambda round: round in curve):
        for i, line in news.items():
            if isinstance(line, TrainingError):
                errors[i] = str(line)
            else:
                traffic[i] = {name: line[name] for name in traffic[i]}
        alive = [i for i in news if i not in errors] if round in curve else []
        if alive:
            for i, record in zip(alive, study.watch([sims[i] for i in alive], split), strict=True):
                curves[i].append({"round": round} | record)
        on_round(round)
    return traffic, curves, errors


def _score(
    cells: Sequence[Cell], sims: Sequence[Simulation], study: Study, split: str, on_round: OnRound
) -> list[list[Score]]:
    """Return the scores of trained runs: for every audience of the study, one for each personal option."""
    cohorts = [
        {name: sim.cohort.among(fed) for name, fed in study.audiences(cell.config, sim.cohort.fed).items()}
        for cell, sim in zip(cells, sims, strict=True)
    ]
    trainings = options_by_epochs(cells)
    weights = [cohort.fed.clients * (max(training) + 1) for cohort in cohorts[0].values() for training in trainings]
    parts = _part_callbacks(cells[0], weights, on_round)
    scores: list[list[Score]] = [[] for _ in sims]
    for name in cohorts[0]:
        outcomes: dict[int, Outcomes] = {}  # by number of the option, one for each run
        for training in trainings:
            last = training[max(training)][0]  # all of them have its other options
            trained_runs = []
            for sim, audience, cell in zip(sims, cohorts, cells, strict=True):
                cohort, options = audience[name], cell.personal[last]
                trained_runs.append(
                    trained_run(sim, cohort.using(replace(cohort.algorithm, **options)) if options else cohort)
                )
            prior = next((epochs for epochs, numbers in training.items() if 0 in numbers), None)
            after = evaluate_after(tuple(training), trained_runs, split, prior, next(parts))
            outcomes |= {
                n: option_outcomes
                for numbers, option_outcomes in zip(training.values(), after, strict=True)
                for n in numbers
            }
        for number in sorted(outcomes):
            for scores_of, cell, outcome in zip(scores, cells, outcomes[number], strict=True):
                columns = dict.fromkeys((*OF_CLIENTS, *filter(None, [cell.measure]))) if len(cell.personal) == 1 else ()
                scores_of.append(_score_of(cell.personal[number], outcome, tuple(columns), name))
    return scores


def _part_callbacks(cell: Cell, weights: Sequence[float], on_round: OnRound) -> Iterator[OnRound]:
    """Yield a callback for each part of a cell's scoring; together they call `on_round` with fractions of rounds."""
    unit, begin = (cell.estimated_rounds - cell.config.rounds) / sum(weights), float(cell.config.rounds)
    furthest = begin

    def report(begin: float, length: float, fraction: float) -> None:
        nonlocal furthest
        furthest = max(furthest, begin + fraction * length)  # a part repeated for lack of memory does not count back
        on_round(furthest)

    for weight in weights:
        yield partial(report, begin, weight * unit)
        begin += weight * unit


def _score_of(personal: JsonDict, outcome: Evaluation | TrainingError, columns: Sequence[str], on: str) -> Score:
    """Return the score of an evaluation; `columns`, if any, adds these of every client, reliability and classes.

    Of two classes each client's rows of either are added: they tell whether a recall rests on two rows or on fifty.
    """
    if isinstance(outcome, TrainingError):
        return Score(personal, {}, {}, str(outcome), on)
    if not columns:
        return Score(personal, outcome.summary, {}, on=on)
    clients = {
        name: [None if math.isnan(v) else round(float(v), 5) for v in outcome.clients[name]]
        for name in (*columns, *_rows_of_two(outcome))
        if name in outcome.clients
    }
    bins = outcome.details.get("reliability", [])
    reliability = [[round(row["confidence"], 5), round(row["accuracy"], 5), row["count"]] for row in bins]
    return Score(personal, outcome.summary, clients, None, on, reliability, _by_class(outcome.details))


def _by_class(details: Mapping[str, Any]) -> dict[str, JsonDict]:
    """Return the rows, recall and precision of 3 to `MOST_COLUMNS` classes by name, of an evaluation's details."""
    names, columns = details.get("class_names", ()), ("confusion", "recall_by_class", "precision_by_class")
    if not 2 < len(names) <= MOST_COLUMNS or not details.keys() >= {*columns}:
        return {}
    table = zip(names, *(details[column] for column in columns), strict=True)
    return {
        name: {"rows": sum(row), "recall": recall, "precision": precision} for name, row, recall, precision in table
    }


def _rows_of_two(outcome: Evaluation) -> list[str]:
    """Return the columns of each client's rows of two classes; empty with more, or without classes."""
    columns = [name for name in outcome.clients if name.startswith("rows[")]
    return columns if len(columns) == 2 else []
