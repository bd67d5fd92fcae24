"""Rules of aggregation against closed forms."""

from __future__ import annotations

import pytest
import torch

from fedabml.engine import weighted_sum
from fedabml.errors import InputError
from fedabml.federation.robust import RULES, aggregate, krum


def uniform(count):
    return torch.full((count,), 1 / count)


def updates(*rows):
    return {"mean": torch.tensor(rows)}


def test_the_mean_is_the_simulators_sum():
    g = torch.Generator().manual_seed(0)
    state = {"mean": torch.randn(7, 1000, generator=g), "scalar": torch.randn(7, generator=g)}
    weights = torch.rand(7, generator=g)
    expected = weighted_sum(weights, state)
    found = aggregate("mean", weights, state)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("rule", "trim", "column", "expected"),
    [
        ("median", 0.2, (5.0, 1.0, 3.0), 3.0),
        ("median", 0.2, (5.0, 1.0, 3.0, 1e9), 4.0),
        ("median", 0.2, (7.0,), 7.0),
        ("trimmed-mean", 0.2, (1e9, 1.0, 2.0, 6.0, -1e9), 3.0),
        ("trimmed-mean", 0.2, (1.0, 2.0, 6.0), 3.0),  # nothing is cut of three
        ("trimmed-mean", 0.0, (1.0, 2.0, 6.0, 7.0), 4.0),
        ("trimmed-mean", 0.4, (0.0, 9.0, 4.0, 1.0, 100.0), 4.0),
        ("trimmed-mean", 0.49, (7.0,), 7.0),
    ],
)
def test_rules_by_coordinate(rule, trim, column, expected):
    state = updates(*[[value, -value] for value in column])
    found = aggregate(rule, uniform(len(column)), state, trim)
    assert found["mean"].tolist() == [expected, -expected]


def test_a_share_is_not_cut_by_rounding():
    column = torch.arange(100.0).unsqueeze(1)
    column[-29:] = 1e6
    found = aggregate("trimmed-mean", uniform(100), {"mean": column}, 0.29)  # 0.29 * 100 is 28.999...
    assert found["mean"].item() == torch.arange(29.0, 71.0).mean().item()


def test_krum_takes_the_update_with_the_nearest_neighbours():
    # n = 5, one false: each is scored by its 2 nearest. Scores: 0: 1+4, 1: 1+1, 2: 1+4, 3: 49+64, 4: far.
    state = updates([0.0], [1.0], [2.0], [9.0], [1000.0])
    assert krum(state, 1) == 1
    assert aggregate("krum", uniform(5), state, 0.2)["mean"].tolist() == [1.0]


def test_krum_counts_all_tensors_of_an_update():
    state = {"mean": torch.tensor([[0.0], [0.0], [0.0], [0.0]]), "logstd": torch.tensor([[9.0], [1.0], [1.5], [1.2]])}
    assert krum(state, 0) == 3  # two neighbours: .04 + .09; of 1 they are .04 + .25, of 2 .09 + .25
    assert krum(state, 1) == 1  # one neighbour: .04 for 1 and 3, of which the first is taken
    assert krum({name: value[:1] for name, value in state.items()}, 0) == 0
    assert krum({name: value[:2] for name, value in state.items()}, 0) == 0


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "krum"])
def test_the_order_of_sites_changes_nothing(rule):
    g = torch.Generator().manual_seed(1)
    state = {"mean": torch.randn(9, 50, generator=g), "scalar": torch.randn(9, generator=g)}
    first = aggregate(rule, uniform(9), state)
    for _ in range(5):
        order = torch.randperm(9, generator=g)
        found = aggregate(rule, uniform(9), {name: value[order] for name, value in state.items()})
        assert all(torch.equal(found[name], value) for name, value in first.items())


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "krum"])
def test_two_false_updates_of_ten_stay_without_effect(rule):
    g = torch.Generator().manual_seed(2)
    honest = torch.randn(10, 20, generator=g)
    state = {"mean": torch.cat([honest[:8], torch.full((2, 20), 1e8)])}
    found = aggregate(rule, uniform(10), state, 0.2)["mean"]
    assert (found >= honest[:8].min(0).values).all()
    assert (found <= honest[:8].max(0).values).all()


def test_updates_without_tensors_stay_so():
    for rule in RULES:
        assert aggregate(rule, uniform(3), {}) == {}


def test_wrong_rules_are_refused():
    with pytest.raises(InputError, match="median"):
        aggregate("mediam", uniform(2), updates([1.0], [2.0]))
    with pytest.raises(InputError, match="trim"):
        aggregate("median", uniform(2), updates([1.0], [2.0]), 0.5)
