"""Races: sides that train the same rounds in turns, in one process; and what the machine could do at best.

Every race returns a record, a dictionary for one line of JSON, which `table` shows. Its keys: `first`, `warm` and
`rounds` (seconds by side: of the first round with everything before it, the median of warm rounds, all of them),
`ratio` (how many times faster ours is), and what names the workload.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import accel
from ..accel.machine import hardware
from ..algorithms import Algorithm, FedABML, FedAvg
from ..data import Federation
from ..engine.autotune import set_precision
from ..engine.rounds import Simulation, run_rounds
from ..errors import TrainingError
from ..runs.prepare import Setup, prepare
from ..version import __version__
from .loop import IMPLEMENTED, Loop, best_format
from .workloads import Workload

# How far the first rounds' mean losses may differ, relatively, for the arithmetic to count as the same.
AGREE = {"float64": 1e-9, "float32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "bfloat16": 3e-2}
HALF = ("bf16", "bfloat16")
BLOCK = 50  # rounds timed together at most
SETTLE = 30.0  # seconds to wait at most for recorded steps to be compiled
TITLES = {
    "fedavg": "FedAvg",
    "fedabml5": "FedABML, s=5",
    "fedabml": "FedABML, default",
    "fedabml-batch": "FedABML, default, and a θ-step per minibatch",
}


def weight_samples(lr: float, s: int = 5) -> FedABML:
    """Return FedABML with s samples of all weights, the paper's estimator, which the loop computes, too."""
    names = {f.name for f in dataclasses.fields(FedABML)}
    return FedABML(lr=lr, s=s, **{name: value for name, value in IMPLEMENTED.items() if name in names})


def algorithms(lr: float) -> dict[str, Algorithm]:
    """Return the algorithms that are timed, by the names in `TITLES`; the loop computes the first two."""
    batch = FedABML(lr=lr, prior_every="batch", rho=0.5)
    return dict(zip(TITLES, (FedAvg(lr=lr), weight_samples(lr), FedABML(lr=lr), batch), strict=True))


def setup_of(
    work: Workload, fed: Federation, algorithm: Algorithm, device: str, dtype: str, compile: bool = False
) -> Setup:
    """Return a workload prepared for our engine."""
    return prepare(
        fed, work.network(), algorithm, rounds=1, participation=work.cohort / work.clients, epochs=work.epochs,
        batch_size=work.batch, device=device, dtype=dtype, compile=compile,
    )  # fmt: skip


# -- a race -----------------------------------------------------------------------------------------------------------
class Engine:
    """Trains the rounds of a race with our engine.

    On a GPU a `block` of rounds is timed together, because the next begins before the last is over.
    """

    def __init__(self, setup: Setup):
        self.device, self.block = setup.cohort.device, 1
        self.executor = setup.cohort.executor
        self.simulation = Simulation(setup.cohort)

    def prepare(self) -> None:
        """Do nothing: drawing clients and shuffling are part of a round here."""

    def step(self) -> float:
        """Train one round to its end and return its mean loss."""
        loss = self.simulation.step()["loss"]
        synchronize(self.device)
        return float(loss)

    def warm_up(self) -> None:
        """Train rounds until steps are recorded and compiled where they will be; choose how many rounds are timed."""
        once, began = _seconds(self.step, self.device), time.perf_counter()
        if self.device.type == "cuda":
            self.block = min(BLOCK, max(1, int(0.1 / once)))
        while not self._is_warm() and time.perf_counter() - began < SETTLE:
            self.step()

    def _is_warm(self) -> bool:
        runs_needed = self.executor.policy.record_after
        return self.executor.settled and all(count >= runs_needed for count in self.executor.times_taken.values())

    def timed(self) -> float:
        """Return the seconds of a round, as the mean of a block; raises TrainingError if training diverges."""
        end = self.simulation.round + self.block

        def run() -> None:
            for _, results in run_rounds([self.simulation], end, lambda round: round == end):
                if isinstance(results[0], TrainingError):
                    raise results[0]

        return _seconds(run, self.device) / self.block


class Times(NamedTuple):
    """Holds the times of one side, in seconds, and the mean loss of its first round."""

    first: float  # from nothing to the end of the first round
    warm: list[float]
    cpu: list[float]  # processor time of the warm rounds, all threads together
    loss: float

    @property
    def round(self) -> float:
        """Return the median of the warm rounds."""
        return statistics.median(self.warm)


class Runner(NamedTuple):
    """Makes a side, and sets the process-wide settings that it runs under."""

    make: Callable[[], Engine | Loop]
    arrange: Callable[[], object]


def race(runners: Mapping[str, Runner], device: torch.device, turns: int, budget: float) -> dict[str, Times]:
    """Time all sides in turns, each turn beginning with another one, until `turns` or `budget` seconds are over.

    At least two turns are taken.
    """
    sides, times, names = dict[str, Engine | Loop](), dict[str, Times](), list(runners)
    for name, runner in runners.items():
        runner.arrange()
        synchronize(device)
        start = time.perf_counter()
        sides[name] = side = runner.make()
        side.prepare()
        loss = side.step()
        times[name] = Times(time.perf_counter() - start, [], [], loss)
        side.prepare()
        side.warm_up() if isinstance(side, Engine) else side.step()
    began = time.perf_counter()
    for turn in range(turns):
        if turn >= 2 and time.perf_counter() - began > budget:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            side = sides[name]
            runners[name].arrange()
            side.prepare()
            synchronize(device)
            cpu = time.process_time()
            times[name].warm.append(side.timed() if isinstance(side, Engine) else _seconds(side.step, device))
            times[name].cpu.append(time.process_time() - cpu)
    return times


class Terms(NamedTuple):
    """Holds what all sides of a race share, and prepares and times them."""

    work: Workload
    fed: Federation
    device: torch.device
    dtype: str = "float32"
    turns: int = 5
    budget: float = 30.0  # seconds
    compile: bool = False  # whether our engine is also raced compiled

    def setup(self, algorithm: Algorithm, compile: bool = False, dtype: str | None = None) -> Setup:
        """Return the workload prepared for our engine."""
        return setup_of(self.work, self.fed, algorithm, str(self.device), dtype or self.dtype, compile)

    def engine(self, setup: Setup) -> Runner:
        """Return our side, under the settings of its type."""
        return Runner(partial(Engine, setup), partial(set_precision, self.dtype, self.device))

    def race(self, runners: Mapping[str, Runner]) -> dict[str, Times]:
        """Time the sides that `runners` make, by name."""
        return race(runners, self.device, self.turns, self.budget)

    def record(self, setup: Setup, times: Mapping[str, Times]) -> dict[str, Any]:
        """Return the entries that the records of all races have."""
        return {
            "workload": self.work.name,
            "said": self.work.description,
            "steps": self.work.steps,
            "dtype": self.dtype,
            "backend": setup.cohort.backend,
            "chunk": setup.cohort.chunk,
            "parameters": setup.cohort.network.layout.size,
            "first": {name: t.first for name, t in times.items()},
            "warm": {name: t.round for name, t in times.items()},
            "rounds": {name: t.warm for name, t in times.items()},
        }


def race_loop(terms: Terms, algorithm: Algorithm) -> dict[str, Any]:
    """Race our engine against the eager loop and return the record; the first rounds' losses must agree.

    FedABML also runs with noise on activations. In bf16 the loop runs in float32 and under autocast.
    """
    half, start = terms.dtype in HALF, time.perf_counter()
    ours = terms.setup(algorithm)
    setup_seconds = time.perf_counter() - start
    exact = "float32" if half else terms.dtype
    theirs = terms.setup(algorithm, dtype=exact) if half else ours

    def settings_of_loop() -> None:
        set_precision(exact, terms.device)
        if terms.device.type == "cuda":  # cuDNN may choose what is fastest, repeatable or not
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True

    def loop(**options: Any) -> Runner:
        return Runner(partial(Loop, theirs, **options), settings_of_loop)

    settings_of_loop()
    channels_last = best_format(theirs)
    runners = {"ours": terms.engine(ours), "loop": loop(channels_last=channels_last)}
    if isinstance(algorithm, FedAvg):
        runners["loop_sgd"] = loop(channels_last=channels_last, optimiser=True)
    if half:
        runners["loop_bf16"] = loop(channels_last=best_format(theirs, torch.bfloat16), autocast=torch.bfloat16)
    if isinstance(algorithm, FedABML):
        runners["local"] = terms.engine(terms.setup(dataclasses.replace(algorithm, estimator="local")))
    if terms.compile:
        runners["compiled"] = terms.engine(terms.setup(algorithm, compile=True))
    times = terms.race(runners)
    times["ours"] = times["ours"]._replace(first=setup_seconds + times["ours"].first)
    loss = times["loop"].loss
    if isinstance(algorithm, FedABML) or ours.cohort.network.dropout:  # only then is there noise to be made the same
        settings_of_loop()
        keyed_loop = Loop(theirs, keyed=True, channels_last=channels_last)
        keyed_loop.prepare()
        loss = keyed_loop.step()
    difference = abs(loss - times["ours"].loss) / abs(loss)
    ratio = {n: t.round / times["ours"].round for n, t in times.items() if n.startswith("loop")}
    # These two are ours, too, and stand against the loop.
    ratio |= {n: times["loop"].round / times[n].round for n in ("local", "compiled") if n in times}
    return terms.record(ours, times) | {
        "losses": [times["ours"].loss, loss],
        "apart": difference,
        "agree": bool(difference <= AGREE[terms.dtype]),
        "channels_last": channels_last,
        "ratio": ratio,
        "roofline": roofline(terms.work, theirs, times["ours"].round / terms.work.steps),
    }


def race_setups(
    terms: Terms,
    setups: Mapping[str, Setup],
    bases: Mapping[str, str],
    arrange: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Race our engine in several setups and return the record.

    `bases` names for a side the one that its time is divided by; `cpu` has the same ratios of processor time.
    """
    arrange_side = arrange or (lambda name: set_precision(terms.dtype, terms.device))
    times = terms.race({n: Runner(partial(Engine, setup), partial(arrange_side, n)) for n, setup in setups.items()})
    cpu = {name: statistics.median(t.cpu) for name, t in times.items()}
    return terms.record(setups[next(iter(bases))], times) | {
        "ratio": {name: times[name].round / times[base].round for name, base in bases.items()},
        "cpu": {name: cpu[name] / cpu[base] for name, base in bases.items()},
    }


def race_without(terms: Terms, algorithm: Algorithm, parts: Sequence[str]) -> dict[str, Any]:
    """Race our engine with all accelerators against itself without each of `parts` (`accel.SWITCHABLE`, or 1 for all).

    A ratio is the time of a round without a part over that with all.
    """
    before = accel.left_out()
    left_out = {"all": before, "1": before | {*accel.SWITCHABLE}} | {part: before | {part} for part in accel.SWITCHABLE}
    setups = {name: terms.setup(algorithm) for name in ("all", *parts)}
    try:
        return race_setups(terms, setups, dict.fromkeys(parts, "all"), lambda name: accel.leave_out(left_out[name]))
    finally:
        accel.leave_out(before)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes, to the end of all work on the device."""
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clear(device: torch.device) -> None:
    """Free memory between two races."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- ceilings ---------------------------------------------------------------------------------------------------------
def roofline(work: Workload, setup: Setup, step: float) -> dict[str, float]:
    """Return the least operations and bytes of a step of the whole cohort, and the seconds that it took.

    Operations: the products of the forward and backward passes, counted by torch. Bytes: weights (for a Gaussian
    posterior its two vectors, both read and written, and the prior's two) once each way, inputs read, outputs of layers
    with weights written and read once; sampled weights and noise need never leave the chip, so they are not counted.
    """
    cohort, loop, outputs = setup.cohort, Loop(setup), list[int]()
    loop.prepare()
    client = loop.next_clients[0]
    samples = cohort.data.batch(client.samples)
    x, y = samples.x[client.steps[0]], samples.y[client.steps[0]]
    layers = [m for m in loop.module.modules() if any(True for _ in m.parameters(recurse=False))]
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out.numel()))
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(loop.loss(x, y, None, None), loop.params)
    draws = cohort.algorithm.samples_per_step
    vectors = 6 if isinstance(cohort.algorithm, FedABML) else 2
    numbers = vectors * cohort.network.layout.size + x.numel() + 2 * draws * sum(outputs)
    return {
        "flops": float(counter.get_total_flops() * work.cohort * draws),
        "bytes": float(numbers * work.cohort * cohort.network.initial.element_size()),
        "seconds": step,
    }


def ceilings(device: torch.device, dtypes: tuple[str, ...] = ("float32",)) -> dict[str, float]:
    """Return operations per second of a large matrix product, by type, and bytes per second of a large copy."""

    def rate(amount: float, work: Callable[[], object]) -> float:
        return amount / min(_seconds(work, device) for _ in range(6))

    rates, large = dict[str, float](), device.type == "cuda"
    side = 8192 if large else 2048
    random = torch.Generator(device).manual_seed(0)
    for dtype in dtypes:
        exact = torch.float64 if dtype == "float64" else torch.float32
        set_precision("float32" if dtype in HALF else dtype, device)
        operands = (torch.randn(side, side, device=device, generator=random) for _ in range(2))
        a, b = (t.to(torch.bfloat16 if dtype in HALF else exact) for t in operands)
        rates[dtype] = rate(2 * side**3, partial(torch.mm, a, b))
    source = torch.ones((1 << 32 if large else 1 << 28) // 4, device=device)
    rates["bytes"] = rate(2 * source.numel() * 4, partial(torch.empty_like(source).copy_, source))
    return rates


def machine(device: torch.device) -> dict[str, Any]:
    """Return where a measurement was made: versions, processor, cores, load, GPU."""
    description: dict[str, Any] = {
        "fedabml": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": hardware(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan,
    }
    return description | ({"gpu": hardware(device)} if device.type == "cuda" else {})
