"""Run sites whose local work is a plain torch loop: that of Flower's arm in `drills.round_time`.

    python -m drills.torch_worker supervise FOLDER SITE ...   # SuperNodes and these workers, with their pids in FOLDER
    python -m drills.torch_worker work SITE                   # one worker, as that supervisor starts it

All else is fedabml's: transport, start protocol, checks and authentication. The algorithm must be FedAvg, whose shared
state and update are the weights, and the data one .npz file without normalisation.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedabml.federation import operate
from fedabml.federation.flower.start import prepare_process
from fedabml.federation.flower.worker import Worker
from fedabml.federation.folders import SiteFolder
from fedabml.federation.messages import Order, Reply
from fedabml.federation.site import Site
from fedabml.federation.supervisor import Process, Supervisor

from .torch_client import load, network, train


class TorchSite(Site):
    """A site that trains as the torch client of Flower's arm does."""

    def _train(self, order: Order) -> Reply:
        started = time.perf_counter()
        x, y = load(self.folder.settings.data)
        model = network()
        with torch.no_grad():
            vector_to_parameters(order.tensors["mean"], model.parameters())
        with torch.enable_grad():
            loss = train(model, x, y)
        update = {"mean": parameters_to_vector(model.parameters()).detach().clone()}
        return order.reply(samples=len(x), loss=loss, tensors=update, seconds={"work": time.perf_counter() - started})


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
