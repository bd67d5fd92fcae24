"""How good are the clients' own models, and do they know what they do not know?

`evaluate` personalises every client exactly as a new one would be and scores it on its own held-out samples. The
measures are computed for all clients in one pass of segment sums; the tests hold them against torchmetrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..algorithms.base import State
from ..data import Federation, Rows
from ..data.rows import FEW_ROWS
from ..data.statistics import worst_decile
from ..engine.client import Lanes, Part, chunked, joined
from ..engine.loss import label_offset
from ..engine.memory import fitting
from ..engine.processes import ALONE, World
from ..engine.setting import Cohort
from ..engine.threads import over
from ..errors import InputError, TrainingError
from ..gaussian import Distribution
from ..likelihoods import Categorical

BINS = 15  # of the calibration error, the field's custom
SOME = 10_000  # clients that are scored while a run trains, unless it is told otherwise
COVERAGE = 0.9  # nominal coverage of the interval a regression is held against
_Z90 = 1.6448536269514722
FEW, ROWS = 64, 4096  # samples that the server's own model is given at once: at the least, and if there is memory


def entropy(probs: np.ndarray) -> np.ndarray:
    """H = −Σ p log p along the last axis."""
    return -(probs * np.log(np.clip(probs, 1e-30, None))).sum(-1)


def _entropy(probs: Tensor) -> Tensor:
    """The same on the device."""
    return -(probs * probs.clamp_min(1e-30).log()).sum(-1)


def surprise(probs: Tensor, labels: Tensor) -> Tensor:
    """−log p_i(x)/p(x): how much rarer inputs are at a client than among all, judged by the labels they may have.

    `probs` [n, classes] are the network's own, without a label level; `labels` are log π_i, the client's. With the
    federation's labels even, p_i(x)/p(x) = K Σ_y π_iy p(y|x): below 0 for inputs of the client's own classes.
    """
    return -(probs * labels.exp()).sum(-1).mul(probs.shape[-1]).clamp_min(1e-30).log()


def with_label_level(draws: Tensor, labels: Tensor) -> Tensor:
    """The network's own probabilities [draws, n, classes] times π_i, normalised; `labels` [n, classes] are log π_i."""
    return torch.softmax(draws.double().clamp_min(1e-30).log() + labels.double(), -1)


def _alone(draws: Tensor, labels: Tensor) -> Tensor:
    """The network's own probabilities, of those that a label level has multiplied with π_i."""
    return torch.softmax(draws.double().clamp_min(1e-30).log() - labels, -1).mean(0)


@dataclass(frozen=True)
class Prediction:
    """Class probabilities with their uncertainty, a row per input."""

    probs: np.ndarray  # [n, classes], averaged over weight samples
    mutual_information: np.ndarray  # [n]: the part of the entropy that is due to the weights
    surprise: np.ndarray | None = None  # [n]: see `surprise`; None without a label level

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.probs)} inputs, {self.probs.shape[-1]} classes)"

    @property
    def label(self) -> np.ndarray:
        """The most probable class."""
        return self.probs.argmax(-1)

    @property
    def entropy(self) -> np.ndarray:
        """H of the averaged probabilities, in nats."""
        return entropy(self.probs)

    @staticmethod
    def of(draws: Tensor, labels: Tensor | None = None) -> Prediction:
        """From the probabilities under each weight sample [draws, n, classes], and the label level in them."""
        probs = draws.mean(0, dtype=torch.float64)
        within = torch.stack([_entropy(each.double()) for each in draws]).mean(0)
        information = (_entropy(probs) - within).clamp_min(0)
        odd = None if labels is None else surprise(_alone(draws, labels.double()), labels.double()).cpu().numpy()
        return Prediction(probs.cpu().numpy(), information.cpu().numpy(), odd)


@dataclass(frozen=True)
class Regression:
    """Predicted means and deviations, a row per input and a column per target, in the data's own units."""

    mean: np.ndarray
    std: np.ndarray  # of the predictive distribution: noise and weights together
    model_std: np.ndarray  # the part that is due to the weights
    draws: np.ndarray  # [draws, n, 2·targets]: mean and noise deviation under each weight sample

    def __repr__(self) -> str:
        return f"Regression({len(self.mean)} inputs, {self.mean.shape[-1]} target(s))"

    def nll(self, y: np.ndarray) -> np.ndarray:
        """−log of the mixture density of every row, summed over targets."""
        mean, std = np.split(self.draws, 2, -1)
        log = (-0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)).sum(-1)
        top = log.max(0)
        return -(top + np.log(np.exp(log - top).mean(0)))

    @staticmethod
    def of(draws: Tensor, shift: np.ndarray, scale: np.ndarray) -> Regression:
        """From [draws, n, mean and log noise deviation] in standardised units."""
        mean, log = np.split(draws.double().cpu().numpy(), 2, -1)
        mean, std = mean * scale + shift, np.exp(log) * scale
        model = mean.std(0)
        total = np.sqrt((std**2).mean(0) + model**2)
        return Regression(mean.mean(0), total, model, np.concatenate([mean, std], -1))


@dataclass(frozen=True)
class Evaluation:
    """Scores: `summary` over all clients, `clients` a row each."""

    summary: dict[str, Any]
    clients: dict[str, np.ndarray]
    details: dict[str, Any]  # reliability diagram, entropy histogram

    def __repr__(self) -> str:
        scores = ", ".join(f"{k}={self.summary[k]:.4g}" for k in ("accuracy", "rmse", "nll") if k in self.summary)
        return f"Evaluation({len(next(iter(self.clients.values()), ()))} clients, {scores})"


def prediction(cohort: Cohort, draws: Tensor) -> Any:
    """The engine's outputs [draws, rows, ...], in the data's own units."""
    if isinstance(cohort.likelihood, Categorical):
        return Prediction.of(draws)
    return Regression.of(draws, cohort.fed.y_shift, cohort.fed.y_scale)


def check_rows(fed: Federation, split: str) -> Rows:
    """The rows to score clients on; an error where no client has any."""
    rows = fed.rows(split)
    if not rows.counts.any():
        raise InputError(
            f"Nothing to evaluate on: no client has {split} samples. Give them some, hold out a validation share "
            "(--validation 0.2), or train without evaluation (evaluate=False, --no-evaluate)."
        )
    return rows


def drawn(cohort: Cohort, split: str, most: int | None = None) -> list[int]:
    """The clients to score, in ascending order: those with rows or, if they are more than `most`, so many of them."""
    able = np.flatnonzero(check_rows(cohort.fed, split).counts)
    if most is not None and most < len(able):
        able = np.sort(rng.generator(cohort.seed, rng.SAMPLE, 0).choice(able, most, replace=False))  # rounds begin at 1
    return able.tolist()


class Entry(NamedTuple):
    """A trained run to be scored."""

    cohort: Cohort
    shared: State
    kept: Callable[[list[int]], State]  # what clients keep between rounds, a lane each
    round: int = 0
    world: World = ALONE
    most: int | None = None  # clients to score; None: all


def evaluate(
    cohort: Cohort,
    shared: State,
    kept: Any,
    split: str = "test",
    round: int = 0,
    world: World = ALONE,
    most: int | None = None,
) -> Evaluation:
    """Personalises every client from `shared` on its training data and scores it on its `split` rows.

    `kept(clients)` gives what those clients keep between rounds. The prior's own scores, without personalising, stand
    beside it, on the same rows: `prior_*` without the label level and, where the algorithm has one, `prior_level_*`
    with it, so that what personalising gains is not taken for what a client's label frequencies gain. Clients without
    such rows have no score (NaN) and do not count. Of more clients than `most`, so many are drawn, for a seed always
    the same. Where several processes call this, each personalises the clients that it owns, and all get all scores.
    """
    (found,) = evaluate_together([Entry(cohort, shared, kept, round, world, most)], split)
    if isinstance(found, TrainingError):
        raise found
    return found


@torch.no_grad()
def evaluate_together(
    entries: Sequence[Entry], split: str = "test", prior: bool = True
) -> list[Evaluation | TrainingError]:
    """`evaluate` for several runs that may share a batch (see `engine.simulate.advance`), all clients side by side.

    Without `prior` the server's own model is not scored.
    """
    epochs = entries[0].cohort.algorithm.personal_epochs
    (found,) = evaluate_after((epochs,), entries, split, prior=epochs if prior else None)
    return found


@torch.no_grad()
def evaluate_after(
    epochs: Sequence[int],
    entries: Sequence[Entry],
    split: str = "test",
    prior: int | None = None,
    hear: Callable[[float], None] = lambda share: None,
) -> list[list[Evaluation | TrainingError]]:
    """The same after each of these numbers of personal epochs, ascending: for each, the scores of all runs.

    The server's own model is scored with those after `prior` epochs. `hear` is told what share of the clients is done.
    """
    scored = [drawn(e.cohort, split, e.most) for e in entries]
    own = [_ours(e, clients) for e, clients in zip(entries, scored, strict=True)]
    work = partial(_personal, epochs, entries, split, own, hear)
    stages = fitting([e.cohort for e in entries], sum(map(len, own)), work)
    return [
        [
            _whole(entry, split, clients, parts, wrong, many == prior)
            for entry, clients, parts, wrong in zip(entries, scored, personal, bad, strict=True)
        ]
        for many, (personal, bad) in zip(epochs, stages, strict=True)
    ]


def _personal(
    epochs: Sequence[int],
    entries: Sequence[Entry],
    split: str,
    clients: list[list[int]],
    hear: Callable[[float], None],
    chunk: int,
) -> list[tuple[list[list[Any]], list[list[int]]]]:
    """After each number of epochs every run's predictions for these clients, and the clients whose models diverged."""
    stages: list[tuple[list[list[Any]], list[list[int]]]] = [
        ([[] for _ in entries], [[] for _ in entries]) for _ in epochs
    ]
    workers = entries[0].cohort.workers
    chunks = list(chunked(clients, chunk, workers))

    def scored(part: dict[int, list[int]]) -> list[tuple[list[Any], list[bool]]]:
        run = {i: entries[i] for i in part}
        lanes = Lanes([Part(run[i].cohort, run[i].shared, own, run[i].round) for i, own in part.items()])
        kept = joined([run[i].kept(own) for i, own in part.items()])
        rows = {i: [run[i].cohort.fed.rows(split)[c] for c in own] for i, own in part.items()}
        found = []
        for models in lanes.personalised(kept, epochs):
            draws = lanes.predict(models, [own for many in rows.values() for own in many])
            pieces = draws.split([sum(map(len, many)) for many in rows.values()], 1)
            fine = torch.stack([torch.isfinite(leaf).flatten(1).all(1) for leaf in models]).all(0).tolist()
            found.append(([prediction(run[i].cohort, p) for i, p in zip(part, pieces, strict=True)], fine))
        return found

    done, total = 0, sum(map(len, clients))
    for part, found in zip(chunks, over(scored, chunks, workers), strict=True):
        for (personal, bad), (pieces, fine) in zip(stages, found, strict=True):
            for i, piece in zip(part, pieces, strict=True):
                personal[i].append(piece)
            for (i, client), good in zip(((i, c) for i, own in part.items() for c in own), fine, strict=True):
                bad[i] += [] if good else [client]
        done += sum(map(len, part.values()))
        hear(done / total)
    return stages


def _ours(entry: Entry, clients: list[int]) -> list[int]:
    """Of some clients, those that this process owns."""
    fed, world = entry.cohort.fed, entry.world
    if world.size == 1:
        return clients
    own = set(world.deal(range(fed.clients), fed.train.counts)[world.rank])
    return [c for c in clients if c in own]


def _whole(
    entry: Entry, split: str, clients: list[int], parts: list[Any], bad: list[int], prior: bool
) -> Evaluation | TrainingError:
    """The scores of a run from the predictions for the clients that are ours, together with the other processes'."""
    rows, scored = entry.cohort.fed.rows(split).select(clients), np.array(clients)
    if entry.world.size > 1:
        owner = scored[rows.owner]
        place = np.flatnonzero(np.isin(owner, _ours(entry, clients)))
        personal, wrong = _together(entry, len(owner), [place], parts, np.isin(owner, bad).astype(float))
        bad = np.unique(owner[wrong > 0]).tolist()
    if bad:
        return _diverged(entry.cohort, bad, "weights")
    found = _joined(parts) if entry.world.size == 1 else personal
    numbers = [found.probs] if isinstance(found, Prediction) else [found.mean, found.std]
    finite = np.all([np.isfinite(each).all(1) for each in numbers], 0)
    if not finite.all():  # finite weights, but too large for the network
        return _diverged(entry.cohort, np.unique(scored[rows.owner[~finite]]).tolist(), "predictions")
    return _scored(entry, rows, scored, found, prior)


def _together(
    entry: Entry, count: int, place: list[np.ndarray], parts: list[Any], flags: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Predictions for `count` samples, of which this process has those at `place`; and a flag for each sample.

    Each process writes its rows into a table of zeros, and the tables are summed, which changes no number.
    """
    world = entry.world
    own = _columns(_joined(parts)) if parts else np.zeros((0, 0))
    widths = torch.zeros(world.size, dtype=torch.float64)
    widths[world.rank] = own.shape[1]  # a process without clients cannot know how many draws there are
    table = np.zeros((count, int(world.sum(widths).max()) + 1))
    if parts:
        table[np.concatenate(place), 1:] = own
    table[:, 0] = flags
    found = world.sum(torch.from_numpy(table)).numpy()
    return _of_columns(entry.cohort, np.ascontiguousarray(found[:, 1:])), found[:, 0]


def _columns(p: Any) -> np.ndarray:
    """Predictions as a table, a row per sample."""
    if isinstance(p, Prediction):
        return np.column_stack([p.probs, p.mutual_information])
    return np.column_stack([p.mean, p.std, p.model_std, *p.draws])


def _of_columns(cohort: Cohort, table: np.ndarray) -> Any:
    """The inverse."""
    if isinstance(cohort.likelihood, Categorical):
        return Prediction(np.ascontiguousarray(table[:, :-1]), table[:, -1].copy())
    targets = cohort.fed.y.shape[1]
    mean, std, model, draws = np.split(table, np.arange(1, 4) * targets, 1)
    return Regression(mean, std, model, np.stack(np.split(draws, draws.shape[1] // (2 * targets), 1)))


def _scored(entry: Entry, rows: Rows, scored: np.ndarray, personal: Any, with_prior: bool) -> Evaluation:
    """The scores of a run from the predictions for its scored clients, whose rows these are."""
    cohort, fed, owner = entry.cohort, entry.cohort.fed, rows.owner
    prior = cohort.algorithm.prior(entry.shared) if with_prior else None
    y = fed.y[rows.index]
    score = _classification if isinstance(cohort.likelihood, Categorical) else _regression
    clients, pooled, details = score(personal, y, owner, len(scored))
    summary: dict[str, Any] = {name: float(v.mean()) for name, v in clients.items()} | pooled
    summary["clients_scored"] = len(scored)
    small = rows.counts < FEW_ROWS
    summary["clients_small"] = int(small.sum())
    if small.any() and "accuracy" in clients:
        large = clients["accuracy"][~small]
        summary["accuracy_worst_decile_large"] = worst_decile(large) if len(large) else None
    shown = [name for name in ("accuracy", "nll", "ece", "brier", "rmse") if name in summary]
    summary |= {f"prior_{name}": None for name in shown}
    for word, own in (_prior_predictions(entry, prior, rows.index, scored[owner]) if prior else {}).items():
        alone, alone_pooled, _ = score(own, y, owner, len(scored))
        clients |= {f"{word}_{k}": v for k, v in alone.items()}
        summary |= {f"{word}_{name}": alone_pooled.get(name, float(alone[name].mean())) for name in shown}
    return Evaluation(summary, {name: _spread_out(v, scored, fed.clients) for name, v in clients.items()}, details)


def _spread_out(values: np.ndarray, scored: np.ndarray, clients: int) -> np.ndarray:
    out = np.full(clients, np.nan)
    out[scored] = values
    return out


def _diverged(cohort: Cohort, clients: list[int], what: str) -> TrainingError:
    """The error for clients that have no score, because their weights or predictions are not finite."""
    names = ", ".join(cohort.fed.names[c] for c in clients[:8])
    return TrainingError(
        f"Personalising diverged for {len(clients)} client(s), {names} among them: their {what} are not finite. "
        f"A smaller personal_lr or fewer personal_epochs may help. {cohort.algorithm.remedy}"
    )


def _prior_predictions(entry: Entry, prior: Distribution, index: np.ndarray, owner: np.ndarray) -> dict[str, Any]:
    """What the server's own model predicts for every sample, by the first word of its scores.

    `prior` is without a label level. `prior_level`, where there is one, has that of the sample's owner: it takes no
    pass of its own through the network.
    """
    cohort, world, round = entry.cohort, entry.world, entry.round
    lane = type(prior)(*(leaf.unsqueeze(0) for leaf in prior))
    key, lanes = cohort.keys(rng.PREDICT, round, [-1]), cohort.lanes(entry.shared, [0], round)
    place = np.array_split(np.arange(len(index)), max(1, len(index) // ROWS))[world.rank :: world.size]
    labels = label_offset(cohort.algorithm, cohort.tables.constants)

    def work(chunk: int) -> list[dict[str, Any]]:
        # Where memory is short, what so many clients can be trained on can be scored.
        most = 2 * ROWS if chunk >= cohort.fed.clients else max(FEW, min(2 * ROWS, chunk * cohort.batch_size))
        pieces = [piece for rows in place for piece in np.array_split(rows, -(-len(rows) // most))]
        found = []
        for piece in pieces:
            draws = lanes.outputs(lane, [index[piece]], None, key)
            found.append({"prior": prediction(cohort, draws)})
            if labels is not None:
                own = labels.index_select(0, cohort.numbers(owner[piece].tolist()))
                found[-1]["prior_level"] = prediction(cohort, with_label_level(draws, own))
        return found

    parts = fitting([cohort], cohort.chunk, work)
    none = np.zeros(len(index))
    return {
        word: _joined(own) if world.size == 1 else _together(entry, len(index), place, own, none)[0]
        for word in (("prior",) if labels is None else ("prior", "prior_level"))
        for own in [[part[word] for part in parts]]
    }


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Prediction):
        return Prediction(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("probs", "mutual_information")))
    mean, std, model = (np.concatenate([getattr(p, n) for p in parts]) for n in ("mean", "std", "model_std"))
    return Regression(mean, std, model, np.concatenate([p.draws for p in parts], 1))


def _mean_by(owner: np.ndarray, clients: int, values: np.ndarray) -> np.ndarray:
    return np.bincount(owner, values, clients) / np.bincount(owner, minlength=clients)


def calibration(confidence: np.ndarray, correct: np.ndarray, owner: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """Per client and bin of confidence: how many, their summed confidence, their summed hits."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    cell = owner * BINS + bins
    sums = (np.bincount(cell, w, clients * BINS) for w in (np.ones(len(cell)), confidence, correct.astype(float)))
    return tuple(s.reshape(clients, BINS) for s in sums)


def _classification(
    p: Prediction, y: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    true = p.probs[np.arange(len(y)), y]
    correct, confidence = p.label == y, p.probs.max(-1)
    rows = {
        "accuracy": correct.astype(float),
        "nll": -np.log(np.clip(true, 1e-30, None)),
        "brier": (p.probs**2).sum(-1) - 2 * true + 1,
        "entropy": p.entropy,
        "mutual_information": p.mutual_information,
    }
    by_client = {name: _mean_by(owner, clients, v) for name, v in rows.items()}
    count, sure, hit = calibration(confidence, correct, owner, clients)
    by_client["ece"] = np.abs(sure - hit).sum(1) / count.sum(1)
    count, sure, hit = count.sum(0), sure.sum(0), hit.sum(0)
    pooled: dict[str, Any] = {f"{name}_pooled": float(v.mean()) for name, v in rows.items()}
    # A client's own calibration error is biased upwards by its few samples; the pooled one is the headline.
    pooled |= {"ece": float(np.abs(sure - hit).sum() / count.sum()), "ece_clients": float(by_client["ece"].mean())}
    pooled["accuracy_worst_decile"] = worst_decile(by_client["accuracy"])
    edges = np.linspace(0, math.log(p.probs.shape[1]), 31)
    some = np.maximum(count, 1)
    details = {
        "reliability": [
            {"low": i / BINS, "high": (i + 1) / BINS, "confidence": c, "accuracy": h, "count": int(n)}
            for i, (c, h, n) in enumerate(zip((sure / some).tolist(), (hit / some).tolist(), count, strict=True))
        ],
        "entropy_histogram": {
            "edges": edges.tolist(),
            "correct": np.histogram(np.minimum(p.entropy[correct], edges[-1]), edges)[0].tolist(),
            "wrong": np.histogram(np.minimum(p.entropy[~correct], edges[-1]), edges)[0].tolist(),
        },
    }
    return by_client, pooled, details


def _regression(
    p: Regression, y: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    squared = ((p.mean - y) ** 2).mean(-1)
    inside = (np.abs(p.mean - y) <= _Z90 * p.std).mean(-1)
    nll = p.nll(y)
    by_client = {
        "rmse": np.sqrt(_mean_by(owner, clients, squared)),
        "nll": _mean_by(owner, clients, nll),
        "coverage": _mean_by(owner, clients, inside),
        "std": _mean_by(owner, clients, p.std.mean(-1)),
        "model_std": _mean_by(owner, clients, p.model_std.mean(-1)),
    }
    pooled = {"rmse_pooled": math.sqrt(squared.mean()), "nll_pooled": nll.mean(), "coverage_pooled": inside.mean()}
    if y.shape[1] > 1:  # targets may have different units: each its own
        pooled |= {f"rmse_target_{j}": v for j, v in enumerate(np.sqrt(((p.mean - y) ** 2).mean(0)))}
    return by_client, {k: float(v) for k, v in pooled.items()} | {"interval": COVERAGE}, {}
