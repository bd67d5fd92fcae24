"""Many clients at once: the only place where a client axis exists.

`Lanes` is a list of clients, of one run or of several, side by side in a batch: it applies an algorithm, written for
one client, to all of them in one batched program (`vmap`), or to one after another (`loop`, for a debugger and where a
CPU prefers it). Both draw the same minibatches and the same noise, so they agree up to the rounding of floating-point
sums. The clients of one run have the same θ and hyperparameters, which then have no axis; clients of several runs
(other seeds, other continuous hyperparameters) each bring their own, and every lane computes what it would alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import rng
from ..accel import enabled
from ..accel.convolutions import Narrow, Products
from ..accel.operators import triton_usable
from ..accel.process import set_products
from ..accel.quiet import quiet_vmap
from ..algorithms.base import Phase, Site, State, Step
from ..gaussian import Distribution
from .augment import PATH, augmented
from .executor import Inputs, Move, Programs
from .loss import ClientLoss, draw, draws_of, label_offset, output
from .memory import uploaded
from .minibatches import cat, minibatches, padded, steps_of
from .noise import Noise
from .samples import Local, Source

if TYPE_CHECKING:
    from .setting import Cohort

WHOLE = 256  # steps of a round that is one program
PIECE, WIDE = 128, 8192  # test rows of a lane that are in flight at once; on a GPU at least so many of all lanes
FLIGHT = 1 << 20  # on a CPU as many rows of all lanes as have so many activations


class Part(NamedTuple):
    """Some clients of one run, in one of its rounds, and the θ they are sent."""

    cohort: Cohort
    shared: State
    clients: list[int]
    round: int
    pace: float = 1.0  # what the step size is multiplied with

    @property
    def hyper(self) -> State:
        """The continuous hyperparameters."""
        own = self.cohort.hyper
        return own if self.pace == 1 else {**own, "lr": own["lr"] * self.pace}


def chunked(clients: Sequence[Sequence[int]], size: int, workers: int = 1) -> Iterator[dict[int, list[int]]]:
    """The clients of several runs, by run, at most so many at a time, shared out among threads."""
    pairs = [(run, int(c)) for run, own in enumerate(clients) for c in own]
    size = max(1, -(-min(size, len(pairs)) // workers))
    for begin in range(0, len(pairs), size):
        part: dict[int, list[int]] = {}
        for run, client in pairs[begin : begin + size]:
            part.setdefault(run, []).append(client)
        yield part


def joined(states: Sequence[State]) -> State:
    """The lanes of several runs in one state."""
    return {k: cat([s[k] for s in states]) for k in states[0]}


def each_run(state: State, sizes: list[int]) -> list[State]:
    """A state of many lanes, cut into those of each run."""
    parts = {name: v.split(sizes) for name, v in state.items()}
    return [{name: v[i] for name, v in parts.items()} for i in range(len(sizes))]


def _flagged(losses: Tensor, values: list[Tensor]) -> Tensor:
    """The losses, NaN where any of the values is not finite."""
    values = [value for value in values if value.is_floating_point()]
    if losses.is_cuda and triton_usable():
        from ..accel import triton_kernels

        return triton_kernels.flag(losses, values)
    for value in values:  # what is not finite, less itself, is NaN, and all else is 0
        losses = losses + (value - value).reshape(len(losses), -1).sum(-1).to(losses.dtype)
    return losses


class Given(NamedTuple):
    """What changes from round to round, of every run: tensors alone, as a captured program takes them."""

    clients: list[Tensor]
    rounds: list[Tensor]
    shared: list[State]
    hyper: list[State]


class Lanes:
    """Clients side by side. Their runs may differ in seed, federation, θ and continuous hyperparameters."""

    def __init__(self, parts: Sequence[Part], given: Given | None = None, programs: Programs | None = None):
        self.parts = parts
        self.one = parts[0].cohort  # all runs agree in what is taken from it
        self.programs = programs or self.one.programs
        self.runs = None if len(parts) == 1 else 0  # the axis of what belongs to a run
        # Samples of the smallest and of the largest client, here or not.
        self.shortest = min(part.cohort.shortest for part in parts)
        self.longest = max(part.cohort.longest for part in parts)
        if given is None:
            for part in parts[1:]:
                self._check_alike(part.cohort)
            counts = [len(part.clients) for part in parts]
            numbers = self.one.numbers([*(c for p in parts for c in p.clients), *(p.round for p in parts)])
            *clients, rounds = numbers.split([*counts, len(parts)])
            hyper = [part.hyper for part in parts]
            given = Given(clients, list(rounds.unbind()), [part.shared for part in parts], hyper)
        self.given = given
        set_products(self.one.device, self.one.network.dtype, self.one.coarse)  # another run may have set others

    def __len__(self) -> int:
        return sum(len(part.clients) for part in self.parts)

    @cached_property
    def shared(self) -> State:
        """θ: one for all, or one per lane."""
        return self._laned(self.given.shared)

    @cached_property
    def hyper(self) -> State:
        """The continuous hyperparameters: one of each for all, or one per lane."""
        return self._laned(self.given.hyper)

    @cached_property
    def site(self) -> Site:
        """The clients' constants."""
        sites = [p.cohort.tables.site(own) for p, own in zip(self.parts, self.given.clients, strict=True)]
        return Site(*(cat(column) for column in zip(*sites, strict=True)))

    @cached_property
    def offset(self) -> Tensor | None:
        """log π_i of every lane; None without a label level."""
        if label_offset(self.one.algorithm, self.site) is None:
            return None
        bound = lambda hyper, site: label_offset(self.one.algorithm.bind(hyper), site)  # noqa: E731
        return self.apply(bound, (self.runs, 0), self.hyper, self.site)

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
        """What each run has once, for every one of its lanes; as it is if there is one run."""
        if self.runs is None:
            return states[0]
        sizes = [len(part.clients) for part in self.parts]
        return {
            k: torch.cat([s[k].expand(n, *s[k].shape) for s, n in zip(states, sizes, strict=True)]) for k in states[0]
        }

    # -- a function of one client, for every lane -------------------------------------------------------------------
    def apply(self, function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a function of one client to every lane; arguments of dimension None are the same for all."""
        if self.one.backend == "vmap":
            with self._products(), quiet_vmap():
                return torch.vmap(function, in_dims)(*args)
        lane = lambda i: [a if d is None else tree_map(lambda t: t[i], a) for a, d in zip(args, in_dims, strict=True)]  # noqa: E731
        count = len(tree_leaves([a for a, d in zip(args, in_dims, strict=True) if d == 0])[0])
        if count == 1:
            return tree_map(lambda t: t.unsqueeze(0), function(*lane(0)))
        return tree_map(lambda *t: torch.stack(t), *[function(*lane(i)) for i in range(count)])

    def _products(self) -> contextlib.AbstractContextManager[object]:
        """How the network's products are computed: a GPU has kernels of ours, a CPU another way with narrow layers."""
        if not enabled("convolutions"):
            return contextlib.nullcontext()
        if self.one.device.type == "cuda":
            return Products()
        narrow = any(map(Narrow.suits, self.one.network.layout.shapes))
        return Narrow() if narrow else contextlib.nullcontext()  # for every operation of a network passes a mode

    def each(self, method: str, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Applies a method of the algorithm to every lane, its continuous hyperparameters bound as tensors."""

        def one(hyper: State, *args: Any) -> Any:
            return getattr(self.one.algorithm.bind(hyper), method)(*args)

        return self.apply(one, (self.runs, *in_dims), self.hyper, *args)

    def captured(
        self, method: str, *args: Any, static: tuple[Any, ...] = (), instead: Callable[[], Any] | None = None
    ) -> Any:
        """A method of tensors and static arguments; on a GPU one captured program or, if refused, `instead`."""
        if not self.programs.capture:
            return getattr(self, method)(*args, *static)
        # Captured, it reads the tables of these very cohorts. The lanes may be others the next time, and are given.
        tables = tuple(part.cohort.tables for part in self.parts)
        counts = tuple(len(part.clients) for part in self.parts)
        name = (method, static, self.one.algorithm.discrete(), counts, self.longest, tuple(map(id, tables)))
        inside = self.programs.inside
        run = lambda given, *args: getattr(Lanes(self.parts, given, inside), method)(*args, *static)  # noqa: E731
        return self.programs.call(name, run, self.given, *args, keep=tables, instead=instead)

    @cached_property
    def roots(self) -> list[Tensor]:
        """Of every run the keys of the round, one per purpose."""
        return [rng.fold(p.cohort.tables.roots, r) for p, r in zip(self.parts, self.given.rounds, strict=True)]

    def keys(self, purpose: int, *path: int) -> Tensor:
        """A key per lane, as rng.key(seed, purpose, round, *path, client) would give."""
        roots = [reduce(rng.fold, path, own[purpose]) for own in self.roots]
        return cat([rng.fold(root, own) for root, own in zip(roots, self.given.clients, strict=True)])

    # -- a round ----------------------------------------------------------------------------------------------------
    def keep(self) -> State:
        """The kept state of clients that have none yet."""
        params = self._laned([{"w": part.cohort.network.initial} for part in self.parts])["w"]
        given = zip(self.parts, self.given.clients, strict=True)
        keys = cat([p.cohort.tables.keys(own, rng.KEEP, 0) for p, own in given])
        return self.each("keep", (self.runs, self.runs, 0, 0), params, self.shared, self.site, keys)

    def work(self, kept: State, weights: list[Tensor], epochs: int) -> tuple[list[State], State, Tensor]:
        """A round: of every run the weighted sum of its clients' updates; what they keep; their mean losses.

        The loss of a client is NaN where anything of it is not finite. On a GPU the whole round is one program, where
        clients always take the same number of steps.
        """
        stepwise = lambda: self.round(kept, weights, epochs)  # noqa: E731
        if not (self.programs.capture and self._even(epochs)):
            return stepwise()
        return self.captured("round", kept, weights, static=(epochs,), instead=stepwise)

    def _even(self, epochs: int) -> bool:
        """Whether all clients there are take the same number of steps in a round, and not too many for one program."""
        phases, sizes = self.one.algorithm.phases(epochs), np.array([self.shortest, self.longest])
        steps = [steps_of(sizes, p.epochs, min(self.one.batch_size, self.longest), p.batches) for p in phases]
        return all(few == many for few, many in steps) and sum(int(most) for _, most in steps) <= WHOLE

    def round(self, kept: State, weights: list[Tensor], epochs: int) -> tuple[list[State], State, Tensor]:
        """As `work`, in as many programs as it takes."""
        update, kept, losses = self.train(kept, epochs)
        pieces = each_run(update, [len(part.clients) for part in self.parts])
        sums = [
            {name: torch.tensordot(share, value, 1) for name, value in own.items()}
            for share, own in zip(weights, pieces, strict=True)
        ]
        return sums, kept, _flagged(losses, [*update.values(), *kept.values()])

    def train(self, kept: State, epochs: int) -> tuple[State, State, Tensor]:
        """The local work of a round: the clients' updates, what they keep, their mean losses."""
        carry = self.captured("opening", kept, static=("begin", rng.NOISE))
        carry, losses, done = self.steps(carry, self.one.algorithm.phases(epochs), rng.NOISE)
        update, kept = self.captured("closing", carry, kept, done)
        return update, kept, losses

    def opening(self, kept: State, method: str, purpose: int) -> State:
        """The carry that a round, or personalising, starts from."""
        return self.each(method, (self.runs, 0, 0, 0), self.shared, kept, self.site, self.keys(purpose))

    def closing(self, carry: State, kept: State, done: Tensor) -> tuple[State, State]:
        """A round's updates, and what clients keep."""
        return self.each("end", (0, self.runs, 0, 0, 0), carry, self.shared, kept, self.site, done)

    def steps(self, carry: State, phases: list[Phase], purpose: int, begun: int = 0) -> tuple[State, Tensor, Tensor]:
        """All steps of all phases: the last carry, the mean loss and the number of steps of every lane.

        Of so many epochs that are `begun`, of the only phase, the steps were taken before; all lanes take as many.
        """
        if self.one.backend == "loop" and not self.one.programs.capture and len(self) > 1:
            # All steps of one client before the next: its weights stay in the cache.
            each = [Lanes([part._replace(clients=[client])]) for part in self.parts for client in part.clients]
            one = lambda v, i: tree_map(lambda v: v[i : i + 1], v)  # noqa: E731
            own = [lane.steps(one(carry, i), phases, purpose, begun) for i, lane in enumerate(each)]
            return tree_map(lambda *t: torch.cat(t), *own)
        carry = {name: value.contiguous() for name, value in carry.items()}  # a traced step is made for such
        sizes = tuple((phase.epochs, phase.batches) for phase in phases)
        ready, (losses, done) = self.captured("schedule", static=(purpose, sizes))
        # How many epochs there are does not change a step.
        options = tuple(o for o in self.one.algorithm.discrete() if o[0] != "personal_epochs")
        for phase, inputs in zip(phases, ready, strict=True):
            if inputs is None:
                continue
            steps = steps_of(self.sizes, phase.epochs, inputs.rows.shape[-1], phase.batches)
            name = (phase.step.__name__, self.runs, self.whole, options)  # type: ignore[attr-defined]
            past = int(steps_of(self.sizes, begun, inputs.rows.shape[-1], phase.batches).max()) if begun else 0
            rows, steps = inputs.rows[past : steps.max()], steps - past
            inputs = inputs._replace(carry=carry, losses=losses, rows=rows, samples=self.samples)
            if past:
                inputs = inputs._replace(first=inputs.first + past)
            carry, losses = self.programs.run(name, self.move(phase.step), inputs, steps, self.runs is not None)
        return carry, losses / done.clamp_min(1), done

    def schedule(
        self, purpose: int, phases: tuple[tuple[int, int], ...]
    ) -> tuple[list[Inputs | None], tuple[Tensor, Tensor]]:
        """The inputs of every phase, but for the carry; its losses, none yet, and the number of all its steps."""
        keys = self.keys(purpose)
        none = done = torch.zeros_like(self.site.n)  # losses and steps, which nothing writes to
        ready: list[Inputs | None] = []
        given = zip(self.parts, self.given.clients, strict=True)
        sizes = cat([p.cohort.tables.sizes(own) for p, own in given])
        for number, (epochs, per_step) in enumerate(phases):
            if epochs == 0:
                ready.append(None)
                continue
            shuffle = self.keys(purpose, number, rng.SHUFFLE)
            rows = minibatches(self.source[1], sizes, shuffle, epochs, self.one.batch_size, per_step, self.shortest)
            size = rows.shape[-1]
            few, many = steps_of(np.array([self.shortest, self.longest]), epochs, size, per_step)
            owned = steps_of(sizes, epochs, size, per_step) if few < many else torch.full_like(keys, many)
            first = torch.zeros_like(owned[0])
            own_keys = rng.fold(keys, number)
            ready.append(
                Inputs({}, done, self.site, self.offset, own_keys, owned, self.hyper, self.shared, (), first, rows)
            )
            done = done + owned
        return ready, (none, done)

    @property
    def whole(self) -> bool:
        """Whether no minibatch has padding: all clients there are have as many samples, a multiple of the batch."""
        return self.shortest == self.longest and self.longest % min(self.one.batch_size, self.longest) == 0

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many training samples every lane has."""
        return np.concatenate([p.cohort.fed.train.counts[p.clients] for p in self.parts])

    @cached_property
    def source(self) -> tuple[Source, Tensor]:
        """Where minibatches are taken from, and the numbers there of every lane's samples, padded with −1."""
        # Captured and compiled programs are made for one width; elsewhere padding costs more than another width.
        width = self.longest if self.one.programs.few else int(self.sizes.max())
        given = zip(self.parts, self.given.clients, strict=True)
        return self.one.data.local(cat([p.cohort.tables.rows(own, width) for p, own in given]))

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """Those of these lanes alone, where minibatches are taken from them."""
        source = None if self.one.programs.capture else self.source[0]
        return (source.x, source.y) if isinstance(source, Local) else ()

    def move(self, step: Step) -> Move:
        """One step of all lanes."""
        name, made, runs, whole = step.__name__, self.one, self.runs, self.whole  # type: ignore[attr-defined]
        noise = Noise.of(made.algorithm, made.network, made.fed.x.shape[1:])
        source = made.data if made.programs.capture else self.source[0]
        augment = made.algorithm.augment

        def one(
            hyper: State, carry: State, shared: State, batches: Any, site: Site, key: Tensor, offset: Tensor | None
        ) -> tuple[State, Tensor]:
            loss = ClientLoss(made.network, made.likelihood, offset, batched=made.backend == "vmap", noise=noise)
            return getattr(made.algorithm.bind(hyper), name)(carry, shared, batches, site, key, loss)

        def all_lanes(given: Inputs, index: Tensor, keys: Tensor) -> tuple[State, Tensor]:
            local = Local(*given.samples) if given.samples else source
            batches = tuple(local.batch(part, whole) for part in index)
            if augment != "none":
                own = [rng.fold(keys, PATH + number) for number in range(len(batches))]
                batches = tuple(
                    batch._replace(x=augmented(batch.x, key, augment, made.data.black))
                    for batch, key in zip(batches, own, strict=True)
                )
            dims = (runs, 0, runs, 0, 0, 0, None if given.offset is None else 0)
            args = (given.hyper, given.carry, given.shared, batches, given.site, keys, given.offset)
            return self.apply(one, dims, *args)

        return all_lanes

    # -- a client's own model ---------------------------------------------------------------------------------------
    def personalise(self, kept: State) -> Distribution:
        """Every client's own distribution over weights, a lane each, exactly as a new client would get it."""
        return next(self.personalised(kept, [self.one.algorithm.personal_epochs]))

    def personalised(self, kept: State, epochs: Sequence[int]) -> Iterator[Distribution]:
        """The same after each of these numbers of epochs, ascending: where all lanes take as many steps, on the way."""
        start, begun = self.captured("opening", kept, static=("personal", rng.PERSONAL)), 0
        alone = self.one.backend == "loop" and not self.one.programs.capture
        each = steps_of(self.sizes, 1, min(self.one.batch_size, self.longest), 1)
        even = alone or each.min() == each.max()
        carry = start
        for many in epochs:
            phases = dataclasses.replace(self.one.algorithm, personal_epochs=many).personal_phases()
            if not (even and [(p.epochs, p.batches) for p in phases] == [(many, 1)]):
                carry, begun = start, 0
            carry, _, _ = self.steps(carry, phases, rng.PERSONAL, begun)
            begun = many
            yield self.each("own_model", (0,), carry)

    def predict(self, models: Distribution, rows: Sequence[np.ndarray]) -> Tensor:
        """What every lane's model gives for its own rows under each weight draw: [draws, all rows, outputs]."""
        return self.outputs(models, rows, self.offset, self.keys(rng.PREDICT))

    def outputs(self, models: Distribution, rows: Sequence[np.ndarray], offsets: Tensor | None, keys: Tensor) -> Tensor:
        """The same for any models, such as the prior itself, with label levels and keys of their own."""
        one, samples = self.one, self.one.algorithm.predict_samples
        firsts = [part.cohort.first for part in self.parts for _ in part.clients]
        wanted = padded([own + first for own, first in zip(rows, firsts, strict=True)])
        index = uploaded(torch.as_tensor(wanted), one.device)
        own = uploaded(torch.as_tensor(np.flatnonzero(wanted >= 0)), one.device)  # a mask would make the host wait
        predict = lambda w, x, offset: output(one.network, one.likelihood, w, x, offset)  # noqa: E731
        dims = (0, 0, None if offsets is None else 0)
        wide = WIDE if one.device.type == "cuda" else FLIGHT // one.network.activations
        piece = max(PIECE, wide // len(rows))
        draws = []
        for j in range(draws_of(models, samples)):
            weights = self.apply(lambda q, key: draw(q, key, j, samples), (0, 0), models, keys)  # noqa: B023
            pieces = [
                self.apply(predict, dims, weights, one.data.inputs(part.clamp_min(0)), offsets)
                for part in index.split(piece, 1)
            ]
            draws.append(torch.cat(pieces, 1).flatten(0, 1)[own])
        return torch.stack(draws)
