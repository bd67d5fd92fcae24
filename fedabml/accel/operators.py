"""Operators of our own: what transforms, traces and torch.compile take as a whole.

`torch.library.custom_op` would do, but calling what it makes loads torch's compiler, which takes longer than many a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LIBRARY = torch.library.Library("fedabml", "FRAGMENT")

_plain: list[bool] = []  # not empty while all is to be plain; autograd's own threads must see it, too


@contextmanager
def plainly() -> Iterator[None]:
    """While this lasts, operations are torch's own where there is a choice, and change no tensor.

    Then a compiler sees what may be fused, and what is computed twice.
    """
    _plain.append(True)
    try:
        yield
    finally:
        _plain.pop()


def plain() -> bool:
    """Whether this is so."""
    return bool(_plain)


def operator(
    schema: str,
    device: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    batched: Callable[..., Any] | None = None,
) -> Any:
    """Makes `torch.ops.fedabml.NAME` of a schema such as "NAME(Tensor x) -> Tensor", and returns it.

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
