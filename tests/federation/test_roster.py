"""Who is drawn for a round."""

from __future__ import annotations

from fedabml.engine.server import draw_clients
from fedabml.federation.folders import Member
from fedabml.federation.roster import draw

MEMBERS = [Member(f"s{i}", i, "") for i in range(20)]


def numbers(members):
    return [member.number for member in members]


def test_the_first_attempt_with_all_sites_is_the_simulators_draw():
    for round in range(1, 30):
        assert numbers(draw(MEMBERS, 6, 0, 5, round, 1)) == draw_clients(20, 0.3, 5, round)


def test_extra_sites_are_added_to_the_draw():
    base, more = (numbers(draw(MEMBERS, 6, extra, 5, 1, 1)) for extra in (0, 3))
    assert len(more) == 9
    assert set(base) < set(more)
    assert more == sorted(more)
    assert numbers(draw(MEMBERS, 6, 100, 5, 1, 1)) == list(range(20))


def test_a_repeated_round_draws_anew_and_is_seeded():
    draws = {tuple(numbers(draw(MEMBERS, 6, 0, 5, 1, attempt))) for attempt in range(1, 6)}
    assert len(draws) == 5
    assert numbers(draw(MEMBERS, 6, 0, 5, 1, 3)) == numbers(draw(MEMBERS, 6, 0, 5, 1, 3))


def test_fewer_sites_than_wanted_are_all_drawn():
    assert numbers(draw(MEMBERS[3:5], 6, 2, 5, 1, 1)) == [3, 4]
    assert draw([], 6, 2, 5, 1, 1) == []
