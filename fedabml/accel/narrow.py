"""Products of layers with few outputs and many inputs on a CPU, with the weights first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .replacing import Replacing

NARROW = 16  # most outputs, and
DEEP = 256  # least inputs, of a layer that a CPU multiplies faster with the weights first


def narrow_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with the weights first in the product of a layer that `Narrow.suits`."""
    if input.ndim != 2 or not Narrow.suits(weight.shape):
        return F.linear(input, weight, bias)
    out = torch.mm(weight, input.t()).t()
    return (out if bias is None else out + bias).contiguous()


class Narrow(Replacing):
    """Replaces `linear`, on a CPU, in layers with few outputs and many inputs.

    There x wᵀ has few columns, and a library's kernels, which compute several columns at once, have little to do; w xᵀ
    has a column for every example. The result is contiguous, as a library's is: a module may `view` it.
    """

    replacements: ClassVar = {F.linear: narrow_linear}

    @staticmethod
    def suits(shape: Sequence[int]) -> bool:
        """Return whether weights of this shape may belong to such a layer. A network without any needs no such mode."""
        return len(shape) == 2 and shape[0] <= NARROW and shape[1] >= DEEP
