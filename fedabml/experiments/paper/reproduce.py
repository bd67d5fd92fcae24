"""Running an experiment of the paper in a folder, and writing down what came of it.

The folder gets reproduce.json (the request), cells.jsonl (a line per finished cell), table.md, table.csv,
figures/*.svg and report.html. A finished cell is never run again: the same command goes on where it was stopped, and on
a finished folder only draws everything anew. More seeds, columns or algorithms may be requested in the same folder; any
other change needs another one, so cells of different configurations do not mix. `run_part` runs a share of the cells
into a file of its own, cells-2-of-4.jsonl: processes or machines may work in one folder side by side.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...engine.processes import refuse
from ...errors import InputError
from ...files.paths import folder_lock
from ...runs.config import Table
from ..cell import Cell
from ..compare import whole_seeds
from ..ledger import Ledger, Unfinished
from ..request import claim, read
from ..runner import execute, groups
from .columns import check, check_grid, keep, settings
from .experiment import Ask, Desk, Done, Experiment, Hear
from .findings import Findings, publish
from .findings import page as drawn

QUICK = "A quick version, much smaller than the paper's experiment: it shows that things work, not how good they are."
FREE = ("columns", "algorithms", "seeds", "chosen")  # keys that a later request in the same folder may change


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
