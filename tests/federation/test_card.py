"""The card: the same bits at the server and at every site, and nothing hostile gets through."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from fedabml import Federation, InputError, algorithms
from fedabml.engine.setting import Cohort
from fedabml.federation.card import Card, make_card
from fedabml.runs.prepare import prepare
from tests.federation.start import ID, arrays


@pytest.fixture(scope="module")
def fed():
    clients = [arrays(number) for number in range(3)]
    return Federation.from_arrays([(c["x_train"], c["y_train"]) for c in clients])


def make(fed, name="fedabml", **options):
    options = {"model_options": {"hidden": [8]}, "batch_size": 10, "epochs": 2, **options}
    return make_card(ID, fed, algorithm=algorithms.make(name), **options)


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_file_and_message_rebuild_the_same_card(fed, name, tmp_path):
    card = make(fed, name, seed=7, dtype="float64")
    loaded = Card.load(card.save(tmp_path / "card.safetensors"))
    tensors, facts = card.tensors_and_facts()
    sent = Card.of(tensors, json.loads(json.dumps(facts, sort_keys=True)))
    for other in (loaded, sent):
        assert other.digest == card.digest
        assert torch.equal(other.initial, card.initial)
        assert other.algorithm == card.algorithm
        same = {name: torch.equal(value, card.initial_shared()[name]) for name, value in other.initial_shared().items()}
        assert all(same.values())


def test_network_and_initial_weights_are_those_of_a_simulated_run(fed):
    options = {"model_options": {"hidden": [8]}, "seed": 3}
    setup = prepare(fed, "mlp", algorithms.make("ditto"), device="cpu", backend="loop", workers=1, **options)
    card = make(fed, "ditto", seed=3)
    assert torch.equal(setup.input_spec.network.initial, card.initial)
    assert setup.cohort.likelihood == card.input_spec.likelihood
    assert setup.cohort.algorithm == card.algorithm


def test_initial_weights_travel_and_are_not_drawn_again(fed, tmp_path):
    card = make(fed)
    tensors, facts = card.tensors_and_facts()
    other = Card.of(tensors | {"initial": tensors["initial"] + 1}, facts)
    assert torch.equal(other.initial, card.initial + 1)
    assert other.digest != card.digest


def test_a_card_of_a_version_with_fewer_hyperparameters_stays_the_same_card(fed, tmp_path):
    """A running federation goes on after an upgrade: server and sites hold the card that was made before."""
    card = make(fed, "ditto")
    tensors, facts = card.tensors_and_facts()
    older = copy.deepcopy(facts)
    for name in ("optimiser", "newcomer"):
        del older["algorithm"]["hyper"][name]
    read = Card.of(tensors, older)
    assert (read.algorithm.optimiser, read.algorithm.newcomer) == ("sgd", "initial")
    assert read.digest != card.digest and read.tensors_and_facts()[1] == older
    assert Card.load(read.save(tmp_path / "card.safetensors")).digest == read.digest
    changed = dataclasses.replace(read, algorithm=dataclasses.replace(read.algorithm, optimiser="adam"))
    assert changed.digest != read.digest and Card.of(*changed.tensors_and_facts()).algorithm.optimiser == "adam"


def test_every_fact_enters_the_digest(fed):
    card = make(fed)
    changes = {"seed": 1, "epochs": 3, "batch_size": 11, "dtype": "float64", "federation": "f" * 32, "schema": {"a": 1}}
    digests = {dataclasses.replace(card, **{name: value}).digest for name, value in changes.items()}
    digests |= {dataclasses.replace(card, algorithm=algorithms.make("fedabml", lr=0.5)).digest, card.digest}
    assert len(digests) == len(changes) + 2


def test_setting_and_place_are_those_of_one_site(fed):
    card = make(fed)
    cohort = Cohort(card.setting(fed.select([1]), 4), card.place())
    assert cohort.setting.identities == (4,)
    assert (cohort.backend, cohort.workers, cohort.device.type, cohort.chunk) == ("loop", 1, "cpu", 1)
    with pytest.raises(InputError, match="one client"):
        card.setting(fed, 0)


def test_prior_of_the_card_can_be_saved_and_loaded(fed, tmp_path):
    from fedabml import load_prior

    card = make(fed)
    prior = card.prior(card.initial_shared())
    assert load_prior(prior.save(tmp_path / "prior.safetensors")).digest == prior.digest


def test_class_weights_are_used_as_they_are(fed):
    assert make(fed, class_weights=[1, 2, 3]).input_spec.likelihood.weights == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("model", ["mine.py:Net", "/tmp", "no-such"])
def test_code_and_folders_are_no_models(fed, model):
    with pytest.raises(InputError, match="has no network"):
        make(fed, model=model)


@pytest.mark.parametrize("share", np.linspace(0, 0.999, 12))
def test_flipped_byte_of_a_file_is_refused(fed, share, tmp_path):
    path = make(fed).save(tmp_path / "card.safetensors")
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError):
        Card.load(path)


def test_truncated_and_foreign_files_are_refused(fed, tmp_path):
    card = make(fed)
    path = card.save(tmp_path / "card.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError):
        Card.load(path)
    with pytest.raises(InputError, match="not a card"):
        Card.load(card.prior(card.initial_shared()).save(tmp_path / "prior.safetensors"))


def put(*path):
    """A change of the facts: everything but the last entry leads to the place."""

    def change(tensors, facts):
        *keys, last, value = path
        for key in keys:
            facts = facts[key]
        facts[last] = value

    return change


def drop(name):
    return lambda tensors, facts: tensors.pop(name)


def tensor(name, make):
    def change(tensors, facts):
        tensors[name] = make(tensors.get(name))

    return change


HOSTILE = {
    "no kind": put("kind", "prior"),
    "version": put("version", 2),
    "extra fact": put("more", 1),
    "extra tensor": tensor("more", lambda _: torch.zeros(3)),
    "missing initial": drop("initial"),
    "missing norm": drop("norm.shift"),
    "short initial": tensor("initial", lambda t: t[:-1]),
    "one initial number": tensor("initial", lambda t: t[:1]),
    "long initial": tensor("initial", lambda t: torch.cat([t, t])),
    "initial of another type": tensor("initial", lambda t: t.double()),
    "half initial": tensor("initial", lambda t: t.half()),
    "whole initial": tensor("initial", lambda t: t.long()),
    "NaN": tensor("initial", lambda t: t * float("nan")),
    "infinite shift": tensor("norm.shift", lambda t: t + float("inf")),
    "zero scale": tensor("norm.scale", lambda t: t * 0),
    "scale of another shape": tensor("norm.scale", lambda t: torch.ones(4)),
    "no tensor": tensor("initial", lambda t: [1.0]),
    "own code": put("model", "name", "mine.py:Net"),
    "folder": put("model", "name", "/etc"),
    "no model": put("model", None),
    "source": put("source", "bert"),
    "unknown option": put("model", "options", {"colour": [1]}),
    "absurd width": put("model", "options", {"hidden": [10**9, 10**9]}),
    "absurd depth": put("model", "options", {"hidden": [1] * 100_000}),
    "absurd shape": put("shape", [10**12]),
    "absurd shapes": put("shape", [1] * 50),
    "negative shape": put("shape", [-5]),
    "other shape": put("shape", [6]),
    "absurd outputs": put("likelihood", {"kind": "Categorical", "classes": 10**15}),
    "other outputs": put("likelihood", {"kind": "Categorical", "classes": 4}),
    "no likelihood": put("likelihood", {"kind": "Normal"}),
    "own algorithm": put("algorithm", "name", "mine.py:FedDyn"),
    "unknown hyperparameter": put("algorithm", "hyper", {"nothing": 1}),
    "bad hyperparameter": put("algorithm", "hyper", "lr", -1.0),
    "word as hyperparameter": put("algorithm", "hyper", "lr", "0.1"),
    "hyperparameters left out": put("algorithm", "hyper", {}),
    "absurd epochs": put("epochs", 10**9),
    "no epochs": put("epochs", 0),
    "epochs in words": put("epochs", "2"),
    "absurd batch": put("batch_size", 2**62),
    "negative seed": put("seed", -1),
    "coarse numbers": put("numbers", "bf16"),
    "identifier": put("federation", "../../etc/passwd"),
    "no schema": put("schema", [1]),
    "NaN in facts": put("schema", {"a": float("nan")}),
    "layout": put("layout", []),
    "recipe": put("recipe", {"columns": ["a"]}),
    "images": put("images", {"class_names": ["a"], "mode": "L", "height": 10**9, "width": 1, "resized": True}),
    "no algorithm": put("algorithm", "fedavg"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_card_is_refused(fed, name):
    tensors, facts = copy.deepcopy(make(fed).tensors_and_facts())
    HOSTILE[name](tensors, facts)
    with pytest.raises(InputError, match="card"):
        Card.of(tensors, facts)


def test_missing_facts_are_refused_one_by_one(fed):
    tensors, facts = make(fed).tensors_and_facts()
    for name in facts:
        with pytest.raises(InputError, match="card"):
            Card.of(tensors, {key: value for key, value in facts.items() if key != name})
