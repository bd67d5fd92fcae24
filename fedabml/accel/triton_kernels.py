"""GPU kernels, each in place of many passes over memory: keys, normal deviates, convolutions and products of lanes.

Triton comes with torch's CUDA builds. Where it does not, `rng` and `convolutions` compute the same numbers (up to
rounding) with torch's operations. Every kernel `_name` is launched by the function `name` below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK, PIXELS = 1024, 32
BUSY, MANY = 528, 700  # blocks that keep a GPU busy; blocks from which larger ones do, too
ENOUGH = 96  # blocks (one for most multiprocessors) below which those of a long sum are made smaller
Pair = Sequence[int]


@triton.jit  # type: ignore[misc, unused-ignore]
def _mixed(z):  # type: ignore[no-untyped-def]
    """Return the mix of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


# These numbers differ from call to call; Triton would compile anew for each kind of them.
@triton.jit(do_not_specialize=["count", "first", "key_row", "key_step", "value_row", "value_step"])  # type: ignore[misc, unused-ignore]
def _fold(  # type: ignore[no-untyped-def]
    keys, values, out, count, first, key_row, key_step, value_row, value_step, BLOCK: tl.constexpr
):
    """Fold row r of keys with values or, without values, with the numbers of the columns from `first` on."""
    blocks = tl.cdiv(count, BLOCK)
    row, column = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    i = column * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row * key_row + i * key_step, mask=i < count).to(tl.uint64, bitcast=True)
    if values is None:
        value = first + i
    else:
        value = tl.load(values + row * value_row + i * value_step, mask=i < count)
    z = _mixed(key + (value.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)
    tl.store(out + row * count + i, z.to(tl.int64, bitcast=True), mask=i < count)


def fold(key: Tensor, value: Tensor) -> Tensor:
    """Return `rng.fold(key, value)` of tensors that broadcast, in one pass."""
    out = key.new_empty(torch.broadcast_shapes(key.shape, value.shape))
    if out.numel():
        key, value = (t.expand(out.shape).reshape(-1, *out.shape[-1:] or [1]) for t in (key, value))
        rows, count = key.shape
        grid = (rows * triton.cdiv(count, BLOCK),)
        _fold[grid](key, value, out, count, 0, *key.stride(), *value.stride(), BLOCK=BLOCK)
    return out


def folds(key: Tensor, count: int, first: int) -> Tensor:
    """Return `rng.folds(key, count, first)`, key.shape + (count,), in one pass."""
    out = key.new_empty(*key.shape, count)
    if out.numel():
        grid = (key.numel() * triton.cdiv(count, BLOCK),)
        _fold[grid](key.contiguous(), None, out, count, first, 1, 0, 0, 0, BLOCK=BLOCK)
    return out


@triton.jit  # type: ignore[misc, unused-ignore]
def _normals(keys, out, count, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill row r: splitmix64 of (key r, i) gives 64 bits, Box-Muller two deviates of them, at i and at half + i."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(keys + row).to(tl.uint64, bitcast=True) + (i.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = _mixed(z)
    dtype = out.dtype.element_ty
    # Halves of 32 bits are converted to floats as signed 64-bit numbers, for which there is an instruction.
    high = (z >> 32).to(tl.int64).to(dtype)
    low = (z & 0xFFFFFFFF).to(tl.int64).to(dtype)
    radius = tl.sqrt(-2.0 * tl.log((high + 0.5) * 2.3283064365386963e-10))
    angle = low * 1.4629180792671596e-09
    target = out + row * count + i
    tl.store(target, radius * tl.cos(angle), mask=i < half)
    tl.store(target + half, radius * tl.sin(angle), mask=i + half < count)


def normal(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return standard normal deviates of shape key.shape + size."""
    count = math.prod(size)
    out = torch.empty(*key.shape, *size, dtype=dtype, device=key.device)
    half = (count + 1) // 2
    if out.numel():
        _normals[(key.numel(), triton.cdiv(half, BLOCK))](key.contiguous(), out, count, half, BLOCK=BLOCK)
    return out


@triton.jit  # type: ignore[misc, unused-ignore]
def _flag(values, losses, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a block of a lane's values; set the lane's loss to NaN if one of them is not finite."""
    blocks = tl.cdiv(count, BLOCK)
    row, i = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + row * count + i, mask=i < count, other=0.0)
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    bad = tl.max((value - value != 0).to(tl.int32), 0)  # infinity less itself is NaN, too
    tl.store(losses + row, float("nan"), mask=bad > 0)


def flag(losses: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return the losses [lanes], NaN where any of a lane's values [lanes, ...] is not finite.

    The whole GPU shares the work, however few lanes there are.
    """
    losses = losses.clone()
    for value in values:
        count = value.numel() // len(losses)
        if count:
            _flag[(len(losses) * triton.cdiv(count, BLOCK),)](value.contiguous(), losses, count, BLOCK=BLOCK)
    return losses


@triton.jit  # type: ignore[misc, unused-ignore]
def _gather(  # type: ignore[no-untyped-def]
    patches, image, pixels, height, width, channels, length, out_height, out_width, top, left,
    A: tl.constexpr, B: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum into every pixel what the patches that contain it hold for it."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = (pixel < pixels)[:, None] & (c < channels)[None, :]
    x, y, n = pixel % width + left, pixel // width % height + top, (pixel // (width * height)).to(tl.int64)
    total = tl.zeros((PIXELS, CHANNELS), tl.float64 if patches.dtype.element_ty == tl.float64 else tl.float32)
    for i in tl.static_range(A):
        for j in tl.static_range(B):
            v, u = y - i * DY, x - j * DX
            row, column = v // DOWN, u // RIGHT
            holds = (v >= 0) & (u >= 0) & (row * DOWN == v) & (column * RIGHT == u)
            holds = holds & (row < out_height) & (column < out_width)
            offset = ((n * out_height + row) * out_width + column) * length + (i * B + j) * channels
            total += tl.load(patches + offset[:, None] + c[None, :], mask=real & holds[:, None], other=0.0)
    target = pixel.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(image + target, total.to(image.dtype.element_ty), mask=real)


def gather(
    patches: Tensor, images: int, channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair,
    out: Pair,
) -> Tensor:  # fmt: skip
    """Return Pᵀ of patches [images · out height · out width, kernel · channels (or more)].

    The result is [images, height, width, channels].
    """
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
def _patch(k, wide, ACROSS: tl.constexpr, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how far the k-th number of a patch is from its first: rows of `wide` numbers, ACROSS of them its own.

    From every multiple of RUN on, RUN numbers are adjacent, and are read at once.
    """
    return tl.max_contiguous(tl.multiple_of(k // ACROSS * wide + k % ACROSS, RUN), RUN)


@triton.jit  # type: ignore[misc, unused-ignore]
def _corner(  # type: ignore[no-untyped-def]
    m, image, wide, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Return where the m-th patch of a lane begins; RIGHT counts numbers, not pixels."""
    n, y, x = m // (HEIGHT * WIDTH), m // WIDTH % HEIGHT, m % WIDTH
    return tl.multiple_of(n.to(tl.int64) * image + y * DOWN * wide + x * RIGHT, RUN)


@triton.jit  # type: ignore[misc, unused-ignore]
def _convolve(  # type: ignore[no-untyped-def]
    x, w, y, lane, image, wide, rows, outs,
    LENGTH: tl.constexpr, ACROSS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, RUN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of one lane's y[m, o] = Σ_k patch(m)[k] w[o, k]."""
    index = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    o = tl.program_id(1) * N + tl.arange(0, N)
    x += index * lane
    w += index * LENGTH * outs
    begin = _corner(m, image, wide, HEIGHT, WIDTH, DOWN, RIGHT, RUN)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, LENGTH, K):
        k = first + tl.arange(0, K)
        a = tl.load(
            x + begin[:, None] + _patch(k, wide, ACROSS, RUN)[None, :],
            mask=(m < rows)[:, None] & (k < LENGTH)[None, :],
            other=0.0,
        )
        b = tl.load(w + o[None, :] * LENGTH + k[:, None], mask=(k < LENGTH)[:, None] & (o < outs)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    target = y + index * rows * outs + m[:, None].to(tl.int64) * outs + o[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < outs)[None, :])


@triton.jit  # type: ignore[misc, unused-ignore]
def _to_weights(  # type: ignore[no-untyped-def]
    x, g, w, lane, image, wide, rows, outs, pieces, rows_per_piece,
    LENGTH: tl.constexpr, ACROSS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, RUN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of w[k, o] = Σ_m patch(m)[k] g[m, o] over a share of one lane's patches."""
    piece, index = tl.program_id(2) % pieces, (tl.program_id(2) // pieces).to(tl.int64)
    k = tl.program_id(0) * K + tl.arange(0, K)
    o = tl.program_id(1) * N + tl.arange(0, N)
    x += index * lane
    g += index * rows * outs
    inside = _patch(k, wide, ACROSS, RUN)
    total = tl.zeros((K, N), tl.float32)
    last = tl.minimum(rows, (piece + 1) * rows_per_piece)
    for first in range(piece * rows_per_piece, last, M):
        m = first + tl.arange(0, M)
        begin = _corner(m, image, wide, HEIGHT, WIDTH, DOWN, RIGHT, RUN)
        a = tl.load(x + inside[:, None] + begin[None, :], mask=(k < LENGTH)[:, None] & (m < last)[None, :], other=0.0)
        b = tl.load(
            g + m[:, None].to(tl.int64) * outs + o[None, :], mask=(m < last)[:, None] & (o < outs)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    target = w + tl.program_id(2).to(tl.int64) * LENGTH * outs + k[:, None] * outs + o[None, :]
    tl.store(target, total, mask=(k < LENGTH)[:, None] & (o < outs)[None, :])


def _geometry(x: Tensor, kernel: Pair, stride: Pair, out: Pair, outs: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return what both kernels need to know of images [lanes, n, height, width, channels]: numbers, constants."""
    _, n, _, width, channels = x.shape
    across = kernel[1] * channels
    constants = {
        "LENGTH": kernel[0] * across, "ACROSS": across, "HEIGHT": out[0], "WIDTH": out[1], "DOWN": stride[0],
        "RIGHT": stride[1] * channels, "RUN": math.gcd(channels, 16),
        "N": min(64 if x.dtype == torch.float32 else 128, max(16, triton.next_power_of_2(outs))),
    }  # fmt: skip
    return (x.stride(0), x.stride(1), width * channels, n * out[0] * out[1], outs), constants


def convolve(x: Tensor, w: Tensor, kernel: Pair, stride: Pair, out: Pair, coarse: bool) -> Tensor:
    """Convolve images [lanes, n, height, width, channels] with weights [lanes, outs, kernel · channels].

    The images are padded already; the result is [lanes, n · out height · out width, outs]. If `coarse`, float32 is
    rounded to TF32; else its products are sums of three such, as exact as float32's own.
    """
    lanes, outs = w.shape[:2]
    numbers, constants = _geometry(x, kernel, stride, out, outs)
    rows, wide = numbers[3], constants["N"]
    y = torch.empty(lanes, rows, outs, dtype=x.dtype, device=x.device)
    # Measured on an H200: exact products are faster in smaller blocks where there are few, short sums in small pieces.
    length, across = constants["LENGTH"], triton.cdiv(outs, wide)
    tall = 128 if coarse or lanes * triton.cdiv(rows, 128) * across >= MANY else 64
    shallow = 16 if x.dtype == torch.bfloat16 else 32
    tile = {"M": tall, "K": 64 if x.dtype == torch.bfloat16 and length > 128 else shallow}
    grid = (triton.cdiv(rows, tall), across, lanes)
    warps = 8 if wide > 64 or (not coarse and tall == 128 and length > 128) else 4
    options = {"PRECISION": "tf32" if coarse else "tf32x3", "num_warps": warps, "num_stages": 3}
    _convolve[grid](x, w, y, *numbers, **constants, **tile, **options)
    return y


def to_weights(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, out: Pair) -> Tensor:
    """Return ∂w [lanes, kernel · channels, outs] for the images of `convolve` and ∂y [lanes, rows, outs]."""
    lanes, outs = len(x), g.shape[-1]
    numbers, constants = _geometry(x, kernel, stride, out, outs)
    rows, length, wide = numbers[3], constants["LENGTH"], constants["N"]
    tile, small = {"M": 32, "K": 128}, x.dtype == torch.bfloat16
    blocks = triton.cdiv(length, tile["K"]), triton.cdiv(outs, wide)
    pieces = max(1, min(triton.cdiv(rows, 512), triton.cdiv(BUSY if small else 2 * BUSY, lanes * math.prod(blocks))))
    rows_per_piece = triton.cdiv(triton.cdiv(rows, pieces), tile["M"]) * tile["M"]
    w = torch.empty(lanes, pieces, length, outs, dtype=torch.float32, device=x.device)
    # For TF32 alone a transposed operand must be rearranged, which takes longer than three products.
    options = {"PRECISION": "tf32x3", "num_warps": 4 if wide <= 64 else 8, "num_stages": 4 if small else 3}
    _to_weights[(*blocks, lanes * pieces)](x, g, w, *numbers, pieces, rows_per_piece, **constants, **tile, **options)
    return w.sum(1).to(x.dtype)


@triton.jit  # type: ignore[misc, unused-ignore]
def _multiply(  # type: ignore[no-untyped-def]
    a, b, y, rows, outs, length, a_lane, a_row, a_step, b_lane, b_row, b_step,
    RUNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of one lane's y[m, n] = Σ_k a[m, k] b[n, k]; every size is passed divided by its entry of RUNS.

    If SPLIT > 1, each warp sums every SPLIT-th K numbers, and their sums are added in the end, in a fixed order.
    """
    rows, outs, length = rows * RUNS[0], outs * RUNS[1], length * RUNS[2]
    down, across = tl.cdiv(rows, M), tl.cdiv(outs, N)
    block, lane = tl.program_id(0) % (down * across), (tl.program_id(0) // (down * across)).to(tl.int64)
    m = block // across * M + tl.arange(0, M)
    n = block % across * N + tl.arange(0, N)
    a += lane * (a_lane * RUNS[3])
    b += lane * (b_lane * RUNS[6])
    if SPLIT == 1:
        row, column = a + m[:, None] * (a_row * RUNS[4]), b + n[None, :] * (b_row * RUNS[7])
        total = tl.zeros((M, N), tl.float32)
        for first in range(0, length, K):
            k = first + tl.arange(0, K)
            u = tl.load(
                row + k[None, :] * (a_step * RUNS[5]), mask=(m < rows)[:, None] & (k < length)[None, :], other=0.0
            )
            v = tl.load(
                column + k[:, None] * (b_step * RUNS[8]), mask=(n < outs)[None, :] & (k < length)[:, None], other=0.0
            )
            total = tl.dot(u, v, total, input_precision=PRECISION)
    else:
        part = tl.arange(0, SPLIT)[:, None] * K + tl.arange(0, K)[None, :]
        row, column = a + m[None, :, None] * (a_row * RUNS[4]), b + n[None, None, :] * (b_row * RUNS[7])
        warp_sums = tl.zeros((SPLIT, M, N), tl.float32)
        for first in range(0, length, SPLIT * K):
            k = first + part
            u = tl.load(
                row + k[:, None, :] * (a_step * RUNS[5]),
                mask=(m < rows)[None, :, None] & (k < length)[:, None, :],
                other=0.0,
            )
            v = tl.load(
                column + k[:, :, None] * (b_step * RUNS[8]),
                mask=(n < outs)[None, None, :] & (k < length)[:, :, None],
                other=0.0,
            )
            warp_sums = tl.dot(u, v, warp_sums, input_precision=PRECISION)
        total = tl.sum(warp_sums, 0)
    target = y + lane * rows * outs + m[:, None] * outs + n[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


def _blocks(rows: int, outs: int, length: int, lanes: int) -> dict[str, int]:
    """Return how a product is divided into blocks, by measurements on an H200.

    The products are so small that the time of one block is the time of all. A short sum, as in ∂w, is fastest in small
    blocks of few warps, many to a multiprocessor. A long one is fastest in large blocks if there are enough of them,
    else in small ones in which each warp takes a share of the sum: a warp's instructions wait for each other, and 784
    terms one after another would take longer than all else. The block itself adds the shares, so the result depends
    neither on another kernel nor on the order of events.
    """

    def side(limit: int, size: int) -> int:
        return min(limit, max(16, triton.next_power_of_2(size)))

    if length <= 64:
        return {"M": side(32, rows), "N": side(32, outs), "K": 32, "SPLIT": 1, "num_warps": 2, "num_stages": 2}
    m, n = side(64, rows), side(32, outs)
    if lanes * triton.cdiv(rows, m) * triton.cdiv(outs, n) >= ENOUGH:
        deep = 4 if length >= 512 else 2
        return {"M": m, "N": n, "K": 64, "SPLIT": 1, "num_warps": 4, "num_stages": deep}
    return {"M": 16, "N": 16, "K": 32, "SPLIT": 4, "num_warps": 4, "num_stages": 3}


def _near(x: Tensor) -> Tensor:
    """Return a tensor whose offsets within a lane fit into 32 bits."""
    far = sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if far < 1 << 31 else x.contiguous()


def multiply(a: Tensor, b: Tensor, coarse: bool) -> Tensor:
    """Return a bᵀ [lanes, rows, outs] of a [lanes, rows, length] and b [lanes, outs, length], of any strides.

    If `coarse`, float32 is rounded to TF32; else its products are sums of three such, as exact as float32's own.
    """
    (lanes, rows, length), outs = a.shape, b.shape[1]
    y = torch.empty(lanes, rows, outs, dtype=a.dtype, device=a.device)
    if not y.numel():
        return y
    a, b = _near(a), _near(b)
    blocks = _blocks(rows, outs, length, lanes)
    # For TF32 alone large blocks must rearrange a transposed operand, which takes longer than three products.
    across = blocks["M"] == 64 and (a.stride(2) != 1 or b.stride(2) != 1)
    # 16 bytes are read at once where sizes and strides are known multiples of that; the constants RUNS make them so.
    numbers = (rows, outs, length, *a.stride(), *b.stride())
    runs = tuple(math.gcd(16 // a.element_size(), number) for number in numbers)
    counts = (number // run for number, run in zip(numbers, runs, strict=True))
    grid = (lanes * triton.cdiv(rows, blocks["M"]) * triton.cdiv(outs, blocks["N"]),)
    _multiply[grid](a, b, y, *counts, RUNS=runs, PRECISION="tf32" if coarse and not across else "tf32x3", **blocks)
    return y
