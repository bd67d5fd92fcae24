"""A federation of folders, sites and a coordinator has the bits of the simulator, for every registered algorithm."""

from __future__ import annotations

import pytest

from fedabml.algorithms import REGISTRY
from tests.federation.in_process import (
    Wire,
    assert_equal,
    assert_simulated,
    hyper_of,
    lead,
    rounds_of,
    set_up,
    simulation,
)
from tests.tiers import FAMILIES, nightly_but


@pytest.mark.parametrize("algorithm", nightly_but(FAMILIES, [*REGISTRY]))
@pytest.mark.slow
def test_a_federation_is_bit_equal_to_the_simulator(tmp_path, algorithm):
    server, sites = set_up(tmp_path, algorithm=algorithm, hyper=hyper_of(algorithm))
    coordinator, events = lead(server, Wire(server, sites))
    sim = simulation(server, coordinator.card)
    lines = rounds_of(events)
    assert [line["round"] for line in lines] == [1, 2, 3]
    for part in ("average", "velocity"):
        assert_equal(getattr(coordinator.saved.state, part), getattr(sim.server, part))
    assert_simulated(coordinator, sites, sim)
    assert [line["loss"] for line in lines] == [line["loss"] for line in sim.lines]
    assert not any(line["rejected"] or line["missing"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", nightly_but({"fedabml", "scaffold"}, [*REGISTRY]))
@pytest.mark.parametrize("place", [{"backend": "vmap"}, {"backend": "vmap", "chunk": 2}, {"workers": 2}], ids=str)
def test_other_ways_to_compute_agree_in_float64(tmp_path, algorithm, place):
    server, sites = set_up(tmp_path, algorithm=algorithm, hyper=hyper_of(algorithm), dtype="float64")
    coordinator, _ = lead(server, Wire(server, sites))
    sim = simulation(server, coordinator.card, **place)
    assert_simulated(coordinator, sites, sim, 1e-9)


def test_all_sites_take_part_in_every_round(tmp_path):
    server, sites = set_up(tmp_path, algorithm="fedabml", participation=1.0)
    coordinator, _ = lead(server, Wire(server, sites))
    assert_equal(coordinator.saved.state.shared, simulation(server, coordinator.card).shared)
