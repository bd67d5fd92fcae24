"""A run's folder: what a run writes while it trains, and how it resumes after a crash.

    config.json                       the configuration
    metrics.jsonl                     one line per round
    checkpoints/round-*.safetensors   the server's state after each of the last two rounds
    checkpoints/kept-*.safetensors    the kept states of the clients that took part in a round

A checkpoint names, for every client, the round whose file holds its latest state, so nothing is written twice. Files
that no checkpoint names are removed. Every file is written under a temporary name and renamed, so a kill at any moment
leaves the previous checkpoint intact.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..algorithms.base import State
from ..engine.checkpoint import Checkpoint
from ..errors import InputError
from ..files.paths import open_append, read_bytes, write
from ..files.sealed import (
    check_tensors,
    group,
    parse_sealed,
    prefixed,
    read_json,
    read_tensors,
    sealed_line,
    write_json,
    write_tensors,
)
from .request import describe, differences

log = logging.getLogger("fedabml")


class Saved(Mapping[int, State]):
    """The kept states of clients, by client: read from their files on access, in the order of the files."""

    def __init__(self, where: dict[int, int], file: Callable[[int], Path]):
        self.where = dict(sorted(where.items(), key=lambda pair: pair[1]))
        self.file, self._read = file, lru_cache(8)(self._states)

    def check(self) -> None:
        """Check that all files exist and fit their digests."""
        for round in set(self.where.values()):
            check_tensors(self.file(round))

    def _states(self, round: int) -> dict[int, State]:
        states: dict[int, State] = {}
        for name, tensor in read_tensors(self.file(round))[0].items():
            client, _, part = name.partition(".")
            if not (client.isascii() and client.isdigit()):
                raise InputError(f"'{self.file(round)}' holds no kept states of clients. Restore it from a copy.")
            states.setdefault(int(client), {})[part] = tensor
        return states

    def __getitem__(self, client: int) -> State:
        return self._read(self.where[client]).get(client, {})

    def __iter__(self) -> Iterator[int]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


class Folder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.where: dict[int, int] = {}  # client → round whose file holds its kept state
        self._previous: set[int] = set()  # rounds of the kept files that the previous checkpoint names
        self.history: list[dict[str, Any]] = []

    # -- beginning --------------------------------------------------------------------------------------------------
    def create(self, config: dict[str, Any]) -> None:
        """Start a new run. Raises InputError if the folder holds another."""
        if (self.path / "config.json").exists() or (self.path / "checkpoints").exists():
            raise InputError(
                f"'{self.path}' already holds a run. Resume it with --resume, or give another folder with --out."
            )
        write_json(self.path / "config.json", config)
        write(self.path / "metrics.jsonl", "")

    def reopen(
        self, config: dict[str, Any], free: set[str], neutral: Mapping[str, Any] | None = None
    ) -> Checkpoint | None:
        """Open a run to resume it; return its last sound checkpoint, or None if no round was finished.

        The configuration must be that of the run, except for the keys in `free` (dotted if they are nested). A run of
        an earlier version may lack newer keys, if these have their `neutral` values.
        """
        newer = neutral or {}
        if (self.path / "checkpoints").is_symlink():
            raise InputError(f"'{self.path / 'checkpoints'}' is a link. Replace it by a folder.")
        if not (self.path / "config.json").exists():
            raise InputError(f"There is no run to resume in '{self.path}': it has no config.json.")
        old = read_json(self.path / "config.json")
        if not isinstance(old, dict):
            raise InputError(f"'{self.path / 'config.json'}' is not a run's configuration. Give another folder.")
        differ = {
            name: (a, b)
            for name, (a, b) in differences(old, json.loads(json.dumps(config))).items()
            if not any(name == word or name.startswith(word + ".") for word in free)
            and not (a is None and name in newer and b == newer[name])
        }
        if differ:
            raise InputError(
                f"The run in '{self.path}' was started with another configuration: {describe(differ)}. Resume it "
                "unchanged, or start a new run in another folder."
            )
        found = self.load_latest()
        keep = found.round if found else 0
        if keep > config.get("rounds", keep):
            raise InputError(
                f"The run in '{self.path}' already has {keep} rounds. Resume it with {keep} rounds or more."
            )
        for folder in (self.path, self.path / "checkpoints"):
            for cut in folder.glob(".*.part"):  # half-written files of a crash
                cut.unlink(missing_ok=True)
        kept = {name: old[name] for name in free & old.keys() - config.keys()}
        write_json(self.path / "config.json", config | kept)
        open_append(self.path / "metrics.jsonl").close()  # refuses a link, which the next lines would follow
        self.history = self._history(keep)
        write(self.path / "metrics.jsonl", "".join(map(sealed_line, self.history)))
        return found

    def _history(self, rounds: int) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl up to a round, without damaged ones, which are logged as a warning."""
        path, lines = self.path / "metrics.jsonl", {}
        for number, text in enumerate(read_bytes(path, 1 << 31).split(b"\n") if path.exists() else [], 1):
            try:
                line = parse_sealed(text.decode(), f"'{path}', line {number},")
                if _is_round(line):
                    lines[line["round"]] = line
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line after the last checkpoint that a crash cut short; its round runs again
        lost = [round for round in range(1, rounds + 1) if round not in lines]
        if lost:
            log.warning(
                "'%s' is damaged: the lines of %d of %d rounds cannot be read (first round %d). The run resumes from "
                "its checkpoint, and its curves lack these rounds.",
                *(path, len(lost), rounds, lost[0]),
            )
        return [lines[round] for round in range(1, rounds + 1) if round in lines]

    def newest_round(self) -> int:
        """Return the round of the newest checkpoint, sound or not; 0 if there is none."""
        return max((_number(file) for file in self._files("round")), default=0)

    def _files(self, kind: str) -> list[Path]:
        found = (self.path / "checkpoints").glob(f"{kind}-*.safetensors")
        return sorted(file for file in found if file.stem.removeprefix(f"{kind}-").isdecimal())

    def load_latest(self) -> Checkpoint | None:
        """Load the latest sound checkpoint; return None if no round was finished.

        A checkpoint is sound if it and every file of kept states that it names fit their digests. If the newest one is
        not, the one before it is loaded, with a warning.
        """
        problems: list[str] = []
        for file in reversed(self._files("round")):
            try:
                found = self._load(file)
                for problem in problems:
                    log.warning("%s The run resumes from round %d instead.", problem, found.round)
                return found
            except InputError as error:
                problems.append(str(error))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"'{file}' is not a checkpoint: {type(error).__name__} {error}.")
        if problems:
            raise InputError(f"No checkpoint in '{self.path / 'checkpoints'}' can be read. {problems[0]}")
        return None

    def _load(self, file: Path) -> Checkpoint:
        tensors, facts = read_tensors(file)
        where = {int(client): int(round) for client, round in facts["kept"].items()}
        kept = Saved(where, self._kept_file)
        kept.check()
        self.where, self._previous = where, set(where.values())
        shared, average = group(tensors, "shared"), group(tensors, "average")
        chunk = int(facts["chunk"]) if facts.get("chunk") else None
        velocity = group(tensors, "velocity")
        since = int(facts["compiled"]) if facts.get("compiled") else None
        return Checkpoint(int(facts["round"]), shared, average, kept, float(facts["seconds"]), chunk, velocity, since)

    # -- every round ------------------------------------------------------------------------------------------------
    def log(self, line: dict[str, Any]) -> None:
        """Add a round's line to metrics.jsonl."""
        self.history.append(line)
        try:
            with open_append(self.path / "metrics.jsonl") as file:
                file.write(sealed_line(line).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"'{self.path / 'metrics.jsonl'}' cannot be written: {error.strerror}. The checkpoint of the previous "
                "round is intact. Free some space, then use --resume."
            ) from error

    def write_round(self, line: dict[str, Any], state: Checkpoint, changed: dict[int, State]) -> None:
        """Write a round's line and the state after it; `changed` holds the kept states of the round's clients."""
        self.log(line)
        self.save(state, changed)

    def save(self, state: Checkpoint, changed: dict[int, State]) -> None:
        """Save the state after a round; `changed` holds the kept states of its clients."""
        if changed:
            flat = {f"{client}.{name}": t for client, own in changed.items() for name, t in own.items()}
            write_tensors(self._kept_file(state.round), flat, {"round": state.round}, private=True)
            self.where |= dict.fromkeys(changed, state.round)
        facts: dict[str, Any] = {"round": state.round, "seconds": state.seconds, "chunk": state.chunk}
        facts |= {"compiled": state.compiled} if state.compiled else {}
        facts |= {"kept": {str(c): r for c, r in self.where.items()}}
        tensors = prefixed("shared", state.shared) | prefixed("average", state.average)
        tensors |= prefixed("velocity", state.velocity)
        # A server that owns nothing (Local only) still needs a tensor in its file.
        write_tensors(self._round_file(state.round), tensors or {"empty": torch.zeros(1)}, facts)
        self._remove_old(state.round)

    def _remove_old(self, round: int) -> None:
        named = set(self.where.values())
        # The previous checkpoint may name kept files that this one does not; they stay one round longer.
        needed: dict[str, set[int]] = {"round": set(), "kept": named | self._previous}
        for kind, numbers in needed.items():
            for file in self._files(kind):
                if _number(file) < round - 1 and _number(file) not in numbers:
                    file.unlink()
        self._previous = named

    def _round_file(self, round: int) -> Path:
        return self.path / "checkpoints" / f"round-{round:06d}.safetensors"

    def _kept_file(self, round: int) -> Path:
        return self.path / "checkpoints" / f"kept-{round:06d}.safetensors"


def _number(file: Path) -> int:
    """Return the round in the name of a checkpoint's file."""
    return int(file.stem.split("-")[1])


def _is_round(line: dict[str, Any]) -> bool:
    """Return whether a line is that of a round: a finite loss, and numbers for the rest."""
    scores = [value for value in line.get("eval", {}).values() if value is not None]
    numbers = [line["loss"], line.get("bytes_up", 0), line.get("bytes_down", 0), *scores]
    sound = type(line["round"]) is int and all(type(value) in (int, float) for value in numbers)
    return sound and math.isfinite(line["loss"])
