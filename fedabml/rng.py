"""Keys: every random number is a function of (seed, purpose, round, client, step), never of execution order.

A key is a 0-d int64 tensor. `key` makes one on the host, `fold` derives another from it, `normal` and `uniform` draw
numbers from it. All work under `torch.vmap`, where a key has one value per lane, so that a cohort of a hundred clients
draws the same numbers as each client alone. With the 64-bit function mix of splitmix64 and φ = 0x9E3779B97F4A7C15,

    fold(k, i) = mix(k + φ (i + 1))                    key(p₁, …, pₙ) = fold(… fold(fold(0, p₁), p₂) …, pₙ)

There are two generators. On a CPU a Mersenne Twister is seeded with each key, which is several times faster than
integer arithmetic on tensors (`accel.mersenne` is faster still, with the same bits). On a GPU the i-th number is a
function of fold(key, i), which needs no launch per lane and can be captured in a graph; one Triton kernel does it where
Triton is usable. The streams differ between the two kinds of device; on one kind they are always the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .accel.mersenne import TWISTER
from .accel.operators import compiler_is_tracing, gpu_operator, kernel, operator, triton_usable

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# The purposes of keys: a shuffle and a noise vector of the same (seed, round, client) must have different streams.
PURPOSES = 7
INIT, SAMPLE, SHUFFLE, NOISE, PERSONAL, PREDICT, KEEP = range(PURPOSES)


def _signed(value: int) -> int:
    """Return the int64 with the same bits as a number modulo 2⁶⁴."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    """Return splitmix64's mix of a number below 2⁶⁴."""
    z = ((z ^ (z >> 30)) * _A) & _MASK
    z = ((z ^ (z >> 27)) * _B) & _MASK
    return z ^ (z >> 31)


def number(*path: int) -> int:
    """Return a 64-bit number that depends on every entry of the path and on their order."""
    z = 0
    for part in path:
        z = _mix_int((z + _GOLDEN * ((part & _MASK) + 1)) & _MASK)
    return z


def key(*path: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of a path such as (seed, NOISE, round, client), a 0-d int64 tensor."""
    return torch.tensor(_signed(number(*path)), dtype=torch.int64, device=device)


def keys(path: Sequence[int], last: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return a cohort's keys in one tensor: `key(*path, entry)` for every entry of `last`, [len(last)]."""
    return fold(key(*path, device=device), torch.as_tensor(last, dtype=torch.int64, device=device))


def generator(*path: int) -> np.random.Generator:
    """Return a generator of numpy for draws on the host, such as a round's clients; a function of the path."""
    return np.random.Generator(np.random.Philox(key=number(*path)))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right logically; torch's own shift of int64 fills in copies of the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    """Return splitmix64's mix of int64 tensors."""
    z = (z ^ _shift(z, 30)) * _signed(_A)
    z = (z ^ _shift(z, 27)) * _signed(_B)
    return z ^ _shift(z, 31)


def fold(key: Tensor, value: int | Tensor) -> Tensor:
    """Return a new key from a key and a number; if `value` is a tensor, as many keys as both broadcast to."""
    value = value.to(key) if isinstance(value, Tensor) else int(value)
    if _uses_kernel(key):
        return folds(key, 1, value).squeeze(-1) if isinstance(value, int) else _fold_cuda(key, value)
    stride = _signed(_GOLDEN * (value + 1)) if isinstance(value, int) else _signed(_GOLDEN) * (value + 1)
    return _mixed(key + stride)


def folds(key: Tensor, count: int, first: int = 0) -> Tensor:
    """Return the keys fold(key, first), fold(key, first + 1), …, of shape key.shape + (count,)."""
    if _uses_kernel(key):
        return _folds_cuda(key, count, _signed(first))
    # Without the mask, which changes none below 2⁶², torch.compile takes the products in `fold` for 32-bit indices.
    return fold(key.unsqueeze(-1), torch.arange(first, first + count, device=key.device) & ((1 << 62) - 1))


def _uses_kernel(key: Tensor) -> bool:
    """Return whether one GPU kernel folds keys, in place of several passes of torch's operations."""
    return key.is_cuda and not compiler_is_tracing() and triton_usable()


def normal(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return standard normal deviates of shape key.shape + size."""
    if key.device.type == "cpu":
        return _normal_cpu(key, list(size), dtype)
    return _normal_cuda(key, list(size), dtype) if triton_usable() else _normal_hashed(key, size, dtype)


def uniform(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uniform deviates in [0, 1) of shape key.shape + size."""
    return _uniform_cpu(key, list(size), dtype) if key.device.type == "cpu" else _uniform_hashed(key, size, dtype)


def _normal_hashed(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(size)
    bits = folds(key, (count + 1) // 2)
    # Box-Muller: 32 bits choose the radius, 32 the angle, each pair gives two deviates.
    radius = torch.sqrt(-2 * torch.log((_shift(bits, 32).to(dtype) + 0.5) * 2.0**-32))
    angle = (bits & 0xFFFFFFFF).to(dtype) * (2 * math.pi * 2.0**-32)
    pair = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return pair[..., :count].reshape(*key.shape, *size)


def _uniform_hashed(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    bits = _shift(folds(key, math.prod(size)), 40)  # 24 bits: exact in float32
    return (bits.to(dtype) * 2.0**-24).reshape(*key.shape, *size)


def _draw(key: Tensor, size: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
    out = torch.empty(key.numel(), math.prod(size), dtype=dtype)
    seeds = key.reshape(-1)
    if not TWISTER.fill(out, seeds, kind):
        source = torch.Generator()
        for row, seed in zip(out, seeds.tolist(), strict=True):
            source.manual_seed(seed & 0xFFFFFFFF)  # the Mersenne Twister is seeded with 32 bits
            row.normal_(generator=source) if kind == "normal" else row.uniform_(generator=source)
    return out.reshape(*key.shape, *size)


def _fold_lanes(info: Any, dims: Sequence[int | None], key: Tensor, value: Tensor) -> Any:
    """Apply `fold` under vmap: lanes become the first axis, followed by as many axes in key and value."""
    lanes = [t.unsqueeze(0) if d is None else t.movedim(d, 0) for t, d in zip((key, value), dims, strict=True)]
    rank = max(t.ndim for t in lanes)
    return _fold_cuda(*(t.view(len(t), *[1] * (rank - t.ndim), *t.shape[1:]) for t in lanes)), 0


def _shape(key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*key.shape, *size, dtype=dtype, device=key.device)


def _operator(name: str, device: str, draw: Callable[[Tensor, Sequence[int], torch.dtype], Tensor]) -> Any:
    """Register a draw as an operator. It takes a tensor of keys, so vmap only moves the key's lanes to the front."""

    def batched(info: Any, dims: Sequence[int], key: Tensor, size: Sequence[int], dtype: torch.dtype) -> Any:
        return getattr(torch.ops.fedabml, name)(key.movedim(dims[0], 0), size, dtype), 0

    schema = f"{name}(Tensor key, SymInt[] size, ScalarType dtype) -> Tensor"
    return operator(schema, device, draw, _shape, batched)


_normal_cpu = _operator("normal", "CPU", partial(_draw, kind="normal"))
_uniform_cpu = _operator("uniform", "CPU", partial(_draw, kind="uniform"))
_normal_cuda = _operator("normal_cuda", "CUDA", kernel("normal"))
_fold_cuda: Any = gpu_operator(
    "fold(Tensor key, Tensor value) -> Tensor",
    lambda key, value: key.new_empty(torch.broadcast_shapes(key.shape, value.shape)),
    _fold_lanes,
)
_folds_cuda: Any = gpu_operator(
    "folds(Tensor key, int count, int first) -> Tensor",
    lambda key, count, first: key.new_empty(*key.shape, count),
    lambda info, dims, key, count, first: (_folds_cuda(key.movedim(dims[0], 0), count, first), 0),
)
