"""Cells, the runs that an experiment is made of, and what comes of them.

A `Cell` is a configuration and the personal options that are scored on its one trained federation. It is trained once;
its `Result` is one line of a ledger (`fedabml.experiments.ledger`), found again by the cell's identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..algorithms import digest_of
from ..evaluation.measures import in_present_keys
from ..files.sealed import parse_sealed, sealed_line
from ..models import USER_NETWORKS, file_digest, folder_digest, is_folder
from ..runs.config import JsonDict, RunConfig, upgrade_config

if TYPE_CHECKING:
    from .study import Study

# Keys of a configuration that say where and how a cell runs, not what it computes.
MACHINE = ("device", "backend", "chunk", "compile", "data_dir", "evaluate", "eval_every", "eval_clients", "eval_all")

# Keys that earlier versions did not have: with their default value they are no part of an identity.
LATER = (
    *("drop_columns", "id_column", "date_columns", "split_by", "image_size"),
    *("target_transform", "positive_target", "noise_by_input", "class_weights", "train", "lora_rank"),
    *("specificity", "split", "positive_class"),
)


@dataclass(frozen=True, eq=False)
class Cell:
    """A run to do: the row of the table that it belongs to, its configuration, and the personal options to score.

    After the rounds of `curve` it is scored, too. A `study` may have other data, other clients and other questions.
    `measure`, if given, is recorded for every client beside the usual measures; it is no part of the identity.
    """

    label: str
    config: RunConfig
    personal: tuple[JsonDict, ...] = ({},)
    curve: tuple[int, ...] = ()
    study: Study | None = None
    measure: str | None = None

    @property
    def identity(self) -> str:
        """Everything that decides a cell's numbers, as canonical JSON: two cells with the same identity are the same.

        It includes the defaults of hyperparameters that were not given, because a version with other defaults makes
        other cells. It leaves the label out, so that a cell that one experiment has trained serves another.
        """
        config = {k: v for k, v in self.config.to_dict(everything=True).items() if k not in MACHINE}
        config = {k: v for k, v in config.items() if k not in LATER or v != getattr(RunConfig, k)}
        algorithm = self.config.algorithm_object()
        config |= {"lr": None, self.config.algorithm: algorithm.identity()}
        name = self.config.model
        if code := digest_of(algorithm) | ({name: USER_NETWORKS[name].digest} if name in USER_NETWORKS else {}):
            config["code"] = code
        if is_folder(self.config.model):
            config["model_files"] = folder_digest(self.config.model)  # the folder's name is not its content
        if self.config.pretrained and (digest := file_digest(self.config.pretrained)):
            config["pretrained_file"] = digest  # neither is the name of a file of weights
        extras = [list(self.curve), self.study and self.study.identity] if self.curve or self.study else []
        return json.dumps([config, list(self.personal), *extras], sort_keys=True)

    @cached_property
    def estimated_rounds(self) -> float:
        """The estimated duration in rounds of training: its rounds, and the scoring, for which all clients train.

        Predicting counts as an epoch; a study's own questions and the scores of the curve are not counted.
        """
        epochs = sum(max(training) + 1 for training in options_by_epochs([self])) * (
            self.study.scored if self.study else 1.0
        )
        return self.config.rounds + epochs / (self.config.participation * self.config.epochs)


def options_by_epochs(cells: Sequence[Cell]) -> list[dict[int, list[int]]]:
    """Group the numbers of the cells' personal options by epochs, ascending.

    Options that differ in their epochs alone form one group, because one training scores all of them.
    """
    default_epochs = cells[0].config.algorithm_object().personal_epochs
    trainings: dict[str, dict[int, list[int]]] = {}
    for number, option in enumerate(cells[0].personal):
        other_options = [{k: v for k, v in c.personal[number].items() if k != "personal_epochs"} for c in cells]
        training = trainings.setdefault(json.dumps(other_options, sort_keys=True), {})
        training.setdefault(option.get("personal_epochs", default_epochs), []).append(number)
    return [dict(sorted(training.items())) for training in trainings.values()]


def along(step: int, rounds: int) -> tuple[int, ...]:
    """Return a curve of every `step` rounds without the last, after which every cell is scored anyway; 0: no curve."""
    return tuple(range(step, rounds, step)) if step else ()


@dataclass(frozen=True)
class Score:
    """The scores of one personal option of a trained federation; one that diverged has an error and no numbers."""

    personal: JsonDict
    summary: JsonDict  # the means and pooled measures of `fedabml.evaluation.scoring`
    clients: dict[str, list[float | None]]  # by measure, a value per client; None where a client has no such data
    error: str | None = None
    on: str = ""  # the name of the study's audience
    reliability: list[list[float]] = field(default_factory=list)  # by bin: confidence, share right, how many; or none
    by_class: dict[str, JsonDict] = field(default_factory=dict)  # pooled rows, recall and precision; none of two


@dataclass(frozen=True)
class Result:
    """A finished cell; one that diverged has an error and no scores."""

    identity: str
    label: str
    config: JsonDict  # of `RunConfig.to_dict`: what `RunConfig.of` reads back
    scores: list[Score] = field(default_factory=list)
    facts: JsonDict = field(default_factory=dict)  # bytes_up, bytes_down, seconds, device, versions, ...
    error: str | None = None
    curve: list[JsonDict] = field(default_factory=list)  # a line for every round of the cell's curve
    found: JsonDict = field(default_factory=dict)  # what the cell's study has found

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    def by_round(self) -> dict[int, JsonDict]:
        """Return by round what was recorded after it; after the last round this is the score."""
        last = int(self.config.get("rounds", RunConfig.rounds))
        noted = {int(line["round"]): line for line in self.curve}
        return dict(sorted(({last: self.scores[0].summary} | noted).items())) if self.scores else noted

    def line(self) -> str:
        """Return the result as a line of a ledger: JSON, sealed with its digest."""
        return sealed_line(asdict(self))

    @classmethod
    def of(cls, line: str, subject: str = "The line") -> Result:
        """Read a line of a ledger; lines of earlier versions have no seal."""
        fields = parse_sealed(line, subject)
        identity = json.loads(fields["identity"])
        if isinstance(identity[0], str):  # earlier versions had the label in it
            identity = identity[1:]
        identity[0], fields["config"] = upgrade_config(identity[0]), upgrade_config(fields["config"])
        fields["identity"] = json.dumps(identity, sort_keys=True)
        scores = [Score(**score) for score in fields.pop("scores")]
        result = cls(**fields, scores=scores)
        tables = [result.config, result.facts, result.found, *result.curve]
        tables += [table for s in scores for table in (s.summary, s.by_class)]
        columns = [column for score in scores for column in score.clients.values()]
        if not all(isinstance(t, dict) for t in tables) or not all(isinstance(c, list) for c in columns):
            raise ValueError("its parts have other types")
        if not all(v is None or type(v) in (int, float) for column in columns for v in column):
            raise ValueError("its scores are not numbers")
        return replace(result, scores=[replace(score, summary=in_present_keys(score.summary)) for score in scores])
