"""How commands get their flags: from docstrings, from the keys of `RunConfig`, and their values from TOML files."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import InputError, nearest
from ..files.user_code import is_user_code
from ..runs import presets
from ..runs.config import RunConfig, command_line_name, names, parse_set, read_toml, without_commands

DATA, LEARNING, MACHINE = "Data and clients", "Learning", "Machine"

# The keys of a run that are flags, by panel and in the order of the help.
PANELS: dict[str, tuple[str, ...]] = {
    DATA: (
        *("dataset", "data", "client_column", "target_column", "drop_columns", "id_column", "date_columns", "split_by"),
        *("positive_class", "task", "target_transform", "positive_target", "test_share", "image_size", "partition"),
        "clients",
        *("classes_per_client", "distinct", "dirichlet_alpha", "partition_seed", "validation", "split", "drop_small"),
        "data_dir",
    ),
    LEARNING: (
        *("algorithm", "model", "pretrained", "train", "lora_rank", "rounds", "participation", "epochs", "batch_size"),
        *("lr", "noise", "learn_noise", "noise_by_input", "class_weights"),
        *("seed", "evaluate", "eval_every", "eval_clients", "eval_all", "specificity"),
    ),
    MACHINE: ("device", "dtype", "backend", "chunk", "compile"),
}
_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_METAVARS = {int: "N", float: "X", str: "TEXT"}

_FIELDS = {f.name: f for f in fields(RunConfig)}
_ALIASES = {"dtype": ("--precision",), "quiet": ("-q",)}  # further names of flags
_ALIKE = {"device", "data_dir", "seed"}  # keys of a run that mean the same for every command
_CODE = {"algorithm", "algorithms", "model"}  # flags that may name a user's own code
_FILE = "fedabml.runs.config"  # key of a command's context for the content of its TOML file
_ENTRY = re.compile(r"(\w+)(?: \((\S+)\))?: (.+)")


class _PlainSwitches:
    """Shows switches, such as --help, without a type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = " "
        return params


class Command(_PlainSwitches, TyperCommand):
    """Make commands whose help shows no type for switches."""


class Group(_PlainSwitches, TyperGroup):
    """The class of a group of commands."""


def _described(text: str) -> dict[str, dict[str, Any]]:
    """Return the keywords of `typer.Option` in entries such as `name (METAVAR): help [default: text]`, by name."""
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?! )", textwrap.dedent(text))]
    matches = [match.groups() for entry in entries if (match := _ENTRY.fullmatch(entry))]
    return {
        name: {"metavar": metavar, "help": help, "show_default": "[default: " not in help}  # which typer would repeat
        for name, metavar, help in matches
    }


def completion(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one of the words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


# Parameters that several commands have.
_COMMON = _described(f"""
algorithm (FILE.py:NAME): Your own algorithm, named again if the prior was trained with it, such as mine.py:FedDyn.
finished (FILE): A cells.jsonl of another folder or machine. The runs in it are not run again. Repeatable.
force: Replace existing files.
model (NAME): Your own network, named again if the prior was trained with it: mine.py:Net, or a Hugging Face folder
    (by default that of the run, if a run's folder is given).
preset (NAME): A predefined setting ({", ".join(presets.PRESET_NAMES)}). --config and flags override it.
quiet: Print errors only: no progress, no table.
set (NAME=VALUE): Set any key or hyperparameter, such as fedabml.lam=0.1. Repeatable.
""")


def panels_without(*excluded: str) -> dict[str, tuple[str, ...]]:
    """Return `PANELS` without some keys."""
    return {panel: tuple(key for key in keys if key not in excluded) for panel, keys in PANELS.items()}


def command(
    panels: Mapping[str, Sequence[str]] | None = None,
    also: Callable[..., None] | None = None,
    **completions: Sequence[str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, whose docstring describes its parameters in a last section such as

        Flags:
            seeds (N|A,B,C): How many seeds, or which. [default: 5]

    A parameter after `*` is a flag, one before it an argument. The word in parentheses stands for the value in the
    help; the default is shown if the parameter's own is None. `_COMMON` describes parameters that several commands
    have; one with an `Annotated` type, such as `Config`, describes itself. `completions` are words that complete a
    parameter's value. `panels` are keys of a run that become flags, too. A command that has them all, or nearly all,
    gets --config, --preset and --set with them. It reads them with `run_options`, or one by one from `ctx.params`.
    `also` is a function whose flags, with their descriptions, the command has after its own: it gets them as `**more`.
    """
    flags = {name: _run_flag(name, panel) for panel, keys in (panels or {}).items() for name in keys}
    if "model" in flags:
        flags |= {"config": Config, "preset": Preset, "set": Set}
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in flags.items()]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        text, _, section = (inspect.getdoc(function) or "").partition("\n\nFlags:\n")
        entries, parameters = _described(section), dict(inspect.signature(function, eval_str=True).parameters)
        if also is not None:
            parameters = {name: each for name, each in parameters.items() if each.kind is not Parameter.VAR_KEYWORD}
            parameters |= inspect.signature(also, eval_str=True).parameters
            entries = _described((inspect.getdoc(also) or "").partition("\n\nFlags:\n")[2]) | entries
        assert entries.keys() <= parameters.keys(), f"{function.__name__}: its docstring describes other parameters"

        def declared(parameter: Parameter) -> Parameter:
            name, kind = parameter.name, parameter.annotation
            if kind is typer.Context or get_origin(kind) is Annotated:
                return parameter
            more = dict((_COMMON | entries).get(name, {}))
            if name in completions:
                more["autocompletion"] = completion(completions[name])
            flag = parameter.kind is Parameter.KEYWORD_ONLY
            info = _flag(name, kind, parameter.default, **more) if flag else typer.Argument(**more)
            return parameter.replace(annotation=Annotated[kind, info])

        @functools.wraps(function)
        def wrapper(**values: Any) -> None:
            function(**{name: value for name, value in values.items() if name in parameters})

        every = [*map(declared, parameters.values()), *added]
        wrapper.__signature__ = inspect.Signature(every, return_annotation=None)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {option.name: option.annotation for option in every}
        wrapper.__doc__ = re.sub(r"\n(?=- )", "\n\n", text)  # paragraphs, for rich
        return wrapper

    return decorate


def _flag(name: str, kind: Any, default: Any, metavar: str | None = None, **more: Any) -> Any:
    """Return the flag of a parameter: --NAME, or for a switch what changes its default."""
    flag = name.replace("_", "-")
    if kind is bool and more.get("show_default") is True:
        more["show_default"] = False  # of a switch it says nothing
    word = f" /--no-{flag}" if kind is bool and default else f"--{flag}"
    if kind == bool | None:
        word += f"/--no-{flag}"
    return typer.Option(word, *_ALIASES.get(name, ()), metavar=metavar, **more)


def _run_flag(name: str, panel: str) -> Any:
    """Return the type of the flag of a key of `RunConfig`, with its meaning and default. Its own default is None."""
    key = _FIELDS[name]
    base, _, optional = str(key.type).partition(" | ")
    kind, help, choices, default = _TYPES[base], key.metadata["doc"], key.metadata["choices"], key.default
    more: dict[str, Any] = {"rich_help_panel": panel, "show_default": False, "metavar": _METAVARS.get(kind)}
    if kind is bool:
        help = f"do not {help}" if default else help
    elif default is not None:
        help += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    if choices:
        more |= {"metavar": "WORD", "autocompletion": completion(choices)}
    elif name in ("dataset", "algorithm", "model"):
        more |= {"metavar": "NAME", "autocompletion": completion(names(name))}
    return Annotated[kind | None, _flag(name, kind | None if optional else kind, default, help=help, **more)]


def run_flags(ctx: typer.Context) -> dict[str, Any]:
    """Return the keys of `RunConfig` that the command line has as flags; code that they name is imported."""
    flags = {name: value for name, value in ctx.params.items() if name in _FIELDS and value is not None}
    return flags | import_code(**{name: flags.get(name) for name in ("algorithm", "model")})


def import_code(algorithm: str | None = None, model: str | None = None) -> dict[str, str]:
    """Import an algorithm and a network that flags name, such as mine.py:Net; return the names that they then have."""
    from .. import algorithms, models

    names = {
        "algorithm": algorithm and algorithms.register_user_algorithm(algorithm),
        "model": model and models.register_user_network(model),
    }
    return {flag: name for flag, name in names.items() if name}


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read a command's values from a TOML file, as defaults under its flags.

    They are in the table with the command's name, such as [personalize], or at the top level. Top-level keys of
    `RunConfig` belong to the run, so a command reads only those that mean the same for it: the `epochs` of a round are
    not the epochs of personalising. Raises InputError if the file names a user's own code: only a flag may.
    """
    if path is None or ctx.resilient_parsing:
        return path
    content = read_toml(path)
    flags = {param.name: param for param in ctx.command.params if param.name != "config"}
    command = ctx.info_name or ""
    table = content.get(command, {}) if isinstance(content.get(command), Mapping) else {}
    for name in table:
        if name not in flags:
            raise InputError(
                f"'{path}': [{command}] has '{name}', which is no flag of {command}.{nearest(name, flags)}"
            )
    top = without_commands(content)
    keys = flags.keys() | _FIELDS.keys() - {"hyper"}
    for name in top:
        if command != "train" and name not in keys and name not in names("algorithm"):
            raise InputError(f"'{path}': neither '{command}' nor a run has a key '{name}'.{nearest(name, keys)}")
    alike = set() if "clients" in flags else _ALIKE  # a command with the flags of a run reads those keys itself
    shared = {name: v for name, v in top.items() if name in flags and (name not in _FIELDS or name in alike)}
    values = {name: _as_flag_text(path, flags[name], v) for name, v in {**shared, **table}.items()}
    for name in _CODE & values.keys():
        if is_user_code(str(values[name])):  # of a repeated flag a list
            raise InputError(
                f"'{path}' has {name} = '{values[name]}'. Code in your own file runs only if a flag of this command "
                f"names it: --{name} {values[name]}. Remove the key from the file."
            )
    ctx.default_map = values
    ctx.meta[_FILE] = {name: v for name, v in top.items() if name not in shared or name in _FIELDS}
    return path


def _as_flag_text(path: Path, param: Any, value: Any) -> Any:
    """Return a value as it would be typed after a flag, so that it is checked like one; a list is typed a,b,c."""
    if isinstance(value, Mapping):
        raise InputError(f"'{path}': '{param.name}' is a table, but {param.name} needs a value.")
    if isinstance(value, list):
        repeated = param.nargs == -1 or getattr(param, "multiple", False)
        return [str(item) for item in value] if repeated else ",".join(map(str, value))
    return str(value)


Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        help="TOML file with any of these keys, at its top level or in a table of this command. Flags override it.",
    ),
]
Preset = Annotated[str | None, typer.Option(**_COMMON["preset"], autocompletion=completion(presets.PRESET_NAMES))]
Set = Annotated[list[str] | None, typer.Option(**_COMMON["set"])]


def file_keys(ctx: typer.Context) -> dict[str, Any]:
    """Return the keys of a run in the command's TOML file."""
    return dict(ctx.meta.get(_FILE, {}))


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

    @property
    def model_flags(self) -> list[str]:
        """The flag that names a network in the user's own file, as a command that goes on needs it again."""
        model = command_line_name(str(self.key("model") or ""))
        return ["--model", model] if is_user_code(model) else []

    def folder(self, ending: str) -> Path:
        """Return the default folder of an experiment on these data: `runs/DATASET-ENDING`."""
        data = self.key("data")
        return Path("runs") / f"{Path(data).stem if data else self.key('dataset') or 'digits'}-{ending}"


def run_options(ctx: typer.Context) -> RunOptions:
    """Return the options of a run from a preset, a TOML file, flags and `--set`."""
    options = RunOptions([file_keys(ctx), run_flags(ctx)], parse_set(ctx.params.get("set") or []))
    preset = ctx.params.get("preset")
    if preset:
        options.layers.insert(0, presets.layer(preset, options.key("dataset")))
    return options
