"""The server of a federation: whom it draws, how it weighs and merges updates, its momentum and its average.

Everything here is data or a pure function, and knows neither files nor processes nor devices but those of its tensors.
The simulator (`rounds`) uses these functions; so may a program that runs a federation by hand:

    state = initial_state(algorithm, network)
    clients = draw_clients(federation.clients, participation, seed, state.round + 1)
    update = weighted_sum(client_weights(algorithm, federation.train.counts[clients], like), updates)
    state = server_step(algorithm, state, update, len(clients), federation.clients)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..accel.machine import to_device
from ..algorithms.base import Algorithm, State
from ..vectors import Network


class ServerState(NamedTuple):
    """The server after a round."""

    round: int
    shared: State  # what clients are sent
    average: State  # the shared state averaged over rounds
    velocity: State  # the server's last step, where it has momentum


def state_bytes(state: State) -> int:
    """Return how many bytes a state takes as a message."""
    return sum(v.numel() * v.element_size() for v in state.values())


def initial_state(algorithm: Algorithm, network: Network) -> ServerState:
    """Return the server before the first round."""
    shared = algorithm.init(network.initial, network.layout)
    return ServerState(0, shared, dict(shared), {})


def theta(algorithm: Algorithm, state: ServerState) -> State:
    """Return what is scored, personalised and saved: the average over rounds, or the last shared state."""
    return state.average if algorithm.average else state.shared


def cohort_size(clients: int, participation: float) -> int:
    """Return how many clients a round has: τN, rounded, but at least one."""
    return min(clients, max(1, int(participation * clients + 0.5)))


def draw_clients(clients: int, participation: float, seed: int, round: int) -> list[int]:
    """Draw the clients of a round, τN of them, uniformly without replacement, in ascending order."""
    size = cohort_size(clients, participation)
    drawn = rng.generator(seed, rng.SAMPLE, round).choice(clients, size, replace=False)
    return sorted(drawn.tolist())


def client_weights(algorithm: Algorithm, counts: np.ndarray, like: Tensor) -> Tensor:
    """Return the weights of a round's clients in the mean of their updates, of the type and device of `like`.

    `counts` are their numbers of training samples.
    """
    if algorithm.weights == "uniform":
        return torch.full((len(counts),), 1 / len(counts), dtype=like.dtype, device=like.device)
    n = counts.astype(float)
    return to_device(torch.as_tensor(n / n.sum()).to(like.dtype), like.device)


def weighted_sum(weights: Tensor, updates: State) -> State:
    """Return Σ_i weights_i · update_i, for updates of several clients along their first axis."""
    return {name: torch.tensordot(weights, value, 1) for name, value in updates.items()}


def server_step(algorithm: Algorithm, state: ServerState, update: State, sampled: int, clients: int) -> ServerState:
    """Return the server after a round: merge the updates, apply the server's momentum, average over rounds.

    `update` is the weighted mean of the updates of the `sampled` clients that took part, of `clients` in all.
    """
    merged = algorithm.merge(state.shared, update, sampled, clients)
    shared, velocity = algorithm.apply_server_momentum(state.shared, merged, state.velocity)
    decay = min(algorithm.average, state.round / (state.round + 1))
    average = {k: decay * state.average[k] + (1 - decay) * v for k, v in shared.items()} if decay else shared
    return ServerState(state.round + 1, shared, average, velocity)
