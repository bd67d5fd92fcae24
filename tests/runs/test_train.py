"""The library's face, word for word: train, look, personalise, predict, save, load, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedabml
from fedabml import FedABML, FedAvg, InputError, Local
from fedabml.files.sealed import read_json, unsealed

QUICK = {"rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 8, "device": "cpu"}


def client(n, seed, classes=3):
    g = np.random.default_rng([n, seed])
    y = g.integers(0, classes, n)
    return (g.normal(size=(n, 6)) + y[:, None]).astype(np.float32), y


def federation(test=True, **options):
    pairs = [client(n, i) for i, n in enumerate((9, 20, 14, 31))]
    return fedabml.Federation.from_arrays(
        train=pairs, test=[client(6, 10 + i) for i in range(4)] if test else None, **({"classes": 3} | options)
    )


class Own(nn.Module):
    """A module of a user: a branch, a buffer, a frozen layer, dropout."""

    def __init__(self, outputs=3):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, outputs)
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("gain", torch.tensor(1.5))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.first(x) * self.gain + self.frozen(x))))


def own(seed=0, **options):
    torch.manual_seed(seed)
    return Own(**options)


def test_the_face_of_the_library(tmp_path):
    fed = federation()
    model = own()
    run = fedabml.train(
        fed, model, fedabml.FedABML(k=2, s=2), rounds=2, participation=0.5, epochs=1, batch_size=8, seed=0,
        device="auto", evaluate=True,
    )  # fmt: skip
    assert [line["round"] for line in run.history] == [1, 2] and all(len(line["clients"]) == 2 for line in run.history)
    needed = [
        "algorithm",
        "dataset",
        "model",
        "seed",
        "rounds",
        "clients",
        "accuracy",
        "nll",
        "ece",
        "brier",
        "accuracy_pooled",
        "accuracy_last10",
        "accuracy_worst_decile",
        "prior_accuracy",
        "bytes_up",
        "bytes_down",
        "seconds",
    ]
    assert set(needed) <= run.summary.keys()
    assert (run.summary["algorithm"], run.summary["model"], run.summary["clients"]) == ("fedabml", "Own", 4)
    assert 0 <= run.summary["accuracy"] <= 1
    trained = 6 * 5 + 5 + 5 * 3 + 3
    assert run.summary["bytes_up"] == run.summary["bytes_down"] == 2 * 4 * trained
    json.dumps([run.summary, run.history, run.config], allow_nan=False)

    path = run.prior.save(tmp_path / "prior.safetensors")
    prior = fedabml.load_prior(path, model=own(seed=5))  # the weights come from the file, frozen ones too
    x, y = client(15, 99)
    posterior = prior.personalize(x, y, epochs=5, seed=0)
    p = posterior.predict(x)
    assert p.probs.shape == (15, 3) and p.entropy.shape == p.mutual_information.shape == (15,)
    np.testing.assert_allclose(p.probs.sum(1), 1, atol=1e-6)
    direct = run.prior.personalize(x, y, epochs=5, seed=0).predict(x)
    assert np.array_equal(direct.probs, p.probs)
    module = posterior.to_module()
    assert isinstance(module, Own) and not module.training
    assert torch.equal(module.frozen.weight, model.frozen.weight) and not module.frozen.weight.requires_grad


def test_every_keyword_has_a_default():
    run = fedabml.train(federation(), rounds=1, device="cpu")
    assert run.config["algorithm"]["name"] == "fedabml" and run.config["model"] == "mlp"


@pytest.mark.parametrize("algorithm", [FedABML(label_prior="none"), FedAvg(lr=0.1)])
def test_to_module_equals_the_prediction_of_the_mean(algorithm):
    fed = federation()
    run = fedabml.train(fed, own(), algorithm, **QUICK)
    x, y = client(12, 77)
    posterior = run.prior.personalize(x, y, device="cpu")
    inputs = torch.as_tensor((x - fed.shift) / fed.scale)
    with torch.no_grad():
        expected = posterior.to_module()(inputs).softmax(-1)
    np.testing.assert_allclose(posterior.predict(x, samples=0, device="cpu").probs, expected, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 15])
def test_rows_are_predicted_alike_whatever_their_number(rows):
    run = fedabml.train(federation(), "mlr", FedABML(), **QUICK)
    x, y = client(15, 1)
    posterior = run.prior.personalize(x, y, device="cpu")
    whole, part = posterior.predict(x, device="cpu"), posterior.predict(x[:rows], device="cpu")
    np.testing.assert_allclose(part.probs, whole.probs[:rows], atol=1e-6)
    tensor = posterior.predict(torch.as_tensor(x[:rows]).requires_grad_(), device="cpu")
    assert np.array_equal(tensor.probs, part.probs)


def test_samples_and_seeds_of_a_prediction():
    run = fedabml.train(federation(), "mlr", FedABML(nu0=-1.0), **QUICK)
    posterior = run.prior.personalize(*client(15, 1), epochs=0, device="cpu")
    x = client(4, 2)[0]
    predict = lambda **words: posterior.predict(x, device="cpu", **words)
    assert np.array_equal(predict(seed=1).probs, predict(seed=1).probs)
    assert not np.array_equal(predict(seed=1).probs, predict(seed=2).probs)
    assert (predict(samples=0).mutual_information < 1e-12).all() and (predict(samples=20).mutual_information > 0).all()
    assert not np.array_equal(predict(samples=3).probs, predict(samples=4).probs)


def test_without_personal_epochs_the_posterior_is_the_prior():
    run = fedabml.train(federation(), "mlr", FedABML(), **QUICK)
    q = run.prior.personalize(*client(15, 1), epochs=0, device="cpu").q
    assert torch.equal(q.mean, run.prior.shared["mean"]) and torch.equal(q.logstd, run.prior.shared["logstd"])


def test_training_starts_from_the_weights_of_the_module(tmp_path):
    """No rounds: what is shared is what was given."""
    model = own(seed=4)
    run = fedabml.train(federation(), model, FedAvg(), rounds=0, device="cpu")
    learned = [p for p in model.parameters() if p.requires_grad]
    assert torch.equal(run.prior.shared["mean"], nn.utils.parameters_to_vector(learned))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    other = fedabml.train(
        federation(), own(seed=5), FedAvg(), rounds=0, pretrained=tmp_path / "w.safetensors", device="cpu"
    )
    assert torch.equal(other.prior.shared["mean"], run.prior.shared["mean"])


def test_the_users_module_is_not_trained():
    model = own()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fedabml.train(federation(), model, FedABML(), **QUICK)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and model.training


# -- determinism ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", [FedABML(prior_std="learned"), FedAvg(), Local()], ids=["a", "b", "c"])
@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_does_not(algorithm):
    def bits(seed):
        torch.manual_seed(int(torch.randint(0, 1000, ()).item()))  # global state must not matter
        np.random.seed(np.random.default_rng().integers(1000))  # noqa: NPY002
        run = fedabml.train(federation(), own(), algorithm, seed=seed, chunk=4, **QUICK)
        return run.prior.shared, {k: v.tolist() for k, v in run.evaluation.clients.items()}, run.history

    (a, scores, history), (b, same, again), (c, other, _) = bits(1), bits(1), bits(2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    np.testing.assert_equal(scores, same)  # NaN, which a class without rows has, equals NaN
    assert [line["loss"] for line in history] == [line["loss"] for line in again]
    assert scores["nll"] != other["nll"] and not any(torch.equal(a[k], c[k]) for k in a if k == "mean")


@pytest.mark.slow
def test_evaluating_along_the_way_does_not_change_the_training():
    a = fedabml.train(federation(), "mlr", FedABML(), chunk=4, **QUICK)
    b = fedabml.train(federation(), "mlr", FedABML(), chunk=4, eval_every=1, **QUICK)
    assert torch.equal(a.prior.shared["mean"], b.prior.shared["mean"])
    assert a.summary["nll"] == b.summary["nll"]
    assert [("eval" in line) for line in b.history] == [True, True] and "eval" not in a.history[0]
    first, last = b.history[0]["eval"]["accuracy"], b.summary["accuracy"]
    assert b.summary["accuracy_last10"] == pytest.approx((first + last) / 2)


@pytest.mark.slow
def test_some_clients_are_scored_along_the_way_and_all_at_the_end(monkeypatch):
    scored = lambda run: ([line["eval"]["clients_scored"] for line in run.history], run.summary["clients_scored"])
    train = lambda **words: fedabml.train(federation(), "mlr", FedABML(), chunk=4, eval_every=1, **QUICK, **words)
    everyone, some, few = train(), train(eval_clients=2), train(eval_clients=2, eval_all=False)
    total = everyone.summary["clients_scored"]
    assert scored(everyone) == ([total] * 2, total) and scored(some) == ([2, 2], total) and scored(few) == ([2, 2], 2)
    assert some.summary["nll"] == everyone.summary["nll"] != few.summary["nll"] == few.history[-1]["eval"]["nll"]
    monkeypatch.setattr("fedabml.runs.train.SCORED_CLIENTS", 3)  # the default for very many clients
    assert scored(train()) == ([3, 3], total) and scored(train(eval_all=False)) == ([3, 3], 3)
    assert scored(train(eval_clients=99)) == ([total] * 2, total)
    with pytest.raises(InputError, match="eval_clients"):
        train(eval_clients=0)


def test_a_run_in_float64_hands_over_a_usable_prior(tmp_path):
    run = fedabml.train(federation(), "mlr", FedABML(), dtype="float64", **QUICK)
    x, y = client(12, 5)
    p = run.prior.personalize(x, y, device="cpu").predict(x, device="cpu")
    loaded = fedabml.load_prior(run.prior.save(tmp_path / "p.safetensors"))
    assert np.array_equal(loaded.personalize(x, y, device="cpu").predict(x, device="cpu").probs, p.probs)


# -- files ---------------------------------------------------------------------------------------------------------
def test_without_out_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = fedabml.train(federation(), "mlr", FedABML(), **QUICK)
    assert run.folder is None and not list(tmp_path.iterdir())


def test_a_run_folder_holds_what_it_should(tmp_path):
    run = fedabml.train(federation(), "mlr", FedABML(), out=tmp_path / "run", **QUICK)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "clients.csv", "shared.safetensors", "report.html"} <= names
    assert not [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".part")]
    strict = lambda text: json.loads(text, parse_constant=pytest.fail)
    strict((tmp_path / "run/summary.json").read_text())
    summary = read_json(tmp_path / "run/summary.json")
    assert summary.pop("files").keys() == {"clients.csv"}
    assert summary.pop("prior_digest") == run.prior.digest
    assert summary == json.loads(json.dumps(run.summary)) and summary["accuracy"] == run.summary["accuracy"]
    lines = [unsealed(strict(line), "") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines == run.history
    rows = (tmp_path / "run/clients.csv").read_text().splitlines()
    assert len(rows) == 5 and rows[0].startswith("client,name,n_train,n_test,accuracy")
    assert rows[2].split(",")[:4] == ["1", "client-1", "20", "6"]
    assert torch.equal(fedabml.load_prior(tmp_path / "run/shared.safetensors").shared["mean"], run.prior.shared["mean"])


@pytest.mark.slow
def test_a_users_module_must_be_given_again(tmp_path):
    run = fedabml.train(federation(), own(), FedABML(), **QUICK)
    path = run.prior.save(tmp_path / "prior.safetensors")
    with pytest.raises(InputError, match=r"load_prior\(path, model=module\)"):
        fedabml.load_prior(path)
    with pytest.raises(InputError, match="other names or shapes"):
        fedabml.load_prior(path, model=nn.Linear(6, 3))
    posterior = run.prior.personalize(*client(9, 1), device="cpu")
    with pytest.raises(InputError, match="not a prior"):
        fedabml.load_prior(posterior.save(tmp_path / "posterior.safetensors"), model=own())
    loaded = fedabml.load_posterior(tmp_path / "posterior.safetensors", model=own(seed=8))
    x = client(3, 3)[0]
    assert np.array_equal(loaded.predict(x, device="cpu").probs, posterior.predict(x, device="cpu").probs)


def test_a_damaged_prior_is_refused(tmp_path):
    run = fedabml.train(federation(), "mlr", FedABML(), **QUICK)
    shared = {"mean": run.prior.shared["mean"].clone(), "logstd": run.prior.shared["logstd"]}
    shared["mean"][0] = float("nan")
    path = fedabml.Prior(run.prior.algorithm, shared, run.prior.input_spec).save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match=r"in 'shared\.mean' that are not finite"):
        fedabml.load_prior(path)


@pytest.mark.slow
def test_local_starts_a_new_client_where_its_own_did(tmp_path):
    """It shares nothing, so the initial weights travel with the file: by name, with a seed, or pretrained."""
    x, y = client(12, 5)
    for model in ("mlp", own(seed=3)):
        run = fedabml.train(federation(), model, Local(lr=0.1), seed=3, **QUICK)
        path = run.prior.save(tmp_path / "local.safetensors")
        loaded = fedabml.load_prior(path, model=None if model == "mlp" else own(seed=9))
        a, b = (p.personalize(x, y, device="cpu").predict(x, device="cpu").probs for p in (run.prior, loaded))
        assert np.array_equal(a, b)


# -- regression, images, tables --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_regression_in_the_units_of_the_data():
    g = np.random.default_rng(0)
    make = lambda n: (x := g.normal(size=(n, 3)).astype(np.float32), (100 + 20 * x[:, 0]).astype(np.float32))
    fed = fedabml.Federation.from_arrays([make(60), make(60)], [make(20), make(20)])
    run = fedabml.train(fed, "mlr", FedABML(lr=0.05, nu0=-4.0), rounds=10, participation=1, epochs=2, device="cpu")
    assert run.summary["rmse"] < 4 and {"coverage", "rmse_last10", "prior_rmse"} <= run.summary.keys()
    x, y = make(50)
    p = run.prior.personalize(x, y, device="cpu").predict(x, device="cpu")
    assert p.mean.shape == p.std.shape == (50, 1)
    assert abs(p.mean[:, 0] - y).mean() < 4 and (p.std >= p.model_std).all()
    module = run.prior.personalize(x, y, device="cpu").to_module()
    assert sum(t.numel() for t in module.parameters()) == 4  # without the learned noise


@pytest.mark.slow
def test_images_stay_bytes_until_they_are_needed():
    g = np.random.default_rng(0)
    make = lambda n: (g.integers(0, 256, (n, 16, 16)).astype(np.uint8), g.integers(0, 2, n))
    fed = fedabml.Federation.from_arrays([make(9), make(12)], [make(4), make(4)], classes=2)
    options = {"channels": (2, 2), "hidden": (4,)}
    run = fedabml.train(fed, "cnn", FedABML(), model_options=options, **QUICK)
    x, y = make(6)
    posterior = run.prior.personalize(x, y, device="cpu")
    assert posterior.predict(x[:1], device="cpu").probs.shape == (1, 2)
    with pytest.raises(InputError, match=r"float32 of shape .* trained on uint8"):
        posterior.predict(x[:, None].astype(np.float32), device="cpu")


def test_a_tables_recipe_travels_with_the_prior(tmp_path):
    g = np.random.default_rng(0)
    lines = ["hospital,age,sex,ill"]
    for i in range(60):
        age = "" if i % 11 == 5 else f"{g.normal(50, 10):.1f}"
        lines.append(f"h{i % 3},{age},{'mf'[i % 2]},{['no', 'yes'][int(g.integers(2))]}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    fed = fedabml.read_table(tmp_path / "t.csv", client="hospital", target="ill")
    run = fedabml.train(fed, "mlr", FedABML(), **QUICK)
    prior = fedabml.load_prior(run.prior.save(tmp_path / "p.safetensors"))
    assert prior.input_spec.recipe == fed.recipe and prior.input_spec.recipe is not None
    x = fedabml.data.features(tmp_path / "t.csv", prior.input_spec.recipe)
    assert np.array_equal(np.sort(x, 0), np.sort(fed.x, 0))
    with pytest.raises(InputError, match="Give the table itself"):
        prior.personalize(x, np.arange(60) % 2, device="cpu")
    posterior = prior.personalize(x, np.arange(60) % 2, device="cpu", encoded=True)
    saved = fedabml.load_posterior(posterior.save(tmp_path / "q.safetensors"))
    assert saved.input_spec.recipe == fed.recipe
    told, read = saved.predict(x, device="cpu", encoded=True), posterior.predict(tmp_path / "t.csv", device="cpu")
    assert np.array_equal(told.probs, read.probs)


# -- what is refused ------------------------------------------------------------------------------------------------
def test_batchnorm_is_refused_and_the_way_out_works():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(InputError, match=r"fedabml\.replace_batchnorm\(model\)"):
        fedabml.train(federation(), model, FedABML(), **QUICK)
    fedabml.train(federation(), fedabml.replace_batchnorm(model), FedABML(), **QUICK)


@pytest.mark.parametrize("model", [nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (3, 1)))])
def test_an_output_of_the_wrong_size_is_refused(model):
    with pytest.raises(InputError, match="3 classes need"):
        fedabml.train(federation(), model, FedABML(), **QUICK)


def test_an_input_of_the_wrong_size_is_refused():
    with pytest.raises(InputError, match="cannot take a batch of shape"):
        fedabml.train(federation(), nn.Linear(7, 3), FedABML(), **QUICK)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rounds": -1}, "rounds must be"),
        ({"rounds": 2.5}, "rounds must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"participation": 0}, "participation is"),
        ({"participation": 1.5}, "participation is"),
        ({"participation": float("nan")}, "participation is"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"dtype": "float16"}, "no dtype"),
        ({"backend": "both"}, "no backend"),
        ({"chunk": 0}, "chunk must be"),
        ({"device": "tpu"}, "[Dd]evice"),
        ({"split": "train"}, "split must be"),
        ({"likelihood": fedabml.Categorical(4)}, "does not fit this data"),
        ({"likelihood": fedabml.GaussianNoise(1)}, "does not fit this data"),
    ],
)
def test_words_out_of_range_are_refused_before_anything_is_written(words, message, tmp_path):
    with pytest.raises(InputError, match=message):
        fedabml.train(federation(), "mlr", FedABML(), out=tmp_path / "run", **(QUICK | words))
    assert not (tmp_path / "run").exists()


def test_without_test_data_evaluation_is_refused_at_once_and_training_is_not(tmp_path):
    with pytest.raises(InputError, match="evaluate=False"):
        fedabml.train(federation(test=False), "mlr", FedABML(), out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()
    run = fedabml.train(federation(test=False), "mlr", FedABML(), out=tmp_path / "run", evaluate=False, **QUICK)
    assert run.evaluation is None and run.summary["accuracy"] is None and len(run.history) == 2
    run.prior.personalize(*client(9, 1), device="cpu").predict(client(3, 1)[0], device="cpu")


def test_validation_rows_are_scored_where_there_are_any():
    fed = federation().hold_out(0.3)
    run = fedabml.train(fed, "mlr", FedABML(), **QUICK)
    assert run.summary["split"] == "val"
    explicit = fedabml.train(fed, "mlr", FedABML(), split="test", **QUICK)
    assert explicit.summary["split"] == "test" and explicit.summary["nll"] != run.summary["nll"]


def test_whole_numbers_that_are_standardised_are_noted():
    random = np.random.default_rng(0)
    x, y = random.integers(0, 9, (20, 3)), random.integers(0, 2, 20)
    words = {"participation": 1.0, "device": "cpu", "batch_size": 5}
    for inputs, count in ((x, 1), (x.astype(float), 0), (x > 4, 0)):
        fed = fedabml.Federation.from_arrays([(inputs, y)] * 2)
        notes = fedabml.prepare(fed, "mlr", **words).notes
        assert ["whole numbers" in note for note in notes] == [True] * count
    raw = fedabml.Federation.from_arrays([(x, y)] * 2, normalize="none")
    assert fedabml.prepare(raw, "mlr", **words).notes == []


def test_a_module_that_ends_in_a_softmax_is_noted():
    words = {"rounds": 1, "participation": 1.0, "epochs": 1, "batch_size": 5, "device": "cpu"}
    fed = federation()
    bare = nn.Linear(fed.x.shape[1], fed.classes)
    assert "Remove the softmax" in fedabml.prepare(fed, nn.Sequential(bare, nn.Softmax(1)), **words).notes[0]
    assert fedabml.prepare(fed, bare, **words).notes == []


def test_a_batch_larger_than_a_clients_data_is_noted():
    words = {"participation": 0.5, "device": "cpu"}
    setup = fedabml.prepare(federation(), "mlr", batch_size=15, **words)
    assert len(setup.notes) == 1 and "2 client(s)" in setup.notes[0]
    assert fedabml.prepare(federation(), "mlr", batch_size=9, **words).notes == []


def test_notes_say_what_a_choice_amounts_to():
    setup = fedabml.prepare(federation(), "mlr", FedABML(prior_every="batch"), batch_size=9, device="cpu")
    assert "FedAvg with weight noise" in setup.notes[0] and "Only 1 of 4 clients" in setup.notes[1]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((5, 7), np.float32), np.zeros(5, int), "shape"),
        (np.zeros((5, 6), np.float32), np.full(5, 3), "3"),
        (np.full((5, 6), np.nan, np.float32), np.zeros(5, int), "NaN|finite"),
        (np.zeros((1, 6), np.float32), np.zeros(1, int), "at least|two|1 "),
    ],
)
def test_a_new_clients_bad_data_are_refused(x, y, message):
    run = fedabml.train(federation(), "mlr", FedABML(), **QUICK)
    with pytest.raises(InputError, match=message):
        run.prior.personalize(x, y, device="cpu")


@pytest.mark.parametrize("x", [np.zeros((3, 7), np.float32), np.zeros((1, 6, 1), np.float32), np.zeros((0, 6)), 3.0])
def test_inputs_that_do_not_fit_are_refused(x):
    posterior = fedabml.train(federation(), "mlr", FedABML(), **QUICK).prior.personalize(*client(9, 1), device="cpu")
    with pytest.raises(InputError):
        posterior.predict(x, device="cpu")


def test_personalising_that_diverges_says_so():
    run = fedabml.train(federation(), "mlr", FedAvg(lr=0.1), **QUICK)
    x, y = client(20, 1)
    with pytest.raises(InputError, match="smaller lr"):
        run.prior.personalize(1e30 * x, y, lr=1e30, epochs=5, device="cpu")


def test_callbacks_see_every_round():
    seen = []
    setups = []
    fedabml.train(
        federation(), "mlr", FedABML(), on_round=seen.append, on_start=lambda setup, sim: setups.append(setup), **QUICK
    )
    assert [line["round"] for line in seen] == [1, 2] and setups[0].config["backend"] == "vmap"


# -- what a run must survive ---------------------------------------------------------------------------------------
WILD = {"kl_step": "explicit", "lam": 10, "nu0": -7, "personal_lr": 1.0, "personal_epochs": 30, "lr": 1e-4}


@pytest.mark.slow
def test_a_score_that_diverges_costs_neither_the_prior_nor_the_rounds(tmp_path):
    words = QUICK | {"rounds": 2}
    with pytest.raises(fedabml.TrainingError, match="Personalising diverged"):
        fedabml.train(federation(), "mlr", FedABML(**WILD), out=tmp_path, eval_every=1, **words)
    assert fedabml.load_prior(tmp_path / "shared.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2] and "diverged" in lines[0]["eval_error"]
    mended = FedABML(**(WILD | {"personal_lr": 1e-6}))
    run = fedabml.train(federation(), "mlr", mended, out=tmp_path, resume=True, eval_every=1, **words)
    assert run.summary["accuracy"] > 0


def test_a_resumed_run_must_start_from_the_same_weights(tmp_path):
    first, other = Own(), Own()
    other.load_state_dict(first.state_dict())
    other.frozen.weight.data += 1
    fedabml.train(federation(), first, Local(), out=tmp_path, **QUICK)
    with pytest.raises(InputError, match="weights"):
        fedabml.train(federation(), other, Local(), out=tmp_path, resume=True, **QUICK)


def test_a_folder_with_checkpoints_is_never_begun_anew(tmp_path):
    fedabml.train(federation(), "mlr", FedAvg(), out=tmp_path, **QUICK)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match="already holds a run"):
        fedabml.train(federation(), "mlr", FedAvg(), out=tmp_path, **QUICK)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    fedabml.train(federation(), "mlr", FedAvg(), out=tmp_path / "a", **QUICK)
    fedabml.train(federation(), "mlr", FedABML(), out=tmp_path / "b", **QUICK)
    for file in (tmp_path / "a" / "checkpoints").iterdir():
        shutil.copy(file, tmp_path / "b" / "checkpoints" / file.name)
    with pytest.raises(InputError, match="does not belong to this run"):
        fedabml.train(federation(), "mlr", FedABML(), out=tmp_path / "b", resume=True, **QUICK)


def test_a_resumed_run_keeps_what_it_is_not_told_anew_and_draws_a_missing_picture(tmp_path):
    fedabml.train(federation(), "mlr", FedAvg(), out=tmp_path, extra={"run": {"a": 1}}, **QUICK)
    (tmp_path / "partition.svg").unlink()
    fedabml.train(federation(), "mlr", FedAvg(), out=tmp_path, resume=True, **QUICK)
    assert json.loads((tmp_path / "config.json").read_text())["run"] == {"a": 1}
    assert (tmp_path / "partition.svg").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"algorithm": "fedavg"}, "algorithm must be an object"),
        ({"algorithm": FedAvg}, "algorithm must be an object"),
        ({"model": nn.Linear}, "an object, not its class"),
        ({"chunk": 1.5}, "chunk must be a whole number"),
        ({"participation": "0.1"}, "participation must be a number"),
    ],
)
def test_words_of_the_wrong_kind(words, says):
    with pytest.raises(InputError, match=says):
        fedabml.prepare(federation(), **words)


def test_numpy_numbers_are_numbers():
    run = fedabml.train(federation(), "mlr", FedAvg(), **QUICK | {"seed": np.int64(2), "rounds": np.int64(1)})
    assert run.summary["seed"] == 2 and type(run.summary["rounds"]) is int


def test_from_python_a_run_has_its_log_and_what_is_to_be_noted(tmp_path, caplog):
    class Branching(torch.nn.Module):  # cannot be batched over clients: it runs client by client, and says so
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 10)

        def forward(self, x):
            x = x.flatten(1)
            return self.linear(x if x.sum() > 0 else -x)

    model, fed = Branching(), fedabml.federate(fedabml.load("digits"), partition="iid", clients=4)
    words = {"epochs": 1, "participation": 1, "batch_size": 100, "evaluate": False, "device": "cpu"}
    fedabml.train(fed, model, fedabml.FedABML(), rounds=2, out=tmp_path / "run", **words)
    fallback = [record for record in caplog.records if "client by client" in record.message]
    assert len(fallback) == 1 and fallback[0].name == "fedabml" and fallback[0].levelname == "WARNING"
    log = (tmp_path / "run/train.log").read_text().splitlines()
    assert any(fallback[0].message in line for line in log)
    assert "started at round 0 of 2" in log[-3] and "round 1/2  loss" in log[-2] and "round 2/2  loss" in log[-1]
    fedabml.train(fed, model, fedabml.FedABML(), rounds=3, out=tmp_path / "run", resume=True, **words)
    log = (tmp_path / "run/train.log").read_text().splitlines()
    assert "resumed after round 2 of 3" in log[-2] and "round 3/3" in log[-1]
    caplog.clear()
    setups = []
    fedabml.train(fed, model, rounds=0, on_start=lambda setup, sim: setups.append(setup), **words)
    assert not caplog.records and any("client by client" in note for note in setups[0].notes)
