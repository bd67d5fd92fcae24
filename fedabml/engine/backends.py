"""Backends: how a function of one client is applied to many. A new backend is an entry of `BACKENDS`, and no more.

Options, the command line, the trial of `autotune` and the lanes read this table. Both of its backends draw the same
minibatches and the same noise, so they agree up to the rounding of floating-point sums. torch is imported on use,
because the names are choices of `fedabml train --help`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Backend(NamedTuple):
    """`apply(function, in_dims, args)` calls a function of one client for every lane, and stacks the results.

    An argument whose entry of `in_dims` is 0 has a row per lane; one with None is the same for all lanes.
    """

    apply: Callable[[Callable[..., Any], tuple[int | None, ...], tuple[Any, ...]], Any]
    batched: bool  # all lanes are one program, which may be recorded or compiled and may hold lanes of several runs


def _in_one_program(function: Callable[..., Any], in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    import torch

    from ..accel.process import quiet_vmap

    with quiet_vmap():
        return torch.vmap(function, in_dims)(*args)


def _one_by_one(function: Callable[..., Any], in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def lane(i: int) -> list[Any]:
        return [a if d is None else tree_map(lambda t: t[i], a) for a, d in zip(args, in_dims, strict=True)]

    count = len(tree_leaves([a for a, d in zip(args, in_dims, strict=True) if d == 0])[0])
    if count == 1:
        return tree_map(lambda t: t.unsqueeze(0), function(*lane(0)))
    return tree_map(lambda *t: torch.stack(t), *[function(*lane(i)) for i in range(count)])


# `auto` takes the first one on a GPU, and the fastest one of a trial on a CPU.
BACKENDS = {"vmap": Backend(_in_one_program, batched=True), "loop": Backend(_one_by_one, batched=False)}
UNBATCHED = next(name for name, backend in BACKENDS.items() if not backend.batched)  # for modules that vmap cannot take
