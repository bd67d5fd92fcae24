"""`fedabml bench`: the speed of the engine on this machine, next to a plain PyTorch loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..accel import SWITCHABLE
from ..arguments import split_words
from ..errors import InputError
from .console import console, note, print_line, print_paragraph, table
from .options import command

if TYPE_CHECKING:
    from ..bench.workloads import Workload

MODELS = ("mlr", "mlp", "cnn")


@command(models=MODELS, without=SWITCHABLE)
def bench(
    *,
    models: str = ",".join(MODELS),
    device: str = "auto",
    dtype: str = "float32",
    quick: bool = False,
    without: str = "",
) -> None:
    """Measure this machine: our engine and an eager PyTorch loop over clients, side by side.

    Both train the same federations of random bytes on the same minibatches, and their losses must agree. The command
    takes two to three minutes on two cores. Close other programs first, because they would distort the times.

    Examples: `fedabml bench`, `fedabml bench --models cnn --device cuda --dtype tf32`, `fedabml bench --without
    recorder,passes,twister`

    Flags:
        models (NAMES): Workloads: mlr, mlp, cnn, resnet18, pfl.
        device (WORD): auto, cpu or cuda.
        dtype (WORD): float32, tf32, bf16 or float64.
        quick: FedAvg only, smaller workloads, two rounds each.
        without (PARTS): Race our engine against itself without each of these accelerators instead: recorder, passes,
            twister, convolutions; 1 means without all four.
    """
    from ..bench import table as tables
    from ..bench.measure import clear, machine
    from ..bench.workloads import workload
    from ..engine.autotune import device_of, set_precision

    place = device_of(device)
    set_precision(dtype, place)
    suite = "quick" if quick else "short" if place.type == "cpu" else "gpu"
    works = [workload(name.strip(), suite) for name in models.split(",")]
    hardware = machine(place)
    load, cores = hardware.pop("load"), hardware["cores"]
    if load > cores / 2:
        note(f"This machine is busy (load {load:.1f} on {cores} cores), so the times below are too long.")
    parts = split_words(without)
    if unknown := {*parts} - {*SWITCHABLE, "1"}:
        raise InputError(f"--without {', '.join(sorted(unknown))}: use 1, or some of {', '.join(SWITCHABLE)}.")
    records = [record for work in works for record in races(work, place, dtype, quick, parts)]
    clear(place)
    print_line(", ".join(f"{name} {value}" for name, value in hardware.items()))
    sheet = tables.without(records) if parts else tables.brief(records)
    table(sheet.head, sheet.rows, title=f"{sheet.title}, {dtype} on {place.type}", numbers=True)
    for work in works:
        print_paragraph(f"{work.name}: {work.description}.")
    print_paragraph(
        "A ratio is the time of a round without the part over that with all, medians of rounds taken in turns."
        if parts
        else "Times are medians of alternating rounds. The loop trains one client at a time on the same minibatches, "
        "with foreach steps, data on the device and no synchronisation within a round. `than torch.optim` is the ratio "
        "to a loop that uses torch.optim.SGD."
    )


def races(work: Workload, device: Any, dtype: str, quick: bool, parts: list[str]) -> list[dict[str, Any]]:
    """Return the records of one workload's races: against the eager loop, or without each of `parts`."""
    from ..bench.measure import TITLES, Terms, algorithms, race_loop, race_without

    turns, budget = (20, 30.0) if parts else (5, 2.0)
    terms, records = Terms(work, work.federation(), device, dtype, 2 if quick else turns, budget), []
    for name in ("fedavg",) if quick else ("fedavg", "fedabml5", "fedabml") if parts else ("fedavg", "fedabml5"):
        with console().status(f"{work.name}, {TITLES[name]} …"):
            algorithm = algorithms(work.lr)[name]
            record = race_without(terms, algorithm, parts) if parts else race_loop(terms, algorithm)
        records.append({"kind": "loop", "algorithm": name, **record})
        if not record.get("agree", True):
            note(f"{work.name}, {TITLES[name]}: the losses differ by {record['apart']:.1e}, so the ratio is not valid.")
    return records
