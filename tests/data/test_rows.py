"""Ragged rows and the stratified draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedabml.data.rows import HOLD_OUT, Rows, draw, generator
from fedabml.errors import InputError

lists = st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=6)


@given(lists)
def test_rows_keep_the_lists_they_were_made_of(parts):
    rows = Rows.of(parts)
    assert len(rows) == len(parts)
    assert [rows[i].tolist() for i in range(len(rows))] == parts
    assert rows.counts.tolist() == [len(part) for part in parts]


@given(lists.filter(len), st.data())
def test_select_and_merge(parts, data):
    rows = Rows.of(parts)
    chosen = data.draw(st.lists(st.integers(0, len(parts) - 1)))
    assert [r.tolist() for r in (rows.select(chosen)[i] for i in range(len(chosen)))] == [parts[c] for c in chosen]
    both = rows.merge(rows)
    assert [both[i].tolist() for i in range(len(both))] == [part + part for part in parts]


def test_by_owner():
    rows = Rows.by_owner(np.array([2, 0, 2]), clients=4, samples=np.arange(10, 13))
    assert [rows[i].tolist() for i in range(4)] == [[11], [], [10, 12], []]
    assert rows[-2].tolist() == [10, 12]
    with pytest.raises(IndexError):
        rows[4]


def test_offsets_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="offsets"):
        Rows(np.arange(3), np.array([0, 2]))


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 99))
@pytest.mark.slow
def test_draw_meets_its_quota_and_every_labels_share(labels, share, seed):
    rows = Rows.by_owner(np.repeat(np.arange(len(labels)), [len(part) for part in labels]), len(labels))
    y = np.concatenate([np.array(part, np.int64) for part in labels])
    quota = np.floor(rows.counts * share).astype(int)
    kept, taken = rows.split(draw(rows, quota, y, seed, HOLD_OUT))
    assert taken.counts.tolist() == quota.tolist()
    for i in range(len(rows)):
        assert sorted([*kept[i], *taken[i]]) == rows[i].tolist()
        for label in range(3):
            exact = (y[rows[i]] == label).sum() * quota[i] / max(len(rows[i]), 1)
            assert abs((y[taken[i]] == label).sum() - exact) < 1


@pytest.mark.parametrize("seed", [-1, 1.5, "a", None])
def test_bad_seeds(seed):
    with pytest.raises(InputError, match="seed"):
        generator(seed, 1)


@pytest.mark.slow
def test_a_million_clients_are_cheap():
    rows = Rows.by_owner(np.repeat(np.arange(1_000_000), 3), 1_000_000)
    taken = draw(rows, np.ones(1_000_000, int), np.zeros(3_000_000, int), 0, HOLD_OUT)
    assert taken.sum() == 1_000_000
