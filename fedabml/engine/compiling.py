"""When torch.compile pays: decided once in a run on a GPU, from the time that its first rounds took.

Compiled, a step takes 1/gain of its time, but every shape of a step has to be compiled first. With t seconds a round
and R rounds to go, compiling pays where R · t · (1 − 1/gain) exceeds what it costs. The steps of rounds alone are
compiled then; personalising runs as before, because a score or two would not pay for it.

The figures are of one H200: gains from results/speed/h200.md ("against the eager loop", compiled and not), costs from
the first rounds in results/speed/h200.jsonl. On a CPU compiling gains little, so `auto` means no there.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from ..algorithms.base import Algorithm
from ..vectors import Layout
from .processes import World
from .setting import Cohort

GAIN_CONV, GAIN_DENSE, GAIN_BF16 = 1.5, 2.0, 2.3  # the CNN; the MLP (MLR 3.2); ResNet-18 in bf16 (the CNN 3)
SECONDS, SECONDS_PER_TENSOR = 5.0, 0.9  # for a shape of a step: 10 s with an MLP's 6 tensors, 60 s with ResNet-18's 62


def expected_gain(layout: Layout, inside: torch.dtype) -> float:
    """Return how many times faster a compiled round should be, for a network that computes in the type `inside`."""
    if inside == torch.bfloat16:
        return GAIN_BF16
    return GAIN_CONV if any(len(shape) > 2 for shape in layout.shapes) else GAIN_DENSE


def expected_cost(layout: Layout, shapes: int) -> float:
    """Return how many seconds compiling should take, for so many shapes of steps."""
    return shapes * (SECONDS + SECONDS_PER_TENSOR * len(layout.shapes))


def pays(times: Sequence[float], rounds_left: int, gain: float, cost: float) -> bool:
    """Return whether compiling saves more seconds in the rounds left than it costs; `times` are of the past ones."""
    return rounds_left * usual_seconds(times) * (1 - 1 / gain) > cost


def usual_seconds(times: Sequence[float]) -> float:
    """Return the median seconds of a round; the first, which prepares more than it computes, counts only alone."""
    return median(times[1:] or times)


def steps_of_rounds(algorithm: Algorithm, epochs: int) -> frozenset[str]:
    """Return the names of the steps that a round takes."""
    return frozenset(phase.step.__name__ for phase in algorithm.phases(epochs))  # type: ignore[attr-defined]


def decide(
    cohorts: Sequence[Cohort], world: World, times: Sequence[float], rounds_done: int, rounds: int
) -> str | None:
    """Decide whether the rounds after the first `rounds_done` of runs side by side are compiled; return a note if so.

    All processes of the run decide alike. If steps are not to be compiled, this function says so to the executors. If
    they are, the caller does, once nothing runs on the device any more.
    """
    cohort, executors = cohorts[0], [member.executor for member in cohorts]
    if not executors[0].undecided:
        return None
    steps = steps_of_rounds(cohort.algorithm, cohort.setting.epochs)
    gain = expected_gain(cohort.network.layout, cohort.network.dtype)
    shapes = max(1, sum(executor.shapes_of(steps) for executor in executors))
    cost, rounds_left = expected_cost(cohort.network.layout, shapes), rounds - rounds_done
    if not world.decide(lambda: pays(times, rounds_left, gain, cost)):
        for executor in executors:
            executor.decide(None)
        return None
    if cohort.device.type == "cuda":
        torch.cuda.synchronize(cohort.device)
    seconds = rounds_left * usual_seconds(times)
    return (
        f"From round {rounds_done + 1} on steps are compiled: the {rounds_left} rounds left would take about "
        f"{seconds:.0f} s, compiled {seconds / gain:.0f} s after about {cost:.0f} s for compiling. "
        "--no-compile leaves it out."
    )
