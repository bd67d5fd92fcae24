"""Predictions of several answers per input: labels of 0 or 1 (task multilabel), or a class per step (task sequence).

Every answer that is known is one sample of a classifier, so the measures of classifiers apply: `flat` returns these
samples. A target of −1 is not known and is left out everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..data import Federation
from . import decisions
from .predictions import Checks, NamedColumns, Prediction, entropy


@dataclass(frozen=True)
class MultiPrediction(NamedColumns):
    """Class probabilities of several answers per input, with their uncertainty."""

    probs: np.ndarray  # [n, answers, classes], averaged over weight samples; of labels the classes are 0 and 1
    mutual_information: np.ndarray  # [n, answers]: the part of the entropy that is due to the weights
    checks: Checks | None = None  # None without validation rows
    ids: list[str] | None = None  # identifiers of a table's rows, which have no several answers
    steps: np.ndarray | None = None  # which answers are those of tokens and not of padding [n, answers]; None: all
    named: Callable[[Any], Mapping[str, Sequence[Any]]] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        n, answers, classes = self.probs.shape
        return f"{type(self).__name__}({n} inputs, {answers} answers of {classes} classes)"

    @property
    def label(self) -> np.ndarray:
        """The most probable class of each answer [n, answers]; of labels 1 means that the label applies."""
        return self.probs.argmax(-1)

    @property
    def positive(self) -> np.ndarray:
        """The probability that each label applies [n, labels]."""
        return self.probs[..., 1]

    @property
    def entropy(self) -> np.ndarray:
        """The entropy of each answer's probabilities [n, answers], in nats."""
        return entropy(self.probs)

    @property
    def finite(self) -> np.ndarray:
        """Which rows hold finite probabilities [n]."""
        return np.isfinite(self.probs).all((1, 2))

    def nll(self, y: np.ndarray) -> np.ndarray:
        """Return −log p of every row of `y` [n, answers], summed over the known answers."""
        true = np.take_along_axis(self.probs, np.maximum(y, 0)[..., None], -1)[..., 0]
        return (-np.log(np.clip(true, 1e-30, None)) * (y >= 0)).sum(1)

    @staticmethod
    def of(draws: Tensor) -> MultiPrediction:
        """Average the probabilities under each weight sample, [draws, n, answers, classes]."""
        shape = draws.shape[1:]
        p = Prediction.of(draws.flatten(1, 2))
        return MultiPrediction(p.probs.reshape(shape), p.mutual_information.reshape(shape[:2]))

    @staticmethod
    def concatenate(parts: Sequence[MultiPrediction]) -> MultiPrediction:
        """Join predictions for several batches."""
        probs, information = (np.concatenate([getattr(p, n) for p in parts]) for n in ("probs", "mutual_information"))
        return MultiPrediction(probs, information)

    def columns(self) -> np.ndarray:
        """Return the predictions as a table with one row per input."""
        return np.column_stack([self.probs.reshape(len(self.probs), -1), self.mutual_information])

    @staticmethod
    def from_columns(table: np.ndarray, targets: int) -> MultiPrediction:
        """Invert `columns` for a given number of answers."""
        probs = table[:, :-targets].reshape(len(table), targets, -1)
        return MultiPrediction(np.ascontiguousarray(probs), table[:, -targets:].copy())

    def flat(self, y: np.ndarray, owner: np.ndarray) -> tuple[Prediction, np.ndarray, np.ndarray]:
        """Return the known answers as samples of a classifier: their predictions, classes [m] and owners [m]."""
        answered = y >= 0
        return (
            Prediction(self.probs[answered], self.mutual_information[answered]),
            y[answered],
            np.repeat(owner, answered.sum(1)),
        )

    def exact(self, y: np.ndarray) -> np.ndarray:
        """Return which rows have every known answer right, bool [n]."""
        return ((self.label == y) | (y < 0)).all(1)


def decide(
    p: MultiPrediction,
    y: np.ndarray,
    owner: np.ndarray,
    fed: Federation,
    clients: np.ndarray,
    specificity: float = decisions.SPECIFICITY,
) -> decisions.Scores:
    """Return the measures of `decisions`; those of several labels are means over labels, with details of each.

    `y` [n, answers] and `owner` [n] belong to the samples that are scored; `clients` are the numbers of the owners.
    """
    index, trainer = fed.train.index, fed.train.owner
    if fed.task == "sequence":
        flat, labels, owners = p.flat(y, owner)
        counts = _counts(fed.y[index], trainer, fed.clients, fed.classes)[clients]
        names = [str(number) for number in range(fed.classes)]
        return decisions.report(flat.probs, labels, owners, counts, specificity, names)
    reports = []
    for j in range(y.shape[1]):
        answered = y[:, j] >= 0
        counts = _counts(fed.y[index, j : j + 1], trainer, fed.clients, 2)[clients]
        rows = p.probs[answered, j], y[answered, j], owner[answered]
        reports.append(decisions.report(*rows, counts, specificity))
    by_client = {
        name: decisions.mean([values.get(name, np.full(len(clients), np.nan)) for values, _, _ in reports])
        for name in reports[0][0]
        if not name.endswith(("_low", "_high"))
    }
    means = {n: decisions.mean([np.nan if r[1][n] is None else r[1][n] for r in reports]) for n in reports[0][1]}
    pooled = {name: None if np.isnan(value) else float(value) for name, value in means.items()}
    by_label = [
        {"label": j, "samples": int((y[:, j] >= 0).sum()), "positives": int((y[:, j] == 1).sum()), **measures}
        for j, (_, measures, _) in enumerate(reports)
    ]
    return by_client, pooled, {"labels": by_label}


def _counts(y: np.ndarray, owner: np.ndarray, clients: int, classes: int) -> np.ndarray:
    """Count each client's known answers of every class, [clients, classes]."""
    answered = y >= 0
    cells = np.repeat(owner, answered.sum(1)) * classes + y[answered]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)
