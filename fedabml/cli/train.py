"""`fedabml train`: start a run, go on with one, or say what one would do."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine import processes
from ..errors import InputError
from ..evaluation.measures import MEASURES, size
from ..runs import request
from ..runs.config import RunConfig, saved_config
from . import plan as planning
from .console import Watch, complain, downloads, number, say, table
from .options import Config, Preset, Quiet, RunOptions, Set, run_flags, run_options

if TYPE_CHECKING:
    from ..runs.train import Run

# What a resumed run may be told anew: how long, how it is scored, where its data lie (their hash is checked).
FREE = {"rounds", "evaluate", "eval_every", "eval_clients", "eval_all", "data", "data_dir", "pretrained"}

STOPPED = "stopped"  # by this name the processes of a run know whether one of them has said so


@run_flags()
def train(
    ctx: typer.Context,
    config: Config = None,
    preset: Preset = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="runs/DATASET-ALGORITHM-SEED")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar=" ", help="Go on with the run in --out where it stopped.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=" ", help="Say what would happen, and write nothing.")
    ] = False,
    set: Set = None,
    quiet: Quiet = False,
) -> None:
    """Train a federation, then personalise and score every client.

    The run's folder gets a checkpoint every round, train.log, summary.json, clients.csv, shared.safetensors (what the
    server owns; for FedABML the prior) and report.html. Flags overrule --config, and --set overrules flags.
    Hyperparameters are listed by `fedabml algorithms NAME`.

    Examples:

    - `fedabml train --dataset digits-few --clients 40 --classes-per-client 5 --rounds 40 --participation 0.25`

    - `fedabml train --data patients.csv --client-column hospital --target-column outcome --model mlr --rounds 30`

    - `fedabml train --config run.toml --set fedabml.lam=0.1 --seed 1 --dry-run`

    - `fedabml train --resume --out runs/digits-few-fedabml-0` after Ctrl-C or a crash: the result is bit-equal

    - `torchrun --standalone --nproc-per-node 4 -m fedabml train --dataset cifar10` on a machine with four GPUs
    """
    rank, _ = processes.rank_and_size()
    if dry_run:
        if rank == 0:
            plan, out = decided(ctx, out, resume)
            with downloads(plan.dataset or "", quiet) as hear:
                planning.show(plan, plan.federation(hear), out, saved_config(out)[1] if resume else None)
        return

    def settle() -> tuple[dict[str, Any], str, bool]:
        plan, folder = decided(ctx, out, resume)
        anew = not resume and restarted(folder)
        if anew:
            plan = reopened(folder, run_options(ctx))
        elif not resume:
            check_vacant(folder)
        return plan.to_dict(everything=True), str(folder), resume or anew

    content, folder, again = processes.world().decide(settle)  # process 0 alone need have the files
    run = execute(RunConfig.of(content), Path(folder), resume=again, quiet=quiet)
    if not quiet and rank == 0:
        show(run, Path(folder))


def decided(ctx: typer.Context, out: Path | None, resume: bool) -> tuple[RunConfig, Path]:
    """What to run, from all that was said, and in which folder."""
    asked = run_options(ctx)
    if resume:
        out = out or Path("runs") / asked.config().name
        plan = reopened(out, asked)
    else:
        plan = asked.config()
        out = out or Path("runs") / plan.name
    plan.algorithm_object()  # its hyperparameters are checked before anything else is done
    return plan, out


def restarted(out: Path) -> bool:
    """Whether torchrun has started its processes anew (--max-restarts) and they had begun the run in this folder."""
    name, times, _ = processes.torchrun_job()
    return bool(name and times and (out / "config.json").is_file() and saved_config(out)[1].get("launch") == name)


def reopened(out: Path, asked: RunOptions) -> RunConfig:
    """A run's own configuration, changed by what is given now, where that may change."""
    from ..runs.folder import Folder
    from ..runs.train import PERSONAL

    saved, _ = saved_config(out)
    now = RunConfig.of(saved.to_dict(everything=True), *asked.layers, overrides=asked.overrides)
    free = FREE | {f"{saved.algorithm}.{name}" for name in PERSONAL}
    differ = {name: pair for name, pair in saved.differences(now).items() if name not in free}
    if differ:
        raise InputError(
            f"The run in '{out}' was started with another configuration: {request.describe(differ)}. Resume it "
            f"unchanged ({request.resume_command('train', out)}), or start a new run in another folder."
        )
    if (round := Folder(out).newest()) > now.rounds:
        raise InputError(f"The run in '{out}' has {round} rounds already; --rounds {now.rounds} is less than that.")
    return now


def check_vacant(out: Path) -> None:
    """Refuses a folder that holds something; what a crash left before the run began does not count."""
    if (out / "config.json").exists():
        raise InputError(
            f"'{out}' already holds a run. Go on with it: {request.resume_command('train', out)}; or give "
            "another folder with --out."
        )
    if out.is_dir() and any(not file.name.startswith(".") for file in out.iterdir()):
        raise InputError(f"'{out}' holds other files. A run wants a folder of its own: give another one with --out.")


def stored(plan: RunConfig) -> dict[str, Any]:
    """A configuration as a run keeps it: a path to data holds from every working folder."""
    content = plan.to_dict(everything=True)
    return content | ({"data": os.path.realpath(plan.data)} if plan.data else {})


def execute(plan: RunConfig, out: Path, *, resume: bool = False, quiet: bool = False, label: str = "training") -> Run:
    """Trains into a folder with progress shown and logged; Ctrl-C says how to go on."""
    from ..runs.train import train as run_training

    go_on = request.resume_command("train", out)
    (rank, size), (job, times, most) = processes.rank_and_size(), processes.torchrun_job()
    quiet, begun = quiet or rank > 0, False
    with Watch(quiet, label) as watch:
        try:
            with downloads(plan.dataset or "", quiet) as hear:
                fed = processes.world().one_per_machine_first(lambda: plan.federation(hear))
            begun = rank > 0
            return run_training(
                fed,
                plan.model,
                plan.algorithm_object(),
                evaluate=plan.evaluate,
                eval_every=plan.eval_every,
                eval_clients=plan.eval_clients,
                eval_all=plan.eval_all,
                out=out,
                resume=resume,
                extra={"run": stored(plan), "command": plan.command(out)} | ({"launch": job} if job else {}),
                on_start=watch.start,
                on_round=watch.round,
                **plan.train_options(fed),
            )
        except (KeyboardInterrupt, processes.PeerLost) as stop:
            lost = not isinstance(stop, KeyboardInterrupt)
            if not watch.pace and not begun:  # nothing has begun, so there is nothing to go on with
                raise
            saved = f"Round {watch.pace.saved} of {watch.pace.rounds}" if watch.pace else "Every finished round"
            watch.close()
            if processes.should_report(STOPPED, 0.5 if lost else 5.0):  # told to stop, as process 0 was, if it lives
                why = "Stopped, because another process of this run ended." if lost else "Stopped."
                how = "To go on, if torchrun does not start it again by itself" if times < most else "To go on"
                also = " (also under torchrun, with any number of processes)" if size > 1 else ""
                complain(f"{why} {saved} is saved in '{out}'. {how}: {go_on}{also}", "")
            raise typer.Exit(2 if lost else 130) from None


def show(run: Run, out: Path) -> None:
    """The summary as a table, and where things are."""
    table(*scores(run.summary), title=describe(run.summary), numbers=True)
    say(f"report   {out / 'report.html'}")
    say(f"prior    {out / 'shared.safetensors'}")
    say(f"digest   {run.prior.digest[:16]} (first 16 digits; the same at every site that has this prior)")
    file = "CLIENT.csv" if run.prior.input_spec.recipe else "CLIENT.npz"
    say(f"next     fedabml personalize {shlex.quote(str(out))} --data {file} --out posterior.safetensors")


def describe(summary: dict[str, Any]) -> str:
    """A run in a line."""
    split = "validation" if summary["split"] == "val" else "test"
    words = f"{summary['algorithm']} on {summary['dataset']}: {summary['clients']} clients, {summary['rounds']} rounds"
    scored = summary.get("clients_scored", summary["clients"])
    who = f"{scored} clients " if scored < summary["clients"] else ""
    return f"{words}, {summary['seconds']:.1f} s ({who}scored on {split} data)"


# The rows of the scores, by their keys in `evaluation.measures`.
ROWS = (
    *("accuracy_pooled", "accuracy", "accuracy_worst_decile", "rmse_pooled", "rmse"),
    *("nll", "ece", "brier", "coverage_pooled"),
)
# The columns of the scores: their headings, and how the summary's keys begin. A label level is not every algorithm's.
MODELS = {"personalised": "", "prior + label level": "prior_level_", "prior": "prior_"}


def scores(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the summary's measures: of the personalised models and, where it has one, of the prior."""
    from ..data.rows import FEW_ROWS

    level = summary.get("prior_level_nll") is not None
    shown = {head: start for head, start in MODELS.items() if level or start != "prior_level_"}
    measures, small = {key: MEASURES[key].name for key in ROWS}, summary.get("clients_small", 0)
    values = dict(summary)
    if small and "accuracy_worst_decile_large" in summary:
        measures["accuracy_worst_decile"] += f" of {FEW_ROWS} rows or more"
        values["accuracy_worst_decile"] = summary["accuracy_worst_decile_large"]
    rows = [
        [words, *(number(values[f"{start}{name}"]) if f"{start}{name}" in values else "" for start in shown.values())]
        for name, words in measures.items()
        if name in values
    ]
    blank = [""] * (len(shown) - 1)
    if small:
        rows.append([f"clients with fewer than {FEW_ROWS} rows", f"{small} of {summary['clients_scored']}", *blank])
    if "bytes_up" in summary:
        rows.append(["traffic per client and round", f"{size(summary['bytes_up'] + summary['bytes_down'])}", *blank])
    return ["", *shown], rows
