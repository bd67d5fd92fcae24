"""The state of a run between two rounds: what is saved, checked when a run goes on, and sent to other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..algorithms.base import State
from ..errors import InputError
from .processes import World, packed, unpacked


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

    facts = world.decide(describe)
    if facts is None:
        return None

    def send(own: State | None) -> State:
        full = {k: own[k].to(v.dtype) if own and k in own else v for k, v in like.items()}
        return unpacked(world.broadcast(packed(full, like)), like)

    shared = send(state.shared if state else None)
    average = send(state.average if state else None)
    velocity = send(state.velocity if state else None)
    shares = [[c for c in facts["kept"] if c in own] for own in map(set, owned)]
    blank = torch.zeros_like(packed(kept_like, kept_like))
    for place in range(max(map(len, shares))):
        turn = [own[place] if place < len(own) else None for own in shares]
        rows = [blank if c is None else packed(state.kept[c], kept_like) for c in turn] if state else []
        row, mine = world.scatter(rows, blank), turn[world.rank]
        if mine is not None:
            restore({mine: unpacked(row, kept_like)})
    return Checkpoint(
        facts["round"], shared, average, {}, facts["seconds"], facts["chunk"],
        {name: value for name, value in velocity.items() if name in facts["velocity"]}, facts["compiled"],
    )  # fmt: skip
