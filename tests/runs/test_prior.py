"""Priors and posteriors: tables read with their recipe, inputs in fitting words, files that are not what they say."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch

import fedabml
from fedabml import FedABML, FedAvg, InputError, Local
from fedabml.files.sealed import read_tensors, write_tensors

QUICK = {"rounds": 2, "participation": 1.0, "epochs": 1, "batch_size": 10, "device": "cpu"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def patients(n=60, seed=0):
    g = np.random.default_rng(seed)
    age = g.normal(50, 10, n)
    return pd.DataFrame(
        {
            "hospital": [f"h{i % 3}" for i in range(n)],
            "age": np.where(np.arange(n) % 11 == 5, np.nan, age),
            "sex": np.where(np.arange(n) % 2, "f", "m"),
            "ill": np.where(age + 3 * g.normal(size=n) > 50, "yes", "no"),
            "level": age / 5 + g.normal(size=n),
        }
    )


def one_hospital(n=60, seed=0):
    return patients(n, seed).assign(hospital="h0")


def table_prior(folder, target="ill"):
    frame = patients().drop(columns={"ill": "level", "level": "ill"}[target])
    frame.to_csv(folder / "t.csv", index=False)
    fed = fedabml.read_table(folder / "t.csv", client="hospital", target=target)
    return fedabml.train(fed, "mlr", FedABML(lr=0.1), evaluate=False, **QUICK).prior


def probs(posterior, x, **words):
    return posterior.predict(x, device="cpu", **words).probs


# -- tables -----------------------------------------------------
@pytest.mark.slow
def test_a_prior_of_a_table_reads_tables_in_every_form(tmp_path):
    prior = table_prior(tmp_path)
    recipe, new = prior.input_spec.recipe, one_hospital(30, 1)
    x, y = recipe.apply(new), recipe.encode_target(new["ill"])
    expected = prior.personalize(x, y, device="cpu", encoded=True)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    bare = new.drop(columns=["ill", "hospital"])
    ways = [
        (new, None),
        (new.sample(frac=1, axis=1, random_state=0).set_axis(range(7, 37)), None),
        (bare, new["ill"]),
        (bare, list(new["ill"])),
        (bare, new["ill"].to_numpy()),
        (bare, new[["ill"]]),
        (str(tmp_path / "new.csv"), None),
        (tmp_path / "new.parquet", None),
    ]
    for given, labels in ways:
        posterior = prior.personalize(given, labels, device="cpu")
        assert torch.equal(posterior.q.mean, expected.q.mean) and torch.equal(posterior.q.logstd, expected.q.logstd)
    answers = probs(expected, x, encoded=True)
    for given in (new, bare, str(tmp_path / "new.csv"), tmp_path / "new.parquet"):
        assert np.array_equal(probs(expected, given), answers)
    assert np.array_equal(probs(expected, new[:1]), probs(expected, x[:1], encoded=True))


def test_predictions_of_a_table_know_the_names_of_classes(tmp_path):
    prior = table_prior(tmp_path)
    saved = prior.personalize(one_hospital(30, 1), device="cpu").save(tmp_path / "q.safetensors")
    p = fedabml.load_posterior(saved).predict(patients(12, 2), device="cpu")
    assert p.classes == ("no", "yes") and p.decode() == [("no", "yes")[i] for i in p.label]
    assert isinstance(p, fedabml.Prediction)


def test_measurements_of_a_table_keep_their_units(tmp_path):
    prior = table_prior(tmp_path, "level")
    new = one_hospital(40, 1)
    p = prior.personalize(new.drop(columns="level"), new["level"], device="cpu").predict(new, device="cpu")
    assert 5 < p.mean.mean() < 15


def test_a_bare_array_for_a_table_is_refused(tmp_path):
    prior = table_prior(tmp_path)
    x, y = prior.input_spec.recipe.apply(patients()), np.arange(60) % 2
    posterior = prior.personalize(x, y, device="cpu", encoded=True)
    for given in (x, torch.as_tensor(x), x.tolist(), patients().iloc[0]):
        for call in (lambda: prior.personalize(given, y), lambda: posterior.predict(given)):
            with pytest.raises(InputError, match=r"Give the table itself.*encoded=True"):
                call()


@pytest.mark.parametrize(
    ("change", "y", "words"),
    [
        (lambda f: f.drop(columns="ill"), None, "no column 'ill', and no y was given"),
        (lambda f: f.drop(columns="age"), None, "no column 'age'"),
        (lambda f: f, ["yes"] * 3, "60 rows, but y has the shape"),
        (lambda f: f, "ill", "60 rows, but y has the shape"),
        (lambda f: f, np.arange(60) % 2, "'0' is no known value of 'ill'"),
        (lambda f: f.assign(ill="perhaps"), None, "'perhaps' is no known value of 'ill'"),
        (lambda f: f[:0], None, "no rows"),
        (lambda f: f[:1], None, "needs two or more"),
        (lambda f: f.rename(columns={"level": "age"}), None, "two columns called 'age'"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, change, y, words):
    with pytest.raises(InputError, match=words):
        table_prior(tmp_path).personalize(change(one_hospital()), y, device="cpu")


# -- arrays -----------------------------------------------------
def arrays(n=20, seed=0, classes=3):
    g = np.random.default_rng(seed)
    return g.normal(3, 2, (n, 6)).astype(np.float32), g.integers(0, classes, n)


def array_prior(algorithm=None, **words):
    fed = fedabml.Federation.from_arrays([arrays(20, 1), arrays(20, 2)], classes=3)
    return fedabml.train(fed, "mlr", algorithm or FedABML(), evaluate=False, **QUICK, **words).prior


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((0, 6)), "inputs is empty"),
        ([], "inputs is empty"),
        (np.full((4, 6), np.nan), "inputs: row 0 has NaN"),
        (3.0, "inputs is a single number"),
        ([["a"] * 6], "inputs is of type"),
        (np.zeros((4, 7)), "inputs: its rows are float32 of shape .7,."),
        ("t.csv", "not trained on a table"),
    ],
)
def test_inputs_are_refused_in_words_of_their_own(x, words):
    posterior = array_prior().personalize(*arrays(), device="cpu")
    with pytest.raises(InputError, match=words) as error:
        posterior.predict(x, device="cpu")
    assert not any(word in str(error.value) for word in ("training", "client", "drop_small", "duplicate"))


def test_one_input_is_predicted_like_many():
    posterior, (x, _) = array_prior().personalize(*arrays(), device="cpu"), arrays(9, 5)
    np.testing.assert_allclose(
        np.concatenate([probs(posterior, row[None]) for row in x]), probs(posterior, x), atol=1e-6
    )


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (arrays()[0], np.full(20, 3), "label 3 in row 0; the prior's classes are 0 to 2"),
        (arrays()[0], np.full(20, 0.5), "label 0.5 in row 0"),
        (arrays()[0], np.full(20, -1), "label -1 in row 0"),
        (arrays()[0], np.zeros(19, int), "x has 20 rows, y has 19"),
        (arrays()[0], None, "There is no y"),
        (arrays()[0], 1, "y is a single number"),
        (arrays()[0][:1], np.zeros(1, int), "needs two or more"),
        (arrays()[0][:0], np.zeros(0, int), "x is empty"),
    ],
)
def test_a_clients_data_are_refused_in_words_of_their_own(x, y, words):
    with pytest.raises(InputError, match=words) as error:
        array_prior().personalize(x, y, device="cpu")
    assert "classes=" not in str(error.value) and "drop" not in str(error.value)


@pytest.mark.parametrize(
    "words", [{"batch_size": 0}, {"batch_size": -1}, {"batch_size": 2.5}, {"epochs": -1}, {"lr": -1}, {"seed": -1}]
)
def test_impossible_numbers_of_personalising(words):
    with pytest.raises(InputError):
        array_prior().personalize(*arrays(), device="cpu", **words)


@pytest.mark.parametrize("words", [{"samples": -3}, {"samples": 1.5}, {"seed": -1}])
def test_impossible_numbers_of_predicting(words):
    posterior = array_prior().personalize(*arrays(), device="cpu")
    with pytest.raises(InputError, match="must be a whole number"):
        posterior.predict(arrays()[0], device="cpu", **words)


def test_the_module_expects_normalised_inputs():
    posterior, (x, _) = array_prior().personalize(*arrays(), device="cpu"), arrays(9, 5)
    with torch.no_grad():
        outputs = posterior.to_module()(torch.as_tensor((x - posterior.input_spec.shift) / posterior.input_spec.scale))
    offset = 0 if posterior.offset is None else posterior.offset
    np.testing.assert_allclose((outputs + offset).softmax(-1), probs(posterior, x, samples=0), atol=1e-5)
    words = " ".join(posterior.to_module.__doc__.split())
    assert "normalised inputs" in words and "label level" in words


# -- files ------------------------------------------------------
def spoil(path, change):
    tensors, facts = read_tensors(path)
    change(tensors, facts)
    return write_tensors(path, tensors, facts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, f: t.update({"shared.mean": t["shared.mean"][:-1]}), r"'mean' of its shared state has the shape"),
        (lambda t, f: t.pop("shared.logstd"), "shared state lacks 'logstd'"),
        (lambda t, f: t.update({"shared.extra": torch.zeros(3)}), "'extra', which does not belong"),
        (lambda t, f: t.update({"constant.extra": torch.zeros(3)}), "'extra', which does not belong"),
        (lambda t, f: t.update({"norm.shift": torch.zeros(5)}), "shift"),
        (lambda t, f: t.update({"norm.scale": torch.zeros(6)}), "not positive"),
        (lambda t, f: t.update({"norm.y_shift": torch.zeros(2)}), "y_shift"),
        (lambda t, f: t.pop("norm.shift"), "lacks something"),
        (lambda t, f: f.update(batch_size="many"), "batch_size"),
        (lambda t, f: f.update(batch_size=0), "batch_size"),
        (lambda t, f: f.update(algorithm={"name": "fedavg", "hyper": {}}), "'logstd', which does not belong"),
        (lambda t, f: f.update(shape=["six"]), "lacks something"),
    ],
)
def test_priors_that_are_not_what_they_say(tmp_path, change, words):
    path = spoil(array_prior().save(tmp_path / "p.safetensors"), change)
    with pytest.raises(InputError, match=words) as error:
        fedabml.load_prior(path)
    assert "p.safetensors" in str(error.value) and "\n" not in str(error.value)


def test_a_state_that_begins_at_the_initial_weights_needs_them(tmp_path):
    path = array_prior(Local()).save(tmp_path / "p.safetensors")
    fedabml.load_prior(path)
    for change in (lambda t, f: t.update(initial=t["initial"][1:]), lambda t, f: t.pop("initial")):
        with pytest.raises(InputError, match="initial"):
            fedabml.load_prior(spoil(path, change))


def test_a_recipe_of_another_network_is_refused(tmp_path):
    path = table_prior(tmp_path).save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="recipe for tables"):
        fedabml.load_prior(spoil(path, lambda t, f: f["recipe"].update(class_names=["no", "yes", "maybe"])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, f: t.update({"q.mean": t["q.mean"][:-1]}), "'mean' of its distribution"),
        (lambda t, f: t.update({"q.mean": t["q.mean"][None]}), "'mean' of its distribution"),
        (lambda t, f: t.pop("q.logstd"), "distribution lacks 'logstd'"),
        (lambda t, f: t.update({"q.other": torch.zeros(3)}), "'other', which does not belong"),
        (lambda t, f: t.update(offset=torch.zeros(2)), "'offset' of its label level"),
        (lambda t, f: f.update(samples=-1), "samples"),
        (lambda t, f: f.update(distribution="Cauchy"), "Cauchy"),
        (lambda t, f: f.update(distribution="Samples"), "weights"),
        (lambda t, f: f.update(distribution="Point"), "'logstd', which does not belong"),
    ],
)
def test_posteriors_that_are_not_what_they_say(tmp_path, change, words):
    path = array_prior().personalize(*arrays(), device="cpu").save(tmp_path / "q.safetensors")
    fedabml.load_posterior(path)
    with pytest.raises(InputError, match=words) as error:
        fedabml.load_posterior(spoil(path, change))
    assert "q.safetensors" in str(error.value)


@pytest.mark.parametrize("name", list(fedabml.algorithms.REGISTRY))
@pytest.mark.slow
def test_sound_files_of_every_algorithm_are_taken(name, tmp_path):
    fed = fedabml.Federation.from_arrays([arrays(20, 1), arrays(20, 2)], classes=3)
    algorithm = fedabml.algorithms.make(name)
    prior = fedabml.train(fed, "mlp", algorithm, evaluate=False, model_options={"hidden": (4,)}, **QUICK).prior
    loaded = fedabml.load_prior(prior.save(tmp_path / "p.safetensors"))
    posterior = loaded.personalize(*arrays(), device="cpu")
    again = fedabml.load_posterior(posterior.save(tmp_path / "q.safetensors"))
    assert np.array_equal(probs(again, arrays()[0]), probs(posterior, arrays()[0]))


def test_points_are_distributions_too(tmp_path):
    posterior = array_prior(FedAvg()).personalize(*arrays(), device="cpu")
    path = spoil(posterior.save(tmp_path / "q.safetensors"), lambda t, f: t.update({"q.mean": t["q.mean"][1:]}))
    with pytest.raises(InputError, match="'mean' of its distribution"):
        fedabml.load_posterior(path)


# -- weight samples ---------------------------------------------
@pytest.mark.slow
def test_weight_samples_are_drawn_once_and_the_numbers_are_the_same(monkeypatch):
    """Five calls draw as often as one; nothing differs from a posterior that keeps nothing, also in threads."""
    from fedabml.runs import posterior as module

    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(12, 4)), np.arange(12) % 3) for _ in range(2)]
    own = fedabml.train(fedabml.Federation.from_arrays(pairs), "mlp", FedABML(), evaluate=False, **QUICK).prior
    posterior, x = own.personalize(*pairs[0], device="cpu"), pairs[1][0]
    monkeypatch.setattr(module, "MOST_KEPT", 0)
    expected = {seed: probs(posterior, x, seed=seed) for seed in (0, 1)}
    assert "_kept" not in vars(posterior) and (expected[0] != expected[1]).any()
    monkeypatch.undo()
    drawn = []
    draw = module.draw
    monkeypatch.setattr(module, "draw", lambda *given: drawn.append(0) or draw(*given))
    with ThreadPoolExecutor(4) as pool:
        first = probs(posterior, x)
        assert all((each == expected[0]).all() for each in [first, *pool.map(lambda _: probs(posterior, x), range(20))])
    assert len(drawn) == posterior.samples
    assert (probs(posterior, x, seed=1) == expected[1]).all() and (probs(posterior, x) == expected[0]).all()
    again = dataclasses.replace(posterior, samples=3)
    assert "_kept" not in vars(again) and (probs(again, x) != first).any()


def test_many_posteriors_together_keep_a_bounded_amount(monkeypatch):
    """Those used longest ago lose their weight samples, by number and by bytes, and predict the same numbers again."""
    from fedabml.gaussian import Gaussian
    from fedabml.models import build
    from fedabml.runs import posterior as module
    from fedabml.runs.input_spec import InputSpec
    from fedabml.vectors import Network

    network = Network(build("mlr", [3], 2), 0)
    zero, one = np.zeros(()), np.ones(())
    spec = InputSpec(network, fedabml.Categorical(2), None, (3,), zero, one, zero, one)
    q, x = Gaussian(network.initial, torch.full_like(network.initial, 0.5)), np.ones((2, 3))
    several = [fedabml.Posterior(q, spec, None, samples=2) for _ in range(module.MOST_KEEPERS + 3)]
    monkeypatch.setattr(module, "_keepers", [])

    def keeping():
        return [i for i, each in enumerate(several) if "_kept" in vars(each)]

    first = [probs(each, x) for each in several]
    assert keeping() == list(range(3, len(several)))
    probs(several[3], x)
    assert (probs(several[0], x) == first[0]).all()
    assert keeping() == [0, 3, *range(5, len(several))]
    monkeypatch.setattr(module, "MOST_KEPT", 3 * 4 * 2 * network.layout.size)  # three posteriors' bytes
    probs(several[1], x)
    assert keeping() == [0, 1, 3]
    several[0] = several[1] = several[3] = None
    assert all(ref() is None for ref, _ in module._keepers)
