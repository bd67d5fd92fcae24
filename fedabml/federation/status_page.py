"""Format a federation's status for people: as rows of tables for a terminal, and as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..files.formats import duration, size
from .status import ProcessStatus, SiteFolderStatus, SiteStatus, Status

Rows = list[tuple[str, ...]]
SITE_HEAD = ("site", "connected", "last round", "loss", "replies counted", "no reply", "rejected", "note")
PROCESS_HEAD = ("process", "state", "restarts", "last end")
_STATES = {
    "starting": "Starting: the server starts, or it prepares the first round.",
    "running": "Running.",
    "finished": "Finished: all rounds are done.",
    "stopped": "Stopped. To go on: fedabml federation resume.",
    "failed": "Failed. To try again: fedabml federation resume.",
    "gave up": "Gave up. To try again: fedabml federation resume.",
}
_PARTS = {
    "draw": "choose sites",
    "wait": "wait for replies",
    "check": "check replies",
    "merge": "merge updates",
    "save": "save the state",
}


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def facts(status: Status) -> list[tuple[str, str]]:
    """Return the lines of the summary: a word and its value."""
    loss = f"{status.losses[-1][1]:.4g} (round {status.losses[-1][0]})" if status.losses else "–"
    rows = [
        ("federation", f"{status.name} at {status.address}, algorithm {status.algorithm}"),
        ("state", _state(status)),
        *([("problem", status.problem)] if status.problem else []),
        ("rounds", f"{status.rounds_done} of {status.rounds}{_repeats(status)}"),
        ("loss", loss),
        *((name, f"{value:.4g}") for name, value in status.scores.items()),
        ("time left", f"{_span(status.seconds_left)} ({_span(status.seconds_per_round)} a round)"),
        ("traffic", f"{size(status.bytes_down)} to the sites, {size(status.bytes_up)} from them"),
        ("rejected", f"{sum(status.reasons.values())} replies" if status.reasons else "none"),
    ]
    if status.certificate:
        rows.append(("certificate", f"valid until {status.certificate}"))
    if status.app:
        rows.append(("app", status.app))
    if status.runs > 1:
        times = "once" if status.runs == 2 else f"{status.runs - 1} times"
        rows.append(("runs", f"{status.runs}: the federation went on {times} from its saved state"))
    if status.damaged_lines:
        rows.append(("damaged", f"{status.damaged_lines} lines of state/events.jsonl cannot be read"))
    return rows


def _state(status: Status) -> str:
    """Return the state in words; a federation that waits for sites names those that are not there."""
    absent = [site.name for site in status.sites if not site.removed and not site.connected]
    if status.state == "starting" and any(site.connected is not None for site in status.sites) and absent:
        return f"Starting: waiting for {', '.join(absent[:20])}{' and others' if len(absent) > 20 else ''}."
    return _STATES.get(status.state, status.state)


def _repeats(status: Status) -> str:
    return f", {status.attempts_repeated} attempts repeated" if status.attempts_repeated else ""


def site_rows(sites: Sequence[SiteStatus]) -> Rows:
    """Return a row per site, under `SITE_HEAD`."""
    return [
        (
            site.name,
            "removed" if site.removed else {True: "yes", False: "no", None: "–"}[site.connected],
            str(site.last_round or "–"),
            "–" if site.loss is None else f"{site.loss:.4g}",
            str(site.counted),
            str(site.missed),
            str(site.rejected),
            _note(site),
        )
        for site in sites
    ]


def _note(site: SiteStatus) -> str:
    if site.note or site.resting:
        return site.note or f"rests: {site.failure or 'it did not answer in time'}"
    return "" if site.prior_round is None else f"has the prior of round {site.prior_round}"


def process_rows(processes: Sequence[ProcessStatus]) -> Rows:
    """Return a row per process of this machine, under `PROCESS_HEAD`."""
    rows: Rows = []
    for process in processes:
        left = process.next_start - time.time()
        state = f"starts again in {duration(left)}" if process.state == "waiting" and left > 0 else process.state
        rows.append((process.name, state, str(process.restarts), process.last_exit or "–"))
    return rows


def split_rows(status: Status) -> Rows:
    """Return the parts of a round and their median seconds. Those of sites are of the slowest site in each round."""
    named = {
        key: f"slowest site: {key.removeprefix('site: ')}" if key.startswith("site: ") else _PARTS.get(key, key)
        for key in status.split
    }
    return [(named[key], f"{seconds:.3f} s") for key, seconds in status.split.items()]


def rejected_rows(status: Status) -> Rows:
    """Return the last replies that were rejected: round, site and reason."""
    return [(str(each["round"]), each["site"], each["reason"]) for each in reversed(status.rejected)]


def site_facts(status: SiteFolderStatus) -> Rows:
    """Return the lines of a site's own status: a word and its value."""
    prior = "none yet" if status.prior_round is None else f"of round {status.prior_round}"
    if status.prior_digest:
        prior += f", digest {status.prior_digest}"
    return [
        ("site", f"{status.name}, server {status.server}"),
        ("state", "Running." if status.state == "running" else "Stopped. To go on: fedabml federation resume."),
        *([("problem", status.problem)] if status.problem else []),
        ("last order", _last_order(status)),
        ("data", status.data or "none: give them with fedabml federation join --data"),
        ("inputs", "agreed with the server" if status.card else "not yet agreed with the server"),
        ("prior", prior),
        ("may leave", f"updates, and {', '.join(status.allowed)}" if status.allowed else "updates only"),
    ]


def _last_order(status: SiteFolderStatus) -> str:
    if status.last_order_time is None:
        return "none yet"
    return f"{status.last_order}, {duration(max(0.0, status.time - status.last_order_time))} ago"


def page(status: Status) -> str:
    """Return the status as a complete HTML document. All texts are escaped."""
    from ..report.canvas import PAGE
    from ..report.charts import Axis, Series, line_chart
    from ..report.page import Figure, Row, Section, Table, TableCell, Tile, document

    def table(head: Sequence[str], rows: Rows, fold: str = "") -> list[Table]:
        return [Table(head, [Row([TableCell(text) for text in row]) for row in rows], fold=fold)] if rows else []

    words = dict(facts(status))
    done = f"{status.rounds_done} / {status.rounds}"
    tiles = [
        Tile("rounds", done, "done of all"),
        Tile("loss", f"{status.losses[-1][1]:.4g}" if status.losses else "–", "training loss of the last round"),
        Tile("time left", _span(status.seconds_left), f"{_span(status.seconds_per_round)} a round"),
        Tile("traffic", size(status.bytes_down + status.bytes_up), words["traffic"]),
        *(Tile(name, f"{value:.4g}", "of the sites that send scores") for name, value in status.scores.items()),
    ]
    figures = []
    if len(status.losses) > 1:
        series = [Series("loss", [loss for _, loss in status.losses], x=[number for number, _ in status.losses])]
        reading = "The mean training loss of the sites whose replies counted. It should fall and level off."
        x, y = Axis("round", "whole"), Axis("training loss")
        drawn = line_chart(series, title="Loss per round", x=x, y=y, theme=PAGE)
        figures.append(Figure("Loss per round", drawn, reading))
    sections = [
        Section(tiles=tiles, points=[words["state"], *([status.problem] if status.problem else [])]),
        Section("Sites", tables=table(SITE_HEAD, site_rows(status.sites))),
        Section("Training", figures=figures, tables=table(("part of a round", "median time"), split_rows(status))),
        Section("Rejected replies", tables=table(("round", "site", "reason"), rejected_rows(status))),
        Section("Processes", tables=table(PROCESS_HEAD, process_rows(status.processes))),
    ]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.time))
    shown = [each for each in sections if each.tiles or each.tables or each.figures]
    return document(f"Federation {status.name}", f"{status.address} · {when}", shown)
