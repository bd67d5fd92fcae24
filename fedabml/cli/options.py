"""What the commands' flags share: help and defaults from `RunConfig`, completion of names, values from a TOML file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..errors import InputError, nearest
from ..runs import presets
from ..runs.config import RunConfig, names, parse_set, read_toml, without_commands

DATA, LEARNING, MACHINE = "Data and clients", "Learning", "Machine"

# The keys of a run that are flags, in the panels and the order of the help.
PANELS = {
    DATA: (
        *("dataset", "data", "client_column", "target_column", "task", "test_share", "partition", "clients"),
        *("classes_per_client", "distinct", "dirichlet_alpha", "partition_seed", "validation", "drop_small"),
        "data_dir",
    ),
    LEARNING: (
        *("algorithm", "model", "pretrained", "rounds", "participation", "epochs", "batch_size", "lr", "noise"),
        *("learn_noise", "seed", "evaluate", "eval_every", "eval_clients", "eval_all"),
    ),
    MACHINE: ("device", "dtype", "backend", "chunk", "compile"),
}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str}

_FIELDS = {f.name: f for f in fields(RunConfig)}
_ALSO = {"dtype": ("--precision",)}  # other names of flags
_ALIKE = {"device", "data_dir", "seed"}  # keys of a run that mean the same to every command
_FILE = "fedabml.runs.config"  # where a command's context keeps the content of its TOML file


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
    if kind == "bool | None":
        return typer.Option(f"--{flag}/--no-{flag}", metavar=" ", **words)
    if default is not None:
        words["help"] += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    if choices:
        words |= {"metavar": "WORD", "autocompletion": completion(choices)}
    elif name in ("dataset", "algorithm", "model"):
        words |= {"metavar": "NAME", "autocompletion": completion(names(name))}
    else:
        words["metavar"] = {"int": "N", "float": "X"}.get(kind.removesuffix(" | None"), "TEXT")
    return typer.Option(f"--{flag}", *_ALSO.get(name, ()), **words)


def run_flags(*exclude: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for every key of a run but those excluded; it hears of them with `told`, not one by one.

    The command has `ctx: typer.Context`, and `Config`, `Preset` and `Set` where it takes them.
    """
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_TYPES[str(_FIELDS[name].type).removesuffix(" | None")] | None, option(name, panel)],
        )
        for panel, keys in PANELS.items()
        for name in keys
        if name not in exclude
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def face(**words: Any) -> None:
            command(**{name: value for name, value in words.items() if name in own})

        parameters = [*own.values(), *flags]
        face.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        face.__annotations__ = {each.name: each.annotation for each in parameters}
        return face

    return decorate


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
    alike = set() if "clients" in own else _ALIKE  # a command with a run's flags reads a run's keys itself
    mine = {name: v for name, v in top.items() if name in own and (name not in _FIELDS or name in alike)}
    several = {param.name for param in ctx.command.params if param.nargs == -1 or getattr(param, "multiple", False)}
    ctx.default_map = {name: _spoken(path, name, v, name in several) for name, v in {**mine, **table}.items()}
    ctx.meta[_FILE] = {name: v for name, v in top.items() if name not in mine or name in _FIELDS}
    return path


def _spoken(path: Path, name: str, value: Any, several: bool) -> Any:
    """A value as it would be typed, so that it is checked like a flag's; a list for a single flag is typed a,b,c."""
    if isinstance(value, Mapping):
        raise InputError(f"'{path}': '{name}' is a table; a value is needed.")
    if isinstance(value, list):
        return [str(each) for each in value] if several else ",".join(map(str, value))
    return str(value)


Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        help="TOML file with any of these keys, at its top or in a table named like the command; flags overrule it.",
    ),
]

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"A ready setting by name ({', '.join(presets.NAMES)}), under --config and flags.",
        autocompletion=completion(presets.NAMES),
    ),
]
Finished = Annotated[
    list[Path] | None,
    typer.Option(
        "--finished",
        metavar="FILE",
        help="A cells.jsonl of another folder or machine: what it has is not run again. Repeatable.",
    ),
]
Force = Annotated[bool, typer.Option("--force", metavar=" ", help="Replace a file that exists already.")]
Set = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Any key or hyperparameter, as fedabml.lam=0.1. Repeatable."),
]


def run_keys(ctx: typer.Context) -> dict[str, Any]:
    """The keys of a run in the command's TOML file."""
    found: dict[str, Any] = ctx.meta.get(_FILE, {})
    return found


class Told(NamedTuple):
    """What a command was told of a run: layers of keys, each overruling the former, and at last `--set`."""

    layers: list[dict[str, Any]]
    sets: dict[str, Any]

    def config(self) -> RunConfig:
        """The run that this makes."""
        return RunConfig.of(*self.layers, overrides=self.sets)

    def key(self, name: str) -> Any:
        """A key of the run as it was told last; None if it was not."""
        return next((layer[name] for layer in (self.sets, *reversed(self.layers)) if name in layer), None)


def told(ctx: typer.Context) -> Told:
    """What the command was told by a preset, a TOML file, flags and `--set`."""
    asked = Told([run_keys(ctx), given(ctx)], parse_set(ctx.params.get("set") or []))
    preset = ctx.params.get("preset")
    if preset:
        asked.layers.insert(0, presets.layer(preset, asked.key("dataset")))
    return asked
