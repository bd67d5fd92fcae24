"""Clients side by side in a batch: the only place where a client axis exists.

`Lanes` are clients, of one run or of several. An algorithm, written for one client, is applied to all of them in one
batched program (`vmap`), or to one after another (`loop`, for a debugger and where a CPU prefers it); `backends` has
both. The clients of one run have the same shared state and hyperparameters, which then have no axis; clients of several
runs (other seeds, other continuous hyperparameters) bring their own, and every lane computes what it would alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..accel import enabled
from ..accel.convolutions import Products
from ..accel.narrow import Narrow
from ..accel.process import set_products
from ..algorithms.base import Algorithm, Site, State
from .backends import BACKENDS
from .executor import Executor
from .label_level import label_offset
from .minibatches import cat
from .samples import Data, Samples
from .setting import ClientTensors, Cohort


class ClientGroup(NamedTuple):
    """Some clients of one run, in one of its rounds, and the shared state they are sent."""

    cohort: Cohort
    shared: State
    clients: list[int]
    round: int
    training: bool = False  # whether they train in the round, which has its own step size

    @property
    def hyper(self) -> State:
        """The continuous hyperparameters."""
        hyper, factor = self.cohort.hyper, self.cohort.algorithm.lr_factor(self.round) if self.training else 1
        return hyper if factor == 1 else {**hyper, "lr": hyper["lr"] * factor}


class GroupTensors(NamedTuple):
    """What changes from round to round, for every group: tensors alone, as a captured program takes them."""

    clients: list[Tensor]
    rounds: list[Tensor]
    shared: list[State]
    hyper: list[State]


class Lanes:
    """Clients side by side. Their runs may differ in seed, federation, shared state and continuous hyperparameters.

    `tensors` and `executor` are given where the lanes stand inside of a captured program.
    """

    def __init__(
        self, groups: Sequence[ClientGroup], tensors: GroupTensors | None = None, executor: Executor | None = None
    ):
        self.groups = groups
        self.cohort = groups[0].cohort  # all runs agree in what is taken from it
        self.executor = executor or self.cohort.executor
        self.run_axis = None if len(groups) == 1 else 0  # of what belongs to a run
        # The training samples of the smallest and of the largest client of the federations, here or not.
        self.shortest = min(group.cohort.shortest for group in groups)
        self.longest = max(group.cohort.longest for group in groups)
        self.tensors = tensors or self._tensors()
        set_products(
            self.cohort.device, self.cohort.network.dtype, self.cohort.place.allow_tf32
        )  # another run may have set others

    def _tensors(self) -> GroupTensors:
        groups = self.groups
        if any(_without_axis(group.cohort) != _without_axis(self.cohort) for group in groups[1:]):
            raise ValueError("Runs side by side need the same data, network, batch size and discrete hyperparameters.")
        numbers = self.cohort.numbers([*(c for g in groups for c in g.clients), *(g.round for g in groups)])
        *clients, rounds = numbers.split([*self.counts, len(groups)])
        return GroupTensors(clients, list(rounds.unbind()), [g.shared for g in groups], [g.hyper for g in groups])

    @staticmethod
    def after_round(cohort: Cohort, shared: State, clients: Sequence[int], round: int = 0) -> Lanes:
        """Return some clients of one run after a round, to be personalised."""
        return Lanes([ClientGroup(cohort, shared, [int(c) for c in clients], round)])

    @staticmethod
    def in_round(cohort: Cohort, shared: State, clients: Sequence[int], round: int) -> Lanes:
        """Return some clients of one run that train in a round."""
        return Lanes([ClientGroup(cohort, shared, [int(c) for c in clients], round, training=True)])

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def counts(self) -> list[int]:
        """How many lanes every group has."""
        return [len(group.clients) for group in self.groups]

    @property
    def methods(self) -> type[Algorithm]:
        """The algorithm's class; `for_each_lane` calls its methods with an algorithm of bound hyperparameters."""
        return type(self.cohort.algorithm)

    @property
    def several_runs(self) -> bool:
        """Whether lanes bring a shared state and hyperparameters of their own."""
        return self.run_axis is not None

    @cached_property
    def shared(self) -> State:
        """The shared state: one for all lanes, or a row per lane."""
        return self.per_lane(self.tensors.shared)

    @cached_property
    def hyper(self) -> State:
        """The continuous hyperparameters: one of each for all lanes, or a row per lane."""
        return self.per_lane(self.tensors.hyper)

    @cached_property
    def site(self) -> Site:
        """The clients' constants."""
        sites = [
            g.cohort.client_tensors.site(clients) for g, clients in zip(self.groups, self.tensors.clients, strict=True)
        ]
        return Site(*map(cat, zip(*sites, strict=True)))

    @cached_property
    def offset(self) -> Tensor | None:
        """The label level log π of every lane; None without one."""
        if label_offset(self.cohort.algorithm, self.site) is None:
            return None
        return self.for_each_lane(label_offset, (0,), self.site)

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many training samples every lane has."""
        return np.concatenate([g.cohort.fed.train.counts[g.clients] for g in self.groups])

    @property
    def unpadded(self) -> bool:
        """Whether no minibatch has padding: all clients have as many samples, a multiple of the batch size."""
        return self.shortest == self.longest and self.longest % min(self.cohort.batch_size, self.longest) == 0

    @cached_property
    def source(self) -> tuple[Samples, Tensor]:
        """Where minibatches are taken from, and the numbers there of every lane's samples, padded with −1."""
        # Captured and compiled programs are made for one width; elsewhere padding costs more than another width.
        width = self.longest if self.cohort.executor.prefers_padding else int(self.sizes.max())
        rows = self.gather(lambda tensors, clients: tensors.rows(clients, width))
        return self.cohort.data.local(rows, self.cohort.place.policy.normalized_bytes)

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """The samples of these lanes alone, where minibatches are taken from them."""
        source = None if self.cohort.executor.capture else self.source[0]
        return () if source is None or isinstance(source, Data) else (source.x, source.y)

    def gather(self, look_up: Callable[[ClientTensors, Tensor], Tensor]) -> Tensor:
        """Return the rows of all lanes, which every group looks up in its own tensors by the numbers of its clients."""
        groups = zip(self.groups, self.tensors.clients, strict=True)
        return cat([look_up(group.cohort.client_tensors, clients) for group, clients in groups])

    @cached_property
    def _roots(self) -> list[Tensor]:
        """The keys of every group's round, one per purpose."""
        return [
            rng.fold(g.cohort.client_tensors.roots, r) for g, r in zip(self.groups, self.tensors.rounds, strict=True)
        ]

    def keys(self, purpose: int, *path: int) -> Tensor:
        """Return a key per lane: rng.key(seed, purpose, round, *path, identity of the client)."""
        roots = [reduce(rng.fold, path, by_purpose[purpose]) for by_purpose in self._roots]
        identities = [
            g.cohort.client_tensors.identity(c) for g, c in zip(self.groups, self.tensors.clients, strict=True)
        ]
        return cat([rng.fold(*pair) for pair in zip(roots, identities, strict=True)])

    def per_lane(self, states: Sequence[State]) -> State:
        """Repeat every run's state for each of its lanes; the state of a single run stays without an axis."""
        if not self.several_runs:
            return states[0]
        return {
            k: torch.cat([s[k].expand(n, *s[k].shape) for s, n in zip(states, self.counts, strict=True)])
            for k in states[0]
        }

    def apply(self, function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Apply a function of one client to every lane; arguments of dimension None are the same for all."""
        with self._products() if self.cohort.batched else contextlib.nullcontext():
            return BACKENDS[self.cohort.backend].apply(function, in_dims, args)

    def _products(self) -> contextlib.AbstractContextManager[object]:
        """Return how the network's products are computed: a GPU has kernels of ours, a CPU others for narrow layers."""
        if not enabled("convolutions"):
            return contextlib.nullcontext()
        if self.cohort.device.type == "cuda":
            return Products()
        narrow = any(map(Narrow.suits, self.cohort.network.layout.shapes))
        return Narrow() if narrow else contextlib.nullcontext()  # every operation of a network passes through a mode

    def for_each_lane(self, function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Apply `function(algorithm, *args)` to every lane, the continuous hyperparameters bound as tensors."""

        def one(hyper: State, *args: Any) -> Any:
            return function(self.cohort.algorithm.bind(hyper), *args)

        return self.apply(one, (self.run_axis, *in_dims), self.hyper, *args)


def _without_axis(cohort: Cohort) -> tuple[object, ...]:
    """Return the properties without an axis for runs: runs side by side must agree in them."""
    algorithm, fixed = cohort.algorithm, (cohort.batch_size, cohort.backend, cohort.likelihood, cohort.network.layout)
    return id(cohort.data), type(algorithm), algorithm.discrete(), *fixed


def join_states(states: Sequence[State]) -> State:
    """Return the rows of several states in one."""
    return {k: cat([s[k] for s in states]) for k in states[0]}


def split_state(state: State, sizes: list[int]) -> list[State]:
    """Return a state of many rows, cut into states of so many each."""
    parts = {name: v.split(sizes) for name, v in state.items()}
    return [{name: v[i] for name, v in parts.items()} for i in range(len(sizes))]


def captured(
    lanes: Lanes,
    function: Callable[..., Any],
    *args: Any,
    static: tuple[Any, ...] = (),
    steps: frozenset[str] = frozenset(),
) -> Any:
    """Call `function(lanes, *args, *static)`, whose args are tensors; on a GPU as one captured program, if possible.

    `steps` names the steps that the function takes.
    """
    if not lanes.executor.capture:
        return function(lanes, *args, *static)
    # The program reads the tensors of these very cohorts, so they are part of its name; the lanes may be others.
    tensors = tuple(group.cohort.client_tensors for group in lanes.groups)
    options = lanes.cohort.algorithm.discrete()
    name = (function.__name__, static, options, tuple(lanes.counts), lanes.longest, tensors)
    inside = lanes.executor.inside

    def run(tensors: GroupTensors, *args: Any) -> Any:
        return function(Lanes(lanes.groups, tensors, inside), *args, *static)

    program = lanes.executor.captured(name, run, (lanes.tensors, *args), steps)
    return function(lanes, *args, *static) if program is None else program(lanes.tensors, *args)
