"""`fedabml train --dry-run`: what a run would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.measures import size
from ..runs.config import RunConfig
from .console import note, print_line, table

if TYPE_CHECKING:
    from ..data import Federation
    from ..runs.prepare import Setup


def show(plan: RunConfig, fed: Federation, out: Path, saved: dict[str, Any] | None = None) -> None:
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
    table(
        ("", ""),
        [*facts(setup), ("writes", f"{out}{'' if saved is None else ' (resumes the run there)'}")],
        title="The plan",
    )
    if saved is None and (out / "config.json").exists():
        note(f"'{out}' already holds a run: resume it with --resume, or give another folder with --out.")
    print_line("No run was started.")


def facts(setup: Setup) -> list[tuple[str, str]]:
    """Return the facts of a planned run, as pairs of a heading and a value."""
    from ..engine.server import cohort_size

    cohort, config, fed = setup.cohort, setup.config, setup.cohort.fed
    described = fed.describe()
    low, middle, high = described["training_samples_per_client"]
    samples = ", ".join(f"{count:,} {split}" for split, count in described["samples"].items() if count)
    least, most = (setup.epochs * -(-n // cohort.batch_size) for n in (fed.train.counts.min(), fed.train.counts.max()))
    down, up = traffic(setup)
    sampled = cohort_size(fed.clients, setup.participation)
    lanes = min(cohort.chunk, fed.clients)
    hyper = ", ".join(f"{name}={'none' if v is None else v}" for name, v in config["algorithm"]["hyper"].items())
    what = f"{fed.classes} classes" if fed.classes else f"{fed.y.shape[1]} target(s)"
    return [
        ("data", f"{fed.dataset}: {samples} samples of shape {tuple(fed.x.shape[1:])}, {what}"),
        ("clients", f"{fed.clients}, with {low} to {high} training samples (median {middle:g})"),
        ("scored on", "validation data" if fed.val.counts.any() else "test data"),
        ("model", f"{config['model']}, {config['parameters']:,} parameters, {config['dtype']}"),
        ("algorithm", f"{config['algorithm']['name']}: {hyper}"),
        ("rounds", f"{setup.rounds}, {sampled} of {fed.clients} clients in each, {setup.epochs} epoch(s)"),
        (
            "steps per round",
            f"{least}{f' to {most}' if most > least else ''} per client, batches of {cohort.batch_size}",
        ),
        ("traffic", f"{size(up)} up, {size(down)} down per client and round"),
        ("runs on", f"{config['device']}, backend {config['backend']}, {lanes} client(s) at once"),
        (
            "memory",
            f"about {size(fed.x.nbytes)} for data, {size(setup.lane * min(lanes, sampled))} for a chunk of clients",
        ),
    ]


def traffic(setup: Setup) -> tuple[int, int]:
    """Return the bytes down and up per client and round, measured on the messages of a client that trains no epoch."""
    import torch

    from ..engine.client import no_update
    from ..engine.server import initial_state, state_bytes

    cohort = setup.cohort
    with torch.no_grad():
        shared = initial_state(cohort.algorithm, cohort.network).shared
        update = no_update(cohort, shared)
    return state_bytes(shared), state_bytes(update)
