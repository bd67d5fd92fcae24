"""Print the status of a federation or a site in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import InputError
from ..federation import status_page as shown
from ..federation.folders import ServerFolder, SiteFolder
from ..federation.status import read, read_site
from ..files.paths import write
from .console import console, print_line, table


def show(folder: ServerFolder | SiteFolder, *, as_json: bool, page: Path | None, clear: bool) -> str:
    """Print the status of a folder once, on a cleared screen if there is one; return its state."""
    if isinstance(folder, ServerFolder):
        return _show_server(folder, as_json, page, clear)
    if page:
        raise InputError("--page shows a federation. Give the operator's folder.")
    return _show_site(folder, as_json, clear)


def _show_server(folder: ServerFolder, as_json: bool, page: Path | None, clear: bool) -> str:
    found = read(folder)
    if page:
        write(page, shown.page(found))
    if as_json:
        print_line(json.dumps(found.as_json(), allow_nan=False))
        return found.state
    if clear:
        console().clear()
    table(("", ""), shown.facts(found))
    table(shown.SITE_HEAD, shown.site_rows(found.sites))
    for title, head, rows in (
        ("Rejected replies, the last ones", ("round", "site", "reason"), shown.rejected_rows(found)),
        ("A round's time", ("part", "median"), shown.split_rows(found)),
        ("Processes on this machine", shown.PROCESS_HEAD, shown.process_rows(found.processes)),
    ):
        if rows:
            table(head, rows, title)
    return found.state


def _show_site(folder: SiteFolder, as_json: bool, clear: bool) -> str:
    found = read_site(folder)
    if as_json:
        print_line(json.dumps(found.as_json(), allow_nan=False))
        return found.state
    if clear:
        console().clear()
    table(("", ""), shown.site_facts(found))
    if found.processes:
        table(shown.PROCESS_HEAD, shown.process_rows(found.processes), "Processes on this machine")
    return found.state
