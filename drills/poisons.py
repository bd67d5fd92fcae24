"""The poisoned replies that tests try in one process and `drills.poison` between real processes.

`POISONS` maps the name of a poison to what it changes in a reply of FedABML, and to words of the reason for which the
coordinator must reject it; `SCAFFOLD_POISONS` are two of SCAFFOLD's. A change takes the honest reply and returns the
fields that replace its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedabml.federation.messages import Reply

Change = Callable[[Reply], dict[str, Any]]
PLAN, SENT = "poison-plan.json", "poison-sent.jsonl"  # files of a hostile worker, see drills.poisoned_worker
HONEST = "honest"  # a reply of the plan that is not poisoned


def tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Return a change of the reply's update."""
    return lambda reply: {"tensors": change(dict(reply.tensors))}


def filled(name: str, value: float) -> Change:
    """Return a change that fills one tensor with a value."""
    return tensors(lambda update: update | {name: torch.full_like(update[name], value)})


def one_value(name: str, value: float) -> Change:
    """Return a change of one number of a tensor."""

    def change(update: dict[str, Any]) -> dict[str, Any]:
        update[name] = update[name].clone()
        update[name][3] = value
        return update

    return tensors(change)


POISONS: dict[str, tuple[Change, str]] = {
    "NaN": (one_value("mean", torch.nan), "not finite"),
    "Inf": (one_value("mean", torch.inf), "not finite"),
    "-Inf in a log-deviation": (one_value("logstd", -torch.inf), "not finite"),
    "1e30": (one_value("mean", 1e30), "beyond"),
    "-1e30": (one_value("mean", -1e30), "beyond"),
    "longer": (tensors(lambda u: u | {"mean": torch.cat([u["mean"], u["mean"][:1]])}), "shape"),
    "another shape": (tensors(lambda u: u | {"mean": u["mean"].unsqueeze(0)}), "shape"),
    "broadcast": (tensors(lambda u: u | {"mean": u["mean"][:1]}), "shape"),
    "a single number": (tensors(lambda u: u | {"mean": u["mean"][0]}), "shape"),
    "missing": (tensors(lambda u: {"mean": u["mean"]}), "lacks 'logstd'"),
    "extra": (tensors(lambda u: u | {"more": u["mean"]}), "has 'more'"),
    "extra with control characters": (tensors(lambda u: u | {"\x1b[31mred": u["mean"]}), "has '?[31mred'"),
    "empty": (tensors(lambda u: {}), "lacks"),
    "float64": (tensors(lambda u: u | {"mean": u["mean"].double()}), "type"),
    "int64": (tensors(lambda u: u | {"mean": u["mean"].long()}), "type"),
    "no tensor": (tensors(lambda u: u | {"mean": [1.0] * len(u["mean"])}), "no array"),
    "log-deviation 80": (filled("logstd", 80.0), "log-deviation"),
    "log-deviation -80": (filled("logstd", -80.0), "log-deviation"),
    "no samples": (lambda r: {"samples": 0}, "samples"),
    "negative samples": (lambda r: {"samples": -5}, "samples"),
    "very many samples": (lambda r: {"samples": 10**12}, "samples"),
    "samples beyond 64 bits": (lambda r: {"samples": 10**40}, "samples"),
    "half a sample": (lambda r: {"samples": 2.5}, "samples"),
    "samples as text": (lambda r: {"samples": "9"}, "samples"),
    "loss NaN": (lambda r: {"loss": float("nan")}, "loss"),
    "loss Inf": (lambda r: {"loss": float("inf")}, "loss"),
    "loss 1e308": (lambda r: {"loss": 1e308}, "loss"),
    "loss None": (lambda r: {"loss": None}, "loss"),
    "another federation": (lambda r: {"federation": "f" * 32}, "federation"),
    "another card": (lambda r: {"card": "f" * 64}, "card"),
    "another kind": (lambda r: {"kind": "prior"}, "kind"),
    "another round": (lambda r: {"round": r.round + 1}, "late"),
    "another attempt": (lambda r: {"attempt": 7}, "late"),
    "its own refusal": (lambda r: {"error": "no\x1b[2J\nway\u202e" + "x" * 9000}, "refused: no?[2J way?xxx"),
}
SCAFFOLD_POISONS: dict[str, tuple[Change, str]] = {
    "NaN everywhere": (
        tensors(lambda u: {name: torch.full_like(value, torch.nan) for name, value in u.items()}),
        "not finite",
    ),
    "share 0": (filled("share", 0.0), "not positive"),
}


def read_sent(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a hostile worker has written about its poisoned replies."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
