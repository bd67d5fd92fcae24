"""The measures against torchmetrics, scikit-learn, scipy and by hand; and what is scored."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import norm
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, mean_squared_error
from torch import nn

import fedabml
from fedabml import FedABML, FedAvg, GaussianNoise, Local, Prediction, Regression
from fedabml.data.rows import Rows
from fedabml.data.statistics import worst_decile
from fedabml.engine import policy
from fedabml.engine.rounds import Simulation
from fedabml.evaluation.calibration import fit_temperature
from fedabml.evaluation.client_scores import BINS, calibration, classification_scores, regression_scores
from fedabml.evaluation.measures import of_large
from fedabml.evaluation.scoring import clients_to_score, evaluate
from fedabml.experiments.search import measured
from fedabml.runs.prediction_columns import output_columns

CLIENTS, CLASSES = 4, 5


@pytest.fixture(scope="module")
def scored():
    g = np.random.default_rng(0)
    owner = np.repeat(np.arange(CLIENTS), [30, 1, 70, 200])
    probs = softmax(2 * g.normal(size=(len(owner), CLASSES)), -1)
    y = np.array([g.choice(CLASSES, p=0.7 * p + 0.3 / CLASSES) for p in probs])
    prediction = Prediction(probs, np.zeros(len(y)))
    return prediction, y, owner, *classification_scores(prediction, y, owner, CLIENTS)


def groups(owner):
    return [(c, owner == c) for c in range(CLIENTS)]


@pytest.mark.slow
def test_accuracy_equals_scikit_learn_and_torchmetrics(scored):
    from torchmetrics.functional.classification import multiclass_accuracy  # takes seconds to import

    p, y, owner, clients, pooled, _ = scored
    for c, own in groups(owner):
        assert clients["accuracy"][c] == pytest.approx(accuracy_score(y[own], p.label[own]))
    expected = multiclass_accuracy(torch.tensor(p.probs), torch.tensor(y), CLASSES, average="micro").item()
    assert pooled["accuracy_pooled"] == pytest.approx(expected)


def test_nll_equals_scikit_learn(scored):
    p, y, owner, clients, pooled, _ = scored
    for c, own in groups(owner):
        assert clients["nll"][c] == pytest.approx(log_loss(y[own], p.probs[own], labels=range(CLASSES)))
    assert pooled["nll_pooled"] == pytest.approx(log_loss(y, p.probs, labels=range(CLASSES)))


def test_brier_equals_scikit_learn_and_its_definition(scored):
    p, y, owner, clients, pooled, _ = scored
    squared = ((p.probs - np.eye(CLASSES)[y]) ** 2).sum(1)
    for c, own in groups(owner):
        assert clients["brier"][c] == pytest.approx(squared[own].mean())
    one_against_rest = sum(brier_score_loss(y == k, p.probs[:, k]) for k in range(CLASSES))
    assert pooled["brier_pooled"] == pytest.approx(one_against_rest)


@pytest.mark.slow
def test_ece_equals_torchmetrics(scored):
    from torchmetrics.functional.classification import multiclass_calibration_error

    p, y, owner, clients, pooled, _ = scored
    ece = lambda own: multiclass_calibration_error(
        torch.tensor(p.probs[own]), torch.tensor(y[own]), CLASSES, n_bins=15, norm="l1"
    ).item()
    for c, own in groups(owner):
        assert clients["ece"][c] == pytest.approx(ece(own), abs=1e-6)
    assert pooled["ece"] == pytest.approx(ece(slice(None)), abs=1e-6)
    assert pooled["ece_clients"] == pytest.approx(clients["ece"].mean())
    assert pooled["ece"] < pooled["ece_clients"]  # few samples bias it upwards, so the two must not be confused


def test_bins_by_hand():
    confidence = np.array([1 / 15, 0.0, 1.0, 0.5, 1e-9])
    count, sure, hit = calibration(confidence, np.array([1, 0, 1, 0, 1]), np.zeros(5, int), 1)
    assert count[0].tolist() == [3, *[0] * 6, 1, *[0] * 6, 1]
    assert sure[0, 0] == pytest.approx(1 / 15) and hit[0, 0] == 2 and hit[0, 7] == 0 and hit[0, -1] == 1


def test_reliability_and_histogram_hold_every_sample(scored):
    p, y, _, _, pooled, details = scored
    bins = details["reliability"]
    assert len(bins) == BINS and sum(b["count"] for b in bins) == len(y)
    ece = sum(b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(y)
    assert ece == pytest.approx(pooled["ece"])
    histogram = details["entropy_histogram"]
    assert sum(histogram["correct"]) == (p.label == y).sum() and sum(histogram["wrong"]) == (p.label != y).sum()


@pytest.mark.parametrize(("n", "expected"), [(1, 0.0), (9, 0.0), (10, 0.0), (20, 0.5), (35, 1.0)])
def test_worst_decile(n, expected):
    values = np.random.default_rng(0).permutation(n).astype(float)
    assert worst_decile(values) == expected  # the mean of the n//10 (at least one) lowest of 0..n−1


# -- regression ----------------------------------------------------------------------------------------------------
def test_scores_of_a_calibrated_regression():
    """Data drawn from the predictions themselves: nine in ten lie inside the interval."""
    g = np.random.default_rng(2)
    n = 40_000
    mean, log = g.normal(size=(n, 1)), 0.5 * g.normal(size=(n, 1))
    y = mean + np.exp(log) * g.normal(size=(n, 1))
    p = Regression.of(torch.tensor(np.concatenate([mean, log], -1)[None]), np.zeros(1), np.ones(1))
    owner = np.sort(g.integers(0, 3, n))
    clients, pooled, _ = regression_scores(p, y, owner, 3)
    assert pooled["coverage_pooled"] == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / n)) and pooled["interval"] == 0.9
    assert norm.cdf(1.6448536269514722) == pytest.approx(0.95)
    for c in range(3):
        own = owner == c
        assert clients["rmse"][c] == pytest.approx(mean_squared_error(y[own], mean[own]) ** 0.5)
        assert clients["nll"][c] == pytest.approx(-norm.logpdf(y[own], mean[own], np.exp(log[own])).mean())
    assert pooled["rmse_pooled"] == pytest.approx(mean_squared_error(y, mean) ** 0.5)
    assert (clients["model_std"] == 0).all()


# -- what is scored ------------------------------------------------------------------------------------------------
def data(task, sizes=(12, 30, 8), tests=(5, 9, 4)):
    g = np.random.default_rng(3)

    def client(n, c):
        x = g.normal(size=(n, 4)).astype(np.float32)
        if task == "regression":
            return x, (x @ [1.0, -1.0, 2.0, 0.0] + c + 0.3 * g.normal(size=n)).astype(np.float32)
        return x, g.choice([c % 3, (c + 1) % 3], n)

    pairs = [client(n, c) for c, n in enumerate(sizes)], [client(n, c) for c, n in enumerate(tests)]
    return fedabml.Federation.from_arrays(*pairs, classes=3 if task == "classification" else None)


def validated(fed, counts):
    """Let each client hold out its first rows of training for validation."""
    rows = [fed.train[c] for c in range(fed.clients)]
    held = [own[:n] for own, n in zip(rows, counts, strict=True)]
    kept = [own[n:] for own, n in zip(rows, counts, strict=True)]
    return dataclasses.replace(fed, train=Rows.of(kept), val=Rows.of(held))


def evaluated(fed, algorithm, rounds=1, model="mlr", **options):
    words = {"participation": 1, "epochs": 1, "batch_size": 8, "device": "cpu", "dtype": "float64"}
    setup = fedabml.prepare(fed, model, algorithm, rounds=rounds, **(words | options))
    sim = Simulation(setup.cohort)
    sim.run(rounds)
    return evaluate(setup.cohort, sim.theta, sim.kept_for), sim


def test_scores_of_a_linear_model_by_hand():
    """0 personal epochs and the label level: p ∝ π_i·softmax(Wx + b), π_i = (counts + α)/(n + Kα)."""
    fed = data("classification")
    scores, sim = evaluated(fed, FedABML(personal_epochs=0, predict_samples=0, label_alpha=0.3, lr=0.1))
    w, b = sim.shared["mean"].numpy()[:12].reshape(3, 4), sim.shared["mean"].numpy()[12:]
    hits, plain_hits = [], []
    for c in range(3):
        x = (fed.x[fed.test[c]] - fed.shift) / fed.scale
        y = fed.y[fed.test[c]]
        counts = np.bincount(fed.y[fed.train[c]], minlength=3)
        plain = softmax(x.astype(float) @ w.T + b, -1)
        weighted = plain * (counts + 0.3) / (len(fed.train[c]) + 0.9)
        probs = weighted / weighted.sum(1, keepdims=True)
        each = -np.log(probs[np.arange(len(y)), y])
        assert scores.clients["nll"][c] == pytest.approx(each.mean(), abs=1e-6)
        assert scores.clients["accuracy"][c] == (probs.argmax(1) == y).mean()
        assert scores.clients["prior_nll"][c] == pytest.approx(-np.log(plain[np.arange(len(y)), y]).mean(), abs=1e-6)
        hits.append((probs.argmax(1) == y).mean())
        plain_hits.append((plain.argmax(1) == y).mean())
    assert scores.summary["accuracy"] == pytest.approx(np.mean(hits))
    assert scores.summary["prior_accuracy"] == pytest.approx(np.mean(plain_hits))
    assert (scores.clients["mutual_information"] < 1e-12).all()  # one pass of the mean


def test_the_prior_with_the_label_level_by_hand():
    """Without personal steps the personal model is the prior with the label level, so both have the same scores."""
    fed = data("classification")
    scores, _ = evaluated(fed, FedABML(personal_epochs=0, predict_samples=0, label_alpha=0.3, lr=0.1))
    for name in ("accuracy", "nll", "brier", "ece", "entropy"):
        np.testing.assert_allclose(scores.clients[f"prior_level_{name}"], scores.clients[name], atol=1e-9)
        assert name == "entropy" or scores.summary[f"prior_level_{name}"] == pytest.approx(scores.summary[name])
    assert not np.allclose(scores.clients["prior_level_nll"], scores.clients["prior_nll"])
    personal, _ = evaluated(fed, FedABML(personal_epochs=5, predict_samples=0, label_alpha=0.3, lr=0.1))
    np.testing.assert_allclose(personal.clients["prior_level_nll"], scores.clients["prior_level_nll"])
    assert not np.allclose(personal.clients["nll"], scores.clients["nll"])


def test_calibrated_scores_of_a_linear_model_by_hand():
    """p ∝ softmax((Wx + b)/T) with a T of each client, from its validation rows alone; a client without any keeps 1."""
    fed = validated(data("classification", sizes=(12, 30, 60), tests=(5, 9, 20)), (0, 10, 40))
    scores, sim = evaluated(fed, FedAvg(lr=0.5, personal_epochs=0), rounds=3)
    w, b = sim.shared["mean"].numpy()[:12].reshape(3, 4), sim.shared["mean"].numpy()[12:]

    def probabilities(rows):
        x = (fed.x[rows] - fed.shift) / fed.scale
        return softmax(x.astype(float) @ w.T + b, -1), fed.y[rows]

    losses, pooled, labels = [], [], []
    for c in range(3):
        temperature = fit_temperature(*probabilities(fed.val[c]))
        probs, y = probabilities(fed.test[c])
        probs = softmax(np.log(probs) / temperature, -1)
        losses.append(log_loss(y, probs, labels=range(3)))
        assert scores.clients["temperature"][c] == pytest.approx(temperature, abs=1e-6)
        assert scores.clients["nll_calibrated"][c] == pytest.approx(losses[-1], abs=1e-6)
        pooled.append(probs)
        labels.append(y)
    assert scores.clients["temperature"][0] == 1 != scores.clients["temperature"][2]
    assert scores.summary["nll_calibrated"] == pytest.approx(np.mean(losses))
    joined, owner = Prediction(np.concatenate(pooled), np.zeros(34)), np.repeat(range(3), (5, 9, 20))
    ece = classification_scores(joined, np.concatenate(labels), owner, 3)[1]["ece"]
    assert scores.summary["ece_calibrated"] == pytest.approx(ece)


def test_calibrated_scores_need_validation_rows_and_test_rows():
    plain, _ = evaluated(data("classification"), FedAvg())
    fed = validated(data("classification"), (2, 6, 2))
    scores, sim = evaluated(fed, FedAvg())
    of_validation = evaluate(sim.cohort, sim.theta, sim.kept_for, split="val")
    brief = evaluate(sim.cohort, sim.theta, sim.kept_for, brief=True)
    assert set(scores.summary) - set(plain.summary) == {"nll_calibrated", "ece_calibrated", "temperature"}
    assert not {"nll_calibrated", "temperature"} & (of_validation.summary.keys() | brief.summary.keys())


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_calibrated_scores_do_not_depend_on_how_clients_are_computed(backend):
    fed = validated(data("classification", sizes=(12, 30, 8, 9), tests=(5, 9, 4, 6)), (3, 6, 0, 2))
    algorithm = FedABML(personal_epochs=1, predict_samples=2)
    one, _ = evaluated(fed, algorithm, backend="loop")
    other, _ = evaluated(fed, algorithm, backend=backend, chunk=2)
    for name in ("temperature", "nll_calibrated", "ece"):
        np.testing.assert_allclose(other.clients[name], one.clients[name], rtol=1e-6, err_msg=name)


def test_a_label_level_of_equal_counts_changes_nothing_and_one_of_a_single_class_gives_that_class():
    rng, classes = np.random.default_rng(0), 3
    even, single = np.tile(np.arange(classes), 20), np.full(60, 2)
    pairs = [(rng.normal(size=(60, 4)).astype(np.float32), y) for y in (even, single)]
    tests = [(rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 3, 30)) for _ in pairs]
    fed = fedabml.Federation.from_arrays(pairs, tests, classes=classes)
    scores, _ = evaluated(fed, FedABML(predict_samples=3, label_alpha=1e-6, lr=0.001))
    for name in ("accuracy", "nll", "brier", "mutual_information"):
        assert scores.clients[f"prior_level_{name}"][0] == pytest.approx(scores.clients[f"prior_{name}"][0], abs=1e-12)
    assert scores.clients["prior_level_accuracy"][1] == (tests[1][1] == 2).mean()
    assert scores.clients["prior_level_entropy"][1] < 1e-4 < scores.clients["prior_entropy"][1]


def test_an_algorithm_without_a_label_level_has_one_prior():
    scores, _ = evaluated(data("classification"), FedAvg(lr=0.1))
    assert not any("level" in name for name in (*scores.summary, *scores.clients))


def test_clients_of_few_rows_are_counted_and_do_not_decide_the_worst_tenth():
    fed = data("classification", sizes=(6, 8, 7), tests=(9, 10, 30))
    scores, _ = evaluated(fed, FedAvg(lr=0.1))
    assert scores.summary["clients_small"] == 1
    assert scores.summary["accuracy_worst_decile"] == scores.clients["accuracy"][1:].min()
    assert scores.summary["accuracy_worst_decile_all"] == scores.clients["accuracy"].min()
    tiny, _ = evaluated(data("classification"), FedAvg(lr=0.1))
    assert tiny.summary["clients_small"] == 3 and tiny.summary["accuracy_worst_decile"] is None
    large, _ = evaluated(data("classification", tests=(10, 10, 10)), FedAvg(lr=0.1))
    assert large.summary["clients_small"] == 0 and "accuracy_worst_decile_all" not in large.summary


def test_clients_with_few_rows_of_a_class_do_not_count_in_means_of_ranks():
    """The rank of one positive among nine is chance: the client counts in the pooled AUROC and in `auroc_all` alone."""
    random = np.random.default_rng(0)

    def rows(positives, negatives):
        y = np.repeat([1, 0], [positives, negatives])
        return (random.normal(size=(len(y), 4)) + y[:, None]).astype("float32"), y

    train = [rows(8, 12) for _ in range(3)]
    fed = fedabml.Federation.from_arrays(train, [rows(1, 9), rows(5, 7), rows(20, 6)])
    scores, _ = evaluated(fed, FedAvg(lr=0.1))
    summary, clients = scores.summary, scores.clients
    assert (summary["clients_small"], summary["clients_few_of_class"]) == (0, 1)
    for key in ("auroc", "average_precision", "f1", "recall", "precision", "base_average_precision", "base_auroc"):
        assert summary[key] == pytest.approx(clients[key][1:].mean())
        assert summary[f"{key}_all"] == pytest.approx(np.nanmean(clients[key]))
    assert "accuracy_all" not in summary and summary["base_accuracy_worst_decile"] == clients["base_accuracy"].min()
    assert clients["rows[1]"].tolist() == [1, 5, 20]
    few, _ = evaluated(fedabml.Federation.from_arrays(train, [rows(1, 9)] * 3), FedAvg(lr=0.1))
    assert few.summary["auroc"] is None is not few.summary["auroc_all"] and few.summary["auroc_pooled"] is not None
    enough, _ = evaluated(fedabml.Federation.from_arrays(train, [rows(6, 9)] * 3), FedAvg(lr=0.1))
    assert enough.summary["clients_few_of_class"] == 0 and "auroc_all" not in enough.summary


def test_a_client_of_one_row_does_not_count_in_means_of_a_regression():
    """Its coverage is 0% or 100%, and its RMSE one error: headlines are the others' mean. Searches count all."""
    fed = data("regression", sizes=(9, 8, 7), tests=(1, 10, 30))
    scores, _ = evaluated(fed, FedAvg(lr=0.1))
    summary, clients = scores.summary, scores.clients
    for key in ("rmse", "nll", "mae", "pinball", "coverage", "interval_width", "base_rmse", "base_mae", "prior_rmse"):
        assert summary[key] == pytest.approx(clients[key][1:].mean()), key
        assert summary[f"{key}_all"] == pytest.approx(clients[key].mean()), key
        assert of_large(key, summary) == "of 10 rows or more"
        if not key.startswith("prior_"):  # which no search decides by
            assert measured(summary, key) == summary[f"{key}_all"]
    tiny, _ = evaluated(data("regression", tests=(9, 9, 9)), FedAvg(lr=0.1))  # nobody is left: all of them count
    assert tiny.summary["rmse"] == pytest.approx(tiny.clients["rmse"].mean()) and "rmse_all" not in tiny.summary


def test_the_summary_is_the_unweighted_mean_over_clients():
    scores, _ = evaluated(data("classification"), FedAvg(lr=0.1))
    for name in ("accuracy", "nll", "brier", "entropy", "mutual_information"):
        assert scores.summary[name] == pytest.approx(scores.clients[name].mean())
    sizes = np.array([5, 9, 4])
    assert scores.summary["nll_pooled"] == pytest.approx((scores.clients["nll"] * sizes).sum() / 18)


def test_regression_scores_of_a_linear_model_by_hand():
    fed = data("regression")
    options = {"likelihood": GaussianNoise(1, 0.7, learn=False)}
    scores, sim = evaluated(fed, FedAvg(personal_epochs=0, lr=0.1), **options)
    w, b = sim.shared["mean"].numpy()[:4], sim.shared["mean"].numpy()[4]
    for c in range(3):
        x = (fed.x[fed.test[c]] - fed.shift) / fed.scale
        mean = (x.astype(float) @ w + b) * fed.y_scale[0] + fed.y_shift[0]
        y, std = fed.y[fed.test[c]][:, 0], 0.7 * fed.y_scale[0]
        assert scores.clients["rmse"][c] == pytest.approx(np.sqrt(((mean - y) ** 2).mean()), abs=1e-5)
        assert scores.clients["nll"][c] == pytest.approx(-norm.logpdf(y, mean, std).mean(), abs=1e-5)
        inside = np.abs(mean - y) < 1.6448536 * std
        assert scores.clients["coverage"][c] == pytest.approx(inside.mean())
        assert scores.clients["prior_rmse"][c] == pytest.approx(scores.clients["rmse"][c])
        assert scores.clients["std"][c] == pytest.approx(std, abs=1e-5)
        assert (
            0
            <= scores.clients["coverage_low"][c]
            <= scores.clients["coverage"][c]
            <= scores.clients["coverage_high"][c]
        )
    sizes = fed.test.counts
    for key in ("mae", "pinball", "interval_width", "base_mae", "base_pinball", "base_coverage"):
        assert scores.summary[f"{key}_pooled"] == pytest.approx(np.average(scores.clients[key], weights=sizes))
    assert {"rmse_low", "mae_high"} <= scores.clients.keys()  # the client of nine rows has them


@pytest.mark.slow
def test_learned_noise_finds_its_level():
    """y = a·x + N(0, .3²) and a linear model: after training the noise is the data's, not the .5 it starts at."""
    fed = data("regression", sizes=(300,), tests=(300,))
    scores, sim = evaluated(fed, FedAvg(lr=0.01, personal_lr=0.01), rounds=80, batch_size=50)
    learned = 0.5 * math.exp(sim.shared["mean"][-1].item()) * fed.y_scale[0]
    assert learned == pytest.approx(0.3, abs=5 * 0.3 / math.sqrt(2 * 300))  # five standard errors
    assert scores.summary["coverage"] == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / 300))
    assert scores.summary["rmse"] == pytest.approx(0.3, abs=0.05)


def test_a_server_without_a_model_has_no_prior_score():
    scores, _ = evaluated(data("classification"), Local(lr=0.1))
    assert scores.summary["prior_accuracy"] is None and scores.summary["prior_nll"] is None
    assert not any(name.startswith("prior") for name in scores.clients)


def test_the_prior_is_scored_in_pieces_and_joined():
    fed = data("classification", tests=(5000, 4500, 3))
    scores, sim = evaluated(fed, FedAvg(lr=0.1), rounds=0)
    rows = fed.test.index
    x = torch.tensor((fed.x[rows] - fed.shift) / fed.scale).double()
    probs = sim.cohort.network(sim.shared["mean"], x).softmax(-1).numpy()
    hit = probs.argmax(1) == fed.y[rows]
    for c in range(3):
        assert scores.clients["prior_accuracy"][c] == pytest.approx(hit[fed.test.owner == c].mean())


@pytest.mark.slow
def test_pieces_of_test_rows_do_not_matter(monkeypatch):
    fed = data("classification", tests=(5, 300, 4))
    whole, _ = evaluated(fed, FedABML())
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(rows_per_lane=7, activations_on_cpu=1))
    parts, _ = evaluated(fed, FedABML())
    assert parts.summary["nll"] == pytest.approx(whole.summary["nll"], abs=1e-12)
    assert parts.summary["entropy"] == pytest.approx(whole.summary["entropy"], abs=1e-12)


def test_rows_for_nobody_are_an_error_and_for_some_a_score_of_those():
    fed = data("classification")
    setup = fedabml.prepare(fed, "mlr", FedAvg(), device="cpu")
    shared = {"mean": setup.cohort.network.initial}
    with pytest.raises(fedabml.InputError, match="no client has val samples"):
        evaluate(setup.cohort, shared, lambda part: {}, split="val")
    whole = evaluate(setup.cohort, shared, lambda part: {})
    rows = [fed.test[i] for i in range(fed.clients)]
    rows[1] = rows[1][:0]
    less = dataclasses.replace(fed, test=type(fed.test).of(rows))
    setup = fedabml.prepare(less, "mlr", FedAvg(), device="cpu")
    part = evaluate(setup.cohort, shared, lambda part: {})
    assert np.isnan(part.clients["nll"][1]) and part.summary["clients_scored"] == fed.clients - 1
    others = [i for i in range(fed.clients) if i != 1]
    np.testing.assert_allclose(part.clients["nll"][others], whole.clients["nll"][others])
    assert part.summary["nll"] == pytest.approx(whole.clients["nll"][others].mean())


@pytest.mark.slow
def test_mutual_information_grows_with_the_width_of_the_posterior():
    fed = data("classification")
    wide, narrow = (
        evaluated(fed, FedABML(nu0=nu, personal_epochs=0, predict_samples=50), model=nn.Linear(4, 3), rounds=0)[0]
        for nu in (0.0, -3.0)
    )
    assert wide.summary["mutual_information"] > 20 * narrow.summary["mutual_information"] > 0


@pytest.mark.slow
def test_personalising_that_diverges_names_the_clients():
    fed = fedabml.federate(fedabml.load("digits"), clients=4, classes_per_client=3)
    wild = fedabml.FedABML(kl_step="explicit", lam=10, nu0=-7, personal_lr=1.0, personal_epochs=20)
    with pytest.raises(fedabml.TrainingError, match=r"Personalising diverged for .*client"):
        fedabml.train(fed, "mlr", wild, rounds=0)


def test_some_clients_score_what_they_do_among_all():
    """Three of six are drawn by the seed alone; clients without test rows are not among them."""
    fed = data("classification", sizes=(12, 30, 8, 9, 10, 11), tests=(5, 9, 0, 4, 3, 7))
    everyone, sim = evaluated(fed, FedABML(personal_epochs=1, predict_samples=2))
    some = evaluate(sim.cohort, sim.theta, sim.kept_for, limit=3)
    chosen = np.flatnonzero(~np.isnan(some.clients["nll"]))
    assert chosen.tolist() == clients_to_score(sim.cohort, "test", 3) and len(chosen) == 3 and 2 not in chosen
    assert (some.summary["clients_scored"], everyone.summary["clients_scored"]) == (3, 5)
    for name, values in some.clients.items():
        np.testing.assert_allclose(values[chosen], everyone.clients[name][chosen], rtol=1e-9, err_msg=name)
    assert some.summary["nll"] == pytest.approx(everyone.clients["nll"][chosen].mean())
    assert some.summary["prior_accuracy"] == pytest.approx(everyone.clients["prior_accuracy"][chosen].mean())
    counts = fed.test.counts[chosen]
    assert some.summary["nll_pooled"] == pytest.approx(np.average(everyone.clients["nll"][chosen], weights=counts))
    assert clients_to_score(sim.cohort, "test", 5) == clients_to_score(sim.cohort, "test") == [0, 1, 3, 4, 5]
    others = set()
    for seed in range(20):
        sim.cohort.seed = seed
        others.add(tuple(clients_to_score(sim.cohort, "test", 3)))
    assert len(others) > 5


@pytest.mark.slow
def test_classes_of_a_built_in_dataset_have_the_same_names_in_scores_and_predictions():
    g = np.random.default_rng(0)
    parts = [(g.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 10) for _ in range(2)]
    fed = fedabml.Federation.from_arrays(parts, parts, dataset="cifar10")
    result = fedabml.train(fed, "mlr", FedAvg(), rounds=1, participation=1.0, device="cpu")
    columns = output_columns(result.posterior(0).predict(parts[0][0]), result.prior.input_spec)
    names = [name.removeprefix("p_") for name in columns if name.startswith("p_")]
    assert names[0] == "airplane" and result.evaluation.details["class_names"] == names
    assert [f"rows[{name}]" for name in names] == [c for c in result.evaluation.clients if c.startswith("rows[")]
