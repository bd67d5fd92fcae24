"""`fedabml tune`: good hyperparameters for each algorithm, found on validation data with one budget for all."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..arguments import split_words
from ..errors import InputError
from ..evaluation.measures import TUNED
from ..files.user_code import is_user_code
from ..runs.config import command_line_name, names
from .compare import parse_algorithms, resumable
from .console import note, number, print_line, table
from .options import command, panels_without, run_options

if TYPE_CHECKING:
    from ..experiments.tune import Tuned

SHARE, TRIALS, SEEDS, BATCH = 0.2, 16, (100,), 8  # the defaults, which the help names
SHOWN_TRIALS = 5  # trials of an algorithm in its table


@command(
    panels_without("algorithm", "seed", "evaluate", "eval_every", "eval_clients", "eval_all", "validation", "split"),
    algorithms=("all", *names("algorithm")),
    measure=tuple(dict.fromkeys(chain(*TUNED.values()))),
)
def tune(
    ctx: typer.Context,
    *,
    algorithms: str | None = None,
    trials: int | None = None,
    seeds: str | None = None,
    measure: str | None = None,
    batch: int | None = None,
    grid: list[str] | None = None,
    validation: float | None = None,
    out: Path | None = None,
    resume: bool = False,
    finished: list[Path] | None = None,
    quiet: bool = False,
) -> None:
    """Tune algorithms on validation data, each with the same budget, and write the best settings to tuned.toml.

    Test data are never read. Every algorithm declares the values to search for each of its hyperparameters; those of
    lr, personal_epochs and personal_lr are the same for all. The trials of the first batch lie around the given
    setting, each further away. Optuna's TPE proposes the rest. Hyperparameters from `--set ALGORITHM.NAME=VALUE`, --lr
    or a table in --config are fixed and not searched; a --preset is only where the search starts. On every trained
    federation a grid of personal epochs and step sizes is scored, which may take longer than the training: `--set
    fedavg-ft.personal_epochs=5` fixes the epochs. `--grid lr=0.01,0.1` searches these values only, in all combinations
    with those of further --grid; `--grid lr=0.001..3` changes one range and searches the rest as before.

    The best trial is confirmed before it is written: it is trained on one more seed, with validation data held out and
    with all training data. If it diverges or becomes clearly worse there, it is refused, and the next best is tried.
    Where a chosen value lies at an end of its range, a warning names the flag that searches further.

    The folder gets tuned.toml, trials.csv and cells.jsonl. A trained federation is never trained again: call the same
    command after Ctrl-C or a crash. The command needs Optuna: `pip install 'fedabml[tune]'`.

    Examples:
    - `fedabml tune --algorithms fedabml,fedavg-ft,local --dataset digits-few --clients 40
      --classes-per-client 5 --rounds 40 --participation 0.25`
    - `fedabml tune --algorithms all --dataset fashionmnist --preset paper --set fedabml.label_prior=dirichlet`
    - `fedabml compare --config runs/digits-few-tuning/tuned.toml --algorithms fedabml,local --out runs/table` to use it

    Flags:
        algorithms (all|A,B,C): Algorithms to tune, see `fedabml algorithms`, or your own, as mine.py:FedDyn; all: every
            one that fits the model.
        trials (N): Trained federations per algorithm and seed. [default: 16]
        seeds (A,B,C): Which seeds, not how many; their mean decides. The seed after the largest confirms the winner.
            Use other seeds for the test. [default: 100]
        measure (WORD): The deciding measure: accuracy, nll, ece, classwise_ece, brier, auroc, average_precision,
            balanced_accuracy, f1 or accuracy_worst_decile; for two classes also recall, precision or sensitivity; for
            several answers per row also exact_match; for regression rmse, nll, mae, pinball or coverage (the nearest
            to 90%). Those that are means over clients also pooled: auroc_pooled. [default: accuracy or rmse; ties: nll]
        batch (N): Trials that are chosen and trained together: more is faster, fewer learn more from each other.
            [default: 8]
        grid (NAME=A,B,C): Search these values (of one algorithm: fedprox.mu=0.1,1) and no others; a range such as
            lr=0.001..3 only replaces the declared one. Lists of personal_epochs and personal_lr are scored on each
            trained federation. Repeatable.
        validation (X): Share of each client's training data that is held out, and scored on. [default: 0.2]
        out: Folder of the search. [default: runs/DATASET-tuning]
        resume: Resume the search in --out, or add --trials to it.
    """
    from ..experiments import request
    from ..experiments.compare import configs
    from ..experiments.functions import tune as run
    from ..experiments.search_space import read_grid

    options, preset = run_options(ctx), ctx.params["preset"]
    named = None if algorithms is None else parse_algorithms(algorithms)
    fixing = options.layers[1:] if preset else options.layers[:]  # a preset is only where the search starts
    out = out or options.folder("tuning")
    saved: dict[str, Any] = {}
    if resume:
        saved = request.read(out, "tune", ("algorithms", "run", "fixed"))
        for layers in (fixing, options.layers):
            layers.insert(0, saved["run"] | saved["fixed"])
    if algorithms is None and not saved:
        raise InputError("Name the algorithms to tune: --algorithms all, or names such as fedabml,fedavg-ft,local.")
    wanted = list(saved["algorithms"]) if named is None else named
    plan = next(iter(configs(wanted, {"validation": SHARE}, *options.layers, overrides=options.overrides).values()))
    fixed = {name: row.hyper for name, row in configs(wanted, *fixing, overrides=options.overrides).items()}
    own = ["--algorithms", algorithms] if algorithms and is_user_code(algorithms) else []
    with resumable(out, "tune", own + options.model_flags):
        tuned = run(
            algorithms=None if algorithms and algorithms.strip(" ,") == "all" else wanted,
            config=plan.with_changes(hyper={}, lr=None),
            out=out,
            trials=saved.get("trials", TRIALS) if trials is None else trials,
            seeds=saved.get("seeds", SEEDS) if seeds is None else _seeds(seeds),
            batch=saved.get("batch", BATCH) if batch is None else batch,
            measure=measure or saved.get("measure"),
            preset=preset or saved.get("preset"),
            fixed=fixed,
            grid=read_grid(grid) if grid else saved.get("grid"),
            resume=resume,
            finished=finished or (),
            progress=not quiet,
        )
    if not quiet:
        show(tuned, out, options.model_flags)


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in split_words(text)]
    except ValueError:
        raise InputError(f"--seeds are the seeds to tune with, such as 100 or 100,101; it is '{text}'.") from None


def show(tuned: Tuned, out: Path, more: Sequence[str] = ()) -> None:
    """Print the best trials of every algorithm, the files, and the next command with the flags `more`."""
    from ..experiments.progress import settings

    measures = dict.fromkeys((tuned.measure, "nll"))  # once, where the NLL decides
    for name, trials in tuned.trials.items():
        diverged = sum(trial.error is not None for trial in trials)
        refused = [trial for trial in trials if trial.refused]
        title = f"{name}: {f'the best of {len(trials)} trials' if len(trials) > 1 else 'one trial'} on validation data"
        title += f", by {tuned.decided_by}" * (tuned.decided_by != tuned.measure)
        title += (f", {diverged} diverged" if diverged else "") + (f", {len(refused)} refused" if refused else "")
        rows = [
            (str(trial.number), *map(number, (trial.value, trial.nll)[: len(measures)]), settings(trial))
            for trial in tuned.best(name, SHOWN_TRIALS)
        ]
        if tuned.base[0] is not None:
            base = map(number, tuned.base[: len(measures)])
            rows.append(("base rate", *base, "a model that knows only the training labels"))
        table(("trial", *measures, "hyperparameters"), rows, title=title)
        for text in [f"{name}: trial {trial.number} was refused {trial.refused}" for trial in refused]:
            note(text)
        for text in tuned.warnings.get(name, ()):
            note(text)
    print_line(f"tuned    {tuned.file}")
    print_line(f"trials   {out / 'trials.csv'}")
    if chosen := [name for name in tuned.trials if tuned.best(name)]:
        # A folder beside the search: the default of `compare` may hold the comparison before it.
        after = out.parent / f"{out.resolve().name.removesuffix('-tuning')}-tuned"
        words = [
            "--config",
            str(tuned.file),
            "--algorithms",
            ",".join(map(command_line_name, chosen)),
            *more,
            "--out",
            str(after),
        ]
        print_line(f"next     fedabml compare {shlex.join(words)}")
