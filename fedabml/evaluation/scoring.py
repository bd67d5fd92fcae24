"""Scores of the clients' own models: how often they are right, and whether they know when they are not.

`evaluate` personalises every client exactly as a new client would be, and scores it on its own held-out samples. All
clients are scored in one pass of segment sums; the tests compare the measures with torchmetrics and scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..algorithms.base import State
from ..data import Federation, Rows
from ..data.statistics import worst_decile
from ..engine.client import outputs, personalize_after, predict
from ..engine.label_level import label_offset
from ..engine.lanes import ClientGroup, Lanes, join_states
from ..engine.processes import ALONE, World
from ..engine.setting import Cohort
from ..engine.workers import chunks, fit_in_memory, map_in_threads
from ..errors import InputError, TrainingError
from ..gaussian import Distribution
from . import decisions, structured
from .calibration import fit_temperature, with_temperature
from .client_scores import SCORE_FUNCTIONS, regression_rows
from .measures import CALIBRATED, DECISIONS, FEW_OF_CLASS, FEW_ROWS, OF_NUMBERS, WORST_TENTH
from .predictions import Prediction, Regression, with_label_level
from .structured import MultiPrediction

SCORED_CLIENTS = 10_000  # clients that are scored while a run trains, by default
FEW, ROWS = 64, 4096  # samples in a batch of the server's own model: at least, and where memory allows
ENDS = ("_low", "_high", "]")  # columns of the ends of a client's interval, and of one class, which have no mean
Predictions = Prediction | Regression | MultiPrediction


class Stage(NamedTuple):
    """What the clients of a run give after some personal epochs."""

    predictions: list[Any]
    diverged: list[int]  # clients
    temperatures: dict[int, float]  # by client, where probabilities are calibrated


@dataclass(frozen=True)
class Evaluation:
    """The scores of a run: `summary` over all clients, `clients` by measure with one value per client (or NaN)."""

    summary: dict[str, Any]
    clients: dict[str, np.ndarray]
    details: dict[str, Any]  # reliability diagram, entropy histogram

    def __repr__(self) -> str:
        scores = ", ".join(f"{k}={self.summary[k]:.4g}" for k in ("accuracy", "rmse", "nll") if k in self.summary)
        return f"Evaluation({len(next(iter(self.clients.values()), ()))} clients, {scores})"


def prediction(cohort: Cohort, draws: Tensor) -> Predictions:
    """Average the engine's outputs [draws, rows, ...] into predictions in the data's own units."""
    if cohort.fed.task == "regression":
        return Regression.of(draws, cohort.fed.y_shift, cohort.fed.y_scale, cohort.fed.transform)
    return _kind(cohort).of(draws)


def _kind(cohort: Cohort) -> Any:
    """Return the class of the cohort's predictions, whose static methods join batches and read tables."""
    return {"classification": Prediction, "regression": Regression}.get(cohort.fed.task, MultiPrediction)


def check_rows(fed: Federation, split: str) -> Rows:
    """Return the rows to score clients on; raise `InputError` if no client has any."""
    rows = fed.rows(split)
    if not rows.counts.any():
        raise InputError(
            f"Nothing to evaluate on: no client has {split} samples. Give them some, hold out a validation share "
            "(--validation 0.2), or train without evaluation (evaluate=False, --no-evaluate)."
        )
    return rows


def clients_to_score(cohort: Cohort, split: str, limit: int | None = None) -> list[int]:
    """Return the clients that have rows to score, in ascending order; at most `limit` of them, drawn by the seed."""
    able = np.flatnonzero(check_rows(cohort.fed, split).counts)
    if limit is not None and limit < len(able):
        able = np.sort(
            rng.generator(cohort.seed, rng.SAMPLE, 0).choice(able, limit, replace=False)
        )  # rounds begin at 1
    return able.tolist()


class TrainedRun(NamedTuple):
    """A trained run that is to be scored."""

    cohort: Cohort
    shared: State
    kept: Callable[[list[int]], State]  # returns what these clients keep between rounds, one lane each
    round: int = 0
    world: World = ALONE
    limit: int | None = None  # clients to score; None: all
    brief: bool = False  # whether the measures of `decisions`, and the calibrated ones, are left out

    def calibrates(self, split: str) -> bool:
        """Whether probabilities are also scored after a calibration on validation rows, which no test row may be."""
        fed = self.cohort.fed
        return not self.brief and split == "test" and fed.task == "classification" and bool(fed.val.counts.any())


def evaluate(
    cohort: Cohort,
    shared: State,
    kept: Any,
    split: str = "test",
    round: int = 0,
    world: World = ALONE,
    limit: int | None = None,
    brief: bool = False,
) -> Evaluation:
    """Personalise every client from `shared` on its training data and score it on its `split` rows.

    `kept(clients)` returns what those clients keep between rounds. The summary also scores the server's own model on
    the same rows: `prior_*` without the label level and, where the algorithm has one, `prior_level_*` with it. The
    difference to the latter is what personal training gains beyond a client's label frequencies.

    If clients have validation rows, test rows are also scored with probabilities that a temperature has calibrated,
    which every client fits on its own validation rows, as `Prior.personalize` does: `nll_calibrated`, and so on.

    Clients without such rows have no score (NaN) and do not count. At most `limit` clients are scored, the same ones
    for the same seed. If several processes call this function, each personalises the clients that it owns, and all of
    them return all scores. `brief` leaves out the measures of `decisions`, for scores while a run trains. Raises
    `TrainingError` if a client's model diverges.
    """
    epochs = cohort.algorithm.personal_epochs
    run = TrainedRun(cohort, shared, kept, round, world, limit, brief)
    ((result,),) = evaluate_after((epochs,), [run], split, prior=epochs)
    if isinstance(result, TrainingError):
        raise result
    return result


@torch.no_grad()
def evaluate_after(
    epochs: Sequence[int],
    trained_runs: Sequence[TrainedRun],
    split: str = "test",
    prior: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> list[list[Evaluation | TrainingError]]:
    """Evaluate runs that may share a batch after each of the given numbers of personal epochs, which must ascend.

    Returns for each number of epochs one evaluation, or the error, per run. The server's own model is scored together
    with the models after `prior` epochs. `on_progress` is called with the share of clients that is done.
    """
    scored = [clients_to_score(run.cohort, split, run.limit) for run in trained_runs]
    owned = [_owned(run, clients) for run, clients in zip(trained_runs, scored, strict=True)]
    predict_chunk = partial(_predict_clients, epochs, trained_runs, split, owned, on_progress)
    stages = fit_in_memory([run.cohort for run in trained_runs], sum(map(len, owned)), predict_chunk)
    results = []
    for count, of_runs in zip(epochs, stages, strict=True):
        runs = zip(trained_runs, scored, of_runs, strict=True)
        results.append([_score_run(run, split, clients, stage, count == prior) for run, clients, stage in runs])
    return results


def _predict_clients(
    epochs: Sequence[int],
    trained_runs: Sequence[TrainedRun],
    split: str,
    clients: list[list[int]],
    on_progress: Callable[[float], None],
    chunk: int,
) -> list[list[Stage]]:
    """Return, for each number of epochs, what the clients of every run give."""
    stages = [[Stage([], [], {}) for _ in trained_runs] for _ in epochs]
    workers = trained_runs[0].cohort.workers
    parts = list(chunks(clients, chunk, workers))

    calibrates = [run.calibrates(split) for run in trained_runs]

    def predict_part(part: dict[int, list[int]]) -> list[tuple[list[Any], list[bool], list[dict[int, float]]]]:
        groups = [(trained_runs[i], members) for i, members in part.items()]
        lanes = Lanes([ClientGroup(run.cohort, run.shared, members, run.round) for run, members in groups])
        kept = join_states([run.kept(members) for run, members in groups])
        held = any(calibrates[i] for i in part)

        def predictions(models: Distribution, split: str) -> list[Any]:
            rows = [[run.cohort.fed.rows(split)[c] for c in members] for run, members in groups]
            draws = predict(lanes, models, [*chain(*rows)]).split([sum(map(len, run_rows)) for run_rows in rows], 1)
            return [prediction(run.cohort, d) for (run, _), d in zip(groups, draws, strict=True)]

        results = []
        for models in personalize_after(lanes, kept, epochs):
            finite = torch.stack([torch.isfinite(leaf).flatten(1).all(1) for leaf in models]).all(0).tolist()
            temperatures: list[dict[int, float]] = [{} for _ in groups]
            if held:
                validated = predictions(models, "val")
                temperatures = [
                    fit_temperatures(run.cohort.fed, members, p) if calibrates[i] and p.finite.all() else {}
                    for (i, members), (run, _), p in zip(part.items(), groups, validated, strict=True)
                ]
            results.append((predictions(models, split), finite, temperatures))
        return results

    finished, total = 0, sum(map(len, clients))
    for part, results in zip(parts, map_in_threads(predict_part, parts, workers), strict=True):
        for of_runs, (predicted, finite, temperatures) in zip(stages, results, strict=True):
            for i, run_predictions, fitted in zip(part, predicted, temperatures, strict=True):
                of_runs[i].predictions.append(run_predictions)
                of_runs[i].temperatures.update(fitted)
            members = ((i, client) for i, members in part.items() for client in members)
            for (i, client), sound in zip(members, finite, strict=True):
                of_runs[i].diverged.extend([] if sound else [client])
        finished += sum(map(len, part.values()))
        on_progress(finished / total)
    return stages


def fit_temperatures(fed: Federation, clients: list[int], p: Prediction) -> dict[int, float]:
    """Return each client's temperature, fitted on its validation rows; `p` predicts those of these clients in turn."""
    rows = fed.val.select(clients)
    parts = np.split(np.arange(len(rows.index)), np.cumsum(rows.counts)[:-1])
    y = fed.y[rows.index]
    return {c: fit_temperature(p.probs[own], y[own]) for c, own in zip(clients, parts, strict=True)}


def _owned(run: TrainedRun, clients: list[int]) -> list[int]:
    """Select the clients that this process owns."""
    fed, world = run.cohort.fed, run.world
    if world.size == 1:
        return clients
    owned = set(world.assign_clients(range(fed.clients), fed.train.counts)[world.rank])
    return [c for c in clients if c in owned]


def _score_run(
    run: TrainedRun, split: str, clients: list[int], stage: Stage, with_prior: bool
) -> Evaluation | TrainingError:
    """Score a run from what its clients give in this process, and in the other processes."""
    cohort, fed, scored = run.cohort, run.cohort.fed, np.array(clients)
    rows = fed.rows(split).select(clients)
    owner, client = rows.owner, scored[rows.owner]
    positions = np.flatnonzero(np.isin(client, _owned(run, clients)))
    fitted = np.array([stage.temperatures.get(c, 0.0) for c in client.tolist()])  # 0: another process knows
    notes = np.column_stack([np.isin(client, stage.diverged), fitted])
    personal, notes = _gather(run, len(client), positions, stage.predictions, notes)
    wrong, temperature = notes[:, 0] > 0, np.where(notes[:, 1] > 0, notes[:, 1], 1.0)
    if wrong.any():
        return _diverged(cohort, client[wrong], "weights")
    if not personal.finite.all():  # finite weights, but too large for the network
        return _diverged(cohort, client[~personal.finite], "predictions")
    y, score = fed.y[rows.index], SCORE_FUNCTIONS[_kind(cohort)]
    values, pooled, details = score(personal, y, owner, len(scored))
    summary: dict[str, Any] = {name: float(v.mean()) for name, v in values.items()}
    if not run.brief and _kind(cohort) is Regression:
        base, base_pooled = decisions.base_regression(y, owner, fed.y[fed.train.index], fed.train.owner, scored)
        errors = regression_rows(personal, y)
        wrong_by, inside = (errors["mae"], errors["squared"]), errors["coverage"]
        values |= base | decisions.regression_intervals(*wrong_by, inside, owner, len(scored))
        pooled |= base_pooled
    elif not run.brief:
        several, specificity = _kind(cohort) is MultiPrediction, cohort.setting.specificity
        decided, decided_pooled, decided_details = (
            structured.decide(personal, y, owner, fed, scored, specificity)
            if several
            else decisions.report(personal.probs, y, owner, fed.label_counts()[scored], specificity, fed.class_names)
        )
        if "sensitivity_pooled" in decided_pooled:
            decided_pooled["specificity"] = specificity
        values, pooled, details = values | decided, pooled | decided_pooled, details | decided_details
    if run.calibrates(split):
        calibrated = replace(personal, probs=with_temperature(personal.probs, temperature[:, None]))
        by_client, calibrated_pooled, _ = score(calibrated, y, owner, len(scored))
        values |= {key: by_client[name] for name, key in CALIBRATED.items()}
        pooled |= {key: calibrated_pooled[name] for name, key in CALIBRATED.items() if name in calibrated_pooled}
        values["temperature"] = temperature[rows.offsets[:-1]]
    summary |= {k: _mean(v) for k, v in values.items() if k not in summary and not k.endswith(ENDS)} | pooled
    few = _few_rows(values, rows, y if fed.task == "classification" else None)
    summary |= {"clients_scored": len(scored), **few.counts, **_without_small(values, few)}
    measures = [name for name in ("accuracy", "nll", "ece", "brier", "rmse") if name in summary]
    summary |= {f"prior_{name}": None for name in measures}
    prior = cohort.algorithm.prior(run.shared) if with_prior else None
    for prefix, predictions in (_prior_predictions(run, prior, rows.index, client) if prior else {}).items():
        prior_scores, prior_pooled, _ = score(predictions, y, owner, len(scored))
        values |= {f"{prefix}_{k}": v for k, v in prior_scores.items()}
        means: dict[str, Any] = {name: prior_pooled.get(name, float(prior_scores[name].mean())) for name in measures}
        if _kind(cohort) is Regression:
            means |= _without_small({name: prior_scores[name] for name in measures}, few)
        summary |= {f"{prefix}_{name}": value for name, value in means.items()}
    columns = {name: np.full(fed.clients, np.nan) for name in values}
    for name, column in columns.items():
        column[scored] = values[name]
    return Evaluation(summary, columns, details)


class _Few(NamedTuple):
    """Which clients have so few rows that chance decides their measures, and how many these are by kind."""

    small: np.ndarray  # in all
    of_class: np.ndarray  # of either of two classes; with more or none those that are small
    counts: dict[str, int]


def _few_rows(values: dict[str, np.ndarray], rows: Rows, y: np.ndarray | None) -> _Few:
    """Return the clients of few rows; `y` [n] are the labels of a classification, where `values` are of two classes."""
    small = of_class = rows.counts < FEW_ROWS
    counts = {"clients_small": int(small.sum())}
    if y is not None and "recall" in values:
        positive = np.bincount(rows.owner, y == 1, len(rows))
        of_class = np.minimum(positive, rows.counts - positive) < FEW_OF_CLASS
        counts["clients_few_of_class"] = int(of_class.sum())
    return _Few(small, of_class, counts)


def _without_small(values: dict[str, np.ndarray], few: _Few) -> dict[str, float | None]:
    """Return the means and worst tenths that clients of few rows do not count in, and `*_all`, with all clients.

    `values` are measures by client. Means of ranks and decisions, and the worst tenth, are None where no client has
    enough rows. Those of a regression then are over all clients. There is no `*_all` where no client is left out.
    """
    found: dict[str, float | None] = {}

    def add(key: str, value: Callable[[np.ndarray], float | None], measured: np.ndarray, left_out: np.ndarray) -> None:
        if left_out.any():
            found[f"{key}_all"] = value(measured)
            measured = measured[~left_out]
        found[key] = value(measured) if len(measured) else None

    for prefix in ("", "base_"):
        if (accuracy := values.get(f"{prefix}accuracy")) is not None:
            add(f"{prefix}{WORST_TENTH}", worst_decile, accuracy, few.small)
        for name in (*DECISIONS, *OF_NUMBERS):
            key = f"{prefix}{name}"
            if name in DECISIONS and key in values:
                add(key, _mean, values[key], few.of_class)
            elif f"{prefix}rmse" in values and key in values and not few.small.all():
                add(key, _mean, values[key], few.small)
    return found


def _gather(
    run: TrainedRun, count: int, positions: np.ndarray, parts: list[Any], notes: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Return predictions and notes for `count` samples from all processes; this one has predicted those at `positions`.

    Each process writes its rows into a table of zeros, and the tables are summed, which changes no number. The notes
    [count, k] are numbers beside the predictions, 0 for the samples of other processes.
    """
    world, kind = run.world, _kind(run.cohort)
    if world.size == 1:
        return kind.concatenate(parts), notes
    local_columns = kind.concatenate(parts).columns() if parts else np.zeros((0, 0))
    widths = torch.zeros(world.size, dtype=torch.float64)
    widths[world.rank] = local_columns.shape[1]  # a process without clients cannot know how many draws there are
    k = notes.shape[1]
    table = np.zeros((count, k + int(world.sum(widths).max())))
    if parts:
        table[positions, k:] = local_columns
    table[:, :k] = notes
    total = world.sum(torch.from_numpy(table)).numpy()
    fed = run.cohort.fed
    p = kind.from_columns(np.ascontiguousarray(total[:, k:]), fed.y.shape[-1])
    return replace(p, transform=fed.transform) if fed.transform else p, total[:, :k]


def _diverged(cohort: Cohort, owner: np.ndarray, quantities: str) -> TrainingError:
    """Return the error for the owners of samples without a score, because weights or predictions are not finite."""
    clients = np.unique(owner).tolist()
    names = ", ".join(cohort.fed.names[c] for c in clients[:8])
    return TrainingError(
        f"Personalising diverged for {len(clients)} client(s), {names} among them: their {quantities} are not finite. "
        f"A smaller personal_lr or fewer personal_epochs may help. {cohort.algorithm.remedy}"
    )


def _prior_predictions(run: TrainedRun, prior: Distribution, index: np.ndarray, owner: np.ndarray) -> dict[str, Any]:
    """Predict every sample with the server's own model; the keys are the prefixes of its scores.

    `prior` is without a label level. `prior_level`, where the algorithm has one, uses the label level of the sample's
    owner; it needs no further pass through the network.
    """
    cohort, world, round = run.cohort, run.world, run.round
    lane = type(prior)(*(leaf.unsqueeze(0) for leaf in prior))
    key, lanes = cohort.keys(rng.PREDICT, round, [-1]), Lanes.after_round(cohort, run.shared, [0], round)
    blocks = np.array_split(np.arange(len(index)), max(1, len(index) // ROWS))[world.rank :: world.size]
    labels = label_offset(cohort.algorithm, cohort.client_tensors.constants)

    def predict_chunk(chunk: int) -> dict[str, list[Any]]:
        # Where memory is short, as many samples fit as in a training step of `chunk` clients.
        batch_rows = 2 * ROWS if chunk >= cohort.fed.clients else max(FEW, min(2 * ROWS, chunk * cohort.batch_size))
        predictions: dict[str, list[Any]] = {"prior": []} | ({} if labels is None else {"prior_level": []})
        for batch in (batch for block in blocks for batch in np.array_split(block, -(-len(block) // batch_rows))):
            draws = outputs(lanes, lane, [index[batch]], None, key)
            predictions["prior"].append(prediction(cohort, draws))
            if labels is not None:
                level = labels.index_select(0, cohort.numbers(owner[batch].tolist()))
                predictions["prior_level"].append(prediction(cohort, with_label_level(draws, level)))
        return predictions

    positions, notes = np.concatenate([np.empty(0, int), *blocks]), np.zeros((len(index), 0))
    parts = fit_in_memory([cohort], cohort.chunk, predict_chunk)
    return {prefix: _gather(run, len(index), positions, part, notes)[0] for prefix, part in parts.items()}


def _mean(values: np.ndarray) -> float | None:
    """Average over the clients that have a value; None where no client has."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if len(numbers) else None
