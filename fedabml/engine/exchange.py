"""What the processes of one run send each other in a round: their part of the update, and what their clients keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.base import State
from ..errors import TrainingError
from .checkpoint import packed, state_checksum, unpacked
from .client import no_update
from .client_states import Kept
from .processes import World
from .server import ServerState
from .setting import Cohort


class ChunkResult(NamedTuple):
    """What some clients of a run have done in a round."""

    clients: list[int]
    update: State  # their part of the weighted mean of all updates
    kept: State  # one row per client, like the losses
    losses: Tensor  # not finite where anything of the client is not


def positions(own_clients: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return where a process's own clients stand among all of a round."""
    position = {client: i for i, client in enumerate(clients)}
    return [position[client] for client in own_clients]


def may_overlap(world: World, kept: Kept) -> bool:
    """Return whether a round may start before the host knows the losses of the last one."""
    return kept.cohort.device.type == "cuda" and world.size == 1 and not kept.needed


def combine(
    world: World,
    cohort: Cohort,
    server: ServerState,
    clients: Sequence[int],
    own_clients: Sequence[int],
    results: Sequence[ChunkResult],
) -> tuple[State, Tensor]:
    """Return the weighted mean of all updates of a round, and the losses of its clients, of all processes.

    `results` are those of this process, for its `own_clients` among the round's `clients`.
    """
    update = results[0].update if results else no_update(cohort, server.shared)
    for part in results[1:]:
        update = {name: value + part.update[name] for name, value in update.items()}
    losses = torch.cat([cohort.network.initial.new_zeros(0), *(part.losses for part in results)])
    if world.size == 1:
        return update, losses.double()
    return _sum_over_processes(world, cohort, server, clients, own_clients, update, losses)


def _sum_over_processes(
    world: World,
    cohort: Cohort,
    server: ServerState,
    clients: Sequence[int],
    own_clients: Sequence[int],
    update: State,
    losses: Tensor,
) -> tuple[State, Tensor]:
    """Return a round's update and the losses of all its clients, from those of every process's own, by one sum.

    With them goes a checksum of the server's state, by which processes that have drifted apart are found.
    """
    count = len(clients)
    tail = torch.zeros(count + 4 * world.size, dtype=cohort.dtype, device=cohort.device)
    tail[positions(own_clients, clients)] = losses
    tail[count:].view(-1, 4)[world.rank] = state_checksum(server.shared, cohort.dtype, cohort.device)
    flat = world.sum(torch.cat([*(v.reshape(-1).to(cohort.dtype) for v in update.values()), tail]))
    *parts, tail = flat.split([*(v.numel() for v in update.values()), len(tail)])
    numbers = tail.double().cpu()
    marks = numbers[count:].view(-1, 4).tolist()
    if apart := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise TrainingError(
            f"In round {server.round + 1} process(es) {', '.join(map(str, apart))} no longer have the server's state "
            "of process 0. All need the same kind of device and the same versions; the last round saved is sound."
        )
    means = {name: part.view(v.shape).to(v.dtype) for (name, v), part in zip(update.items(), parts, strict=True)}
    return means, numbers[:count]


def gather_kept(
    world: World, shares: Sequence[Sequence[int]], changed: dict[int, State], like: State
) -> dict[int, State]:
    """Return what the clients of a round keep: in process 0 of all, elsewhere of this process's own (`changed`).

    `shares` are the round's clients by process, and `like` has the names and shapes of a kept state.
    """
    gathered = dict(changed)
    for clients in zip_longest(*shares):  # one of every process at a time
        client = clients[world.rank]
        rows = world.gather(packed(like if client is None else changed[client], like))
        gathered |= {c: unpacked(row, like) for c, row in zip(clients, rows, strict=False) if c is not None}
    return gathered
