"""What noise on activations costs and gains: time of a step of a cohort, and the variance of its gradients.

    FEDABML_DATA=FOLDER python -m benchmarks.estimators [--threads 2] [--repeats 7] [--only mlp]

Times are the least of several repeats, which take turns, so that a machine with other work to do spoils them little;
the processor's time, of all threads together, is beside the wall's.
The variance is that of a client's gradient over the noise alone, on one minibatch of a real client, summed over all
weights: at the first weights, and after some rounds of training.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from fedabml import algorithms, rng
from fedabml.algorithms.base import Algorithm
from fedabml.data import federate, load
from fedabml.engine.loss import ClientLoss
from fedabml.engine.noise import Noise, gradient_variance
from fedabml.engine.rounds import Simulation
from fedabml.gaussian import Gaussian
from fedabml.runs.prepare import prepare

# The dataset, clients, classes of a client, clients of a round, backend.
COLUMNS: dict[str, tuple[str, int, int, int, str]] = {
    "mlr": ("fashionmnist", 200, 2, 20, "vmap"),
    "mlp": ("emnist", 150, 3, 15, "vmap"),
    "cnn": ("cifar10", 100, 5, 10, "loop"),
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "weight s=1": ("fedabml", {"s": 1}),
    "weight s=2": ("fedabml", {"s": 2}),
    "weight s=2 antithetic": ("fedabml", {"s": 2, "antithetic": True}),
    "weight s=5": ("fedabml", {"s": 5}),
    "local s=1": ("fedabml", {"s": 1, "estimator": "local"}),
    "local s=2": ("fedabml", {"s": 2, "estimator": "local"}),
    "local s=2 antithetic": ("fedabml", {"s": 2, "estimator": "local", "antithetic": True}),
    "flipout s=1": ("fedabml", {"s": 1, "estimator": "flipout"}),
}
BATCH, ROUNDS, KEYS = 50, 5, 60


def simulation(fed: Any, model: str, algorithm: Algorithm, backend: str, cohort: int) -> Simulation:
    """A run of one column."""
    setup = prepare(
        fed, model, algorithm, rounds=1, epochs=1, batch_size=BATCH, device="cpu", backend=backend, chunk=cohort
    )
    return Simulation(setup.cohort, participation=cohort / fed.clients, epochs=1)


@torch.no_grad()
def seconds(sim: Simulation, clients: list[int]) -> tuple[float, float]:
    """The time of a step of some clients side by side, by the wall and of the processor."""
    wall, busy = time.perf_counter(), time.process_time()
    sim.cohort.train(sim.shared, {}, clients, 1, 1)
    steps = -(-int(sim.cohort.fed.train.counts[clients].max()) // BATCH)
    return (time.perf_counter() - wall) / steps, (time.process_time() - busy) / steps


def variances(sim: Simulation, row: Algorithm, q: Gaussian, samples: int) -> tuple[float, float]:
    """Of ∇_m and ∇_ν on the first minibatch of a client."""
    cohort = sim.cohort
    batch = cohort.data.batch(torch.as_tensor(cohort.fed.train[0][:BATCH]))
    noise = Noise.of(row, cohort.network, cohort.fed.x.shape[1:])
    loss = ClientLoss(cohort.network, cohort.likelihood, None, False, noise)
    return gradient_variance(lambda q, key: loss(q, batch, key, samples), q, rng.keys((1,), range(KEYS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=COLUMNS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for model in [args.only] if args.only else COLUMNS:
        dataset, clients, classes, cohort, backend = COLUMNS[model]
        fed = federate(load(dataset), clients=clients, classes_per_client=classes)
        fed = fed.hold_out(0.6, 0) if model == "cnn" else fed  # a few steps are enough
        sims = {
            name: simulation(fed, model, algorithms.make(made, **options), backend, cohort)
            for name, (made, options) in ROWS.items()
        }
        largest = fed.train.counts.argsort()[::-1][:cohort].tolist()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sims}
        for _ in range(args.repeats + 1):  # the first is a warm-up, never the least
            for name, sim in sims.items():
                times[name].append(seconds(sim, largest))
        trained = simulation(fed, model, algorithms.make("fedabml", average=0.0, server_momentum=0.0), backend, cohort)
        first = Gaussian(trained.shared["mean"], trained.shared["logstd"])
        trained.run(ROUNDS)
        last = Gaussian(trained.shared["mean"], trained.shared["logstd"])
        print(f"\n{model}, {dataset}, {cohort} clients side by side ({backend}), {args.threads} threads", flush=True)
        head = "".join(f"{word:>10}" for word in ("ms/step", "× FedAvg", "CPU ms", "× FedAvg"))
        print(f"{'':24}{head}   variance of ∇m, ∇ν: at first{'':10}after {ROUNDS} rounds")
        best = {name: [min(column) for column in zip(*own, strict=True)] for name, own in times.items()}
        for name, sim in sims.items():
            pairs = zip(best[name], best["FedAvg"], strict=True)
            line = f"{name:24}" + "".join(f"{1e3 * t:10.2f}{t / plain:10.2f}" for t, plain in pairs)
            if name != "FedAvg":
                row = sim.cohort.algorithm
                found = [v for q in (first, last) for v in variances(sim, row, q, row.samples_per_step)]
                line += "".join(f"{v:14.3g}" for v in found)
            print(line, flush=True)


if __name__ == "__main__":
    main()
