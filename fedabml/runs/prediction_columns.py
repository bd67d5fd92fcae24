"""The columns of predictions: one list of names for files (`fedabml predict`) and services (`fedabml serve`).

    columns = output_columns(posterior.predict(x), posterior.input_spec)    # {"label": [...], "p_no": [...], ...}

A value is a word, a number, a truth value, or a list of words; `as_text` writes any of them into the cell of a CSV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data import catalogue
from ..evaluation.predictions import Checks, Prediction, Regression
from ..evaluation.structured import MultiPrediction
from .input_spec import InputSpec


def class_names(input_spec: InputSpec) -> tuple[str, ...]:
    """Return the names of the classes: those of the table or the dataset, or their numbers; empty for a regression."""
    return catalogue.class_names(input_spec.class_names, input_spec.dataset, input_spec.classes or 0)


def output_columns(
    p: Prediction | Regression | MultiPrediction, input_spec: InputSpec, quantiles: Sequence[float] = ()
) -> dict[str, Sequence[Any]]:
    """Return the columns of a prediction by name, each with a value per input.

    They are probabilities of classes and their uncertainty, or means and deviations, with the median of a transformed
    target and a column such as q_0.9 for each of the `quantiles`; then the checks, if there are any. Of several labels
    they are those that apply and the probability of each; of steps the class of each step, with its probability, and
    "" and None for steps of padding, which do not count in the entropy either. The identifiers of a table's rows come
    first, under the name of their column.
    """
    return with_ids(_output_columns(p, input_spec, quantiles), p.ids, input_spec)


def with_ids(columns: dict[str, Sequence[Any]], ids: Sequence[str] | None, spec: InputSpec) -> dict[str, Sequence[Any]]:
    """Return the columns with the identifiers of their rows, if there are any, before them."""
    if ids is None or spec.recipe is None or spec.recipe.id is None:
        return columns
    name = spec.recipe.id
    return {f"id {name}" if name in ("row", *columns) else name: ids, **columns}


def _output_columns(
    p: Prediction | Regression | MultiPrediction, input_spec: InputSpec, quantiles: Sequence[float]
) -> dict[str, Sequence[Any]]:
    columns: dict[str, Sequence[Any]]
    if isinstance(p, MultiPrediction):
        numbers = range(p.probs.shape[1])
        if input_spec.task == "multilabel":
            columns = {"labels": [[str(j) for j in row.nonzero()[0]] for row in p.label]}
            columns |= {f"p_{j}": p.positive[:, j].tolist() for j in numbers}
        else:
            labels, best = p.label.astype(str).astype(object), p.probs.max(2).astype(object)
            if p.steps is not None:
                labels[~p.steps], best[~p.steps] = "", None
            columns = {f"label_{t}": labels[:, t].tolist() for t in numbers}
            columns |= {f"p_{t}": best[:, t].tolist() for t in numbers}
        counted = True if p.steps is None else p.steps
        columns["entropy"] = p.entropy.sum(1, where=counted).tolist()
        columns["mutual_information"] = p.mutual_information.sum(1, where=counted).tolist()
        return columns | _check_columns(p.checks)
    if isinstance(p, Prediction):
        names = class_names(input_spec)
        columns = {"label": [names[i] for i in p.label]}
        columns |= {f"p_{name}": p.probs[:, i].tolist() for i, name in enumerate(names)}
        columns |= {"entropy": p.entropy.tolist(), "mutual_information": p.mutual_information.tolist()}
        columns |= {} if p.surprise is None else {"surprise": p.surprise.tolist()}
        if p.checks and p.checks.sets is not None:
            columns["set"] = [[names[c] for c in row.nonzero()[0]] for row in p.checks.sets]
        return columns | _check_columns(p.checks)
    targets = p.mean.shape[1]
    ends = [""] if targets == 1 else [f"_{j}" for j in range(targets)]
    parts = {"mean": p.mean, "std": p.std, "model_std": p.model_std} | ({"median": p.median} if p.transformed else {})
    parts |= {f"q_{level:g}": p.quantile(level) for level in quantiles}
    if p.checks and p.checks.low is not None and p.checks.high is not None:
        parts |= {"low": p.checks.low, "high": p.checks.high}
    columns = {f"{name}{end}": part[:, j].tolist() for j, end in enumerate(ends) for name, part in parts.items()}
    return columns | _check_columns(p.checks)


def _check_columns(checks: Checks | None) -> dict[str, Sequence[Any]]:
    """Return the columns that say whether an input is unusual, and why."""
    if checks is None:
        return {}
    columns: dict[str, Sequence[Any]] = {"alarm": checks.alarm.tolist()}
    columns |= {} if checks.score is None else {"score": checks.score.tolist()}
    columns |= {} if checks.distance is None else {"distance": checks.distance.tolist()}
    columns |= {} if checks.strangeness is None else {"strangeness": checks.strangeness.tolist()}
    return columns | ({} if checks.flags is None else {"flags": checks.flags})


def as_text(name: str, value: Any) -> str:
    """Return the text of a column's value in a CSV."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ("|" if name in ("set", "labels") else "; ").join(value)
    return value if isinstance(value, str) else f"{value:.6g}"
