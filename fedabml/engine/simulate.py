"""The round loop: draw clients, let the cohort work, merge, remember, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..algorithms.base import State
from ..errors import InputError, TrainingError
from .checkpoint import Checkpoint, Folder
from .cohort import Cohort
from .plan import sample


class Kept:
    """What clients keep between rounds: on the host, made on demand, never shared between two clients."""

    def __init__(self, cohort: Cohort, states: dict[int, State]):
        self.cohort, self.states = cohort, states

    def get(self, shared: State, clients: Sequence[int]) -> State:
        """The kept state of some clients, a lane each, on the device."""
        missing = [c for c in clients if c not in self.states]
        fresh = self.cohort.keep(shared, missing) if missing else {}
        if not self.states and missing == list(clients):
            return fresh
        lane = {c: i for i, c in enumerate(missing)}
        rows = [self.states[c] if c in self.states else {k: v[lane[c]] for k, v in fresh.items()} for c in clients]
        device = self.cohort.device
        return {name: torch.stack([row[name].to(device) for row in rows]) for name in rows[0]}

    def put(self, kept: dict[int, State]) -> None:
        """Remembers what clients kept."""
        self.states |= kept


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

    @torch.no_grad()
    def step(self) -> dict[str, Any]:
        """One round; returns its line for the history."""
        start, cohort, round = time.perf_counter(), self.cohort, self.round + 1
        clients = sample(cohort.fed.clients, self.participation, cohort.seed, round)
        weights = cohort.weights(clients)
        total: State = {}
        changed: dict[int, State] = {}
        losses, finite, done, up = [], [], 0, 0
        for part in cohort.chunks(clients):
            own = self.kept.get(self.shared, part)
            update, own, loss = cohort.train(self.shared, own, part, round, self.epochs)
            for name, value in update.items():
                mean = torch.tensordot(weights[done : done + len(part)], value, 1)
                total[name] = total[name] + mean if name in total else mean
            changed |= {c: {k: v[i].to("cpu", copy=True) for k, v in own.items()} for i, c in enumerate(part) if own}
            losses.append(loss)
            finite.append(_finite(loss, [*update.values(), *own.values()]))
            done, up = done + len(part), sum(v[0].numel() * v.element_size() for v in update.values())
        fine = torch.cat(finite).tolist()
        if not all(fine):
            self._diverged(round, [c for c, good in zip(clients, fine, strict=True) if not good])
        self.shared = cohort.algorithm.merge(self.shared, total, len(clients), cohort.fed.clients)
        decay = min(cohort.algorithm.average, (round - 1) / round)
        self.average = {k: decay * self.average[k] + (1 - decay) * v for k, v in self.shared.items()}
        self.kept.put(changed)
        self.changed, self.round = changed, round
        loss_mean = float(torch.cat(losses).double().mean())
        self.seconds += time.perf_counter() - start
        down = sum(v.numel() * v.element_size() for v in self.shared.values())
        line = {"round": round, "loss": loss_mean, "clients": clients, "seconds": self.seconds}
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


def _finite(loss: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
    fine = torch.isfinite(loss)
    for value in values:
        fine = fine & torch.isfinite(value.reshape(len(loss), -1)).all(-1)
    return fine
