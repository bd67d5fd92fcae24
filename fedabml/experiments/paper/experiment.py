"""An experiment declares its cells and says what came of them; `reproduce` runs the cells and publishes the rest.

The folder gets reproduce.json (what was asked for), cells.jsonl (a line per finished cell), table.md, table.csv,
figures/*.svg and report.html. A finished cell is never run again: the same command goes on where it was stopped, and on
a finished folder only draws everything anew. More seeds, columns or algorithms may be asked for in the same folder; any
other change needs another one, so cells of different configurations do not mix. `run_part` runs a share of the cells
into a file of its own, cells-2-of-4.jsonl: processes or machines may work in one folder side by side.
"""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from ...engine.processes import refuse
from ...errors import InputError
from ...files.sealed import folder_lock
from ...runs.config import RunConfig, Table
from ..compare import whole_seeds
from ..ledger import Cell, Ledger, Result, Unfinished, execute
from ..request import claim, read
from ..runner import groups
from .columns import TUNING_SEED, check, check_grid, keep, settings
from .findings import Findings, publish
from .findings import page as drawn

PROTOCOLS = ("paper", "tuned")
SEEDS, TRIALS, QUICK_TRIALS = 5, 16, 2
QUICK = "A quick version, much smaller than the paper's experiment: it shows that things work, not how good they are."
FREE = ("columns", "algorithms", "seeds", "chosen")  # what a folder may be asked for anew


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


def run(
    experiment: Experiment,
    ask: Ask,
    out: str | os.PathLike[str],
    *,
    tuning: str | os.PathLike[str] | None = None,
    finished: Sequence[str | os.PathLike[str]] = (),
    hear: Hear | None = None,
    so_far: bool = False,
) -> Findings:
    """Runs what an experiment lacks in its folder, writes what was found, and returns it. With `so_far` nothing is run.

    `tuning` is the folder of searches under `tuned` (by default a folder `tune` in `out`): experiments may share it.
    `finished` are cells.jsonl of other folders or machines, whose cells are not run again.
    """
    with nullcontext() if so_far else folder_lock(out):
        desk = _desk(experiment, ask, out, tuning, finished, hear, "so far" if so_far else "whole")
        ask = desk.ask
        if not ask.chosen and ask.protocol == "tuned":  # those of an earlier call are used, so they are said
            ask = replace(ask, chosen=tuple(map(str, sorted(desk.tuning.glob("*.toml")))))
        found, facts = _found(experiment, desk)
        told = [word for file in finished for word in ("--finished", str(file))] + ["--so-far"]
        publish(found, desk.folder, ask.command(desk.folder) + f" {shlex.join(told)}" * so_far, facts)
        return found


def run_part(
    experiment: Experiment,
    ask: Ask,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    *,
    tuning: str | os.PathLike[str] | None = None,
    finished: Sequence[str | os.PathLike[str]] = (),
    hear: Hear | None = None,
) -> None:
    """Runs the i-th of n shares of an experiment's first cells, where `part` is (i, n); `run` then has them.

    Cells that may run together stay in one share, as far as that is possible. What the first cells lead to
    (`Experiment.then`), searches, tables and figures are left to `run`.
    """
    number, parts = part
    if not 1 <= number <= parts:
        raise InputError(f"There is no part {number} of {parts}.")
    with folder_lock(out, shared=True):  # other parts may be at work beside this one, but not `run`
        desk = _desk(experiment, ask, out, tuning, finished, hear, "part")
        own = desk.folder / f"cells-{number}-of-{parts}.jsonl"
        others = [file for file in (desk.folder / "cells.jsonl", *_parts(desk.folder)) if file.exists() and file != own]
        once = {cell.identity: cell for cell in experiment.cells(desk)}
        cells = [cell for group in groups(list(once.values())) for cell in group]
        share = slice(len(cells) * (number - 1) // parts, len(cells) * number // parts)
        _executed(cells[share], Ledger(own, [*desk.finished, *others]), desk.hear)


def _parts(folder: Path) -> list[Path]:
    """The files of `run_part`."""
    return sorted(folder.glob("cells-*-of-*.jsonl"))


def _desk(
    experiment: Experiment,
    ask: Ask,
    out: str | os.PathLike[str],
    tuning: str | os.PathLike[str] | None,
    finished: Sequence[str | os.PathLike[str]],
    hear: Hear | None,
    way: Literal["whole", "part", "so far"],
) -> Desk:
    """Where an experiment is to work, if what is asked can be done there."""
    refuse("A reproduction")
    folder = Path(out)
    begun = (folder / "reproduce.json").exists()
    if way == "so far" and not begun and not finished:
        raise Unfinished(f"Nothing of '{ask.experiment}' was begun in '{folder}': there is nothing to draw.")
    ask = replace(ask, seeds=ask.seeds or experiment.seeds[ask.quick])
    check(ask.columns, ask.algorithms)
    for word, said in (("chosen", ask.chosen), ("grid", ask.grid), ("search-seed", ask.search_seed is not None)):
        if said and (ask.protocol != "tuned" or not experiment.columns):
            raise InputError(
                f"--{word} is for experiments on datasets with --protocol tuned, where methods are searched."
            )
    whole_seeds(ask.seed_list)
    searched = {ask.searched_with, ask.searched_with + 1}  # the second one confirms the search's winner
    if ask.protocol == "tuned" and experiment.columns and (both := searched & {*ask.seed_list}):
        raise InputError(f"Seed {min(both)} is of the test and of the search: give another --search-seed.")
    for word in ("columns", "algorithms"):
        if getattr(ask, word) and not getattr(experiment, word):
            raise InputError(f"'{ask.experiment}' has no {word} to choose from; leave --{word} out.")
    check_grid(ask.grid, ask.algorithms or experiment.algorithms)
    chosen = settings(ask.chosen)
    again = f"{read(folder, 'reproduce', ('experiment',))['experiment'] if begun else ask.experiment} … "
    claim(folder, "reproduce", ask.request(), begun, FREE, again, look=way == "so far")
    desk = Desk(ask, folder, Path(tuning) if tuning else folder / "tune", hear or Hear(), finished, way)
    keep(chosen, desk.tuning)
    return desk


def page(experiment: Experiment, ask: Ask, folder: Path, title: str | None = None) -> str:
    """The page of a finished folder, drawn anew: nothing is run, though the data must be here."""
    tuning = next((at for at in (folder / "tune", folder.parent / "tune") if at.is_dir()), None)
    if ask.protocol == "tuned" and tuning is None:
        raise InputError(f"The searches of the reproduction in '{folder}' are gone: '{folder / 'tune'}' is missing.")
    try:
        found, facts = _found(experiment, Desk(ask, folder, tuning or folder / "tune", way="as it is"))
    except Unfinished as error:
        raise InputError(
            f"The reproduction in '{folder}' is not finished: runs are missing, or of other defaults. Go on with it: "
            f"{ask.command(folder)}"
        ) from error
    return drawn(replace(found, title=title or found.title), ask.command(folder), facts)


def _found(experiment: Experiment, desk: Desk) -> tuple[Findings, dict[str, list[str]]]:
    """What came of all the cells, which are run where they are not finished; and with what they were made."""
    ask, parts = desk.ask, _parts(desk.folder)
    ledger = Ledger(desk.folder / "cells.jsonl", [*desk.finished, *parts], closed=desk.way in ("so far", "as it is"))

    def have(cells: Sequence[Cell]) -> list[Done]:
        return _seen(experiment, cells, ledger, desk) if desk.way == "so far" else _executed(cells, ledger, desk.hear)

    done = have(experiment.cells(desk))
    done += have(experiment.then(desk, done))
    if desk.way == "so far" and not done:
        raise Unfinished(f"Nothing of '{ask.experiment}' is finished in '{desk.folder}': there is nothing to draw.")
    facts = _facts(done)
    if len(facts["cells of fedabml"]) > 1:
        desk.note(
            f"The cells were made by versions {', '.join(facts['cells of fedabml'])} of fedabml: their numbers may "
            "not compare. To have all of the present one, give another folder with --out."
        )
    lost = [each for each in done if each.result.error]
    for cell, result in lost:
        desk.note(f"{cell.label}, seed {result.seed}, has no numbers: {result.error}")
    found = experiment.findings(desk, [each for each in done if not each.result.error])
    title = found.title + (f", protocol {ask.protocol}" if experiment.columns else "") + " (quick)" * ask.quick
    return replace(found, title=title, said=[*([QUICK] if ask.quick else []), *found.said]), facts


def _executed(cells: Sequence[Cell], ledger: Ledger, hear: Hear) -> list[Done]:
    """All of the cells, finished; one that stands in several places is run once."""
    once = {cell.identity: cell for cell in cells}
    todo = [cell for cell in once.values() if cell not in ledger]
    if cells:
        hear.start(todo, len(once) - len(todo))
    for _ in execute(cells, ledger, on_round=hear.round, on_done=hear.done):
        pass
    return [Done(cell, ledger[cell]) for cell in cells]


def _seen(experiment: Experiment, cells: Sequence[Cell], ledger: Ledger, desk: Desk) -> list[Done]:
    """Those of the cells that are finished, with all their seeds: a mean over fewer would not compare."""
    of = Counter(cell.label for cell in cells)
    missing = Counter(cell.label for cell in cells if cell not in ledger)
    if missing and not experiment.partial:
        raise Unfinished(
            f"'{desk.ask.experiment}' is drawn as a whole, and {missing.total()} of its {len(cells)} runs are missing."
        )
    if missing:
        had = {label: of[label] - n for label, n in missing.items()}
        words = ", ".join(f"{label} ({n} of {of[label]})" if n else label for label, n in had.items())
        desk.note(f"Not finished: {words}.")
    return [Done(cell, ledger[cell]) for cell in cells if cell.label not in missing]


def _facts(done: Sequence[Done]) -> dict[str, list[str]]:
    """With what and on what the cells were made, each said once."""
    told = [each.result.facts for each in done]
    return {
        "cells of fedabml": _once(map(_version, told)),
        "with": _once(", ".join(f"{k} {v}" for k, v in f["versions"].items()) for f in told),
        "on": _once(f.get("hardware", f["device"]) for f in told),
        "in": _once(f["dtype"] for f in told),
        "partitions": _once(f["partition_hash"][:12] for f in told)[:12],
        "run on": sorted({f["ended"][:10] for f in told if "ended" in f}),
    }


def _version(facts: Table) -> str:
    """The version, and the state of the code where a cell knows it: not every change of it is a version."""
    return f"{facts['fedabml']} ({facts['code']})" if "code" in facts else str(facts["fedabml"])


def _once(words: Any) -> list[str]:
    return list(dict.fromkeys(map(str, words)))
