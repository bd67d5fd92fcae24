"""Measure speed on this machine's CPU: ours, an eager loop and other libraries, side by side.

    python -m benchmarks.cpu [--peers VENV] [--only mlr,cnn] [--quick] [--resume] [--machine xeon --out results/speed]

VENV is a virtual environment that has some of flwr[simulation], pfl[pytorch], fedlab, fedjax. A library that it lacks
is skipped, and the table says so. What is written where: benchmarks/cells.py.
"""

from __future__ import annotations

import functools

import torch

from fedabml.bench.workloads import Workload, workload

from . import rivals
from .cells import Book, arguments, cells, chosen, closing, execute, opening


def _peers(name: str, work: Workload, python: str | None, repeats: int) -> dict[str, object]:
    return {"kind": "peers", **rivals.compare(name, work, python, repeats)}


def main() -> None:
    """Read the arguments, run the races and write their page."""
    parser = arguments(__doc__ or "", "cpu", 60)
    parser.add_argument("--peers", help="virtual environment of the other libraries, or its Python")
    parser.add_argument("--repeats", type=int, help="how many processes of every library are timed")
    parser.add_argument("--seconds", type=float, help="seconds of a race; every side has at least two turns")
    args = parser.parse_args()
    device, suite = torch.device("cpu"), "quick" if args.quick else "cpu"
    book = Book(args.out / f"{args.machine}.jsonl", args.commit, args.resume)
    opening(book, device, ("float32",))
    turns, budget = args.turns or (2 if args.quick else 7), args.seconds or (5.0 if args.quick else 30.0)
    todo = list(cells(suite, device, turns, budget))
    python, repeats = rivals.python_of(args.peers), args.repeats or (1 if args.quick else 3)
    for name in rivals.CONTESTS:
        todo.append((f"peers/{name}", functools.partial(_peers, name, workload(name, suite), python, repeats)))
    execute(book, chosen(iter(todo), args.only), args.minutes, device)
    closing(book)


if __name__ == "__main__":
    main()
