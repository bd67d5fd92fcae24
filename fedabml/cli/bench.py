"""`fedabml bench`: how fast the engine is on this machine, beside a plain PyTorch loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import console, note, say, table, tell
from .options import completion

if TYPE_CHECKING:
    from ..bench.workloads import Workload

MODELS = ("mlr", "mlp", "cnn")


def bench(
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Workloads: mlr, mlp, cnn, resnet18, pfl.", autocompletion=completion(MODELS)
        ),
    ] = ",".join(MODELS),
    device: Annotated[str, typer.Option(metavar="WORD", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", "--precision", metavar="WORD", help="float32, tf32, bf16 or float64.")
    ] = "float32",
    quick: Annotated[
        bool, typer.Option("--quick", metavar=" ", help="FedAvg alone, smaller, two rounds each.")
    ] = False,
) -> None:
    """Measure this machine: our engine against an eager PyTorch loop over clients, side by side.

    Both train the same federations of random bytes on the same minibatches, and their losses must agree. It takes two
    to three minutes on two cores. Close other programs first: a busy machine measures the other programs.

    Examples: `fedabml bench`, `fedabml bench --models cnn --device cuda --dtype tf32`
    """
    from ..bench import table as words
    from ..bench.measure import clear, machine
    from ..bench.workloads import workload
    from ..engine.autotune import device_of, dtype_of

    place = device_of(device)
    dtype_of(dtype, place)
    suite = "quick" if quick else "short" if place.type == "cpu" else "gpu"
    works = [workload(name.strip(), suite) for name in models.split(",")]
    facts = machine(place)
    load, cores = facts.pop("load"), facts["cores"]
    if load > cores / 2:
        note(f"This machine is busy (load {load:.1f} on {cores} cores): the times below are not its own.")
    records = [record for work in works for record in races(work, place, dtype, quick)]
    clear(place)
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    made = words.brief(records)
    table(made.head, made.rows, title=f"{made.title}, {dtype} on {place.type}", numbers=True)
    for work in works:
        tell(f"{work.name}: {work.said}.")
    tell(
        "Medians of rounds taken in turns. The loop trains client after client on the same minibatches (foreach steps, "
        "data on the device, no synchronisation within a round); `than torch.optim` is the ratio where it steps with "
        "torch.optim.SGD instead."
    )


def races(work: Workload, place: Any, dtype: str, quick: bool) -> list[dict[str, Any]]:
    """The races of one workload, said while they run."""
    from ..bench.measure import TITLES, algorithms, contest

    fed, found = work.federation(), []
    for name in ("fedavg",) if quick else ("fedavg", "fedabml5"):
        with console().status(f"{work.name}, {TITLES[name]} …"):
            record = contest(
                work, fed, algorithms(work.lr)[name], device=place, dtype=dtype, turns=2 if quick else 5, budget=2.0
            )
        found.append({"kind": "loop", "algorithm": name, **record})
        if not record["agree"]:
            note(f"{work.name}, {TITLES[name]}: the losses differ by {record['apart']:.1e}; do not trust its ratio.")
    return found
