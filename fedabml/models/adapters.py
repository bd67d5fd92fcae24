"""Which weights of a module are trained: all, the head, or the head and low-rank changes of the body.

    all     every parameter that is not frozen already
    head    the last layer; of a Hugging Face classifier all that is not its base model. The body is frozen.
    lora    the head, and for every linear layer of the body W + (α/r) B A, with A [r, in], B [out, r] and W frozen

B starts at 0, so the first output is that of the module itself. Reference: Hu et al., "LoRA: low-rank adaptation of
large language models", ICLR 2022.

Also here: `materialised`, which gives lazy layers their shapes before weights are counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import rng
from ..arguments import check_fields, checked_integer
from ..errors import InputError, nearest
from .networks import Seeded
from .own import TRAINED


@dataclass(frozen=True)
class Adapter:
    """Which weights of a module are trained; `rank` and `alpha` are those of low-rank changes."""

    train: str = "all"
    rank: int = 8
    alpha: float = 16.0
    head: str = "auto"  # or the name that the parameters of the head begin with

    def __post_init__(self) -> None:
        check_fields(self)
        if self.train not in TRAINED:
            raise InputError(f"train is '{self.train}'.{nearest(self.train, TRAINED)}")
        checked_integer(self.rank, "lora_rank", 1)
        if not 0 < self.alpha < math.inf:
            raise InputError(f"lora_alpha must be a positive number; it is {self.alpha!r}.")

    def apply(self, module: nn.Module, seed: int = 0, head: Collection[str] = ()) -> nn.Module:
        """Return a copy of a module in which only the chosen weights are trainable; both share their memory.

        `head` names the parameters of the head, if they are known. The seed decides where A starts.
        """
        if self.train == "all":
            return module
        memo = {id(p): nn.Parameter(p.data, requires_grad=False) for p in module.parameters()}
        module = copy.deepcopy(module, memo)
        head = head or _head_names(module, self.head)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in head)
        if self.train == "lora":
            _add_low_rank(module, self, head, torch.Generator().manual_seed(rng.number(seed, rng.INIT) & 0x7FFFFFFF))
        return module

    def head_of(self, trained: Collection[str]) -> list[str]:
        """Return those of the trained parameters' names that are the head's, without those of low-rank changes."""
        return [name for name in trained if self.train != "lora" or not name.endswith((".lora_a", ".lora_b"))]


class LowRank(nn.Module):
    """A frozen linear layer with a trainable change of low rank: x ↦ base(x) + (α/r) B A x."""

    def __init__(self, base: nn.Module, rank: int, alpha: float, generator: torch.Generator):
        super().__init__()
        weight = base.weight
        assert isinstance(weight, Tensor)
        self.base, self.scale = base, alpha / rank
        inputs, outputs = weight.shape if _is_transposed(base) else weight.shape[::-1]
        bound = 1 / math.sqrt(inputs)
        a = torch.empty(rank, inputs, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @property
    def weight(self) -> Tensor:
        """W + (α/r) B A, for a module that reads the layer's weight in place of calling the layer."""
        change = self.scale * self.lora_b @ self.lora_a
        return (change.T if _is_transposed(self.base) else change) + self.base.weight  # type: ignore[operator]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]


def merged(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose low-rank changes are added to the weights of its plain layers."""
    module = copy.deepcopy(module)
    for layer in [part for part in module.modules() if isinstance(part, LowRank)]:  # each once, if several share it
        layer.base.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    for parent, name, child in _children(module):
        if isinstance(child, LowRank):
            setattr(parent, name, child.base)
    return module


def _children(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return every child of a module with its parent and its name there; one that is shared, under every name."""
    return [(p, name, child) for p in module.modules() for name, child in p._modules.items() if child is not None]


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, a linear layer with the weight [in, out]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _add_low_rank(module: nn.Module, adapter: Adapter, head: Collection[str], generator: torch.Generator) -> None:
    """Replace the linear layers of a module's body by `LowRank` layers."""
    replaced: dict[nn.Module, LowRank] = {}
    trained = {parameter for name, parameter in module.named_parameters() if name in head}
    for parent, name, child in _children(module):
        if (isinstance(child, nn.Linear) or _is_transposed(child)) and trained.isdisjoint(child.parameters()):
            if child not in replaced:
                replaced[child] = LowRank(child, adapter.rank, adapter.alpha, generator)
            setattr(parent, name, replaced[child])
    if not replaced:
        raise InputError(
            "The model has no linear layer before its head, so there is nothing to change by low-rank matrices. "
            "Use --train head, or --train all."
        )


def _head_names(module: nn.Module, head: str) -> list[str]:
    """Return the names of the parameters of a module's head. Raises InputError if there is none, or no body."""
    names = [name for name, _ in module.named_parameters()]
    base = getattr(module, "base_model_prefix", "")
    if not names:
        raise InputError("The model has no parameters, so it has no head to train.")
    if head != "auto":
        head_names = [name for name in names if name == head or name.startswith(f"{head}.")]
    elif isinstance(base, str) and any(name.startswith(f"{base}.") for name in names):
        head_names = [name for name in names if not name.startswith(f"{base}.")]
        head_names += [
            name for name in getattr(module, "without_weights", ()) if name in names and name not in head_names
        ]
    else:
        last_layer = names[-1].rpartition(".")[0]
        head_names = [name for name in names if name.rpartition(".")[0] == last_layer]
    if not head_names or len(head_names) == len(names):
        which = "has no parameters" if not head_names else "is the whole model"
        raise InputError(
            f"The model's head ('{head}') {which}, so there is no body to freeze. Name the head with --set "
            f"model_options.head=PREFIX, or use --train all; the parameters are {', '.join(names[-8:])}."
        )
    return head_names


# -- lazy layers ------------------------------------------------------------------------------------------------------
def materialised(module: nn.Module, shape: Sequence[int], seed: int = 0) -> nn.Module:
    """Return a module whose lazy layers have their shapes and weights, for examples of a shape.

    The weights are a function of the seed alone, as those of networks by name are. A module without lazy layers is
    returned as it is. Raises InputError if the module cannot take such examples.
    """
    if not any(nn.parameter.is_lazy(tensor) for tensor in _tensors(module)):
        return module
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._LazyNormBase):
            raise InputError(
                f"The model's layer '{name}' is a {type(child).__name__}, whose running statistics a federation cannot "
                "learn. Use nn.GroupNorm with the number of its channels."
            )
    reasons = []
    for dtype in (torch.float32, torch.int64):  # measurements, or tokens
        trial = copy.deepcopy(module)
        try:
            with torch.no_grad(), Seeded(rng.number(seed, rng.INIT) & 0x7FFFFFFF):
                trial.eval()(torch.zeros((2, *shape), dtype=dtype))
        except Exception as error:  # modules fail in many ways
            reasons.append(str(error).split("\n")[0])
            continue
        lazy = next((n for n, t in trial.named_parameters() if nn.parameter.is_lazy(t)), None)
        if lazy is not None:
            raise InputError(
                f"The model's '{lazy}' belongs to a lazy layer that the model does not call, so it gets no shape. "
                "Use the plain layer with its sizes."
            )
        return trial.train(module.training)
    raise InputError(f"The model's lazy layers cannot take examples of shape {tuple(shape)}: {reasons[0]}")


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
