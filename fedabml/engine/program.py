"""The steps of a phase, one after another: eagerly, or on a GPU as CUDA graphs replayed.

Launching the kernels of a small step costs far more than running them. A graph launches all of them at once, without
the host; it reads and writes buffers of its own, so a phase copies its inputs in, replays, and copies the result out.

Lanes whose clients have few samples are done before the others. The lanes are therefore sorted by their number of steps
and the batch shrinks as they finish: eagerly with every lane that is done, in graphs in coarser steps, because
each size is a graph of its own (`padding` says what that wastes).
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import rng
from ..algorithms.base import Site, State

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
    first: Tensor  # the number of the first step
    rows: Tensor  # sample numbers, [steps, batches of a step, lanes, batch]


# One step of all lanes: the inputs, the sample numbers, the keys → the moved carry and the losses.
Move = Callable[[Inputs, Tensor, Tensor], tuple[State, Tensor]]
OF_LANES, OF_RUNS = 6, 2  # so many of the inputs have a lane each; so many have one if there are several runs


SMALL, SHRINK = 16, 0.7  # lanes of a graph below which fewer are not faster; from one size to the next
ROOM = 128  # steps of a graph's plan; longer phases are cut


class Segment(NamedTuple):
    """Steps from `first` to `last` (not included) of the first `lanes` lanes, sorted by their number of steps."""

    first: int
    last: int
    lanes: int


def segments(steps: np.ndarray, coarse: bool) -> list[Segment]:
    """How the batch shrinks; `steps` are sorted, the most first."""
    count = len(steps)
    sizes = [count]
    while sizes[-1] > (SMALL if coarse else 1):
        sizes.append(math.ceil(sizes[-1] * SHRINK) if coarse else sizes[-1] - 1)
    ends = [int(steps[size]) if size < count else 0 for size in sizes]  # a size will do once the next lane is done
    cuts = [Segment(a, b, n) for a, b, n in zip(ends, [*ends[1:], int(steps[0])], sizes, strict=True)]
    return [cut for cut in cuts if cut.first < cut.last]


def padding(steps: np.ndarray, coarse: bool) -> float:
    """The share of the steps taken that belong to lanes which were done."""
    order = np.sort(steps)[::-1]
    taken = sum((cut.last - cut.first) * cut.lanes for cut in segments(order, coarse))
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


class Graph:
    """One step, captured for inputs of these shapes."""

    def __init__(self, move: Move, inputs: Inputs, ragged: bool, pool: Any):
        empty = inputs.rows.new_zeros((ROOM, *inputs.rows.shape[1:]))
        self.buffers: Inputs = tree_map(_cloned, inputs._replace(rows=empty))
        self.t = torch.zeros((), dtype=torch.int64, device=inputs.rows.device)

        def step() -> tuple[State, Tensor]:
            now = self.t + self.buffers.first
            rows = self.buffers.rows.index_select(0, self.t.unsqueeze(0)).squeeze(0)
            moved = move(self.buffers, rows, rng.fold(self.buffers.keys, now))
            return _held(self.buffers, moved, now if ragged else None)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose and allocate on first use, which a capture must not see
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            carry, losses = step()
            for name, value in carry.items():
                self.buffers.carry[name].copy_(value)
            self.buffers.losses.copy_(losses)
            self.t.add_(1)

    def run(self, inputs: Inputs) -> tuple[State, Tensor]:
        """All steps."""
        for target, source in zip(tree_leaves(self.buffers[:-1]), tree_leaves(inputs[:-1]), strict=True):
            if target is not None:
                target.copy_(source)
        for rows in inputs.rows.split(ROOM):
            self.buffers.rows[: len(rows)].copy_(rows)
            self.t.zero_()
            for _ in range(len(rows)):
                self.graph.replay()
            self.buffers.first.add_(len(rows))
        return {k: v.clone() for k, v in self.buffers.carry.items()}, self.buffers.losses.clone()


def _cloned(leaf: Tensor | None) -> Tensor | None:
    return leaf if leaf is None else leaf.clone(memory_format=torch.contiguous_format)


class Programs:
    """How the phases of a run are executed; captured steps are kept, the latest of them."""

    LIMIT = 32

    def __init__(self, capture: bool):
        self.capture = capture
        self.graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self.pool: Any = None

    def run(self, name: Hashable, move: Move, inputs: Inputs, steps: np.ndarray, runs: bool) -> tuple[State, Tensor]:
        """All steps of a phase: the last carry and the summed losses.

        `name` tells apart steps that do different things with inputs of the same shapes, `steps` are the lanes' own,
        and `runs` says that the lanes belong to several runs.
        """
        if steps.min() == steps.max():
            return self._segment(name, move, inputs, False)
        order = torch.as_tensor(np.argsort(-steps, kind="stable")).to(inputs.rows.device)
        at = OF_LANES + OF_RUNS * runs
        pick = lambda t: None if t is None else t[order]  # noqa: E731
        inputs = Inputs._make([*tree_map(pick, inputs[:at]), *inputs[at:-1], inputs.rows[:, :, order]])
        counts = np.sort(steps)[::-1]
        carry, losses = {k: v.clone() for k, v in inputs.carry.items()}, inputs.losses.clone()
        for first, last, lanes in segments(counts, self.capture):
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
        if not self.capture:
            return self._eager(move, inputs, ragged)
        shapes = tuple((tuple(t.shape), t.dtype) for t in tree_leaves(inputs[:-1]) if t is not None)
        names = tuple(tuple(state) for state in (inputs.carry, inputs.hyper, inputs.shared))  # leaves go by their order
        key = (name, ragged, shapes, tuple(inputs.rows.shape[1:]), names)
        if key not in self.graphs:
            try:
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                self.graphs[key] = Graph(move, inputs, ragged, self.pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.capture = False
                why = str(error).splitlines()[0]
                log.warning("Steps are launched one by one, because they cannot be captured in a CUDA graph: %s", why)
                return self._eager(move, inputs, ragged)
            if len(self.graphs) > self.LIMIT:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        return self.graphs[key].run(inputs)

    @staticmethod
    def _eager(move: Move, inputs: Inputs, ragged: bool) -> tuple[State, Tensor]:
        now = inputs.first
        for rows in inputs.rows:
            moved = move(inputs, rows, rng.fold(inputs.keys, now))
            carry, losses = _held(inputs, moved, now if ragged else None)
            inputs = inputs._replace(carry=carry, losses=losses)
            now = now + 1
        return inputs.carry, inputs.losses
