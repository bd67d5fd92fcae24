"""Operations on entries of a recorded step, many in one pass over memory: C, by the compiler that is installed.

On a CPU such operations wait for memory: each reads its operands and writes its result, for the next one to read. Here
a group of them is one loop that reads every operand once and writes what others need; pieces to be put one behind the
other (`cat`) are read where they lie. Only operations that torch rounds exactly, in a way that is known, are taken
(`WORDS`): the result has the same bits, so it does not matter when a step is compiled, or whether there is a compiler.
So the compiler works in the background while steps go on without it, and passes are tried beside them before they are
used (`Quickened`). Known to differ: the sign of a zero that a lerp of weight 1 ends at, in a few entries. Functions
such as exp, and sqrt, which is not exact in torch, remain torch's own.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from . import enabled
from .c_library import beside, compiler, library, share
from .recorder import changes, item, reuse

log = logging.getLogger("fedabml")

LEAST = 1 << 14  # entries of a tensor below which a pass costs more than it saves
WORTH = 1 << 20  # entries of all operations below which a step is not worth a compiler's time
CUT = 1 << 14  # entries of a row at a time: what all lanes read of it stays in the cache
TRIALS = 6  # steps in which passes must have given the same: in the first of a phase some differences are 0
HEAD = """#include <stdint.h>
#ifdef __clang__
#define APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define APART _Pragma("GCC ivdep")
#endif"""
REAL = {torch.float32: "float", torch.float64: "double"}

# What torch's kernels compute, by the names of their arguments; FMA rounds once, as theirs do.
WORDS = {
    "add": "{self} + {other}",
    "sub": "{self} - {other}",
    "rsub": "{other} - {self}",
    "add alpha": "FMA({alpha}, {other}, {self})",
    "sub alpha": "FMA(-{alpha}, {other}, {self})",
    "rsub alpha": "FMA(-{alpha}, {self}, {other})",
    "mul": "{self} * {other}",
    "div": "{self} / {other}",
    "neg": "-{self}",
    "reciprocal": "1 / {self}",
    "addcmul": "FMA({value} * {tensor1}, {tensor2}, {self})",
    "addcdiv": "{self} + {value} * {tensor1} / {tensor2}",
    "lerp": "FMA(FABS({weight}) < HALF ? {weight} : {weight} - 1, {end} - {self}, "
    "FABS({weight}) < HALF ? {self} : {end})",
    "relu": "{self} < 0 ? 0 : {self}",
    "threshold_backward": "{self} <= {threshold} ? 0 : {grad_output}",
}
KINDS = ("default", "Tensor", "Scalar")  # of an operation

Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]  # of a tensor: shape, strides, type


class Quickened:
    """A recorded function that has its passes once they are compiled and have given the same; any thread may call.

    Its first `owned` inputs are lost: results take their place.
    """

    def __init__(self, tape: fx.GraphModule, owned: int = 0):
        self.now: Callable[..., Any] = tape
        self.owned = owned
        self.soon: Future[Callable[..., Any]] | None = None  # what may take its place
        try:
            if passes := fused(tape, owned):
                self.soon = beside(passes)
        except Exception as error:  # it goes as well without
            log.debug("A step is not fused: %s: %s", type(error).__name__, error)
        reuse(tape, owned)
        self.trials, self.lock = TRIALS, threading.Lock()

    def __call__(self, *inputs: Tensor) -> Any:
        soon = self.soon
        if soon is None or not soon.done():
            return self.now(*inputs)
        spare = [t.clone() for t in inputs[: self.owned]]
        found = self.now(*inputs)
        try:
            if not same(found, soon.result()(*spare, *inputs[self.owned :])):
                raise RuntimeError("it would not be the same, to the last bit")
            fails = False
        except Exception as error:
            log.debug("A step is not fused: %s: %s", type(error).__name__, error)
            fails = True
        with self.lock:
            self.trials -= 1
            if self.soon is not None and (fails or self.trials <= 0):
                self.now, self.soon = self.now if fails else soon.result(), None
        return found


def fused(tape: fx.GraphModule, owned: int = 0) -> Callable[[], fx.GraphModule] | None:
    """Compiles the same function with its operations on entries in few passes; None if that would not pay."""
    if not worth(tape):
        return None
    plans = [_Plan(group, f"pass{i}") for i, group in enumerate(_groups(tape.graph))]
    passes = [_Pass(plan) for plan in plans if plan.table([n.meta["kind"][1] for n in plan.operands]) is not None]
    whole, source = fx.GraphModule(tape, _rewritten(tape.graph, passes)), [each.plan.source for each in passes]
    reuse(whole, owned)

    def made() -> fx.GraphModule:
        code = library("\n".join([HEAD, *source]))
        for each in passes:
            each.load(code)
        return whole

    return made


def worth(tape: fx.GraphModule) -> bool:
    """Whether there is a compiler, and enough for it to do."""
    if not enabled("passes") or compiler() is None or any(changes(node) for node in tape.graph.nodes):
        return False
    return sum(len(group) * group[0].meta["kind"][0].numel() for group in _groups(tape.graph)) >= WORTH


def same(a: Any, b: Any) -> bool:
    """Whether two nestings hold the same bits; what is not a number is like all that are not."""
    return all(_same(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def _same(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return torch.equal(x, y)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    alike = x.view(bits) == y.view(bits)
    return bool(alike.all()) or bool((alike | (x.isnan() & y.isnan())).all())


# -- which operations -------------------------------------------------------------------------------------------------
def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Operations to be one pass: a node joins those that make its operands unless something else stands between."""
    taken = [node for node in graph.nodes if _fit(node)]
    group = {node: [node] for node in taken}
    for node in taken:
        for operand in node.all_input_nodes:
            ours, theirs = group[node], group.get(operand, group[node])
            if theirs is ours or operand.meta["kind"] != node.meta["kind"] or _is_cat(node) or _turns(node, operand):
                continue
            if not _between(theirs, ours, group):
                theirs.extend(ours)
                group.update(dict.fromkeys(ours, theirs))
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = {id(members): sorted(members, key=place.__getitem__) for members in group.values()}
    return [members for members in found.values() if len(members) > 1]


def _between(first: list[fx.Node], last: list[fx.Node], group: dict[fx.Node, list[fx.Node]]) -> bool:
    """Whether some path leads from the first to the last through other nodes, which would have to wait for itself."""
    ends = {*first, *last}
    stack = [user for node in first for user in node.users if user not in ends]
    met = set(stack)
    while stack:
        for member in group.get(node := stack.pop(), [node]):
            for user in member.users:
                if user in last:
                    return True
                if user not in met and user not in ends:
                    met.add(user)
                    stack.append(user)
    return False


def _turns(node: fx.Node, operand: fx.Node) -> bool:
    """Whether it is the negative of a sum that is rounded once: of -(ab + c) GCC makes -ab - c, another zero."""
    negative = str(node.target) == "aten.neg.default" or -1 in node.args
    return negative and "FMA" in _words(operand)


def _words(node: fx.Node) -> str:
    """What an operation computes; nothing if we do not know it."""
    space, _, name = str(node.target).partition(".")
    name, _, kind = name.partition(".")
    if space != "aten" or kind not in KINDS:
        return ""
    alpha = _said(node).get("alpha", 1)
    return WORDS.get(name if alpha == 1 else f"{name} alpha", "")


def _is_cat(node: fx.Node) -> bool:
    return str(node.target) == "aten.cat.default"


def _fit(node: fx.Node) -> bool:
    """Whether a node is an operation on entries that we know, its result of a size and layout that we can write."""
    kind: Kind | None = node.meta.get("kind")
    if node.op != "call_function" or kind is None or kind[2] not in REAL or kind[0].numel() < LEAST:
        return False
    shape, strides, dtype = kind
    kinds: list[Any] = [n.meta.get("kind") for n in node.all_input_nodes]
    if strides != _dense(shape) or shape[-1] == 1 or any(k is None or k[2] != dtype for k in kinds):
        return False
    if _is_cat(node):
        pieces, axis = node.args[0], _said(node)["dim"]
        assert isinstance(pieces, (list, tuple))
        whole = all(k[0][:-1] == shape[:-1] and 0 < k[0][-1] < shape[-1] and _inner(k) for k in kinds)
        return axis % len(shape) == len(shape) - 1 and len(pieces) == len(kinds) and whole
    if not _words(node) or any(_strides(shape, k)[-1] not in (0, 1) for k in kinds):
        return False
    said = _said(node)
    if any(isinstance(v, (bool, str)) or not math.isfinite(v) for v in said.values() if not isinstance(v, fx.Node)):
        return False
    # Here torch's kernels round the entries at the end of a row otherwise than the rest.
    odd = said.get("alpha", 1) != 1
    return not odd or (
        len(node.args) > 1 and isinstance(node.args[1], fx.Node) and all(k[0] == shape and _inner(k) for k in kinds)
    )


def _inner(kind: Kind) -> bool:
    """Whether entries of the last axis lie side by side."""
    return kind[0][-1] == 1 or kind[1][-1] == 1


def _said(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by name."""
    schema: Any = node.target
    arguments = schema._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(arguments, node.args, strict=False)}
    return given | dict(node.kwargs)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of rows one behind the other."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _strides(shape: Sequence[int], kind: Kind) -> tuple[int, ...]:
    """A tensor's strides as it is broadcast to a shape."""
    mine = [0 if size == 1 else stride for size, stride in zip(kind[0], kind[1], strict=True)]
    return (0,) * (len(shape) - len(mine)) + tuple(mine)


# -- one pass ---------------------------------------------------------------------------------------------------------
class _Plan:
    """What a pass reads and writes, how, and its source.

    The last axis is cut into segments: the pieces of a `cat`, and long ones once more. A table has a line for each: its
    length and, for all that is read and written, where it begins and the outer strides.
    """

    def __init__(self, nodes: list[fx.Node], name: str):
        self.nodes, self.name = nodes, name
        self.calls: list[Any] = [(node, node.target, node.args, node.kwargs) for node in nodes]  # as they are now
        self.shape, self.strides, self.dtype = nodes[0].meta["kind"]
        inside, cats = set(nodes), [n for n in nodes if _is_cat(n)]
        self.operands = list(dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in inside))
        self.results = [n for n in nodes if any(user not in inside for user in n.users)]
        plain = list(dict.fromkeys(o for n in nodes if n not in cats for o in n.all_input_nodes if o not in inside))
        self.read = {node: i for i, node in enumerate([*plain, *cats])}
        # What is read and written, tensors or the pieces of one.
        self.slots = [n.all_input_nodes if n in cats else [n] for n in self.read] + [[n] for n in self.results]
        whole = [_strides(self.shape, slot[0].meta["kind"]) for slot in self.slots if len(slot) == 1]
        self.axes = _axes(self.shape, whole, bool(cats))
        self.sizes = [math.prod(self.shape[i] for i in axis) for axis in self.axes]
        starts = {0, *range(CUT, self.sizes[-1], CUT)}.union(*(_starts(slot) for slot in self.slots))
        self.cuts = [*sorted(starts), self.sizes[-1]]
        self.steps = [len(slot) > 1 or _strides(self.shape, slot[0].meta["kind"])[-1] for slot in self.slots]

    @property
    def source(self) -> str:
        """The pass in C, over the outermost axis and the segments from one to another."""
        real, rank, count = REAL[self.dtype], len(self.axes), len(self.read)
        suffix = "f" * (real == "float")
        names = {"FMA": f"__builtin_fma{suffix}", "FABS": f"__builtin_fabs{suffix}", "HALF": f"({real})0.5"}
        outer, loads = [], [f"const {real} v{i} = p{i}[{'j' * step or 0}];" for i, step in enumerate(self.steps)]
        for i in range(len(self.slots)):
            at = 1 + i * rank
            way = "".join(f" + i{d} * q[{at + 1 + d}]" for d in range(rank - 1))
            outer.append(f"{real} *p{i} = ({real} *)q[{at}]{way};")
        variable, inner = {node: f"v{i}" for node, i in self.read.items()}, []
        for i, node in enumerate(n for n in self.nodes if n not in self.read):
            told = {
                k: variable[v] if isinstance(v, fx.Node) else f"({real}){float(v).hex()}"
                for k, v in _said(node).items()
            }
            words = _words(node).format(**told)
            for name, builtin in names.items():
                words = words.replace(name, builtin)
            variable[node] = f"x{i}"
            inner.append(f"const {real} x{i} = {words};")
        lines = [
            f"void {self.name}(const int64_t *table, int64_t rows, int64_t first, int64_t last) {{",
            "for (int64_t u = first; u < last; u++) {",
            f"const int64_t *q = table + u / rows * {1 + len(self.slots) * rank}, n = q[0], i0 = u % rows;",
            *(f"for (int64_t i{d} = 0; i{d} < {self.sizes[d]}; i{d}++)" for d in range(1, rank - 1)),
            "{",
            *outer,
            *(load for load, step in zip(loads[:count], self.steps, strict=False) if not step),
            "APART for (int64_t j = 0; j < n; j++) {",
            *(load for load, step in zip(loads[:count], self.steps, strict=False) if step),
            *inner,
            *(f"p{count + i}[j] = {variable[node]};" for i, node in enumerate(self.results)),
            "}}}}",
        ]
        return "\n".join(lines)

    def plainly(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results by torch's operations."""
        known: dict[fx.Node, Any] = dict(zip(self.operands, operands, strict=True))
        for node, operation, args, words in self.calls:
            given, named = fx.map_arg((args, words), known.__getitem__)
            known[node] = operation(*given, **named)
        return [known[node] for node in self.results]

    def table(self, strides: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray] | None:
        """For operands of these strides: the table with offsets for addresses, and whose; None if they do not fit."""
        tensors, rank = [*self.operands, *self.results], len(self.axes)
        own = dict(zip(tensors, [*strides, *[self.strides] * len(self.results)], strict=True))
        table = np.zeros((len(self.cuts) - 1, 1 + len(self.slots) * rank), np.int64)
        whose = np.zeros((len(table), len(self.slots)), np.int64)
        table[:, 0] = np.diff(self.cuts)
        for i, slot in enumerate(self.slots):
            starts = _starts(slot)
            for line, start in enumerate(self.cuts[:-1]):
                which = sum(s <= start for s in starts) - 1
                piece = slot[which]
                mine = _strides(self.shape, (piece.meta["kind"][0], own[piece], self.dtype))
                step = 1 if len(slot) > 1 and piece.meta["kind"][0][-1] == 1 else mine[-1]
                if step != self.steps[i] or not _walks(mine, self.shape, self.axes):
                    return None
                begin = (start - starts[which]) * step * self.dtype.itemsize
                table[line, 1 + i * rank : 1 + (i + 1) * rank] = begin, *(mine[axis[-1]] for axis in self.axes[:-1])
                whose[line, i] = tensors.index(piece)
        return table, whose


def _starts(slot: list[fx.Node]) -> list[int]:
    """Where the pieces of a tensor begin along its last axis."""
    return [sum(piece.meta["kind"][0][-1] for piece in slot[:i]) for i in range(len(slot))]


def _axes(shape: Sequence[int], strides: Sequence[Sequence[int]], cat: bool) -> list[list[int]]:
    """The axes of a shape, those together that tensors of these strides can walk as one; a `cat`'s last is alone."""
    axes: list[list[int]] = []
    for i, size in enumerate(shape):
        alone = not axes or (cat and i == len(shape) - 1) or any(s[axes[-1][-1]] != s[i] * size for s in strides)
        if size == 1:
            continue
        if alone:
            axes.append([i])
        else:
            axes[-1].append(i)
    return axes


def _walks(strides: Sequence[int], shape: Sequence[int], axes: list[list[int]]) -> bool:
    """Whether a tensor can walk axes together as they are."""
    pairs = [(a, b) for axis in axes for a, b in itertools.pairwise(axis)]
    return all(strides[a] == strides[b] * shape[b] for a, b in pairs)


class _Pass:
    """A compiled pass: of its operands, its results, in the places given or new ones. Many threads may call it."""

    def __init__(self, plan: _Plan):
        self.plan, self.__name__ = plan, plan.name
        self.makes: list[Kind] = [node.meta["kind"] for node in plan.results]
        self.function: Any = None
        self.tables: dict[Any, Any] = {}  # by the strides of the operands
        self.size, self.rows = plan.shape.numel(), plan.sizes[0] if len(plan.axes) > 1 else 1

    def load(self, code: ctypes.CDLL) -> None:
        """Takes its function from where it was compiled."""
        self.function = getattr(code, self.plan.name)
        self.function.argtypes, self.function.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 3], None

    def __call__(self, *operands: Tensor, out: Sequence[Tensor | None]) -> list[Tensor]:
        plan = self.plan
        key = tuple([t.stride() for t in operands])
        if key not in self.tables:
            self.tables[key] = plan.table(key)
        if self.tables[key] is None:  # they lie otherwise than when the step was recorded
            return plan.plainly(operands)
        fresh = lambda: torch.empty(plan.shape, dtype=plan.dtype)  # noqa: E731
        made = [fresh() if t is None or t.stride() != plan.strides else t for t in out]
        lines, whose = self.tables[key]
        table = lines.copy()
        table[:, 1 :: len(plan.axes)] += np.array([t.data_ptr() for t in (*operands, *made)])[whose]

        def run(first: int, last: int, hold: Any = (table, operands, made)) -> None:
            self.function(table.ctypes.data, self.rows, first, last)

        share(run, len(table) * self.rows, self.size)
        return made


def _rewritten(graph: fx.Graph, passes: list[_Pass]) -> fx.Graph:
    """The graph with a call in place of every group, where the last of its operations stood or before."""
    part = {node: each for each in passes for node in each.plan.nodes}
    new, now = fx.Graph(), dict[fx.Node, fx.Node]()

    def write(node: fx.Node) -> None:
        if node in now:
            return
        one = part.get(node)
        for operand in node.all_input_nodes if one is None else one.plan.operands:
            write(operand)
        if one is None:
            now[node] = new.node_copy(node, now.__getitem__)
            return
        operands, out = tuple(now[n] for n in one.plan.operands), [None] * len(one.makes)
        call = new.call_function(one, operands, {"out": out})
        for i, result in enumerate(one.plan.results):
            now[result] = new.call_function(item, (call, i))
            now[result].meta["kind"] = result.meta["kind"]

    for node in graph.nodes:
        if node not in part or node is part[node].plan.nodes[-1]:
            write(node)
    return new
