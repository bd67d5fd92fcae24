"""`fedabml train`: start a run, resume one, or show what one would do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..engine import processes
from ..errors import InputError
from ..models import is_folder
from ..runs import request
from ..runs.config import RunConfig, saved_config
from .console import RunProgress, downloads, number, print_error, print_line, table
from .doctor import show_plan
from .options import PANELS, RunOptions, command, run_flags, run_options

if TYPE_CHECKING:
    from ..evaluation.measures import Measure
    from ..report.page import TableCell
    from ..runs.train import Run

# Keys that may change when a run is resumed: its length, its scoring, and where its data are (their hash is checked).
SCORING = ("evaluate", "eval_every", "eval_clients", "eval_all", "split")
MAY_CHANGE = {"rounds", "specificity", "data", "data_dir", "pretrained", *SCORING}

STOPPED = "stopped"  # the processes of a run report this event once


@command(PANELS)
def train(
    ctx: typer.Context, *, out: Path | None = None, resume: bool = False, dry_run: bool = False, quiet: bool = False
) -> None:
    """Train a federation, then personalise and score every client.

    The command writes a folder with a checkpoint of every round, train.log, summary.json, clients.csv, report.html and
    shared.safetensors, the server's result (for FedABML the prior). Flags override --config, and --set overrides flags.
    `fedabml algorithms NAME` lists the hyperparameters of an algorithm.

    Examples:
    - `fedabml train --dataset digits-few --clients 40 --classes-per-client 5 --rounds 40 --participation 0.25`
    - `fedabml train --data patients.csv --client-column hospital --target-column outcome --model mlr --rounds 30`
    - `fedabml train --data clients/ --model bert-folder --train lora --lora-rank 8` adapts a local Hugging Face model
    - `fedabml train --config run.toml --set fedabml.lam=0.1 --seed 1 --dry-run`
    - `fedabml train --resume --out runs/digits-few-fedabml-0` resumes after Ctrl-C or a crash; the result is bit-equal
    - `torchrun --standalone --nproc-per-node 4 -m fedabml train --dataset cifar10` on a machine with four GPUs

    Flags:
        out: Folder of the run. [default: runs/DATASET-ALGORITHM-SEED]
        resume: Resume the run in --out where it stopped.
        dry_run: Show what would happen, and write nothing.
    """
    rank, _ = processes.rank_and_size()
    run_flags(ctx)  # every process imports the code that flags name

    def decide() -> tuple[dict[str, Any], str, bool]:
        """Return the configuration, the run's folder, and whether a run there goes on."""
        options = run_options(ctx)
        folder = out or Path("runs") / options.config().name
        again = resume or (not dry_run and restarted(folder))
        plan = reopened(folder, options) if again else options.config()
        plan.algorithm_object()  # checks the hyperparameters before anything else is done
        if not (again or dry_run):
            check_vacant(folder)
        return plan.to_dict(everything=True), str(folder), again

    if dry_run and rank > 0:
        return
    content, name, again = decide() if dry_run else processes.world().decide(decide)  # only process 0 needs the files
    plan, folder = RunConfig.of(content), Path(name)
    if dry_run:
        with downloads(plan.dataset or "", quiet) as on_download:
            show_plan(plan, plan.federation(on_download), folder, saved_config(folder)[1] if resume else None)
        return
    run = execute(plan, folder, resume=again, quiet=quiet)
    if not quiet and rank == 0:
        show(run, folder, plan.code_flags)


def restarted(out: Path) -> bool:
    """Return whether torchrun has restarted its processes (--max-restarts) after they began the run in this folder."""
    name, times, _ = processes.torchrun_job()
    return bool(name and times and (out / "config.json").is_file() and saved_config(out)[1].get("launch") == name)


def reopened(out: Path, options: RunOptions) -> RunConfig:
    """Return the configuration of a run, with the changes that a resumed run may have. Raises InputError for others."""
    from ..runs.folder import Folder
    from ..runs.train import PERSONAL

    saved, _ = saved_config(out)
    now = RunConfig.of(saved.to_dict(everything=True), *options.layers, overrides=options.overrides)
    free = MAY_CHANGE | {f"{saved.algorithm}.{name}" for name in PERSONAL}
    differ = {name: pair for name, pair in saved.differences(now).items() if name not in free}
    if differ:
        raise InputError(
            f"The run in '{out}' was started with another configuration: {request.describe(differ)}. Resume it "
            f"unchanged ({request.resume_command('train', out)}), or start a new run in another folder."
        )
    if (round := Folder(out).newest_round()) > now.rounds:
        raise InputError(f"The run in '{out}' already has {round} rounds. Give --rounds {round} or more.")
    return now


def check_vacant(out: Path) -> None:
    """Refuse a folder that holds files; hidden files, which a crash may leave before a run begins, do not count."""
    if (out / "config.json").exists():
        raise InputError(
            f"'{out}' already holds a run. Go on with it: {request.resume_command('train', out)}; or give "
            "another folder with --out."
        )
    if out.is_dir() and any(not file.name.startswith(".") for file in out.iterdir()):
        raise InputError(f"'{out}' holds other files, but a run needs its own folder. Give another one with --out.")


def execute(plan: RunConfig, out: Path, *, resume: bool = False, quiet: bool = False, label: str = "training") -> Run:
    """Train a run into a folder and show its progress. After Ctrl-C, print how to resume it."""
    from ..runs.train import train as run_training

    (rank, processes_in_all), (job, restarts, restarts_allowed) = processes.rank_and_size(), processes.torchrun_job()
    quiet, begun = quiet or rank > 0, False
    with RunProgress(quiet, label) as progress:
        try:
            with downloads(plan.dataset or "", quiet) as on_download:
                fed = processes.world().one_per_machine_first(lambda: plan.federation(on_download))
            begun = rank > 0
            stored = plan.with_changes(data=os.path.realpath(plan.data)) if plan.data else plan
            stored = stored.with_changes(model=os.path.realpath(plan.model)) if is_folder(plan.model) else stored
            extra = {"run": stored.to_dict(everything=True), "command": plan.command(out)}
            return run_training(
                fed,
                plan.model,
                plan.algorithm_object(),
                **{
                    name: getattr(plan, name)
                    for name in ("evaluate", "eval_every", "eval_clients", "eval_all", "split")
                },
                out=out,
                resume=resume,
                extra=extra | ({"launch": job} if job else {}),
                on_start=progress.start,
                on_round=progress.round,
                **plan.train_options(fed),
            )
        except (KeyboardInterrupt, processes.PeerLost) as stop:
            lost, timer = not isinstance(stop, KeyboardInterrupt), progress.timer
            if not timer and not begun:  # nothing has begun, so there is nothing to resume
                raise
            progress.close()
            if processes.should_report(STOPPED, 0.5 if lost else 5.0):  # process 0 reports it, if it still lives
                saved = f"Round {timer.saved} of {timer.rounds}" if timer else "Every finished round"
                why = "Stopped, because another process of this run ended." if lost else "Stopped."
                how = "To go on, unless torchrun restarts it" if restarts < restarts_allowed else "To go on"
                also = " (also under torchrun, with any number of processes)" if processes_in_all > 1 else ""
                again = request.resume_command("train", out, plan.code_flags)
                print_error(f"{why} {saved} is saved in '{out}'. {how}: {again}{also}", "")
            raise typer.Exit(2 if lost else 130) from None


def show(run: Run, out: Path, more: Sequence[str] = ()) -> None:
    """Print the summary as a table, the paths of the results, and the next command with the flags `more`."""
    import numpy as np

    from ..evaluation.measures import FEW_ROWS

    print_scores(run.summary, describe(run.summary))
    print_line(f"report   {out / 'report.html'}")
    print_line(f"prior    {out / 'shared.safetensors'}")
    print_line(f"digest   {run.prior.digest[:16]} (first 16 digits; the same at every site that has this prior)")
    spec = run.prior.input_spec
    file = "CLIENT.csv" if spec.recipe else "CLIENT_FOLDER" if spec.images else "CLIENT.npz"
    enough = spec.recipe and run.federation and np.median(run.federation.train.counts) >= FEW_ROWS
    held_out = ["--validation", "0.3"] if enough else []  # with as many rows at the site, they calibrate and check
    words = [str(out), "--data", file, *held_out, *more, "--out", "posterior.safetensors"]
    print_line(f"next     fedabml personalize {shlex.join(words)}")


def describe(summary: dict[str, Any]) -> str:
    """Return one line that describes a run."""
    split = "validation" if summary["split"] == "val" else "test"
    run = f"{summary['algorithm']} on {summary['dataset']}: {summary['clients']} clients, {summary['rounds']} rounds"
    scored = summary.get("clients_scored", summary["clients"])
    who = f"{scored} clients " if scored < summary["clients"] else ""
    return f"{run}, {summary['seconds']:.1f} s ({who}scored on {split} data)"


def scores(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of scores as text; see `report.score_tables`."""
    from ..report.score_tables import score_cells

    return _text(*score_cells(summary, _format))


def print_scores(summary: dict[str, Any], title: str) -> None:
    """Print the tables of scores and of classes."""
    from ..report.score_tables import class_cells

    table(*scores(summary), title=title, numbers=True)
    head, rows = _text(*class_cells(summary, _format))
    if rows:
        table(head, rows, title="Classes, all samples pooled", numbers=True)


def _format(measure: Measure, value: float | None) -> str:
    return number(value)


def _text(head: list[str], rows: list[list[TableCell]]) -> tuple[list[str], list[list[str]]]:
    return head, [[cell.text for cell in row] for row in rows]
