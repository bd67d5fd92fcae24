"""Store what a site keeps between rounds, on its own disk, in versions named by round.

Only the server knows which of a site's replies counted. Every order names that round, and the site starts from the
version of that round. So site and server stay consistent after a lost or refused reply, a repeated round, or a server
that continues from an older state. A version belongs to one federation, one card and one identity.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ..algorithms.base import State
from ..errors import InputError
from ..files.paths import explain_errors
from ..files.sealed import read_tensors, write_tensors
from .messages import Refusal
from .server_state import kept_rounds

_NAME = re.compile(r"kept-([1-9][0-9]{0,8})\.safetensors")


class KeptLost(Refusal):
    """The version that the server counted is not on this site's disk, or it is damaged."""


class KeptVersions:
    """The versions of one site's kept state in a folder."""

    def __init__(self, folder: Path, federation: str, card: str, number: int):
        self.folder = folder
        self.owner = {"kind": "kept", "federation": federation, "card": card, "number": number}

    def path(self, round: int) -> Path:
        """Return the file of a version."""
        return self.folder / f"kept-{round}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds of all versions on disk, ascending."""
        with explain_errors(self.folder, "read"):
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def load(self, round: int, like: State) -> State:
        """Return the version of a round, with the names, shapes and types of `like`, in its order.

        It is empty if nothing was kept after that round: some algorithms have a first state that is never replaced.
        Raises KeptLost if it is missing, damaged, or belongs to another federation, card or identity.
        """
        try:
            tensors, facts = read_tensors(self.path(round))
        except InputError as error:
            raise KeptLost(f"This site no longer has what it kept after round {round}.") from error
        if facts != {**self.owner, "round": round}:
            raise KeptLost(f"What this site kept after round {round} belongs to another federation, card or site.")
        if not tensors:
            return {}
        if {n: (t.shape, t.dtype) for n, t in tensors.items()} != {n: (t.shape, t.dtype) for n, t in like.items()}:
            raise KeptLost(f"What this site kept after round {round} does not fit the algorithm.")
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
            raise KeptLost(f"What this site kept after round {round} is not finite.")
        return {name: tensors[name] for name in like}

    def save(self, round: int, state: State, counted: int) -> None:
        """Write the version of a round that started from version `counted`, and delete those no longer needed.

        For every state that the server keeps, the version that it counts stays too, because the server may go on from
        that state. Versions between `counted` and `round` never counted. Later ones stay, because an order that is
        delivered twice may come again after the next one was answered.
        """
        write_tensors(self.path(round), state, {**self.owner, "round": round}, private=True)
        rounds = self.rounds()
        before = [r for r in rounds if r <= counted]
        stay = {round, counted, *(max((r for r in before if r <= s), default=0) for s in kept_rounds(round - 1))}
        for old in rounds:
            if old < round and old not in stay:
                with explain_errors(self.path(old), "deleted"):
                    self.path(old).unlink(missing_ok=True)
