"""A service on a free port of this machine, and the posteriors that the tests of the room serve."""

import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
import uvicorn

import fedabml
from fedabml import FedABML
from fedabml.serve import ServeOptions, create_app

QUICK = {"rounds": 2, "participation": 1.0, "epochs": 1, "batch_size": 20, "device": "cpu", "evaluate": False}
TOKEN = "a token of these tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def patients(n=240, seed=0):
    g = np.random.default_rng(seed)
    age, sex = g.normal(60, 10, n).round(), g.choice(["f", "m"], n)
    frame = pd.DataFrame({"site": [f"s{i % 3}" for i in range(n)], "age": age, "bmi": g.normal(25, 3, n), "sex": sex})
    frame["ill"] = np.where(age + 5 * (sex == "m") + g.normal(0, 4, n) > 62, "yes", "no")
    frame.loc[::17, "bmi"] = np.nan
    return frame


def table_posterior(seed=0):
    """A posterior of a table, with checks from validation rows."""
    fed = fedabml.read_table(patients(), client="site", target="ill")
    prior = fedabml.train(fed, "mlp", FedABML(lr=0.05), model_options={"hidden": [8]}, **QUICK).prior
    own = patients(120, 5).assign(site="s0")
    return prior.personalize(own, validation=0.4, device="cpu", seed=seed)


def array_posterior(task="classification", shape=(3,)):
    g = np.random.default_rng(0)
    x = [g.normal(size=(40, *shape)) for _ in range(2)]
    y = [(v.reshape(40, -1)[:, 0] > 0).astype(int) if task == "classification" else v.reshape(40, -1)[:, :1] for v in x]
    fed = fedabml.Federation.from_arrays(list(zip(x, y, strict=True)), task=task)
    prior = fedabml.train(fed, "mlr", FedABML(lr=0.05), **QUICK).prior
    return prior.personalize(x[0], y[0], validation=0.4, device="cpu")


@contextmanager
def running(path, token=None, **options):
    """Serve a posterior's file by uvicorn in a thread; yields the address and the service."""
    app = create_app(path, ServeOptions(**options), token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        before = torch.get_num_threads()
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service
        finally:
            server.should_exit = True
            thread.join(30)
            torch.set_num_threads(before)
