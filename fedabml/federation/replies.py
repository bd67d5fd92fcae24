"""Check whether a site's reply may count: its identity, names, shapes, types, finiteness, magnitudes and counts.

A reply is untrusted. `check` examines one reply alone, `outliers` compares those of a round. Both return a reason in
words, which quotes nothing of the reply but cleaned names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..algorithms.base import State
from ..arguments import is_number, is_whole
from .messages import Order, Reply, printable

MAX_VALUE = 1e9  # magnitude of one number of an update
MAX_LOSS = 1e12
LOG_DEVIATION = (-30.0, 30.0)  # log σ; hyperparameters allow −20 to 2
SECONDS = ("boot", "imports", "setup", "work", "score")
POSITIVE = ("precision", "share", "length")  # the server divides by their means
NOT_NEGATIVE = ("second",)  # second moments
CHUNK = 1 << 18  # numbers of each reply that are compared at once: all of a large model's would take gigabytes


@dataclass(frozen=True)
class ReplyLimits:
    """Limits bound what a reply may contain."""

    max_samples: int = 10_000_000
    max_bytes: int = 128 << 20
    max_value: float = MAX_VALUE
    max_loss: float = MAX_LOSS
    log_deviation: tuple[float, float] = LOG_DEVIATION


def check_identity(reply: Reply, order: Order) -> str | None:
    """Return why a reply does not belong to an order, or None if it does."""
    if (reply.round, reply.attempt) != (order.round, order.attempt):
        return "late: it belongs to another round or attempt"
    for name, what in (("nonce", "nonce"), ("site", "site"), ("federation", "federation"), ("card", "card")):
        if getattr(reply, name) != getattr(order, name):
            return f"it names another {what} than its order"
    return None if reply.kind == order.kind else "it answers another kind of order"


def check(reply: Reply, order: Order, limits: ReplyLimits, like: State) -> str | None:
    """Return why a reply to a training order must not count, or None if it may.

    `like` has the names, shapes and types of an update.
    """
    if reason := check_identity(reply, order):
        return reason
    if reply.error:
        return f"the site refused: {printable(reply.error)}"
    if not is_whole(reply.samples) or not 1 <= reply.samples <= limits.max_samples:
        return f"its number of samples is not between 1 and {limits.max_samples}"
    if not is_number(reply.loss) or not math.isfinite(reply.loss):
        return "its loss is not a finite number"
    if abs(reply.loss) > limits.max_loss:
        return f"its loss is beyond ±{limits.max_loss:g}"
    return check_update(reply.tensors, limits, like)


def check_update(update: State, limits: ReplyLimits, like: State) -> str | None:
    """Return why tensors are not a valid update, or None if they are."""
    if missing := [name for name in like if name not in update]:
        return f"it lacks {_listed(missing)}"
    if extra := [name for name in update if name not in like]:
        return f"it has {_listed(extra)}, which is not part of an update"
    for name, expected in like.items():
        value = update[name]
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.device != expected.device:
            return f"{name} is no array"
        if value.dtype != expected.dtype:
            return f"{name} has the type {value.dtype}, not {expected.dtype}"
        if value.shape != expected.shape:
            return f"{name} has the shape {list(value.shape)[:8]}, not {list(expected.shape)}"
        if reason := _check_values(name, value.detach(), limits):
            return reason
    return None


def _check_values(name: str, value: Tensor, limits: ReplyLimits) -> str | None:
    if not value.numel():
        return None
    if not bool(torch.isfinite(value).all()):
        return f"{name} holds values that are not finite"
    low, high = (float(bound) for bound in value.aminmax())
    last = name.rpartition(".")[2]
    if last == "logstd" and not (limits.log_deviation[0] <= low and high <= limits.log_deviation[1]):
        return f"{name} is a log-deviation beyond {limits.log_deviation[0]:g} to {limits.log_deviation[1]:g}"
    if max(-low, high) > limits.max_value:
        return f"{name} holds values beyond ±{limits.max_value:g}"
    if last in POSITIVE and low <= 0:
        return f"{name} holds values that are not positive"
    if last in NOT_NEGATIVE and low < 0:
        return f"{name} holds negative values"
    return None


def outliers(states: Sequence[State], factor: float, before: State) -> list[str | None]:
    """Return for every reply why it is too far from the others, or None where it is not.

    `states` are the shared states that every reply would give if it were merged alone, `before` is the state that the
    sites were sent. The distance of a reply is measured from the coordinatewise median of all. It may be at most
    `factor` times the median of these distances or, if that is larger, of the distances from `before`. The former
    alone would silence an honest site among others with almost the same data. With a factor of 0, or fewer than three
    replies, none is refused.
    """
    reasons: list[str | None] = [None] * len(states)
    if not factor or len(states) < 3 or not before:
        return reasons
    cut = (len(states) - 1) // 2
    from_middle, from_start = torch.zeros(2, len(states), dtype=torch.float64)  # squared distances
    for name in before:
        for *rows, start in zip(*(state[name].reshape(-1).split(CHUNK) for state in (*states, before)), strict=True):
            joined = torch.stack(rows)
            middle = joined.sort(0).values[cut : len(rows) - cut].double().mean(0)
            from_middle += (joined - middle).square().sum(1)
            from_start += (joined.double() - start).square().sum(1)
    distances, changes = from_middle.sqrt().tolist(), from_start.sqrt().tolist()
    limit = factor * max(median(distances), median(changes))
    reason = f"it would change the state more than {factor:g} times as far as others"
    return [reason if distance > limit else None for distance in distances]


def seconds_of(reply: Reply) -> dict[str, float]:
    """Return the parts of a site's time that are plausible numbers, by name."""
    given: dict[str, Any] = reply.seconds if isinstance(reply.seconds, dict) else {}
    found = {name: given[name] for name in SECONDS if name in given and is_number(given[name])}
    return {k: round(float(v), 3) for k, v in found.items() if math.isfinite(v) and 0 <= v <= 1e7}


def _listed(names: Sequence[object]) -> str:
    """Return at most three names of tensors."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{printable(name, 40)}'" for name in names[:3]) + more
