"""Many clients at once: the only place where a client axis exists.

`Lanes` is a list of clients, of one run or of several, side by side in a batch: it applies an algorithm, written for
one client, to all of them in one batched program (`vmap`), or to one after another (`loop`, for a debugger and where a
CPU prefers it). Both draw the same minibatches and the same noise, so they agree up to the rounding of floating-point
sums. The clients of one run have the same θ and hyperparameters, which then have no axis; clients of several runs
(other seeds, other continuous hyperparameters) each bring their own, and every lane computes what it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import rng
from ..algorithms.base import Phase, Site, State, Step
from ..gaussian import Distribution
from .data import Source
from .estimators import Noise
from .loss import ClientLoss, draw, draws_of, label_offset, output
from .plan import Plan, minibatches, padded
from .program import Inputs, Move

if TYPE_CHECKING:
    from .cohort import Cohort

PIECE, WIDE = 128, 8192  # test rows of a lane that are in flight at once; on a GPU at least so many of all lanes


class Part(NamedTuple):
    """Some clients of one run, in one of its rounds, and the θ they are sent."""

    cohort: Cohort
    shared: State
    clients: list[int]
    round: int


def chunked(clients: Sequence[Sequence[int]], size: int) -> Iterator[dict[int, list[int]]]:
    """The clients of several runs, by run, at most so many at a time."""
    pairs = [(run, int(c)) for run, own in enumerate(clients) for c in own]
    for begin in range(0, len(pairs), size):
        part: dict[int, list[int]] = {}
        for run, client in pairs[begin : begin + size]:
            part.setdefault(run, []).append(client)
        yield part


def joined(states: Sequence[State]) -> State:
    """The lanes of several runs in one state."""
    return states[0] if len(states) == 1 else {k: torch.cat([s[k] for s in states]) for k in states[0]}


class Lanes:
    """Clients side by side. Their runs may differ in seed, federation, θ and continuous hyperparameters."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.one = parts[0].cohort  # all runs agree in what is taken from it
        self.shared, self.hyper = parts[0].shared, self.one.hyper
        self.runs: int | None = None  # the axis of what belongs to a run
        if len(parts) > 1:
            for part in parts[1:]:
                self._check_alike(part.cohort)
            self.runs = 0
            self.shared = self._laned([part.shared for part in parts])
            self.hyper = self._laned([part.cohort.hyper for part in parts])
        sites = [part.cohort.site(part.clients) for part in parts]
        self.site = Site(*(torch.cat(column) for column in zip(*sites, strict=True)))
        self.offset = self.offsets()
        self.longest = max(part.cohort.longest for part in parts)  # samples of the largest client, here or not

    def __len__(self) -> int:
        return len(self.site.n)

    def _check_alike(self, other: Cohort) -> None:
        """Only runs that agree in everything that has no axis may share a batch."""
        one = self.one
        same = (
            one.data is other.data
            and type(one.algorithm) is type(other.algorithm)
            and one.algorithm.discrete() == other.algorithm.discrete()
            and (one.batch_size, one.backend, one.likelihood) == (other.batch_size, other.backend, other.likelihood)
            and one.network.layout == other.network.layout
        )
        if not same:
            raise ValueError(
                "Runs side by side must have the same data, network, batch size and discrete hyperparameters."
            )

    def _laned(self, states: list[State]) -> State:
        """What each run has once, for every one of its lanes."""
        sizes = [len(part.clients) for part in self.parts]
        return {
            k: torch.cat([s[k].expand(n, *s[k].shape) for s, n in zip(states, sizes, strict=True)]) for k in states[0]
        }

    # -- a function of one client, for every lane -------------------------------------------------------------------
    def apply(self, function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a function of one client to every lane; arguments of dimension None are the same for all."""
        if self.one.backend == "vmap":
            return torch.vmap(function, in_dims)(*args)
        lane = lambda i: [a if d is None else tree_map(lambda t: t[i], a) for a, d in zip(args, in_dims, strict=True)]  # noqa: E731
        count = len(tree_leaves([a for a, d in zip(args, in_dims, strict=True) if d == 0])[0])
        return tree_map(lambda *t: torch.stack(t), *[function(*lane(i)) for i in range(count)])

    def each(self, method: str, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a method of the algorithm to every lane, its continuous hyperparameters bound as tensors."""

        def one(hyper: State, *args: Any) -> Any:
            return getattr(self.one.algorithm.bind(hyper), method)(*args)

        return self.apply(one, (self.runs, *in_dims), self.hyper, *args)

    def keys(self, purpose: int) -> Tensor:
        """A key per lane."""
        return torch.cat([p.cohort.keys(purpose, p.round, p.clients) for p in self.parts])

    def offsets(self) -> Tensor | None:
        """log π_i of every lane; None without a label level."""
        if label_offset(self.one.algorithm, self.site) is None:
            return None
        bound = lambda hyper, site: label_offset(self.one.algorithm.bind(hyper), site)  # noqa: E731
        return self.apply(bound, (self.runs, 0), self.hyper, self.site)

    # -- a round ----------------------------------------------------------------------------------------------------
    def keep(self) -> State:
        """The kept state of clients that have none yet."""
        initial = [{"w": part.cohort.network.initial} for part in self.parts]
        params = initial[0]["w"] if self.runs is None else self._laned(initial)["w"]
        keys = torch.cat([p.cohort.keys(rng.KEEP, 0, p.clients) for p in self.parts])
        return self.each("keep", (self.runs, self.runs, 0, 0), params, self.shared, self.site, keys)

    def train(self, kept: State, epochs: int) -> tuple[State, State, Tensor]:
        """The local work of a round: the clients' updates, what they keep, their mean losses."""
        carry = self.each("begin", (self.runs, 0, 0, 0), self.shared, kept, self.site, self.keys(rng.NOISE))
        carry, losses, done = self.steps(carry, self.one.algorithm.phases(epochs), rng.NOISE)
        update, kept = self.each("end", (0, self.runs, 0, 0, 0), carry, self.shared, kept, self.site, done)
        return update, kept, losses

    def steps(self, carry: State, phases: list[Phase], purpose: int) -> tuple[State, Tensor, Tensor]:
        """All steps of all phases: the last carry, the mean loss and the number of steps of every lane."""
        keys, losses, done = self.keys(purpose), torch.zeros_like(self.site.n), torch.zeros_like(self.site.n)
        for number, (epochs, step, per_step) in enumerate(phases):
            if epochs == 0:
                continue
            plan = self.plan(epochs, per_step, purpose, number)
            owned = torch.as_tensor(plan.steps).to(losses.device)
            first, phase_keys = torch.zeros_like(owned[0]), rng.fold(keys, number)
            inputs = Inputs(
                *(carry, losses, self.site, self.offset, phase_keys, owned, self.hyper, self.shared, first, plan.rows)
            )
            # How many epochs there are does not change a step.
            options = tuple(o for o in self.one.algorithm.discrete() if o[0] != "personal_epochs")
            name = (step.__name__, self.runs, options)  # type: ignore[attr-defined]
            carry, losses = self.one.programs.run(name, self.move(step), inputs, plan.steps, self.runs is not None)
            done = done + owned
        return carry, losses / done.clamp_min(1), done

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many training samples every lane has."""
        return np.concatenate([p.cohort.fed.train.counts[p.clients] for p in self.parts])

    @cached_property
    def source(self) -> tuple[Source, Tensor]:
        """Where minibatches are taken from, and the numbers there of every lane's samples, padded with −1."""
        # A GPU's programs are made for one width; elsewhere padding costs more than another width.
        width = self.longest if self.one.programs.capture else int(self.sizes.max())
        return self.one.data.local(torch.cat([p.cohort.rows(p.clients, width) for p in self.parts]))

    def plan(self, epochs: int, per_step: int, purpose: int, number: int) -> Plan:
        """The minibatches of a phase."""
        paths = [(p.cohort.seed, purpose, p.round, number, rng.SHUFFLE) for p in self.parts]
        rows = self.source[1]
        keys = torch.cat([rng.keys(path, p.clients, rows.device) for path, p in zip(paths, self.parts, strict=True)])
        return minibatches(rows, self.sizes, keys, epochs, self.one.batch_size, per_step)

    def move(self, step: Step) -> Move:
        """One step of all lanes."""
        name, made, runs = step.__name__, self.one, self.runs  # type: ignore[attr-defined]
        noise = Noise.of(made.algorithm, made.network, made.fed.x.shape[1:])
        source = self.source[0]

        def one(
            hyper: State, carry: State, shared: State, batches: Any, site: Site, key: Tensor, offset: Tensor | None
        ) -> tuple[State, Tensor]:
            loss = ClientLoss(made.network, made.likelihood, offset, batched=made.backend == "vmap", noise=noise)
            return getattr(made.algorithm.bind(hyper), name)(carry, shared, batches, site, key, loss)

        def all_lanes(given: Inputs, index: Tensor, keys: Tensor) -> tuple[State, Tensor]:
            batches = tuple(source.batch(part) for part in index)
            dims = (runs, 0, runs, 0, 0, 0, None if given.offset is None else 0)
            args = (given.hyper, given.carry, given.shared, batches, given.site, keys, given.offset)
            return self.apply(one, dims, *args)

        return all_lanes

    # -- a client's own model ---------------------------------------------------------------------------------------
    def personalise(self, kept: State) -> Distribution:
        """Every client's own distribution over weights, a lane each, exactly as a new client would get it."""
        keys = self.keys(rng.PERSONAL)
        carry = self.each("personal", (self.runs, 0, 0, 0), self.shared, kept, self.site, keys)
        carry, _, _ = self.steps(carry, self.one.algorithm.personal_phases(), rng.PERSONAL)
        return self.each("own_model", (0,), carry)

    def predict(self, models: Distribution, rows: Sequence[np.ndarray]) -> Tensor:
        """What every lane's model gives for its own rows under each weight draw: [draws, all rows, outputs]."""
        return self.outputs(models, rows, self.offset, self.keys(rng.PREDICT))

    def outputs(self, models: Distribution, rows: Sequence[np.ndarray], offsets: Tensor | None, keys: Tensor) -> Tensor:
        """The same for any models, such as the prior itself, with label levels and keys of their own."""
        one, samples = self.one, self.one.algorithm.predict_samples
        index = torch.as_tensor(padded(rows)).to(one.device)
        predict = lambda w, x, offset: output(one.network, one.likelihood, w, x, offset)  # noqa: E731
        dims = (0, 0, None if offsets is None else 0)
        piece = max(PIECE, WIDE // len(rows)) if one.device.type == "cuda" else PIECE
        draws, own = [], index >= 0
        for j in range(draws_of(models, samples)):
            weights = self.apply(lambda q, key: draw(q, key, j, samples), (0, 0), models, keys)  # noqa: B023
            pieces = [
                self.apply(predict, dims, weights, one.data.inputs(part.clamp_min(0)), offsets)
                for part in index.split(piece, 1)
            ]
            draws.append(torch.cat(pieces, 1)[own])
        return torch.stack(draws)
