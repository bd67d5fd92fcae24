"""Record the coordinator's events: one JSON object per line, appended as they happen; `status` reads them.

The file has a bounded size. A full one becomes `events.old.jsonl`, in place of the one before it, and a new file begins
with the tally of all events until then. A kill at any moment leaves a whole file under the first name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import InputError
from ..files.limits import parse_json
from ..files.paths import explain_errors, open_append, open_regular, write
from .folders import ServerFolder
from .tally import Tally

MOST_BYTES = 16 << 20  # of the events in a file; as many more are in the old one
MAX_BYTES = 1 << 30  # of a file that is read
Event = dict[str, Any]


class Events:
    """A writer of events. If a kill cut a line short, that line is ended before the next one is written."""

    def __init__(self, folder: ServerFolder, on_event: Callable[[Event], None] | None = None):
        self.folder, self.path, self.on_event = folder, folder.events_file, on_event

    def write(self, event: str, **facts: Any) -> None:
        """Append an event with the time, and pass it on."""
        if self._is_full():
            self._begin_anew()
        line = {"time": round(time.time(), 3), "event": event, **facts}
        text = json.dumps(line, allow_nan=False) + "\n"
        with open_append(self.path) as file:
            cut_short = file.tell() and not self._ends_whole()
            file.write((f"\n{text}" if cut_short else text).encode())  # one write
        if self.on_event is not None:
            self.on_event(line)

    def _is_full(self) -> bool:
        """Return whether the events after the file's tally have too many bytes."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size <= MOST_BYTES:
            return False
        with self.path.open("rb") as file:
            first = file.readline()
        return size - (len(first) if b'"event": "tally"' in first else 0) > MOST_BYTES

    def _begin_anew(self) -> None:
        """Keep the full file under another name, and replace it by one with its tally."""
        first = {"time": round(time.time(), 3), "event": "tally", **read_tally(self.folder).to_json()}
        old = self.folder.old_events_file
        with explain_errors(old, "written"):
            old.unlink(missing_ok=True)
            try:
                os.link(self.path, old)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, old)
        write(self.path, json.dumps(first, allow_nan=False) + "\n")

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def read_events(folder: ServerFolder) -> Iterator[Event | None]:
    """Yield the events of the file in order; a damaged line gives None. An unfinished last line is left out."""
    if not folder.events_file.exists():
        return
    with open_regular(folder.events_file, MAX_BYTES) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                event = parse_json(line.decode(), "a line of events")
                yield event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
            except (InputError, UnicodeDecodeError):
                yield None


def read_tally(folder: ServerFolder) -> Tally:
    """Return the tally of all events of a federation."""
    tally = Tally.of(member.name for member in folder.sites())
    for event in read_events(folder):
        tally.add(event)
    return tally
