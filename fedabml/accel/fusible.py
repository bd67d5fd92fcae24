"""Which operations of a recorded step one pass over memory may compute, and in which groups: see `fused_passes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .recorder import Spec

LEAST = 1 << 14  # entries of a tensor from which a pass saves more than it costs
REAL = {torch.float32: "float", torch.float64: "double"}

# What torch's kernels compute, in C, by the names of their arguments; FMA rounds once, as theirs do.
EXPRESSIONS = {
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
OVERLOADS = ("default", "Tensor", "Scalar")


def groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the groups of operations that become one pass each, in the order of the graph.

    A node joins the group of an operand unless some other node depends on the one and feeds the other.
    """
    fusible = [node for node in graph.nodes if _is_fusible(node)]
    group = {node: [node] for node in fusible}
    for node in (n for n in fusible if not is_cat(n)):
        for operand in node.all_input_nodes:
            ours, theirs = group[node], group.get(operand)
            if theirs is None or theirs is ours or operand.meta["spec"] != node.meta["spec"]:
                continue
            if not _negates_rounded_sum(node, operand) and not _has_path_between(theirs, ours, group):
                theirs.extend(ours)
                group.update(dict.fromkeys(ours, theirs))
    position = {node: i for i, node in enumerate(graph.nodes)}
    ordered = {id(members): sorted(members, key=position.__getitem__) for members in group.values()}
    return [members for members in ordered.values() if len(members) > 1]


def _has_path_between(first: list[fx.Node], last: list[fx.Node], group: dict[fx.Node, list[fx.Node]]) -> bool:
    """Return whether a path leads from one group to another through other nodes; a joint pass would wait for itself."""
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


def _negates_rounded_sum(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether a node negates a sum that is rounded once: GCC turns -(ab + c) into -ab - c, another zero."""
    negative = str(node.target) == "aten.neg.default" or -1 in node.args
    return negative and "FMA" in expression_of(operand)


def expression_of(node: fx.Node) -> str:
    """Return what an operation computes, in C; an empty string if it is not one of `EXPRESSIONS`."""
    space, _, name = str(node.target).partition(".")
    name, _, overload = name.partition(".")
    if space != "aten" or overload not in OVERLOADS:
        return ""
    alpha = arguments_of(node).get("alpha", 1)
    return EXPRESSIONS.get(name if alpha == 1 else f"{name} alpha", "")


def is_cat(node: fx.Node) -> bool:
    return str(node.target) == "aten.cat.default"


def _is_fusible(node: fx.Node) -> bool:
    """Return whether a node is a known elementwise operation whose result has a size and layout that a pass writes."""
    spec: Spec | None = node.meta.get("spec")
    if node.op != "call_function" or spec is None or spec.dtype not in REAL or spec.shape.numel() < LEAST:
        return False
    shape, strides, dtype = spec
    specs: list[Any] = [n.meta.get("spec") for n in node.all_input_nodes]
    if strides != _dense(shape) or shape[-1] == 1 or any(s is None or s.dtype != dtype for s in specs):
        return False
    arguments = arguments_of(node)
    if is_cat(node):
        covers = all(s.shape[:-1] == shape[:-1] and 0 < s.shape[-1] < shape[-1] and _inner(s) for s in specs)
        return arguments["dim"] % len(shape) == len(shape) - 1 and len(arguments["tensors"]) == len(specs) and covers
    if not expression_of(node) or any(broadcast_strides(shape, s)[-1] not in (0, 1) for s in specs):
        return False
    numbers = [value for value in arguments.values() if not isinstance(value, fx.Node)]
    if any(isinstance(v, (bool, str)) or not math.isfinite(v) for v in numbers):
        return False
    # With alpha and other operands torch's kernels round the entries at the end of a row differently.
    dense = isinstance(arguments.get("other"), fx.Node) and all(s.shape == shape and _inner(s) for s in specs)
    return arguments.get("alpha", 1) == 1 or dense


def _inner(spec: Spec) -> bool:
    """Return whether entries of the last axis lie side by side."""
    return spec.shape[-1] == 1 or spec.strides[-1] == 1


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by name, with defaults."""
    operation: Any = node.target
    schema = operation._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def broadcast_strides(shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """Return a tensor's strides when it is broadcast to a shape."""
    inner = [0 if size == 1 else stride for size, stride in zip(spec.shape, spec.strides, strict=True)]
    return (0,) * (len(shape) - len(inner)) + tuple(inner)
