"""The steps of a phase, one after another: eagerly, or on a GPU as CUDA graphs replayed.

Launching the kernels of a small step costs far more than running them. A graph launches all of them at once, without
the host; it reads and writes buffers of its own, so a phase copies its inputs in, replays, and copies the result out.
A graph is a step, or a whole round, in which steps follow each other as they are (`Programs.inside`).
With `fuse` the operations of a step are first fused by torch.compile, which takes a while for every shape of the
inputs; on a CPU, too, where a step that comes often is otherwise recorded and played back (`tape`).

Lanes whose clients have few samples are done before the others. The lanes are therefore sorted by their number of steps
and the batch shrinks as they finish: eagerly with every lane that is done, in graphs in coarser steps, because
each size is a graph of its own (`padding` says what that wastes).
"""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .. import rng
from ..accel import enabled
from ..accel.fused_passes import Quickened
from ..accel.operators import plainly
from ..accel.recorder import merge, once_and_again, record, settle
from ..algorithms.base import Site, State
from .diagnose import uncompiled
from .memory import uploaded
from .threads import Gate

log = logging.getLogger("fedabml")


class Inputs(NamedTuple):
    """What the steps of a phase read and, of it, what they hand on: the carry and the summed losses."""

    carry: State
    losses: Tensor
    site: Site
    offset: Tensor | None
    keys: Tensor
    owned: Tensor  # how many of the steps are a lane's own
    hyper: State
    shared: State
    samples: tuple[Tensor, ...]  # where minibatches are taken from, if that is not the same in every round
    first: Tensor  # the number of the first step
    rows: Tensor  # sample numbers, [steps, batches of a step, lanes, batch]

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the sample numbers."""
        return self[:-1]


# One step of all lanes: the inputs, the sample numbers, the keys → the moved carry and the losses.
Move = Callable[[Inputs, Tensor, Tensor], tuple[State, Tensor]]
# The same by its number: all inputs but the sample numbers, those of the step, its number → carry and losses.
Moved = Callable[[tuple[Any, ...], Tensor, Tensor], tuple[State, Tensor]]
# A step of a phase: the carry, the losses, the sample numbers, the number of the step → the next carry and losses.
OneStep = Callable[[State, Tensor, Tensor, Tensor], tuple[State, Tensor]]
# A traced step: what its fixed inputs alone decide, and the rest.
Trace = tuple[Callable[..., Any], Callable[..., Any]]
OF_LANES, OF_RUNS = 6, 2  # so many of the inputs have a lane each; so many have one if there are several runs


SMALL, SHRINK = 16, 0.7  # lanes of a graph below which fewer are not faster; from one size to the next
HEAVY = 1 << 20  # numbers that a lane's layers put out in a step, from which every lane counts
ROOM = 128  # steps of a graph's plan; longer phases are cut
TRACING = Gate()  # a trace changes torch for its duration, for all threads: nothing that is compiled may run then
OFTEN = 30  # steps of the same shapes after which one is traced


class Segment(NamedTuple):
    """Steps from `first` to `last` (not included) of the first `lanes` lanes, sorted by their number of steps."""

    first: int
    last: int
    lanes: int


def segments(steps: np.ndarray, least: int) -> list[Segment]:
    """How the batch shrinks; `steps` are sorted, the most first.

    In coarse steps, to the first size of so many lanes or fewer; where that is 0, with every lane that is done.
    """
    count = len(steps)
    sizes = [count]
    while sizes[-1] > max(1, least):
        sizes.append(min(sizes[-1] - 1, math.ceil(sizes[-1] * SHRINK)) if least else sizes[-1] - 1)
    ends = [int(steps[size]) if size < count else 0 for size in sizes]  # a size will do once the next lane is done
    cuts = [Segment(a, b, n) for a, b, n in zip(ends, [*ends[1:], int(steps[0])], sizes, strict=True)]
    return [cut for cut in cuts if cut.first < cut.last]


def padding(steps: np.ndarray, least: int) -> float:
    """The share of the steps taken that belong to lanes which were done."""
    order = np.sort(steps)[::-1]
    taken = sum((cut.last - cut.first) * cut.lanes for cut in segments(order, least))
    return 1 - float(order.sum()) / taken


def _held(inputs: Inputs, moved: tuple[State, Tensor], t: Tensor | None) -> tuple[State, Tensor]:
    """The carry and the losses after a step; lanes that are done at step t stay where they are."""
    carry, losses = moved
    if t is None:
        return carry, inputs.losses + losses
    going = inputs.owned > t
    wide = {k: going.view(-1, *[1] * (v.ndim - 1)) for k, v in carry.items()}
    carry = {k: torch.where(wide[k], v, inputs.carry[k]) for k, v in carry.items()}
    return carry, inputs.losses + torch.where(going, losses, 0)


def _moved(move: Move, ragged: bool) -> Moved:
    """A step and its end; if `ragged`, some lanes may be done."""

    def moved(fixed: tuple[Any, ...], rows: Tensor, now: Tensor) -> tuple[State, Tensor]:
        given = Inputs._make([*fixed, rows])
        return _held(given, move(given, rows, rng.fold(given.keys, now)), now if ragged else None)

    return moved


def _numbers(inputs: Inputs) -> tuple[Tensor, ...]:
    """Of the steps. Fused programs want inputs that begin at multiples of sixteen bytes, so each has twice its room."""
    count = torch.arange(len(inputs.rows), device=inputs.rows.device)
    room = count.new_empty(len(count), 2)
    return torch.add(inputs.first, count, out=room[:, 0]).unbind()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """While a graph is captured no other may be destroyed, which Python's collector might do at any moment."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Captured:
    """A function of tensors, captured for inputs of these shapes. It reads and writes buffers of its own."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], pool: Any, keep: Any = None):
        self.buffers = _cloned(inputs)
        self.keep = keep  # what the function reads beside its inputs must outlive it
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*self.buffers)  # libraries choose and allocate on first use, which a capture must not see
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with _nothing_collected(), torch.cuda.graph(self.graph, pool=pool):
            self.outputs = function(*self.buffers)

    def load(self, *inputs: Any) -> None:
        """Fills the buffers."""
        pairs = zip(_leaves(self.buffers[: len(inputs)]), _leaves(inputs), strict=True)
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
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


class Steps:
    """One step, captured, to be replayed for every step of a phase."""

    def __init__(self, moved: Moved, inputs: Inputs, pool: Any):
        rows = inputs.rows.new_zeros((ROOM, *inputs.rows.shape[1:]))

        def step(fixed: tuple[Any, ...], rows: Tensor, t: Tensor) -> None:
            given = Inputs._make([*fixed, rows])
            own = rows.index_select(0, t.unsqueeze(0)).squeeze(0)
            carry, losses = moved(fixed, own, t + given.first)
            for name, value in carry.items():
                given.carry[name].copy_(value)
            given.losses.copy_(losses)
            t.add_(1)

        self.captured = Captured(step, (inputs.fixed, rows, torch.zeros_like(inputs.first)), pool, keep=moved)

    def run(self, inputs: Inputs) -> tuple[State, Tensor]:
        """All steps."""
        self.captured.load(inputs.fixed)
        fixed, plan, t = self.captured.buffers
        given = Inputs._make([*fixed, plan])
        for rows in inputs.rows.split(ROOM):
            plan[: len(rows)].copy_(rows)
            t.zero_()
            for _ in range(len(rows)):
                self.captured.graph.replay()
            given.first.add_(len(rows))
        return {k: v.clone() for k, v in given.carry.items()}, given.losses.clone()


def compiled(function: Callable[..., Any], inputs: tuple[Any, ...], said: set[str]) -> Callable[..., Any]:
    """The function by torch.compile for inputs of these shapes; as it is, with a message, where that fails.

    What is compiled is a trace, in which the transforms of torch.func, our convolutions and our noise are resolved.
    What was `said` is not said again.
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

        with plainly():
            trace = make_fx(flat)(*tensors)
        merge(trace.graph)
        settle(trace.graph)
        trace.recompile()
        fused = torch.compile(trace, dynamic=False)
        fused(*tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, and never should a run
        _warn(f"A step runs without torch.compile, which fails: {uncompiled(error)}", said)
        return function
    return lambda *inputs: fused(*(leaf for leaf in tree_leaves(inputs) if leaf is not None))


def _warn(text: str, said: set[str]) -> None:
    if text not in said:
        said.add(text)
        log.warning("%s", text)


# These walk through what a program is given, in every round. For plain nestings torch's own take several times as long.
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
    """What a captured program depends on of its inputs: their names, shapes and types."""
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else (tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return tuple((name, _shapes(part)) for name, part in tree.items())
    return tuple(map(_shapes, tree))


class Programs:
    """How a run's programs are executed: as they are, or captured. Captured ones are kept, the latest of them."""

    LIMIT = 64

    def __init__(self, capture: bool, fuse: bool = False, trace: bool = False, heavy: bool = False, auto: bool = False):
        self.auto = auto  # whether it is yet to be decided if steps are compiled (`compiling`)
        self.only: frozenset[str] | None = None  # the names of the steps that are; None: all
        self.capture, self.fuse, self.trace, self.heavy, self.often = capture, fuse, trace, heavy, OFTEN
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self.refused: set[Hashable] = set()  # names of what cannot be captured
        self.said: set[str] = set()  # what a person was told
        self.relieved = False  # whether all was dropped once to make room
        self.fused: dict[Hashable, Moved] = {}
        self.met: dict[Hashable, int] = {}  # how often a step was taken
        self.traces: dict[Hashable, Trace | None] = {}
        self.pool: Any = None

    @property
    def few(self) -> bool:
        """Whether another shape of the inputs is dearer than padding."""
        return self.capture or self.fuse

    @property
    def least(self) -> int:
        """Lanes below which the batch does not shrink: a graph more is soon worth it, another compiled one is not."""
        return 0 if not self.few else 1 if self.heavy and not self.fuse else SMALL

    @property
    def settled(self) -> bool:
        """Whether no recorded step will become faster yet."""
        played = [trace[1] for trace in self.traces.values() if trace is not None]
        return not any(isinstance(each, Quickened) and each.soon is not None for each in played)

    def forget(self) -> None:
        """Drops all that was captured or traced, and what is known of it."""
        self.graphs.clear()
        self.refused.clear()
        self.fused.clear()
        self.met.clear()
        self.traces.clear()
        self.pool = None

    def shapes_of(self, steps: Collection[str]) -> int:
        """How many shapes of these steps are captured, each of which would have to be compiled."""
        names = [cast(Any, key)[0][0] for key in self.graphs]
        return sum(len(steps) if name == "round" else name in steps for name in names)

    def fuse_from_now(self, steps: frozenset[str]) -> None:
        """Compiles these steps from now on; what was captured without is dropped."""
        self.fuse, self.auto, self.only = True, False, steps
        self.forget()

    @property
    def inside(self) -> Programs:
        """The same for parts of a program that is itself captured: they run as they are."""
        other = copy.copy(self)
        other.capture = False
        return other

    def call(
        self,
        name: Hashable,
        function: Callable[..., Any],
        *inputs: Any,
        keep: Any = None,
        instead: Callable[[], Any] | None = None,
    ) -> Any:
        """A function of tensors alone; what to do `instead` where it cannot be captured, if that is something else.

        `name` and the inputs' shapes tell it from all others.
        """
        make = lambda pool: Captured(function, inputs, pool, keep)  # noqa: E731
        found = self._found(name, _shapes(inputs), make)
        if found is None:
            return function(*inputs) if instead is None else instead()
        return found(*inputs)

    def _found(self, name: Hashable, shapes: Hashable, make: Callable[[Any], Any]) -> Any:
        """What is captured under a name for these shapes, now or before; None if it is to run as it is."""
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
                log.warning("A part of the work is launched step by step, for it cannot be a CUDA graph: %s", why)
                return None
            if len(self.graphs) > self.LIMIT:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def run(self, name: Hashable, move: Move, inputs: Inputs, steps: np.ndarray, runs: bool) -> tuple[State, Tensor]:
        """All steps of a phase: the last carry and the summed losses.

        `name` tells apart steps that do different things with inputs of the same shapes, `steps` are the lanes' own,
        and `runs` says that the lanes belong to several runs.
        """
        if steps.min() == steps.max():
            return self._segment(name, move, inputs, False)
        order = uploaded(torch.as_tensor(np.argsort(-steps, kind="stable")), inputs.rows.device)
        at = OF_LANES + OF_RUNS * runs
        pick = lambda t: None if t is None else t[order]  # noqa: E731
        inputs = Inputs._make([*tree_map(pick, inputs[:at]), *inputs[at:-1], inputs.rows[:, :, order]])
        counts = np.sort(steps)[::-1]
        carry, losses = {k: v.clone() for k, v in inputs.carry.items()}, inputs.losses.clone()
        for first, last, lanes in segments(counts, self.least):
            head = lambda t, n=lanes: None if t is None else t[:n]  # noqa: E731
            now = inputs._replace(carry=carry, losses=losses)
            part = Inputs._make([*tree_map(head, now[:at]), *now[at:-1], inputs.rows[first:last, :, :lanes]])
            part = part._replace(first=inputs.first + first)
            moved, value = self._segment(name, move, part, bool(counts[lanes - 1] < last))
            for k, v in moved.items():
                carry[k][:lanes] = v
            losses[:lanes] = value
        back = torch.argsort(order)
        return {k: v[back] for k, v in carry.items()}, losses[back]

    def _segment(self, name: Hashable, move: Move, inputs: Inputs, ragged: bool) -> tuple[State, Tensor]:
        """Steps of the same lanes; if `ragged`, some of them are done on the way."""
        shapes = (ragged, _shapes(inputs.fixed), tuple(inputs.rows.shape[1:]))
        moved = self._fused((name, shapes), move, inputs, ragged)
        found = self._found(name, shapes, lambda pool: Steps(moved, inputs, pool))
        if found is not None:
            return found.run(inputs)
        step = self._step(name, move, moved, inputs, ragged)
        carry, losses = inputs.carry, inputs.losses
        if self.trace:  # a recorded step writes to the place of what it is given
            carry, losses = _cloned((carry, losses))
        for rows, now in zip(inputs.rows, _numbers(inputs), strict=True):
            carry, losses = step(carry, losses, rows, now)
        return carry, losses

    def _fused(self, key: tuple[Any, Hashable], move: Move, inputs: Inputs, ragged: bool) -> Moved:
        """A step as it is or, where that is wanted, compiled."""
        moved = _moved(move, ragged)
        ours = self.only is None or key[0][0] in self.only
        if not (self.fuse and ours) or inputs.rows.device.type == "cpu":
            return moved
        if key not in self.fused:
            self.fused[key] = compiled(moved, (inputs.fixed, inputs.rows[0], inputs.first), self.said)
        return self.fused[key]

    def _step(self, name: Hashable, move: Move, moved: Moved, inputs: Inputs, ragged: bool) -> OneStep:
        """A step that is not captured: as it is and on a CPU, once it has come often, its trace."""

        def step(carry: State, losses: Tensor, rows: Tensor, now: Tensor) -> tuple[State, Tensor]:
            return moved(inputs._replace(carry=carry, losses=losses).fixed, rows, now)

        if not self.trace or not inputs.samples or not enabled("recorder"):
            return step
        fixed = inputs._replace(samples=tuple(t[:0] for t in inputs.samples)).fixed  # however many samples there are
        key = (name, ragged, _shapes(fixed), tuple(inputs.rows.shape[1:]))
        self.met[key] = self.met.get(key, 0) + len(inputs.rows)
        if self.met[key] < self.often and not self.fuse:
            return step
        if key not in self.traces:
            with TRACING.alone():
                if key not in self.traces and len(self.traces) < self.LIMIT:
                    self.traces[key] = _trace(move, inputs, ragged, self.fuse, self.said)
        trace = self.traces.get(key)
        if trace is None:
            return step
        once, again = trace
        rest = [t for t in tree_leaves(inputs[2:-2]) if t is not None]
        names, ready = list(inputs.carry), once(*rest)

        def replay(carry: State, losses: Tensor, rows: Tensor, now: Tensor) -> tuple[State, Tensor]:
            return again(*(carry[k] for k in names), losses, *rest, rows, now, *ready)

        return replay


def _trace(move: Move, inputs: Inputs, ragged: bool, fuse: bool, said: set[str]) -> Trace | None:
    """A step as plain operations, in which the transforms of torch.func are resolved once; None if that fails.

    With `fuse`, what is done in every step is compiled.
    """
    leaves, kind = tree_flatten(inputs[2:-2])
    given = [i for i, leaf in enumerate(leaves) if leaf is not None]
    names = list(inputs.carry)

    def flat(*tensors: Tensor) -> tuple[State, Tensor]:
        carry, losses = dict(zip(names, tensors, strict=False)), tensors[len(names)]
        full = list(leaves)
        for i, tensor in zip(given, tensors[len(names) + 1 : -2], strict=True):
            full[i] = tensor
        rows, now = tensors[-2:]
        return _moved(move, ragged)((carry, losses, *tree_unflatten(full, kind), now), rows, now)

    tensors = [*inputs.carry.values(), inputs.losses, *(leaves[i] for i in given), inputs.rows[0], inputs.first]
    try:
        tape = record(flat, *map(torch.clone, tensors))  # it takes one tensor given twice for one input
        fixed = range(len(names) + 1, len(tensors) - 2)
        once, again = once_and_again(tape, fixed)
        if not fuse:
            return once, Quickened(again, len(names) + 1)
        fused = compiled(again, (*tensors, *once(*(tensors[i] for i in fixed))), said)

        def beside(*inputs: Tensor) -> Any:
            with TRACING.shared():
                return fused(*inputs)

        return once, beside
    except Exception as error:  # it goes as well without
        if fuse:
            _warn(f"A step is neither traced nor compiled: {uncompiled(error)}", said)
        log.debug("A step is not traced: %s: %s", type(error).__name__, error)
        return None
