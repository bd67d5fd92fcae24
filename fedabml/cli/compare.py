"""`fedabml compare`: several algorithms on one federation, with the same seeds and the same budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..arguments import split_words
from ..errors import InputError
from ..files.user_code import is_user_code
from ..runs.config import names
from ..runs.request import resume_command
from .console import console, print_error, print_line, print_paragraph, table
from .options import command, panels_without, run_options

if TYPE_CHECKING:
    from ..experiments.compare import ComparisonRequest
    from ..experiments.ranking import Comparison

SEEDS = 5  # where none are given; the help of --seeds names it


@command(
    panels_without("algorithm", "seed", "evaluate", "eval_clients", "eval_all"),
    algorithms=("all", *names("algorithm")),
)
def compare(
    ctx: typer.Context,
    *,
    algorithms: str | None = None,
    seeds: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    finished: list[Path] | None = None,
    quiet: bool = False,
) -> None:
    """Compare algorithms on the same data, rounds and seeds, and count the clients that each one harms.

    Every algorithm is trained with every seed and every client is scored. The table has means with 95% intervals over
    seeds, marks the best and those that are not significantly different from it, and counts the clients that a method
    serves worse than training alone would. A finished run is never repeated: call the same command after Ctrl-C or a
    crash.
    With --eval-every N the page and table.json also have accuracy per round, with 95% bands over three seeds or more.

    Each algorithm takes its hyperparameters from its own table in --config or --preset, and from `--set
    ALGORITHM.NAME=VALUE`; --lr is for all algorithms. The folder gets table.md, table.csv, table.json, clients.csv,
    report.html and cells.jsonl. If the clients are the same with every seed, benefits.csv and the page's "Who
    benefits?" have each of them once.

    Examples:
    - `fedabml compare --algorithms fedabml,fedavg-ft,local --dataset digits-few --clients 40
      --classes-per-client 5 --rounds 40 --participation 0.25`
    - `fedabml compare --algorithms all --preset paper --dataset fashionmnist --out runs/table`
    - `fedabml compare --resume --out runs/table --seeds 10` to add seeds

    Flags:
        algorithms (all|A,B,C): Algorithms to compare, see `fedabml algorithms`, or your own, as mine.py:FedDyn; all:
            every one. The table gives the reason if one does not fit the model.
        seeds (N|A,B,C): How many seeds (0, 1, ...), or which: 5,6,7 (one alone: 5,). A seed decides partition and run.
            [default: 5]
        out: Folder of the comparison. [default: runs/DATASET-comparison]
        resume: Resume the comparison in --out, or add algorithms and seeds to it. Without --resume, a folder accepts
            only its own algorithms and seeds, and prints their table again.
    """
    from ..experiments.compare import ComparisonRequest, configs
    from ..experiments.functions import compare as run

    options, saved = run_options(ctx), None
    wanted = None if algorithms is None else parse_algorithms(algorithms)
    out = out or options.folder("comparison")
    if resume:
        saved = ComparisonRequest.read(out)
        options.layers.insert(0, _layer(saved, out))
    if wanted is None and saved is None:
        raise InputError("Name the algorithms to compare: --algorithms all, or names such as fedabml,fedavg-ft,local.")
    wanted = list(saved.rows) if saved and wanted is None else wanted or []
    rows = configs(wanted, *options.layers, overrides=options.overrides)
    chosen_seeds = parse_seeds(seeds) if seeds else saved.seeds if saved else SEEDS
    own = ["--algorithms", algorithms] if algorithms and is_user_code(algorithms) else []
    with resumable(out, "compare", own + options.model_flags):
        comparison = run(
            algorithms=rows, seeds=chosen_seeds, out=out, resume=resume, finished=finished or (), progress=not quiet
        )
    if not quiet:
        show(comparison, out)


@contextmanager
def resumable(out: Path, command: str, more: Sequence[str] = ()) -> Iterator[None]:
    """After Ctrl-C, print the command that goes on in `out`, with the flags `more`, and exit with code 130."""
    from ..experiments.progress import Stopped

    try:
        yield
    except Stopped as stop:
        again = resume_command(command, out, more)
        print_error(f"Stopped. {stop.finished} of {stop.total} runs are finished in '{out}'. To go on: {again}", "")
        raise typer.Exit(130) from None


def _layer(saved: ComparisonRequest, out: Path) -> dict[str, object]:
    """Return the options of a saved comparison, which the options given now override."""
    if any(label != config.algorithm for label, config in saved.rows.items()):
        raise InputError(f"The comparison in '{out}' has labels of its own: resume it from Python, where it began.")
    return saved.setting.to_dict(everything=True) | {name: dict(c.hyper) for name, c in saved.rows.items()}


def parse_algorithms(text: str) -> list[str]:
    """Return the algorithms that --algorithms names: all, or some; those in a user's file are imported."""
    from ..algorithms import register_user_algorithm

    words = [register_user_algorithm(word) for word in split_words(text)]
    if "all" in words and len(words) > 1:
        raise InputError(f"--algorithms is '{text}', but all already names every algorithm. Give all alone, or names.")
    return list(names("algorithm")) if words == ["all"] else words


def parse_seeds(text: str) -> int | list[int]:
    """Return how many seeds --seeds gives, such as 5, or which, such as 0,3,7."""
    try:
        seeds = [int(word) for word in split_words(text)]
    except ValueError:
        seeds = []
    if not seeds or ("," not in text and not 1 <= seeds[0] < 1_000_000):
        raise InputError(f"--seeds is how many seeds, such as 5, or which, such as 0,3,7; it is '{text}'.")
    return seeds if "," in text else seeds[0]


def width(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table in characters."""
    return sum(max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)) - 3


def fitting(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield a table in parts of at most `width` characters, each with the first column and at least one more."""
    lengths = [max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)]
    begin = 1
    while begin < len(head):
        end = begin + 1
        while end < len(head) and lengths[0] + sum(lengths[begin : end + 1]) - 3 <= width:
            end += 1
        yield [head[0], *head[begin:end]], [[row[0], *row[begin:end]] for row in rows]
        begin = end


def show(comparison: Comparison, out: Path) -> None:
    """Print the table, its explanation, the clients that are harmed, and the files."""
    from ..experiments.benefits import benefit_notes
    from ..experiments.comparison_tables import decision_grid, decision_notes, described, explained, grid, harm_grid

    forms = [(False, True), (True, True), (True, False)]  # brief or not, with the column "behind" or not: what fits
    brief, lead = next((form for form in forms if width(*grid(comparison, *form)) <= console().width), forms[-1])
    table(*grid(comparison, brief, lead), title=described(comparison), numbers=True)
    for line in explained(comparison, lead):
        print_paragraph(line)
    if brief:
        more = "" if lead else ", and the differences to the best,"
        print_paragraph(f"The other measures' intervals{more} are in table.md.")
    print_line()
    head, rows = decision_grid(comparison, brief=True)
    if rows:
        for part, part_rows in fitting(head, rows, console().width):
            table(part, part_rows, title="Ranks and decisions" if part[1] == head[1] else None, numbers=True)
        for line in decision_notes(comparison):
            print_paragraph(line)
        print_line()
    head, rows = harm_grid(comparison)
    if rows:
        table(head, rows, title="Clients against Local only", numbers=True)
    if (out / "report.html").exists():
        print_line(f"report       {out / 'report.html'}")
    print_line(f"table        {out / 'table.md'} (also .csv, .json)")
    for line in benefit_notes(comparison)[1:]:
        print_line(line)
    print_line(f"per client   {out / 'clients.csv'}" + (" and benefits.csv" if (out / "benefits.csv").exists() else ""))
