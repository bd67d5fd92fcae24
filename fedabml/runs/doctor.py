"""What this machine has, what a run would do on it and why, and roughly how long that takes and how much it needs."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accel.c_library import compiler
from ..accel.machine import free_bytes
from ..accel.process import uses_arm_library
from ..algorithms.base import Phase
from ..data import Federation
from ..data.files import data_dir
from ..data.rows import Rows
from ..data.sources import datasets
from ..engine.autotune import COARSE
from ..engine.executor import Executor, padding, segments
from ..engine.minibatches import steps_of
from ..engine.rounds import Simulation
from ..engine.server import cohort_size, draw_clients
from ..engine.setting import Cohort
from ..errors import InputError
from ..evaluation.scoring import Entry, evaluate_after
from ..files.limits import host_memory
from ..version import __version__
from .folder import Folder
from .prepare import Setup, resolve_split
from .summary import peak_memory

EXTRAS = {
    "pandas": "tables (CSV): pip install 'fedabml[tables]'",
    "pyarrow": "tables (Parquet): pip install 'fedabml[tables]'",
    "optuna": "fedabml tune: pip install 'fedabml[tune]'",
}
Facts = list[tuple[str, str]]


def versions() -> Facts:
    """What is installed."""
    rows = [
        ("fedabml", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"),
        ("torch", torch.__version__ + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA")),
        ("numpy", np.__version__),
    ]
    return rows + [(name, _version(name) or f"not installed; for {what}") for name, what in EXTRAS.items()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> tuple[Facts, list[str]]:
    """Processors, memory, accelerators; and what is wrong with them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows, notes = [("CPU", f"{cores} core(s) for this process, {torch.get_num_threads()} thread(s) of torch")], []
    total, free = host_memory()
    if total:
        rows.append(("memory", f"{_size(total)}, {_size(free)} free"))
    found = compiler()
    rows.append(
        ("C compiler", f"{found[0]}: large steps on the CPU are fused" if found else "none: the CPU's steps are slower")
    )
    if torch.get_num_threads() < cores:
        notes.append(
            f"torch uses {torch.get_num_threads()} of {cores} cores: OMP_NUM_THREADS or torch.set_num_threads."
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        notes.append(f"The machine is busy: a load of {load:.1f} on {cores} core(s). Runs and estimates will be slow.")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if not torch.version.cuda else "no driver or no device is to be seen"
        return [*rows, ("GPU", f"none: {why}")], notes
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        rows.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, {_size(total)}, {_size(free)} free"))
    problem = graphs()
    rows.append(("CUDA graphs", problem or "usable: small steps are launched at once"))
    fused = find_spec("triton") is not None
    rows.append(("noise", "one kernel (Triton)" if fused else "plain tensor operations (no Triton here)"))
    if problem:
        notes.append(f"CUDA graphs do not work here, so small models will be several times slower: {problem}")
    return rows, notes


def graphs() -> str:
    """Why CUDA graphs cannot be used; empty where they can."""
    try:
        x = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if x[0].item() == 1 else "a replayed graph gave a wrong result"


def stored(folder: str | None) -> Facts:
    """Where datasets lie, and which are there."""
    known = datasets(folder)
    here = [d["name"] for d in known if d["present"]]
    absent = [d["name"] for d in known if not d["present"]]
    rows = [("data folder", str(data_dir(folder))), ("datasets here", ", ".join(here) or "none")]
    return rows + ([("not yet", f"{', '.join(absent)} (fedabml data get NAME)")] if absent else [])


def choices(setup: Setup, asked: dict[str, Any]) -> Facts:
    """What was decided for a run, and why. `asked` are the words of its configuration."""
    cohort = setup.cohort
    algorithm, device = cohort.algorithm, cohort.device
    if asked.get("device", "auto") != "auto":
        why = "asked for"
    else:
        why = "auto: the accelerator" if device.type == "cuda" else "auto: there is no accelerator"
    if asked.get("backend", "auto") != "auto":
        how = "asked for"
    elif any("cannot be batched" in note for note in setup.notes):
        how = "auto: this model cannot be batched over clients"
    elif device.type == "cuda":
        how = "auto: one batched program for all clients of a chunk"
    else:
        how = "auto: the faster of the two here for this model" + (
            ", all clients of a chunk in one batched program" if cohort.backend == "vmap" else ", client after client"
        )
    meaning = {
        "float32": "true float32; a GPU's TF32 is off, so that it agrees with a CPU",
        "tf32": "a GPU's products are rounded to 10 bits: faster, three digits",
        "bf16": "the network in bfloat16, two digits; posteriors, noise and averages in float32",
        "float64": "for checks; slow on most accelerators",
    }
    dtype, told = setup.config["dtype"], asked.get("dtype")
    rows = [
        ("device", f"{device} ({why})"),
        ("backend", f"{cohort.backend} ({how}{', images channels-last' * cohort.network.channels_last})"),
        *([("threads", _threads(cohort.workers))] if device.type == "cpu" else []),
        (
            "precision",
            _exactly(told) if told in COARSE and algorithm.needs_full_precision else f"{dtype} ({meaning[dtype]})",
        ),
    ]
    if device.type == "cpu" and uses_arm_library() and not torch._C._get_mkldnn_enabled():
        rows.append(("products", "torch's own: oneDNN, slow with small ones on ARM, is off in this process"))
    hyper = algorithm.values()
    if "s" in hyper:
        kind = hyper.get("estimator", "weight")
        told = {
            "weight": "whole weight vectors are drawn",
            "local": "noise on the outputs of Linear layers, flipout on others: the same expectation, less variance",
            "flipout": "noise with random signs per example: the same expectation, less variance",
        }
        rows.append(
            ("estimator", f"{kind}, {hyper['s']} sample(s) per gradient ({told.get(kind, 'see the algorithm')})")
        )
    rows.append(("samples", "on the host, moved to the device when needed" if cohort.data.hosted else "on the device"))
    rows.append(("steps", _played(cohort.executor)))
    return rows


def _exactly(asked: Any) -> str:
    return f"float32 (not {asked}: the algorithm takes small differences of gradients)"


def _played(executor: Executor) -> str:
    fused = ", compiled (the first round waits for that)" * executor.compile
    fused += f", compiled after round {executor.policy.decide_round} if that pays" * executor.undecided
    if executor.capture:
        return f"CUDA graphs, replayed{fused}"
    if not executor.record:
        return "launched one by one"
    quick = "; large ones fused by the C compiler" if compiler() and not executor.compile else ""
    return f"recorded once they have come {executor.policy.record_after} times, and played back{fused or quick}"


class Estimate(NamedTuple):
    """What a run will take, roughly."""

    step: float  # seconds of one step of a chunk
    lanes: int  # clients of a round that are in a chunk
    around: float  # of a round, before and after its steps
    round: float
    saving: float  # a round's checkpoint and its line of the history
    personal: float  # personalising every client once
    predicting: float  # the predictions for their samples, the server's own model's among them, and their measures
    total: float  # training, saving and scoring
    padding: float  # share of the steps taken that belong to clients that are done
    short: float  # share of a batch that is padding
    bytes: int  # of data and a chunk
    process: int  # that this process had taken at most before the trial: Python, torch and what was loaded
    most: int  # of the host's memory in all
    free: int

    @property
    def scoring(self) -> float:
        """Personalising and scoring every client once."""
        return self.personal + self.predicting


ROUNDS = 10  # whose plans are looked at
FEW, MORE = 1, 4  # minibatches of a trial, times those of a step
BRIEF, PATIENCE = 0.5, 8.0  # seconds: of a trial that may be repeated with more of them; of all rounds of a trial
GLANCE, LOOK = 4, 2.0  # samples of a client that are predicted at first; seconds that a look at more may take
SAVES = 3  # of a round, the median counts


def estimate(setup: Setup, scored: float) -> Estimate:
    """Times a few real steps of a chunk of clients, and reckons the rest; `scored` is how often clients are scored.

    The trial trains the clients of the first round on a minibatch each until it goes as fast as it will, and throws the
    result away. Where that takes a moment it does the same on four: what does not grow with the steps comes with a
    round. Predictions are timed on a few samples of each client of a chunk, saving in a folder that is removed again.
    """
    process = _peak()
    cohort, fed = setup.cohort, setup.cohort.fed
    drawn = draw_clients(fed.clients, setup.participation, cohort.seed, 1)
    phases = cohort.algorithm.phases(setup.epochs)
    few, more = (_short(fed, n * max(p.batches for p in phases) * cohort.batch_size) for n in (FEW, MORE))
    elapsed, chunk = _trial(setup, few)
    lanes = min(chunk, len(drawn))
    chunks = -(-len(drawn) // lanes)
    least, most = (int(_steps(cohort, short, drawn, phases).max()) for short in (few, more))
    step, around = elapsed / (least * chunks), 0.0
    if elapsed < BRIEF and most > least:
        longer, _ = _trial(setup, more)
        step = max((longer - elapsed) / ((most - least) * chunks), 0.1 * step)
        around = max(0.0, elapsed / chunks - least * step)
    executor, gpu = cohort.executor, cohort.device.type == "cuda"

    def cost(now: int) -> float:
        """Of a step of fewer or more clients: in proportion, but that few small ones are hardly faster on a GPU."""
        return step * (max(1.0, now / lanes) if gpu and not executor.heavy else now / lanes)

    reckoned = lambda steps, lanes: _reckoned(steps, lanes, cost, around, executor.smallest_batch)  # noqa: E731
    rounds = []
    for t in range(min(ROUNDS, max(1, setup.rounds))):
        clients = draw_clients(fed.clients, setup.participation, cohort.seed, t + 1)
        rounds.append(reckoned(_steps(cohort, fed, clients, phases), lanes))
    per_round = float(np.mean([seconds for seconds, _ in rounds]))
    personal = [phase for phase in cohort.algorithm.personal_phases() if phase.epochs]
    personal_seconds = reckoned(_steps(cohort, fed, range(fed.clients), personal), chunk)[0] if personal else 0.0
    sim = Simulation(cohort.among(few, chunk=chunk))
    saving, predicting = _saving(sim, sim.step()), _predicting(sim) if scored else 0.0
    counts = fed.train.counts.astype(float)
    width = min(cohort.batch_size, int(counts.max()))
    batches = np.ceil(counts / width)
    work = setup.lane * min(chunk, cohort_size(fed.clients, setup.participation))
    widest = setup.lane * min(chunk, fed.clients) + _flight(cohort, chunk) if scored else work
    return Estimate(
        step=step,
        lanes=lanes,
        around=around * chunks,
        round=per_round,
        saving=saving,
        personal=personal_seconds,
        predicting=predicting,
        total=setup.rounds * (per_round + saving) + scored * (personal_seconds + predicting),
        padding=float(np.mean([waste for _, waste in rounds])),
        short=float(1 - counts.sum() / (batches.sum() * width)),
        bytes=(0 if cohort.data.hosted else fed.x.nbytes) + work,
        process=process,
        # Pages that are freed are kept, and recorded steps have room of their own: a chunk's comes twice.
        most=max(_peak(), process + (0 if gpu else 2 * widest)),
        free=free_bytes(cohort.device) * 2 if gpu else host_memory()[1],
    )


def _trial(setup: Setup, fed: Federation) -> tuple[float, int]:
    """Seconds of the first round with these data, once it goes as fast as it will, and how many clients run at once.

    That is fewer than planned, where memory did not suffice. Steps are recorded at once, as they are in a long run.
    """
    policy = dataclasses.replace(setup.cohort.place.policy, record_after=0)
    brief = setup.cohort.among(fed, policy=policy)
    sim = Simulation(brief)
    first = sim.server

    def timed() -> float:
        sim.return_to(first)
        start = time.perf_counter()
        sim.step()
        if brief.device.type == "cuda":
            torch.cuda.synchronize(brief.device)
        return time.perf_counter() - start

    timed()
    seconds = [timed()]
    while sum(seconds) < PATIENCE and not (brief.executor.settled and len(seconds) >= 4):
        seconds.append(timed())
    return float(np.median(seconds[-3:])), brief.chunk


def _saving(sim: Simulation, line: dict[str, Any]) -> float:
    """Seconds that saving a round takes, beside the folder where runs are kept if that can be written to."""
    here = "." if os.access(".", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix=".fedabml-doctor-", dir=here) as place:
            folder = Folder(Path(place))
            return float(np.median([_seconds(lambda: sim.save(folder.write_round, line)) for _ in range(SAVES)]))
    except (OSError, InputError):  # no space, say: the run will tell
        return 0.0


def _predicting(sim: Simulation) -> float:
    """Seconds that scoring takes beside personalising, from that of a chunk of clients on a few samples of each.

    More samples follow where they take a moment: what does not grow with them comes with every chunk.
    """
    cohort, fed = sim.cohort, sim.cohort.fed
    split = resolve_split(fed, "auto")
    counts = fed.rows(split).counts
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    lanes = min(cohort.chunk, len(counts))

    def scored(rows: int, epochs: int = 0) -> float:
        brief = cohort.among(_short(fed, rows, split))
        entry = Entry(brief, sim.theta, sim.kept_for, sim.round, most=lanes)
        times = 1 if brief.device.type == "cpu" else 2  # a GPU's programs are captured in the first
        return [_seconds(lambda: evaluate_after((epochs,), [entry], split, prior=epochs)) for _ in range(times)][-1]

    few = min(GLANCE, int(counts.max()))
    scored(few, min(1, cohort.algorithm.personal_epochs))  # what is done but once, and the memory of it all
    elapsed = scored(few)
    more = min(cohort.place.policy.rows_per_lane, int(counts.max()), int(few * LOOK / elapsed))
    each, around = elapsed / (few * lanes), 0.0
    if more > few:
        longer = scored(more)
        each = max((longer - elapsed) / ((more - few) * lanes), 0.1 * longer / (more * lanes))
        around = max(0.0, longer - each * more * lanes)
    width = -(-lanes // cohort.workers)  # of what is padded to its largest client
    cells = sum(len(part) * int(part.max()) for part in (counts[i : i + width] for i in range(0, len(counts), width)))
    return around * len(counts) / lanes + each * cells


def _flight(cohort: Cohort, chunk: int) -> int:
    """Bytes of the samples that a CPU predicts at once when clients are scored: raw, normalised, and in the network."""
    fed = cohort.fed
    lanes, inputs, activations = min(chunk, fed.clients), math.prod(fed.x.shape[1:]), max(1, cohort.network.activations)
    policy = cohort.place.policy
    rows = max(policy.rows_per_lane, policy.activations_on_cpu // activations // lanes)
    rows = min(rows, int(fed.rows(resolve_split(fed, "auto")).counts.max()))
    return lanes * rows * (2 * inputs + activations) * cohort.dtype.itemsize


def _peak() -> int:
    return peak_memory() or 0


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _steps(cohort: Cohort, fed: Federation, clients: Iterable[int], phases: Sequence[Phase]) -> np.ndarray:
    """How many steps each of some clients takes in all phases."""
    counts = fed.train.counts[list(clients)]
    width = min(cohort.batch_size, int(fed.train.counts.max()))
    return np.sum([steps_of(counts, p.epochs, width, p.batches) for p in phases if p.epochs], 0)


def _reckoned(
    steps: np.ndarray, lanes: int, cost: Callable[[int], float], around: float, least: int
) -> tuple[float, float]:
    """Seconds of these clients' work, `lanes` at a time, and the share of it that is padding."""
    seconds, wastes = around * -(-len(steps) // lanes), []
    for first in range(0, len(steps), lanes):
        part = np.sort(steps[first : first + lanes])[::-1]
        seconds += sum((cut.last - cut.first) * cost(cut.lanes) for cut in segments(part, least))
        wastes.append(padding(part, least))
    return seconds, float(np.mean(wastes))


def _short(fed: Federation, rows: int, split: str = "train") -> Federation:
    """The same clients with at most so many samples of a split."""
    whole = fed.rows(split)
    counts = np.minimum(whole.counts, rows)
    ends = np.cumsum(counts)
    offsets = np.concatenate([[0], ends])
    place = np.arange(int(ends[-1])) - np.repeat(offsets[:-1], counts) + np.repeat(whole.offsets[:-1], counts)
    parts: dict[str, Any] = {split: Rows(whole.index[place], offsets)}
    return replace(fed, **parts)


def _threads(workers: int) -> str:
    if workers == 1:
        return f"{torch.get_num_threads()}, all on the same clients"
    return f"{workers}, each with clients of its own (faster here for this model)"


def _size(count: float) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
