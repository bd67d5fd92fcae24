"""fedabml itself, by its public function."""

from __future__ import annotations

import sys

from common import Task, arrays, loaded

import fedabml

task = Task(sys.argv[1])
fed = fedabml.Federation.from_arrays(list(zip(task.x, task.y, strict=True)), classes=task.meta["classes"])
run = fedabml.train(
    fed,
    loaded(task),
    fedabml.FedAvg(lr=task.lr),
    rounds=task.rounds,
    participation=task.cohort.shape[1] / task.x.shape[0],
    epochs=task.meta["epochs"],
    batch_size=task.batch,
    device="cpu",
    evaluate=False,
    on_round=lambda line: task.tick(),
)
net = loaded(task)
vector, start = run.prior.shared["mean"], 0
for p in net.parameters():
    p.data = vector[start : start + p.numel()].view(p.shape)
    start += p.numel()
task.answer(arrays(net), version=fedabml.__version__)
