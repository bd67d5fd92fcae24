"""`fedabml doctor`: what this machine has, what a run would do on it and why, and how long that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..evaluation.measures import size
from ..runs.config import RunConfig
from ..runs.log import clock
from .console import note, say, table
from .options import Config, Preset, Set, run_flags, told

if TYPE_CHECKING:
    from ..runs.doctor import Estimate
    from ..runs.prepare import Setup


@run_flags()
def doctor(
    ctx: typer.Context,
    config: Config = None,
    preset: Preset = None,
    set: Set = None,
    estimate: Annotated[
        bool, typer.Option(" /--no-estimate", metavar=" ", help="turn off: time a few real steps of the run")
    ] = True,
) -> None:
    """Look at this machine and, given the flags of a run, at what that run would do here.

    Versions, devices and data; which device, backend, precision and estimator the run would use, and why; how much of
    its work would be padding; about how long it would take and how much memory it would need, from a few real steps.
    Nothing is downloaded. Nothing stays written but which backend is faster here for the model, which runs reuse
    (backends.json in $FEDABML_CACHE, else ~/.cache/fedabml; without that file it is measured anew).

    Examples: `fedabml doctor`, `fedabml doctor --dataset cifar10 --model cnn --clients 100 --rounds 100`
    """
    from ..data.sources import datasets
    from ..engine.autotune import choices_file
    from ..runs import doctor as look
    from ..runs.prepare import prepare
    from .plan import facts

    plan = told(ctx).config()
    table(("", ""), look.versions(), title="Versions")
    rows, notes = look.devices()
    table(("", ""), rows, title="Machine")
    table(("", ""), look.stored(plan.data_dir), title="Data")
    for text in notes:
        note(text)
    here = {d["name"]: d["present"] for d in datasets(plan.data_dir)}
    if not plan.data and not here[plan.dataset or "digits"]:
        note(f"{plan.dataset} is not here yet, so its run is not looked at: fedabml data get {plan.dataset}")
        return
    fed = plan.federation()
    setup = prepare(fed, plan.model, plan.algorithm_object(), **plan.train_options(fed))
    table(("", ""), facts(setup), title="The run")
    table(("", ""), look.choices(setup, plan.to_dict(everything=True)), title="How it would run, and why")
    for text in setup.notes:
        note(text)
    if estimate:
        found = look.estimate(setup, scorings(plan, fed.clients))
        table(("", ""), spoken(setup, found), title="What it would take (an estimate from a few real steps)")
        if found.free and found.bytes > found.free:
            note(f"It needs about {size(found.bytes)}, and {size(found.free)} are free. A smaller --chunk needs less.")
    kept = choices_file()
    chosen = plan.backend == "auto" and setup.cohort.device.type == "cpu" and kept.exists()
    say(
        "No run was started"
        + (f"; the choice of a backend is kept in {kept}: remove that file to measure anew. " if chosen else ". ")
        + "`fedabml train` with the same flags starts the run; `fedabml bench` measures the machine."
    )


def scorings(plan: RunConfig, clients: int) -> float:
    """How often all clients are personalised and scored; some of them count in proportion."""
    from ..evaluation.scoring import SOME

    if not plan.evaluate:
        return 0
    part = min(1, (plan.eval_clients or SOME) / clients)
    return (1 if plan.eval_all else part) + (part * (plan.rounds // plan.eval_every) if plan.eval_every else 0)


def spoken(setup: Setup, found: Estimate) -> list[tuple[str, str]]:
    """An estimate in words."""
    round, saved = found.round, found.saving
    gpu = setup.cohort.device.type == "cuda"
    scoring = f"{found.personal:.3g} s to personalise every client once, {found.predicting:.3g} s to predict and score"
    work = f"about {size(found.bytes)} for data and a chunk"
    return [
        ("a step", f"{found.step * 1e3:.3g} ms for the {found.lanes} client(s) of a chunk"),
        ("a round", f"{round:.3g} s, {100 * found.around / max(round, 1e-9):.2g} % of it around the steps"),
        ("saving", f"{saved * 1e3:.3g} ms a round"),
        ("training", f"{clock(setup.rounds * (round + saved))} for {setup.rounds} rounds, saved"),
        *([("scoring", scoring)] if found.scoring else []),
        ("in all", f"about {clock(found.total)}, without the start (data, imports) and the report"),
        (
            "padding",
            f"{100 * found.padding:.2g} % of steps wait for larger clients, {100 * found.short:.2g} % of batches",
        ),
        ("a client", f"about {size(setup.lane)} while it trains"),
        ("memory", f"{work}{' on the GPU' * gpu}; {size(found.free)} free"),
        (
            "process",
            f"about {size(found.most)} of the host's memory in all; {size(found.process)} of it before a step was taken"
            " (torch, and data as loaded)",
        ),
    ]
