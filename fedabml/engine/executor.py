"""How the steps of a phase are executed: eagerly, recorded (CPU), as CUDA graphs, or compiled.

Launching the kernels of a small step costs far more than running them. A graph launches all of them at once, without
the host; it reads and writes buffers of its own, so a phase copies its inputs in, replays, and copies the result out.
A graph is one step, or a whole round (`Executor.inside`). With `compile` the operations of a step are first fused by
torch.compile, which takes a while for every shape of the inputs. On a CPU a step that comes often is recorded, which
resolves the transforms of torch.func once, and played back (`accel.recorder`).

Lanes whose clients have few samples are done before the others. The lanes are therefore sorted by their number of steps
and the batch shrinks as they finish: eagerly with every lane that is done, in graphs in coarser steps, because each
size is a graph of its own (`padding` says what that wastes).

The executor knows neither algorithms nor clients: it is handed functions of tensors.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .. import rng
from ..accel import enabled
from ..accel.fused_passes import FusedFunction
from ..accel.machine import to_device
from ..accel.operators import compiler_tracing
from ..accel.recorder import merge_duplicates, record, split_fixed, store_operands
from ..algorithms.base import Site, State
from . import policy as thresholds
from .diagnose import uncompiled
from .policy import Policy

log = logging.getLogger("fedabml")


# -- what a step reads ------------------------------------------------------------------------------------------------
class LaneInputs(NamedTuple):
    """Inputs of which every lane has a row."""

    site: Site
    offset: Tensor | None  # log π of the label level
    keys: Tensor
    steps: Tensor  # how many of the phase's steps are the lane's own


class RunInputs(NamedTuple):
    """Inputs of which a run has one: without an axis if all lanes belong to one run, else a row for every lane."""

    hyper: State
    shared: State


class Inputs(NamedTuple):
    """What the steps of a phase read and, of it, what they hand on: the carry and the summed losses."""

    carry: State
    losses: Tensor
    lanes: LaneInputs
    runs: RunInputs
    samples: tuple[Tensor, ...]  # where minibatches are taken from, if that is not the same in every round
    first: Tensor  # the number of the first step

    def select(self, pick: Callable[[Tensor], Tensor], several_runs: bool) -> Inputs:
        """Return the inputs of some lanes, which `pick` takes from a tensor with a row for every lane."""

        def picked(tree: Any) -> Any:
            return tree_map(lambda t: None if t is None else pick(t), tree)

        runs = picked(self.runs) if several_runs else self.runs
        return self._replace(carry=picked(self.carry), losses=picked(self.losses), lanes=picked(self.lanes), runs=runs)


class StepName(NamedTuple):
    """What tells a step from others whose inputs have the same shapes."""

    step: str
    several_runs: bool
    whole: bool  # whether no minibatch has padding
    options: tuple[Any, ...]


Moved = tuple[State, Tensor]  # the next carry and the losses
# One step of all lanes: the inputs, the step's sample numbers [batches, lanes, batch], the lanes' keys of the step.
BatchedStep = Callable[[Inputs, Tensor, Tensor], Moved]
# The same by its number: the inputs, the step's sample numbers, the number; the losses are summed.
NumberedStep = Callable[[Inputs, Tensor, Tensor], Moved]
# A step of a phase whose other inputs are fixed: the carry, the losses, the sample numbers, the number.
NextStep = Callable[[State, Tensor, Tensor, Tensor], Moved]
# A recorded step: what its fixed inputs alone decide, and the rest.
Recording = tuple[Callable[..., Any], Callable[..., Any]]


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
    taken = sum((cut.last - cut.first) * cut.lanes for cut in segments(order, least))
    return 1 - float(order.sum()) / taken


# -- steps ------------------------------------------------------------------------------------------------------------
def _numbered(step: BatchedStep, ragged: bool) -> NumberedStep:
    """Return a step by its number; if `ragged`, lanes that are done stay where they are."""

    def numbered(inputs: Inputs, rows: Tensor, number: Tensor) -> Moved:
        carry, losses = step(inputs, rows, rng.fold(inputs.lanes.keys, number))
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


# -- CUDA graphs ------------------------------------------------------------------------------------------------------
@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector, which might destroy another graph, from running while a graph is captured."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Captured:
    """A function of tensors, captured for inputs of these shapes. It reads and writes buffers of its own.

    `keep` is what the function reads beside its inputs and must outlive it; `steps` names the steps inside.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        pool: Any,
        keep: Any = None,
        steps: frozenset[str] = frozenset(),
    ):
        self.buffers, self.keep, self.steps = _cloned(inputs), keep, steps
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*self.buffers)  # libraries choose and allocate on first use, which a capture must not see
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self.graph, pool=pool):
            self.outputs = function(*self.buffers)

    def load(self, *inputs: Any) -> None:
        """Copy inputs into the first buffers."""
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(_leaves(self.buffers[: len(inputs)]), _leaves(inputs), strict=True):
            if target is not None:
                targets, sources = by_type.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(cast(Tensor, source))
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)

    def __call__(self, *inputs: Any) -> Any:
        self.load(*inputs)
        self.graph.replay()
        return _cloned(self.outputs)


class CapturedStep:
    """One step, captured, which is replayed for every step of a phase; its plan has room for `room` steps."""

    def __init__(self, name: StepName, step: NumberedStep, inputs: Inputs, plan: Tensor, pool: Any, room: int):
        def body(inputs: Inputs, plan: Tensor, t: Tensor) -> None:
            rows = plan.index_select(0, t.unsqueeze(0)).squeeze(0)
            carry, losses = step(inputs, rows, t + inputs.first)
            for part, value in carry.items():
                inputs.carry[part].copy_(value)
            inputs.losses.copy_(losses)
            t.add_(1)

        buffers = (inputs, plan.new_zeros((room, *plan.shape[1:])), torch.zeros_like(inputs.first))
        self.steps = frozenset({name.step})
        self.captured = Captured(body, buffers, pool, keep=step)

    def run(self, inputs: Inputs, plan: Tensor) -> Moved:
        """Take all steps of a plan."""
        self.captured.load(inputs)
        buffers, room, t = self.captured.buffers
        for rows in plan.split(len(room)):
            room[: len(rows)].copy_(rows)
            t.zero_()
            for _ in range(len(rows)):
                self.captured.graph.replay()
            buffers.first.add_(len(rows))
        return {k: v.clone() for k, v in buffers.carry.items()}, buffers.losses.clone()


# These walk through a program's inputs in every round. For plain nestings torch's own take several times as long.
def _leaves(tree: Any) -> Iterator[Tensor | None]:
    if tree is None or isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)


def _cloned(tree: Any) -> Any:
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else tree.clone(memory_format=torch.contiguous_format)
    if isinstance(tree, dict):
        return {name: _cloned(part) for name, part in tree.items()}
    parts = map(_cloned, tree)
    return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)


def _shapes(tree: Any) -> Hashable:
    """Return what a captured program depends on of its inputs: their names, shapes and types."""
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else (tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return tuple((name, _shapes(part)) for name, part in tree.items())
    return tuple(map(_shapes, tree))


# -- compiled and recorded steps --------------------------------------------------------------------------------------
class Gate:
    """A lock that many threads may share, or one have alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Condition(), 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Wait for a thread that is alone."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._lock.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for all other threads, which then wait until this one is done."""
        with self._lock:
            self._lock.wait_for(lambda: self._inside == 0)
            yield


RECORDING = Gate()  # recording changes torch for its duration, for all threads: nothing compiled may run then


def compiled(function: Callable[..., Any], inputs: tuple[Any, ...], warned: set[str]) -> Callable[..., Any]:
    """Return the function by torch.compile for inputs of these shapes; where that fails, warn and return it unchanged.

    What is compiled is a trace, in which the transforms of torch.func, our convolutions and our noise are resolved.
    Warnings in `warned` are not repeated.
    """
    leaves, kind = tree_flatten(inputs)
    given = [i for i, leaf in enumerate(leaves) if leaf is not None]

    def flat(*tensors: Tensor) -> Any:
        full = list(leaves)
        for i, tensor in zip(given, tensors, strict=True):
            full[i] = tensor
        return function(*tree_unflatten(full, kind))

    tensors = [leaves[i].clone() for i in given]  # a trace takes one tensor given twice for one input
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        with compiler_tracing():
            trace = make_fx(flat)(*tensors)
        merge_duplicates(trace.graph)
        store_operands(trace.graph)
        trace.recompile()
        program = torch.compile(trace, dynamic=False)
        program(*tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, and never should a run
        _warn(f"A step runs without torch.compile, which fails: {uncompiled(error)}", warned)
        return function
    return lambda *inputs: program(*(leaf for leaf in tree_leaves(inputs) if leaf is not None))


def _warn(text: str, warned: set[str]) -> None:
    if text not in warned:
        warned.add(text)
        log.warning("%s", text)


def _fixed_tensors(inputs: Inputs) -> tuple[Any, ...]:
    """Return what is the same in all steps of a phase."""
    return inputs.lanes, inputs.runs, inputs.samples


def _recorded(step: NumberedStep, inputs: Inputs, plan: Tensor, compile: bool, warned: set[str]) -> Recording | None:
    """Return a step as plain operations, in which the transforms of torch.func are resolved; None where that fails.

    With `compile`, what is done in every step is compiled.
    """
    leaves, kind = tree_flatten(_fixed_tensors(inputs))
    given = [i for i, leaf in enumerate(leaves) if leaf is not None]
    names = list(inputs.carry)

    def flat(*tensors: Tensor) -> Moved:
        *carry, losses = tensors[: len(names) + 1]
        *fixed, rows, number = tensors[len(names) + 1 :]
        full = list(leaves)
        for i, tensor in zip(given, fixed, strict=True):
            full[i] = tensor
        lanes, runs, samples = tree_unflatten(full, kind)
        return step(Inputs(dict(zip(names, carry, strict=True)), losses, lanes, runs, samples, number), rows, number)

    tensors = [*inputs.carry.values(), inputs.losses, *(leaves[i] for i in given), plan[0], inputs.first]
    try:
        tape = record(flat, *map(torch.clone, tensors))  # it takes one tensor given twice for one input
        fixed = range(len(names) + 1, len(tensors) - 2)
        once, again = split_fixed(tape, fixed)
        if not compile:
            return once, FusedFunction(again, len(names) + 1)
        program = compiled(again, (*tensors, *once(*(tensors[i] for i in fixed))), warned)

        def beside(*inputs: Tensor) -> Any:
            with RECORDING.shared():
                return program(*inputs)

        return once, beside
    except Exception as error:  # the step runs as well without
        if compile:
            _warn(f"A step is neither recorded nor compiled: {uncompiled(error)}", warned)
        log.debug("A step is not recorded: %s: %s", type(error).__name__, error)
        return None


# -- the executor -----------------------------------------------------------------------------------------------------
class Executor:
    """How a run's programs are executed; it keeps the latest captured and recorded ones.

    `capture`: as CUDA graphs. `record`: recorded, on a CPU. `compile`: by torch.compile; `undecided`: that is decided
    later (`rounds.consider_compiling`). `heavy`: every lane takes its time, so that padding lanes is not free.
    """

    def __init__(
        self,
        capture: bool = False,
        *,
        compile: bool = False,
        record: bool = False,
        heavy: bool = False,
        undecided: bool = False,
        policy: Policy | None = None,
    ):
        self.capture, self.compile, self.record, self.heavy = capture, compile, record, heavy
        self.undecided, self.policy = undecided, policy or thresholds.DEFAULT
        self.compiled_steps: frozenset[str] | None = None  # the names of the steps that are compiled; None: all
        self.graphs: OrderedDict[Hashable, Captured | CapturedStep] = OrderedDict()
        self.refused: set[Hashable] = set()  # names of what cannot be captured
        self.warned: set[str] = set()
        self.compiled: dict[Hashable, NumberedStep] = {}
        self.taken: dict[Hashable, int] = {}  # how often a step was taken
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
        return 0 if not self.prefers_padding else 1 if self.heavy and not self.compile else self.policy.small_batch

    @property
    def settled(self) -> bool:
        """Whether no recorded step will become faster any more."""
        played = [recording[1] for recording in self.recordings.values() if recording is not None]
        return not any(isinstance(each, FusedFunction) and each.pending is not None for each in played)

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
        for store in (self.graphs, self.refused, self.compiled, self.taken, self.recordings):
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

    def call(
        self,
        name: Hashable,
        function: Callable[..., Any],
        *inputs: Any,
        keep: Any = None,
        steps: frozenset[str] = frozenset(),
        fallback: Callable[[], Any] | None = None,
    ) -> Any:
        """Call a function of tensors alone, captured; where it cannot be, call the fallback or the function itself.

        `name` and the shapes of the inputs tell the function from all others. For `keep` and `steps` see `Captured`.
        """
        program = self._program(name, _shapes(inputs), lambda pool: Captured(function, inputs, pool, keep, steps))
        if program is None:
            return function(*inputs) if fallback is None else fallback()
        return program(*inputs)

    def _program(self, name: Hashable, shapes: Hashable, make: Callable[[Any], Any]) -> Any:
        """Return what is captured under a name for these shapes, now or before; None if it is not to be captured."""
        if not self.capture or name in self.refused:
            return None
        key = (name, shapes)
        if key not in self.graphs:
            try:
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                self.graphs[key] = make(self.pool)
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

    def run(self, name: StepName, step: BatchedStep, inputs: Inputs, plan: Tensor, steps: np.ndarray) -> Moved:
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
            part = inputs._replace(carry=carry, losses=losses, first=inputs.first + first)
            part = part.select(itemgetter(slice(lanes)), name.several_runs)
            moved, value = self._segment(name, step, part, plan[first:last, :, :lanes], counts[lanes - 1] < last)
            for k, v in moved.items():
                carry[k][:lanes] = v
            losses[:lanes] = value
        back = torch.argsort(order)
        return {k: v[back] for k, v in carry.items()}, losses[back]

    def _segment(self, name: StepName, step: BatchedStep, inputs: Inputs, plan: Tensor, ragged: bool) -> Moved:
        """Take steps of the same lanes; if `ragged`, some of them are done on the way."""
        shapes = (bool(ragged), _shapes(inputs), tuple(plan.shape[1:]))
        numbered = self._compiled(name, shapes, _numbered(step, ragged), inputs, plan)
        room = self.policy.graph_steps
        program = self._program(name, shapes, lambda pool: CapturedStep(name, numbered, inputs, plan, pool, room))
        if program is not None:
            return program.run(inputs, plan)
        following = self._next(name, numbered, inputs, plan, ragged)
        carry, losses = inputs.carry, inputs.losses
        if self.record:  # a recorded step writes to the place of what it is given
            carry, losses = _cloned((carry, losses))
        for rows, number in zip(plan, _numbers(inputs.first, len(plan)), strict=True):
            carry, losses = following(carry, losses, rows, number)
        return carry, losses

    def _compiled(
        self, name: StepName, shapes: Hashable, step: NumberedStep, inputs: Inputs, plan: Tensor
    ) -> NumberedStep:
        """Return a step compiled, where that is wanted and not on a CPU; otherwise the step itself."""
        ours = self.compiled_steps is None or name.step in self.compiled_steps
        if not (self.compile and ours) or plan.device.type == "cpu":
            return step
        key = (name, shapes)
        if key not in self.compiled:
            self.compiled[key] = compiled(step, (inputs, plan[0], inputs.first), self.warned)
        return self.compiled[key]

    def _next(self, name: StepName, step: NumberedStep, inputs: Inputs, plan: Tensor, ragged: bool) -> NextStep:
        """Return a step that is not captured: eager or, on a CPU once it has come often, recorded."""

        def eager(carry: State, losses: Tensor, rows: Tensor, number: Tensor) -> Moved:
            return step(inputs._replace(carry=carry, losses=losses), rows, number)

        if not self.record or not inputs.samples or not enabled("recorder"):
            return eager
        few = inputs._replace(samples=tuple(t[:0] for t in inputs.samples))  # however many samples there are
        key = (name, bool(ragged), _shapes(few), tuple(plan.shape[1:]))
        self.taken[key] = self.taken.get(key, 0) + len(plan)
        if self.taken[key] < self.policy.record_after and not self.compile:
            return eager
        if key not in self.recordings:
            with RECORDING.alone():
                if key not in self.recordings and len(self.recordings) < self.policy.programs:
                    self.recordings[key] = _recorded(step, inputs, plan, self.compile, self.warned)
        recording = self.recordings.get(key)
        if recording is None:
            return eager
        once, again = recording
        fixed = [t for t in tree_leaves(_fixed_tensors(inputs)) if t is not None]
        names, ready = list(inputs.carry), once(*fixed)

        def replay(carry: State, losses: Tensor, rows: Tensor, number: Tensor) -> Moved:
            return again(*(carry[k] for k in names), losses, *fixed, rows, number, *ready)

        return replay
