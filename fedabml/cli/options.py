"""Flags that several commands share: help and defaults from `RunConfig`, completion, values from TOML files."""

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

# The keys of a run that are flags, by panel and in the order of the help.
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
_ALSO = {"dtype": ("--precision",)}  # further names of flags
_ALIKE = {"device", "data_dir", "seed"}  # keys of a run that mean the same for every command
_FILE = "fedabml.runs.config"  # key of a command's context for the content of its TOML file


def completion(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one of the words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def option(name: str, panel: str) -> Any:
    """Return the flag of a key of `RunConfig`, with the key's meaning and default. A flag that is not given is None."""
    known = _FIELDS[name]
    flag, kind, choices, default = name.replace("_", "-"), str(known.type), known.metadata["choices"], known.default
    words: dict[str, Any] = {"help": known.metadata["doc"], "rich_help_panel": panel, "show_default": False}
    if kind == "bool":
        words["help"] = f"do not {words['help']}" if default else words["help"]
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
    """Give a command a flag for every key of a run except the excluded ones; the command reads them by `run_options`.

    The command has `ctx: typer.Context`, and `Config`, `Preset` and `Set` if it accepts them.
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
    """Return the keys of `RunConfig` that were given as flags."""
    return {name: value for name, value in ctx.params.items() if name in _FIELDS and value is not None}


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read a command's values from a TOML file, as defaults under its flags.

    They are in the table with the command's name, such as [personalize], or at the top level. Top-level keys of
    `RunConfig` belong to the run, so a command reads only those that mean the same for it: the `epochs` of a round are
    not the epochs of personalising.
    """
    if path is None or ctx.resilient_parsing:
        return path
    content = read_toml(path)
    own = {param.name for param in ctx.command.params if param.name} - {"config"}
    command = ctx.info_name or ""
    table = content.get(command, {}) if isinstance(content.get(command), Mapping) else {}
    for name in table:
        if name not in own:
            raise InputError(f"'{path}': [{command}] has '{name}', which is no flag of {command}.{nearest(name, own)}")
    top = without_commands(content)
    known = own | _FIELDS.keys() - {"hyper"}
    for name in top:
        if command != "train" and name not in known and name not in names("algorithm"):
            raise InputError(f"'{path}': neither '{command}' nor a run has a key '{name}'.{nearest(name, known)}")
    alike = set() if "clients" in own else _ALIKE  # a command with the flags of a run reads those keys itself
    mine = {name: v for name, v in top.items() if name in own and (name not in _FIELDS or name in alike)}
    several = {param.name for param in ctx.command.params if param.nargs == -1 or getattr(param, "multiple", False)}
    ctx.default_map = {name: _as_typed(path, name, v, name in several) for name, v in {**mine, **table}.items()}
    ctx.meta[_FILE] = {name: v for name, v in top.items() if name not in mine or name in _FIELDS}
    return path


def _as_typed(path: Path, name: str, value: Any, several: bool) -> Any:
    """Return a value as it would be typed after a flag, so that it is checked like one; a list is typed a,b,c."""
    if isinstance(value, Mapping):
        raise InputError(f"'{path}': '{name}' is a table, but {name} needs a value.")
    if isinstance(value, list):
        return [str(each) for each in value] if several else ",".join(map(str, value))
    return str(value)


Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        help="TOML file with any of these keys, at its top level or in a table of this command. Flags override it.",
    ),
]

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"A predefined setting ({', '.join(presets.NAMES)}). --config and flags override it.",
        autocompletion=completion(presets.NAMES),
    ),
]
Finished = Annotated[
    list[Path] | None,
    typer.Option(
        "--finished",
        metavar="FILE",
        help="A cells.jsonl of another folder or machine. The runs in it are not run again. Repeatable.",
    ),
]
Force = Annotated[bool, typer.Option("--force", metavar=" ", help="Replace existing files.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar=" ", help="Print errors only: no progress, no table.")]
Set = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Set any key or hyperparameter, such as fedabml.lam=0.1. Repeatable."),
]


def run_keys(ctx: typer.Context) -> dict[str, Any]:
    """Return the keys of a run in the command's TOML file."""
    found: dict[str, Any] = ctx.meta.get(_FILE, {})
    return found


class RunOptions(NamedTuple):
    """The options of a run: layers of keys, each overriding the one before, and at last those of `--set`."""

    layers: list[dict[str, Any]]
    overrides: dict[str, Any]

    def config(self) -> RunConfig:
        """Return the configuration that the options make."""
        return RunConfig.of(*self.layers, overrides=self.overrides)

    def key(self, name: str) -> Any:
        """Return the value of a key in the last layer that has it; None if no layer has it."""
        return next((layer[name] for layer in (self.overrides, *reversed(self.layers)) if name in layer), None)

    def folder(self, ending: str) -> Path:
        """Return the default folder of an experiment on these data: `runs/DATASET-ENDING`."""
        data = self.key("data")
        return Path("runs") / f"{Path(data).stem if data else self.key('dataset') or 'digits'}-{ending}"


def run_options(ctx: typer.Context) -> RunOptions:
    """Return the options of a run from a preset, a TOML file, flags and `--set`."""
    options = RunOptions([run_keys(ctx), given(ctx)], parse_set(ctx.params.get("set") or []))
    preset = ctx.params.get("preset")
    if preset:
        options.layers.insert(0, presets.layer(preset, options.key("dataset")))
    return options
