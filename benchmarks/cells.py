"""The races of a speed benchmark, the file of their records, and the page and history made from them.

A race is one cell: a name and a function that returns its record. A machine's file, OUT/MACHINE.jsonl, holds the newest
record of every cell with the date and the commit of its race; OUT/MACHINE.md shows them as tables. OUT/history.csv
keeps the ratios of all races: date, machine, row, ratio, commit. A ratio tells how many times faster ours is; in rows
that begin with `step/` it tells how many steps of FedAvg a step of FedABML costs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedabml.algorithms import Algorithm
from fedabml.bench import table
from fedabml.bench.measure import Terms, algorithms, ceilings, clear, machine, race_loop, race_setups
from fedabml.bench.workloads import Workload, workload
from fedabml.data import Federation
from fedabml.engine.autotune import DTYPES
from fedabml.files.paths import write

from . import rivals

MODELS = ("mlr", "mlp", "cnn", "pfl", "resnet18")
KINDS = ("machine", "loop", "step", "graphs", "without", "peers")
REDUCED_PRECISION = tuple(name for name in ("tf32", "bf16", "bfloat16") if name in DTYPES)
SIDES = {"loop": "", "local": " noise on activations", "loop_sgd": " against torch.optim"}
SIDES |= {"loop_bf16": " against the loop in bf16", "launches": " against single launches"}
TITLES = {"xeon": "two cores of an Intel Xeon", "arm": "two cores of an ARM Neoverse N1", "h200": "one NVIDIA H200"}
Cell = tuple[str, Callable[[], dict[str, Any]]]


@functools.lru_cache
def federation(work: Workload) -> Federation:
    """Return the data of a workload, made once per process."""
    return work.federation()


def _compiles(work: Workload, device: torch.device, name: str) -> bool:
    """Return whether a race has a compiled side; large networks have one for FedAvg alone (a minute of compiling)."""
    return device.type == "cuda" and (work.name in ("mlr", "mlp", "cnn") or name == "fedavg")


def cells(suite: str, device: torch.device, turns: int, budget: float) -> Iterator[Cell]:
    """Yield all races against the eager loop and between our own steps, those of one workload together."""

    def terms(work: Workload, dtype: str = "float32", compile: bool = False) -> Terms:
        return Terms(work, federation(work), device, dtype, turns, budget, compile)

    def loop(work: Workload, name: str, dtype: str) -> dict[str, Any]:
        record = race_loop(terms(work, dtype, _compiles(work, device, name)), algorithms(work.lr)[name])
        return {"kind": "loop", "algorithm": name, **record}

    def step(work: Workload, dtype: str) -> dict[str, Any]:
        return {"kind": "step", **race_steps(terms(work, dtype, _compiles(work, device, "fedabml")))}

    def graphs(work: Workload, name: str) -> dict[str, Any]:
        return {"kind": "graphs", "algorithm": name, **race_graphs(terms(work), algorithms(work.lr)[name])}

    for model in MODELS:
        work = workload(model, suite)
        for dtype in ("float32", *(REDUCED_PRECISION if device.type == "cuda" and model != "mlr" else ())):
            for name in ("fedavg", "fedabml5"):
                yield f"loop/{model}/{name}/{dtype}", functools.partial(loop, work, name, dtype)
            yield f"step/{model}/{dtype}", functools.partial(step, work, dtype)
        if device.type == "cuda":
            for name in ("fedavg", "fedabml5") if model != "resnet18" else ("fedavg",):
                yield f"graphs/{model}/{name}", functools.partial(graphs, work, name)


def race_steps(terms: Terms) -> dict[str, Any]:
    """Race a FedABML step at its defaults against a FedAvg step, both ours."""
    raced = {name: algorithm for name, algorithm in algorithms(terms.work.lr).items() if name != "fedabml5"}
    suffixes = ("", " compiled") if terms.compile else ("",)
    setups = {n + suffix: terms.setup(algorithm, bool(suffix)) for suffix in suffixes for n, algorithm in raced.items()}
    bases = {f"{n}{suffix}": f"fedavg{suffix}" for suffix in suffixes for n in ("fedabml", "fedabml-batch")}
    hyper = setups["fedabml"].cohort.algorithm.values()
    return race_setups(terms, setups, bases) | {"hyper": {k: hyper[k] for k in ("s", "estimator") if k in hyper}}


def race_graphs(terms: Terms, algorithm: Algorithm) -> dict[str, Any]:
    """Race steps replayed from CUDA graphs against steps launched one by one, both ours."""
    setups = {name: terms.setup(algorithm) for name in ("graphs", "launches")}
    setups["launches"].cohort.executor.capture = False
    record = race_setups(terms, setups, {"launches": "graphs"})
    return record | {"captured": setups["graphs"].cohort.executor.capture}


def arguments(doc: str, name: str, minutes: float) -> argparse.ArgumentParser:
    """Return the options that both commands share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only cells whose name contains one of these words: mlr,step/cnn")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, fewer turns")
    parser.add_argument("--resume", action="store_true", help="skip the cells that this commit has raced already")
    parser.add_argument("--turns", type=int, help="how many rounds of every side are timed at most")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin no cell after this many minutes")
    parser.add_argument("--machine", default=name, help="the name of the machine's files: xeon, arm, h200")
    parser.add_argument("--commit", help="the version that is raced, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="results/speed to publish the race")
    return parser


class Book:
    """Hold the newest records of a machine's cells and the files that they are written to."""

    def __init__(self, path: Path, commit: str | None = None, resume: bool = False):
        self.path, self.resume, self.began = path, resume, time.perf_counter()
        described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        self.commit = commit or described.stdout.strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, name: str) -> bool:
        """Return whether this commit has raced a cell without an error."""
        return any(r["cell"] == name and r["commit"] == self.commit and "error" not in r for r in self.records)

    def add(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a cell, keep its record, which holds an error where the cell failed, and return it."""
        start = time.perf_counter()
        try:
            record = work()
        except Exception as error:  # the other cells are still worth having
            record = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        entry = {"cell": name, **record, "took": time.perf_counter() - start}
        self.enter(entry | {"date": str(datetime.date.today()), "commit": self.commit})
        outcome = record.get("error") or json.dumps(record.get("ratio", {}))
        print(f"{time.perf_counter() - self.began:6.0f} s  {name}: {outcome}", flush=True)
        return record

    def enter(self, record: dict[str, Any]) -> None:
        """Put a record in the place of the one that its cell had, and its ratios into the history."""
        newest = {r["cell"]: r for r in [*self.records, record]}.values()
        self.records = sorted(newest, key=lambda r: (KINDS.index(r["cell"].split("/")[0]), _place(r)))
        write(self.path, "".join(json.dumps(r) + "\n" for r in self.records))
        file = self.path.parent / "history.csv"
        with open(file, "a", newline="", encoding="utf-8") as lines:
            rows = csv.writer(lines, lineterminator="\n")
            if not lines.tell():
                rows.writerow(("date", "machine", "row", "ratio", "commit"))
            for row, ratio in ratios(record).items():
                rows.writerow((record["date"], self.path.stem, row, f"{ratio:.4g}", record["commit"]))

    def of(self, name: str) -> dict[str, Any] | None:
        """Return the record of a cell, or None where it failed or was not raced."""
        return next((r for r in self.records if r["cell"] == name and "error" not in r), None)


def _place(record: dict[str, Any]) -> tuple[int, bool, str]:
    model = record.get("workload")
    return MODELS.index(model) if model in MODELS else len(MODELS), "fedabml" in record["cell"], record["cell"]


def ratios(record: dict[str, Any]) -> dict[str, float]:
    """Return the rows of history.csv that a record gives, each with its ratio."""
    if record.get("kind") == "peers":
        sides = dict(record["sides"])
        ours = sides.pop("ours", None)
        kinds = {"wall": "start to finish", "warm": "warm round"} if ours else {}
        return {
            f"{record['cell']}/{s} {title}": theirs[k] / ours[k]
            for s, theirs in sides.items()
            for k, title in kinds.items()
        }
    return {f"{record['cell']}{SIDES.get(s, f' {s}')}": ratio for s, ratio in record.get("ratio", {}).items()}


def execute(book: Book, todo: list[Cell], minutes: float, device: torch.device) -> list[str]:
    """Run the cells, less those to be skipped; return the names of those that there was no time for."""
    left = []
    for name, work in todo:
        if book.resume and book.has(name):
            continue
        if time.perf_counter() - book.began > 60 * minutes:
            left.append(name)
            continue
        book.add(name, work)
        clear(device)
    if left:
        print(f"{len(left)} cell(s) were not begun within {minutes:g} minutes; --resume goes on: {', '.join(left)}")
    return left


def chosen(races: Iterable[Cell], only: str | None) -> list[Cell]:
    """Return the cells that --only selects."""
    parts = only.split(",") if only else [""]
    return [cell for cell in races if any(part in cell[0] for part in parts)]


def opening(book: Book, device: torch.device, dtypes: tuple[str, ...]) -> None:
    """Record the machine and its ceilings, in operations and bytes per second."""
    book.add("machine", lambda: {"machine": machine(device), "ceilings": ceilings(device, dtypes)})


def floor(record: Mapping[str, Any], ceiling: Mapping[str, float]) -> tuple[float, str]:
    """Return the least seconds of a step on a machine with these ceilings, and which of the two binds."""
    line = record["roofline"]
    by = {"operations": line["flops"] / ceiling[record["dtype"]], "bytes": line["bytes"] / ceiling["bytes"]}
    binding = max(by, key=lambda name: by[name])
    return by[binding], binding


def rooflines(records: Sequence[table.Record], ceiling: Mapping[str, float]) -> table.MarkdownTable:
    """Return the least that a step costs on a machine with these ceilings, beside what it took."""
    columns: tuple[table.Column, ...] = (
        *(table.WORKLOAD, table.ALGORITHM, table.PRECISION),
        ("GFLOP", lambda r: f"{r['roofline']['flops'] / 1e9:.3g}"),
        ("MB", lambda r: f"{r['roofline']['bytes'] / 1e6:.3g}"),
        ("at the least", lambda r: table.duration(floor(r, ceiling)[0])),
        ("bound by", lambda r: floor(r, ceiling)[1]),
        ("measured", lambda r: table.duration(r["roofline"]["seconds"])),
        ("reached", lambda r: f"{100 * floor(r, ceiling)[0] / r['roofline']['seconds']:.2g} %"),
    )
    speeds = ", ".join(f"{v / 1e12:.3g} TFLOP/s {k}" for k, v in ceiling.items() if k != "bytes")
    title = f"A step of the whole cohort against this machine's ceilings ({speeds}; {ceiling['bytes'] / 1e9:.3g} GB/s)"
    return table.MarkdownTable.of(title, columns, records)


def closing(book: Book) -> None:
    """Write the page of a machine's records and print it."""
    host = book.of("machine") or {"machine": {}, "ceilings": None, "commit": None}
    facts = ", ".join(f"{k} {v}" for k, v in host["machine"].items() if k not in ("fedabml", "load"))
    good, failed = [r for r in book.records if "error" not in r], [r for r in book.records if "error" in r]
    parts = [
        f"# Speed on {TITLES.get(book.path.stem, book.path.stem)}\n",
        f"Machine: {facts}. Every row is the last race of that row.\n",
    ]
    parts += [each.markdown() for each in table.tables(good)]
    # A machine's ceilings change from day to day, so they are held against the races of the same day's commit alone.
    same = [r for r in good if r.get("kind") == "loop" and r["commit"] == host["commit"]]
    if same and host["ceilings"]:
        parts.append(rooflines(same, host["ceilings"]).markdown())
    if peers := [r for r in good if r.get("kind") == "peers"]:
        parts += ["## Other libraries, FedAvg, a process each\n", rivals.table(peers), ""]
    workloads = {r["workload"]: r["said"] for r in good if "said" in r}
    parts += ["## Workloads\n", *(f"- `{name}`: {text}" for name, text in workloads.items()), ""]
    when: dict[str, list[str]] = {}
    for r in good:
        when.setdefault(f"{r['date']}, commit {r['commit'] or 'not recorded'}", []).append(f"`{r['cell']}`")
    parts += [
        "## When each row was raced\n",
        *(f"- {day}: {', '.join(cells)}" for day, cells in sorted(when.items())),
        "",
    ]
    if failed:
        parts += ["## Cells that failed\n", *(f"- {r['cell']}: {r['error']}" for r in failed), ""]
    text = "\n".join(parts)
    write(book.path.with_suffix(".md"), text)
    print(text)
    print(f"written: {book.path.with_suffix('.md')} and {book.path}")
