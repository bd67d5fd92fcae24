"""`fedabml reproduce`: the paper's tables and figures, computed anew and held beside its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..arguments import split_words
from ..errors import InputError, nearest
from .compare import parse_seeds, width
from .console import console, note, print_error, print_line, print_paragraph, table
from .options import command

if TYPE_CHECKING:
    from ..experiments.paper import Findings

# As fedabml.experiments.paper has them; importing that takes torch.
EXPERIMENT_NAMES = ("toy", "table1", "table2", "uncertainty", "sensitivity", "bound", "remarks", "fewdata", "clients")


@command(experiment=EXPERIMENT_NAMES, protocol=("paper", "tuned"))
def reproduce(
    experiment: str,
    *,
    protocol: str = "paper",
    quick: bool = False,
    columns: str | None = None,
    algorithms: str | None = None,
    seeds: str | None = None,
    trials: int | None = None,
    grid: list[str] | None = None,
    search_seed: int | None = None,
    chosen: list[Path] | None = None,
    out: Path | None = None,
    finished: list[Path] | None = None,
    part: str | None = None,
    so_far: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    compile: bool | None = None,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> None:
    """Reproduce an experiment of the paper: run its cells, and write a table beside the paper's numbers and figures.

    A finished cell is never run again: call the same command after Ctrl-C or a crash, or with more seeds, columns or
    algorithms. A missing dataset is left out, with a note on how to get it. The folder gets cells.jsonl,
    table.md, table.csv, figures/ and report.html. Several processes or GPUs share the cells with --part.

    Examples:
    - `fedabml reproduce toy`
    - `fedabml reproduce table1 --quick`
    - `fedabml reproduce table1 --protocol tuned --columns fashionmnist --seeds 5 --out runs/table1-tuned`
    - `fedabml reproduce fewdata --protocol tuned --columns cifar10-5 --chosen results/table1/cifar10-5/settings.toml`
    - `fedabml reproduce sensitivity --part 1/4 --device cuda:0 --out runs/sensitivity`

    Flags:
        experiment (EXPERIMENT): toy, table1, table2, uncertainty, sensitivity, bound, remarks, fewdata, clients; or
            all.
        protocol (WORD): paper: our reading of the paper's settings; tuned: every method tuned with the same budget
            on validation data. For experiments on datasets.
        quick: A small version that takes minutes, on embedded data by default.
        columns (A,B,C): Settings: cifar10-2, cifar10-5, cifar100-5, cifar100-20 (also -resnet), emnist, fashionmnist,
            mnist, digits. [default: the experiment's own]
        algorithms (A,B,C): Algorithms. [default: the experiment's own]
        seeds (N|A,B,C): How many seeds (0, 1, ...), or which: 5,6,7 (one alone: 5,). [default: the experiment's own]
        trials (N): tuned: trials of every algorithm. [default: 16; quick: 2]
        grid (NAME=A,B,C): tuned: search these values (of one algorithm: fedprox.mu=0.1,1) and no others, as `fedabml
            tune` does; an algorithm that it does not name has its own search. Repeatable.
        search_seed (N): tuned: the seed and partition of the searches. --seeds must contain neither this seed nor the
            next, which confirms the winner. [default: 100]
        chosen (FILE): tuned: a tuned.toml of `fedabml tune`. Its algorithms are not searched again. Repeatable.
        out: Folder of the results. [default: runs/EXPERIMENT-PROTOCOL[-quick]]
        part (I/N): Run only the I-th of N shares of the cells. All shares have the same --out. The same command without
            --part then runs the rest and draws the whole. tuned: only after the searches, or with --chosen.
        so_far: Run nothing: draw what is finished, and name what is not.
        device (WORD): auto, cpu, cuda or cuda:1.
        dtype (WORD): float32, tf32, bf16 or float64.
        compile: Fuse the operations of a step: slower to start, then faster. [default: on a GPU, once the first rounds
            show that it pays]
        data_dir: Folder of datasets. [default: $FEDABML_DATA, or ~/.cache/fedabml/data]
    """
    from ..experiments.functions import paper_request
    from ..experiments.functions import reproduce as run
    from ..experiments.ledger import Unfinished
    from ..experiments.paper import EXPERIMENTS

    if experiment != "all" and experiment not in EXPERIMENTS:
        raise InputError(f"There is no experiment '{experiment}'.{nearest(experiment, [*EXPERIMENTS, 'all'])}")
    part_numbers = None if part is None else _part(part)
    if part_numbers and so_far:
        raise InputError("--part runs cells and --so-far runs none: give one of them.")
    if grid and experiment == "all":
        raise InputError("--grid is for one experiment: they have different algorithms.")
    out = out or Path("runs") / f"{experiment}-{protocol}{'-quick' * quick}"
    chosen_by: dict[str, Any] = {"columns": split_words(columns or ""), "chosen": chosen or ()}
    chosen_by |= {"search_seed": search_seed, "algorithms": split_words(algorithms or "")}
    options: dict[str, Any] = {"protocol": protocol, "quick": quick, "seeds": parse_seeds(seeds) if seeds else None}
    options |= {"trials": trials, "grid": grid or (), "device": device, "dtype": dtype, "compile": compile}
    options["data_dir"] = data_dir
    again = paper_request(experiment, **options, **chosen_by).command(out)
    for name in EXPERIMENTS if experiment == "all" else [experiment]:
        folder, kind, choices = out, EXPERIMENTS[name], chosen_by
        if experiment == "all":  # some have nothing to choose from
            folder = out / name
            choices = choices if kind.columns else choices | {"columns": (), "chosen": (), "search_seed": None}
            choices = choices if kind.algorithms else choices | {"algorithms": ()}
        options |= {"tuning": out / "tune", "finished": finished or (), "part": part_numbers, "so_far": so_far}
        try:
            findings = run(name, **options, **choices, out=folder, progress=not quiet)
        except KeyboardInterrupt:
            again += f" --part {part}" if part else ""
            print_error(f"Stopped. What is finished is in '{folder}'. To go on: {again}", "")
            raise typer.Exit(130) from None
        except Unfinished as error:
            if not so_far or experiment != "all":
                raise
            note(str(error))
            continue
        if findings and not quiet:
            show(findings, folder)
    if part_numbers and not quiet:
        print_line(f"Part {part} is done. Once all are: {again}")


def _part(text: str) -> tuple[int, int]:
    """Return the two numbers of `I/N`."""
    number, slash, parts = text.partition("/")
    if not slash or not all(word.isdecimal() and len(word) < 6 for word in (number, parts)):
        raise InputError(f"--part is I/N, such as 1/4 for the first of four; it is '{text}'.")
    return int(number), int(parts)


def show(findings: Findings, folder: Path) -> None:
    """Print the tables that fit, the conclusions, and the files."""
    for sheet in findings.sheets:
        if width(sheet.head, sheet.rows) <= max(console().width, 160):
            table(sheet.head, sheet.rows, title=sheet.title, numbers=True)
    for line in findings.conclusions:
        print_paragraph(line)
    print_line()
    print_line(f"report       {folder / 'report.html'}")
    print_line(f"table        {folder / 'table.md'} (also .csv; pictures in figures/)")
