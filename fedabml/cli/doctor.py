"""`fedabml doctor` and `fedabml train --dry-run`: what this machine has, and what a run would do on it and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..files.formats import clock, size
from ..runs.config import RunConfig
from .console import note, print_line, table
from .options import PANELS, command, run_options

if TYPE_CHECKING:
    from ..data import Federation
    from ..runs.forecast import Estimate
    from ..runs.prepare import Setup


@command(PANELS)
def doctor(ctx: typer.Context, *, estimate: bool = True) -> None:
    """Check this machine, and show what a run with the given flags would do here.

    The command prints versions, devices and data; which device, backend, precision and estimator the run would use, and
    why; how much of the work would be padding; and about how long the run would take and how much memory it would need.
    The estimate comes from a few real steps.

    The command downloads nothing. It keeps one thing: which backend is faster for the model on this machine
    (backends.json in $FEDABML_CACHE, or in ~/.cache/fedabml). Runs reuse that choice.

    Examples: `fedabml doctor`, `fedabml doctor --dataset cifar10 --model cnn --clients 100 --rounds 100`

    Flags:
        estimate: Do not time a few real steps of the run.
    """
    from ..data.sources import datasets
    from ..engine.autotune import choices_file
    from ..runs import doctor as machine
    from ..runs import forecast
    from ..runs.prepare import prepare

    plan = run_options(ctx).config()
    table(("", ""), machine.versions(), title="Versions")
    rows, notes = machine.devices()
    table(("", ""), rows, title="Machine")
    table(("", ""), machine.dataset_lines(plan.data_dir), title="Data")
    for text in notes:
        note(text)
    present = {d["name"]: d["present"] for d in datasets(plan.data_dir)}
    if not plan.data and not present[plan.dataset or "digits"]:
        note(f"{plan.dataset} is not here, so its run is not checked. Get it first: fedabml data get {plan.dataset}")
        return
    fed = plan.federation()
    setup = prepare(fed, plan.model, plan.algorithm_object(), **plan.train_options(fed))
    table(("", ""), plan_rows(setup), title="The run")
    table(("", ""), machine.choices(setup, plan.to_dict(everything=True)), title="How it would run, and why")
    for text in setup.notes:
        note(text)
    if estimate:
        guess = forecast.estimate(setup, scorings(plan, fed.clients))
        table(("", ""), described(setup, guess), title="What it would take (an estimate from a few real steps)")
        if guess.free and guess.bytes > guess.free:
            note(f"The run needs about {size(guess.bytes)}; {size(guess.free)} are free. A smaller --chunk needs less.")
    cache, hint = choices_file(), ""
    if plan.backend == "auto" and setup.cohort.device.type == "cpu" and cache.exists():
        hint = f"The choice of a backend is kept in {cache}; remove that file to measure anew. "
    next_step = "`fedabml train` with the same flags starts the run; `fedabml bench` measures the machine."
    print_line(f"No run was started. {hint}{next_step}")


def scorings(plan: RunConfig, clients: int) -> float:
    """Return how often all clients are personalised and scored; scoring a part of them counts in proportion."""
    from ..evaluation.scoring import SCORED_CLIENTS

    if not plan.evaluate:
        return 0
    part = min(1, (plan.eval_clients or SCORED_CLIENTS) / clients)
    return (1 if plan.eval_all else part) + (part * (plan.rounds // plan.eval_every) if plan.eval_every else 0)


def described(setup: Setup, guess: Estimate) -> list[tuple[str, str]]:
    """Return the rows of the table of an estimate."""
    gpu = " on the GPU" * (setup.cohort.device.type == "cuda")
    shares = guess.overhead / max(guess.round, 1e-9), guess.padding, guess.batch_padding
    overhead, waiting, batch_padding = (100 * share for share in shares)
    scoring = f"{guess.personal:.3g} s to personalise every client once, {guess.predicting:.3g} s to predict and score"
    training = clock(setup.rounds * (guess.round + guess.saving))
    return [
        ("a step", f"{guess.step * 1e3:.3g} ms for the {guess.lanes} client(s) of a chunk"),
        ("a round", f"{guess.round:.3g} s, {overhead:.2g} % of it around the steps"),
        ("saving", f"{guess.saving * 1e3:.3g} ms a round"),
        ("training", f"{training} for {setup.rounds} rounds, with saving"),
        *([("scoring", scoring)] if guess.scoring else []),
        ("in all", f"about {clock(guess.total)}, without the start (data, imports) and the report"),
        ("padding", f"{waiting:.2g} % of steps wait for larger clients, {batch_padding:.2g} % of batches"),
        ("a client", f"about {size(setup.lane_bytes)} while it trains"),
        ("memory", f"about {size(guess.bytes)} for data and a chunk{gpu}; {size(guess.free)} free"),
        (
            "process",
            f"about {size(guess.peak_host_bytes)} of host memory in all, "
            f"{size(guess.bytes_before)} before the first step",
        ),
    ]


def show_plan(plan: RunConfig, fed: Federation, out: Path, saved: dict[str, Any] | None = None) -> None:
    """Print what a run would do, and refuse what the run would refuse.

    `saved` is the config.json of the run in `out` that is to be resumed; None for a new run.
    """
    from ..evaluation.scoring import check_rows
    from ..runs.prepare import prepare, resolve_split

    if saved is not None:  # a run goes on with the backend and chunk it began with
        backend = saved.get("backend", plan.backend) if plan.backend == "auto" else plan.backend
        plan = plan.with_changes(backend=backend, chunk=plan.chunk or saved.get("chunk"))
    setup = prepare(fed, plan.model, plan.algorithm_object(), **plan.train_options(fed))
    if plan.evaluate:
        check_rows(fed, resolve_split(fed, "auto"))
    for text in setup.notes:
        note(text)
    writes = f"{out}{'' if saved is None else ' (resumes the run there)'}"
    table(("", ""), [*plan_rows(setup), ("writes", writes)], title="The plan")
    if saved is None and (out / "config.json").exists():
        note(f"'{out}' already holds a run: resume it with --resume, or give another folder with --out.")
    print_line("No run was started.")


def plan_rows(setup: Setup) -> list[tuple[str, str]]:
    """Return the rows of the table of a planned run: pairs of a heading and a value."""
    import torch

    from ..engine.client import no_update
    from ..engine.server import cohort_size, initial_state, state_bytes

    cohort, config, fed = setup.cohort, setup.config, setup.cohort.fed
    samples = ", ".join(f"{count:,} {split}" for split, count in fed.describe()["samples"].items() if count)
    least, most = (setup.epochs * -(-n // cohort.batch_size) for n in (fed.train.counts.min(), fed.train.counts.max()))
    steps = f"{least}{f' to {most}' if most > least else ''}"
    with torch.no_grad():  # the messages of a client that trains no epoch
        shared = initial_state(cohort.algorithm, cohort.network).shared
        down, up = state_bytes(shared), state_bytes(no_update(cohort, shared))
    sampled = cohort_size(fed.clients, setup.participation)
    lanes = min(cohort.chunk, fed.clients)
    chunk = size(setup.lane_bytes * min(lanes, sampled))
    hyper = ", ".join(f"{name}={'none' if v is None else v}" for name, v in config["algorithm"]["hyper"].items())
    return [
        ("data", f"{fed.dataset}: {samples} samples of shape {tuple(fed.x.shape[1:])}, {fed.outcomes}"),
        ("clients", client_sizes(fed)),
        ("scored on", "validation data" if fed.val.counts.any() else "test data"),
        ("model", f"{config['model']}, {config['parameters']:,} parameters, {config['dtype']}"),
        ("algorithm", f"{config['algorithm']['name']}: {hyper}"),
        ("rounds", f"{setup.rounds}, {sampled} of {fed.clients} clients in each, {setup.epochs} epoch(s)"),
        ("steps per round", f"{steps} per client, batches of {cohort.batch_size}"),
        ("traffic", f"{size(up)} up, {size(down)} down per client and round"),
        ("runs on", f"{config['device']}, backend {config['backend']}, {lanes} client(s) at once"),
        ("memory", f"about {size(fed.x.nbytes)} for data, {chunk} for a chunk of clients"),
    ]


def client_sizes(fed: Federation) -> str:
    """Return how many clients there are, and how many training samples they have."""
    low, middle, high = fed.describe()["training_samples_per_client"]
    return f"{fed.clients}, with {low} to {high} training samples (median {middle:g})"
