"""Decide which sites may be drawn for a round: the members that are connected and do not rest.

A site that did not answer in time rests: for some rounds, and for as long as Flower may list a site that
has died. Both are twice as long after every further miss. A rest ends early if the site's node is started anew or
returns, or if the site answers after all. The next draw waits once for a site that has lost its connection; if the
site stays away, later draws do not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from .. import rng
from .folders import Member, ServerFolder
from .messages import NoticesStarts, Transport

LISTED = 60.0  # seconds for which Flower may list a site that has died: two of its heartbeats
MOST_DOUBLINGS = 6  # of a rest


@dataclass(frozen=True)
class Rest:
    """A site is not drawn up to a round, nor before a time of the clock."""

    last_round: int
    until: float


class Roster:
    """A roster holds the members of a federation and which of them are connected. `clock` counts seconds."""

    def __init__(self, folder: ServerFolder, transport: Transport, rest_rounds: int, clock: Callable[[], float]):
        self.folder, self.transport, self.rest_rounds, self.clock = folder, transport, rest_rounds, clock
        self.members: list[Member] = folder.members()
        self.connected: set[str] = set()
        self.awaited = {member.name for member in self.members}  # connected recently, or before a restart
        self.returned: set[str] = set()  # since `refresh` before the last one
        self._started: dict[str, str] = {}  # by connected site: what distinguishes the starts of its node
        self._rests: dict[str, Rest] = {}
        self._misses: dict[str, int] = {}  # by site: since its last answer
        self._version, self._removed = 0, set[str]()

    def refresh(self) -> None:
        """Read who is registered and who is connected. A connection counts only with the key of its member."""
        self._version, self._removed = self._sites_version(), set()
        self.members = self.folder.members()
        keys = {name: key.strip() for name, key in self.transport.sites().items()}
        connected = {m.name for m in self.members if keys.get(m.name) == m.public_key.strip()}
        watch = self.transport if isinstance(self.transport, NoticesStarts) else None
        started = {name: watch.started(name) if watch else "" for name in connected}
        self.returned = {name for name in connected if self._started.get(name) != started[name]}
        for name in self.returned:
            self._rests.pop(name, None)
        self.connected, self._started = connected, started
        self.awaited |= connected

    def removed(self) -> set[str]:
        """Return the members whom the operator has removed since the last `refresh`."""
        if (version := self._sites_version()) != self._version:
            self._version, names = version, {member.name for member in self.folder.members()}
            self._removed = {member.name for member in self.members if member.name not in names}
        return self._removed

    def _sites_version(self) -> int:
        return self.folder.sites_file.stat().st_mtime_ns if self.folder.sites_file.exists() else 0

    def number(self, name: str) -> int:
        """Return the identity of a member."""
        return next(member.number for member in self.members if member.name == name)

    def rest(self, name: str, round: int, *, silent: bool = True) -> None:
        """Let a site that gave no reply in a round rest. If it is not connected later, nobody waits for it.

        A site that is not `silent` has failed at once: its rest is no longer for earlier misses, and has no least time.
        """
        doublings = min(self._misses.get(name, 0), MOST_DOUBLINGS) if silent else 0
        least = LISTED * 2**doublings if silent and self.rest_rounds else -math.inf
        self._rests[name] = Rest(round + self.rest_rounds * 2**doublings, self.clock() + least)
        self._misses[name] = self._misses.get(name, 0) + silent
        self.awaited.discard(name)

    def wake(self, name: str) -> None:
        """End a site's rest, because it has answered."""
        self._rests.pop(name, None)
        self._misses.pop(name, None)

    def rests(self, name: str, round: int) -> bool:
        """Return whether a site rests in a round."""
        rest = self._rests.get(name)
        return rest is not None and (round <= rest.last_round or self.clock() < rest.until)

    def resting(self, round: int) -> list[str]:
        """Return the names of the sites that rest in a round, sorted."""
        return sorted(name for name in self._rests if self.rests(name, round))

    def absent(self, ready: Collection[str], round: int) -> list[str]:
        """Return the sites that are worth waiting for: not connected now, but connected recently and not resting."""
        names = (m.name for m in self.members if m.name in ready and m.name not in self.connected)
        return [name for name in names if name in self.awaited and not self.rests(name, round)]

    def give_up(self, names: Collection[str]) -> None:
        """Stop waiting for these sites until they are connected again."""
        self.awaited -= set(names)

    def available(self, ready: Collection[str], round: int, enough: int) -> list[Member]:
        """Return the sites that may be drawn, by number: those that do not rest or, if these are too few, all."""
        present = [m for m in self.members if m.name in ready and m.name in self.connected]
        awake = [m for m in present if not self.rests(m.name, round)]
        return awake if len(awake) >= enough else present


def draw(available: Sequence[Member], size: int, extra: int, seed: int, round: int, attempt: int) -> list[Member]:
    """Draw `size` sites and `extra` more for a round, in ascending order of their numbers.

    With all sites available, the first attempt draws exactly the clients of `engine.server.draw_clients`. A repeated
    round draws anew.
    """
    path = (seed, rng.SAMPLE, round, *([attempt] if attempt > 1 else []))
    size = min(size, len(available))
    chosen = set(rng.generator(*path).choice(len(available), size, replace=False).tolist())
    rest = [i for i in range(len(available)) if i not in chosen]
    if extra and rest:
        more = rng.generator(*path, 0).choice(len(rest), min(extra, len(rest)), replace=False)
        chosen |= {rest[i] for i in more.tolist()}
    return [available[i] for i in sorted(chosen)]
