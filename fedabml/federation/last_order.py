"""Record a site's last order and its last problem, which the site's own `status` shows.

The worker writes `run/last_order.json` after every order. A problem stays until an order has been carried out.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import InputError
from ..files.limits import parse_json
from ..files.paths import read_text, write
from .folders import SiteFolder
from .logs import one_line
from .messages import Order, Reply
from .tally import number, table


@dataclass(frozen=True)
class LastOrder:
    """The last order that a site could read (`kind`, empty: none yet), and the last problem unless a success followed.

    `time` is in seconds since the epoch.
    """

    kind: str = ""
    time: float = 0.0
    problem: str = ""


def path(folder: SiteFolder) -> Path:
    """Return the path of a site's record, which the next start of the site may find."""
    return folder.run / "last_order.json"


def read(folder: SiteFolder) -> LastOrder:
    """Return a site's record; it is empty if there is none, or none that can be read."""
    facts = {}
    with suppress(InputError):
        facts = table(parse_json(read_text(path(folder)), f"'{path(folder)}'")) if path(folder).exists() else {}
    seconds = number(facts.get("time")) or 0.0
    return LastOrder(one_line(facts.get("kind", "")), seconds, one_line(facts.get("problem", ""), 600))


def note_reply(folder: SiteFolder, order: Order, reply: Reply) -> None:
    """Record an order and whether the site carried it out, or why not."""
    reasons = reply.facts.get("reasons")
    problem = reply.error or (" ".join(map(str, reasons)) if isinstance(reasons, list) else "")
    _save(folder, LastOrder(order.kind, time.time(), one_line(problem, 600)))


def note_problem(folder: SiteFolder, problem: str) -> None:
    """Record why an order could not even be read."""
    _save(folder, replace(read(folder), problem=one_line(problem, 600)))


def _save(folder: SiteFolder, record: LastOrder) -> None:
    with suppress(InputError):  # a full disk must not keep the site from answering
        write(path(folder), json.dumps(asdict(record)) + "\n", private=True)
