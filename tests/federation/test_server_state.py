"""The server's state on disk: bit by bit, some older ones, and refused where it does not belong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedabml.engine import ServerState
from fedabml.errors import InputError
from fedabml.federation import server_state
from fedabml.federation.server_state import Saved

FEDERATION, CARD = "f" * 32, "c" * 64
LIKE = {"mean": torch.zeros(3), "control": torch.zeros(3)}


def saved(round, value=0.1):
    mean, control = torch.full((3,), value), torch.full((3,), -value)
    shared = {"mean": mean, "control": control}
    state = ServerState(round, shared, {name: v / 3 for name, v in shared.items()}, {"mean": mean * 7})
    return Saved(FEDERATION, CARD, state, {"one": round}, ("one", "two"), ({"round": round, "loss": 0.3},))


def load(folder, federation=FEDERATION, card=CARD, like=LIKE):
    return server_state.load(folder, federation, card, like)


def test_a_state_comes_back_bit_by_bit(tmp_path):
    assert load(tmp_path) is None
    server_state.save(tmp_path, saved(2))
    found, expected = load(tmp_path), saved(2)
    assert (found.counted, found.ready, found.history) == (expected.counted, expected.ready, expected.history)
    assert found.state.round == 2
    for part in ("shared", "average", "velocity"):
        one, other = getattr(found.state, part), getattr(expected.state, part)
        assert list(one) == list(other)
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_older_states_stay_at_growing_distances(tmp_path):
    for round in range(101):
        server_state.save(tmp_path, saved(round))
        assert {*server_state.rounds(tmp_path)} == server_state.kept_rounds(round)
    assert server_state.rounds(tmp_path) == [0, 64, 80, 88, 96, 98, 99, 100]


def test_going_back_keeps_later_states_in_another_folder(tmp_path):
    for round in range(11):
        server_state.save(tmp_path, saved(round))
    assert server_state.go_back(tmp_path, 10) is None
    aside = server_state.go_back(tmp_path, 8)
    assert server_state.rounds(tmp_path) == [0, 4, 8] and server_state.rounds(aside) == [9, 10]
    assert load(tmp_path).state.round == 8
    server_state.save(tmp_path, saved(9, 0.2))
    assert load(aside).state.shared["mean"][0] != load(tmp_path).state.shared["mean"][0]


def test_a_damaged_state_is_passed_over(tmp_path, caplog):
    server_state.save(tmp_path, saved(1))
    newest = server_state.save(tmp_path, saved(2))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert load(tmp_path).state.round == 1
    assert "damaged" in caplog.text
    server_state.path(tmp_path, 1).write_bytes(b"")
    with pytest.raises(InputError, match="No saved state"):
        load(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"federation": "e" * 32},
        {"card": "d" * 64},
        {"like": {"mean": torch.zeros(3)}},
        {"like": {**LIKE, "mean": torch.zeros(4)}},
        {"like": {name: value.double() for name, value in LIKE.items()}},
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path, other):
    server_state.save(tmp_path, saved(1))
    with pytest.raises(InputError):
        load(tmp_path, **other)


def test_states_that_contradict_themselves_are_refused(tmp_path):
    server_state.save(tmp_path, dataclasses.replace(saved(1), counted={"one": 5}))
    with pytest.raises(InputError, match="contradict"):
        load(tmp_path)
    server_state.save(tmp_path, saved(1))
    server_state.path(tmp_path, 1).rename(server_state.path(tmp_path, 3))
    with pytest.raises(InputError, match="contradict"):
        load(tmp_path)
    server_state.path(tmp_path, 3).unlink()
    server_state.save(tmp_path, saved(1, float("nan")))
    with pytest.raises(InputError, match="finite"):
        load(tmp_path)


def test_the_history_is_bounded(tmp_path):
    lines = tuple({"round": number} for number in range(3 * server_state.HISTORY))
    server_state.save(tmp_path, dataclasses.replace(saved(1), history=lines))
    assert load(tmp_path).history == lines[-server_state.HISTORY :]
