"""A study: what a cell trains and scores, where that is more than its configuration's own federation.

A study chooses the data and the network that are trained, the clients that are scored, what is recorded after the
rounds of the cell's `curve`, and what else is measured when training is done. `Study` itself is the plain case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..data import Dataset, Federation, load
from ..engine.client import initial_kept
from ..engine.lanes import Lanes
from ..engine.rounds import Simulation
from ..engine.setting import Cohort
from ..errors import TrainingError
from ..evaluation.scoring import Entry, evaluate_after
from ..runs.config import RunConfig, Table
from ..runs.prepare import resolve_split

WATCHED = ("accuracy", "rmse", "nll")  # recorded after a round of the curve


@dataclass(frozen=True)
class Study:
    """The plain case: a configuration's own federation, all clients scored. Fields are part of a cell's identity."""

    @property
    def identity(self) -> list[Any]:
        """The name and the fields of the study, as they are read back from JSON."""
        return [type(self).__name__, json.loads(json.dumps(asdict(self)))]

    def federation(self, config: RunConfig) -> Federation:
        """Return the federation that is trained."""
        return federation(config)

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        """Return the network that is trained, or its name."""
        return config.model

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        """Return the federations whose clients are personalised and scored in the end, by name."""
        return {"": fed}

    @property
    def scored(self) -> float:
        """The estimated number of scored clients per client that trains, for the remaining time."""
        return 1.0

    def watch(self, sims: Sequence[Simulation]) -> list[Table]:
        """Return what is recorded of runs side by side after a round of the curve."""
        split, epochs = resolve_split(sims[0].cohort.fed, "auto"), sims[0].cohort.algorithm.personal_epochs
        return [
            {"error": str(outcome)}
            if isinstance(outcome, TrainingError)
            else {name: outcome.summary[name] for name in WATCHED if name in outcome.summary}
            for outcome in evaluate_after((epochs,), [entry(sim, sim.cohort) for sim in sims], split)[0]
        ]

    def observe(self, sim: Simulation) -> Table:
        """Return what else is measured on a trained federation, ready for JSON."""
        return {}


PLAIN = Study()


def entry(sim: Simulation, cohort: Cohort) -> Entry:
    """Return a trained run to be scored: with its own clients, or with new ones, who have kept nothing yet."""
    if cohort.fed is sim.cohort.fed:
        return Entry(cohort, sim.theta, sim.kept_for, sim.round)
    keeps = cohort.algorithm.keeps

    def kept(clients: list[int]) -> dict[str, Tensor]:
        return initial_kept(Lanes.of(cohort, sim.theta, clients)) if keeps else {}

    return Entry(cohort, sim.theta, kept, sim.round)


@cache
def dataset(name: str, data_dir: str | None) -> Dataset:
    """Load a dataset once."""
    return load(name, data_dir)


def federation(config: RunConfig) -> Federation:
    """Return the federation of a configuration; partitions of one dataset share its samples."""
    return config.federation(dataset=None if config.data else dataset(config.dataset or "digits", config.data_dir))
