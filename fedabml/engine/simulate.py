"""The round loop: draw clients, let the cohort work, merge, remember, evaluate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, State
from ..errors import InputError, TrainingError
from .backend import free_bytes
from .checkpoint import Checkpoint, Folder
from .cohort import Cohort
from .lanes import Lanes, Part, chunked, joined
from .plan import sample


class Kept:
    """What clients keep between rounds: made on demand, never shared between two clients.

    It stays on the device where that of all clients is a small part of its memory, and is on the host otherwise.
    """

    def __init__(self, cohort: Cohort, states: dict[int, State]):
        self.cohort, self.states = cohort, states

    def get(self, shared: State, clients: Sequence[int]) -> State:
        """The kept state of some clients, a lane each, on the device."""
        if type(self.cohort.algorithm).keep is Algorithm.keep:
            return {}
        missing = [c for c in clients if c not in self.states]
        fresh = self.cohort.keep(shared, missing) if missing else {}
        if not self.states and missing == list(clients):
            return fresh
        lane = {c: i for i, c in enumerate(missing)}
        rows = [self.states[c] if c in self.states else {k: v[lane[c]] for k, v in fresh.items()} for c in clients]
        device = self.cohort.device
        return {name: torch.stack([row[name].to(device) for row in rows]) for name in rows[0]}

    def put(self, clients: Sequence[int], kept: State) -> dict[int, State]:
        """Remembers what clients kept, a lane each; returns it by client."""
        size = sum(v[0].numel() * v.element_size() for v in kept.values()) * self.cohort.fed.clients
        fits = self.cohort.device.type == "cuda" and size <= free_bytes(self.cohort.device) // 32
        here = kept if fits else {name: v.cpu() for name, v in kept.items()}
        own = {c: {name: v[i].clone() for name, v in here.items()} for i, c in enumerate(clients) if here}
        self.states |= own
        return own


class Work(NamedTuple):
    """What some clients of a run have done in a round, a lane each."""

    update: State
    kept: State
    losses: Tensor  # not finite where something else is not


class Simulation:
    """The server's side of a run, and its clients' kept states."""

    def __init__(self, cohort: Cohort, *, participation: float, epochs: int, state: Checkpoint | None = None):
        self.cohort, self.participation, self.epochs = cohort, participation, epochs
        self.round, self.seconds = 0, 0.0
        self.shared = cohort.algorithm.init(cohort.network.initial, cohort.network.layout)
        self.average = dict(self.shared)
        self.kept = Kept(cohort, {})
        if state is not None:
            self._restore(state)
        self.changed: dict[int, State] = {}

    def _restore(self, state: Checkpoint) -> None:
        """Goes on from a checkpoint, once it is seen to be this algorithm's and this network's."""
        cohort = self.cohort
        _check_like(self.shared, state.shared)
        _check_like(self.shared, state.average)
        if state.kept:
            like = {name: v[0] for name, v in cohort.keep(self.shared, [0]).items()}
            for own in state.kept.values():
                _check_like(like, own)
        put = lambda s: {k: v.to(cohort.device, cohort.dtype) for k, v in s.items()}  # noqa: E731
        self.round, self.seconds = state.round, state.seconds
        self.shared, self.average = put(state.shared), put(state.average)
        self.kept = Kept(cohort, state.kept)

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

    def merge(self, clients: list[int], work: list[Work], losses: list[float], seconds: float) -> dict[str, Any]:
        """Ends a round with what its clients, in their order, have sent; returns its line for the history.

        The losses of clients whose work is not finite are not, either.
        """
        cohort, round = self.cohort, self.round + 1
        if not all(map(math.isfinite, losses)):
            self._diverged(round, [c for c, loss in zip(clients, losses, strict=True) if not math.isfinite(loss)])
        weights = cohort.weights(clients).split([len(w.losses) for w in work])
        means = [
            {name: torch.tensordot(share, value, 1) for name, value in w.update.items()}
            for share, w in zip(weights, work, strict=True)
        ]
        total = {name: sum((m[name] for m in means[1:]), means[0][name]) for name in means[0]}
        self.shared = cohort.algorithm.merge(self.shared, total, len(clients), cohort.fed.clients)
        decay = min(cohort.algorithm.average, (round - 1) / round)
        self.average = {k: decay * self.average[k] + (1 - decay) * v for k, v in self.shared.items()}
        self.changed = {}
        for own, part in zip(work, _split(clients, [len(w.losses) for w in work]), strict=True):
            self.changed |= self.kept.put(part, own.kept)
        self.round = round
        self.seconds += seconds
        loss = math.fsum(losses) / len(losses)
        up = sum(v[0].numel() * v.element_size() for v in work[-1].update.values())
        down = sum(v.numel() * v.element_size() for v in self.shared.values())
        line = {"round": round, "loss": loss, "clients": clients, "seconds": self.seconds}
        return line | {"bytes_down": down, "bytes_up": up}

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
        on_round: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> list[dict[str, Any]]:
        """Rounds up to `rounds`, each logged, scored where due, and saved."""
        history: list[dict[str, Any]] = list(folder.history) if folder else []
        while self.round < rounds:
            line = self.step()
            if score and eval_every and self.round % eval_every == 0:
                start = time.perf_counter()
                try:
                    line["eval"] = score(self)
                except TrainingError as error:  # the round itself is sound, so it is saved and training goes on
                    line["eval_error"] = str(error)
                self.seconds += time.perf_counter() - start
                line["seconds"] = self.seconds
            history.append(line)
            if folder:
                folder.log(line)
                state = Checkpoint(self.round, self.shared, self.average, {}, self.seconds)
                folder.save(state, self.changed)
            on_round(line)
        return history


@torch.no_grad()
def advance(sims: Sequence[Simulation]) -> list[dict[str, Any] | TrainingError]:
    """One round of several runs, their clients side by side: of each its line for the history, or why it diverged.

    Runs that go together have the same network, data, batch size, epochs and discrete hyperparameters. They may differ
    in seed, partition and continuous hyperparameters.
    """
    start = time.perf_counter()
    drawn = [sim.draw() for sim in sims]
    work: list[list[Work]] = [[] for _ in sims]
    for part in chunked(drawn, sims[0].cohort.chunk):
        lanes = Lanes([Part(sims[i].cohort, sims[i].shared, own, sims[i].round + 1) for i, own in part.items()])
        kept = joined([sims[i].kept.get(sims[i].shared, own) for i, own in part.items()])
        update, kept, losses = lanes.train(kept, sims[0].epochs)
        losses = _flagged(losses, [*update.values(), *kept.values()])
        sizes = [len(own) for own in part.values()]
        pieces = (_each(update, sizes), _each(kept, sizes), losses.split(sizes))
        for i, own_work in zip(part, zip(*pieces, strict=True), strict=True):
            work[i].append(Work(*own_work))
    told = torch.cat([w.losses for parts in work for w in parts]).double().tolist()  # the only wait for the device
    share = (time.perf_counter() - start) / len(sims)
    lines: list[dict[str, Any] | TrainingError] = []
    for sim, clients, parts, known in zip(sims, drawn, work, _split(told, [*map(len, drawn)]), strict=True):
        try:
            lines.append(sim.merge(clients, parts, known, share))
        except TrainingError as error:
            lines.append(error)
    return lines


def _each(state: State, sizes: list[int]) -> list[State]:
    """A state of many lanes, cut into those of each run."""
    parts = {name: v.split(sizes) for name, v in state.items()}
    return [{name: v[i] for name, v in parts.items()} for i in range(len(sizes))]


def _split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def last_ten(history: list[dict[str, Any]], rounds: int, measure: str, final: float | None) -> float | None:
    """The mean of a measure over the evaluations of the last ten rounds, the final one among them."""
    values = [line["eval"][measure] for line in history if "eval" in line and rounds - 10 < line["round"] < rounds]
    values += [final] if final is not None else []
    return math.fsum(values) / len(values) if values else None


def _check_like(expected: State, got: State) -> None:
    shapes = [{name: tuple(v.shape) for name, v in state.items()} for state in (expected, got)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"The checkpoint does not belong to this run: it holds {shapes[1] or 'nothing'}, and the algorithm with "
            f"this model has {shapes[0] or 'nothing'}. Resume it in its own folder."
        )


def _flagged(losses: Tensor, values: list[Tensor]) -> Tensor:
    """The losses, NaN where any of the values is not finite."""
    for value in values:
        losses = torch.where(torch.isfinite(value.reshape(len(losses), -1)).all(-1), losses, torch.nan)
    return losses
