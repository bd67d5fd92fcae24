"""Start a site's worker, and measure the parts of the start: boot of the process, imports, set-up of the site.

This module imports nothing large at its head, so that `start_site` can measure what the imports cost.
`python -m fedabml.federation.flower.start FOLDER` runs the worker.
"""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from .clock import BOOT, process_age

if TYPE_CHECKING:
    from ..folders import SiteFolder
    from ..messages import Order, Reply

log = logging.getLogger("fedabml.federation")


class ProcessStopped(SystemExit):
    """The process was asked to end."""


def prepare_process() -> None:
    """Log to standard error, and raise ProcessStopped in the main thread on SIGTERM and SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

    def stop(number: int, frame: FrameType | None) -> None:
        raise ProcessStopped(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def start_site(path: str) -> tuple[SiteFolder, Callable[[Order], Reply], dict[str, float]]:
    """Import everything and load a site; return its folder, its handler, and the seconds that each part took."""
    from ..folders import SiteFolder
    from ..site import Site
    from . import worker  # noqa: F401 - imported here to be measured

    begin, imports = time.perf_counter(), max(0.0, process_age() - BOOT)
    folder = SiteFolder(path).check()
    site = Site(folder)
    return folder, site.handle, {"boot": BOOT, "imports": imports, "setup": time.perf_counter() - begin}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the worker of a site until SIGTERM."""
    parser = argparse.ArgumentParser(description="The resident worker of a site of a federation")
    parser.add_argument("folder", help="the site's folder")
    options = parser.parse_args(arguments)
    prepare_process()
    folder, handle, seconds = start_site(options.folder)
    from .worker import Worker

    log.info("The worker of site %s is ready after %.1f s.", folder.settings.name, sum(seconds.values()))
    Worker(folder, handle, seconds).run()


if __name__ == "__main__":
    main()
