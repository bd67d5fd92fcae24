"""No library: the bare arithmetic of FedAvg in one process, a client after another."""

from __future__ import annotations

import sys

import torch
from common import Task, arrays, loaded

task = Task(sys.argv[1]).prepare()
net = loaded(task).train()
params = list(net.parameters())
now = [p.detach().clone() for p in params]
sgd = torch.optim.SGD(params, lr=task.lr, foreach=True)
for t in range(task.rounds):
    total = [torch.zeros_like(p) for p in now]
    for place in range(task.cohort.shape[1]):
        with torch.no_grad():
            torch._foreach_copy_(params, now)
        x, y = (torch.from_numpy(a) for a in task.ordered(t, place))
        for xs, ys in zip(x.split(task.batch), y.split(task.batch), strict=True):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(net(xs), ys).backward()
            sgd.step()
        with torch.no_grad():
            torch._foreach_add_(total, params, alpha=1 / task.cohort.shape[1])
    now = total
    task.tick()
with torch.no_grad():
    torch._foreach_copy_(params, now)
task.answer(arrays(net), version=torch.__version__)
