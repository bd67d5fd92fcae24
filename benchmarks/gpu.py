"""Speed on a machine with an accelerator, one command: ours against an eager loop, side by side.

    python -m benchmarks.gpu [--only mlr,cnn] [--quick] [--resume] [--minutes 7]

needs torch and numpy, no network, and less than eight minutes; it writes results/speed/gpu.jsonl (a line per race) and
gpu.md (the tables).
"""

from __future__ import annotations

import sys

import torch

from .cells import COARSE, Book, arguments, cells, chosen, closing, execute, opening, page

AIMS = (
    "loop/mlr/fedavg/float32",
    "loop/mlp/fedavg/float32",
    "loop/cnn/fedavg/float32",
    "loop/cnn/fedabml5/float32",
    "loop/cnn/fedabml5/bf16",
    "step/mlr/float32",
    "step/mlp/float32",
    "step/cnn/float32",
    "loop/resnet18/fedavg/bf16",
    "step/resnet18/bf16",
    "loop/resnet18/fedavg/float32",
    "loop/cnn/fedavg/tf32",
    "loop/cnn/fedabml5/tf32",
    "loop/resnet18/fedavg/tf32",
    "loop/cnn/fedavg/bf16",
)  # cells that the aims of results/README.md speak of, in the order of worth


def main() -> None:
    """The command."""
    parser = arguments(__doc__ or "", 7)
    parser.add_argument("--device", default="cuda")
    told = parser.parse_args()
    device = torch.device(told.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This torch sees no GPU. `python -m benchmarks.cpu` measures a CPU.")
    book = Book(told.out / "gpu.jsonl", told.resume)
    ceiling = opening(book, device, ("float32", *COARSE) if device.type == "cuda" else ("float32",))
    turns, budget = told.turns or (2 if told.quick else 5), 2.0 if told.quick else 6.0
    todo = chosen(cells("quick" if told.quick else "gpu", device, turns, budget), told.only)
    # What the aims speak of comes first, in case time runs out; the data are made again for the rest.
    todo.sort(key=lambda cell: (AIMS.index(cell[0]) if cell[0] in AIMS else len(AIMS), "graphs" in cell[0]))
    execute(book, todo, told.minutes, device)
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
    closing(told.out / "gpu.md", page("Speed on a GPU", book, command.strip(), ceiling, []))


if __name__ == "__main__":
    main()
