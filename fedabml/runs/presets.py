"""Predefined settings: the lowest layer of a configuration, below a TOML file and flags.

`paper` is the setting of the paper's Table 1 (arXiv 2307.02222). What the paper does not state keeps the library's
default: ν₀, the server's β, FedRep's body epochs, FedPop's chain; pFedBayes has two weight samples. Algorithms that the
paper does not have keep their defaults except for the step size. The two columns of a CIFAR dataset differ only in
classes_per_client: the preset is the first, and --classes-per-client 5 (CIFAR-100: 20) the second. `COLUMNS` are the
settings of all of the paper's tables, and of the embedded digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InputError, nearest
from .config import names

PRESET_NAMES = ("paper",)

RUN: dict[str, Any] = {"rounds": 100, "participation": 0.1, "epochs": 5, "batch_size": 50}


@dataclass(frozen=True)
class Column:
    """A column of the paper's tables: its title, dataset, number of clients, classes of each client, and network."""

    title: str
    dataset: str
    clients: int
    classes: int
    model: str

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a run, but for the dataset, that make the column."""
        return {"clients": self.clients, "classes_per_client": self.classes, "model": self.model}


COLUMNS = {
    "cifar10-2": Column("CIFAR-10 (100,2)", "cifar10", 100, 2, "cnn"),
    "cifar10-5": Column("CIFAR-10 (100,5)", "cifar10", 100, 5, "cnn"),
    "cifar100-5": Column("CIFAR-100 (100,5), CNN", "cifar100", 100, 5, "cnn100"),
    "cifar100-20": Column("CIFAR-100 (100,20), CNN", "cifar100", 100, 20, "cnn100"),
    "emnist": Column("EMNIST (150,3)", "emnist", 150, 3, "mlp"),
    "fashionmnist": Column("FashionMNIST (200,2)", "fashionmnist", 200, 2, "mlr"),
    "cifar100-5-resnet": Column("CIFAR-100 (100,5), ResNet-18", "cifar100", 100, 5, "resnet18"),
    "cifar100-20-resnet": Column("CIFAR-100 (100,20), ResNet-18", "cifar100", 100, 20, "resnet18"),
    "mnist": Column("MNIST (200,2)", "mnist", 200, 2, "mlr"),
    "digits": Column("digits (40,5)", "digits-few", 40, 5, "mlp"),
}
# The column that a preset takes for a dataset.
_PRESET = {
    "cifar10": "cifar10-2",
    "cifar100": "cifar100-5-resnet",
    "emnist": "emnist",
    "fashionmnist": "fashionmnist",
}


def layer(name: str, dataset: str | None) -> dict[str, Any]:
    """Return the keys of a preset for a dataset: those of the run, and a table for every algorithm.

    For data that the paper has no column for, the partition and the network keep their defaults.
    """
    if name not in PRESET_NAMES:
        raise InputError(f"There is no preset '{name}'.{nearest(name, PRESET_NAMES)}")
    column = COLUMNS[_PRESET[dataset]].keys if dataset in _PRESET else {}
    return RUN | column | _paper(cifar=dataset in ("cifar10", "cifar100"))


def _paper(cifar: bool) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of every algorithm, by name."""
    lr = 1e-3 if cifar else 1e-2
    fine_tuning = {"personal_epochs": 5}  # the paper states neither the number nor the optimiser, which is SGD here
    untrained = {"newcomer": "initial"}  # where a client without a model of its own begins, as in the published cells
    prox = {"mu": 0.25 if cifar else 0.5}
    stated: dict[str, dict[str, Any]] = {
        "fedavg-ft": fine_tuning,
        "fedprox": prox,
        "fedprox-ft": prox | fine_tuning,
        "fedrep": {"personal_epochs": 0},
        "scaffold": {"server_lr": 1.0},
        "scaffold-ft": {"server_lr": 1.0} | fine_tuning,
        "fedbabu": fine_tuning,
        "perfedavg": {"alpha": 1e-4} | fine_tuning,
        "pfedme": {"lam": 15.0, "k": 5} | fine_tuning,  # its inner step size is lr, as by default
        "ditto": {"lam": 0.75, "personal_epochs": 0} | untrained,
        "apfl": untrained,
        "fedpop": untrained,
        "pfedbayes": {"lam": 0.05, "k": 5, "s": 2, "estimator": "weight", "personal_epochs": 0} | untrained,
        # Algorithm 1 as printed: θ = (m, ν) moves with every minibatch at η' = η, and a client's φ at η throughout.
        # The paper tunes λ and never says its value: 1 is its own loss, the exact ELBO. The KL's pull is implicit,
        # because the explicit step goes non-finite.
        "fedabml": {
            "k": 5,
            "s": 5,
            "estimator": "weight",
            "lam": 1.0,
            "prior_step": "euclidean",
            "prior_every": "batch",
            "prior_std": "learned",
            "kl_step": "implicit",
            "short_batch": "whole",
            "aggregate": "mean",
            "label_prior": "none",
            "average": 0.0,
            "server_momentum": 0.0,
            "personal_lr": lr,
        }
        | fine_tuning,
    }
    return {algorithm: {"lr": lr, "personal_lr": None} | stated.get(algorithm, {}) for algorithm in names("algorithm")}
