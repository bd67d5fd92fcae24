"""Count what the coordinator's events say: rounds, losses, traffic, and how each site answered.

A tally is all that remains of events when their file is full: it is the first line of the next one, as the event
`tally`. So it is of bounded size, and counting goes on from it. Values may be anything, because a file can be damaged;
texts that sites sent are cleaned of control characters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .logs import one_line

RECENT = 10  # rounds whose times are kept
MOST_LOSSES = 4000  # if there are more, every second one is forgotten
MOST_REASONS = 100  # different reasons that are counted
OTHER_ORDERS = ("late: ", "twice: ", "its nonce was never sent")  # reasons that say nothing of this order's reply
SHOWN_REJECTIONS = 20  # rejected replies that are kept with site and reason


@dataclass
class SiteStatus:
    """One site as the server sees it. `last_round` is the last round in which its reply counted (0: none yet).

    `counted` is the number of replies that counted when they came. Those of rounds that the operator went back over,
    and that were trained again, stay in it.
    """

    name: str
    connected: bool | None = None
    last_round: int = 0
    resting: bool = False
    counted: int = 0
    missed: int = 0
    rejected: int = 0
    removed: bool = False
    prior_round: int | None = None
    loss: float | None = None
    note: str = ""
    failure: str = ""  # why its last order brought no valid reply; empty if it did not answer in time
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Tally:
    """What all events until now say about a federation with these sites."""

    sites: dict[str, SiteStatus]
    last: str = ""  # the kind of the last event
    runs: int = 0
    rounds_done: int = 0
    repeated: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    damaged: int = 0  # lines that cannot be read
    problem: str = ""
    gave_up: str = ""  # why the coordinator gave up, unless it went on
    losses: list[tuple[int, float]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    recent: list[dict[str, dict[str, float]]] = field(
        default_factory=list
    )  # seconds of the server, of the slowest site
    rejected: list[dict[str, Any]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, names: Iterable[str]) -> Tally:
        """Return the tally before the first event."""
        return cls({name: SiteStatus(name) for name in names})

    def add(self, event: dict[str, Any] | None) -> None:
        """Count an event; None is a line that cannot be read."""
        if event is None:
            self.damaged += 1
            return
        kind = event["event"]
        if kind == "tally":
            self._restore(event)
            return
        self.last = kind
        number = whole(event.get("round"))
        self.bytes_down += whole(event.get("bytes_down"))
        self.bytes_up += whole(event.get("bytes_up"))
        self.runs += kind == "start"
        self.repeated += kind == "repeat"
        if kind == "round":
            self._add_round(event, number)
        if kind in ("round", "card", "finished"):  # a kill may come after the save of a round and before its event
            self.rounds_done = max(self.rounds_done, number)
        if kind == "back":  # the operator went back to the state after this round
            self.rounds_done, self.losses = number, [pair for pair in self.losses if pair[0] <= number]
        if kind in ("round", "repeat", "waiting", "prior"):
            self._add_sites(event, number)
        self._add_rejected(event, number)
        for name, text in table(event.get("refused")).items():
            if name in self.sites:
                self.sites[name].note = one_line(text)
        if kind in ("gave_up", "error"):
            self.problem = one_line(event.get("error") or event.get("reason") or event.get("message") or "", 600)
        elif kind in ("round", "start"):
            self.problem = self.gave_up = ""
        if kind == "gave_up":
            self.gave_up = self.problem or "The coordinator gave up."

    def to_json(self) -> dict[str, Any]:
        """Return the content of an event `tally`."""
        return asdict(self) | {"reasons": dict(self.reasons.most_common(MOST_REASONS))}

    def _restore(self, event: dict[str, Any]) -> None:
        """Go on from an earlier tally. Values of other types than `to_json` writes are left out."""
        plain = {"str": str, "int": int}
        for each in fields(self):
            kind, value = plain.get(str(each.type)), event.get(each.name)
            if kind is not None and type(value) is kind:
                setattr(self, each.name, value)
        pairs = event.get("losses") if isinstance(event.get("losses"), list) else []
        self.losses = [(whole(p[0]), number(p[1]) or 0.0) for p in pairs or () if isinstance(p, list) and len(p) == 2]
        self.scores = numbers(event.get("scores"))
        self.recent = [{name: numbers(part) for name, part in each.items()} for each in tables(event.get("recent"))]
        self.rejected = [
            {"round": whole(each.get("round")), **{key: one_line(each.get(key, ""), 200) for key in ("site", "reason")}}
            for each in tables(event.get("rejected"))
        ]
        self.reasons = Counter({one_line(k, 200): whole(n) for k, n in table(event.get("reasons")).items()})
        for name, facts in table(event.get("sites")).items():
            if name in self.sites and isinstance(facts, dict):
                found = SiteStatus(name)
                for part in ("last_round", "counted", "missed", "rejected"):
                    setattr(found, part, whole(facts.get(part)))
                found.connected = facts.get("connected") if isinstance(facts.get("connected"), bool) else None
                found.resting, found.note = facts.get("resting") is True, one_line(facts.get("note") or "")
                found.failure = one_line(facts.get("failure") or "", 200)
                found.loss, found.seconds = number(facts.get("loss")), numbers(facts.get("seconds"))
                found.prior_round = None if facts.get("prior_round") is None else whole(facts.get("prior_round"))
                self.sites[name] = found

    def _add_round(self, event: dict[str, Any], round: int) -> None:
        if (loss := number(event.get("loss"))) is not None:
            self.losses.append((round, loss))
            if len(self.losses) > MOST_LOSSES:
                del self.losses[-2::-2]  # the newest one stays
        if scores := numbers(event.get("scores")):
            self.scores = scores
        sites = [numbers(seconds) for seconds in table(event.get("site_seconds")).values()]
        slowest = max(sites, key=lambda each: sum(each.values()), default={})
        self.recent = [*self.recent, {"server": numbers(event.get("seconds")), "site": slowest}][-RECENT:]

    def _add_rejected(self, event: dict[str, Any], round: int) -> None:
        for each in tables(event.get("rejected")):
            facts = {key: one_line(each.get(key, ""), 200) for key in ("site", "reason")}
            times = max(1, whole(each.get("times")))
            self.reasons[facts["reason"]] += times
            self.rejected = [*self.rejected, {"round": round, **facts}][-SHOWN_REJECTIONS:]
            if facts["site"] in self.sites:
                self.sites[facts["site"]].rejected += times

    def _add_sites(self, event: dict[str, Any], round: int) -> None:
        """Update the sites from an event about a round."""
        sites, kind = self.sites, event["event"]
        for name in names(event.get("valid"), sites):
            if kind == "round":
                sites[name].last_round, sites[name].counted = round, sites[name].counted + 1
                sites[name].note = ""
        if kind in ("round", "repeat"):
            for name in names(event.get("sites"), sites):
                sites[name].failure = _failure(event, name)
        for name in names(event.get("missing"), sites):
            sites[name].missed += kind != "prior"
        for name, loss in table(event.get("losses")).items():
            if name in sites:
                sites[name].loss = number(loss)
        if kind == "waiting":
            absent = set(names(event.get("sites"), sites))
            for name, site in sites.items():
                site.connected = name not in absent
        if kind == "prior":
            for name in names(event.get("sites"), sites):
                sites[name].connected, sites[name].prior_round = True, round
        for part in ("connected", "resting"):
            if part in event:
                listed = set(names(event[part], sites))
                for name, site in sites.items():
                    setattr(site, part, name in listed)
        for name, seconds in table(event.get("site_seconds")).items():
            if name in sites:
                sites[name].seconds = numbers(seconds)


def _failure(event: dict[str, Any], site: str) -> str:
    """Return why an attempt rejected a site's reply, or an empty text. Replies to other orders do not count."""
    if site in names(event.get("valid"), [site]):
        return ""
    reasons = [
        one_line(each.get("reason", ""), 200) for each in tables(event.get("rejected")) if each.get("site") == site
    ]
    return next((reason for reason in reversed(reasons) if not reason.startswith(OTHER_ORDERS)), "")


# -- values that may be anything ------------------------------------------------------------------------------------
def whole(value: Any) -> int:
    """Return a whole number, or 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def table(value: Any) -> dict[str, Any]:
    """Return a table, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a table by their cleaned names."""
    return {one_line(name, 40): v for name, each in table(value).items() if (v := number(each)) is not None}


def names(value: Any, known: Iterable[str]) -> list[str]:
    """Return the known names of a list."""
    listed = value if isinstance(value, list | dict) else []
    return [name for name in listed if isinstance(name, str) and name in known]
