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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from ..algorithms.base import State
from ..engine.checkpoint import Checkpoint
from ..errors import InputError
from ..files import sealed
from ..files.paths import explain_errors, open_append, read_bytes, write
from .config import read_config
from .request import describe, differences

log = logging.getLogger("fedabml")


class KeptStates(Mapping[int, State]):
    """The kept states of clients, by client: read from their files on access, in the order of the files."""

    def __init__(self, round_of: dict[int, int], file: Callable[[int], Path]):
        self.round_of = dict(sorted(round_of.items(), key=lambda pair: pair[1]))
        self.file, self._read = file, lru_cache(8)(self._states)

    def _states(self, round: int) -> dict[int, State]:
        states: dict[int, State] = {}
        for name, tensor in sealed.read_tensors(self.file(round))[0].items():
            client, _, part = name.partition(".")
            if not (client.isascii() and client.isdigit()):
                raise InputError(f"'{self.file(round)}' holds no kept states of clients. Restore it from a copy.")
            states.setdefault(int(client), {})[part] = tensor
        return states

    def __getitem__(self, client: int) -> State:
        return self._read(self.round_of[client]).get(client, {})

    def __iter__(self) -> Iterator[int]:
        return iter(self.round_of)

    def __len__(self) -> int:
        return len(self.round_of)


class Folder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.round_of: dict[int, int] = {}  # client → round whose file holds its kept state
        self._previous: set[int] = set()  # rounds of the kept files that the previous checkpoint names
        self.history: list[dict[str, Any]] = []

    # -- beginning --------------------------------------------------------------------------------------------------
    def create(self, config: dict[str, Any]) -> None:
        """Start a new run. Raises InputError if the folder holds another."""
        if (self.path / "config.json").exists() or (self.path / "checkpoints").exists():
            raise InputError(
                f"'{self.path}' already holds a run. Resume it with --resume, or give another folder with --out."
            )
        sealed.write_json(self.path / "config.json", config)
        write(self.path / "metrics.jsonl", "")

    def reopen(
        self, config: dict[str, Any], free: set[str], neutral: Mapping[str, Any] | None = None
    ) -> Checkpoint | None:
        """Open a run to resume it; return its last sound checkpoint, or None if no round was finished.

        The configuration must be that of the run, except for the keys in `free` (dotted if they are nested). A run of
        an earlier version may lack newer keys, if these have their `neutral` values.
        """
        neutral_values, checkpoints = neutral or {}, self.path / "checkpoints"
        if checkpoints.is_symlink():
            raise InputError(f"'{checkpoints}' is a link. Replace it by a folder.")
        old = read_config(self.path)
        differ = {
            name: (a, b)
            for name, (a, b) in differences(old, json.loads(json.dumps(config))).items()
            if not any(name == key or name.startswith(key + ".") for key in free)
            and not (a is None and name in neutral_values and b == neutral_values[name])
        }
        if differ:
            raise InputError(
                f"The run in '{self.path}' was started with another configuration: {describe(differ)}. Resume it "
                "unchanged, or start a new run in another folder."
            )
        latest = self.load_latest()
        rounds_done = latest.round if latest else 0
        if rounds_done > config.get("rounds", rounds_done):
            raise InputError(
                f"The run in '{self.path}' already has {rounds_done} rounds. Resume it with {rounds_done} rounds "
                "or more."
            )
        for unfinished in (*self.path.glob(".*.part"), *checkpoints.glob(".*.part")):  # half-written files of a crash
            unfinished.unlink(missing_ok=True)
        kept = {name: old[name] for name in free & old.keys() - config.keys()}
        sealed.write_json(self.path / "config.json", config | kept)
        open_append(self.path / "metrics.jsonl").close()  # refuses a link, which the next lines would follow
        self.history = self._history(rounds_done)
        write(self.path / "metrics.jsonl", "".join(map(sealed.sealed_line, self.history)))
        return latest

    def _history(self, rounds: int) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl up to a round, without damaged ones, which are logged as a warning."""
        path, lines = self.path / "metrics.jsonl", {}
        for number, text in enumerate(read_bytes(path, 1 << 31).split(b"\n") if path.exists() else [], 1):
            try:
                line = sealed.parse_sealed(text.decode(), f"'{path}', line {number},")
                if _is_round(line):
                    lines[line["round"]] = line
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line after the last checkpoint that a crash cut short; its round runs again
        lost_rounds = [round for round in range(1, rounds + 1) if round not in lines]
        if lost_rounds:
            log.warning(
                "'%s' is damaged: the lines of %d of %d rounds cannot be read (first round %d). The run resumes from "
                "its checkpoint, and its curves lack these rounds.",
                *(path, len(lost_rounds), rounds, lost_rounds[0]),
            )
        return [lines[round] for round in range(1, rounds + 1) if round in lines]

    def newest_round(self) -> int:
        """Return the round of the newest checkpoint, sound or not; 0 if there is none."""
        return max((_number(file) for file in self._files("round")), default=0)

    def _files(self, content: str) -> list[Path]:
        """Return the files of all rounds with a content, round or kept, in their order."""
        files = (self.path / "checkpoints").glob(f"{content}-*.safetensors")
        return sorted(file for file in files if file.stem.removeprefix(f"{content}-").isdecimal())

    def _file(self, content: str, round: int) -> Path:
        return self.path / "checkpoints" / f"{content}-{round:06d}.safetensors"

    def load_latest(self) -> Checkpoint | None:
        """Load the latest sound checkpoint; return None if no round was finished.

        A checkpoint is sound if it and every file of kept states that it names fit their digests. If the newest one is
        not, the one before it is loaded, with a warning.
        """
        problems: list[str] = []
        for file in reversed(self._files("round")):
            try:
                state = self._load(file)
                for problem in problems:
                    log.warning("%s The run resumes from round %d instead.", problem, state.round)
                return state
            except InputError as error:
                problems.append(str(error))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"'{file}' is not a checkpoint: {type(error).__name__} {error}.")
        if problems:
            raise InputError(f"No checkpoint in '{self.path / 'checkpoints'}' can be read. {problems[0]}")
        return None

    def _load(self, file: Path) -> Checkpoint:
        tensors, metadata = sealed.read_tensors(file)
        round_of = {int(client): int(round) for client, round in metadata["kept"].items()}
        kept = KeptStates(round_of, partial(self._file, "kept"))
        for round in set(round_of.values()):
            sealed.check_tensors(self._file("kept", round))
        self.round_of, self._previous = round_of, set(round_of.values())
        shared, average, velocity = (sealed.group(tensors, name) for name in ("shared", "average", "velocity"))
        chunk, since = (int(metadata[name]) if metadata.get(name) else None for name in ("chunk", "compiled"))
        return Checkpoint(
            int(metadata["round"]), shared, average, kept, float(metadata["seconds"]), chunk, velocity, since
        )

    # -- every round ------------------------------------------------------------------------------------------------
    def log(self, line: dict[str, Any]) -> None:
        """Add a round's line to metrics.jsonl."""
        self.history.append(line)
        path, saved = self.path / "metrics.jsonl", "The checkpoint of the previous round is intact."
        with explain_errors(path, "written", f"{saved} Free some space, then use --resume."), open_append(path) as file:
            file.write(sealed.sealed_line(line).encode())
            file.flush()
            os.fsync(file.fileno())

    def write_round(self, line: dict[str, Any], state: Checkpoint, changed: dict[int, State]) -> None:
        """Write a round's line and the state after it; `changed` holds the kept states of the round's clients."""
        self.log(line)
        self.save(state, changed)

    def save(self, state: Checkpoint, changed: dict[int, State]) -> None:
        """Save the state after a round; `changed` holds the kept states of its clients."""
        if changed:
            flat = {f"{client}.{name}": t for client, kept in changed.items() for name, t in kept.items()}
            sealed.write_tensors(self._file("kept", state.round), flat, {"round": state.round}, private=True)
            self.round_of |= dict.fromkeys(changed, state.round)
        metadata: dict[str, Any] = {"round": state.round, "seconds": state.seconds, "chunk": state.chunk}
        metadata |= {"compiled": state.compiled} if state.compiled else {}
        metadata["kept"] = {str(client): round for client, round in self.round_of.items()}
        tensors = sealed.prefixed("shared", state.shared) | sealed.prefixed("average", state.average)
        tensors |= sealed.prefixed("velocity", state.velocity)
        # A server that owns nothing (Local only) still needs a tensor in its file.
        sealed.write_tensors(self._file("round", state.round), tensors or {"empty": torch.zeros(1)}, metadata)
        self._remove_old(state.round)

    def _remove_old(self, round: int) -> None:
        """Remove the files that neither checkpoint needs; the previous one may name other kept files."""
        named = set(self.round_of.values())
        for content, needed in (("round", set()), ("kept", named | self._previous)):
            for file in self._files(content):
                if _number(file) < round - 1 and _number(file) not in needed:
                    file.unlink()
        self._previous = named


def _number(file: Path) -> int:
    """Return the round in the name of a checkpoint's file."""
    return int(file.stem.split("-")[1])


def _is_round(line: dict[str, Any]) -> bool:
    """Return whether a line is that of a round: a finite loss, and numbers for the rest."""
    scores = [value for value in line.get("eval", {}).values() if value is not None]
    numbers = [line["loss"], line.get("bytes_up", 0), line.get("bytes_down", 0), *scores]
    sound = type(line["round"]) is int and all(type(value) in (int, float) for value in numbers)
    return sound and math.isfinite(line["loss"])
