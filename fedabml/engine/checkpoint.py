"""The state of a run between two rounds: what is saved, checked when a run goes on, and sent to other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.base import State
from ..errors import InputError
from .processes import World


class Checkpoint(NamedTuple):
    """The state of a run between two rounds; `runs.folder` writes and reads it."""

    round: int
    shared: State
    average: State
    kept: Mapping[int, State]
    seconds: float
    chunk: int | None = None  # how many clients run at once; lower than at first where memory did not suffice
    velocity: State = {}  # noqa: RUF012  the server's last step, where it has momentum
    compiled: int | None = None  # the first round whose steps were compiled, if any


def packed(state: State, like: State) -> Tensor:
    """Return a state's bytes in one row on the host, in the order of `like`."""
    rows = [state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name in like]
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *rows])


def unpacked(row: Tensor, like: State) -> State:
    """Return the state whose bytes are a row: the inverse of `packed`."""
    parts = row.split([v.numel() * v.element_size() for v in like.values()])
    return {k: p.clone().view(v.dtype).reshape(v.shape) for (k, v), p in zip(like.items(), parts, strict=True)}


def state_checksum(state: State, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return four numbers that differ between states of different bits: their sum as integers, 16 bits in each."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for value in state.values():
        integer = {4: torch.int32, 8: torch.int64}[value.element_size()]
        total = total + value.detach().contiguous().view(integer).sum(dtype=torch.int64)
    return ((total >> torch.tensor([0, 16, 32, 48], device=device)) & 0xFFFF).to(dtype)


def check_like(expected: State, got: State) -> None:
    """Refuse a state from a file whose names, shapes or kinds of numbers differ from the expected ones."""
    shapes = [{name: tuple(v.shape) for name, v in state.items()} for state in (expected, got)]
    if any(v.is_floating_point() != expected[name].is_floating_point() for name, v in got.items() if name in expected):
        raise InputError("The checkpoint is damaged: its weights are whole numbers or no numbers at all.")
    if shapes[0] != shapes[1]:
        raise InputError(
            f"The checkpoint does not belong to this run: it holds {shapes[1] or 'nothing'}, and the algorithm with "
            f"this model has {shapes[0] or 'nothing'}. Resume it in its own folder."
        )


def broadcast(
    state: Checkpoint | None,
    world: World,
    like: State,
    kept_like: State,
    owned: list[list[int]],
    restore: Callable[[Mapping[int, State]], None],
) -> Checkpoint | None:
    """Send the checkpoint of process 0 to all processes.

    `like` and `kept_like` have the shapes of the shared state and of one client's kept state, `owned` lists the
    clients of every process. The kept states are not returned: each process gets those of its own clients, one by one,
    by `restore`.
    """

    def describe() -> dict[str, Any] | None:
        if state is None:
            return None
        names = ("round", "seconds", "chunk", "compiled")
        lists = {"velocity": list(state.velocity), "kept": list(state.kept)}
        return {name: getattr(state, name) for name in names} | lists

    description = world.decide(describe)
    if description is None:
        return None

    def send(part: State | None) -> State:
        full = {k: part[k].to(v.dtype) if part and k in part else v for k, v in like.items()}
        return unpacked(world.broadcast(packed(full, like)), like)

    shared, average, velocity = (
        send(getattr(state, name) if state else None) for name in ("shared", "average", "velocity")
    )
    velocity = {name: value for name, value in velocity.items() if name in description["velocity"]}
    blank = packed(kept_like, kept_like)
    for clients in zip_longest(
        *([c for c in description["kept"] if c in owned_here] for owned_here in map(set, owned))
    ):
        rows = [blank if c is None else packed(state.kept[c], kept_like) for c in clients] if state else []
        row, client = world.scatter(rows, blank), clients[world.rank]
        if client is not None:
            restore({client: unpacked(row, kept_like)})
    return Checkpoint(
        description["round"],
        shared,
        average,
        {},
        description["seconds"],
        description["chunk"],
        velocity,
        description["compiled"],
    )
