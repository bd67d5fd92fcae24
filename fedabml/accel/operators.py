"""Operators of our own, which transforms, traces and torch.compile take as a whole, and the door to Triton's kernels.

`torch.library.custom_op` would do, but calling what it makes loads torch's compiler, which takes longer than many runs.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from . import enabled

_LIBRARY = torch.library.Library("fedabml", "FRAGMENT")

_tracing = 0  # contexts that are open; not local to a thread, because autograd's own threads must see it, too


@contextmanager
def compiler_tracing() -> Iterator[None]:
    """Use torch's own operations within this context where there is a choice, and change no tensor in place.

    A compiler that traces them then sees what may be fused, and what is computed twice.
    """
    global _tracing
    _tracing += 1
    try:
        yield
    finally:
        _tracing -= 1


def compiler_is_tracing() -> bool:
    """Return whether a `compiler_tracing` context is open."""
    return _tracing > 0


def operator(
    schema: str,
    device: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    batched: Callable[..., Any] | None = None,
) -> Any:
    """Register `torch.ops.fedabml.NAME` for a schema such as "NAME(Tensor x) -> Tensor", and return it.

    `run` computes it on a device (CPU, CUDA), `shape` makes an empty result for a trace, and `batched` is its rule
    under vmap (see `torch.library.register_vmap`).
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"fedabml::{name}", shape, lib=_LIBRARY)
    if batched is not None:
        torch.library.register_vmap(f"fedabml::{name}", batched, lib=_LIBRARY)
    return getattr(torch.ops.fedabml, name)


def triton_usable() -> bool:
    """Return whether there are kernels for a GPU: Triton, and a compiler that it can use.

    A trial decides, which inside of torch.func's transforms would fail: call this once before.
    """
    return enabled("triton") and _triton_works()


@cache
def _triton_works() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from . import triton_kernels

        triton_kernels.normal(torch.zeros((), dtype=torch.int64, device="cuda"), (2,), torch.float32)
    except Exception as error:  # whatever is wrong with an installation, there is another way
        reason = (str(error).splitlines() or [""])[0]
        logging.getLogger("fedabml").warning("A GPU without Triton is slower: %s: %s", type(error).__name__, reason)
        return False
    return True


def kernel(name: str) -> Callable[..., torch.Tensor]:
    """Return one of `triton_kernels`, which are imported only when one of them is called, on a GPU."""

    def run(*args: Any) -> torch.Tensor:
        from . import triton_kernels

        return getattr(triton_kernels, name)(*args)

    return run


def gpu_operator(schema: str, shape: Callable[..., Any], batched: Callable[..., Any] | None = None) -> Any:
    """Register the function of `triton_kernels` that a schema names as an operator for GPUs, and return it."""
    return operator(schema, "CUDA", kernel(schema[: schema.index("(")]), shape, batched)
