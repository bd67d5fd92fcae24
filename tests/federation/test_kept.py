"""Versions of what a site keeps: tied to federation, card and identity, deleted only when nobody can ask for them."""

from __future__ import annotations

import stat

import pytest
import torch

from fedabml.federation.kept import KeptLost, KeptVersions
from fedabml.federation.server_state import kept_rounds

LIKE = {"b": torch.zeros(3), "a": torch.zeros((), dtype=torch.float64)}


def state(value):
    return {"b": torch.full((3,), value), "a": torch.tensor(value, dtype=torch.float64)}


def versions(folder, federation="f" * 32, card="c" * 64, number=4):
    return KeptVersions(folder, federation, card, number)


def test_a_version_comes_back_bit_by_bit_in_the_order_of_the_algorithm(tmp_path):
    versions(tmp_path).save(1, state(0.1), 0)
    found = versions(tmp_path).load(1, LIKE)
    assert list(found) == ["b", "a"]
    assert all(torch.equal(found[name], value) for name, value in state(0.1).items())
    assert stat.S_IMODE(versions(tmp_path).path(1).stat().st_mode) == 0o600


def test_an_empty_version_means_that_nothing_was_kept(tmp_path):
    versions(tmp_path).save(1, {}, 0)
    assert versions(tmp_path).load(1, LIKE) == {}


@pytest.mark.parametrize("other", [{"federation": "e" * 32}, {"card": "d" * 64}, {"number": 5}])
def test_a_version_of_another_federation_card_or_site_is_refused(tmp_path, other):
    versions(tmp_path).save(1, state(0.1), 0)
    with pytest.raises(KeptLost, match="another"):
        versions(tmp_path, **other).load(1, LIKE)


def test_a_version_under_the_name_of_another_round_is_refused(tmp_path):
    kept = versions(tmp_path)
    kept.save(1, state(0.1), 0)
    kept.path(1).rename(kept.path(2))
    with pytest.raises(KeptLost, match="another"):
        kept.load(2, LIKE)


def test_damaged_missing_and_unfit_versions_are_refused(tmp_path):
    kept = versions(tmp_path)
    with pytest.raises(KeptLost, match="no longer"):
        kept.load(1, LIKE)
    kept.save(1, state(0.1), 0)
    with pytest.raises(KeptLost, match="fit"):
        kept.load(1, {"b": torch.zeros(3)})
    with pytest.raises(KeptLost, match="fit"):
        kept.load(1, {"b": torch.zeros(3), "a": torch.zeros(())})
    content = kept.path(1).read_bytes()
    kept.path(1).write_bytes(content[:-1] + b"\0")
    with pytest.raises(KeptLost, match="no longer"):
        kept.load(1, LIKE)
    kept.save(2, state(float("nan")), 0)
    with pytest.raises(KeptLost, match="finite"):
        kept.load(2, LIKE)


def test_an_order_that_comes_again_late_deletes_no_newer_version(tmp_path):
    kept = versions(tmp_path)
    for round, counted in ((5, 4), (6, 5), (5, 4)):
        kept.save(round, state(float(round)), counted)
    assert kept.load(6, LIKE)["a"] == 6.0


def test_versions_that_the_server_may_still_ask_for_stay(tmp_path):
    kept = versions(tmp_path)
    (tmp_path / "kept-x.safetensors").touch()
    seen = []
    for round, counted in ((1, 0), (2, 1), (3, 2), (4, 2), (6, 2), (6, 2), (7, 6), (7, 6), (9, 7)):
        kept.save(round, state(float(round)), counted)
        seen.append(kept.rounds())
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 6], [2, 6], [2, 6, 7], [2, 6, 7], [2, 6, 7, 9]]
    kept.save(3, state(3.0), 2)  # the server went on from an older state, which counts version 2
    assert kept.rounds() == [2, 3, 6, 7, 9]  # each of the later ones is written anew before it can count again
    assert (tmp_path / "kept-x.safetensors").exists()


def test_every_version_that_a_state_of_the_server_counts_stays(tmp_path):
    kept, counted = versions(tmp_path), {0: 0}  # by round of the server: the last version that it counted
    for round in range(1, 70):
        if round % 3:  # else the site is not drawn
            kept.save(round, state(float(round)), counted[round - 1])
        answers = round % 3 and round % 7  # else its reply is lost
        counted[round] = round if answers else counted[round - 1]
        needed = {counted[each] for each in kept_rounds(round)} - {0}
        assert needed <= {*kept.rounds()}
        assert len(kept.rounds()) <= 10
