"""Normal deviates on a GPU in one kernel: what `rng.normal` computes there in a dozen passes over memory.

Triton comes with torch's CUDA builds. Where it does not, `rng` computes the same numbers (up to the rounding of
logarithm and cosine) with plain tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[misc, unused-ignore]
def _normals(keys, out, count, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row r: splitmix64 of (key r, i) gives 64 bits, Box-Muller two deviates of them, at i and at half + i."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(keys + row).to(tl.uint64, bitcast=True) + (i.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    kind = out.dtype.element_ty
    # Halves of 32 bits become floats as signed 64-bit numbers, which they fit and which hardware converts.
    high = (z >> 32).to(tl.int64).to(kind)
    low = (z & 0xFFFFFFFF).to(tl.int64).to(kind)
    radius = tl.sqrt(-2.0 * tl.log((high + 0.5) * 2.3283064365386963e-10))
    angle = low * 1.4629180792671596e-09
    place = out + row * count + i
    tl.store(place, radius * tl.cos(angle), mask=i < half)
    tl.store(place + half, radius * tl.sin(angle), mask=i + half < count)


def normal(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal deviates of shape key.shape + size."""
    count = math.prod(size)
    out = torch.empty(*key.shape, *size, dtype=dtype, device=key.device)
    half = (count + 1) // 2
    if out.numel():
        _normals[(key.numel(), triton.cdiv(half, BLOCK))](key.contiguous(), out, count, half, BLOCK=BLOCK)
    return out
