"""What an experiment is: the contract between the paper's experiments and `fedabml.experiments.paper.reproduce`.

An `Experiment` declares its cells and turns the finished ones into findings. A `Request` says which version of it is
wanted, and a `Context` where it runs and who follows it.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from ...errors import InputError
from ...report.charts import Series
from ...runs.config import JsonDict, RunConfig
from ...runs.request import command, flags
from ..cell import Cell, Result
from ..compare import seeds_flag
from ..request import read
from ..runner import SILENT, Callbacks
from . import numbers
from .findings import Findings, Mean, band, grouped

PROTOCOLS = ("paper", "tuned")
SEEDS, TRIALS, QUICK_TRIALS = 5, 16, 2
TUNING_SEED = 100  # of searches; no seed of the test


@dataclass(frozen=True)
class Request:
    """Which version of an experiment is wanted; what is left out is the experiment's own choice."""

    experiment: str
    protocol: str = "paper"
    quick: bool = False
    columns: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: int | tuple[int, ...] | None = None  # how many, or which
    trials: int | None = None
    dtype: str = "float32"
    machine: JsonDict = field(default_factory=dict)  # device, data_dir, compile: keys that change no result
    chosen: tuple[str, ...] = ()  # files of settings that searches chose, one for each column
    grid: tuple[str, ...] = ()  # what searches try, NAME=A,B,C each
    search_seed: int | None = None

    @property
    def seed_list(self) -> Sequence[int]:
        """The seeds of the test."""
        return self.seeds if isinstance(self.seeds, tuple) else range(self.seeds or SEEDS)

    @property
    def first_search_seed(self) -> int:
        """The seed of the searches; the next one confirms their winners."""
        return TUNING_SEED if self.search_seed is None else self.search_seed

    @property
    def budget(self) -> int:
        """The trials of every algorithm under the protocol `tuned`."""
        return self.trials or (QUICK_TRIALS if self.quick else TRIALS)

    def to_dict(self) -> JsonDict:
        """Return the request as reproduce.json keeps it."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "machine")
        content = {name: list(value) if isinstance(value, tuple) else value for name, value in values}
        content |= {"seeds": content["seeds"] or SEEDS, "trials": self.budget, "run": self.machine}
        return {k: v for k, v in content.items() if v or k not in ("grid", "search_seed") or v == 0}

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Return the request that a folder was made for, to be run on any device of this machine."""
        saved = read(folder, "reproduce", ("experiment", "run"))
        try:
            machine = saved.pop("run") | {"device": "auto"}
            content: JsonDict = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
            return cls(**content, machine=machine)
        except TypeError as error:
            raise InputError(f"'{folder / 'reproduce.json'}' is not a request of this version ({error}).") from error

    def command(self, out: Path) -> str:
        """Return the shell command of this request."""
        options = {
            "protocol": self.protocol,
            "quick": self.quick or None,
            "columns": ",".join(self.columns) or None,
            "algorithms": ",".join(self.algorithms) or None,
            "seeds": seeds_flag(self.seed_list) if self.seeds else None,
            "trials": self.budget if self.protocol == "tuned" else None,
            "grid": self.grid,
            "search_seed": self.search_seed,
            "chosen": self.chosen,
            "dtype": None if self.dtype == "float32" else self.dtype,
        }
        return command("reproduce", [self.experiment, *flags(options)], out)


@dataclass
class Context:
    """Where an experiment works: its request, its folder, the folder of searches, and the notes so far.

    `mode` says which cells are run: `run` all that are missing, `share` a part of them (`run_part`), `partial` and
    `finished` none, where some may be missing or none may.
    """

    request: Request
    folder: Path
    tuning: Path
    callbacks: Callbacks = SILENT
    finished: Sequence[str | os.PathLike[str]] = ()
    mode: Literal["run", "share", "partial", "finished"] = "run"
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Report a note now, and once more on the page."""
        if text not in self.notes:
            self.notes.append(text)
            self.callbacks.note(text)

    def config(self, **keys: Any) -> RunConfig:
        """Return the configuration of a run on this machine."""
        return RunConfig.of({"dtype": self.request.dtype} | self.request.machine, keys)

    def seeded(self, label: str, config: RunConfig, **options: Any) -> list[Cell]:
        """Return the cells of a configuration, one for every seed of the request."""
        return [Cell(label, config.with_changes(seed=seed), **options) for seed in self.request.seed_list]

    def name(self, algorithm: str) -> str:
        """Return the name of an algorithm in tables, under the request's protocol."""
        return numbers.name(algorithm, self.request.protocol)

    def named(self, record: JsonDict) -> str:
        """Return the name of the algorithm of a record."""
        return self.name(record["algorithm"])


class Done(NamedTuple):
    """A finished cell and its result."""

    cell: Cell
    result: Result


class Experiment(ABC):
    """An experiment of the paper."""

    title: ClassVar[str]
    claim: ClassVar[str]  # the paper's, in a sentence or two
    columns: ClassVar[tuple[str, ...]] = ()
    algorithms: ClassVar[tuple[str, ...]] = ()
    partial: ClassVar[bool] = True  # whether some of its cells alone allow findings
    seeds: ClassVar[tuple[int, int]] = (SEEDS, 2)  # the default number: of the whole experiment, of the quick one

    @abstractmethod
    def cells(self, context: Context) -> list[Cell]:
        """Return the cells to run."""

    def then(self, context: Context, finished: Sequence[Done]) -> list[Cell]:
        """Return the further cells that the results of the first ones lead to."""
        return []

    @abstractmethod
    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        """Return what the finished cells show."""


def by_label(finished: Sequence[Done]) -> dict[str, list[Done]]:
    """Group finished cells, which are those of all seeds, by their labels."""
    return grouped(finished, lambda d: d.cell.label)


def by_column(finished: Sequence[Done]) -> dict[str, dict[str, list[Done]]]:
    """Group finished cells by column and then by algorithm, the first two words of their labels."""
    columns = grouped(finished, lambda d: d.cell.label.split()[0])
    return {column: grouped(cells, lambda d: d.cell.label.split()[1]) for column, cells in columns.items()}


def scored(cells: Sequence[Done], key: str, factor: float = 1.0) -> Mean:
    """Return the mean over seeds of a measure of the cells' (first) scores."""
    return Mean({d.result.seed: factor * d.result.scores[0].summary[key] for d in cells})


def over_rounds(name: str, cells: Sequence[Done], key: str) -> Series:
    """Return what was noted after the rounds of the cells' curves as a series: the mean over seeds, with its band."""
    rounds = [line["round"] for line in cells[0].result.curve]
    curves = {d.result.seed: d.result.curve for d in cells if len(d.result.curve) == len(rounds)}
    means = [Mean({n: line[i].get(key, math.nan) for n, line in curves.items()}) for i in range(len(rounds))]
    return band(name, rounds, means)
