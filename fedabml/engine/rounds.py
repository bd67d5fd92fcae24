"""The round loop of the simulator: draw clients, let them work, merge, remember, report.

One round of one run, or of several side by side, is `start_round` and `finish_round`; `run_rounds` repeats them, and
`Simulation.run` adds scores and checkpoints. The mathematics is elsewhere: `client` has a client's round, `server` the
server's step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accel import owns_process
from ..algorithms.base import State
from ..errors import TrainingError
from . import compiling
from .checkpoint import Checkpoint, broadcast, check_like
from .client import initial_kept, weighted_round
from .client_states import Kept
from .exchange import ChunkResult, combine, gather_kept, may_overlap, positions
from .lanes import ClientGroup, Lanes, join_states, split_state
from .processes import ALONE, PeerLost, World
from .server import ServerState, client_weights, draw_clients, initial_state, server_step, state_bytes, theta
from .setting import Cohort
from .workers import chunks, fit_in_memory, map_in_threads

log = logging.getLogger("fedabml")
Line = dict[str, Any]  # of a round in the history
Save = Callable[[Line, Checkpoint, dict[int, State]], None]  # a round's line, the state after it, what its clients keep


class RunInFlight(NamedTuple):
    """One run's part of a round in flight."""

    sim: Simulation
    before: ServerState
    drawn: list[int]  # the round's clients
    results: list[ChunkResult]  # of those that this process works for
    bytes_up: int  # that a client sends


class RoundInFlight(NamedTuple):
    """A round of several runs on which the device may still be at work. Their servers have its result already."""

    runs: list[RunInFlight]
    losses: Tensor  # of all clients, on the host once `copied` has happened
    copied: torch.cuda.Event | None
    start: float

    def wait(self) -> list[list[float]]:
        """Return the losses of every run's clients once they are here: the only wait for the device in a round."""
        if self.copied is not None:
            self.copied.synchronize()
        losses = iter(self.losses.tolist())
        return [list(islice(losses, len(run.drawn))) for run in self.runs]

    def take_back(self, ended: Sequence[Simulation]) -> None:
        """Set all servers, but those of runs that have ended, to where they were before the round."""
        for run in self.runs:
            if run.sim not in ended:
                run.sim.return_to(run.before)


class Simulation:
    """A run: its server's state, and what its clients keep between rounds.

    A run may be spread over the processes of a `world`. Then each has the server's state and works for its share of the
    clients; what clients keep lies with the process that owns them, in a file of `folder` where it is too much for
    memory. The checkpoint to go on from, `state`, is needed in process 0 alone.
    """

    def __init__(
        self, cohort: Cohort, *, state: Checkpoint | None = None, world: World = ALONE, folder: Path | None = None
    ):
        self.cohort, self.setting, self.world = cohort, cohort.setting, world
        self.seconds = 0.0
        self.compiled = 1 if cohort.executor.compile else None  # the first round whose steps are compiled
        self.server = initial_state(cohort.algorithm, cohort.network)
        self.kept = Kept(cohort, folder, world)
        world.on_rank_0(lambda: self._check(state) if state is not None else None)
        if world.size > 1:
            state = broadcast(state, world, self.shared, self._kept_like, self.owned, self.kept.restore)
        if state is not None:
            self._go_on_from(state)
        self.changed: dict[int, State] = {}  # what this process's clients of the last round keep now
        self.shares: list[list[int]] = [[] for _ in range(world.size)]  # the clients of the last round by process

    def _check(self, state: Checkpoint) -> None:
        """Refuse a checkpoint of another algorithm or network."""
        check_like(self.shared, state.shared)
        check_like(self.shared, state.average)
        if state.round:
            velocity = self.cohort.algorithm.apply_server_momentum(self.shared, self.shared, {})[1]
            check_like(velocity, state.velocity)
        for kept in state.kept.values():
            check_like(self._kept_like, kept)

    def _go_on_from(self, state: Checkpoint) -> None:
        cohort, executor = self.cohort, self.cohort.executor
        states = (  # in the algorithm's order: files sort names, and programs take tensors by position
            {k: part[k].to(cohort.device, cohort.dtype) for k in (*self.shared, *part) if k in part}
            for part in (state.shared, state.average, state.velocity)
        )
        self.server, self.seconds = ServerState(state.round, *states), state.seconds
        self.kept.restore(state.kept)
        cohort.limit.set(state.chunk or cohort.chunk)
        if executor.undecided and state.compiled:  # what was decided before is not decided again
            self.compile_from(state.compiled)
        elif executor.undecided and state.round >= executor.policy.decide_round:
            executor.decide(None)

    def compile_from(self, round: int) -> None:
        """Compile the steps of rounds from this one on."""
        self.compiled = round
        self.cohort.executor.decide(compiling.steps_of_rounds(self.cohort.algorithm, self.setting.epochs))

    def return_to(self, server: ServerState) -> None:
        """Set the server's state, to that before a round that does not count."""
        self.server = server

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self.server.round

    @property
    def shared(self) -> State:
        """The server's shared state, which clients are sent."""
        return self.server.shared

    @property
    def theta(self) -> State:
        """What is scored, personalised and saved: the average over rounds, or the last shared state."""
        return theta(self.cohort.algorithm, self.server)

    @cached_property
    def owned(self) -> list[list[int]]:
        """All clients by the process that owns them."""
        fed = self.cohort.fed
        return self.world.assign_clients(range(fed.clients), fed.train.counts)

    @cached_property
    def _kept_like(self) -> State:
        """A kept state with the names and shapes of every client's."""
        return {name: v[0].cpu() for name, v in initial_kept(Lanes.after_round(self.cohort, self.shared, [0])).items()}

    def kept_for(self, clients: Sequence[int]) -> State:
        """Return the kept states of clients, one row each, as `evaluate` needs them."""
        return self.kept.get(self.theta, clients)

    def draw(self) -> list[int]:
        """Return the clients of the next round."""
        return draw_clients(self.cohort.fed.clients, self.setting.participation, self.cohort.seed, self.round + 1)

    def own_share(self, clients: list[int]) -> tuple[list[int], Tensor]:
        """Return this process's clients of a round and their weights among all of it.

        They are those that it owns or, where nothing is kept, a fair share.
        """
        cohort, counts = self.cohort, self.cohort.fed.train.counts
        if self.kept.needed and self.world.size > 1:
            drawn = set(clients)
            self.shares = [[c for c in owned if c in drawn] for owned in self.owned]
        else:
            self.shares = self.world.assign_clients(clients, counts)
        own_clients = self.shares[self.world.rank]
        weights = client_weights(cohort.algorithm, counts[clients], cohort.network.initial)
        if len(own_clients) < len(clients):
            weights = weights[positions(own_clients, clients)]
        return own_clients, weights

    def merge(self, sampled: int, update: State) -> None:
        """Take in the weighted mean of the updates of the `sampled` clients of a round."""
        self.server = server_step(self.cohort.algorithm, self.server, update, sampled, self.cohort.fed.clients)

    def finish(self, round: RunInFlight, losses: list[float], seconds: float) -> Line:
        """Remember what the clients of a round keep and return its line for the history.

        A round that diverged is taken back; then a TrainingError is raised.
        """
        number = round.before.round + 1
        diverged = [client for client, loss in zip(round.drawn, losses, strict=True) if not math.isfinite(loss)]
        if diverged:
            self.server = round.before
            names = ", ".join(self.cohort.fed.names[c] for c in diverged[:8]) + " and more" * (len(diverged) > 8)
            raise TrainingError(
                f"Training diverged in round {number}: the loss or the weights of client(s) {names} are no longer "
                "finite. The rounds before are saved, where the run has a folder. " + self.cohort.algorithm.remedy
            )
        self.changed = {}
        for part in round.results:
            self.changed |= self.kept.put(part.clients, part.kept)
        self.seconds += seconds
        line = {"round": number, "loss": math.fsum(losses) / len(losses), "clients": round.drawn}
        return line | {"seconds": self.seconds, "bytes_down": state_bytes(self.shared), "bytes_up": round.bytes_up}

    def step(self) -> Line:
        """Run one round and return its line for the history."""
        (line,) = run_round([self])
        if isinstance(line, TrainingError):
            raise line
        return line

    def run(
        self,
        rounds: int,
        *,
        history: Sequence[Line] = (),
        save: Save | None = None,
        score: Callable[[Simulation], dict[str, Any]] | None = None,
        eval_every: int = 0,
        on_round: Callable[[Line], None] | None = None,
    ) -> list[Line]:
        """Run rounds up to number `rounds` and return the history: the given lines and those of the new rounds.

        Every `eval_every` rounds `score` is called. `save` and `on_round` are called after every round, in process 0.
        """
        lines = list(history)
        watched = save is not None or on_round is not None

        def is_scored(round: int) -> bool:
            return bool(score and eval_every and round % eval_every == 0)

        with closing(run_rounds([self], rounds, lambda round: watched or is_scored(round))) as finished:
            for round, lines_by_run in finished:
                line = lines_by_run[0]
                if isinstance(line, TrainingError):
                    raise line
                if score and is_scored(round):
                    self._score(score, line)
                lines.append(line)
                if save:
                    self.save(save, line)
                if on_round and self.world.rank == 0:
                    on_round(line)
        return lines

    def _score(self, score: Callable[[Simulation], dict[str, Any]], line: Line) -> None:
        """Add scores to a round's line. A failure is noted: the round itself is sound, and training goes on."""
        start = time.perf_counter()
        try:
            line["eval"] = score(self)
        except PeerLost:
            raise
        except TrainingError as error:
            line["eval_error"] = str(error)
        self.seconds += time.perf_counter() - start
        line["seconds"] = self.seconds

    def save(self, write: Save, line: Line) -> None:
        """Have process 0 write a round's line and the state after it."""
        changed = self.changed
        if self.world.size > 1 and self.kept.needed:
            changed = gather_kept(self.world, self.shares, changed, self._kept_like)
        self.cohort.limit.set(self.world.minimum(self.cohort.chunk))
        round, shared, average, velocity = self.server
        state = Checkpoint(round, shared, average, {}, self.seconds, self.cohort.chunk, velocity, self.compiled)
        self.world.on_rank_0(lambda: write(line, state, changed))


@torch.no_grad()
def start_round(sims: Sequence[Simulation]) -> RoundInFlight:
    """Start one round of several runs, their clients side by side, without waiting for the device."""
    start = time.perf_counter()
    drawn = [sim.draw() for sim in sims]
    shares = [sim.own_share(clients) for sim, clients in zip(sims, drawn, strict=True)]
    count = sum(len(clients) for clients, _ in shares)
    results = fit_in_memory([sim.cohort for sim in sims], count, partial(_work, sims, shares))
    combined = [
        combine(sim.world, sim.cohort, sim.server, clients, sim.shares[sim.world.rank], parts)
        for sim, clients, parts in zip(sims, drawn, results, strict=True)
    ]
    losses, copied = torch.cat([losses for _, losses in combined]), None
    if losses.is_cuda:
        device, losses = losses.device, losses.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(device).record_event()
    runs = []
    for sim, clients, parts, (update, _) in zip(sims, drawn, results, combined, strict=True):
        runs.append(RunInFlight(sim, sim.server, clients, parts, state_bytes(update)))
        sim.merge(len(clients), update)
    return RoundInFlight(runs, losses, copied, start)


def _work(sims: Sequence[Simulation], shares: list[tuple[list[int], Tensor]], chunk: int) -> list[list[ChunkResult]]:
    """Let clients of every run work, at most `chunk` at a time; return each run's work, which nothing remembers yet.

    `shares` are every run's clients and their weights.
    """
    workers = sims[0].cohort.workers
    parts = [*chunks([clients for clients, _ in shares], chunk, workers)]
    weights_by_run = [iter(w.split([len(part[i]) for part in parts if i in part])) for i, (_, w) in enumerate(shares)]
    jobs = [(part, [next(weights_by_run[i]) for i in part]) for part in parts]

    def train(job: tuple[dict[int, list[int]], list[Tensor]]) -> tuple[list[State], State, Tensor]:
        part, weights = job
        runs = [(sims[i], clients) for i, clients in part.items()]
        lanes = Lanes([ClientGroup(sim.cohort, sim.shared, c, sim.round + 1, training=True) for sim, c in runs])
        kept = join_states([sim.kept.get(sim.shared, clients) for sim, clients in runs])
        return weighted_round(lanes, kept, weights, sims[0].setting.epochs)

    results_by_run: list[list[ChunkResult]] = [[] for _ in sims]
    for part, (updates, kept, losses) in zip(parts, map_in_threads(train, jobs, workers), strict=True):
        sizes = [len(clients) for clients in part.values()]
        results = map(ChunkResult, part.values(), updates, split_state(kept, sizes), losses.split(sizes))
        for i, result in zip(part, results, strict=True):
            results_by_run[i].append(result)
    return results_by_run


def finish_round(
    round: RoundInFlight, since: float = 0.0, ended: Sequence[Simulation] = ()
) -> list[Line | TrainingError]:
    """Wait for a round; return each run's line for the history, or why it diverged, but for runs that have ended.

    The round's time is counted from `since`, the end of the round before, if that came after its own start.
    """
    losses = round.wait()
    seconds = (time.perf_counter() - max(round.start, since)) / len(round.runs)
    lines: list[Line | TrainingError] = []
    for run, values in zip(round.runs, losses, strict=True):
        if run.sim in ended:
            continue
        try:
            lines.append(run.sim.finish(run, values, seconds))
        except TrainingError as error:
            lines.append(error)
    return lines


def run_round(sims: Sequence[Simulation]) -> list[Line | TrainingError]:
    """Run one round of several runs; return each run's line for the history, or why it diverged.

    Runs side by side have the same network, data, batch size, epochs and discrete hyperparameters. They may differ in
    seed, partition and continuous hyperparameters.
    """
    return finish_round(start_round(sims))


def run_rounds(
    sims: Sequence[Simulation], rounds: int, watched: Callable[[int], bool]
) -> Generator[tuple[int, dict[int, Line | TrainingError]], None, None]:
    """Run rounds of several runs up to number `rounds`; yield each one's number and, by run, what `finish_round` gives.

    A GPU is given the next round before the host waits for this one, unless clients keep something, which
    `finish_round` remembers. Then the servers are ahead, but never after rounds that are `watched`. A run that diverged
    has ended.
    """
    first_sim, going, since = sims[0], dict(enumerate(sims)), 0.0
    times: list[float] = []  # of the rounds so far, by which compiling is decided
    ended: list[Simulation] = []
    ahead: RoundInFlight | None = None
    for round in range(first_sim.round + 1, rounds + 1):
        now = ahead or start_round([*going.values()])
        in_flight = [now]
        try:
            decides = round == first_sim.cohort.place.policy.decide_round and first_sim.cohort.executor.undecided
            overlaps = round < rounds and may_overlap(first_sim.world, first_sim.kept)
            starts_ahead = overlaps and not watched(round) and not decides
            ahead = start_round([*going.values()]) if starts_ahead else None
            in_flight += [ahead] if ahead else []
            lines = dict(zip(going, finish_round(now, since, ended), strict=True))
            in_flight.remove(now)
            times.append(time.perf_counter() - max(now.start, since))
            since = time.perf_counter()
            ended = [going.pop(i) for i, line in lines.items() if isinstance(line, TrainingError)]
            if decides and going and (note := consider_compiling([*going.values()], times, rounds)):
                for i in going:
                    lines[i]["note"] = note  # type: ignore[index]
            yield round, lines
            in_flight.clear()
        finally:  # a caller who leaves early finds the servers after the last round that is finished
            for unfinished in reversed(in_flight):
                unfinished.take_back(ended)
        if not going:
            return


def consider_compiling(sims: Sequence[Simulation], times: Sequence[float], rounds: int) -> str | None:
    """Decide whether the next rounds of runs side by side are compiled; return a note, which is logged, if they are.

    `times` are the seconds of the rounds so far. No round may be in flight, because captured graphs are dropped.
    """
    first_sim = sims[0]
    note = compiling.decide([sim.cohort for sim in sims], first_sim.world, times, first_sim.round, rounds)
    if note:
        for sim in sims:
            sim.compile_from(first_sim.round + 1)
        log.log(logging.INFO if owns_process() else logging.WARNING, "%s", note)  # the command line prints it
    return note
