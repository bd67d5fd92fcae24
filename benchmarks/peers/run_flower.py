"""Flower's simulation engine: a ServerApp with FedAvg and a ClientApp, virtual nodes on Ray."""

from __future__ import annotations

import os
import sys

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))  # noqa: PTH120

import flwr
import torch
from common import Task, arrays, loaded, trainer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER = sys.argv[1]
client_app, server_app = ClientApp(), ServerApp()
task = Task(FOLDER)


@client_app.train()
def train(msg: Message, context: Context) -> Message:
    """Train one client for a round."""
    own, net, sgd = trainer(FOLDER)
    config = msg.content["config"]
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = (torch.from_numpy(a) for a in own.ordered(int(config["server-round"]) - 1, int(config["place"])))
    for xs, ys in zip(x.split(own.batch), y.split(own.batch), strict=True):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(net(xs), ys).backward()
        sgd.step()
    metrics = MetricRecord({"num-examples": len(own.y[0]), "aside": own.aside})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


class Timed(FedAvg):
    """FedAvg that gives every node its place in the cohort and notes the end of a round."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for place, message in enumerate(messages):
            config = ConfigRecord({**message.content["config"], "place": place})
            message.content = RecordDict({**message.content, "config": config})
        return messages

    def aggregate_train(self, server_round, replies):
        done = super().aggregate_train(server_round, replies)
        task.tick()
        task.aside = float(done[1]["aside"])  # workers prepare at the same time: their mean
        return done


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds of the server."""
    net = loaded(task)
    clients, cohort = task.x.shape[0], task.cohort.shape[1]
    strategy = Timed(
        fraction_train=cohort / clients, fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=clients
    )
    done = strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=task.rounds)
    net.load_state_dict(done.arrays.to_torch_state_dict())
    task.answer(arrays(net), version=flwr.__version__)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=task.x.shape[0],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
