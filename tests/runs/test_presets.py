"""Presets: the paper's settings, under everything that a person says."""

import pytest

from fedabml.algorithms import REGISTRY, make
from fedabml.errors import InputError
from fedabml.runs import presets
from fedabml.runs.config import RunConfig
from tests.cli.command import run

pytestmark = pytest.mark.usefixtures("one_thread_here")

# Table 1 of the paper: clients, classes per client, network, step size, FedProx's μ.
COLUMNS = {
    "cifar10": (100, 2, "cnn", 1e-3, 0.25),
    "cifar100": (100, 5, "resnet18", 1e-3, 0.25),
    "emnist": (150, 3, "mlp", 1e-2, 0.5),
    "fashionmnist": (200, 2, "mlr", 1e-2, 0.5),
}


@pytest.mark.parametrize(("dataset", "column"), COLUMNS.items())
def test_paper_has_the_columns_of_table_1(dataset, column):
    layer = presets.layer("paper", dataset)
    config = RunConfig.of(layer, {"dataset": dataset, "algorithm": "fedprox-ft"})
    algorithm = config.algorithm_object()
    assert (config.clients, config.classes_per_client, config.model, algorithm.lr, algorithm.mu) == column
    assert (config.rounds, config.participation, config.epochs, config.batch_size) == (100, 0.1, 5, 50)


@pytest.mark.parametrize("dataset", [*COLUMNS, "digits", None])
def test_paper_has_a_sound_table_for_every_algorithm(dataset):
    layer = presets.layer("paper", dataset)
    made = {name: make(name, **layer[name]) for name in REGISTRY}
    assert {a.lr for a in made.values()} == {1e-3 if dataset in ("cifar10", "cifar100") else 1e-2}
    assert made["ditto"].lam == 0.75 and made["perfedavg"].alpha == 1e-4 and made["scaffold"].server_lr == 1
    assert (made["pfedme"].lam, made["pfedme"].k, made["pfedme"].inner_lr) == (15, 5, None)
    assert (made["pfedbayes"].lam, made["pfedbayes"].k) == (0.05, 5)
    assert {a.personal_epochs for name, a in made.items() if name.endswith("-ft")} == {5}
    assert {made[name].personal_epochs for name in ("fedavg", "fedprox", "scaffold")} == {0}


def test_papers_fedabml_is_algorithm_1_as_printed():
    ours = make("fedabml", **presets.layer("paper", "cifar10")["fedabml"])
    assert (ours.k, ours.s, ours.lam, ours.personal_epochs) == (5, 5, 1.0, 5)
    assert (ours.prior_step, ours.prior_every, ours.prior_std) == ("euclidean", "batch", "learned")
    assert (ours.label_prior, ours.average, ours.kl_step) == ("none", 0.0, "implicit")
    assert ours.theta_lr == ours.effective_personal_lr == ours.lr == 1e-3


def test_a_dataset_without_a_column_gets_what_is_common():
    for dataset in ("digits", "svhn", None):
        keys = presets.layer("paper", dataset).keys() - REGISTRY.keys()
        assert keys == {"rounds", "participation", "epochs", "batch_size"}


def test_train_shows_the_preset_and_flags_overrule_it():
    said = run("train", "--preset", "paper", "--dataset", "digits", "--algorithm", "ditto", "--dry-run").stdout
    assert "100, 10 of 100 clients in each, 5 epoch(s)" in said and "lr=0.01" in said and "lam=0.75" in said
    words = ("--rounds", 7, "--lr", 0.2, "--set", "ditto.lam=0.5")
    said = run("train", "--preset", "paper", "--algorithm", "ditto", "--dry-run", *words).stdout
    assert "7, 10 of 100 clients in each" in said and "lr=0.2" in said and "lam=0.5" in said


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(InputError, match=r"There is no preset 'papper'. Did you mean 'paper'"):
        presets.layer("papper", None)
    assert "Did you mean 'paper'" in run("train", "--preset", "papr", "--dry-run", code=2).stderr
