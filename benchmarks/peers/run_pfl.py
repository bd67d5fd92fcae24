"""pfl (apple/pfl-research): FederatedAveraging on its simulated backend."""

from __future__ import annotations

import sys

import pfl
import torch
from common import Task, arrays, loaded
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

task = Task(sys.argv[1]).prepare()
net = loaded(task).train()
net.loss = lambda x, y, **_: torch.nn.functional.cross_entropy(net(x), y)
net.metrics = lambda x, y, **_: {}
cohort = task.cohort.shape[1]
calls = iter(range(task.rounds * cohort))


def user(number: int) -> Dataset:
    """Return the data of the plan's next client, its epochs one after another."""
    x, y = task.ordered(*divmod(number, cohort))
    return Dataset(raw_data=[torch.from_numpy(x), torch.from_numpy(y)], user_id=str(number))


class Clock(TrainingProcessCallback):
    """Note the end of every round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        task.tick()
        return False, pfl.metrics.Metrics()


data = FederatedDataset(user, lambda: next(calls))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=task.rounds + 1,
        train_cohort_size=cohort,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=data, val_data=data),
    model=model,
    model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch),
    callbacks=[Clock()],
)
task.answer(arrays(net), version=pfl.__version__)
