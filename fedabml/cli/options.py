"""What the commands' flags share: help and defaults from `RunConfig`, completion of names, values from a TOML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import RunConfig, names, read_toml, without_commands
from ..errors import InputError, nearest

DATA, LEARNING, MACHINE = "Data and clients", "Learning", "Machine"

_FIELDS = {f.name: f for f in fields(RunConfig)}
_ALIKE = {"device", "data_dir", "seed"}  # keys of a run that mean the same to every command
_FILE = "fedabml.config"  # where a command's context keeps the content of its TOML file


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


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Takes a command's values from a TOML file, where no flag overrules them.

    They stand in the table with the command's name, such as [personalize], or at the top level. Top-level keys that
    belong to a run (`RunConfig`) are the run's, and a command takes those of the same meaning alone: the `epochs` of
    a round are not those of personalising.
    """
    if path is None or ctx.resilient_parsing:
        return path
    content = read_toml(path)
    own = {param.name for param in ctx.command.params if param.name} - {"config"}
    command = ctx.info_name or ""
    table = content.get(command, {}) if isinstance(content.get(command), Mapping) else {}
    for name in table:
        if name not in own:
            raise InputError(f"'{path}': [{command}] has '{name}', which {command} does not know.{nearest(name, own)}")
    top = without_commands(content)
    known = own | _FIELDS.keys() - {"hyper"}
    for name in top:
        if command != "train" and name not in known and name not in names("algorithm"):
            raise InputError(f"'{path}': neither '{command}' nor a run has a key '{name}'.{nearest(name, known)}")
    alike = set() if command in ("train", "inspect") else _ALIKE  # those two read a run's keys themselves
    mine = {name: v for name, v in top.items() if name in own and (name not in _FIELDS or name in alike)}
    ctx.default_map = {name: _spoken(path, name, value) for name, value in {**mine, **table}.items()}
    ctx.meta[_FILE] = {name: v for name, v in top.items() if name not in mine or name in _FIELDS}
    return path


def _spoken(path: Path, name: str, value: Any) -> Any:
    """A value as it would be typed, so that it is checked like a flag's."""
    if isinstance(value, Mapping):
        raise InputError(f"'{path}': '{name}' is a table; a value is needed.")
    return [str(each) for each in value] if isinstance(value, list) else str(value)


Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        help="TOML file with any of these keys, at its top or in a table named like the command; flags overrule it.",
    ),
]


def run_keys(ctx: typer.Context) -> dict[str, Any]:
    """The keys of a run in the command's TOML file."""
    found: dict[str, Any] = ctx.meta.get(_FILE, {})
    return found
