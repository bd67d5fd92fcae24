"""What tests/engine/test_processes.py runs in one process and, under torchrun, in several.

Called as `many.py TASK FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import fedabml
from fedabml import InputError, TrainingError
from fedabml.algorithms import make
from fedabml.engine import client, client_states, processes
from fedabml.engine.rounds import Simulation

SIZES = (9, 20, 14, 7, 31, 4, 12)
# Algorithms that keep nothing and that do, a server that owns nothing, draws, weights, averages; momentum as well.
CASES = {
    "fedabml": ("fedabml", {"prior_std": "learned", "average": 0.5, "server_momentum": 0.3}, {}),
    "fedavg": ("fedavg-ft", {"weights": "samples", "momentum": 0.5}, {"chunk": 2}),
    "ditto": ("ditto", {}, {}),
    "scaffold": ("scaffold-ft", {"weights": "samples"}, {}),
    "local": ("local", {"momentum": 0.5}, {"chunk": 1}),
    "fedpop": ("fedpop", {}, {}),
    "fedabml, one client": ("fedabml", {}, {"participation": 0.1}),  # so that others have none
    "ditto, one client": ("ditto", {}, {"participation": 0.1}),
    "fedabml, loop": ("fedabml", {"k": 2, "s": 2}, {"backend": "loop"}),
}
RESUMED = ("fedabml", "ditto")
SOME = {"eval_clients": 3, "eval_all": False}


def federation(task="classification"):
    g = np.random.default_rng(0)

    def client(n):
        x = g.normal(size=(n, 4)).astype(np.float32)
        return (x, g.integers(0, 3, n)) if task == "classification" else (x, x[:, :2] + g.normal(size=(n, 2)))

    train = [client(n) for n in SIZES]
    test = [client(n) for n in (5, 3, 0, 6, 2, 4, 1)]  # one has nothing to be scored on
    return fedabml.Federation.from_arrays(train, test, **({"classes": 3} if task == "classification" else {}))


def train(name, out=None, rounds=4, resume=False, **options):
    kind, hyper, words = CASES[name]
    words = {"participation": 0.6, "epochs": 1, "batch_size": 6, "seed": 3, "device": "cpu", "dtype": "float64"} | words
    words |= {"model_options": {"hidden": (4,)}, "eval_every": 2}
    hyper = {"personal_epochs": 1, "predict_samples": 3} | hyper
    task = options.pop("task", "classification")
    algorithm = make(kind, **hyper | options.pop("hyper", {}))
    return fedabml.train(federation(task), "mlp", algorithm, rounds=rounds, out=out, resume=resume, **(words | options))


def numbers(run):
    """What a run must agree in, as arrays."""
    strip = [{k: v for k, v in line.items() if k != "seconds"} for line in run.history]
    values = [v for line in strip for v in (line["loss"], *line.get("eval", {}).values()) if isinstance(v, float)]
    traffic = [v for line in strip for v in (line["round"], line["bytes_up"], line["bytes_down"], *line["clients"])]
    arrays = {f"shared.{k}": v.numpy() for k, v in run.prior.shared.items()}
    arrays |= {f"clients.{k}": v for k, v in run.evaluation.clients.items()}
    return arrays | {"history": np.array(values), "traffic": np.array(traffic, float)}


def save(folder, name, run):
    np.savez(folder / f"{name}.{processes.rank_and_size()[0]}.npz", **numbers(run))


def equality(folder):
    for name in CASES:
        save(folder, name, train(name))
    save(folder, "regression", train("fedabml", task="regression"))
    calls = []
    quick = train("fedavg", on_round=calls.append, on_start=lambda setup, sim: calls.append(sim.round))
    assert len(quick.history) == 4 and len(calls) == (5 if processes.rank_and_size()[0] == 0 else 0)
    words = []
    for hyper, options in (({"lr": 1e200}, {}), ({"personal_lr": 1e200}, {"eval_every": 0})):
        try:
            train("ditto" if not words else "fedavg", hyper=hyper, **options)
        except TrainingError as error:
            words.append(str(error))
    rank, draw = processes.rank_and_size()[0], Simulation.draw

    def drifting(sim):
        if rank == 1 and sim.round == 1:
            sim.return_to(sim.server._replace(shared={k: v * (1 + 1e-15) for k, v in sim.shared.items()}))
        return draw(sim)

    Simulation.draw = drifting
    for options in ({"seed": rank}, {}):
        try:
            train("fedavg", **options)
        except (InputError, TrainingError) as error:
            words.append(str(error))
    (folder / f"errors.{processes.rank_and_size()[0]}.json").write_text(json.dumps(words))


def crowded(folder):
    """Process 1 has memory for one client at a time, none has memory for what clients keep, and some are scored."""
    client_states.host_memory = lambda: (1000, 10)
    real, rank = client.client_round, processes.rank_and_size()[0]

    def limited(lanes, *args):
        if rank == 1 and len(lanes) > 1:
            raise torch.OutOfMemoryError("full")
        return real(lanes, *args)

    client.client_round = limited
    train("ditto", folder / "crowded", rounds=2, **SOME)
    save(folder, "crowded", train("ditto", folder / "crowded", resume=True, **SOME))


def halves(folder):
    """Goes on with runs that others began, and begins some for them."""
    for name in RESUMED:
        save(folder, f"{name} resumed", train(name, folder / name, resume=True))
        train(name, folder / f"{name} half", rounds=2)


if __name__ == "__main__":
    {"equality": equality, "halves": halves, "crowded": crowded}[sys.argv[1]](Path(sys.argv[2]))
