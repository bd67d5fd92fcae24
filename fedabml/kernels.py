"""Kernels for a GPU, each in place of many passes over memory: normal deviates, and convolutions of many lanes.

Triton comes with torch's CUDA builds. Where it does not, `rng` and `conv` compute the same numbers (up to rounding)
with plain tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK, PIXELS, BUSY = 1024, 32, 528
Pair = Sequence[int]


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


@triton.jit  # type: ignore[misc, unused-ignore]
def _gather(  # type: ignore[no-untyped-def]
    patches, image, pixels, height, width, channels, length, out_height, out_width, top, left,
    A: tl.constexpr, B: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every pixel sums what the patches that hold it give."""
    at = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = (at < pixels)[:, None] & (c < channels)[None, :]
    x, y, n = at % width + left, at // width % height + top, (at // (width * height)).to(tl.int64)
    total = tl.zeros((PIXELS, CHANNELS), tl.float64 if patches.dtype.element_ty == tl.float64 else tl.float32)
    for i in tl.static_range(A):
        for j in tl.static_range(B):
            v, u = y - i * DY, x - j * DX
            row, column = v // DOWN, u // RIGHT
            own = (v >= 0) & (u >= 0) & (row * DOWN == v) & (column * RIGHT == u)
            own = own & (row < out_height) & (column < out_width)
            place = ((n * out_height + row) * out_width + column) * length + (i * B + j) * channels
            total += tl.load(patches + place[:, None] + c[None, :], mask=real & own[:, None], other=0.0)
    where = at.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(image + where, total.to(image.dtype.element_ty), mask=real)


def gather(
    patches: Tensor, images: int, channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair,
    out: Pair,
) -> Tensor:  # fmt: skip
    """[images, height, width, channels] of patches [images · out height · out width, kernel · channels (or more)]."""
    image = torch.empty(images, *size, channels, dtype=patches.dtype, device=patches.device)
    pixels = images * size[0] * size[1]
    wide = min(64, triton.next_power_of_2(channels))
    _gather[(triton.cdiv(pixels, PIXELS), triton.cdiv(channels, wide))](
        patches, image, pixels, *size, channels, patches.shape[-1], *out, *padding,
        A=kernel[0], B=kernel[1], DOWN=stride[0], RIGHT=stride[1], DY=dilation[0], DX=dilation[1],
        PIXELS=PIXELS, CHANNELS=wide,
    )  # fmt: skip
    return image


@triton.jit  # type: ignore[misc, unused-ignore]
def _patch(k, wide, across):  # type: ignore[no-untyped-def]
    """How far the k-th number of a patch is from its first: rows of `wide` numbers, `across` of them its own."""
    return k // across * wide + k % across


@triton.jit  # type: ignore[misc, unused-ignore]
def _corner(m, image, wide, channels, out_height, out_width, down, right):  # type: ignore[no-untyped-def]
    """Where the m-th patch of a lane begins."""
    n, y, x = m // (out_height * out_width), m // out_width % out_height, m % out_width
    return n.to(tl.int64) * image + y * down * wide + x * right * channels


@triton.jit  # type: ignore[misc, unused-ignore]
def _convolve(  # type: ignore[no-untyped-def]
    x, w, y, lane, image, wide, channels, across, rows, length, outs, out_height, out_width, down, right,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y[m, o] = Σ_k patch(m)[k] w[k, o], a block of one lane's."""
    own = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    o = tl.program_id(1) * N + tl.arange(0, N)
    x += own * lane
    w += own * length * outs
    begin = _corner(m, image, wide, channels, out_height, out_width, down, right)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, length, K):
        k = first + tl.arange(0, K)
        a = tl.load(
            x + begin[:, None] + _patch(k, wide, across)[None, :],
            mask=(m < rows)[:, None] & (k < length)[None, :],
            other=0.0,
        )
        b = tl.load(w + k[:, None] * outs + o[None, :], mask=(k < length)[:, None] & (o < outs)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    place = y + own * rows * outs + m[:, None].to(tl.int64) * outs + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < outs)[None, :])


@triton.jit  # type: ignore[misc, unused-ignore]
def _to_weights(  # type: ignore[no-untyped-def]
    x, g, w, lane, image, wide, channels, across, rows, length, outs, out_height, out_width, down, right, pieces, share,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """w[k, o] = Σ_m patch(m)[k] g[m, o], a block of it over a share of one lane's patches."""
    piece, own = tl.program_id(2) % pieces, (tl.program_id(2) // pieces).to(tl.int64)
    k = tl.program_id(0) * K + tl.arange(0, K)
    o = tl.program_id(1) * N + tl.arange(0, N)
    x += own * lane
    g += own * rows * outs
    inside = _patch(k, wide, across)
    total = tl.zeros((K, N), tl.float32)
    last = tl.minimum(rows, (piece + 1) * share)
    for first in range(piece * share, last, M):
        m = first + tl.arange(0, M)
        begin = _corner(m, image, wide, channels, out_height, out_width, down, right)
        a = tl.load(x + inside[:, None] + begin[None, :], mask=(k < length)[:, None] & (m < last)[None, :], other=0.0)
        b = tl.load(
            g + m[:, None].to(tl.int64) * outs + o[None, :], mask=(m < last)[:, None] & (o < outs)[None, :], other=0.0
        )
        total = tl.dot(a, b, total)
    place = w + tl.program_id(2).to(tl.int64) * length * outs + k[:, None] * outs + o[None, :]
    tl.store(place, total, mask=(k < length)[:, None] & (o < outs)[None, :])


def _geometry(x: Tensor, kernel: Pair, out: Pair, outs: int, stride: Pair) -> tuple[int, ...]:
    """What both kernels know of images [lanes, n, height, width, channels]."""
    _, n, _, width, channels = x.shape
    across = kernel[1] * channels
    rows, length = n * out[0] * out[1], kernel[0] * across
    return (x.stride(0), x.stride(1), width * channels, channels, across, rows, length, outs, *out, *stride)


def convolve(x: Tensor, w: Tensor, kernel: Pair, stride: Pair, out: Pair) -> Tensor:
    """Images [lanes, n, height, width, channels] and weights [lanes, kernel · channels, outs], no padding."""
    lanes, outs = len(x), w.shape[-1]
    numbers = _geometry(x, kernel, out, outs, stride)
    y = torch.empty(lanes, numbers[5], outs, dtype=x.dtype, device=x.device)
    wide = min(128, max(16, triton.next_power_of_2(outs)))
    grid = (triton.cdiv(numbers[5], 128), triton.cdiv(outs, wide), lanes)
    _convolve[grid](x, w, y, *numbers, M=128, N=wide, K=32, num_warps=4 if wide <= 64 else 8, num_stages=3)
    return y


def to_weights(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, out: Pair) -> Tensor:
    """The same images and outputs [lanes, rows, outs] → ∂w [lanes, kernel · channels, outs]."""
    lanes, outs = len(x), g.shape[-1]
    numbers = _geometry(x, kernel, out, outs, stride)
    rows, length = numbers[5:7]
    wide = min(128, max(16, triton.next_power_of_2(outs)))
    tall = 64
    tiles = lanes * triton.cdiv(length, tall) * triton.cdiv(outs, wide)
    pieces = max(1, min(triton.cdiv(rows, 512), triton.cdiv(BUSY, tiles)))
    share = triton.cdiv(triton.cdiv(rows, pieces), 32) * 32
    w = torch.empty(lanes, pieces, length, outs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(length, tall), triton.cdiv(outs, wide), lanes * pieces)
    _to_weights[grid](x, g, w, *numbers, pieces, share, M=32, N=wide, K=tall, num_warps=4, num_stages=3)
    return w.sum(1).to(x.dtype)
