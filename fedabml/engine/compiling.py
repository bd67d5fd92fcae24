"""When torch.compile pays: decided once in a run on a GPU, from the time that its first rounds took.

Compiled, a step takes 1/gain of its time, but every shape of a step has to be compiled first. With t seconds a round
and `left` rounds to go, compiling pays where left · t · (1 − 1/gain) exceeds what it costs. The steps of rounds alone
are compiled then; personalising runs as before, because a score or two would not pay for it.

The figures are of one H200: gains from results/README.md ("against the eager loop", compiled and not), costs from
docs/speed.md. On a CPU `--compile` gained nothing or little (3.9× in place of 3.2× in one race, nothing in another), so
`auto` means no there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from .. import engine
from ..vectors import Layout

if TYPE_CHECKING:
    from .rounds import Simulation

log = logging.getLogger("fedabml")

LOOK = 4  # the round after which it is decided: the first ones capture graphs
GAIN_CONV, GAIN_DENSE, GAIN_BF16 = 1.5, 2.0, 2.3  # the CNN; the MLP (MLR 3.2); ResNet-18 in bf16 (the CNN 3)
SECONDS, SECONDS_PER_TENSOR = 5.0, 0.9  # for a shape of a step: 10 s with an MLP's 6 tensors, 60 s with ResNet-18's 62


def expected_gain(layout: Layout, inside: torch.dtype) -> float:
    """How many times faster a compiled round is expected to be, for a network computing in the type `inside`."""
    if inside == torch.bfloat16:
        return GAIN_BF16
    return GAIN_CONV if any(len(shape) > 2 for shape in layout.shapes) else GAIN_DENSE


def expected_cost(layout: Layout, shapes: int) -> float:
    """How many seconds compiling is expected to take, for so many shapes of steps."""
    return shapes * (SECONDS + SECONDS_PER_TENSOR * len(layout.shapes))


def pays(times: Sequence[float], left: int, gain: float, cost: float) -> bool:
    """Whether compiling saves more seconds in the rounds that are left than it costs.

    `times` are the seconds of the rounds so far; the first, which prepares more than it computes, does not count where
    there are others.
    """
    return left * usual_seconds(times) * (1 - 1 / gain) > cost


def usual_seconds(times: Sequence[float]) -> float:
    """The seconds of a usual round: the median, without the first one where there are others."""
    return median(times[1:] or times)


def steps_of_rounds(sim: Simulation) -> frozenset[str]:
    """The names of the steps that a round takes."""
    phases = sim.cohort.algorithm.phases(sim.epochs)
    return frozenset(phase.step.__name__ for phase in phases)  # type: ignore[attr-defined]


def consider(sims: Sequence[Simulation], times: Sequence[float], rounds: int) -> str | None:
    """Decides for runs side by side, after a round that took the last of `times`, whether their next ones are compiled.

    Nothing happens where somebody has decided already, or where nothing can be compiled. Nothing may be under way on
    the device, because what was captured is dropped. Returns a note where they are, which is logged, too.
    """
    one, programs = sims[0], [sim.cohort.programs for sim in sims]
    if not programs[0].auto:
        return None
    for each in programs:
        each.auto = False
    network, steps, done = one.cohort.network, steps_of_rounds(one), one.round
    gain = expected_gain(network.layout, network.dtype)
    cost = expected_cost(network.layout, max(1, sum(each.shapes_of(steps) for each in programs)))
    if not one.world.decide(lambda: pays(times, rounds - done, gain, cost)):
        return None
    if one.cohort.device.type == "cuda":
        torch.cuda.synchronize(one.cohort.device)
    for sim in sims:
        sim.compiled = done + 1
        sim.cohort.programs.fuse_from_now(steps)
    slow = (rounds - done) * usual_seconds(times)
    note = (
        f"From round {done + 1} on steps are compiled: the {rounds - done} rounds left would take about {slow:.0f} s, "
        f"compiled {slow / gain:.0f} s after about {cost:.0f} s for compiling. --no-compile leaves it out."
    )
    log.log(logging.INFO if engine.process_is_ours else logging.WARNING, "%s", note)  # the command line prints it
    return note
