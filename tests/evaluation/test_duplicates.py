"""Warnings of samples that occur more than once: found where they were put, and not where they are chance."""

import numpy as np
import pytest

from fedabml import Federation
from fedabml.evaluation.duplicates import duplicate_warnings

RNG = np.random.default_rng(0)


def measured(n, columns=6):
    return RNG.normal(size=(n, columns)).astype(np.float32)


def pictures(n):
    return RNG.integers(0, 256, (n, 1, 4, 4)).astype(np.uint8)


def labels(n):
    return np.arange(n) % 2


def federation(train, test=None):
    fed = Federation.from_arrays([(x, labels(len(x))) for x in train], test and [(x, labels(len(x))) for x in test])
    return duplicate_warnings(fed)


@pytest.mark.parametrize("made", [measured, pictures])
def test_different_samples_give_no_warning(made):
    assert federation([made(40) for _ in range(3)], [made(20) for _ in range(3)]) == []


@pytest.mark.parametrize(("made", "noun"), [(measured, "row"), (pictures, "image")])
def test_shared_samples_leaks_and_other_labels_are_counted(made, noun):
    first, second, third = made(40), made(40), made(40)
    second[:7] = first[:7]
    test = [made(10), made(10), made(10)]
    test[2][:4] = third[:4]
    third[30] = third[31]  # the labels of these two differ
    said = federation([first, second, third], test)
    assert [text.split(":")[0] for text in said] == [
        f"Clients share identical {noun}s",
        f"4 test {noun}s are also among the training {noun}s of the same client",
        f"1 different {noun} is in the data with more than one label",
    ]
    assert "'client-0' and 'client-1' (7)." in said[0] and "'client-2' (4)." in said[1] and "'client-2' (1)" in said[2]


def test_validation_rows_are_told_from_test_rows():
    x = pictures(12)
    y, fed = labels(12), Federation.from_arrays
    said = duplicate_warnings(fed([(x, y)], [(x[:2], y[:2])], [(x[:3], y[:3])]))
    assert [text.partition(" also")[0] for text in said] == ["3 validation images are", "2 test images are"]


def test_rows_of_few_values_agree_by_chance():
    def few(n):
        return RNG.integers(0, 2, (n, 4)).astype(np.float32)

    assert federation([few(60) for _ in range(3)], [few(30) for _ in range(3)]) == []


def test_identical_clients_of_many_columns_are_found_among_rows_of_few_values():
    x = RNG.integers(0, 2, (60, 40)).astype(np.float32)
    assert "'client-0' and 'client-1' (60)" in federation([x, x.copy(), RNG.integers(0, 2, (60, 40)) * 1.0])[0]


def test_minus_zero_is_zero():
    x = measured(8)
    x[:, 0] = 0
    other = measured(8)
    other[3] = x[3] * np.array([-1, 1, 1, 1, 1, 1], np.float32)
    assert np.signbit(other[3, 0]) and "(1)" in federation([x, other])[0]


def test_every_used_sample_is_hashed_once_and_samples_of_no_client_never(monkeypatch):
    import hashlib

    from fedabml.evaluation import duplicates

    hashed = []

    class Counting:
        @staticmethod
        def blake2b(values, digest_size):
            hashed.append(bytes(values))
            return hashlib.blake2b(values, digest_size=digest_size)

    monkeypatch.setattr(duplicates, "hashlib", Counting)
    fed = Federation.from_arrays([(pictures(9), labels(9)) for _ in range(3)]).select([0, 2])
    duplicate_warnings(fed)
    assert len(hashed) == len(set(hashed)) == 18
