"""Record the coordinator's events: one JSON object per line, appended as they happen; `status` reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.paths import open_append

Event = dict[str, Any]


class Events:
    """A file of events. If a kill cut a line short, that line is ended before the next one is written."""

    def __init__(self, path: Path, on_event: Callable[[Event], None] | None = None):
        self.path, self.on_event = path, on_event

    def write(self, event: str, **facts: Any) -> None:
        """Append an event with the time, and pass it on."""
        line = {"time": round(time.time(), 3), "event": event, **facts}
        text = json.dumps(line, allow_nan=False) + "\n"
        with open_append(self.path) as file:
            cut_short = file.tell() and not self._ends_whole()
            file.write((f"\n{text}" if cut_short else text).encode())  # one write
        if self.on_event is not None:
            self.on_event(line)

    def any_round(self) -> bool:
        """Return whether the file records a finished round."""
        if not self.path.is_file():
            return False
        with self.path.open("rb") as file:
            return any(b'"event": "round"' in line for line in file)

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"
