"""Compute many elementwise operations of a recorded step in one pass over memory, in C by the installed compiler.

On a CPU such operations wait for memory: each reads its operands and writes its result, for the next one to read. Here
a group of them becomes one loop that reads every operand once and writes only what others need; pieces that are to be
concatenated (`cat`) are read where they lie. Only operations whose rounding in torch is known exactly are taken
(`fusible.EXPRESSIONS`), so results have the same bits, and it does not matter when, or whether, a step is compiled. The
compiler works in the background while steps go on without it, and passes must give the same bits in a few steps before
they are used (`FusedFunction`). One difference is known: the sign of a zero that a lerp of weight 1 ends at, in a few
entries. Functions such as exp, and sqrt, which is not exact in torch, remain torch's own.

`fusible.groups` chooses the operations, `_Pass` lays a group out, writes its C and calls it, `_rewritten` puts calls
into the graph.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from . import enabled
from .c_library import compiler, in_background, library, run_in_threads
from .fusible import REAL, arguments_of, broadcast_strides, expression_of, groups, is_cat
from .recorder import Spec, has_side_effects, item, reuse_memory

log = logging.getLogger("fedabml")

WORTH = 1 << 20  # entries of all operations from which a step is worth compiling
CUT = 1 << 14  # entries of a row at a time, so that what all lanes read stays in the cache
TRIALS = 6  # steps in which passes must give the same bits; in the first of a phase some differences are 0
HEAD = Path(__file__).with_name("passes.h").read_text(encoding="utf-8")


class FusedFunction:
    """Calls a recorded function, by passes once they are compiled and gave the same bits; any thread may call it.

    Its first `owned` inputs are overwritten by results.
    """

    def __init__(self, tape: fx.GraphModule, owned: int = 0):
        self.current: Callable[..., Any] = tape
        self.owned = owned
        self.pending: Future[Callable[..., Any]] | None = None  # what may replace `current`
        try:
            if compile_passes := fused(tape, owned):
                self.pending = in_background(compile_passes)
        except Exception as error:  # the recorded function does the same
            log.debug("A step is not fused: %s: %s", type(error).__name__, error)
        reuse_memory(tape, owned)
        self.trials, self.lock = TRIALS, threading.Lock()

    def __call__(self, *inputs: Tensor) -> Any:
        pending = self.pending
        if pending is None or not pending.done():
            return self.current(*inputs)
        spare = [t.clone() for t in inputs[: self.owned]]
        results = self.current(*inputs)
        try:
            if not same(results, pending.result()(*spare, *inputs[self.owned :])):
                raise RuntimeError("its results differ in some bits")
            fails = False
        except Exception as error:
            log.debug("A step is not fused: %s: %s", type(error).__name__, error)
            fails = True
        with self.lock:
            self.trials -= 1
            if self.pending is not None and (fails or self.trials <= 0):
                self.current, self.pending = self.current if fails else pending.result(), None
        return results


def fused(tape: fx.GraphModule, owned: int = 0) -> Callable[[], fx.GraphModule] | None:
    """Return what compiles the function with its elementwise operations in few passes.

    Returns None if passes are not in use, there is no compiler, or there is not enough for them to do.
    """
    if not enabled("passes") or compiler() is None or any(has_side_effects(node) for node in tape.graph.nodes):
        return None
    chosen = groups(tape.graph)
    if sum(len(group) * group[0].meta["spec"].shape.numel() for group in chosen) < WORTH:
        return None
    passes = [
        one_pass for i, group in enumerate(chosen) if (one_pass := _Pass(group, f"pass{i}")).reads_recorded_strides()
    ]
    function = fx.GraphModule(tape, _rewritten(tape.graph, passes))
    reuse_memory(function, owned)
    source = "\n".join([HEAD, *(one_pass.source() for one_pass in passes)])

    def compile_passes() -> fx.GraphModule:
        code = library(source)
        for one_pass in passes:
            one_pass.load(code)
        return function

    return compile_passes


def same(a: Any, b: Any) -> bool:
    """Return whether two nestings of tensors hold the same bits; any NaN equals any other."""
    return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def _bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, the same ones for every NaN."""
    if not x.is_floating_point():
        return x
    return x.masked_fill(x.isnan(), torch.nan).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# -- one pass ---------------------------------------------------------------------------------------------------------
class _Pass:
    """Computes a group of operations by one function in C: operands → results, into the tensors `out` or new ones.

    The last axis is cut into segments: the pieces of a `cat`, and long ones once more. A table has a line for each: its
    length and, for all that is read and written, where it begins and the outer strides. Many threads may call a pass.
    """

    def __init__(self, nodes: list[fx.Node], name: str):
        self.nodes, self.__name__ = nodes, name
        self.calls: list[Any] = [(n, n.target, n.args, n.kwargs) for n in nodes]  # the graph may change later
        self.shape, self.strides, self.dtype = nodes[0].meta["spec"]
        inside, cats = set(nodes), [n for n in nodes if is_cat(n)]
        outside = {n: [o for o in n.all_input_nodes if o not in inside] for n in nodes}
        self.operands = list(dict.fromkeys(o for n in nodes for o in outside[n]))
        self.results = [n for n in nodes if any(user not in inside for user in n.users)]
        self.makes: list[Spec] = [node.meta["spec"] for node in self.results]
        single = dict.fromkeys(o for n in nodes if n not in cats for o in outside[n])
        self.read = {node: i for i, node in enumerate([*single, *cats])}
        # What is read and written: a tensor each, or the pieces of a `cat`.
        self.slots = [n.all_input_nodes if n in cats else [n] for n in self.read] + [[n] for n in self.results]
        strides = [broadcast_strides(self.shape, slot[0].meta["spec"]) for slot in self.slots]
        self.axes = _axes(self.shape, [s for s, slot in zip(strides, self.slots, strict=True) if len(slot) == 1], cats)
        self.sizes = [math.prod(self.shape[i] for i in axis) for axis in self.axes]
        starts = {0, *range(CUT, self.sizes[-1], CUT)}.union(*(_starts(slot) for slot in self.slots))
        self.cuts = [*sorted(starts), self.sizes[-1]]
        self.steps = [len(slot) > 1 or s[-1] for s, slot in zip(strides, self.slots, strict=True)]
        self.rows = self.sizes[0] if len(self.axes) > 1 else 1
        self.tables: dict[Any, tuple[np.ndarray, np.ndarray] | None] = {}  # by the strides of the operands
        self.function: Any = None

    def reads_recorded_strides(self) -> bool:
        """Return whether the pass can read operands as they lay when the step was recorded."""
        return self.table(tuple(n.meta["spec"].strides for n in self.operands)) is not None

    def source(self) -> str:
        """Return the pass in C: a function of a table, the rows, and the first and last unit (segment and row)."""
        real, rank, count = REAL[self.dtype], len(self.axes), len(self.read)
        suffix = "f" * (real == "float")
        names = {"FMA": f"__builtin_fma{suffix}", "FABS": f"__builtin_fabs{suffix}", "HALF": f"({real})0.5"}
        pointers, constants, loads = list[str](), list[str](), list[str]()
        for i, step in enumerate(self.steps):
            at = 1 + i * rank
            offset = "".join(f" + i{d} * q[{at + 1 + d}]" for d in range(rank - 1))
            pointers.append(f"{real} *p{i} = ({real} *)q[{at}]{offset};")
            if i < count:
                (loads if step else constants).append(f"const {real} v{i} = p{i}[{'j' * step or 0}];")
        variable, inner = {node: f"v{i}" for node, i in self.read.items()}, []
        for i, node in enumerate(n for n in self.nodes if n not in self.read):
            operands = {
                k: variable[v] if isinstance(v, fx.Node) else f"({real}){float(v).hex()}"
                for k, v in arguments_of(node).items()
            }
            text = expression_of(node).format(**operands)
            for name, builtin in names.items():
                text = text.replace(name, builtin)
            variable[node] = f"x{i}"
            inner.append(f"const {real} x{i} = {text};")
        lines = [
            f"void {self.__name__}(const int64_t *table, int64_t rows, int64_t first, int64_t last) {{",
            "for (int64_t u = first; u < last; u++) {",
            f"const int64_t *q = table + u / rows * {1 + len(self.slots) * rank}, n = q[0], i0 = u % rows;",
            *(f"for (int64_t i{d} = 0; i{d} < {self.sizes[d]}; i{d}++)" for d in range(1, rank - 1)),
            *("{", *pointers, *constants, "APART for (int64_t j = 0; j < n; j++) {", *loads, *inner),
            *(f"p{count + i}[j] = {variable[node]};" for i, node in enumerate(self.results)),
            "}}}}",
        ]
        return "\n".join(lines)

    def load(self, code: ctypes.CDLL) -> None:
        """Take the pass's function from the compiled library."""
        self.function = getattr(code, self.__name__)
        self.function.argtypes, self.function.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 3], None

    def table(self, strides: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the table for operands of these strides, with offsets in place of addresses, and whose each offset is.

        Returns None if the pass cannot read operands of these strides.
        """
        tensors, rank = [*self.operands, *self.results], len(self.axes)
        strides_of = dict(zip(tensors, [*strides, *[self.strides] * len(self.results)], strict=True))
        table = np.zeros((len(self.cuts) - 1, 1 + len(self.slots) * rank), np.int64)
        whose = np.zeros((len(table), len(self.slots)), np.int64)
        table[:, 0] = np.diff(self.cuts)
        for i, slot in enumerate(self.slots):
            starts = _starts(slot)
            for line, start in enumerate(self.cuts[:-1]):
                which = sum(s <= start for s in starts) - 1
                piece = slot[which]
                size = piece.meta["spec"].shape
                outer = broadcast_strides(self.shape, Spec(size, strides_of[piece], self.dtype))
                step = 1 if len(slot) > 1 and size[-1] == 1 else outer[-1]
                if step != self.steps[i] or not _keeps_axes_together(outer, self.shape, self.axes):
                    return None
                begin = (start - starts[which]) * step * self.dtype.itemsize
                table[line, 1 + i * rank : 1 + (i + 1) * rank] = begin, *(outer[axis[-1]] for axis in self.axes[:-1])
                whose[line, i] = tensors.index(piece)
        return table, whose

    def __call__(self, *operands: Tensor, out: Sequence[Tensor | None]) -> list[Tensor]:
        strides = tuple([t.stride() for t in operands])
        if strides not in self.tables:
            self.tables[strides] = self.table(strides)
        layout = self.tables[strides]
        if layout is None:  # the strides are not those of the recording
            return self.by_torch(operands)
        empty = torch.empty(0, dtype=self.dtype)
        results = [empty.new_empty(self.shape) if t is None or t.stride() != self.strides else t for t in out]
        table = layout[0].copy()
        table[:, 1 :: len(self.axes)] += np.array([t.data_ptr() for t in (*operands, *results)])[layout[1]]

        def run(first: int, last: int, hold: Any = (table, operands, results)) -> None:
            self.function(table.ctypes.data, self.rows, first, last)

        run_in_threads(run, len(table) * self.rows, self.shape.numel())
        return results

    def by_torch(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, computed by torch's operations."""
        values: dict[fx.Node, Any] = dict(zip(self.operands, operands, strict=True))
        for node, operation, *arguments in self.calls:
            args, kwargs = fx.map_arg(tuple(arguments), values.__getitem__)
            values[node] = operation(*args, **kwargs)
        return [values[node] for node in self.results]


def _starts(slot: list[fx.Node]) -> list[int]:
    """Return where the pieces of a tensor begin along its last axis."""
    return [sum(piece.meta["spec"].shape[-1] for piece in slot[:i]) for i in range(len(slot))]


def _axes(shape: Sequence[int], strides: Sequence[Sequence[int]], cats: Sequence[fx.Node]) -> list[list[int]]:
    """Return the axes of a shape, grouped where these strides let them be one; the last axis of a `cat` is alone."""
    axes: list[list[int]] = []
    for i, size in enumerate(shape):
        if size == 1:
            continue
        if not axes or (cats and i == len(shape) - 1) or any(s[axes[-1][-1]] != s[i] * size for s in strides):
            axes.append([])
        axes[-1].append(i)
    return axes


def _keeps_axes_together(strides: Sequence[int], shape: Sequence[int], axes: list[list[int]]) -> bool:
    """Return whether a tensor of these strides can treat each group of axes as one."""
    pairs = [(a, b) for axis in axes for a, b in itertools.pairwise(axis)]
    return all(strides[a] == strides[b] * shape[b] for a, b in pairs)


def _rewritten(graph: fx.Graph, passes: list[_Pass]) -> fx.Graph:
    """Return the graph with a call in place of every group, where the last of its operations stood or earlier."""
    pass_of = {node: one_pass for one_pass in passes for node in one_pass.nodes}
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def write(node: fx.Node) -> None:
        if node in copies:
            return
        group = pass_of.get(node)
        for operand in node.all_input_nodes if group is None else group.operands:
            write(operand)
        if group is None:
            copies[node] = new.node_copy(node, copies.__getitem__)
            return
        call = new.call_function(group, tuple(copies[n] for n in group.operands), {"out": [None] * len(group.makes)})
        for i, result in enumerate(group.results):
            copies[result] = new.call_function(item, (call, i))
            copies[result].meta["spec"] = result.meta["spec"]

    for node in graph.nodes:
        if node not in pass_of or node is pass_of[node].nodes[-1]:
            write(node)
    return new
