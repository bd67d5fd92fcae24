"""Do clients notice images of another kind? AUROC of entropy and of strangeness, client by client.

    python examples/outside.py fashionmnist mnist --classes 2 --model mlr --seeds 0,1,2 --out records.jsonl
    python examples/outside.py cifar10 svhn --classes 5 --prior runs/cifar10 --seeds 10, --out records.jsonl

Without `--prior` a prior is trained first (100 rounds on all clients). Every fifth of a client's training rows is held
out: `Prior.personalize(validation=0.2)`. The client then predicts its own test rows, and as many images of the other
dataset as `ROWS`. A line of JSON per client and seed is appended to `--out`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import fedabml
from fedabml.data import Federation
from fedabml.data.arrays import as_features
from fedabml.experiments.paper.outside import auroc
from fedabml.experiments.study import dataset, federation
from fedabml.runs.config import RunConfig

ROWS = 300  # images from outside that a client looks at


def trained(fed: Federation, model: str, seed: int) -> fedabml.Prior:
    """Train a prior on all clients."""
    algorithm = fedabml.FedABML(lr=0.03, label_prior="none")
    return fedabml.train(fed, model, algorithm, rounds=100, participation=0.1, seed=seed, evaluate=False).prior


def record(prior: fedabml.Prior, fed: Federation, client: int, outside: np.ndarray) -> dict[str, float]:
    """Personalise one client, and return what its posterior says of inside and outside."""
    train, test = fed.train[client], fed.test[client]
    posterior = prior.personalize(fed.x[train], fed.y[train], seed=client, validation=0.2)
    usual, strange = posterior.predict(fed.x[test]), posterior.predict(outside)
    scores = {
        "entropy": (usual.entropy, strange.entropy),
        "mutual_information": (usual.mutual_information, strange.mutual_information),
        "distance": (usual.checks.distance, strange.checks.distance),
        "strangeness": (usual.checks.strangeness, strange.checks.strangeness),
    }
    line = {name: auroc(inside, out) for name, (inside, out) in scores.items()}
    line["false_alarms"] = float(usual.checks.alarm.mean())
    line["found"] = float(strange.checks.alarm.mean())
    return line | {"client": client, "rows": len(test)}


def main() -> None:
    """Read the command line, and append a record per client and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inside", help="dataset of the clients")
    parser.add_argument("outside", help="dataset that no client has seen")
    parser.add_argument("--classes", type=int, default=2, help="classes per client")
    parser.add_argument("--model", default="mlr")
    parser.add_argument("--prior", help="a run folder or a prior's file, in place of training (one seed)")
    parser.add_argument("--total", type=int, default=100, help="clients of the federation")
    parser.add_argument("--clients", type=int, default=20, help="clients that are scored, evenly spread")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data-dir", help="folder of datasets")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    other = as_features(dataset(options.outside, options.data_dir).x_test, options.outside)
    for seed in [int(seed) for seed in options.seeds.split(",") if seed]:
        config = RunConfig(dataset=options.inside, clients=options.total, classes_per_client=options.classes,
                           seed=seed, data_dir=options.data_dir)  # fmt: skip
        fed = federation(config)
        prior = fedabml.load_prior(options.prior) if options.prior else trained(fed, options.model, seed)
        for client in range(0, fed.clients, max(1, fed.clients // options.clients)):
            rows = np.random.Generator(np.random.PCG64(client)).choice(len(other), ROWS, replace=False)
            line = {"inside": options.inside, "outside": options.outside, "seed": seed}
            line |= record(prior, fed, client, other[rows])
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    lines = [json.loads(text) for text in options.out.read_text().splitlines()]
    lines = [x for x in lines if (x["inside"], x["outside"]) == (options.inside, options.outside)]
    for name in ("entropy", "mutual_information", "distance", "strangeness", "false_alarms", "found"):
        values = [x[name] for x in lines]
        print(f"{name:20s} {np.mean(values):.3f} ± {1.96 * np.std(values) / len(values) ** 0.5:.3f}")
    gains = np.array([x["strangeness"] - x["entropy"] for x in lines])
    print(f"strangeness above entropy by {gains.mean():.3f} ± {1.96 * gains.std() / len(gains) ** 0.5:.3f} "
          f"({(gains > 0).mean():.0%} of {len(gains)} clients and seeds)")  # fmt: skip


if __name__ == "__main__":
    main()
