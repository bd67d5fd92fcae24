"""`fedabml doctor`: what this machine has, what a run would do on it and why, and how long that would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ..evaluation.measures import size
from ..runs.config import RunConfig
from ..runs.log import clock
from .console import note, print_line, table
from .options import PANELS, command, run_options

if TYPE_CHECKING:
    from ..runs.forecast import Estimate
    from ..runs.prepare import Setup


@command(PANELS)
def doctor(
    ctx: typer.Context,
    *,
    estimate: bool = True,
) -> None:
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
    from .plan import facts

    plan = run_options(ctx).config()
    table(("", ""), machine.versions(), title="Versions")
    rows, notes = machine.devices()
    table(("", ""), rows, title="Machine")
    table(("", ""), machine.stored(plan.data_dir), title="Data")
    for text in notes:
        note(text)
    present = {d["name"]: d["present"] for d in datasets(plan.data_dir)}
    if not plan.data and not present[plan.dataset or "digits"]:
        note(f"{plan.dataset} is not here, so its run is not checked. Get it first: fedabml data get {plan.dataset}")
        return
    fed = plan.federation()
    setup = prepare(fed, plan.model, plan.algorithm_object(), **plan.train_options(fed))
    table(("", ""), facts(setup), title="The run")
    table(("", ""), machine.choices(setup, plan.to_dict(everything=True)), title="How it would run, and why")
    for text in setup.notes:
        note(text)
    if estimate:
        found = forecast.estimate(setup, scorings(plan, fed.clients))
        table(("", ""), described(setup, found), title="What it would take (an estimate from a few real steps)")
        if found.free and found.bytes > found.free:
            note(f"The run needs about {size(found.bytes)}; {size(found.free)} are free. A smaller --chunk needs less.")
    kept = choices_file()
    chosen = plan.backend == "auto" and setup.cohort.device.type == "cpu" and kept.exists()
    print_line(
        "No run was started. "
        + (f"The choice of a backend is kept in {kept}; remove that file to measure anew. " if chosen else "")
        + "`fedabml train` with the same flags starts the run; `fedabml bench` measures the machine."
    )


def scorings(plan: RunConfig, clients: int) -> float:
    """Return how often all clients are personalised and scored; scoring a part of them counts in proportion."""
    from ..evaluation.scoring import SOME

    if not plan.evaluate:
        return 0
    part = min(1, (plan.eval_clients or SOME) / clients)
    return (1 if plan.eval_all else part) + (part * (plan.rounds // plan.eval_every) if plan.eval_every else 0)


def described(setup: Setup, found: Estimate) -> list[tuple[str, str]]:
    """Return the rows of the table of an estimate."""
    round, saving = found.round, found.saving
    gpu = " on the GPU" * (setup.cohort.device.type == "cuda")
    scoring = f"{found.personal:.3g} s to personalise every client once, {found.predicting:.3g} s to predict and score"
    return [
        ("a step", f"{found.step * 1e3:.3g} ms for the {found.lanes} client(s) of a chunk"),
        ("a round", f"{round:.3g} s, {100 * found.around / max(round, 1e-9):.2g} % of it around the steps"),
        ("saving", f"{saving * 1e3:.3g} ms a round"),
        ("training", f"{clock(setup.rounds * (round + saving))} for {setup.rounds} rounds, with saving"),
        *([("scoring", scoring)] if found.scoring else []),
        ("in all", f"about {clock(found.total)}, without the start (data, imports) and the report"),
        (
            "padding",
            f"{100 * found.padding:.2g} % of steps wait for larger clients, {100 * found.short:.2g} % of batches",
        ),
        ("a client", f"about {size(setup.lane)} while it trains"),
        ("memory", f"about {size(found.bytes)} for data and a chunk{gpu}; {size(found.free)} free"),
        (
            "process",
            f"about {size(found.most)} of host memory in all, {size(found.process)} of it before the first step",
        ),
    ]
