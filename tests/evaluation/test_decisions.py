"""Measures of classifiers, held against scikit-learn for every client."""

import numpy as np
import pytest
from sklearn import metrics

from fedabml.evaluation.decisions import (
    BOOTSTRAPPED,
    base_rate,
    base_regression,
    bootstrap,
    class_counts,
    decision_measures,
    rates,
    regression_intervals,
    report,
    wilson,
)


def drawn(classes, seed, clients=7, ties=False):
    random = np.random.default_rng(seed)
    owner = np.sort(random.integers(0, clients, 400))
    y = random.integers(0, classes, 400)
    probs = random.dirichlet(np.ones(classes), 400) + 0.5 * np.eye(classes)[y]
    probs = np.round(probs, 1) + 0.01 if ties else probs
    return probs / probs.sum(1, keepdims=True), y, owner, clients


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_two_classes_are_scikit_learn_s(seed, ties):
    probs, y, owner, clients = drawn(2, seed, ties=ties)
    ours = decision_measures(probs, y, owner, clients)
    for client in range(clients):
        p, t = probs[owner == client, 1], y[owner == client]
        label = probs[owner == client].argmax(1)
        false, true, _ = metrics.roc_curve(t, p, drop_intermediate=False)
        assert ours["auroc"][client] == pytest.approx(metrics.roc_auc_score(t, p))
        assert ours["average_precision"][client] == pytest.approx(metrics.average_precision_score(t, p))
        assert ours["sensitivity"][client] == pytest.approx(true[false <= 0.1 + 1e-9].max())
        assert ours["f1"][client] == pytest.approx(metrics.f1_score(t, label))
        assert ours["recall"][client] == pytest.approx(metrics.recall_score(t, label))
        assert ours["precision"][client] == pytest.approx(metrics.precision_score(t, label, zero_division=0))
        assert ours["balanced_accuracy"][client] == pytest.approx(metrics.balanced_accuracy_score(t, label))


# Twenty negatives with scores .01 … .20, and positives at .30, .195, .185, .175 and .05. With `a` false alarms allowed,
# the lowest threshold lies just above the negative that ranks a + 1.
@pytest.mark.parametrize(
    ("specificity", "alarms", "found"),
    [(1.0, 0, 1), (0.95, 1, 2), (0.94, 1, 2), (0.9, 2, 3), (0.8, 4, 4), (0.1, 18, 5)],
)
def test_sensitivity_at_a_chosen_specificity_by_hand(specificity, alarms, found):
    score = np.r_[np.arange(1, 21) / 100, 0.30, 0.195, 0.185, 0.175, 0.05]
    y = np.repeat([0, 1], [20, 5])
    highest_left_out = np.sort(score[y == 0])[-alarms - 1]
    assert (score[y == 1] > highest_left_out).sum() == found
    probs, counts = np.stack([1 - score, score], 1), np.array([[20, 5]])
    by_client, pooled, _ = report(probs, y, np.zeros(25, int), counts, specificity)
    assert by_client["sensitivity"].tolist() == [pooled["sensitivity_pooled"]] == [found / 5]


@pytest.mark.parametrize("classes", [3, 5])
def test_several_classes_are_macro_averages(classes):
    probs, y, owner, clients = drawn(classes, 5)
    ours = decision_measures(probs, y, owner, clients)
    for client in range(clients):
        p, t = probs[owner == client], y[owner == client]
        assert len(np.unique(t)) == classes
        assert ours["auroc"][client] == pytest.approx(metrics.roc_auc_score(t, p, multi_class="ovr"))
        assert ours["average_precision"][client] == pytest.approx(
            metrics.average_precision_score(np.eye(classes)[t], p, average="macro")
        )
        assert ours["f1"][client] == pytest.approx(metrics.f1_score(t, p.argmax(1), average="macro"))
        assert ours["balanced_accuracy"][client] == pytest.approx(metrics.balanced_accuracy_score(t, p.argmax(1)))


def test_a_client_s_value_does_not_depend_on_the_others_or_on_the_order():
    probs, y, owner, clients = drawn(3, 1)
    ours = decision_measures(probs, y, owner, clients)
    order = np.random.default_rng(0).permutation(len(y))
    mixed = decision_measures(probs[order], y[order], owner[order], clients)
    for key in ours:
        np.testing.assert_allclose(mixed[key], ours[key])
        for client in range(clients):
            mine = owner == client
            alone = decision_measures(probs[mine], y[mine], np.zeros(mine.sum(), int), 1)
            np.testing.assert_allclose(alone[key], ours[key][client])


def test_what_is_not_defined_is_nan():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    ours = decision_measures(probs, np.zeros(3, int), np.array([0, 0, 2]), 3)
    assert np.isnan(ours["auroc"]).all() and np.isnan(ours["recall"]).all()
    np.testing.assert_allclose(ours["balanced_accuracy"], [1, np.nan, 0])
    np.testing.assert_allclose(ours["f1"], [np.nan, np.nan, 0])  # a false alarm, but nothing to find


def test_always_the_common_class_has_no_recall():
    """The case of the hospital: 88% accuracy, and no death is found."""
    y = np.repeat([0, 1], [88, 12])
    counts = class_counts(np.zeros(100, int), y, np.zeros(100, int), 1, 2)
    assert [each.tolist() for each in counts] == [[[88, 0]], [[88, 12]], [[100, 0]]]
    recall, precision, f1 = rates(*counts)
    assert recall.tolist() == [[1, 0]] and precision[0, 1] == 0 and f1[0, 1] == 0


def test_perfect_and_useless_calibration():
    probs = np.tile([0.25, 0.75], (400, 1))
    y = np.repeat([0, 1], [100, 300])
    ours = decision_measures(probs, y, np.zeros(400, int), 1)
    assert ours["classwise_ece"][0] == pytest.approx(0)
    ours = decision_measures(probs, 1 - y, np.zeros(400, int), 1)
    assert ours["classwise_ece"][0] == pytest.approx(0.5)


def test_the_base_rate_knows_training_labels_alone():
    counts, y, owner = np.array([[8, 2], [1, 3]]), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    base, pooled = base_rate(y, owner, counts)
    assert base["base_accuracy"].tolist() == [0.5, 0.5]
    assert base["base_nll"][0] == pytest.approx(-np.log([9 / 12, 3 / 12]).mean())
    assert base["base_brier"][1] == pytest.approx(np.mean([2 * (4 / 6) ** 2, 2 * (2 / 6) ** 2]))
    assert (pooled["base_accuracy_pooled"], pooled["base_auroc_pooled"]) == (0.5, 0.5)


@pytest.mark.parametrize("classes", [2, 4])
def test_base_values_are_scikit_learn_s_of_the_frequencies(classes):
    """At a client nothing is ranked; over all samples the clients are, by their frequencies."""
    _, y, owner, clients = drawn(classes, 2)
    counts = np.random.default_rng(5).integers(0, 30, (clients, classes))
    probs = ((counts + 1) / (counts + 1).sum(1, keepdims=True))[owner]
    base, pooled = base_rate(y, owner, counts)
    more = {"multi_class": "ovr"} if classes > 2 else {}
    average = {"average": "macro", "zero_division": 0} if classes > 2 else {"zero_division": 0}
    assert base["base_auroc"].tolist() == [0.5] * clients
    whole = (pooled[f"base_{key}_pooled"] for key in ("auroc", "average_precision", "f1", "balanced_accuracy"))
    for (area, precise, f1, balanced), mine in [
        (whole, np.full(len(y), True)),
        *(((0.5, *(base[f"base_{key}"][i] for key in ("average_precision", "f1", "balanced_accuracy"))), owner == i)
          for i in range(clients)),
    ]:  # fmt: skip
        t, p = y[mine], probs[mine]
        score = p if classes > 2 else p[:, 1]
        truth = np.eye(classes)[t] if classes > 2 else t
        assert area == pytest.approx(metrics.roc_auc_score(t, score, **more))
        assert precise == pytest.approx(metrics.average_precision_score(truth, score))
        assert f1 == pytest.approx(metrics.f1_score(t, p.argmax(1), **average))
        assert balanced == pytest.approx(metrics.balanced_accuracy_score(t, p.argmax(1)))
    if classes == 2:
        client = 3
        share = (y[owner == client] == 1).mean()
        assert base["base_average_precision"][client] == pytest.approx(share)  # the prevalence
    ours = report(probs, y, owner, counts)[1]  # of a model that says what the base rate says
    assert pooled["base_classwise_ece"] == pytest.approx(ours["classwise_ece_pooled"])


def test_the_base_of_a_regression_is_a_client_s_mean():
    train, trainer = np.array([[1.0], [3.0], [10.0], [10.0], [20.0], [40.0]]), np.array([0, 0, 1, 1, 2, 2])
    y = np.array([[4.0], [30.0], [10.0]])
    base, pooled = base_regression(y, np.array([0, 1, 2]), train, trainer, np.array([0, 2, 1]))
    assert base["base_rmse"].tolist() == [2, 0, 0] and pooled["base_rmse_pooled"] == pytest.approx((4 / 3) ** 0.5)
    variance = (np.array([2.0, 200.0, 0.0]) + train.var()) / 3
    expected = 0.5 * np.log(2 * np.pi * variance) + 0.5 * np.array([4, 0, 0]) / variance
    np.testing.assert_allclose(base["base_nll"], expected)


def test_the_base_of_absolute_errors_is_a_client_s_median_and_of_intervals_its_quantiles():
    random = np.random.default_rng(0)
    trainer, train = np.repeat([0, 1, 2], [1, 30, 11]), np.exp(random.normal(size=(42, 2)))
    owner, y = np.repeat([0, 1, 2], [4, 20, 9]), np.exp(random.normal(size=(33, 2)))
    base, pooled = base_regression(y, owner, train, trainer, np.arange(3))
    for client in range(3):
        own, t = train[trainer == client], y[owner == client]
        low, middle, high = np.quantile(own, (0.05, 0.5, 0.95), axis=0)
        assert base["base_mae"][client] == pytest.approx(np.abs(t - middle).mean())
        losses = [
            metrics.mean_pinball_loss(t, np.tile(end, (len(t), 1)), alpha=alpha)
            for end, alpha in ((low, 0.05), (high, 0.95))
        ]
        assert base["base_pinball"][client] == pytest.approx(np.mean(losses))
        assert base["base_coverage"][client] == pytest.approx(((low <= t) & (t <= high)).mean())
        assert base["base_interval_width"][client] == pytest.approx((high - low).mean())
    assert pooled["base_mae_pooled"] == pytest.approx(np.average(base["base_mae"], weights=[4, 20, 9]))


def test_intervals_of_a_regression_at_small_clients():
    """Coverage has an interval from one row on; the errors from five rows on, of their analytic width."""
    random = np.random.default_rng(1)
    sizes = [1, 4, 40, 60]
    owner = np.repeat(np.arange(4), sizes)
    error = random.normal(size=sum(sizes))
    inside = (np.abs(error) < 1.64).astype(float)
    ends, again = (regression_intervals(np.abs(error), error**2, inside, owner, 4) for _ in range(2))
    assert all(np.array_equal(ends[key], again[key], equal_nan=True) for key in ends)
    assert ends["coverage_low"][0] == pytest.approx(0.2065 if inside[0] else 0.0, abs=1e-4)  # Wilson's of one of one
    assert np.isnan(ends["coverage_low"]).tolist() == [False, False, False, True]
    for key, values in (("mae", np.abs(error)), ("rmse", error**2)):
        assert (
            np.isnan(ends[f"{key}_low"]).tolist() == np.isnan(ends[f"{key}_high"]).tolist() == [True, True, False, True]
        )
        own = values[owner == 2]
        deviation = own.std() / np.sqrt(40) / (1 if key == "mae" else 2 * np.sqrt(own.mean()))
        assert ends[f"{key}_high"][2] - ends[f"{key}_low"][2] == pytest.approx(2 * 1.96 * deviation, rel=0.15)


def test_bootstrap_intervals_of_several_classes_are_quantiles_of_scikit_learn_s(monkeypatch):
    monkeypatch.setattr("fedabml.evaluation.decisions.RESAMPLES", 60)
    random = np.random.default_rng(3)
    y, classes = np.repeat([0, 2, 3], [20, 15, 12]), 4  # the client lacks class 1
    probs = random.dirichlet(np.ones(classes), 47) + 0.5 * np.eye(classes)[y]
    draws = np.random.default_rng(7).integers(0, 47, (60, 47))
    ends = bootstrap(probs, y, seed=7)
    held = {"labels": [0, 2, 3], "average": "macro", "zero_division": 0}
    values = [metrics.recall_score(y[rows], probs[rows].argmax(1), **held) for rows in draws]
    np.testing.assert_allclose(ends["balanced_accuracy"], np.quantile(values, (0.025, 0.975)))
    assert ends.keys() == {"balanced_accuracy", "f1"} and ends["f1"][0] < ends["f1"][1]
    assert np.isnan(bootstrap(probs[:38], y[:38], seed=7)["f1"]).all()  # three rows of the last class
    assert np.isnan(bootstrap(probs[:20], y[:20], seed=7)["f1"]).all()  # one class


def test_columns_by_class_have_the_names_of_the_classes():
    probs, y, owner, clients = drawn(3, 3)
    by_client, _, details = report(probs, y, owner, np.ones((clients, 3)), names=("low", "mid", "high"))
    label = probs.argmax(1)
    assert details["class_names"] == ["low", "mid", "high"]
    for client in range(clients):
        t, found = y[owner == client], label[owner == client]
        recall = metrics.recall_score(t, found, average=None, labels=range(3), zero_division=np.nan)
        precision = metrics.precision_score(t, found, average=None, labels=range(3), zero_division=0)
        for c, name in enumerate(("low", "mid", "high")):
            assert by_client[f"rows[{name}]"][client] == (t == c).sum()
            assert by_client[f"recall[{name}]"][client] == pytest.approx(recall[c])
            assert by_client[f"precision[{name}]"][client] == pytest.approx(precision[c])
        names = details["class_names"]
        for (a, b), count in np.ndenumerate(metrics.confusion_matrix(t, found, labels=range(3))):
            assert by_client[f"confusion[{names[a]}>{names[b]}]"][client] == count
    many = report(
        np.full((4, 21), 1 / 21), np.zeros(4, int), np.zeros(4, int), np.ones((1, 21)), names=[*"abcdefghijklmnopqrstu"]
    )
    assert not any("[" in key for key in many[0]) and len(many[2]["confusion"]) == 21


def test_intervals_of_small_clients():
    low, high = wilson(np.array([20.0, 10.0]), np.array([20, 20]))
    np.testing.assert_allclose(low, [0.8389, 0.2993], atol=1e-4)  # as scipy's binomtest(…).proportion_ci("wilson")
    np.testing.assert_allclose(high, [1.0, 0.7007], atol=1e-4)
    random = np.random.default_rng(0)
    score, y = random.random(40), np.repeat([1, 0], 20)
    low, high = bootstrap(two(score), y)["auroc"]
    area = metrics.roc_auc_score(y, score)
    assert low < area < high
    # The standard error of an AUROC near one half, with 20 samples of each class: sqrt(41 / (12 · 400)).
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(41 / 4800), rel=0.25)
    assert np.isnan([*bootstrap(two(score), np.arange(40) < 4).values()]).all()


def two(score):
    """The probabilities of two classes from that of the second."""
    return np.stack([1 - score, score], 1)


def test_bootstrap_intervals_have_their_analytic_width():
    """Half of 24 positives and of 24 negatives are right: a recall of 1/2 with the error sqrt(1/4 / 24)."""
    y, score = np.repeat([0, 1], 24), np.tile([0.2, 0.8], 24)
    low, high = bootstrap(two(score), y)["balanced_accuracy"]
    assert (low + high) / 2 == pytest.approx(0.5, abs=0.03)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 24 / 2), rel=0.12)
    assert set(bootstrap(two(y * 0.8 + 0.1), y).values()) == {(1.0, 1.0)}  # every draw of perfect answers is perfect


def test_bootstrap_intervals_are_quantiles_of_scikit_learn_s_measures(monkeypatch):
    monkeypatch.setattr("fedabml.evaluation.decisions.RESAMPLES", 60)
    random = np.random.default_rng(4)
    y = np.repeat([0, 1], [20, 12])
    score = np.clip(random.random(32) + 0.2 * y, 0, 1)
    draws = np.random.default_rng(7).integers(0, 32, (60, 32))

    def sensitivity(t, p):
        false, true, _ = metrics.roc_curve(t, p, drop_intermediate=False)
        return true[false <= 0.1 + 1e-9].max()

    functions = {
        "auroc": lambda t, p: metrics.roc_auc_score(t, p),
        "average_precision": lambda t, p: metrics.average_precision_score(t, p),
        "balanced_accuracy": lambda t, p: metrics.balanced_accuracy_score(t, p > 0.5),
        "f1": lambda t, p: metrics.f1_score(t, p > 0.5),
        "precision": lambda t, p: metrics.precision_score(t, p > 0.5),
        "sensitivity": sensitivity,
    }
    ends = bootstrap(two(score), y, seed=7)
    assert ends.keys() == functions.keys()
    for key, function in functions.items():
        values = [function(y[rows], score[rows]) for rows in draws]
        np.testing.assert_allclose(ends[key], np.quantile(values, (0.025, 0.975)))


def test_a_client_s_intervals_are_the_same_every_time_and_in_every_company():
    probs, y, owner, _ = drawn(2, 3, clients=12)
    all_of_them, again = (report(probs, y, owner, np.ones((12, 2)))[0] for _ in range(2))
    few = owner < 2
    alone = report(probs[few], y[few], owner[few], np.ones((2, 2)))[0]
    for key in BOOTSTRAPPED:
        for end in (f"{key}_low", f"{key}_high"):
            assert all_of_them[end].tolist() == again[end].tolist() and not np.isnan(again[end]).any()
            assert all_of_them[end][:2].tolist() == alone[end].tolist()
        assert (all_of_them[f"{key}_low"] <= all_of_them[key]).all() and (
            all_of_them[key] <= again[f"{key}_high"]
        ).all()


def test_a_client_with_few_rows_of_the_rarer_class_has_intervals(monkeypatch):
    """Hospitals of 150 rows with 5 deaths, of 120 with 60, and of 150 with 3: only the second is large."""
    random, positives, sizes = np.random.default_rng(0), [5, 60, 3], [150, 120, 150]
    y = np.concatenate([np.arange(n) < k for n, k in zip(sizes, positives, strict=True)]).astype(int)
    owner, score = np.repeat(range(3), sizes), np.clip(random.random(sum(sizes)) + 0.3 * y, 0, 1)
    found = report(two(score), y, owner, np.ones((3, 2)))[0]
    for key in (*BOOTSTRAPPED, "recall"):
        low, high = found[f"{key}_low"], found[f"{key}_high"]
        assert low[0] <= found[key][0] <= high[0] and low[0] < high[0] and np.isnan(low[1])
        assert np.isnan(low[2]) == (key in BOOTSTRAPPED)  # of three deaths, shares alone have one
    hits = (y == 1) & (score > 0.5) & (owner == 0)
    assert found["recall_low"][0] == pytest.approx(wilson(np.array(hits.sum()), np.array(5))[0])
    parts = [key for key in found if key.endswith(("_low", "_high"))]
    monkeypatch.setattr("fedabml.evaluation.decisions.MOST_AT_ONCE", 7 * 150)  # in parts, with nearly the same draws
    again = report(two(score), y, owner, np.ones((3, 2)))[0]
    for key in parts:
        np.testing.assert_allclose(again[key], found[key], atol=0.12)
    monkeypatch.setattr("fedabml.evaluation.decisions.MOST_RESAMPLED", 149)
    assert "f1_low" not in report(two(score), y, owner, np.ones((3, 2)))[0]


def test_a_report_has_all_of_it():
    probs, y, owner, clients = drawn(2, 3)
    keep = (owner != 2) | (np.cumsum(owner == 2) <= 30)
    times = keep * np.where(owner == 2, 1, 4)  # so that the others have 50 rows of both classes
    probs, y, owner = (np.repeat(part, times, axis=0) for part in (probs, y, owner))
    by_client, pooled, details = report(probs, y, owner, np.ones((clients, 2)))
    small = np.minimum(np.bincount(owner, y), np.bincount(owner, 1 - y)) < 50
    assert small[2] and not small.all()
    assert pooled["auroc_pooled"] == pytest.approx(metrics.roc_auc_score(y, probs[:, 1]))
    assert details["confusion"] == metrics.confusion_matrix(y, probs.argmax(1)).tolist()
    assert details["recall_by_class"][1] == pytest.approx(metrics.recall_score(y, probs.argmax(1)))
    assert pooled["classwise_ece"] == pooled["classwise_ece_pooled"]
    for key in ("accuracy_low", "auroc_high", "f1_low", "recall_high", "balanced_accuracy_low"):
        assert np.isnan(by_client[key]).tolist() == (~small).tolist()


def test_many_clients_take_little_time_and_memory(monkeypatch):
    """Beyond a limit only pooled measures are computed."""
    monkeypatch.setattr("fedabml.evaluation.decisions.MOST_CLIENTS", 5)
    probs, y, owner, clients = drawn(2, 3)
    by_client, pooled, _ = report(probs, y, owner, np.ones((clients, 2)))
    assert not by_client and pooled["auroc_pooled"] > 0.5
