"""Cells, the runs that an experiment is made of, and what comes of them.

A `Cell` is a configuration and the personal options that are scored on its one trained federation. It is trained once;
its `Result` is one line of a ledger (`fedabml.experiments.ledger`), found again by the cell's identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..files.sealed import parse_sealed, sealed_line
from ..runs.config import RunConfig, Table, stored

if TYPE_CHECKING:
    from .study import Study

# Keys of a configuration that say where and how a cell runs, not what it computes.
MACHINE = ("device", "backend", "chunk", "compile", "data_dir", "evaluate", "eval_every", "eval_clients", "eval_all")


@dataclass(frozen=True, eq=False)
class Cell:
    """A run to be: the row of the table it belongs to, its configuration, the personal options to score.

    `curve` are rounds after which it is looked at, too; a `study` may have other data, clients and questions.
    """

    label: str
    config: RunConfig
    personal: tuple[Table, ...] = ({},)
    curve: tuple[int, ...] = ()
    study: Study | None = None

    @property
    def identity(self) -> str:
        """What makes two cells the same: everything that decides their numbers, as canonical JSON.

        Hyperparameters that were not given are in it, too: a version with other defaults makes other cells. The label
        is not: a cell that one experiment has trained serves another, whatever either calls it.
        """
        config = {k: v for k, v in self.config.to_dict(everything=True).items() if k not in MACHINE}
        config |= {"lr": None, self.config.algorithm: self.config.algorithm_object().identity()}
        more = [list(self.curve), self.study and self.study.identity] if self.curve or self.study else []
        return json.dumps([config, list(self.personal), *more], sort_keys=True)

    @cached_property
    def work(self) -> float:
        """About how long it takes, in rounds of its training: these, and its scores, for which all clients train.

        Predicting counts as an epoch; what a study looks at beside them, or after rounds of the curve, is not counted.
        """
        epochs = sum(max(way) + 1 for way in ways_of([self])) * (self.study.scored if self.study else 1.0)
        return self.config.rounds + epochs / (self.config.participation * self.config.epochs)


def ways_of(cells: Sequence[Cell]) -> list[dict[int, list[int]]]:
    """The numbers of the cells' personal options by epochs, ascending: one way for those that differ in them alone."""
    usual = cells[0].config.algorithm_object().personal_epochs
    ways: dict[str, dict[int, list[int]]] = {}
    for number, option in enumerate(cells[0].personal):
        rest = [{k: v for k, v in c.personal[number].items() if k != "personal_epochs"} for c in cells]
        way = ways.setdefault(json.dumps(rest, sort_keys=True), {})
        way.setdefault(option.get("personal_epochs", usual), []).append(number)
    return [dict(sorted(way.items())) for way in ways.values()]


def along(step: int, rounds: int) -> tuple[int, ...]:
    """A curve: each so many rounds, but not the last, after which every cell is scored anyway; 0: none."""
    return tuple(range(step, rounds, step)) if step else ()


@dataclass(frozen=True)
class Score:
    """One personal option of a trained federation, scored; one of several that diverged has an error and no numbers."""

    personal: Table
    summary: Table  # the means and pooled measures of `fedabml.evaluation.scoring`
    clients: dict[str, list[float | None]]  # by measure, a value per client; None where a client has no such data
    error: str | None = None
    on: str = ""  # the study's audience, where it has several or others
    reliability: list[list[float]] = field(default_factory=list)  # by bin: confidence, share right, how many; or none


@dataclass(frozen=True)
class Result:
    """A finished cell; one that diverged has an error and no scores."""

    identity: str
    label: str
    config: Table  # of `RunConfig.to_dict`: what `RunConfig.of` reads back
    scores: list[Score] = field(default_factory=list)
    facts: Table = field(default_factory=dict)  # bytes_up, bytes_down, seconds, device, partition_hash, versions, ...
    error: str | None = None
    curve: list[Table] = field(default_factory=list)  # a line for every round of the cell's curve
    found: Table = field(default_factory=dict)  # what the cell's study has found out

    @property
    def seed(self) -> int:
        """The seed it ran with."""
        return int(self.config.get("seed", 0))

    def seen(self) -> dict[int, Table]:
        """By round, what was noted after it; after the last round that is the score, if nothing else was."""
        last = int(self.config.get("rounds", RunConfig.rounds))
        noted = {int(line["round"]): line for line in self.curve}
        return dict(sorted(({last: self.scores[0].summary} | noted).items())) if self.scores else noted

    def line(self) -> str:
        """The result as a line of a ledger: JSON, sealed with its digest."""
        return sealed_line(asdict(self))

    @classmethod
    def of(cls, line: str, where: str = "The line") -> Result:
        """Reads such a line; lines of earlier versions have no seal."""
        fields = parse_sealed(line, where)
        identity = json.loads(fields["identity"])
        if isinstance(identity[0], str):  # earlier versions had the label in it
            identity = identity[1:]
        identity[0], fields["config"] = stored(identity[0]), stored(fields["config"])
        fields["identity"] = json.dumps(identity, sort_keys=True)
        scores = [Score(**score) for score in fields.pop("scores")]
        found = cls(**fields, scores=scores)
        tables = [found.config, found.facts, found.found, *found.curve, *(s.summary for s in scores)]
        columns = [column for score in scores for column in score.clients.values()]
        if not all(isinstance(t, dict) for t in tables) or not all(isinstance(c, list) for c in columns):
            raise ValueError("its parts are of other kinds")
        if not all(v is None or type(v) in (int, float) for column in columns for v in column):
            raise ValueError("its scores are no numbers")
        return found
