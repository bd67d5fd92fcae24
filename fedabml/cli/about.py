"""`fedabml algorithms` and `fedabml report`."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest
from ..files.user_code import is_user_code
from ..runs.config import names
from .console import print_line, table
from .options import command


@command(name=names("algorithm"))
def algorithms(name: str | None = None) -> None:
    """List the algorithms, or show one: its equations, and its hyperparameters with defaults and ranges.

    Set a hyperparameter with `--set ALGORITHM.NAME=VALUE`, or in the table `[ALGORITHM]` of a TOML file.

    Examples: `fedabml algorithms`, `fedabml algorithms fedabml`

    Flags:
        name (NAME): Show one algorithm in full.
    """
    from ..algorithms import REGISTRY

    if name is None:
        rows = [(word, _about(entry.kind).splitlines()[0], _variant(word)) for word, entry in REGISTRY.items()]
        table(("name", "what it is", "variant"), rows)
        print_line("fedabml algorithms NAME shows an algorithm's equations and hyperparameters.")
        return
    if name not in REGISTRY:
        if is_user_code(name):
            raise InputError(
                f"'{name}' is your own: this command shows the algorithms of fedabml. train, compare and tune take it, "
                f"as in fedabml train --algorithm {name}."
            )
        raise InputError(f"There is no algorithm '{name}'.{nearest(name, REGISTRY)}")
    kind, defaults = REGISTRY[name].kind, REGISTRY[name].defaults
    print_line(_about(kind))
    hyper = [
        (field.name, _word(defaults.get(field.name, field.default)), _range(field), field.metadata["doc"])
        for field in dataclasses.fields(kind)
    ]
    table(("hyperparameter", "default", "range", "meaning"), hyper, title=f"\nHyperparameters of {name}")
    print_line(f"Set one with --set {name}.{hyper[0][0]}={hyper[0][1]}")


def _about(kind: type) -> str:
    return (sys.modules[kind.__module__].__doc__ or kind.__doc__ or "").strip()


def _variant(name: str) -> str:
    """Return the hyperparameters that distinguish the algorithms of one class, with this algorithm's values."""
    from ..algorithms import REGISTRY, make

    algorithm = make(name)
    keys = {key for entry in REGISTRY.values() if entry.kind is type(algorithm) for key in entry.defaults}
    return ", ".join(f"{key}={getattr(algorithm, key)}" for key in sorted(keys))


def _word(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def _range(field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    if meta["choices"]:
        return " | ".join(meta["choices"])
    if str(field.type).startswith("bool"):
        return "true | false"
    low, high = meta["low"], meta["high"]
    if math.isinf(high):
        return "any number" if math.isinf(low) else f"≥ {low:g}"
    return f"{low:g} to {high:g}"


@command()
def report(folders: list[Path], *, out: Path | None = None, title: str | None = None, force: bool = False) -> None:
    """Write a report again, or put several runs on one page. The command trains nothing; the page needs no network.

    A folder holds a run, or the results of `fedabml compare` or `fedabml reproduce`. For `reproduce` the datasets must
    be present. The command refuses what is not finished.

    Examples:
    - `fedabml report runs/digits-few-fedabml-0 runs/digits-few-fedavg-ft-0 --out comparison.html`
    - `fedabml report runs/digits-few-comparison`

    Flags:
        folders (FOLDER): Folders of runs, which share a page, or of comparisons or reproductions.
        out: Page to write. [default: FOLDER/report.html; report.html for several runs]
        title: Title of the page.
    """
    from ..experiments.pages import rewrite

    for page in rewrite(folders, out, title, force):
        print_line(f"report   {page}")
