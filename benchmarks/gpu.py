"""Measure speed on a machine with an accelerator: ours against an eager loop, side by side.

    python -m benchmarks.gpu [--only mlr,cnn] [--quick] [--resume] [--minutes 7] [--machine h200 --out results/speed]

It needs torch and numpy, no network, and less than eight minutes. What is written where: benchmarks/cells.py.
"""

from __future__ import annotations

import torch

from .cells import REDUCED_PRECISION, Book, arguments, cells, chosen, closing, execute, opening

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
)  # the cells of the aims in results/speed/README.md, the most important first


def main() -> None:
    """Read the arguments, run the races and write their page."""
    parser = arguments(__doc__ or "", "gpu", 7)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This torch sees no GPU. `python -m benchmarks.cpu` measures a CPU.")
    book = Book(args.out / f"{args.machine}.jsonl", args.commit, args.resume)
    opening(book, device, ("float32", *REDUCED_PRECISION) if device.type == "cuda" else ("float32",))
    turns, budget = args.turns or (2 if args.quick else 5), 2.0 if args.quick else 6.0
    todo = chosen(cells("quick" if args.quick else "gpu", device, turns, budget), args.only)
    # The cells of the aims come first, in case time runs out; the data are made again for the rest.
    todo.sort(key=lambda cell: (AIMS.index(cell[0]) if cell[0] in AIMS else len(AIMS), "graphs" in cell[0]))
    execute(book, todo, args.minutes, device)
    closing(book)


if __name__ == "__main__":
    main()
