"""Sides timed in turns in one run, what they must agree in, and what the machine could do at best."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..algorithms import Algorithm, FedABML, FedAvg
from ..data import Federation
from ..engine.autotune import dtype_of
from ..engine.rounds import Simulation, run_rounds
from ..errors import TrainingError
from ..runs.prepare import Setup, prepare
from ..runs.provenance import hardware
from ..version import __version__
from .loop import KNOWN, Loop, best_format
from .workloads import Workload

# How far two first rounds' losses may lie apart, relatively, for the arithmetic to count as the same.
AGREE = {"float64": 1e-9, "float32": 1e-4, "tf32": 1e-2}
COARSE = 3e-2  # products of eight bits
HALF = ("bf16", "bfloat16")
BLOCK = 50  # rounds timed together at most


class Side(Protocol):
    """Something that trains the rounds of a federation."""

    def prepare(self) -> None:
        """What is not timed."""

    def step(self) -> float:
        """A round, to its end; its mean loss."""


class Engine:
    """Our side."""

    def __init__(self, setup: Setup):
        self.device, self.many = setup.cohort.device, 1
        self.simulation = Simulation(setup.cohort)

    def prepare(self) -> None:
        """Nothing: shuffles are part of a round here."""

    def step(self) -> float:
        """A round."""
        loss = self.simulation.step()["loss"]
        wait(self.device)
        return float(loss)

    def timed(self) -> float:
        """Seconds that a round takes, one of `many`: on a GPU the next begins before the last is over."""
        sim, rounds = self.simulation, self.simulation.round + self.many

        def run() -> None:
            for _, told in run_rounds([sim], rounds, lambda round: round == rounds):
                if isinstance(told[0], TrainingError):
                    raise told[0]
            wait(self.device)

        return _seconds(run) / self.many


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- algorithms -------------------------------------------------------------------------------------------------------
def weight_samples(lr: float, s: int = 5) -> FedABML:
    """FedABML with s whole samples of the weights, the paper's estimator: what the loop does, too."""
    names = {f.name for f in dataclasses.fields(FedABML)}
    return FedABML(lr=lr, s=s, **{name: value for name, value in KNOWN.items() if name in names})


def algorithms(lr: float) -> dict[str, Algorithm]:
    """What is timed: the loop knows the first two."""
    return {
        "fedavg": FedAvg(lr=lr),
        "fedabml5": weight_samples(lr),
        "fedabml": FedABML(lr=lr),
        "fedabml-batch": FedABML(lr=lr, prior_every="batch", rho=0.5),
    }


TITLES = {
    "fedavg": "FedAvg",
    "fedabml5": "FedABML, s=5",
    "fedabml": "FedABML, default",
    "fedabml-batch": "FedABML, default, and a θ-step per minibatch",
}


def setup_of(
    work: Workload, fed: Federation, algorithm: Algorithm, device: str, dtype: str, compile: bool = False
) -> Setup:
    """A workload made ready for our engine."""
    return prepare(
        fed, work.network(), algorithm, rounds=1, participation=work.cohort / work.clients, epochs=work.epochs,
        batch_size=work.batch, device=device, dtype=dtype, compile=compile,
    )  # fmt: skip


# -- a race -----------------------------------------------------------------------------------------------------------
class Times(NamedTuple):
    """Of one side: seconds from nothing to the end of the first round, of every later round, and the first's loss."""

    first: float
    warm: list[float]
    loss: float

    @property
    def round(self) -> float:
        """The median of the warm rounds."""
        return statistics.median(self.warm)


class Runner(NamedTuple):
    """How a side is made, and the process-wide settings it runs under."""

    make: Callable[[], Side]
    arrange: Callable[[], object]


def race(runners: Mapping[str, Runner], device: torch.device, turns: int, budget: float) -> dict[str, Times]:
    """Times all sides in turns, each turn beginning with another one, until the turns or the seconds are over.

    At least two turns are taken.
    """
    sides, found = {}, {}
    for name, runner in runners.items():
        runner.arrange()
        wait(device)
        start = time.perf_counter()
        sides[name] = runner.make()
        sides[name].prepare()
        loss = sides[name].step()
        found[name] = Times(time.perf_counter() - start, [], loss)
        sides[name].prepare()
        once, side = _seconds(sides[name].step), sides[name]  # not timed: on a CPU steps are recorded in it
        if device.type == "cuda" and isinstance(side, Engine):
            side.many = min(BLOCK, max(1, int(0.1 / once)))
    names, began = list(runners), time.perf_counter()
    for turn in range(turns):
        if turn >= 2 and time.perf_counter() - began > budget:
            break
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            runners[name].arrange()
            sides[name].prepare()
            wait(device)
            side = sides[name]
            found[name].warm.append(side.timed() if isinstance(side, Engine) else _seconds(side.step))
    return found


def tuned(device: torch.device, dtype: str) -> None:
    """The settings of the loop: our precision, but cuDNN may choose what is fastest, repeatable or not."""
    dtype_of(dtype, device)
    if device.type == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True


def contest(
    work: Workload,
    fed: Federation,
    algorithm: Algorithm,
    *,
    device: torch.device,
    dtype: str = "float32",
    compile: bool = False,
    turns: int = 5,
    budget: float = 30.0,
) -> dict[str, Any]:
    """Our engine against the eager loop: a record for a table. Their first rounds' losses must agree.

    FedABML also runs with noise on activations, where there is such an estimator; `compile` adds our engine compiled.
    Products of eight bits (bf16) are raced against the loop in float32 and against the loop under autocast.
    """
    half = dtype in HALF
    exact = "float32" if half else dtype
    start = time.perf_counter()
    ours = setup_of(work, fed, algorithm, str(device), dtype)
    ready = time.perf_counter() - start
    theirs = setup_of(work, fed, algorithm, str(device), exact) if half else ours
    settle = lambda: tuned(device, exact)  # noqa: E731
    settle()
    last = best_format(theirs)
    runners = {
        "ours": Runner(lambda: Engine(ours), lambda: dtype_of(dtype, device)),
        "loop": Runner(lambda: Loop(theirs, channels_last=last), settle),
    }
    if isinstance(algorithm, FedAvg):
        runners["loop_sgd"] = Runner(lambda: Loop(theirs, channels_last=last, optimiser=True), settle)
    if half:
        better = best_format(theirs, torch.bfloat16)
        runners["loop_bf16"] = Runner(lambda: Loop(theirs, channels_last=better, autocast=torch.bfloat16), settle)
    if isinstance(algorithm, FedABML) and "estimator" in algorithm.values():
        cheap = setup_of(work, fed, dataclasses.replace(algorithm, estimator="local"), str(device), dtype)
        runners["local"] = Runner(lambda: Engine(cheap), lambda: dtype_of(dtype, device))
    if compile:
        fused = setup_of(work, fed, algorithm, str(device), dtype, compile=True)
        runners["compiled"] = Runner(lambda: Engine(fused), lambda: dtype_of(dtype, device))
    times = race(runners, device, turns, budget)
    times["ours"] = times["ours"]._replace(first=ready + times["ours"].first)
    loss = times["loop"].loss
    if isinstance(algorithm, FedABML) or ours.cohort.network.dropout:  # only then is there noise to be made the same
        settle()
        check = Loop(theirs, keyed=True, channels_last=last)
        check.prepare()
        loss = check.step()
    apart = abs(loss - times["ours"].loss) / abs(loss)
    record = told(work, ours, dtype, times) | {"losses": [times["ours"].loss, loss], "apart": apart}
    record["agree"] = bool(apart <= (COARSE if half else AGREE[dtype]))
    record["channels_last"] = last
    record["ratio"] = {n: t.round / times["ours"].round for n, t in times.items() if n.startswith("loop")}
    for name in ("local", "compiled"):  # ours, too; the loop has no noise on activations, of the same expectation
        if name in times:
            record["ratio"][name] = times["loop"].round / times[name].round
    record["roofline"] = roofline(work, theirs, times["ours"].round / work.steps)
    return record


def steps_of(
    work: Workload,
    fed: Federation,
    *,
    device: torch.device,
    dtype: str = "float32",
    compile: bool = False,
    turns: int = 5,
    budget: float = 30.0,
) -> dict[str, Any]:
    """What a FedABML step costs beside a FedAvg step, both ours, at FedABML's defaults: a record for a table.

    `compile` adds all of them compiled.
    """
    runners, known = {}, algorithms(work.lr)
    raced = [name for name in known if name != "fedabml5"]
    setups = {name: setup_of(work, fed, known[name], str(device), dtype) for name in raced}
    for name in raced if compile else ():
        setups[f"{name} compiled"] = setup_of(work, fed, known[name], str(device), dtype, compile=True)
    for name, setup in setups.items():
        make = lambda setup=setup: Engine(setup)  # noqa: E731
        runners[name] = Runner(make, lambda: dtype_of(dtype, device))
    times = race(runners, device, turns, budget)
    record = told(work, setups["fedabml"], dtype, times)
    of = lambda name, kind: times[name + kind].round / times["fedavg" + kind].round  # noqa: E731
    kinds = ("", " compiled") if compile else ("",)
    record["ratio"] = {name + kind: of(name, kind) for kind in kinds for name in ("fedabml", "fedabml-batch")}
    record["hyper"] = {k: v for k, v in setups["fedabml"].cohort.algorithm.values().items() if k in ("s", "estimator")}
    return record


def graphs_of(
    work: Workload,
    fed: Federation,
    algorithm: Algorithm,
    *,
    device: torch.device,
    dtype: str = "float32",
    turns: int = 5,
    budget: float = 30.0,
) -> dict[str, Any]:
    """Steps replayed from CUDA graphs against steps launched one by one, both ours: a record for a table."""
    setup = setup_of(work, fed, algorithm, str(device), dtype)
    setups = {"graphs": setup, "launches": dataclasses.replace(setup, cohort=setup.cohort.at(graphs=False))}
    runners = {
        name: Runner(lambda setup=setup: Engine(setup), lambda: dtype_of(dtype, device))  # type: ignore[misc]
        for name, setup in setups.items()
    }
    times = race(runners, device, turns, budget)
    record = told(work, setups["graphs"], dtype, times)
    record["ratio"] = {"launches": times["launches"].round / times["graphs"].round}
    return record | {"captured": setup.cohort.executor.capture}


def told(work: Workload, setup: Setup, dtype: str, times: Mapping[str, Times]) -> dict[str, Any]:
    """What every record says."""
    return {
        "workload": work.name,
        "said": work.said,
        "steps": work.steps,
        "dtype": dtype,
        "backend": setup.cohort.backend,
        "chunk": setup.cohort.chunk,
        "parameters": setup.cohort.network.layout.size,
        "first": {name: t.first for name, t in times.items()},
        "warm": {name: t.round for name, t in times.items()},
        "rounds": {name: t.warm for name, t in times.items()},
    }


def clear(device: torch.device) -> None:
    """Gives memory back between two races."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- ceilings -------------------------------------------------------------------------------------------------------
def roofline(work: Workload, setup: Setup, step: float) -> dict[str, float]:
    """Operations and bytes of a step of the whole cohort, at the least.

    Operations: the products of the forward and backward passes, counted by torch. Bytes: weights (for a Gaussian
    posterior its two vectors, both read and written, and the prior's two) once each way, inputs read, outputs of layers
    with weights written and read once; sampled weights and noise need never leave the chip, so they are not counted.
    """
    cohort = setup.cohort
    loop = Loop(setup)
    loop.prepare()
    client, made = loop.next[0], list[int]()
    own = cohort.data.batch(client.own)
    x, y = own.x[client.steps[0]], own.y[client.steps[0]]
    hooks = [
        m.register_forward_hook(lambda m, args, out: made.append(out.numel()))
        for m in loop.module.modules()
        if any(True for _ in m.parameters(recurse=False))
    ]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(loop.loss(x, y, None, None), loop.params)
    for hook in hooks:
        hook.remove()
    samples = cohort.algorithm.samples_per_step
    vectors = 6 if isinstance(cohort.algorithm, FedABML) else 2
    numbers = vectors * cohort.network.layout.size + x.numel() + 2 * samples * sum(made)
    return {
        "flops": float(counter.get_total_flops() * work.cohort * samples),
        "bytes": float(numbers * work.cohort * cohort.network.initial.element_size()),
        "seconds": step,
    }


def ceilings(device: torch.device, dtypes: tuple[str, ...] = ("float32",)) -> dict[str, float]:
    """What this machine reaches: a large matrix product in operations per second, a large copy in bytes per second."""
    big = device.type == "cuda"
    found = {}
    side = 8192 if big else 2048
    for dtype in dtypes:
        kind = torch.bfloat16 if dtype in HALF else torch.float64 if dtype == "float64" else torch.float32
        dtype_of("float32" if dtype in HALF else dtype, device)
        random = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(side, side, device=device, generator=random).to(kind) for _ in range(2))
        out = torch.empty_like(a)
        found[dtype] = 2 * side**3 / _best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
    source = torch.ones((1 << 32 if big else 1 << 28) // 4, device=device)
    target = torch.empty_like(source)
    found["bytes"] = 2 * source.numel() * 4 / _best(lambda: target.copy_(source), device)
    return found


def _best(work: Callable[[], object], device: torch.device, times: int = 6) -> float:
    seconds = []
    for _ in range(times):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def floor(record: Mapping[str, Any], ceiling: Mapping[str, float]) -> tuple[float, str]:
    """The least seconds a step could take on a machine with these ceilings, and which of the two binds."""
    line = record["roofline"]
    by = {"operations": line["flops"] / ceiling[record["dtype"]], "bytes": line["bytes"] / ceiling["bytes"]}
    binding = max(by, key=lambda name: by[name])
    return by[binding], binding


def machine(device: torch.device) -> dict[str, Any]:
    """Where a measurement was made."""
    facts: dict[str, Any] = {
        "fedabml": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": hardware(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan,
    }
    if device.type == "cuda":
        facts["gpu"] = hardware(device)
    return facts
