"""The round loop: draw clients, let the cohort work, merge, remember, evaluate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.base import State
from ..errors import InputError, TrainingError
from ..runs.folder import Checkpoint, Folder
from . import compiling
from .client import Lanes, Part, chunked, each_run, joined
from .client_states import Kept
from .memory import fitting
from .minibatches import sample
from .processes import ALONE, PeerLost, World, fingerprint, packed, unpacked
from .setting import Cohort
from .threads import over

Line = dict[str, Any] | TrainingError  # of a round in the history, or why there is none


class Work(NamedTuple):
    """What some clients of a run have done in a round."""

    mean: State  # their part of the weighted mean of all updates
    kept: State  # a lane each, as the losses
    losses: Tensor  # not finite where something else is not


class Server(NamedTuple):
    """The server's side after a round."""

    round: int
    shared: State
    average: State  # θ averaged over rounds
    velocity: State  # its last step, where it has momentum


class Told(NamedTuple):
    """Numbers on their way from the device."""

    values: Tensor
    there: torch.cuda.Event | None

    @staticmethod
    def of(values: Tensor) -> Told:
        """Asks for numbers, and does not wait for them."""
        if not values.is_cuda:
            return Told(values, None)
        host = values.to("cpu", non_blocking=True)
        return Told(host, torch.cuda.current_stream(values.device).record_event())

    def numbers(self) -> list[float]:
        """Those numbers, once they are here: the only wait for the device in a round."""
        if self.there is not None:
            self.there.synchronize()
        return self.values.tolist()


class Launched(NamedTuple):
    """A round of several runs that the device may still be at work on. Their servers have its result already."""

    sims: Sequence[Simulation]
    drawn: list[list[int]]
    mine: list[list[int]]  # of those, the ones that this process works for
    work: list[list[Work]]  # theirs
    sent: list[int]  # bytes from a client
    before: list[Server]
    losses: Told  # of all clients; not finite where their work is not
    start: float

    def take_back(self, ended: Sequence[Simulation]) -> None:
        """As if it had not been launched, for all runs but those that have ended."""
        for sim, before in zip(self.sims, self.before, strict=True):
            if sim not in ended:
                sim.server = before


class Simulation:
    """The server's side of a run, and its clients' kept states.

    Where it is spread over processes, each has the server's side and works for its share of the clients; what clients
    keep lies with the process that owns them, in a file of `folder` where it is too much for memory. The checkpoint to
    go on from is needed in process 0 alone.
    """

    def __init__(
        self,
        cohort: Cohort,
        *,
        participation: float,
        epochs: int,
        state: Checkpoint | None = None,
        world: World = ALONE,
        folder: Path | None = None,
    ):
        self.cohort, self.participation, self.epochs, self.world = cohort, participation, epochs, world
        self.round, self.seconds = 0, 0.0
        self.compiled = 1 if cohort.programs.fuse else None  # the first round whose steps are compiled
        self.shared = cohort.algorithm.init(cohort.network.initial, cohort.network.layout)
        self.average, self.velocity = dict(self.shared), State()
        self.kept = Kept(cohort, folder=folder, world=world)
        world.lead(lambda: self._check(state))
        state = state if world.size == 1 else self._spread(state)
        if state is not None:
            put = lambda s: {k: v.to(cohort.device, cohort.dtype) for k, v in s.items()}  # noqa: E731
            self.round, self.seconds = state.round, state.seconds
            self.shared, self.average, self.velocity = map(put, (state.shared, state.average, state.velocity))
            self.kept.restore(state.kept)
            cohort.chunk = state.chunk or cohort.chunk
            self._as_decided(state)
        self.changed: dict[int, State] = {}  # what the clients of the last round keep now, of those that are ours
        self.shares: list[list[int]] = [[] for _ in range(world.size)]  # the clients of the last round, by process

    def _as_decided(self, state: Checkpoint) -> None:
        """Compiles as the run did before it was interrupted; what was decided is not decided again."""
        programs = self.cohort.programs
        if programs.auto and state.compiled:
            self.compiled = state.compiled
            programs.fuse_from_now(compiling.steps_of_rounds(self))
        programs.auto = programs.auto and state.round < compiling.LOOK

    def _check(self, state: Checkpoint | None) -> None:
        """Refuses a checkpoint that is not this algorithm's and this network's."""
        if state is None:
            return
        check_like(self.shared, state.shared)
        check_like(self.shared, state.average)
        if state.round:
            check_like(self.cohort.algorithm.apply_server_momentum(self.shared, self.shared, {})[1], state.velocity)
        for own in state.kept.values():
            check_like(self._kept_like, own)

    def _spread(self, state: Checkpoint | None) -> Checkpoint | None:
        """A checkpoint that process 0 has, in all of them; of what clients keep each remembers that of its own."""
        world, like = self.world, self.shared
        facts: Any = world.decide(
            lambda: (
                state
                and (state.round, state.seconds, list(state.kept), state.chunk, list(state.velocity), state.compiled)
            )
        )
        if facts is None:
            return None
        whole = lambda s: packed({k: s[k].to(v.dtype) if k in s else v for k, v in like.items()}, like)  # noqa: E731
        states = (state.shared, state.average, state.velocity) if state else ()
        blank = torch.zeros_like(packed(like, like))
        shared, average, velocity = (
            unpacked(world.share(whole(states[i]) if state else blank), like) for i in range(3)
        )
        velocity = {k: v for k, v in velocity.items() if k in facts[4]}
        shares = [[c for c in facts[2] if c in own] for own in map(set, self.owned)]
        blank = torch.zeros_like(packed(self._kept_like, self._kept_like)) if facts[2] else blank
        for place in range(max(map(len, shares))):
            rows = [own[place] if place < len(own) else None for own in shares]
            full = [blank if c is None else packed(state.kept[c], self._kept_like) for c in rows] if state else []
            row, mine = world.scatter(full, blank), rows[world.rank]
            if mine is not None:
                self.kept.restore({mine: unpacked(row, self._kept_like)})
        return Checkpoint(facts[0], shared, average, {}, facts[1], facts[3], velocity, facts[5])

    @cached_property
    def owned(self) -> list[list[int]]:
        """All clients by the process that owns them, for as long as there are so many processes."""
        fed = self.cohort.fed
        return self.world.deal(range(fed.clients), fed.train.counts)

    @cached_property
    def _kept_like(self) -> State:
        """What one client keeps; only its shapes matter."""
        return {name: v[0].cpu() for name, v in self.cohort.keep(self.shared, [0]).items()}

    @cached_property
    def _nothing(self) -> State:
        """The update of no client at all."""
        kept = self.cohort.keep(self.shared, [0])
        update, _, _ = self.cohort.train(self.shared, kept, [0], 1, 0)
        return {name: torch.zeros_like(v[0]) for name, v in update.items()}

    @property
    def theta(self) -> State:
        """What is scored, personalised and saved: θ averaged over rounds, or the last θ."""
        return self.average if self.cohort.algorithm.average else self.shared

    def kept_for(self, clients: Sequence[int]) -> State:
        """What `evaluate` needs: the kept states of clients, a lane each."""
        return self.kept.get(self.theta, clients)

    def step(self) -> dict[str, Any]:
        """One round; returns its line for the history."""
        (line,) = advance([self])
        if isinstance(line, TrainingError):
            raise line
        return line

    def draw(self) -> list[int]:
        """The clients of the next round."""
        return sample(self.cohort.fed.clients, self.participation, self.cohort.seed, self.round + 1)

    def deal(self, clients: list[int]) -> list[int]:
        """Of a round's clients, those that this process works for: its own, or if nothing is kept a fair share."""
        if self.kept.needed and self.world.size > 1:
            drawn = set(clients)
            self.shares = [[c for c in own if c in drawn] for own in self.owned]
        else:
            self.shares = self.world.deal(clients, self.cohort.fed.train.counts)
        return self.shares[self.world.rank]

    def part(self, clients: list[int]) -> Part:
        """Some clients in the next round."""
        round = self.round + 1
        return Part(self.cohort, self.shared, clients, round, self.cohort.algorithm.lr_factor(round))

    def weights(self, clients: list[int]) -> Tensor:
        """Of a round's clients, the shares in the mean of those that this process works for."""
        weights, own = self.cohort.weights(clients), self.shares[self.world.rank]
        if len(own) == len(clients):
            return weights
        place = {c: i for i, c in enumerate(clients)}
        return weights[[place[c] for c in own]]

    def total(self, work: list[Work]) -> State:
        """The part of the weighted mean of a round's updates that is this process's."""
        if not work:
            return self._nothing
        return {name: sum((w.mean[name] for w in work[1:]), first) for name, first in work[0].mean.items()}

    def reduce(self, clients: list[int], total: State, losses: Tensor) -> tuple[State, list[float]]:
        """The weighted mean of all updates and the losses of all clients, in one sum over the processes.

        With them goes a fingerprint of the server's state, so that processes that have drifted apart are found out.
        """
        world, cohort = self.world, self.cohort
        tail = torch.zeros(len(clients) + 4 * world.size, dtype=cohort.dtype, device=cohort.device)
        drawn = {c: i for i, c in enumerate(clients)}
        tail[[drawn[c] for c in self.shares[world.rank]]] = losses
        mark = len(clients) + 4 * world.rank
        tail[mark : mark + 4] = fingerprint(self.shared, cohort.dtype, cohort.device)
        flat = world.sum(torch.cat([*(v.reshape(-1).to(cohort.dtype) for v in total.values()), tail]))
        parts = flat.split([*(v.numel() for v in total.values()), len(tail)])
        told = parts[-1].double().tolist()
        marks = [told[i : i + 4] for i in range(len(clients), len(told), 4)]
        if apart := [rank for rank, own in enumerate(marks) if own != marks[0]]:
            raise TrainingError(
                f"In round {self.round + 1} process(es) {', '.join(map(str, apart))} no longer have the server's state "
                "of process 0. All need the same kind of device and the same versions; the last round saved is sound."
            )
        means = {name: part.view(v.shape).to(v.dtype) for (name, v), part in zip(total.items(), parts, strict=False)}
        return means, told[: len(clients)]

    @property
    def server(self) -> Server:
        """The server's side."""
        return Server(self.round, self.shared, self.average, self.velocity)

    @server.setter
    def server(self, now: Server) -> None:
        self.round, self.shared, self.average, self.velocity = now

    def merge(self, clients: list[int], total: State) -> None:
        """Takes the mean of a round's updates in."""
        cohort, past = self.cohort, self.round
        merged = cohort.algorithm.merge(self.shared, total, len(clients), cohort.fed.clients)
        shared, velocity = cohort.algorithm.apply_server_momentum(self.shared, merged, self.velocity)
        decay = min(cohort.algorithm.average, past / (past + 1))
        average = {k: decay * self.average[k] + (1 - decay) * v for k, v in shared.items()} if decay else shared
        self.server = Server(past + 1, shared, average, velocity)

    def land(
        self,
        clients: list[int],
        mine: list[int],
        work: list[Work],
        before: Server,
        losses: list[float],
        sent: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Ends a round that the server has; returns its line for the history. One that diverged has not been.

        `mine` are those of its clients that this process works for, and `work` is theirs.
        """
        round = before.round + 1
        if not all(map(math.isfinite, losses)):
            self.server = before
            self._diverged(round, [c for c, loss in zip(clients, losses, strict=True) if not math.isfinite(loss)])
        self.changed = {}
        for own, part in zip(work, _split(mine, [len(w.losses) for w in work]), strict=True):
            self.changed |= self.kept.put(part, own.kept)
        self.seconds += seconds
        loss = math.fsum(losses) / len(losses)
        down = sum(v.numel() * v.element_size() for v in self.shared.values())
        line = {"round": round, "loss": loss, "clients": clients, "seconds": self.seconds}
        return line | {"bytes_down": down, "bytes_up": sent}

    def collected(self) -> dict[int, State]:
        """What the clients of the last round keep now: in process 0 that of all, elsewhere of those that are ours."""
        if self.world.size == 1 or not self.kept.needed:
            return self.changed
        found, like = dict(self.changed), self._kept_like
        blank = torch.zeros_like(packed(like, like))
        for place in range(max(map(len, self.shares))):
            clients = [own[place] if place < len(own) else None for own in self.shares]
            mine = clients[self.world.rank]
            rows = self.world.gather(blank if mine is None else packed(self.changed[mine], like))
            found |= {c: unpacked(row, like) for c, row in zip(clients, rows, strict=False) if c is not None}
        return found

    def _diverged(self, round: int, clients: list[int]) -> None:
        names = ", ".join(self.cohort.fed.names[c] for c in clients[:8]) + (" and more" if len(clients) > 8 else "")
        raise TrainingError(
            f"Training diverged in round {round}: the loss or the weights of client(s) {names} are no longer finite. "
            f"The rounds before are saved, where the run has a folder. {self.cohort.algorithm.remedy}"
        )

    def run(
        self,
        rounds: int,
        *,
        folder: Folder | None = None,
        score: Callable[[Simulation], dict[str, Any]] | None = None,
        eval_every: int = 0,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Rounds up to `rounds`, each logged, scored where due, and saved; `on_round` is called in process 0."""
        history: list[dict[str, Any]] = list(folder.history) if folder else []
        due = lambda round: bool(score and eval_every and round % eval_every == 0)  # noqa: E731
        seen = folder is not None or on_round is not None
        with closing(march([self], rounds, lambda round: seen or due(round))) as lines:
            for round, told in lines:
                line = told[0]
                if isinstance(line, TrainingError):
                    raise line
                if score and due(round):
                    start = time.perf_counter()
                    try:
                        line["eval"] = score(self)
                    except PeerLost:
                        raise
                    except TrainingError as error:  # the round itself is sound, so it is saved and training goes on
                        line["eval_error"] = str(error)
                    self.seconds += time.perf_counter() - start
                    line["seconds"] = self.seconds
                history.append(line)
                if folder:
                    self._save(folder, line)
                if on_round and self.world.rank == 0:
                    on_round(line)
        return history

    def _save(self, folder: Folder, line: dict[str, Any]) -> None:
        changed = self.collected()
        self.cohort.chunk = self.world.least(self.cohort.chunk)
        now = self.server
        state = Checkpoint(now.round, now.shared, now.average, {}, self.seconds, self.cohort.chunk, now.velocity)
        state = state._replace(compiled=self.compiled)

        def write() -> None:
            folder.log(line)
            folder.save(state, changed)

        self.world.lead(write)


@torch.no_grad()
def launch(sims: Sequence[Simulation]) -> Launched:
    """One round of several runs, their clients side by side, without a wait for the device."""
    start = time.perf_counter()
    drawn = [sim.draw() for sim in sims]
    own = [sim.deal(clients) for sim, clients in zip(sims, drawn, strict=True)]
    weights = [sim.weights(clients) for sim, clients in zip(sims, drawn, strict=True)]
    work = fitting([sim.cohort for sim in sims], sum(map(len, own)), partial(_worked, sims, own, weights))
    totals = [sim.total(parts) for sim, parts in zip(sims, work, strict=True)]
    heard = [w.losses for parts in work for w in parts]
    losses = torch.cat(heard) if heard else torch.zeros(0, dtype=sims[0].cohort.dtype, device=sims[0].cohort.device)
    if sims[0].world.size == 1:
        told = Told.of(losses.double())
    else:
        (sim,) = sims  # several processes have one run at a time
        totals[0], alike = sim.reduce(drawn[0], totals[0], losses)
        told = Told(torch.tensor(alike, dtype=torch.float64), None)
    before = [sim.server for sim in sims]
    for sim, clients, mean in zip(sims, drawn, totals, strict=True):
        sim.merge(clients, mean)
    sent = [sum(v.numel() * v.element_size() for v in mean.values()) for mean in totals]
    return Launched(sims, drawn, own, work, sent, before, told, start)


def land(round: Launched, since: float = 0.0, ended: Sequence[Simulation] = ()) -> list[Line]:
    """Waits for a round: of every run, but for those that have ended, its line for the history or why it diverged.

    Its time is counted from the end of the round before, if that came after its own start.
    """
    known = _split(round.losses.numbers(), [*map(len, round.drawn)])
    share = (time.perf_counter() - max(round.start, since)) / len(round.sims)
    lines: list[Line] = []
    columns = (round.drawn, round.mine, round.work, round.before, known, round.sent)
    for sim, *own in zip(round.sims, *columns, strict=True):
        if sim in ended:
            continue
        try:
            lines.append(sim.land(*own, share))
        except TrainingError as error:
            lines.append(error)
    return lines


def advance(sims: Sequence[Simulation]) -> list[Line]:
    """One round of several runs, to its end.

    Runs that go together have the same network, data, batch size, epochs and discrete hyperparameters. They may differ
    in seed, partition and continuous hyperparameters.
    """
    return land(launch(sims))


def march(
    sims: Sequence[Simulation], rounds: int, looked_at: Callable[[int], bool]
) -> Generator[tuple[int, dict[int, Line]], None, None]:
    """Rounds of several runs up to `rounds`; after each, its number and by the number of the run what `land` tells.

    A GPU is given the next round before the host waits for this one, unless clients keep something, which `land`
    writes down. Then the servers are ahead, but not after rounds that are `looked_at`. A run that diverged has ended.
    """
    going, since = dict(enumerate(sims)), 0.0
    times: list[float] = []  # of the rounds up to the one after which it is decided whether to compile
    ended: list[Simulation] = []
    ahead: Launched | None = None
    for round in range(sims[0].round + 1, rounds + 1):
        now = ahead or launch([*going.values()])
        under_way = [now]
        try:
            look = round == compiling.LOOK and sims[0].cohort.programs.auto
            early = round < rounds and _early(sims) and not looked_at(round) and not look
            ahead = launch([*going.values()]) if early else None
            under_way += [ahead] if ahead else []
            told = dict(zip(going, land(now, since, ended), strict=True))
            under_way.remove(now)
            times.append(time.perf_counter() - max(now.start, since))
            since = time.perf_counter()
            ended = [going.pop(i) for i, line in told.items() if isinstance(line, TrainingError)]
            if look and going and (note := compiling.consider([*going.values()], times, rounds)):
                told |= {i: told[i] | {"note": note} for i in going}  # type: ignore[operator]
            yield round, told
            under_way.clear()
        finally:  # whoever leaves early finds the servers as of the last round that has landed
            for left in reversed(under_way):
                left.take_back(ended)
        if not going:
            return


def _early(sims: Sequence[Simulation]) -> bool:
    """Whether a round may begin before the host has heard of the last one."""
    one = sims[0]
    return one.cohort.device.type == "cuda" and one.world.size == 1 and not one.kept.needed


def _worked(
    sims: Sequence[Simulation], clients: list[list[int]], weights: list[Tensor], chunk: int
) -> list[list[Work]]:
    """The work of these clients of every run, so many at a time; nothing is remembered yet."""
    work: list[list[Work]] = [[] for _ in sims]
    left = list(weights)
    workers = sims[0].cohort.workers
    parts: list[tuple[dict[int, list[int]], list[Tensor]]] = []
    for part in chunked(clients, chunk, workers):
        shares = []
        for i, own in part.items():
            share, left[i] = left[i].split([len(own), len(left[i]) - len(own)])
            shares.append(share)
        parts.append((part, shares))

    def trained(mine: tuple[dict[int, list[int]], list[Tensor]]) -> tuple[list[State], State, Tensor]:
        part, shares = mine
        lanes = Lanes([sims[i].part(own) for i, own in part.items()])
        kept = joined([sims[i].kept.get(sims[i].shared, own) for i, own in part.items()])
        return lanes.work(kept, shares, sims[0].epochs)

    for (part, _), (means, kept, losses) in zip(parts, over(trained, parts, workers), strict=True):
        sizes = [len(own) for own in part.values()]
        for i, mean, held, told in zip(part, means, each_run(kept, sizes), losses.split(sizes), strict=True):
            work[i].append(Work(mean, held, told))
    return work


def _split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def last_ten(history: list[dict[str, Any]], rounds: int, measure: str, final: float | None) -> float | None:
    """The mean of a measure over the evaluations of the last ten rounds, the final one among them."""
    late = (line.get("eval", {}) for line in history if rounds - 10 < line["round"] < rounds)
    values = [scores[measure] for scores in late if scores.get(measure) is not None]
    values += [final] if final is not None else []
    return math.fsum(values) / len(values) if values else None


def check_like(expected: State, got: State) -> None:
    """Refuses a state from a file that has not the names, the shapes and the kind of numbers that are expected."""
    shapes = [{name: tuple(v.shape) for name, v in state.items()} for state in (expected, got)]
    if any(v.is_floating_point() != expected[name].is_floating_point() for name, v in got.items() if name in expected):
        raise InputError("The checkpoint is damaged: its weights are whole numbers or no numbers at all.")
    if shapes[0] != shapes[1]:
        raise InputError(
            f"The checkpoint does not belong to this run: it holds {shapes[1] or 'nothing'}, and the algorithm with "
            f"this model has {shapes[0] or 'nothing'}. Resume it in its own folder."
        )
