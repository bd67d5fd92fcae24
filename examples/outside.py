"""Do clients notice images of another kind? AUROC of entropy and of strangeness, client by client.

    python examples/outside.py fashionmnist mnist --classes 2 --model mlr --seeds 0,1,2 --out records.jsonl
    python examples/outside.py cifar10 svhn --classes 5 --prior runs/cifar10 --seeds 10, --out records.jsonl

Without `--prior` a prior is trained first, in 100 rounds. A fifth of a client's training rows is held out
(`Prior.personalize(validation=0.2)`). The client then predicts its own test rows, and 300 images of the other dataset.
A line of JSON per client and seed is appended to `--out`, and a table of all of its lines is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import fedabml
from fedabml.data import Federation
from fedabml.data.arrays import as_features
from fedabml.experiments.paper.outside import auroc
from fedabml.experiments.study import dataset, federation
from fedabml.runs.config import RunConfig

ROWS = 300  # images from outside that a client looks at
MEASURES = ("entropy", "mutual_information", "distance", "strangeness")  # whose AUROC is recorded


def trained(fed: Federation, model: str, seed: int) -> fedabml.Prior:
    """Train a prior on all clients."""
    algorithm = fedabml.FedABML(lr=0.03, label_prior="none")
    return fedabml.train(fed, model, algorithm, rounds=100, participation=0.1, seed=seed, evaluate=False).prior


def saved(path: Path) -> fedabml.Prior:
    """Return the prior of a run's folder, or of its file."""
    return fedabml.load_prior(path / "shared.safetensors" if path.is_dir() else path)


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


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the means over clients and seeds, a row for each pair of datasets."""
    heads = ["clients of, images of", "seeds", *MEASURES, "strangeness − entropy", "false alarms", "found"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for pair in dict.fromkeys((line["inside"], line["outside"]) for line in lines):
        of = [line for line in lines if (line["inside"], line["outside"]) == pair]
        gains = np.array([line["strangeness"] - line["entropy"] for line in of])
        gain = f"{gains.mean():+.3f} ± {1.96 * gains.std() / len(gains) ** 0.5:.3f}"
        means = {name: np.mean([line[name] for line in of]) for name in (*MEASURES, "false_alarms", "found")}
        cells = [", ".join(pair), str(len({line["seed"] for line in of})), *(f"{means[name]:.3f}" for name in MEASURES)]
        cells += [gain, f"{means['false_alarms']:.1%}", f"{means['found']:.1%}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


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
        prior = saved(Path(options.prior)) if options.prior else trained(fed, options.model, seed)
        for client in range(0, fed.clients, max(1, fed.clients // options.clients)):
            rows = np.random.Generator(np.random.PCG64(client)).choice(len(other), ROWS, replace=False)
            line = {"inside": options.inside, "outside": options.outside, "seed": seed}
            line |= record(prior, fed, client, other[rows])
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table([json.loads(text) for text in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
