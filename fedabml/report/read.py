"""Run folders as a report reads them: checked, and with the numbers that its figures need."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..data.statistics import worst_decile
from ..errors import InputError
from ..evaluation.measures import FEW_OF_CLASS, FEW_ROWS, WORST_TENTH, in_present_keys
from ..files.paths import read_bytes
from ..files.sealed import check_digest, check_tensors, parse_sealed
from ..files.sheets import csv_value
from .canvas import finite

MAX = 1 << 31  # bytes of a file in a run folder; files grow with clients and rounds
Record = Mapping[str, Any]
Quartiles = tuple[float, ...]


@dataclass(frozen=True)
class Client:
    """A row of clients.csv: the client's number as written, its name, and its measures (`None`: not known)."""

    key: str
    name: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class SavedRun:
    """The contents of a run folder. Fields are empty where a file is absent."""

    folder: Path
    config: Record
    summary: Record
    rounds: Sequence[Record] = ()
    clients: Sequence[Client] = ()
    manifest: Record = field(default_factory=dict)
    name: str = ""
    partition: Record = field(default_factory=dict)  # the manifest to draw, if it is not `manifest`
    divided: str = ""  # a sentence about the partition, for its caption
    unseen: Record = field(default_factory=dict)  # what models make of classes never seen, see `fedabml.report.unseen`

    @property
    def algorithm(self) -> str:
        """The algorithm's name, or the folder's if none is given."""
        declared = self.config.get("algorithm")
        nested = declared.get("name") if isinstance(declared, dict) else declared
        return str(self.summary.get("algorithm") or nested or self.folder.name)

    @property
    def dataset(self) -> str:
        """The data set's name, or an empty string."""
        return str(self.fact("dataset") or "")

    @property
    def task(self) -> str:
        """Either "classification" or "regression", or an empty string if the summary has neither."""
        scored = "regression" if "rmse" in self.summary else "classification" if "accuracy" in self.summary else ""
        return str(self.summary.get("task") or scored)

    @property
    def regression(self) -> bool:
        """Whether the run predicts numbers rather than classes."""
        return self.task == "regression"

    @property
    def metric(self) -> str:
        """The measure that a client's model is judged by first."""
        return "rmse" if self.regression else "accuracy"

    @property
    def partition_kind(self) -> str:
        """The kind of partition that the manifest names, or an empty string."""
        manifest = self.partition or self.manifest
        inner = manifest.get("partition")
        return str((inner.get("kind") if isinstance(inner, dict) else manifest.get("kind")) or "")

    @property
    def split(self) -> str:
        """The samples that the run is scored on: "test" or "validation"."""
        return "validation" if self.fact("split") == "val" else "test"

    def rows(self, client: Client) -> float | None:
        """Return how many samples the client is scored on."""
        return client.values.get("n_val" if self.split == "validation" else "n_test")

    def small(self, client: Client) -> bool:
        """Return whether the client is scored on so few rows that chance decides its measures."""
        rows = self.rows(client)
        return rows is not None and 0 < rows < FEW_ROWS

    def few_of_class(self, client: Client) -> bool:
        """Return whether the client is scored on so few rows of one of two classes that chance decides its ranks."""
        counts = [client.values.get(f"rows[{name}]") for name in self.classes]
        return len(counts) == 2 and any(count is not None and count < FEW_OF_CLASS for count in counts)

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, as columns of clients.csv have them; empty where it has no such columns."""
        names = self.summary.get("class_names")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def small_clients(self) -> int:
        """The number of scored clients that are small."""
        return sum(self.small(c) for c in self.clients if c.values.get(self.metric) is not None)

    def fact(self, key: str) -> Any:
        """Return a value of the summary or, failing that, of the configuration."""
        value = self.summary.get(key)
        return self.config.get(key) if value is None else value

    def number(self, key: str) -> float | None:
        """Return a finite number by its key. `traffic` is bytes up and down together, per client and round."""
        if key != "traffic":
            return finite(self.fact(key))
        ways = [v for way in ("bytes_up", "bytes_down") if (v := finite(self.summary.get(way))) is not None]
        return sum(ways) if ways else None

    def curve(self, key: str) -> tuple[list[float], list[float | None]]:
        """Return the rounds and values of a measure of training or evaluation; a value that is not finite is `None`."""
        pairs = []
        for line in self.rounds:
            scores = line.get("eval")
            source = line if key in line else scores if isinstance(scores, dict) else {}
            if key in source:
                pairs.append((float(line["round"]), finite(source[key])))
        return [p[0] for p in pairs], [p[1] for p in pairs]

    def table(self, key: str) -> list[Record]:
        """Return a list of records in the summary, such as `reliability`; empty if it is missing."""
        rows = self.summary.get(key)
        if rows is None:
            return []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(
                f"{self.folder / 'summary.json'}: '{key}' should be a list of objects. Train the run again."
            )
        return rows


_NAME_FORMS = (  # of runs, the shortest first; the first by which all runs differ is used
    *("{a}", "{a}, {d}", "{a}, seed {seed}", "{a}, {d}, seed {seed}"),
    *("{folder.name}", "{folder.parent.name}/{folder.name}"),
)


def read_runs(folders: Sequence[Path]) -> list[SavedRun]:
    """Read run folders and give each run a short name that distinguishes it from the others.

    Runs of classification and of regression share no measure: mixing them raises `InputError`.
    """
    runs = [_read(Path(folder)) for folder in folders]
    tasks = {run.task: run.folder for run in runs if run.task}
    if len(tasks) > 1:
        mixed = ", ".join(f"{folder} is a {task}" for task, folder in tasks.items())
        raise InputError(f"Runs of different tasks cannot be compared: {mixed}. Report them apart, one page per task.")
    for form in _NAME_FORMS:
        names = [form.format(a=run.algorithm, d=run.dataset, seed=run.fact("seed"), folder=run.folder) for run in runs]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _read(folder: Path) -> SavedRun:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a run folder. Give a folder that `fedabml train --out` has written.")
    summary = in_present_keys(_object(folder / "summary.json"))
    digests = summary.get("files")  # older versions wrote none
    digest = digests.get("clients.csv") if isinstance(digests, dict) else None
    run = SavedRun(
        folder=folder.resolve(),
        config=_object(folder / "config.json"),
        summary=summary,
        rounds=_rounds(folder / "metrics.jsonl"),
        clients=_clients(folder / "clients.csv", digest),
        manifest=_object(folder / "manifest.json", optional=True),
        unseen=_object(folder / "unseen.json", optional=True),
    )
    if run.small_clients and WORST_TENTH in summary and f"{WORST_TENTH}_all" not in summary:
        # Earlier versions wrote that of all clients alone.
        accuracies = [v for c in run.clients if (v := c.values.get("accuracy")) is not None and not run.small(c)]
        without = worst_decile(np.array(accuracies)) if accuracies else None
        run = replace(run, summary=summary | {WORST_TENTH: without, f"{WORST_TENTH}_all": summary[WORST_TENTH]})
    return run


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"{path} is damaged: {problem}. Restore it, or train the run again.")


def _text(path: Path, optional: bool = True, digest: Any = None) -> str | None:
    if not os.path.lexists(path):
        if optional and digest is None:
            return None
        raise InputError(f"{path} is missing. A finished run has it: give another folder, or let the run finish.")
    try:
        return check_digest(read_bytes(path, MAX), digest, str(path)).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _damaged(path, "it is not UTF-8 text") from None


def _json(source: str, path: Path, subject: str = "it") -> dict[str, Any]:
    value = parse_sealed(source, f"{path}: {subject}")
    if not isinstance(value, dict):
        raise _damaged(path, f"{subject} is not a JSON object")
    return value


def _object(path: Path, optional: bool = False) -> dict[str, Any]:
    source = _text(path, optional)
    return {} if source is None else _json(source, path)


def _rounds(path: Path) -> list[Record]:
    """Return the lines by round; of a round that a resumed run has repeated, the later line counts."""
    rounds: dict[float, Record] = {}
    for i, line in enumerate((_text(path) or "").split("\n"), 1):
        if line.strip():
            record = _json(line, path, f"line {i}")
            number = finite(record.get("round"))
            if number is None:
                raise _damaged(path, f"line {i} has no round number")
            rounds[number] = record
    return [rounds[number] for number in sorted(rounds)]


def _clients(path: Path, digest: Any) -> list[Client]:
    source, clients = _text(path, digest=digest), []
    if source is None:
        return []
    reader = csv.DictReader(io.StringIO(source, newline=""))
    try:
        if "client" not in (reader.fieldnames or ()):
            raise _damaged(path, "its header has no column 'client'")
        for row in reader:
            if None in row or None in row.values():
                raise _damaged(path, f"line {reader.line_num} has more or fewer cells than the header")
            key, name = row.pop("client"), csv_value(row.pop("name", ""))
            values = {column: _cell(cell, path, reader.line_num) for column, cell in row.items()}
            clients.append(Client(key, name or f"client {key}", values))
    except csv.Error as error:
        raise _damaged(path, str(error)) from None
    return clients


def _cell(cell: str, path: Path, line: int) -> float | None:
    if cell.strip().lower() in ("", "none", "null"):
        return None
    try:
        return finite(float(cell))
    except ValueError:
        raise _damaged(path, f"line {line} holds {cell[:40]!r} where a number belongs") from None


def read_layers(folder: Path) -> dict[str, dict[str, Quartiles]]:
    """Return the quartiles of σ and |mean| in every layer of a run's Gaussian prior; empty for other priors.

    Torch is not imported. Raises InputError for a file that is damaged.
    """
    path = folder / "shared.safetensors"
    if not os.path.lexists(path):
        return {}
    metadata = check_tensors(path)
    try:
        with safe_open(path, framework="np") as file:
            if not {"shared.mean", "shared.logstd"} <= {*file.keys()}:
                return {}
            parts = {"|mean|": np.abs(file.get_tensor("shared.mean")), "σ": np.exp(file.get_tensor("shared.logstd"))}
        names = [str(name) for name, _ in metadata["layout"]]
        ends = np.cumsum([math.prod(shape) for _, shape in metadata["layout"]], dtype=np.int64)
        layers: dict[str, dict[str, Quartiles]] = {name: {} for name in names if name != "likelihood"}
        for part, values in parts.items():
            if len(values) != ends[-1]:
                raise ValueError(f"{part} does not fit the layout")
            if not np.isfinite(values).all():
                return {}
            for name, piece in zip(names, np.split(values, ends[:-1]), strict=True):
                if name in layers:  # the likelihood's own parameters are not a layer
                    layers[name][part] = tuple(np.quantile(piece, (0.25, 0.5, 0.75)).tolist())
    except (SafetensorError, LookupError, TypeError, ValueError, OverflowError, OSError) as error:
        reason = str(error).rstrip(".") if isinstance(error, InputError) else type(error).__name__
        raise _damaged(path, f"it is not a prior that fedabml wrote ({reason})") from error
    return layers
