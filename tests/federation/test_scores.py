"""Scores of sites: those of the simulator, only where allowed, checked at the server, and no part of training."""

import dataclasses

import numpy as np
import pytest
import torch

from fedabml.engine.client import initial_kept
from fedabml.engine.lanes import Lanes
from fedabml.engine.setting import Cohort
from fedabml.evaluation.scoring import evaluate
from fedabml.federation.card import Card
from fedabml.federation.scores import check_scores, mean_scores, site_scores
from fedabml.federation.settings import SiteSettings
from fedabml.federation.site_data import load
from tests.federation.in_process import Wire, lead, rounds_of, set_up


def hold_out(sites, rows=12, **options):
    """Give every site test rows, and change its settings."""
    for number, site in enumerate(sites.values()):
        draw = np.random.default_rng(number)
        content = dict(np.load(site.path / "data.npz"))
        test = {"x_test": draw.normal(size=(rows, 4)).astype(np.float32), "y_test": np.arange(rows) % 3}
        np.savez(site.path / "data.npz", x_train=content["x"], y_train=content["y"], **test)
        SiteSettings.of(SiteSettings.load(site.settings_file).to_dict() | options).save(site.settings_file)
    return sites


def run(folder, rows=12, allow=True, **settings):
    folder.mkdir()
    server, sites = set_up(folder, participation=1.0, rounds=2, **settings)
    wire = Wire(server, hold_out(sites, rows, allow_scores=allow))
    return *lead(server, wire), sites, wire


@pytest.mark.parametrize("algorithm", ["fedabml", "ditto"])
def test_scores_are_those_of_the_simulator_and_training_has_the_same_bits(tmp_path, algorithm):
    scored, events, sites, _ = run(tmp_path / "a", algorithm=algorithm, score_every=1)
    plain, others, _, _ = run(tmp_path / "b", algorithm=algorithm)
    for name, value in plain.saved.state.shared.items():
        assert torch.equal(value, scored.saved.state.shared[name])
    assert [event["losses"] for event in rounds_of(events)] == [event["losses"] for event in rounds_of(others)]
    assert all(event["scores"] == {} for event in rounds_of(others))
    card, found = scored.card, []
    for number, site in enumerate(sites.values()):
        cohort = Cohort(card.setting(load(site, card), number), card.place())
        shared = card.initial_shared()
        kept = initial_kept(Lanes.after_round(cohort, shared, [0]))
        summary = evaluate(cohort, shared, lambda _, kept=kept: kept, "test", 0).summary
        mine = site_scores(cohort, shared, kept, 0)
        assert mine == {"rows": 12, **{n: pytest.approx(summary[n], rel=1e-3) for n in ("accuracy", "nll")}}
        found.append(mine)
    first = rounds_of(events)[0]["scores"]
    assert first["accuracy"] == pytest.approx(np.mean([each["accuracy"] for each in found]))
    assert first["nll"] == pytest.approx(np.mean([each["nll"] for each in found]))
    assert first["scored rows"] == 60


@pytest.mark.parametrize("options", [{"allow": False}, {"rows": 9}])
def test_nothing_is_sent_unless_allowed_and_with_enough_rows(tmp_path, options):
    _, events, _, wire = run(tmp_path / "a", score_every=1, **options)
    assert [event["scores"] for event in rounds_of(events)] == [{}, {}]
    order = next(order for order in wire.sent if order.kind == "train")
    assert order.facts == {"score": True}
    assert not wire.sites_by_name[order.site].handle(order).facts.get("scores")


def test_scores_come_every_so_many_rounds(tmp_path):
    _, events, _, _ = run(tmp_path / "a", score_every=2)
    assert [bool(event["scores"]) for event in rounds_of(events)] == [False, True]


def test_site_that_cannot_be_scored_still_trains(tmp_path):
    server, sites = set_up(tmp_path, participation=1.0)
    lead(server, Wire(server, hold_out(sites)))
    site = next(iter(sites.values()))
    card = Card.load(site.card_file)
    algorithm = dataclasses.replace(card.algorithm, personal_epochs=50, personal_lr=1e30)
    card = dataclasses.replace(card, algorithm=algorithm)
    cohort = Cohort(card.setting(load(site, card), 0), card.place())
    assert site_scores(cohort, card.initial_shared(), {}, 0) == {}


@pytest.mark.parametrize(
    "scores",
    [
        None,
        [],
        {},
        {"rows": 20},
        {"accuracy": 0.5, "nll": 1.0},
        {"rows": 20, "accuracy": 1.5},
        {"rows": 20, "accuracy": -0.1},
        {"rows": 20, "nll": float("nan")},
        {"rows": 20, "nll": float("inf")},
        {"rows": 20, "nll": 1e40},
        {"rows": 20, "rmse": -1.0},
        {"rows": 20, "nll": "1"},
        {"rows": 20, "nll": True},
        {"rows": 20.5, "nll": 1.0},
        {"rows": 9, "nll": 1.0},
        {"rows": 10**9, "nll": 1.0},
        {"rows": 20, "nll": 1.0, "more": 1.0},
    ],
)
def test_hostile_scores_are_left_out(scores):
    assert check_scores({"scores": scores}, 1000) == {}
    assert check_scores(scores, 1000) == {}


def test_means_are_weighted_by_rows():
    sites = [{"rows": 10, "accuracy": 1.0, "nll": 0.0}, {}, {"rows": 30, "accuracy": 0.0, "nll": 4.0}]
    checked = [check_scores({"scores": each}, 1000) for each in sites]
    assert mean_scores(checked) == {"accuracy": 0.25, "nll": 3.0, "scored rows": 40}
    assert mean_scores([{}, {}]) == {}
