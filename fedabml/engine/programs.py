"""Functions of tensors as programs: captured as CUDA graphs, compiled by torch.compile, or recorded on a CPU.

A program takes inputs of the shapes that it was made for. Inputs and results are trees: tensors, or None, in tuples,
lists and dictionaries.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..accel.fused_passes import FusedFunction
from ..accel.operators import compiler_tracing
from ..accel.recorder import merge_duplicates, record, split_fixed, store_operands
from ..algorithms.base import Site, State, Stepped
from .diagnose import uncompiled

log = logging.getLogger("fedabml")


# -- trees: torch's own functions take several times as long for such simple ones, in every round ---------------------
def leaves(tree: Any) -> Iterator[Tensor | None]:
    """Yield the tensors of a tree, and None where there is none."""
    if tree is None or isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in leaves(tree) if leaf is not None]


def map_tree(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree with a function applied to every tensor."""
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else function(tree)
    if isinstance(tree, dict):
        return {name: map_tree(function, part) for name, part in tree.items()}
    parts = [map_tree(function, part) for part in tree]
    return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)


def refill(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a tree like this one with other tensors, given in the order of `tensors_of`."""
    following = iter(tensors)
    return map_tree(lambda _: next(following), tree)


def clone(tree: Any) -> Any:
    """Return a tree with copies of all tensors."""
    return map_tree(lambda tensor: tensor.clone(memory_format=torch.contiguous_format), tree)


def shapes(tree: Any) -> Hashable:
    """Return what a program depends on of its inputs: their names in order, shapes and types.

    A program takes its tensors by position, so a state whose names come in another order needs another program.
    """
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else (tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return tuple((name, shapes(part)) for name, part in tree.items())
    return tuple(map(shapes, tree))


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
    """What the steps of a phase read and, of it, what they pass on: the carry and the summed losses."""

    carry: State
    losses: Tensor
    lanes: LaneInputs
    runs: RunInputs
    samples: tuple[Tensor, ...]  # where minibatches are taken from, if that is not the same in every round
    first_step: Tensor  # the number of the first step

    @property
    def fixed(self) -> list[Tensor]:
        """What is the same in all steps of a phase."""
        return tensors_of((self.lanes, self.runs, self.samples))

    def select(self, pick: Callable[[Tensor], Tensor], several_runs: bool) -> Inputs:
        """Return the inputs of some lanes, which `pick` takes from a tensor with a row for every lane."""
        runs = map_tree(pick, self.runs) if several_runs else self.runs
        carry, losses, lanes = map_tree(pick, (self.carry, self.losses, self.lanes))
        return self._replace(carry=carry, losses=losses, lanes=lanes, runs=runs)


# One step of all lanes: the inputs, the step's sample numbers [batches, lanes, batch], the lanes' keys of the step; to
# the next carry and the losses.
BatchedStep = Callable[[Inputs, Tensor, Tensor], Stepped]
# The same by its number: the inputs, the step's sample numbers, the number; the losses are summed.
NumberedStep = Callable[[Inputs, Tensor, Tensor], Stepped]
# A recorded step: what its fixed inputs decide, once in a phase, and the rest, in every step.
Recording = tuple[Callable[..., Any], Callable[..., Any]]


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
    """A function of tensors as a CUDA graph, which reads and writes buffers of its own; `steps` names the steps inside.

    What the function reads beside its inputs must outlive the graph.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], pool: Any, steps: frozenset[str] = frozenset()
    ):
        self.buffers, self.steps = clone(inputs), steps
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
        for target, source in zip(leaves(self.buffers[: len(inputs)]), leaves(inputs), strict=True):
            if target is not None:
                targets, sources = by_type.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(cast(Tensor, source))
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)

    def __call__(self, *inputs: Any) -> Any:
        self.load(*inputs)
        self.graph.replay()
        return clone(self.outputs)


class CapturedStep:
    """One step, captured, which is replayed for every step of a phase; its plan has room for `room` steps."""

    def __init__(self, name: str, step: NumberedStep, inputs: Inputs, plan: Tensor, pool: Any, room: int):
        def body(inputs: Inputs, plan: Tensor, t: Tensor) -> None:
            rows = plan.index_select(0, t.unsqueeze(0)).squeeze(0)
            carry, losses = step(inputs, rows, t + inputs.first_step)
            for part, value in carry.items():
                inputs.carry[part].copy_(value)
            inputs.losses.copy_(losses)
            t.add_(1)

        buffers = (inputs, plan.new_zeros((room, *plan.shape[1:])), torch.zeros_like(inputs.first_step))
        self.step, self.steps = step, frozenset({name})  # the step holds the samples that the graph reads
        self.captured = Captured(body, buffers, pool)

    def run(self, inputs: Inputs, plan: Tensor) -> Stepped:
        """Take all steps of a plan."""
        self.captured.load(inputs)
        buffers, room, t = self.captured.buffers
        for rows in plan.split(len(room)):
            room[: len(rows)].copy_(rows)
            t.zero_()
            for _ in range(len(rows)):
                self.captured.graph.replay()
            buffers.first_step.add_(len(rows))
        return clone((buffers.carry, buffers.losses))


# -- compiled and recorded steps --------------------------------------------------------------------------------------
class Gate:
    """A lock that many threads may share, or one have alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Condition(), 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Wait for a thread that works exclusively."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._lock.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for all other threads, which then wait until this one is done."""
        with self._lock:
            self._lock.wait_for(lambda: self._inside == 0)
            yield


RECORDING = Gate()  # recording changes torch for its duration, for all threads: nothing compiled may run then


def compile_program(
    function: Callable[..., Any], inputs: tuple[Any, ...], warn: Callable[[str], None]
) -> Callable[..., Any]:
    """Return the function by torch.compile for inputs of these shapes; where that fails, warn and return it unchanged.

    What is compiled is a trace, in which the transforms of torch.func, our convolutions and our noise are resolved.
    """
    tensors = [tensor.clone() for tensor in tensors_of(inputs)]  # a trace takes one tensor given twice for one input
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        with compiler_tracing():
            trace = make_fx(lambda *tensors: function(*refill(inputs, tensors)))(*tensors)
        merge_duplicates(trace.graph)
        store_operands(trace.graph)
        trace.recompile()
        program = torch.compile(trace, dynamic=False)
        program(*tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, and never should a run
        warn(f"A step runs without torch.compile, which fails: {uncompiled(error)}")
        return function
    return lambda *inputs: program(*tensors_of(inputs))


def record_step(
    step: NumberedStep, inputs: Inputs, plan: Tensor, compile: bool, warn: Callable[[str], None]
) -> Recording | None:
    """Return a step as plain operations, in which the transforms of torch.func are resolved; None where that fails.

    With `compile`, what is done in every step is compiled. The second part takes the carry and the losses, the fixed
    inputs, sample numbers, the step's number, and what the first part returns for the fixed inputs.
    """

    def flat(*tensors: Tensor) -> Stepped:
        *read, rows, number = tensors
        return step(refill(inputs, [*read, number]), rows, number)

    *read, first_step = tensors_of(inputs)
    tensors = [
        tensor.clone() for tensor in (*read, plan[0], first_step)
    ]  # one tensor given twice is taken for one input
    passed = len(inputs.carry) + 1  # tensors that a step passes to the next
    try:
        per_phase, per_step = split_fixed(record(flat, *tensors), range(passed, len(read)))
        if not compile:
            return per_phase, FusedFunction(per_step, passed)
        program = compile_program(per_step, (*tensors, *per_phase(*read[passed:])), warn)

        def run_compiled(*inputs: Tensor) -> Any:
            with RECORDING.shared():
                return program(*inputs)

        return per_phase, run_compiled
    except Exception as error:  # the step runs as well without
        if compile:
            warn(f"A step is neither recorded nor compiled: {uncompiled(error)}")
        log.debug("A step is not recorded: %s: %s", type(error).__name__, error)
        return None
