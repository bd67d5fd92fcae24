"""Partitions: disjoint, complete, faithful to their rule, and the same for the same seed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedabml.data import federate, load, save_manifest
from fedabml.data.partition import by_class, dirichlet, iid, natural
from fedabml.errors import InputError

NOTHING = np.empty(0, np.int64)
KINDS = ("classes", "clients")


def labels(classes, each, rng=0):
    """`each` samples of every class and a few more, in random order."""
    rng = np.random.default_rng(rng)
    y = np.concatenate([np.repeat(np.arange(classes), each), rng.integers(0, classes, classes // 2)])
    return rng.permutation(y)


def assert_cover(rows, n):
    assert sorted(rows.index) == list(range(n))


@st.composite
def tasks(draw):
    classes = draw(st.integers(1, 12))
    per_client = draw(st.integers(1, classes))
    clients = draw(st.integers(-(-classes // per_client), 30))
    return classes, per_client, clients, draw(st.integers(0, 2**40)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(tasks())
def test_by_class_properties(task):
    classes, per_client, clients, seed, distinct = task
    slots = clients * per_client // classes + 1
    y_train, y_test = labels(classes, 2 * slots), labels(classes, slots, rng=1)
    train, test = by_class(y_train, y_test, clients, per_client, seed, distinct)
    assert_cover(train, len(y_train))
    assert_cover(test, len(y_test))
    holders = np.zeros(classes, int)
    for i in range(clients):
        own = set(y_train[train[i]])
        assert own == set(y_test[test[i]])
        assert len(own) == per_client if distinct else 1 <= len(own) <= per_client
        holders[list(own)] += 1
    if distinct:
        assert set(holders) <= {clients * per_client // classes, -(-clients * per_client // classes)}
    again = by_class(y_train, y_test, clients, per_client, seed, distinct)
    assert (train.index == again[0].index).all() and (test.index == again[1].index).all()


def test_shards_of_one_class_differ_by_at_most_one_sample():
    y = labels(10, 57)
    train, _ = by_class(y, NOTHING, 30, 1, seed=0)
    sizes = {c: [len(train[i]) for i in range(30) if y[train[i][0]] == c] for c in range(10)}
    assert all(max(s) - min(s) <= 1 and len(s) == 3 for s in sizes.values())


def test_by_class_repeats_a_class_as_often_as_chance_does():
    y = np.repeat(np.arange(10), 200)
    single = [
        np.mean([len(set(y[train[i]])) == 1 for i in range(100)])
        for train in (by_class(y, NOTHING, 100, 2, seed)[0] for seed in range(30))
    ]
    assert 0.07 < np.mean(single) < 0.12  # 19 of the other 199 shards are of the same class


def test_distinct_hands_are_not_all_alike():
    y = np.repeat(np.arange(10), 20)
    train, _ = by_class(y, NOTHING, 50, 2, seed=0, distinct=True)
    pairs = {tuple(sorted(set(y[train[i]]))) for i in range(50)}
    assert len(pairs) > 20  # of 45 possible


def test_test_rows_may_be_missing():
    _, test = by_class(labels(3, 10), NOTHING, 3, 2, seed=0)
    assert len(test.index) == 0 and len(test) == 3


@pytest.mark.parametrize(
    ("clients", "per_client", "words"),
    [
        (10, 4, "only 3 classes"),
        (10, 0, "must be a whole number"),
        (10, 1.5, "must be a whole number"),
        (2, 1, "2 places, fewer than the 3 classes"),
        (30, 3, "10 training samples, too few for the 30 shards"),
        (0, 2, "number of clients must be"),
        ("9", 2, "number of clients must be"),
        (31, 2, "cannot give each of 31"),
    ],
)
def test_by_class_refuses(clients, per_client, words):
    with pytest.raises(InputError, match=words):
        by_class(np.repeat(np.arange(3), 10), NOTHING, clients, per_client, seed=0)


def test_too_few_test_samples():
    with pytest.raises(InputError, match="2 test samples"):
        by_class(np.repeat(np.arange(3), 10), np.repeat(np.arange(3), 2), 6, 2, seed=0)


@pytest.mark.parametrize("by", KINDS)
@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(0.2, 100), clients=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_dirichlet_properties(by, alpha, clients, seed):
    y_train, y_test = labels(5, 60), labels(5, 10, rng=1)
    train, test = dirichlet(y_train, y_test, clients, alpha, seed, by=by)
    assert_cover(train, len(y_train))
    assert_cover(test, len(y_test))
    assert train.counts.min() >= 2
    counts = [np.bincount(y[r[i]], minlength=5) for y, r in ((y_train, train), (y_test, test)) for i in range(clients)]
    share = np.array(counts).reshape(2, clients, 5) / np.array([np.bincount(y_train), np.bincount(y_test)])[:, None]
    assert np.abs(share[0] - share[1]).max() < 0.12  # rounding: a test sample of ten, a training sample of sixty
    assert (train.index == dirichlet(y_train, y_test, clients, alpha, seed, by=by)[0].index).all()


@pytest.mark.parametrize("by", KINDS)
def test_dirichlet_concentration(by):
    y = labels(10, 500)

    def largest(alpha):
        train, _ = dirichlet(y, NOTHING, 20, alpha, seed=0, by=by)
        return np.mean([np.bincount(y[train[i]]).max() / len(train[i]) for i in range(20)])

    assert largest(0.1) > 0.5 and largest(1000) < 0.13


def shares(alpha, clients, classes=400, each=2000, seed=0):
    """The clients' shares of every class [N, K]."""
    y = np.repeat(np.arange(classes), each)
    train, _ = dirichlet(y, NOTHING, clients, alpha, seed)
    return np.array([np.bincount(y[train[i]], minlength=classes) for i in range(clients)]) / each


@pytest.mark.parametrize("alpha", [0.1, 0.5, 3.0])
@pytest.mark.slow
def test_each_class_is_divided_as_dirichlet_says(alpha):
    """Every share is Beta(α, (N−1)α): its mean 1/N, its variance (1/N)(1−1/N)/(Nα+1), its covariance with another."""
    n, found = 5, shares(alpha, 5)
    var = (n - 1) / n**2 / (n * alpha + 1)
    assert np.allclose(found.sum(0), 1)
    deviation = np.sqrt(var / found.shape[1])
    assert np.abs(found.mean(1) - 1 / n).max() < 5 * deviation
    fourth = (stats.beta(alpha, (n - 1) * alpha).stats("k") + 3) * var**2
    spread = np.sqrt((fourth - var**2) / found.shape[1])  # the standard error of a variance
    assert np.abs(((found - 1 / n) ** 2).mean(1) - var).max() < 5 * spread
    covariance = np.cov(found, bias=True)[np.triu_indices(n, 1)]
    assert covariance.mean() == pytest.approx(-var / (n - 1), rel=0.15)


def test_a_large_alpha_gives_everyone_the_same():
    assert np.abs(shares(1e6, 5, classes=10) - 0.2).max() < 0.005
    y = labels(10, 500)
    usual, near = (dirichlet(y, NOTHING, 20, 0.5, seed=3, by=by)[0].counts for by in KINDS)
    assert usual.std() > 2 * near.std()  # the usual draw has clients of unequal sizes


@pytest.mark.parametrize("by", KINDS)
def test_dirichlet_is_redrawn_until_everyone_has_enough(by):
    y = labels(3, 60)
    train, _ = dirichlet(y, NOTHING, 8, 0.3, seed=1, min_samples=5, by=by)
    assert train.counts.min() >= 5
    same, other = (dirichlet(y, NOTHING, 8, 0.3, seed, 5, by)[0] for seed in (1, 2))
    assert (train.index == same.index).all() and not np.array_equal(train.offsets, other.offsets)


@pytest.mark.parametrize("by", KINDS)
def test_dirichlet_gives_up_with_advice(by):
    with pytest.raises(InputError, match="Raise alpha"):
        dirichlet(labels(3, 20), NOTHING, 10, 0.001, seed=0, min_samples=6, by=by)
    for alpha in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="alpha"):
            dirichlet(labels(3, 20), NOTHING, 2, alpha, seed=0, by=by)
    with pytest.raises(InputError, match="cannot give each"):
        dirichlet(labels(3, 20), NOTHING, 50, 1.0, seed=0, by=by)


def test_both_dirichlet_draws_have_a_name_and_never_change():
    digits = load("digits")
    kinds = ("dirichlet", "dirichlet-classes", "dirichlet-clients")
    made = [federate(digits, partition=kind, clients=10, seed=0) for kind in kinds]
    assert made[0].rows_hash == made[1].rows_hash != made[2].rows_hash
    assert [fed.manifest["partition"]["kind"] for fed in made] == ["dirichlet-classes", *kinds[1:]]
    # A partition is part of a result: neither draw may change. The second is what 'dirichlet' gave before.
    assert [fed.rows_hash[:16] for fed in made[1:]] == ["fa1bf67a022e9b42", "4874ad6ac0ebd7da"]


def test_iid_is_even():
    train, test = iid(labels(4, 25), labels(4, 5), 7, seed=1)
    assert_cover(train, 102)
    assert train.counts.max() - train.counts.min() <= 1 and test.counts.max() - test.counts.min() <= 1


def test_natural_follows_the_owners():
    train, test, names = natural(["b", "a", "b"], ["a"])
    assert names == ("a", "b")
    assert [train[0].tolist(), train[1].tolist(), test[0].tolist(), test[1].tolist()] == [[1], [0, 2], [0], []]
    assert natural([10, 9, 10])[2] == ("9", "10")
    with pytest.raises(InputError, match="'c' has test samples"):
        natural(["a"], ["c"])


def test_federate_numbers_test_samples_after_training_samples():
    digits = load("digits")
    fed = federate(digits, clients=10, classes_per_client=2, seed=5)
    n = len(digits.y_train)
    assert fed.x.shape == (1797, 1, 8, 8) and fed.test.index.min() == n
    np.testing.assert_array_equal(fed.x[fed.test[3]][:, 0], digits.x_test[fed.test[3] - n])
    assert ((fed.label_counts("test") > 0) == (fed.label_counts() > 0)).all()


def test_seeds_and_the_frozen_first_draw():
    digits = load("digits")
    hashes = [federate(digits, clients=10, seed=s).rows_hash for s in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]
    # A partition is part of a published result: it must not change with a new version of numpy or of this library.
    assert hashes[0][:16] == "16a162438951c1b5"


def test_federate_knows_every_kind():
    digits = load("digits")
    owners = [f"w{i % 7}" for i in range(1442)], [f"w{i % 7}" for i in range(355)]
    natural_fed = federate(digits, partition="natural", groups=owners)
    assert natural_fed.names == tuple(f"w{i}" for i in range(7))
    assert federate(digits, partition="iid", clients=5).clients == 5
    assert federate(digits, partition="dirichlet", alpha=1.0, clients=5).manifest["partition"]["alpha"] == 1.0
    with pytest.raises(InputError, match="Did you mean 'dirichlet'"):
        federate(digits, partition="dirichlett")
    with pytest.raises(InputError, match="groups"):
        federate(digits, partition="natural")


def test_federate_wants_two_training_samples_each():
    digits = load("digits")
    owners = ["a"] * 1441 + ["b"], ["a"] * 355
    with pytest.raises(InputError, match="drop_small"):
        federate(digits, partition="natural", groups=owners)
    assert federate(digits, partition="natural", groups=owners, drop_small=True).names == ("a",)


def test_the_manifest_tells_it_all(tmp_path):
    fed = federate(load("digits"), clients=10, seed=3).hold_out(0.1, seed=4)
    save_manifest(fed, tmp_path / "m.json")
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert manifest["hash"] == fed.rows_hash and manifest["seed"] == 3 and manifest["dataset"] == "digits"
    assert manifest["partition"] == {"kind": "classes", "classes_per_client": 2, "distinct": False}
    assert manifest["rows"]["val"][2] == fed.val[2].tolist()
    assert manifest["counts"]["train"] == fed.label_counts().tolist() == fed.manifest["counts"]["train"]
    assert "rows" not in fed.manifest and list(tmp_path.iterdir()) == [tmp_path / "m.json"]
    with pytest.raises(InputError, match="cannot be written"):
        save_manifest(fed, tmp_path / "m.json" / "below")
