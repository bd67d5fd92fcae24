"""How the steps of a phase are executed: eagerly, recorded (CPU), as CUDA graphs, or compiled.

Launching the kernels of a small step costs far more than running them. A graph launches all of them at once, without
the host; it reads and writes buffers of its own, so a phase copies its inputs in, replays, and copies the result out.
A graph is one step, or a whole round (`Executor.inside`). With `compile` the operations of a step are first fused by
torch.compile, which takes a while for every shape of the inputs. On a CPU a step that comes often is recorded, which
resolves the transforms of torch.func once, and played back (`accel.recorder`). `programs` makes all of these.

Lanes whose clients have few samples are done before the others. The lanes are therefore sorted by their number of steps
and the batch shrinks as they finish: eagerly with every lane that is done, in graphs in coarser steps, because each
size is a graph of its own (`padding` says what that wastes).

The executor knows neither algorithms nor clients: it is handed functions of tensors.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..accel import enabled
from ..accel.fused_passes import FusedFunction
from ..accel.machine import to_device
from ..algorithms.base import State, Stepped
from . import policy as thresholds
from . import programs
from .policy import Policy
from .programs import BatchedStep, Captured, CapturedStep, Inputs, NumberedStep, Recording, clone, shapes

log = logging.getLogger("fedabml")
# A step of a phase whose other inputs are fixed: the carry, the losses, the sample numbers, the number.
NextStep = Callable[[State, Tensor, Tensor, Tensor], Stepped]


class StepName(NamedTuple):
    """What tells a step from others whose inputs have the same shapes."""

    step: str
    several_runs: bool
    unpadded: bool  # whether no minibatch has padding
    options: tuple[Any, ...]


# -- how a batch shrinks ----------------------------------------------------------------------------------------------
class Segment(NamedTuple):
    """Steps from `first` to `last` (not included) of the first `lanes` lanes, sorted by their number of steps."""

    first: int
    last: int
    lanes: int


def segments(steps: np.ndarray, least: int, shrink: float = thresholds.DEFAULT.shrink) -> list[Segment]:
    """Return how the batch shrinks, for numbers of steps in descending order.

    The batch shrinks in coarse steps down to `least` lanes or fewer; where `least` is 0, with every lane that is done.
    """
    count = len(steps)
    sizes = [count]
    while sizes[-1] > max(1, least):
        sizes.append(min(sizes[-1] - 1, math.ceil(sizes[-1] * shrink)) if least else sizes[-1] - 1)
    ends = [int(steps[size]) if size < count else 0 for size in sizes]  # a size suffices once the next lane is done
    cuts = [Segment(a, b, n) for a, b, n in zip(ends, [*ends[1:], int(steps[0])], sizes, strict=True)]
    return [cut for cut in cuts if cut.first < cut.last]


def padding(steps: np.ndarray, least: int) -> float:
    """Return the share of the steps taken that belong to lanes which were done."""
    order = np.sort(steps)[::-1]
    steps_taken = sum((cut.last - cut.first) * cut.lanes for cut in segments(order, least))
    return 1 - float(order.sum()) / steps_taken


def _by_number(step: BatchedStep, ragged: bool) -> NumberedStep:
    """Return a step as a function of its number; if `ragged`, lanes that are done stay where they are."""

    def numbered(inputs: Inputs, rows: Tensor, number: Tensor) -> Stepped:
        carry, losses = step(inputs, rows, rng.fold(inputs.lanes.keys, number))
        carry = {name: carry[name] for name in inputs.carry}  # in one order: compiled programs go by position
        if not ragged:
            return carry, inputs.losses + losses
        going = inputs.lanes.steps > number
        wide = {k: going.view(-1, *[1] * (v.ndim - 1)) for k, v in carry.items()}
        carry = {k: torch.where(wide[k], v, inputs.carry[k]) for k, v in carry.items()}
        return carry, inputs.losses + torch.where(going, losses, 0)

    return numbered


def _numbers(first: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Return the numbers of steps. Fused programs want inputs aligned to sixteen bytes, so each has twice its room."""
    count = torch.arange(steps, device=first.device)
    room = count.new_empty(steps, 2)
    return torch.add(first, count, out=room[:, 0]).unbind()


class Executor:
    """How a run's programs are executed; it keeps the latest captured and recorded ones.

    `capture`: as CUDA graphs. `record`: recorded, on a CPU. `compile`: by torch.compile; `undecided`: that is decided
    later (`rounds.consider_compiling`). `lanes_cost_time`: every lane takes its time, so padding lanes is not free.
    """

    def __init__(
        self,
        capture: bool = False,
        *,
        compile: bool = False,
        record: bool = False,
        lanes_cost_time: bool = False,
        undecided: bool = False,
        policy: Policy | None = None,
    ):
        self.capture, self.compile, self.record, self.undecided = capture, compile, record, undecided
        self.lanes_cost_time, self.policy = lanes_cost_time, policy or thresholds.DEFAULT
        self.compiled_steps: frozenset[str] | None = None  # the names of the steps that are compiled; None: all
        self.graphs: OrderedDict[Hashable, Captured | CapturedStep] = OrderedDict()
        self.refused: set[Hashable] = set()  # names of what cannot be captured
        self.warned: set[str] = set()
        self.compiled: dict[Hashable, NumberedStep] = {}
        self.times_taken: dict[Hashable, int] = {}  # how often a step was taken
        self.recordings: dict[Hashable, Recording | None] = {}
        self.pool: Any = None
        self._released = False

    @property
    def prefers_padding(self) -> bool:
        """Whether another shape of the inputs costs more than padding."""
        return self.capture or self.compile

    @property
    def smallest_batch(self) -> int:
        """Lanes below which the batch does not shrink: one more graph soon pays, one more compiled step does not."""
        if not self.prefers_padding:
            return 0
        return 1 if self.lanes_cost_time and not self.compile else self.policy.small_batch

    @property
    def settled(self) -> bool:
        """Whether no recorded step will become faster any more."""
        played = [recording[1] for recording in self.recordings.values() if recording is not None]
        return not any(isinstance(program, FusedFunction) and program.pending is not None for program in played)

    @property
    def inside(self) -> Executor:
        """The executor for the parts of a program that is itself captured: they are not captured again."""
        other = copy.copy(self)
        other.capture = False
        return other

    def may_release(self) -> bool:
        """Return whether captured programs may be dropped to make room, which is tried once in a run."""
        first, self._released = not self._released, True
        return first

    def forget(self) -> None:
        """Drop all that was captured, compiled or recorded, and what is known of it."""
        for store in (self.graphs, self.refused, self.compiled, self.times_taken, self.recordings):
            store.clear()
        self.pool = None

    def shapes_of(self, steps: frozenset[str]) -> int:
        """Return how many shapes of these steps are captured, each of which would have to be compiled."""
        return sum(len(program.steps & steps) for program in self.graphs.values())

    def decide(self, steps: frozenset[str] | None) -> None:
        """Compile these steps from now on, and drop what was captured without; None: compile nothing."""
        self.undecided = False
        if steps is not None:
            self.compile, self.compiled_steps = True, steps
            self.forget()

    def _warn(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self.warned:
            self.warned.add(text)
            log.warning("%s", text)

    def captured(
        self, name: Hashable, function: Callable[..., Any], inputs: tuple[Any, ...], steps: frozenset[str]
    ) -> Captured | None:
        """Return a function of tensors alone, captured for inputs of these shapes; None if it is not to be captured.

        The name and the shapes tell the function from all others. The name is kept as long as the program, so it may
        hold what the function reads beside its inputs. `steps` names the steps that the function takes.
        """
        return self._program(name, shapes(inputs), lambda pool: programs.Captured(function, inputs, pool, steps))

    def _program(self, name: Hashable, form: Hashable, capture: Callable[[Any], Any]) -> Any:
        """Return what is captured under a name for inputs of a form; None if it is not to be captured."""
        if not self.capture or name in self.refused:
            return None
        key = (name, form)
        if key not in self.graphs:
            try:
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                self.graphs[key] = capture(self.pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.refused.add(name)
                self.pool = None  # the one of a capture that failed cannot be used again
                why = str(error).splitlines()[0]
                log.warning("A part of the work is launched step by step, because it cannot be a CUDA graph: %s", why)
                return None
            if len(self.graphs) > self.policy.programs:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def run(self, name: StepName, step: BatchedStep, inputs: Inputs, plan: Tensor, steps: np.ndarray) -> Stepped:
        """Take all steps of a phase and return the last carry and the summed losses.

        `plan` has the sample numbers of all steps [steps, batches of a step, lanes, batch], `steps` how many of them
        are each lane's own.
        """
        if steps.min() == steps.max():
            return self._segment(name, step, inputs, plan, False)
        order = to_device(torch.as_tensor(np.argsort(-steps, kind="stable")), plan.device)
        inputs, plan = inputs.select(itemgetter(order), name.several_runs), plan[:, :, order]
        counts = np.sort(steps)[::-1]
        carry, losses = {k: v.clone() for k, v in inputs.carry.items()}, inputs.losses.clone()
        for first, last, lanes in segments(counts, self.smallest_batch, self.policy.shrink):
            part = inputs._replace(carry=carry, losses=losses, first_step=inputs.first_step + first)
            part = part.select(itemgetter(slice(lanes)), name.several_runs)
            ragged = bool(counts[lanes - 1] < last)
            moved, losses[:lanes] = self._segment(name, step, part, plan[first:last, :, :lanes], ragged)
            for k, v in moved.items():
                carry[k][:lanes] = v
        back = torch.argsort(order)
        return {k: v[back] for k, v in carry.items()}, losses[back]

    def _segment(self, name: StepName, step: BatchedStep, inputs: Inputs, plan: Tensor, ragged: bool) -> Stepped:
        """Take steps of the same lanes; if `ragged`, some of them are done on the way."""
        form, numbered = (ragged, shapes(inputs), tuple(plan.shape[1:])), _by_number(step, ragged)
        chosen = self.compile and (self.compiled_steps is None or name.step in self.compiled_steps)
        if chosen and plan.device.type != "cpu":  # on a CPU `_next_step` compiles
            if (name, form) not in self.compiled:
                compiled = programs.compile_program(numbered, (inputs, plan[0], inputs.first_step), self._warn)
                self.compiled[name, form] = compiled
            numbered = self.compiled[name, form]
        room = self.policy.graph_steps
        program = self._program(name, form, lambda pool: CapturedStep(name.step, numbered, inputs, plan, pool, room))
        if program is not None:
            return program.run(inputs, plan)
        take = self._next_step(name, numbered, inputs, plan, ragged)
        carry, losses = inputs.carry, inputs.losses
        if self.record:  # a recorded step writes over the tensors that it is given
            carry, losses = clone((carry, losses))
        for rows, number in zip(plan, _numbers(inputs.first_step, len(plan)), strict=True):
            carry, losses = take(carry, losses, rows, number)
        return carry, losses

    def _next_step(self, name: StepName, step: NumberedStep, inputs: Inputs, plan: Tensor, ragged: bool) -> NextStep:
        """Return a step that is not captured: eager or, on a CPU once it has come often, recorded."""

        def eager(carry: State, losses: Tensor, rows: Tensor, number: Tensor) -> Stepped:
            return step(inputs._replace(carry=carry, losses=losses), rows, number)

        if not self.record or not inputs.samples or not enabled("recorder"):
            return eager
        any_number = inputs._replace(samples=tuple(t[:0] for t in inputs.samples))  # however many samples there are
        key = (name, ragged, shapes(any_number), tuple(plan.shape[1:]))
        self.times_taken[key] = self.times_taken.get(key, 0) + len(plan)
        if self.times_taken[key] < self.policy.record_after and not self.compile:
            return eager
        if key not in self.recordings:
            with programs.RECORDING.exclusive():
                if key not in self.recordings and len(self.recordings) < self.policy.programs:
                    self.recordings[key] = programs.record_step(step, inputs, plan, self.compile, self._warn)
        recording = self.recordings.get(key)
        if recording is None:
            return eager
        per_phase, per_step = recording
        fixed, names = inputs.fixed, list(inputs.carry)
        ready = per_phase(*fixed)

        def replay(carry: State, losses: Tensor, rows: Tensor, number: Tensor) -> Stepped:
            return per_step(*(carry[k] for k in names), losses, *fixed, rows, number, *ready)

        return replay
