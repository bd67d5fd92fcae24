"""Run sites whose local work is another than fedabml's; transport, start protocol, checks and secrets are fedabml's.

    python -m drills.other_site supervise KIND FOLDER SITE ... # SuperNodes and workers; pids in FOLDER
    python -m drills.other_site work KIND SITE                # one worker, as that supervisor starts it

The kinds: `torch` trains with the plain torch loop of Flower's arm in `drills.round_time`; `falseN` trains as every
site does and then multiplies its change by N, which may be negative.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from fedabml.federation import operate
from fedabml.federation.flower.start import prepare_process
from fedabml.federation.flower.worker import Worker
from fedabml.federation.folders import SiteFolder
from fedabml.federation.site import Site
from fedabml.federation.supervisor import Process, Supervisor

from .false_site import FalseSite
from .torch_site import TorchSite


def processes(kind: str, site: SiteFolder) -> list[Process]:
    """Return the processes of a site, with this worker in place of its own."""
    node, worker = operate.site_processes(site, f"{site.settings.name}-")
    command = [sys.executable, "-m", "drills.other_site", "work", kind, str(site.path)]
    return [node, dataclasses.replace(worker, command=command)]


def other_site(kind: str, folder: SiteFolder) -> Site:
    """Return the site of a kind."""
    return TorchSite(folder) if kind == "torch" else FalseSite(folder, float(kind.removeprefix("false")))


def main() -> None:
    """Run the supervisor of some sites or the worker of one, until SIGTERM."""
    what, kind, *folders = sys.argv[1:]
    if what == "supervise":
        sites = [SiteFolder(path).check() for path in folders[1:]]
        Supervisor([each for site in sites for each in processes(kind, site)], Path(folders[0])).run()
        return
    prepare_process()
    site = SiteFolder(folders[0]).check()
    Worker(site, other_site(kind, site).handle).run()


if __name__ == "__main__":
    main()
