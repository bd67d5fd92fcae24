"""What the commands' flags share: help and defaults from `RunConfig`, completion of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import typer

from ..config import RunConfig, names

DATA, LEARNING, MACHINE = "Data and clients", "Learning", "Machine"

_FIELDS = {f.name: f for f in fields(RunConfig)}


def completion(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes one of some words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def option(name: str, panel: str) -> Any:
    """The flag of a key of `RunConfig`: its meaning and default are the key's. Not given, it is None."""
    known = _FIELDS[name]
    flag, kind, choices, default = name.replace("_", "-"), str(known.type), known.metadata["choices"], known.default
    words: dict[str, Any] = {"help": known.metadata["doc"], "rich_help_panel": panel, "show_default": False}
    if kind == "bool":
        words["help"] = f"turn off: {words['help']}" if default else words["help"]
        return typer.Option(f" /--no-{flag}" if default else f"--{flag}", metavar=" ", **words)
    if default is not None:
        words["help"] += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    if choices:
        words |= {"metavar": "WORD", "autocompletion": completion(choices)}
    elif name in ("dataset", "algorithm", "model"):
        words |= {"metavar": "NAME", "autocompletion": completion(names(name))}
    else:
        words["metavar"] = {"int": "N", "float": "X"}.get(kind.removesuffix(" | None"), "TEXT")
    return typer.Option(f"--{flag}", **words)


def given(ctx: typer.Context) -> dict[str, Any]:
    """The keys of `RunConfig` that were given as flags."""
    return {name: value for name, value in ctx.params.items() if name in _FIELDS and value is not None}
