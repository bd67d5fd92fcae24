"""Pooling for a compiler, which makes a slow kernel of torch's own derivative."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .operators import compiler_is_tracing
from .replacing import pair

TILE = 16  # largest tile of a pooling, each entry of which is an operation


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: Any = False,
) -> Any:
    """Compute `torch.nn.functional.max_pool2d`; for a compiler by `Pool`, if small tiles cover the images once."""
    tile = pair(kernel_size)
    if (
        compiler_is_tracing()
        and not return_indices
        and len(tile) == 2
        and math.prod(tile) <= TILE
        and (pair(stride or kernel_size), pair(padding), pair(dilation)) == (tile, (0, 0), (1, 1))
        and all(size % step == 0 for size, step in zip(input.shape[-2:], tile, strict=True))
    ):
        return Pool.apply(input, *tile)[0]
    return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


class Pool(Function):
    """Returns the largest number of each tile and its index in the tile, row by row; the first one, as torch does.

    It is written as plain arithmetic, because a compiler makes a slow kernel with lookups of torch's own derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, a: int, b: int) -> tuple[Tensor, Tensor]:
        tiles = x.unflatten(-1, (-1, b)).unflatten(-3, (-1, a))  # [..., down, a, across, b]
        best, *others = (tiles[..., i, :, j] for i, j in itertools.product(range(a), range(b)))
        index = torch.zeros_like(best, dtype=torch.uint8)
        for number, other in enumerate(others, 1):
            is_larger = (other > best) | other.isnan()
            best, index = torch.where(is_larger, other, best), torch.where(is_larger, number, index)
        return best, index

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.tile = inputs[1:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        (index,), (a, b) = ctx.saved_tensors, ctx.tile
        numbers = torch.arange(a * b, dtype=torch.uint8, device=g.device).view(a, 1, b)
        index, g = (t.unsqueeze(-1).unsqueeze(-3) for t in (index, g))
        tiles = torch.where(index == numbers, g, 0)
        return tiles.flatten(-2).flatten(-3, -2), None, None
