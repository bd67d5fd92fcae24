"""Run sites whose local work is a plain torch loop: that of Flower's arm in `drills.round_time`.

    python -m drills.torch_worker supervise FOLDER SITE ...   # SuperNodes and these workers, with their pids in FOLDER
    python -m drills.torch_worker work SITE                   # one worker, as that supervisor starts it

All else is fedabml's: transport, start protocol, checks and authentication.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from fedabml.federation import operate
from fedabml.federation.flower.start import prepare_process
from fedabml.federation.flower.worker import Worker
from fedabml.federation.folders import SiteFolder
from fedabml.federation.supervisor import Process, Supervisor

from .torch_site import TorchSite


def processes(site: SiteFolder) -> list[Process]:
    """Return the processes of a site, with this worker in place of its own."""
    node, worker = operate.site_processes(site, f"{site.settings.name}-")
    command = [sys.executable, "-m", "drills.torch_worker", "work", str(site.path)]
    return [node, dataclasses.replace(worker, command=command)]


def main() -> None:
    """Run the supervisor of some sites or the worker of one, until SIGTERM."""
    what, *folders = sys.argv[1:]
    if what == "supervise":
        sites = [SiteFolder(path).check() for path in folders[1:]]
        Supervisor([each for site in sites for each in processes(site)], Path(folders[0])).run()
        return
    prepare_process()
    site = SiteFolder(folders[0]).check()
    Worker(site, TorchSite(site).handle).run()


if __name__ == "__main__":
    main()
