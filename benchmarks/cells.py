"""Cells of a benchmark: each one race, one JSON line when it is done, never run twice by a run that is resumed."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedabml.bench import table
from fedabml.bench.measure import algorithms, ceilings, clear, contest, graphs_of, machine, steps_of
from fedabml.bench.workloads import Workload, workload
from fedabml.data import Federation
from fedabml.engine.autotune import DTYPES
from fedabml.files.paths import write

MODELS = ("mlr", "mlp", "cnn", "pfl", "resnet18")
COARSE = tuple(name for name in ("tf32", "bf16", "bfloat16") if name in DTYPES)
Cell = tuple[str, Callable[[], dict[str, Any]]]


@functools.lru_cache
def federation(work: Workload) -> Federation:
    """The data of a workload, made once."""
    return work.federation()


def _compiles(work: Workload, device: torch.device, name: str) -> bool:
    """Whether it is raced compiled, too: of large networks (ResNet-18 takes a minute to compile) FedAvg alone."""
    return device.type == "cuda" and (work.name in ("mlr", "mlp", "cnn") or name == "fedavg")


def _step(work: Workload, words: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    compile = _compiles(work, words["device"], "fedabml")
    return {"kind": "step", **steps_of(work, federation(work), dtype=dtype, compile=compile, **words)}


def cells(suite: str, device: torch.device, turns: int, budget: float) -> Iterator[Cell]:
    """All races, those of one workload together."""
    words: dict[str, Any] = {"device": device, "turns": turns, "budget": budget}

    def against(work: Workload, name: str, dtype: str) -> Callable[[], dict[str, Any]]:
        option = {"dtype": dtype, "compile": _compiles(work, device, name), **words}
        make = lambda: contest(work, federation(work), algorithms(work.lr)[name], **option)  # noqa: E731
        return lambda: {"kind": "loop", "algorithm": name, **make()}

    for model in MODELS:
        work = workload(model, suite)
        for name in ("fedavg", "fedabml5"):
            yield f"loop/{model}/{name}/float32", against(work, name, "float32")
        step = functools.partial(_step, work, words)
        yield f"step/{model}/float32", step
        if device.type != "cuda":
            continue
        for dtype in COARSE if model != "mlr" else ():
            for name in ("fedavg", "fedabml5"):
                yield f"loop/{model}/{name}/{dtype}", against(work, name, dtype)
            yield f"step/{model}/{dtype}", functools.partial(step, dtype)
        for name in ("fedavg", "fedabml5") if model != "resnet18" else ("fedavg",):
            race = lambda work=work, name=name: graphs_of(work, federation(work), algorithms(work.lr)[name], **words)  # noqa: E731
            yield f"graphs/{model}/{name}", lambda race=race, name=name: {"kind": "graphs", "algorithm": name, **race()}


def arguments(doc: str, minutes: float) -> argparse.ArgumentParser:
    """The words that both commands take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cells whose name holds one of these words, separated by commas: mlr,step/cnn")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, fewer turns")
    parser.add_argument("--resume", action="store_true", help="go on with the cells that are not in the file yet")
    parser.add_argument("--turns", type=int, help="rounds of every side that are timed at most")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin no cell after so long")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder for the .jsonl and .md files")
    return parser


class Book:
    """The file of a benchmark's cells."""

    def __init__(self, path: Path, resume: bool):
        self.path, self.began = path, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, name: str) -> bool:
        """Whether a cell is done."""
        return any(r["cell"] == name and "error" not in r for r in self.records)

    def add(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs a cell and writes its line."""
        start = time.perf_counter()
        try:
            record = work()
        except Exception as error:  # the other cells are still worth having
            record = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        record = {"cell": name, **record, "took": time.perf_counter() - start}
        self.records = [r for r in self.records if r["cell"] != name] + [record]
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
        said = record.get("error") or json.dumps(record.get("ratio", {}))
        print(f"{time.perf_counter() - self.began:6.0f} s  {name}: {said}", flush=True)
        return record

    def of(self, name: str) -> dict[str, Any] | None:
        """The record of a cell."""
        return next((r for r in self.records if r["cell"] == name and "error" not in r), None)


def execute(book: Book, todo: list[Cell], minutes: float, device: torch.device) -> list[str]:
    """Runs the cells that are not done; those that there was no time for."""
    left = []
    for name, work in todo:
        if book.has(name):
            continue
        if time.perf_counter() - book.began > 60 * minutes:
            left.append(name)
            continue
        book.add(name, work)
        clear(device)
    if left:
        print(f"{len(left)} cell(s) were not begun within {minutes:g} minutes; --resume goes on: {', '.join(left)}")
    return left


def chosen(found: Iterator[Cell], only: str | None) -> list[Cell]:
    """The cells asked for."""
    words = only.split(",") if only else [""]
    return [cell for cell in found if any(word in cell[0] for word in words)]


def opening(book: Book, device: torch.device, dtypes: tuple[str, ...]) -> dict[str, float] | None:
    """Notes the machine and its ceilings; the ceilings."""
    if not book.has("machine"):
        book.add("machine", lambda: {"machine": machine(device), "ceilings": ceilings(device, dtypes)})
    found = book.of("machine")
    return found["ceilings"] if found else None


HOW = """Every row is one race in one process: the sides take turns, and the medians of the warm rounds are compared. A
turn is a round; on a GPU ours is as many as fit in a tenth of a second, at most fifty, because in a run that
is not saved after every round the host prepares a round while the device is at the one before. `first round`
is what comes before them: ours counts from the network and the arrays (checks, the choice of a backend, data
to the device, on a GPU the capture of graphs), the loop's from data that are on the device already. Every
side has a second round that is not timed (on a CPU steps are recorded in it). Our round
includes the draw of clients, shuffles, the averaging and the bookkeeping; the loop gets its shuffles for
nothing. Both train on the same random bytes
(speed does not depend on the values), the same minibatches in the same order; the mean losses of the first
round must agree (float32: 1e-4, with the same noise). The loop is `fedabml/bench/loop.py`: flat buffers,
foreach, no synchronisation inside a round, the faster of channels-last and contiguous and on a GPU cuDNN's
autotuner; `than torch.optim` is the ratio against the same loop stepping with
`torch.optim.SGD(foreach=True)`. `with noise on activations` is our engine with `estimator local` against the
same loop: the same expectation, not the same arithmetic. The operations of a step are those of its matrix
products and convolutions; its bytes count weights (posterior and prior) once each way, inputs, and outputs of
layers with weights once each way.
"""


def page(title: str, book: Book, command: str, ceiling: dict[str, float] | None, more: list[str]) -> str:
    """The results as Markdown."""
    found = book.of("machine")
    facts = ", ".join(f"{k} {v}" for k, v in found["machine"].items()) if found else ""
    parts = [f"# {title}\n", f"`{command}` on: {facts}.\n", HOW]
    parts += [made.markdown() for made in table.tables(book.records, ceiling)]
    said = {r["workload"]: r["said"] for r in book.records if "said" in r}
    parts += ["## Workloads\n", *(f"- `{name}`: {text}" for name, text in said.items()), ""]
    wrong = [r for r in book.records if "error" in r]
    if wrong:
        parts += ["## Cells that failed\n", *(f"- {r['cell']}: {r['error']}" for r in wrong), ""]
    return "\n".join(parts + more)


def closing(path: Path, text: str) -> None:
    """Writes the page and shows it."""
    write(path, text)
    print(text)
    print(f"written: {path} and {path.with_suffix('.jsonl')}")
