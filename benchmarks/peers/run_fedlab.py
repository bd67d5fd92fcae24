"""FedLab: FedAvg's server handler and its serial client trainer, standalone."""
# ruff: noqa: E402

from __future__ import annotations

import logging
import sys
import types
from importlib.metadata import version

logging.disable(logging.WARNING)

import torch
from common import Task, arrays, loaded


class Absent(types.ModuleType):
    """Stand in for torchvision, which FedLab's datasets import and this race does not use."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
        sys.modules[name] = Absent(name)

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline

task = Task(sys.argv[1]).prepare()
clients, cohort = task.x.shape[0], task.cohort.shape[1]


class Batches:
    """Give FedLab a client's batches, ready-made, where it expects a loader."""

    def get_dataloader(self, place, batch_size):
        x, y = (torch.from_numpy(a) for a in task.ordered(handler.round, place))
        return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


class Handler(FedAvgServerHandler):
    """Take the plan's clients, which are known by their place in the cohort."""

    num_clients_per_round = cohort

    def sample_clients(self):
        return list(range(cohort))


class Timed(StandalonePipeline):
    """Note the end of every round."""

    def evaluate(self) -> None:
        task.tick()


handler = Handler(loaded(task), task.rounds, cohort / clients)
trainer = FedAvgSerialClientTrainer(loaded(task), clients)
trainer.setup_dataset(Batches())
trainer.setup_optim(1, task.batch, task.lr)
Timed(handler, trainer).main()
task.answer(arrays(handler.model), version=version("fedlab"))
