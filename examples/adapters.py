"""Measure what a federation costs by the weights that it trains: all of a transformer, low-rank changes, or its head.

    python examples/adapters.py [--clients 20] [--all 4] [--layers 12] [--out results/speed]

The transformer has random weights, because its size alone matters here. Each row trains on the CPU in processes of its
own, once with one client and once with --clients (--all where all weights are trained), which run at once. The page is
adapters.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedabml
from fedabml.bench.measure import machine
from fedabml.files.paths import write
from fedabml.files.sheets import markdown_table
from fedabml.runs.summary import peak_memory

SAMPLES, LENGTH, VOCABULARY, RANK = 16, 8, 1000, 8
ROWS = {"all": "all weights", "lora": f"low-rank changes of rank {RANK} and the head", "head": "the head"}


class Block(nn.Module):
    """A layer of a transformer, whose linear layers are all called, so that a low-rank change copies no weight."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm(x)
        q, k, v = (layer(inputs).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        attention = (torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(torch.einsum("...hqk,...khd->...qhd", attention, v).flatten(-2))
        return x + self.down(self.up(self.norm2(x)).relu())


class Classifier(nn.Module):
    """A transformer over tokens."""

    def __init__(self, outputs: int = 2, width: int = 256, layers: int = 12):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.body = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x)).mean(1))


def train(train: str, clients: int, folder: Path, **options: int) -> fedabml.Run:
    """Train a federation in which all clients run at once, two rounds of one epoch."""
    g = np.random.default_rng(0)
    sites = [(g.integers(0, VOCABULARY, (SAMPLES, LENGTH)), np.arange(SAMPLES) % 2) for _ in range(clients)]
    torch.manual_seed(0)
    return fedabml.train(
        fedabml.Federation.from_arrays(sites), Classifier(**options), fedabml.FedABML(lr=1e-3, personal_lr=1e-3),
        train=train, lora_rank=RANK, rounds=2, participation=1.0, epochs=1, batch_size=4, device="cpu",
        backend="vmap", chunk=clients, evaluate=False, out=folder,
    )  # fmt: skip


def measure(way: str, clients: int, layers: int) -> dict[str, Any]:
    """Return what a run took in this process: weights, bytes of messages and files, and peak memory in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(way, 1, folder / "small", width=16, layers=1)  # so that libraries are loaded
        before = peak_memory() or 0
        run = train(way, clients, folder / "run", layers=layers)
        memory = (peak_memory() or 0) - before
        network, sent = run.prior.input_spec.network, run.history[-1]["bytes_up"]
        posterior = run.posterior(0, epochs=1, device="cpu").save(folder / "posterior.safetensors")
        files = {"prior": folder / "run/shared.safetensors", "posterior": posterior}
        sizes = {name: file.stat().st_size for name, file in files.items()}
    whole = network.layout.size + sum(tensor.numel() for tensor in network.constants.values())
    return {"weights": network.layout.size, "whole": whole, "sent": sent, "memory": memory, **sizes}


def row(way: str, clients: int, layers: int) -> tuple[str, ...]:
    """Return a row of the table, measured in processes of its own."""
    found = []
    for number in (1, clients):
        words = [sys.executable, __file__, "--one", way, "--clients", str(number), "--layers", str(layers)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one, many = found
    each = (many["memory"] - one["memory"]) / (clients - 1)
    weights = f"{one['weights']:,} of {one['whole']:,}"
    files = (text(one[name]) for name in ("sent", "prior", "posterior"))
    return ROWS[way], weights, *files, text(one["memory"]), text(each) if each >= 1 << 20 else "under 1 MiB"


def text(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 2**20:,.1f} MiB" if size >= 1 << 20 else f"{size / 2**10:.1f} KiB"


def main() -> None:
    """Read the arguments, measure every way to train and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20, help="how many run at once, beside one alone")
    parser.add_argument("--all", type=int, default=4, help="the same where all weights are trained")
    parser.add_argument("--layers", type=int, default=12, help="layers of the transformer")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.clients, args.layers)))
        return
    facts = ", ".join(f"{name} {value}" for name, value in machine(torch.device("cpu")).items())
    command = f"examples/adapters.py --clients {args.clients} --all {args.all} --layers {args.layers}"
    head = ("trained", "weights", "a client sends a round", "prior file", "posterior file")
    page = "\n".join([
        "# Adapters of a transformer\n",
        f"`python {command}` on: {facts}.\n",
        f"FedABML on the CPU, two rounds of one epoch, {SAMPLES} sequences of {LENGTH} tokens at every client, "
        "minibatches of 4. "
        "Memory is the peak of the process less that of a run of a tiny transformer. "
        f"The last column compares {args.clients} clients at once ({args.all} where all weights are trained) with "
        "one.\n",
        markdown_table(
            (*head, "memory with one client", "memory of each further client at once"),
            [row(way, args.all if way == "all" else args.clients, args.layers) for way in ROWS],
        ),
    ])  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "adapters.md", page + "\n")
    print(page)


if __name__ == "__main__":
    main()
