"""Speed on this machine's CPU, one command: ours, an eager loop and other libraries, side by side.

    python -m benchmarks.cpu --peers VENV [--only mlr,cnn] [--quick] [--resume]

writes results/speed/cpu.jsonl (a line per race) and cpu.md (the tables). VENV is a virtual environment that has some of
flwr[simulation], pfl[pytorch], fedlab, fedjax; without it they are skipped, and the tables say so.
"""

from __future__ import annotations

import sys

import torch

from fedabml.bench.workloads import workload

from . import rivals
from .cells import Book, arguments, cells, chosen, closing, execute, opening, page


def main() -> None:
    """The command."""
    parser = arguments(__doc__ or "", 60)
    parser.add_argument("--peers", help="virtual environment of the other libraries, or its Python")
    parser.add_argument("--repeats", type=int, help="processes of every library")
    parser.add_argument("--seconds", type=float, help="how long a race takes turns, two at the least")
    told = parser.parse_args()
    device, suite = torch.device("cpu"), "quick" if told.quick else "cpu"
    book = Book(told.out / "cpu.jsonl", told.resume)
    ceiling = opening(book, device, ("float32",))
    turns, budget = told.turns or (2 if told.quick else 7), told.seconds or (5.0 if told.quick else 30.0)
    todo = list(cells(suite, device, turns, budget))
    python, repeats = rivals.python_of(told.peers), told.repeats or (1 if told.quick else 3)
    for name in rivals.CONTESTS:
        work = workload(name, suite)
        race = lambda name=name, work=work: {"kind": "peers", **rivals.compare(name, work, python, repeats)}  # noqa: E731
        todo.append((f"peers/{name}", race))
    execute(book, chosen(iter(todo), told.only), told.minutes, device)
    peers = [r for r in book.records if r.get("kind") == "peers" and "error" not in r]
    more = ["## Other libraries, FedAvg, a process each\n", *rivals.table(peers), ""] if peers else []
    command = "python -m benchmarks.cpu " + " ".join(sys.argv[1:])
    closing(told.out / "cpu.md", page("Speed on a CPU", book, command.strip(), ceiling, more))


if __name__ == "__main__":
    main()
