"""Record the plain operations that a function of tensors executes once, to replay them without its Python.

Below the transforms of torch.func, `vmap` and `grad` are resolved: what arrives there are ordinary operations on
ordinary tensors. Executing those alone saves a small step most of its time. `make_fx` does the same, but loads torch's
compiler, which takes longer than many runs. `record` returns an `fx.GraphModule`; the other functions improve one.
Every node's `meta["spec"]` is the `Spec` of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Spec(NamedTuple):
    """Describes how a tensor lies in memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):
    """Adds every operation to a graph. Tensors are known by their identity, so all of them are kept alive."""

    def __init__(self, inputs: tuple[Tensor, ...]):
        super().__init__()
        self.graph, self.constants = fx.Graph(), torch.nn.Module()
        self.tensors: list[Tensor] = []
        self.nodes: dict[int, fx.Node] = {}
        for i, tensor in enumerate(inputs):
            self._note(tensor, self.graph.placeholder(f"input{i}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode, so the compiler need not be loaded

    def node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor; a tensor that no operation has made becomes a constant."""
        if id(tensor) not in self.nodes:
            name = f"constant{len(self.tensors)}"
            self.constants.register_buffer(name, tensor)
            self._note(tensor, self.graph.get_attr(name))
        return self.nodes[id(tensor)]

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["spec"] = Spec(tensor.shape, tensor.stride(), tensor.dtype)
        self.nodes[id(tensor)] = node
        self.tensors.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tree_map_only(Tensor, self.node, (tuple(args), dict(kwargs or {})))
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, (Tensor, tuple, list, type(None))):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                raise RuntimeError(f"Python looks at a tensor's value ({func}), which a recording would keep for ever.")
            return out  # such as the common type of two types
        node = self.graph.call_function(func, *operands)
        if isinstance(out, Tensor):
            self._note(out, node)
        elif isinstance(out, (tuple, list)):
            for i, result in enumerate(out):
                if isinstance(result, Tensor):
                    self._note(result, self.graph.call_function(item, (node, i)))
        return out


def item(values: Any, i: int) -> Any:
    """Return one of several results."""
    return values[i]


def record(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return the operations of `function(*inputs)`, for inputs of these shapes. No two inputs may be the same tensor.

    Tensors that the function takes from elsewhere become constants. Raises RuntimeError if it reads a tensor's value.
    """
    recorder = _Recorder(inputs)
    with recorder:
        out = function(*inputs)
    recorder.graph.output(tree_map_only(Tensor, recorder.node, out))
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(recorder.constants, recorder.graph)


def split_fixed(tape: fx.GraphModule, fixed: range) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a recorded function into what depends on its `fixed` inputs alone, and the rest, to be called repeatedly.

    The first part takes the fixed inputs and returns a list; the second takes all inputs and the entries of that list.
    Operations with the same operands are done once. A function that changes tensors in place, or draws torch's random
    numbers, is left whole, as the second part.
    """
    merge_duplicates(tape.graph)
    movable = not any(has_side_effects(node) for node in tape.graph.nodes)
    inputs = [node for node in tape.graph.nodes if node.op == "placeholder"]
    first, second = fx.Graph(), fx.Graph()
    in_first = {node: first.placeholder(node.name) for i, node in enumerate(inputs) if i in fixed}
    in_second = {node: second.placeholder(node.name) for node in inputs}
    remaining_nodes: list[fx.Node] = []
    for node in tape.graph.nodes:
        if movable and node.op not in ("placeholder", "output") and all(n in in_first for n in node.all_input_nodes):
            in_first[node] = first.node_copy(node, in_first.__getitem__)
        elif node.op != "placeholder":
            remaining_nodes.append(node)
    passed_on = [n for n in in_first if n not in in_second and any(user not in in_first for user in n.users)]
    in_second |= {node: second.placeholder(node.name) for node in passed_on}
    for node, copied in in_second.items():
        copied.meta = dict(node.meta)
    for node in remaining_nodes:
        in_second[node] = second.node_copy(node, in_second.__getitem__)
    first.output([in_first[node] for node in passed_on])
    return fx.GraphModule(tape, first), fx.GraphModule(tape, second)


def merge_duplicates(graph: fx.Graph) -> None:
    """Do an operation with the same operands once, and leave out operations that return their operand."""
    if any(has_side_effects(node) for node in graph.nodes):
        return
    node_by_operation: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            operation = repr((str(node.target), node.args, node.kwargs))
            earlier = node.all_input_nodes[0] if _is_identity(node) else node_by_operation.setdefault(operation, node)
            replacement = _before_two_transposes(node) or earlier
            if replacement is not node:
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
    graph.eliminate_dead_code()


def store_operands(graph: fx.Graph) -> None:
    """Make torch's compiler store what our products read once; otherwise it stores it again for every view read."""
    read = [n for n in graph.nodes if n.op == "call_function" and str(n.target).startswith("fedabml.multiply")]
    if not read:
        return
    from torch._inductor import inductor_prims

    for node in dict.fromkeys(_source(operand) for n in read for operand in n.args[:2]):
        if node.op == "call_function":
            with graph.inserting_after(node):
                stored = graph.call_function(inductor_prims.force_stride_order, (node, node.meta["val"].stride()))
            node.replace_all_uses_with(stored, partial(is_not, stored))


def _source(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows: an input, an operation's result or one of several results."""
    while node.op == "call_function" and not _owns_memory(node):
        above = node.all_input_nodes[0]
        if _owns_memory(above) and not isinstance(above.meta["val"], Tensor):
            break
        node = above
    return node


def _is_identity(node: fx.Node) -> bool:
    """Return whether an operation returns its operand: a view with the same shape and strides, or a product with 1."""
    name = str(node.target)
    if not name.startswith(("aten.view.", "aten._unsafe_view.", "aten.expand.", "aten.permute.", "aten.mul.Scalar")):
        return False
    unchanged = "spec" in node.meta and node.meta["spec"] == node.all_input_nodes[0].meta.get("spec")
    return unchanged and ("mul" not in name or node.args[1] in (1,))


def _before_two_transposes(node: fx.Node) -> fx.Node | None:
    """Return the tensor before the same two axes were exchanged twice; None if the node does not undo a transpose."""
    if str(node.target) != "aten.transpose.int":
        return None
    above = node.all_input_nodes[0]
    return above.all_input_nodes[0] if above.target is node.target and above.args[1:] == node.args[1:] else None


def reuse_memory(tape: fx.GraphModule, owned: int = 0) -> int:
    """Let elementwise operations write into an operand that nothing reads later, which is still in the cache.

    The first `owned` inputs may be such operands: their caller gives them away, and passes this call's results in the
    next. Returns how many inputs may be overwritten: none if two results share memory, or show an input's.
    """
    if any(has_side_effects(node) for node in tape.graph.nodes):
        return 0
    inputs = [node for node in tape.graph.nodes if node.op == "placeholder"]
    allocated = {node for node in tape.graph.nodes if _owns_memory(node)}
    writable = allocated | {*inputs[:owned]}
    owner: dict[fx.Node, fx.Node] = {}  # the node whose memory a node shows
    last_reader: dict[fx.Node, fx.Node] = {}  # of that memory
    for node in tape.graph.nodes:
        owner[node] = node if node in writable or not node.all_input_nodes else owner[node.all_input_nodes[0]]
        last_reader |= {owner[n]: node for n in node.all_input_nodes}
    results = [owner[leaf] for leaf in tree_leaves(tape.graph.output_node().args) if isinstance(leaf, fx.Node)]
    if len({*results}) < len(results) or not writable.issuperset(results):
        owned, writable = 0, allocated
    for node in tape.graph.nodes:
        makes = getattr(node.target, "makes", None)
        if node not in allocated or (makes is None and torch.Tag.pointwise not in getattr(node.target, "tags", ())):
            continue
        memories = [owner[n] for n in node.all_input_nodes]
        spec = makes[0] if makes else node.meta.get("spec")
        reusable = [
            n
            for n, memory in zip(node.all_input_nodes, memories, strict=True)
            if memory in writable and last_reader[memory] is node and memories.count(memory) == 1
            if spec is not None and n.meta.get("spec") == spec
        ]
        if makes is not None:
            node.kwargs = {"out": [*reusable, *[None] * len(makes)][: len(makes)]}
        elif reusable and (variant := _out_variant(node.target)):
            node.target, node.kwargs = variant, {**node.kwargs, "out": reusable[0]}
    tape.recompile()
    return owned


def _out_variant(operation: Any) -> Any:
    """Return the variant of an operation that writes into `out=`; None if there is none, or one that only copies."""

    def arguments(operation: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in operation._schema.arguments]

    overloads = [getattr(operation.overloadpacket, name) for name in operation.overloadpacket.overloads()]
    parameters = [*arguments(operation), ("out", "Tensor")]
    return next((o for o in overloads if arguments(o) == parameters and torch.Tag.generated not in o.tags), None)


# Operations whose schemas do not tell that they return views.
_VIEWS = {torch.ops.aten._unsafe_view, torch.ops.aten.unsafe_split, torch.ops.aten.unsafe_split_with_sizes}


def _owns_memory(node: fx.Node) -> bool:
    """Return whether an operation's result has memory of its own."""
    operation: Any = node.target
    if operation is item:
        return hasattr(node.all_input_nodes[0].target, "makes")  # the results of a fused pass have
    if node.op != "call_function" or not hasattr(operation, "_schema"):
        return hasattr(operation, "makes")
    view = operation.overloadpacket in _VIEWS
    return not view and all(r.alias_info is None for r in operation._schema.returns)


def has_side_effects(node: fx.Node) -> bool:
    """Return whether an operation must not be moved or merged: it changes a tensor, or draws torch's random numbers."""
    operation: Any = node.target
    if node.op != "call_function" or not hasattr(operation, "_schema"):
        return False
    return operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags
