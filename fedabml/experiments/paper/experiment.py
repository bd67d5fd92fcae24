"""What an experiment is: the contract between the paper's experiments and `fedabml.experiments.paper.reproduce`.

An `Experiment` declares its cells and says what came of them. A `Request` says which version of it is wanted, a
`Context` where it runs, and `Callbacks` who follows it.
"""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from ...errors import InputError
from ...runs.config import RunConfig, Table
from ..cell import Cell, Result
from ..request import read
from .findings import Findings

PROTOCOLS = ("paper", "tuned")
SEEDS, TRIALS, QUICK_TRIALS = 5, 16, 2
TUNING_SEED = 100  # of searches; no seed of the test


@dataclass(frozen=True)
class Ask:
    """What is asked for. Nothing said means the experiment's own columns and algorithms, and the usual numbers."""

    experiment: str
    protocol: str = "paper"
    quick: bool = False
    columns: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: int | tuple[int, ...] | None = None  # so many, or these
    trials: int | None = None
    dtype: str = "float32"
    machine: Table = field(default_factory=dict)  # device, data_dir, ...: where it runs, not what comes of it
    chosen: tuple[str, ...] = ()  # files of settings that searches chose, each of a column: not searched again
    grid: tuple[str, ...] = ()  # what searches try, NAME=A,B,C each
    search_seed: int | None = None  # and with which seed

    @property
    def seed_list(self) -> Sequence[int]:
        """The seeds."""
        return self.seeds if isinstance(self.seeds, tuple) else range(self.seeds or SEEDS)

    def request(self) -> Table:
        """As JSON, for the folder."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "machine")
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in values}
        told |= {"seeds": told["seeds"] or SEEDS, "trials": self.budget, "run": self.machine}
        return {k: v for k, v in told.items() if v or k not in ("grid", "search_seed") or v == 0}

    @classmethod
    def read(cls, folder: Path) -> Ask:
        """What was asked for in a folder, to be done on whatever device is here."""
        saved = read(folder, "reproduce", ("experiment", "run"))
        try:
            machine = saved.pop("run") | {"device": "auto"}
            words: Table = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
            return cls(**words, machine=machine)
        except TypeError as error:
            raise InputError(f"'{folder / 'reproduce.json'}' is not a request of this version ({error}).") from error

    @property
    def searched_with(self) -> int:
        """The seed of searches."""
        return TUNING_SEED if self.search_seed is None else self.search_seed

    @property
    def budget(self) -> int:
        """Trials of every algorithm under `tuned`."""
        return self.trials or (QUICK_TRIALS if self.quick else TRIALS)

    def command(self, out: Path) -> str:
        """The shell command for it."""
        words = ["fedabml", "reproduce", self.experiment, "--protocol", self.protocol, *(["--quick"] * self.quick)]
        for name in ("columns", "algorithms"):
            words += [f"--{name}", ",".join(getattr(self, name))] if getattr(self, name) else []
        several = ",".join(map(str, self.seeds)) if isinstance(self.seeds, tuple) else str(self.seeds)
        words += ["--seeds", several if self.seeds != (self.seed_list[0],) else f"{several},"] if self.seeds else []
        words += ["--trials", str(self.budget)] if self.protocol == "tuned" else []
        words += [word for each in self.grid for word in ("--grid", each)]
        words += ["--search-seed", str(self.search_seed)] if self.search_seed is not None else []
        words += [word for file in self.chosen for word in ("--chosen", file)]
        words += ["--dtype", self.dtype] if self.dtype != "float32" else []
        return shlex.join([*words, "--out", str(out)])


@dataclass(frozen=True)
class Hear:
    """Who hears how it goes: of notes, of cells that begin, of their rounds, of those that are done.

    `search` gives the listeners of a search to come (`fedabml.experiments.tune`), as keywords.
    """

    note: Callable[[str], None] = lambda text: None
    start: Callable[[list[Cell], int], None] = lambda todo, finished: None
    round: Callable[[list[Cell], float], None] = lambda cells, round: None
    done: Callable[[Result], None] = lambda result: None
    search: Callable[[RunConfig], Table] = lambda config: {}


@dataclass
class Desk:
    """Where an experiment works: what it was asked, its folder, that of searches, and what is to be noted."""

    ask: Ask
    folder: Path
    tuning: Path
    hear: Hear = field(default_factory=Hear)
    finished: Sequence[str | os.PathLike[str]] = ()
    # What is run: all that is missing, a share of it, or nothing, be it that some may be missing or that none may.
    way: Literal["whole", "part", "so far", "as it is"] = "whole"
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Says it now, and again in the report."""
        if text not in self.notes:
            self.notes.append(text)
            self.hear.note(text)

    def config(self, **keys: Any) -> RunConfig:
        """A run on this machine."""
        return RunConfig.of({"dtype": self.ask.dtype} | self.ask.machine, keys)


class Done(NamedTuple):
    """A finished cell: what it was to be, and what came of it."""

    cell: Cell
    result: Result


class Experiment(ABC):
    """One experiment of the paper."""

    title: ClassVar[str]
    claim: ClassVar[str]  # the paper's, in a sentence or two
    columns: ClassVar[tuple[str, ...]] = ()
    algorithms: ClassVar[tuple[str, ...]] = ()
    partial: ClassVar[bool] = True  # whether something can be said of a part of its cells
    seeds: ClassVar[tuple[int, int]] = (SEEDS, 2)  # where it is not said how many: of the whole, and of the quick one

    @abstractmethod
    def cells(self, desk: Desk) -> list[Cell]:
        """The runs it takes."""

    def then(self, desk: Desk, done: Sequence[Done]) -> list[Cell]:
        """The runs that the first ones lead to."""
        return []

    @abstractmethod
    def findings(self, desk: Desk, done: Sequence[Done]) -> Findings:
        """What came of them."""
