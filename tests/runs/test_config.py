"""RunConfig: layers, types, names, and the way there and back."""

import dataclasses
import tomllib

import numpy as np
import pandas as pd
import pytest

from fedabml.algorithms import REGISTRY
from fedabml.data import datasets, recipe
from fedabml.errors import InputError
from fedabml.models import MODELS
from fedabml.runs.config import RunConfig, names, parse_set, read_toml, to_toml, upgrade_config, without_commands


def test_names_read_from_the_source_are_the_registered_ones():
    assert names("algorithm") == tuple(REGISTRY) and len(REGISTRY) >= 15
    assert names("model") == tuple(MODELS)
    assert names("dataset") == tuple(d["name"] for d in datasets())


def test_later_layers_overrule_earlier_ones(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('rounds = 5\nclients = 30\nmodel = "mlr"\n[fedabml]\nlam = 0.5\nk = 2\n')
    config = RunConfig.of(read_toml(file), {"rounds": 6, "seed": 1}, parse_set(["rounds=7", "fedabml.lam=0.25"]))
    assert (config.rounds, config.clients, config.seed, config.model) == (7, 30, 1, "mlr")
    assert config.hyper == {"lam": 0.25, "k": 2}
    assert config.epochs == RunConfig().epochs
    algorithm = config.algorithm_object()
    assert (algorithm.lam, algorithm.k) == (0.25, 2)


def test_lr_is_the_algorithms_and_obeys_the_layers():
    file = {"lr": 0.1, "fedabml": {"lr": 0.2}}
    assert RunConfig.of(file).algorithm_object().lr == 0.2  # in one layer, the algorithm's own table is more exact
    assert RunConfig.of(file, {"lr": 0.3}).algorithm_object().lr == 0.3
    assert RunConfig.of(file, {"lr": 0.3}, {"fedabml": {"lr": 0.4}}).algorithm_object().lr == 0.4
    assert RunConfig.of({"lr": 0.1}, {"algorithm": "local"}).algorithm_object().lr == 0.1
    assert RunConfig(lr=0.5).algorithm_object().lr == 0.5


def test_only_the_chosen_algorithms_table_is_used():
    layer = {"algorithm": "fedavg-ft", "fedabml": {"lam": 1.0}, "fedavg-ft": {"momentum": 0.9}}
    assert RunConfig.of(layer).hyper == {"momentum": 0.9}


def test_tables_of_other_algorithms_are_checked_and_refused_where_told():
    with pytest.raises(InputError, match=r"'fedavg' has no hyperparameter 'momentun'. Did you mean 'momentum'"):
        RunConfig.of({"algorithm": "fedavg-ft", "fedavg": {"momentun": 1.0}})
    with pytest.raises(InputError, match="run's is fedavg-ft"):
        RunConfig.of({"algorithm": "fedavg-ft"}, overrides=parse_set(["fedavg.lr=0.5", "fedavg.nonsense=3"]))
    assert RunConfig.of(overrides=parse_set(["algorithm=fedavg", "fedavg.lr=0.5"])).hyper == {"lr": 0.5}


def test_tables_of_commands_are_left_to_them(tmp_path):
    (tmp_path / "run.toml").write_text(
        "rounds = 3\n[evaluate]\nepochs = 3\n[personalize]\nepochs = 4\n[serve]\nport = 1\n"
    )
    config = RunConfig.of(without_commands(read_toml(tmp_path / "run.toml")))
    assert (config.rounds, config.epochs, config.evaluate) == (3, RunConfig().epochs, True)


def test_none_is_a_word_where_a_value_may_lack():
    config = RunConfig.of(parse_set(["fedabml.personal_lr=none", "fedabml.label_prior=none", "chunk=none"]))
    algorithm = config.algorithm_object()
    assert algorithm.personal_lr is None
    assert algorithm.label_prior == "none"
    unit = RunConfig.of(parse_set(["fedabml.label_alpha=none"]))  # where a number is the default, none must not be lost
    assert RunConfig.of(tomllib.loads(to_toml(unit.to_dict(everything=True)))).algorithm_object().label_alpha is None
    assert "fedabml.label_alpha=none" in unit.command()
    assert config.chunk is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("rounds=20", 20),
        ("rounds= 20 ", 20),
        ("rounds=1e-3", 1e-3),
        ("rounds=true", True),
        ('rounds="x y"', "x y"),
        ("rounds=cifar10", "cifar10"),
        ("rounds=data/my.csv", "data/my.csv"),
        ("rounds=a=b", "a=b"),
        ("rounds=[64, 32]", [64, 32]),
        ("rounds=1\nseed=2", "1\nseed=2"),
        ("rounds=__import__('os')", "__import__('os')"),
        ("rounds=", ""),
    ],
)
def test_set_takes_toml_values_and_bare_words(word, value):
    assert parse_set([word]) == {"rounds": value}


@pytest.mark.parametrize("word", ["rounds", "=3", "a.b.c=1", ".x=1", "x.=1"])
def test_set_refuses_what_is_no_assignment(word):
    with pytest.raises(InputError, match="NAME=VALUE"):
        parse_set([word])


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"runds": 3}, "Did you mean 'rounds'"),
        ({"fedabl": {"lam": 1}}, "Did you mean 'fedabml'"),
        ({"lam": 0.1}, "Write fedabml.lam"),
        ({"hyper": {}}, "There is no key"),
        ({"algorithm": "fedavgft"}, "Did you mean 'fedavg-ft'"),
        ({"model": "resnet"}, "Did you mean 'resnet18'"),
        ({"dataset": "cifar01"}, "Did you mean 'cifar"),
        ({"partition": "classs"}, "Did you mean 'classes'"),
        ({"rounds": 2.5}, "'rounds' .* must be a whole number; it is 2.5"),
        ({"rounds": "many"}, "must be a whole number"),
        ({"rounds": True}, "must be a whole number"),
        ({"participation": "half"}, "must be a number"),
        ({"participation": float("nan")}, "must be a number"),
        ({"distinct": 1}, "must be true or false"),
        ({"device": 3}, "must be a word"),
        ({"model_options": 3}, "must be a table"),
        ({"fedabml": 3}, "must be a table"),
        ({"dataset": "digits", "data": "folder"}, "one of them"),
        ({"data": "folder", "partition": "iid"}, "divided already"),
        ({"partition": "natural"}, "your own data"),
        ({"seed": -1}, "0 or more"),
    ],
)
def test_wrong_keys_and_types_are_named(layer, words):
    with pytest.raises(InputError, match=words):
        RunConfig.of(layer)


def test_a_hyperparameter_that_is_not_there_gets_the_nearest_name():
    with pytest.raises(InputError, match="Did you mean 'lam'"):
        RunConfig.of({"fedabml": {"lamb": 1.0}}).algorithm_object()


@pytest.mark.parametrize(
    ("text", "line"), [("rounds = 3\nclients = \n", "line 2"), ("[fedabml\nlam = 1", "line 1"), ('a = "', "line 1")]
)
def test_broken_toml_names_file_and_line(tmp_path, text, line):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=rf"run\.toml.*{line}"):
        RunConfig.of(without_commands(read_toml(file)))


def test_files_that_are_no_text_or_not_there(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\x80\x04\x95")
    with pytest.raises(InputError, match="not text"):
        RunConfig.of(without_commands(read_toml(tmp_path / "x.toml")))
    with pytest.raises(InputError, match="There is no file"):
        RunConfig.of(without_commands(read_toml(tmp_path / "none.toml")))


def test_to_toml_and_to_dict_come_back(tmp_path):
    config = RunConfig(
        data='a "quoted"\\path.csv', client_column="größe", rounds=3, participation=0.5, learn_noise=False, chunk=4,
        algorithm="fedavg-ft", hyper={"lr": 0.1, "weights": "samples"}, model_options={"hidden": [8, 4]},
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(config.to_dict(everything=True)))
    assert RunConfig.of(without_commands(read_toml(tmp_path / "run.toml"))) == config
    assert RunConfig.of(config.to_dict()) == config
    assert RunConfig.of(config.to_dict(everything=True)) == config
    assert tomllib.loads(to_toml(RunConfig().to_dict(everything=True)))["rounds"] == 50


def test_differences_and_command():
    a, b = RunConfig(), RunConfig(clients=7, hyper={"lam": 0.5}, evaluate=False)
    assert a.differences(b) == {"clients": (100, 7), "evaluate": (True, False), "fedabml.lam": (None, 0.5)}
    assert b.command("my runs") == (
        "fedabml train --clients 7 --no-evaluate --set fedabml.lam=0.5 --out 'my runs'"
    )  # fmt: skip


def test_every_key_has_a_meaning():
    assert all(f.metadata["doc"] for f in dataclasses.fields(RunConfig))


def test_partition_seed_and_validation_reach_the_federation():
    same = {"clients": 10, "model": "mlr"}
    a, b, c = (RunConfig(**same, **k).federation() for k in ({}, {"seed": 3, "partition_seed": 0}, {"seed": 3}))
    assert a.hash == b.hash != c.hash
    held = RunConfig(**same, validation=0.2).federation()
    assert held.val.counts.min() >= 1 and held.train.counts.sum() + held.val.counts.sum() == a.train.counts.sum()


@pytest.mark.parametrize("name", list(REGISTRY))
def test_the_configuration_of_every_algorithm_reproduces_it(name):
    algorithm = RunConfig(algorithm=name).algorithm_object()
    again = RunConfig.of(RunConfig(algorithm=name, hyper=algorithm.values()).to_dict(everything=True))
    assert again.algorithm_object() == algorithm


@pytest.mark.parametrize("name", ["p.tsv", "p.json"])
def test_a_table_in_another_format_is_refused_with_the_formats(tmp_path, name):
    (tmp_path / name).write_text("a")
    with pytest.raises(InputError, match=r"save it as \.csv, \.parquet or \.xlsx"):
        RunConfig(data=str(tmp_path / name), client_column="a")


@pytest.mark.parametrize("data", [{}, {"dataset": "mnist"}, {"data": "clients"}])
@pytest.mark.parametrize("stray", [{"client_column": "site"}, {"positive_class": "y"}, {"test_share": 0.3}])
def test_keys_of_a_table_beside_other_data_are_refused(data, stray):
    with pytest.raises(InputError, match=r"is for a table .*Leave --[a-z]+-[a-z]+ out\."):
        RunConfig(**data, **stray)
    assert RunConfig(data="t.csv", **stray)
    assert RunConfig.of(upgrade_config(data | stray)) == RunConfig(**data)  # a run of before, where they had no effect
    assert upgrade_config({"data": "t.csv"} | stray) == {"data": "t.csv"} | stray


def test_a_dataset_of_classes_is_no_regression():
    with pytest.raises(InputError, match="task regression is for your own data"):
        RunConfig(dataset="digits", task="regression")
    assert RunConfig(data="clients", task="regression") and RunConfig(dataset="digits", task="classification")


def test_a_stored_dirichlet_is_the_draw_per_client():
    assert RunConfig(partition="dirichlet").partition == "dirichlet-classes"  # the usual draw, for whoever writes it
    assert RunConfig.of(upgrade_config({"partition": "dirichlet"})).partition == "dirichlet-clients"
    for word in ("auto", "dirichlet-classes", "dirichlet-clients"):
        assert upgrade_config({"partition": word}) == {"partition": word}
    assert upgrade_config({}) == {}


def test_a_tuned_file_of_before_keeps_its_partition(tmp_path):
    """The word meant the draw per client when a search could write it; in a person's own file it is the usual draw."""
    (tmp_path / "own.toml").write_text('partition = "dirichlet"\n')
    (tmp_path / "tuned.toml").write_text('# Made by: fedabml tune --out x\npartition = "dirichlet"\n')
    drawn = [RunConfig.of(read_toml(tmp_path / name)).partition for name in ("own.toml", "tuned.toml")]
    assert drawn == ["dirichlet-classes", "dirichlet-clients"]


def table_with_a_rare_word(path):
    words = np.array(["flu", "cold"] * 30, object)
    words[:3] = "disease X"
    ages = np.where(np.arange(60) == 5, np.nan, np.random.default_rng(0).normal(50, 10, 60))
    columns = {"site": ["a", "b"] * 30, "illness": words, "age": ages, "y": ["no", "yes", "yes", "no"] * 15}
    pd.DataFrame(columns).to_csv(path, index=False)
    return RunConfig(data=str(path), client_column="site", target_column="y", test_share=0.0)


def test_a_run_of_an_earlier_version_goes_on_with_the_recipe_of_its_prior(tmp_path, monkeypatch, caplog):
    """Earlier versions knew every word; the untouched table has the hash that they recorded."""
    plan = table_with_a_rare_word(tmp_path / "t.csv")
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "LEAST", 1)
        before = plan.federation()
    assert "disease X" in before.recipe.categories["illness"]
    now = plan.federation()
    assert now.hash != before.hash and now.recipe.categories["illness"] == ("cold", "flu")
    assert plan.as_trained(now, now.hash, now.recipe) is now and not caplog.records
    trained = plan.as_trained(now, before.hash, before.recipe)
    assert trained.recipe == before.recipe and np.array_equal(trained.x, before.x)
    (note,) = [record.getMessage() for record in caplog.records]
    assert "earlier version" in note and "words of fewer than 5 rows as 'other'" in note
    assert plan.as_trained(now, before.hash, None) is None
    changed = (tmp_path / "t.csv").read_text().replace("flu", "gout", 1)
    (tmp_path / "t.csv").write_text(changed)
    assert plan.as_trained(plan.federation(), before.hash, before.recipe) is None
    assert len(caplog.records) == 1
