"""The progress of a run as text: the lines of train.log, which a terminal also shows."""

from __future__ import annotations

import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.formats import clock
from ..files.paths import explain_errors, open_append

if TYPE_CHECKING:
    from ..engine.rounds import Simulation
    from .prepare import Setup


class RunTimer:
    """The progress of a run: finished rounds, and the time since it began or was resumed."""

    def __init__(self, setup: Setup, sim: Simulation):
        self.rounds, self.first, self.saved, self.clients = setup.rounds, sim.round, sim.round, setup.cohort.fed.clients
        self.began, self.seconds_left = time.perf_counter(), 0.0

    def round(self, line: dict[str, Any]) -> str:
        """Record a finished round, and return a line that describes it."""
        self.saved = line["round"]
        elapsed = time.perf_counter() - self.began
        self.seconds_left = elapsed / (self.saved - self.first) * (self.rounds - self.saved)
        scores = line.get("eval", {})
        parts = [f"round {self.saved}/{self.rounds}", f"loss {line['loss']:.4f}"]
        parts += [f"{name} {scores[name]:.4f}" for name in ("accuracy", "rmse", "nll") if name in scores]
        scored = scores.get("clients_scored", self.clients)
        parts += [f"({scored} clients)"] if scored < self.clients else []
        return "  ".join([*parts, f"elapsed {clock(elapsed)}", f"remaining {clock(self.seconds_left)}"])


class RunLog:
    """The file train.log of a run: how the run began, notes, and a line for every round."""

    def __init__(self, folder: Path, setup: Setup, sim: Simulation):
        self.path, self.timer = folder / "train.log", RunTimer(setup, sim)
        self.file = TextIOWrapper(open_append(self.path), encoding="utf-8", line_buffering=True)
        self.close = self.file.close
        config, count = setup.config, setup.config["processes"]
        begin = f"{'resumed after' if sim.round else 'started at'} round {sim.round} of {setup.rounds}"
        place = f"{config['device']}{f', {count} processes' if count > 1 else ''}"
        for text in (*setup.notes, f"{begin}: {config['algorithm']['name']} on {config['dataset']}, {place}"):
            self.write(text)

    def round(self, line: dict[str, Any]) -> None:
        """Write the line of a finished round."""
        self.write(self.timer.round(line))
        if "note" in line:
            self.write(line["note"])

    def write(self, text: str) -> None:
        """Write a line that begins with the time."""
        with explain_errors(self.path, "written", "Every finished round is saved. Free some space, then use --resume."):
            self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
