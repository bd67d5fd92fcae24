"""The engine: how many clients run at once, where, and in which process.

The way of an update: `rounds` (draw clients, merge) → `workers` (which clients together) → `executor` (eager, recorded,
graph, compiled) → `client` (one client's round, for many at once) → the algorithm, and the result back up once.

    setting       Setting (what is trained), Place (where and how), Cohort (both, with the data on the device)
    policy        thresholds, in one frozen object
    backends      BACKENDS: one batched program, or client by client
    lanes         Lanes: clients side by side in a batch
    client        client_round, personalize, predict: functions over lanes
    server        draw_clients, client_weights, weighted_sum, server_step: pure functions of a ServerState
    rounds        Simulation: one round of one run or of several side by side
    checkpoint    the state between two rounds · client_states: what clients keep
    processes     torch.distributed · exchange: what processes send each other in a round
    programs      functions of tensors that are captured, compiled or recorded
    minibatches, samples, augment, loss, noise, label_level      what a step reads and computes
    autotune, compiling, diagnose                   how to run, and why a module cannot

One client's round and one server's step are callable alone, with the same keys and minibatches as in a simulation:

    cohort = fedabml.prepare(federation, "mlp", algorithm).cohort       # or Cohort(Setting(...), Place(...)) by hand
    state = initial_state(algorithm, cohort.network)
    lanes = Lanes.in_round(cohort, state.shared, [client], round)
    result = client_round(lanes, initial_kept(lanes), epochs)           # ClientResult: update, kept, losses; a row each
    weights = client_weights(algorithm, counts, cohort.network.initial)
    state = server_step(algorithm, state, weighted_sum(weights, updates), sampled, clients)

A client's keys depend on its number in the federation or, if the setting has `identities`, on its identity: a client
alone in its own federation then gets the bits that it gets among the others. `tests/engine/test_by_hand.py` runs whole
federations in this way. These names are loaded on use.
"""

from __future__ import annotations

from ..accel import import_on_use

_SERVER = ("ServerState", "client_weights", "draw_clients", "initial_state", "server_step", "theta", "weighted_sum")
_HOMES = {
    "client": ("ClientResult", "client_round", "initial_kept", "personalize", "predict"),
    "lanes": ("Lanes",),
    "rounds": ("Simulation",),
    "server": _SERVER,
    "setting": ("Cohort", "Place", "Setting"),
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = import_on_use(__name__, _HOMES)
