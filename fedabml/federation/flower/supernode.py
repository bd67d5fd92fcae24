"""Run Flower's own SuperNode with shorter pauses between two requests for messages.

flwr 1.41.0 sleeps 3 s when the SuperLink has no message and 0.5 s while it waits for a reply; neither has an option.
This starts the same program with its module's `time` replaced: a pause is short while messages come and go, and
grows to 1 s when none has come for a minute. The SuperNode tries to reach an absent SuperLink at least every 5 s,
instead of every 20 s. If another version of Flower lacks these names, its own pauses stay.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from typing import Any

VARIABLE = "FEDABML_SUPERNODE_POLL"  # seconds; the proxy's rate limit must allow it
SHORT, IDLE = 0.25, 1.0
ACTIVE = 60.0  # seconds after a message in which pauses are short
RECONNECT = 5.0  # most seconds between two tries to reach a SuperLink that is away
_REPLY_PAUSE = 0.1


class Pauses:
    """This object replaces the module `time` in the SuperNode's loop; only `sleep` differs."""

    def __init__(self, short: float = SHORT, idle: float = IDLE) -> None:
        self._short, self._idle = short, max(short, idle)
        self._active = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for a shorter time than Flower asks for."""
        now = time.monotonic()
        if seconds < 1:  # it waits for a reply, so a message has come
            self._active = now
            time.sleep(min(seconds, _REPLY_PAUSE))
        else:
            time.sleep(min(seconds, self._short if now - self._active < ACTIVE else self._idle))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    """Run `flower-supernode` with the arguments of this process."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    shorten_pauses()
    flower_supernode()


def shorten_pauses() -> None:
    """Replace the names in Flower's modules that decide how long a SuperNode sleeps."""
    with suppress(ImportError, AttributeError, ValueError):
        loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
        if loop.time is time:
            loop.time = Pauses(min(max(float(os.environ.get(VARIABLE, SHORT)), 0.05), 3.0))
    with suppress(ImportError, AttributeError):
        retry: Any = importlib.import_module("flwr.supercore.retry.http_retry")
        retry.MAX_RETRY_DELAY = min(retry.MAX_RETRY_DELAY, RECONNECT)


if __name__ == "__main__":
    main()
