"""Likelihoods p(y|x, w) of a network's outputs f_w(x): categorical, Gaussian, several labels, a label per step.

A likelihood may have entries in the weight vector (a learned noise level). They stand behind the network's, so they
have a prior, a posterior and a client's own value like every other weight. In all methods `outputs` is [..., outputs],
`tail` holds the likelihood's entries [entries], and `offset` is a client's label level log π [classes], or None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import check_fields, checked_integer
from .errors import InputError, quoted


@dataclass(frozen=True)
class Categorical:
    """p(y|x, w) = softmax(f_w(x))_y; with a label level π it is ∝ π(y)·exp f_w(x)_y.

    `weights`, one per class or none, are for training alone: an example of class y counts `weights[y]` times. The
    engine multiplies `nll` by them; `nll` and `predict` themselves do not know them.
    """

    classes: int
    weights: tuple[float, ...] = ()
    entries = 0  # how many entries of the weight vector belong to the likelihood
    task = "classification"

    def __post_init__(self) -> None:
        checked_integer(self.classes, "Categorical: classes")
        if not isinstance(self.weights, tuple):
            raise InputError(f"Categorical: weights must be a tuple of numbers; it is {quoted(self.weights)}.")
        if self.weights and len(self.weights) != self.classes:
            raise InputError(f"There are {len(self.weights)} class weights for {self.classes} classes. Give one each.")
        if not all(isinstance(w, int | float) and 0 < w < math.inf for w in self.weights):
            raise InputError(f"Class weights must be positive numbers; they are {self.weights}.")

    @property
    def outputs(self) -> int:
        """How many outputs the network has per example."""
        return self.classes

    def nll(self, outputs: Tensor, y: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return −log p(y|x) of every example, [...]; y holds class numbers, [...]."""
        logits = outputs if offset is None else outputs + offset
        return torch.logsumexp(logits, -1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def predict(self, outputs: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return class probabilities, [..., classes]."""
        return torch.softmax(outputs if offset is None else outputs + offset, -1)

    def check(self, outputs: Tensor) -> None:
        """Raise InputError for a network whose outputs [batch, ...] do not fit."""
        _check_outputs(outputs, self.classes, "classes", ": one logit per class, without a softmax")


def weighted(likelihood: Any, given: str | Sequence[float], counts: Sequence[int]) -> Categorical:
    """Return the likelihood with class weights as a user gives them, for training rows with these counts of classes."""
    if not isinstance(likelihood, Categorical):
        raise InputError(
            "Class weights are for rows with one class each, which these data do not have. Leave them out."
        )
    return replace(likelihood, weights=class_weights(given, counts))


def class_weights(given: str | Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each class, for training rows with these counts of classes.

    `balanced` is N / (K N_c): every class then counts alike. A list such as `1,5`, or numbers, gives ratios. They are
    scaled so that the mean weight of the training rows is 1, because step sizes and λ are relative to that. `none`
    gives no weights.
    """
    if isinstance(given, str) and given == "none":
        return ()
    total, classes = sum(counts), len(counts)
    if isinstance(given, str) and given == "balanced":
        if absent := [c for c in range(classes) if not counts[c]]:
            raise InputError(
                f"Class weights 'balanced' need training rows of every class; class {absent[0]} has none. Give the "
                "weights as numbers, such as 1,5."
            )
        return tuple(total / (classes * count) for count in counts)
    try:
        numbers = [float(word) for word in (given.split(",") if isinstance(given, str) else given)]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or not all(0 < w < math.inf for w in numbers):
        raise InputError(f"Class weights are 'balanced', 'none', or a positive number per class, 1,5; not {given!r}.")
    if len(numbers) != classes:
        raise InputError(f"There are {len(numbers)} class weights for {classes} classes. Give one each, such as 1,5.")
    mean = sum(w * count for w, count in zip(numbers, counts, strict=True)) / max(total, 1)
    return tuple(w / mean for w in numbers) if mean > 0 else tuple(numbers)


@dataclass(frozen=True)
class GaussianNoise:
    """y = f_w(x) + N(0, σ²), with one σ per target: σ = noise·exp(tail), or σ = noise where it is not learned.

    With `by_input` the noise depends on the input. The network then has two outputs per target, all means f and then
    all h, and σ(x) is multiplied by exp(2·tanh(h/2)). Near h = 0 that is exp(h), and it stays between 1/7.4 and 7.4, so
    that no step meets an infinite precision. `noise` is in units of the standardised target.
    """

    targets: int
    noise: float = 0.5
    learn: bool = True
    by_input: bool = False
    task = "regression"

    def __post_init__(self) -> None:
        check_fields(self)
        checked_integer(self.targets, "GaussianNoise: targets")
        if not (self.noise > 0 and math.isfinite(self.noise)):
            raise InputError(f"The noise deviation must be a positive number; it is {self.noise}.")

    @property
    def entries(self) -> int:
        """How many entries of the weight vector belong to the likelihood."""
        return self.targets if self.learn else 0

    @property
    def outputs(self) -> int:
        """How many outputs the network needs: the means and, with `by_input`, as many log deviations."""
        return 2 * self.targets if self.by_input else self.targets

    def mean_and_log_noise(self, outputs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the mean [..., targets] and log σ, which is one per target if the noise does not depend on the input.

        `tail` is the log of its ratio to the starting value.
        """
        log = math.log(self.noise) + tail if self.learn else math.log(self.noise)
        if not self.by_input:
            return outputs, log
        mean, head = outputs.split(self.targets, -1)
        return mean, log + MOST_LOG * torch.tanh(head / MOST_LOG)

    def nll(self, outputs: Tensor, y: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return −log p(y|x) of every example, summed over the targets, [...]; y is [..., targets]."""
        mean, log = self.mean_and_log_noise(outputs, tail)
        z = (y - mean) * (torch.exp(-log) if isinstance(log, Tensor) else math.exp(-log))
        return (0.5 * z**2 + log + 0.5 * math.log(2 * math.pi)).sum(-1)

    def predict(self, outputs: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return the mean and log σ of every target side by side, [..., 2·targets]."""
        mean, log = self.mean_and_log_noise(outputs, tail)
        return torch.cat([mean, torch.zeros_like(mean) + log], -1)

    def check(self, outputs: Tensor) -> None:
        """Raise InputError for a network whose outputs [batch, ...] do not fit."""
        hint = ": the means, then a log deviation for each" if self.by_input else ""
        _check_outputs(outputs, self.targets, "target(s)", hint, self.outputs)


@dataclass(frozen=True)
class Bernoulli:
    """Several labels of 0 or 1, independent given x: p(y|x, w) = Π_j σ(f_w(x)_j)^y_j (1 − σ(f_w(x)_j))^(1 − y_j).

    A label of −1 is not known and has no factor.
    """

    labels: int
    entries = 0
    task = "multilabel"

    def __post_init__(self) -> None:
        checked_integer(self.labels, "Bernoulli: labels")

    @property
    def outputs(self) -> int:
        """How many outputs the network has per example."""
        return self.labels

    def nll(self, outputs: Tensor, y: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return −log p(y|x) of every example, summed over the known labels, [...]; y is [..., labels]."""
        losses = functional.softplus(torch.where(y > 0, -outputs, outputs))
        return (losses * (y >= 0)).sum(-1)

    def predict(self, outputs: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return the probabilities of 0 and of 1 of every label, [..., labels, 2]."""
        return torch.sigmoid(torch.stack([-outputs, outputs], -1))

    def check(self, outputs: Tensor) -> None:
        """Raise InputError for a network whose outputs [batch, ...] do not fit."""
        _check_outputs(outputs, self.labels, "labels", ": one logit per label, without a sigmoid")


@dataclass(frozen=True)
class StepCategorical:
    """A sequence with one class per step: p(y|x, w) = Π_t softmax(f_w(x)_t)_(y_t) over the steps with y_t ≥ 0.

    A network returns logits [batch, steps, classes], or the same flat, [batch, steps · classes].
    """

    classes: int
    steps: int
    entries = 0
    task = "sequence"

    def __post_init__(self) -> None:
        checked_integer(self.classes, "StepCategorical: classes")
        checked_integer(self.steps, "StepCategorical: steps")

    @property
    def outputs(self) -> int:
        """How many outputs the network has per example."""
        return self.steps * self.classes

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs if outputs.ndim == 3 else outputs.unflatten(-1, (self.steps, self.classes))

    def nll(self, outputs: Tensor, y: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return −log p(y|x) of every example, summed over its labelled steps, [batch]; y is [batch, steps]."""
        logits = self._logits(outputs)
        true = logits.gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return ((torch.logsumexp(logits, -1) - true) * (y >= 0)).sum(-1)

    def predict(self, outputs: Tensor, tail: Tensor, offset: Tensor | None) -> Tensor:
        """Return class probabilities of every step, [batch, steps, classes]."""
        return torch.softmax(self._logits(outputs), -1)

    def check(self, outputs: Tensor) -> None:
        """Raise InputError for a network whose outputs [batch, ...] do not fit."""
        if tuple(outputs.shape[1:]) not in ((self.steps, self.classes), (self.outputs,)):
            raise InputError(
                f"The model's output has shape {tuple(outputs.shape[1:])} per example; {self.steps} steps of "
                f"{self.classes} classes need ({self.steps}, {self.classes}): logits per step, without a softmax."
            )


# How far the log of an input's deviation may be from that of all inputs. With 3, large steps diverge where the noise of
# rows differs much; scores at the default step are the same (examples/noise_by_input.py).
MOST_LOG = 2.0


def _check_outputs(outputs: Tensor, count: int, what: str, hint: str = "", needed: int | None = None) -> None:
    needed = count if needed is None else needed
    if outputs.ndim != 2 or outputs.shape[1] != needed:
        shape = tuple(outputs.shape[1:])
        raise InputError(f"The model's output has shape {shape} per example; {count} {what} need ({needed},){hint}.")


Likelihood = Categorical | GaussianNoise | Bernoulli | StepCategorical


def default(task: str, classes: int, targets: int) -> Likelihood:
    """Return the likelihood of a task with this many classes and columns of targets, labels or steps."""
    if task == "classification":
        return Categorical(classes)
    if task == "regression":
        return GaussianNoise(targets)
    return Bernoulli(targets) if task == "multilabel" else StepCategorical(classes, targets)


def to_json(likelihood: Likelihood) -> dict[str, Any]:
    """Return a likelihood as plain data, for files; `by_input` and `weights` only if set, as earlier versions wrote."""
    content = {"kind": type(likelihood).__name__, **vars(likelihood)}
    content |= {"weights": list(content["weights"])} if "weights" in content else {}
    return {name: value for name, value in content.items() if name not in ("by_input", "weights") or value}


def from_json(data: dict[str, Any]) -> Likelihood:
    """Return the likelihood that `to_json` wrote; raises InputError for anything else."""
    match data:
        case {"kind": "Categorical", "classes": int(classes), "weights": list(weights)}:
            return Categorical(classes, tuple(weights))
        case {"kind": "Categorical", "classes": int(classes)}:
            return Categorical(classes)
        case {"kind": "GaussianNoise", "targets": int(targets), "noise": float(noise), "learn": bool(learn)}:
            if isinstance(by_input := data.get("by_input", False), bool):
                return GaussianNoise(targets, noise, learn, by_input)
        case {"kind": "Bernoulli", "labels": int(labels)}:
            return Bernoulli(labels)
        case {"kind": "StepCategorical", "classes": int(classes), "steps": int(steps)}:
            return StepCategorical(classes, steps)
    raise InputError(f"Unknown likelihood {data!r} in the file; it was not written by this version of fedabml.")
