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
from typing import Literal, TypedDict, Unpack

from ...engine.processes import refuse
from ...errors import InputError
from ...files.paths import folder_lock
from ...runs.config import JsonDict
from ..cell import Cell
from ..compare import check_seeds
from ..ledger import Ledger, Unfinished
from ..request import claim
from ..runner import SILENT, Callbacks, execute, groups
from .experiment import Context, Done, Experiment, Request
from .findings import Findings, publish
from .findings import page as drawn
from .settings import check, check_grid, keep_chosen, read_chosen

AnyPath = str | os.PathLike[str]
QUICK = "A quick version, much smaller than the paper's experiment: it shows that things work, not how good they are."
MAY_CHANGE = ("columns", "algorithms", "seeds", "chosen")  # keys that a later request in the same folder may change


class Options(TypedDict, total=False):
    """The options of `run` and `run_part`.

    `tuning` is the folder of searches under the protocol `tuned` (by default `tune` in `out`): experiments may share
    it. `finished` are cells.jsonl of other folders or machines, whose cells are not run again.
    """

    tuning: AnyPath | None
    finished: Sequence[AnyPath]
    callbacks: Callbacks


def run(
    experiment: Experiment, request: Request, out: AnyPath, *, partial: bool = False, **options: Unpack[Options]
) -> Findings:
    """Run what an experiment lacks in its folder, write what was found, and return it.

    With `partial` nothing is run: the findings are of what is finished.
    """
    with nullcontext() if partial else folder_lock(out):
        context = _context(experiment, request, out, "partial" if partial else "run", **options)
        request = context.request
        if not request.chosen and request.protocol == "tuned":  # the command names those of an earlier call, too
            request = replace(request, chosen=tuple(map(str, sorted(context.tuning.glob("*.toml")))))
        findings, provenance = _findings(experiment, context)
        more = [word for file in context.finished for word in ("--finished", str(file))] + ["--so-far"]
        command = request.command(context.folder) + f" {shlex.join(more)}" * partial
        publish(findings, context.folder, command, provenance)
        return findings


def run_part(
    experiment: Experiment, request: Request, out: AnyPath, part: tuple[int, int], **options: Unpack[Options]
) -> None:
    """Run the i-th of n shares of an experiment's first cells, where `part` is (i, n).

    Cells that may run together stay in one share, as far as possible. `run` does the rest: the cells that the first
    ones lead to (`Experiment.then`), searches, tables and pictures.
    """
    number, parts = part
    if not 1 <= number <= parts:
        raise InputError(f"There is no part {number} of {parts}.")
    with folder_lock(out, shared=True):  # other parts may be at work beside this one, but not `run`
        context = _context(experiment, request, out, "share", **options)
        share_file = context.folder / f"cells-{number}-of-{parts}.jsonl"
        files = (context.folder / "cells.jsonl", *_parts(context.folder))
        others = [file for file in files if file.exists() and file != share_file]
        once = {cell.identity: cell for cell in experiment.cells(context)}
        cells = [cell for group in groups(list(once.values())) for cell in group]
        own_cells = slice(len(cells) * (number - 1) // parts, len(cells) * number // parts)
        execute(cells[own_cells], Ledger(share_file, [*context.finished, *others]), context.callbacks)


def page(experiment: Experiment, request: Request, folder: Path, title: str | None = None) -> str:
    """Return the page of a finished folder, drawn anew: nothing is run, though the data must be here."""
    tuning = next((at for at in (folder / "tune", folder.parent / "tune") if at.is_dir()), None)
    if request.protocol == "tuned" and tuning is None:
        raise InputError(f"The searches of the reproduction in '{folder}' are gone: '{folder / 'tune'}' is missing.")
    try:
        findings, provenance = _findings(
            experiment, Context(request, folder, tuning or folder / "tune", mode="finished")
        )
    except Unfinished as error:
        raise InputError(
            f"The reproduction in '{folder}' is not finished: runs are missing, or of other defaults. Resume it: "
            f"{request.command(folder)}"
        ) from error
    return drawn(replace(findings, title=title or findings.title), request.command(folder), provenance)


def _parts(folder: Path) -> list[Path]:
    """Return the files that `run_part` has written."""
    return sorted(folder.glob("cells-*-of-*.jsonl"))


def _context(
    experiment: Experiment,
    request: Request,
    out: AnyPath,
    mode: Literal["run", "share", "partial"],
    tuning: AnyPath | None = None,
    finished: Sequence[AnyPath] = (),
    callbacks: Callbacks = SILENT,
) -> Context:
    """Check a request, claim its folder, and return where the experiment works."""
    refuse("A reproduction")
    folder = Path(out)
    begun = (folder / "reproduce.json").exists()
    if mode == "partial" and not begun and not finished:
        raise Unfinished(f"Nothing of '{request.experiment}' was begun in '{folder}': there is nothing to draw.")
    request = replace(request, seeds=request.seeds or experiment.seeds[request.quick])
    check(request.columns, request.algorithms)
    searches = request.protocol == "tuned" and bool(experiment.columns)
    flags = {"chosen": request.chosen, "grid": request.grid, "search-seed": request.search_seed is not None}
    for flag in (name for name, present in flags.items() if present and not searches):
        raise InputError(f"--{flag} is for experiments on datasets with --protocol tuned, where methods are searched.")
    check_seeds(request.seed_list)
    search_seeds = {request.first_search_seed, request.first_search_seed + 1}  # the second one confirms the winner
    if searches and (shared_seeds := search_seeds & {*request.seed_list}):
        raise InputError(
            f"Seed {min(shared_seeds)} belongs to the tests and to the searches: give another --search-seed."
        )
    for choice in ("columns", "algorithms"):
        if getattr(request, choice) and not getattr(experiment, choice):
            raise InputError(f"'{request.experiment}' has no {choice} to choose from; leave --{choice} out.")
    check_grid(request.grid, request.algorithms or experiment.algorithms)
    chosen = read_chosen(request.chosen)
    claim(folder, "reproduce", request.to_dict(), begun, MAY_CHANGE, write=mode != "partial" or not begun)
    searched = Path(tuning) if tuning else folder / "tune"
    keep_chosen(chosen, searched)
    return Context(request, folder, searched, callbacks, finished, mode)


def _findings(experiment: Experiment, context: Context) -> tuple[Findings, dict[str, list[str]]]:
    """Return what all the cells show, after running those that are missing; and with what they were made."""
    request, folder = context.request, context.folder
    closed = context.mode in ("partial", "finished")
    ledger = Ledger(folder / "cells.jsonl", [*context.finished, *_parts(folder)], closed=closed)

    def have(cells: Sequence[Cell]) -> list[Done]:
        if context.mode == "partial":
            return _complete(experiment, cells, ledger, context)
        return list(map(Done, cells, execute(cells, ledger, context.callbacks)))

    finished = have(experiment.cells(context))
    finished += have(experiment.then(context, finished))
    if context.mode == "partial" and not finished:
        raise Unfinished(f"Nothing of '{request.experiment}' is finished in '{folder}': there is nothing to draw.")
    provenance = _provenance([cell.result.facts for cell in finished])
    if len(provenance["cells of fedabml"]) > 1:
        context.note(
            f"The cells were made by versions {', '.join(provenance['cells of fedabml'])} of fedabml: their numbers "
            "may not compare. To have all of the present one, give another folder with --out."
        )
    for cell, result in finished:
        if result.error:
            context.note(f"{cell.label}, seed {result.seed}, has no numbers: {result.error}")
    findings = experiment.findings(context, [cell for cell in finished if not cell.result.error])
    protocol = f", protocol {request.protocol}" if experiment.columns else ""
    title = experiment.title + protocol + " (quick)" * request.quick
    conclusions = [*([QUICK] if request.quick else []), *findings.conclusions]
    findings = replace(findings, conclusions=conclusions, title=title, claim=experiment.claim, notes=context.notes)
    return findings, provenance


def _complete(experiment: Experiment, cells: Sequence[Cell], ledger: Ledger, context: Context) -> list[Done]:
    """Return the cells that are finished with all their seeds: a mean over fewer would not compare."""
    of = Counter(cell.label for cell in cells)
    missing = Counter(cell.label for cell in cells if cell not in ledger)
    if missing and not experiment.partial:
        name, count = context.request.experiment, missing.total()
        raise Unfinished(f"'{name}' is drawn as a whole, and {count} of its {len(cells)} runs are missing.")
    if missing:
        had = {label: of[label] - n for label, n in missing.items()}
        labels = ", ".join(f"{label} ({n} of {of[label]})" if n else label for label, n in had.items())
        context.note(f"Not finished: {labels}.")
    return [Done(cell, ledger[cell]) for cell in cells if cell.label not in missing]


def _provenance(records: Sequence[JsonDict]) -> dict[str, list[str]]:
    """Return with what and on what the cells were made, each value once."""
    values = {
        "cells of fedabml": [f"{f['fedabml']} ({f['code']})" if "code" in f else f["fedabml"] for f in records],
        "with": [", ".join(f"{k} {v}" for k, v in f["versions"].items()) for f in records],
        "on": [f.get("hardware", f["device"]) for f in records],
        "in": [f["dtype"] for f in records],
        "partitions": [f["partition_hash"][:12] for f in records],
        "run on": sorted(f["ended"][:10] for f in records if "ended" in f),
    }
    once = {name: list(dict.fromkeys(map(str, occurrences))) for name, occurrences in values.items()}
    return once | {"partitions": once["partitions"][:12]}
