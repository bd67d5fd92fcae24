"""Studies: other data, other listeners, curves; and what they leave alone."""

import json
from collections import Counter

import numpy as np
import pytest

from fedabml.experiments.cell import Cell, Result
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper.newcomers import Newcomers, few_random
from fedabml.experiments.paper.outside import auroc, with_outside
from fedabml.experiments.runner import execute, groups, run_together
from fedabml.experiments.study import PLAIN, Study, federation
from fedabml.runs.config import RunConfig

SMALL = RunConfig(clients=6, model="mlr", rounds=2, participation=0.5, epochs=1, batch_size=20)


def run(cell):
    (result,) = run_together([cell], lambda cells, round: None)
    return result


def test_a_plain_cell_is_named_as_ever():
    """Ledgers of before studies must stay good."""
    cell = Cell("x", SMALL)
    assert len(json.loads(cell.identity)) == 2
    names = {
        cell.identity,
        Cell("x", SMALL, curve=(1,)).identity,
        Cell("x", SMALL, study=Newcomers(0.5)).identity,
        Cell("x", SMALL, study=Newcomers(0.5, (5,))).identity,
    }
    assert len(names) == 4


def test_a_line_of_an_older_ledger_is_read():
    old = {"identity": '["x", {}, []]', "label": "x", "config": {}, "facts": {}, "error": None}
    old["scores"] = [{"personal": {}, "summary": {}, "clients": {}, "error": None}]
    made = Result.of(json.dumps(old))
    assert made.curve == [] and made.found == {} and made.scores[0].on == ""


@pytest.mark.slow
def test_the_last_of_the_curve_is_the_score_and_watching_changes_nothing():
    seen, plain = run(Cell("x", SMALL, curve=(1, 2))), run(Cell("x", SMALL))
    assert [line["round"] for line in seen.curve] == [1, 2] and plain.curve == []
    assert seen.curve[-1]["accuracy"] == seen.scores[0].summary["accuracy"] == plain.scores[0].summary["accuracy"]
    assert seen.curve[0]["nll"] > seen.curve[1]["nll"]


def test_cells_of_different_studies_do_not_share_a_batch():
    cells = [Cell("x", SMALL), Cell("x", SMALL, study=Newcomers(0.5)), Cell("x", SMALL, curve=(1,))]
    assert len(list(groups(cells))) == 3
    assert len(list(groups([Cell("x", SMALL.with_changes(seed=s), study=Newcomers(0.5)) for s in range(3)]))) == 1


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "ditto"])
def test_newcomers_are_the_others_and_start_anew(algorithm):
    config, study = SMALL.with_changes(algorithm=algorithm), Newcomers(0.5)
    whole, trained = federation(config), study.federation(config)
    (new,) = study.audiences(config, trained).values()
    assert sorted([*trained.names, *new.names]) == sorted(whole.names)
    assert not {*trained.train.index} & {*new.train.index}
    result = run(Cell("x", config, ({"personal_epochs": 0}, {"personal_epochs": 3}), study=study))
    assert [s.on for s in result.scores] == ["new", "new"]
    assert result.scores[0].summary["clients_scored"] == new.clients == 3
    assert result.scores[1].summary["nll"] < result.scores[0].summary["nll"]


def test_few_samples_are_a_part_of_a_clients_own_spread_over_its_labels():
    study = Newcomers(0.5, (4, 10_000))
    trained = study.federation(SMALL)
    small, large = (study.audiences(SMALL, trained)[name] for name in ("4", "10000"))
    for client in range(small.clients):
        assert {*small.train[client]} < {*large.train[client]} and len(small.train[client]) == 4
    assert ((small.label_counts() > 0) == (large.label_counts() > 0)).all()
    assert (small.test.index == large.test.index).all()


def test_few_random_samples_are_uniform_nested_and_depend_on_the_client_alone():
    study = Newcomers(0.5, (4, 8, 10_000))
    audiences = study.audiences(SMALL, study.federation(SMALL))
    assert list(audiences) == ["4", "8", "10000", "4 random", "8 random", "10000 random"]
    small, large, whole = (audiences[f"{n} random"] for n in study.sizes)
    assert (whole.train.index == audiences["10000"].train.index).all()
    for client in range(small.clients):
        assert {*small.train[client]} < {*large.train[client]} < {*whole.train[client]}
        assert (len(small.train[client]), len(large.train[client])) == (4, 8)
        alone = few_random(whole.select([client]), 4, SMALL.seed)
        assert alone.train[0].tolist() == small.train[client].tolist()
    times = Counter(sample for seed in range(600) for sample in few_random(whole, 4, seed).train[0])
    expected = 600 * 4 / whole.train.counts[0]
    assert len(times) == whole.train.counts[0]  # every sample is drawn at some time
    assert sum((n - expected) ** 2 for n in times.values()) / len(times) < 1.5 * expected  # a binomial's variance
    labels = [few_random(whole, 5, seed).label_counts()[0] for seed in range(600)]
    missing = np.mean([(counts[whole.label_counts()[0] > 0] == 0).any() for counts in labels])
    assert missing == pytest.approx(2 / 2**5, abs=0.04)  # of two labels; a stratified draw never misses one


@pytest.mark.slow
def test_lanes_of_a_study_compute_what_one_run_would(tmp_path):
    cells = [Cell("x", SMALL.with_changes(seed=s, backend="vmap"), curve=(2,), study=Newcomers(0.5)) for s in range(2)]
    together = execute(cells, Ledger(tmp_path / "cells.jsonl"))
    assert [r.facts["together"] for r in together] == [2, 2]
    for cell, result in zip(cells, together, strict=True):
        alone = run(cell)
        assert alone.scores[0].summary["nll"] == pytest.approx(result.scores[0].summary["nll"], rel=1e-4)
        assert alone.curve[0]["nll"] == pytest.approx(result.curve[0]["nll"], rel=1e-4)


@pytest.mark.slow
def test_what_a_study_finds_is_on_disk(tmp_path):
    class Counting(Study):
        def observe(self, sim):
            return {"round": sim.round}

    ledger = Ledger(tmp_path / "cells.jsonl")
    cell = Cell("x", SMALL, study=Counting())
    execute([cell], ledger)
    assert Ledger(ledger.path)[cell].found == {"round": 2} and PLAIN.identity == ["Study", {}]


def test_samples_from_outside_keep_the_labels_and_the_training_statistics():
    fed, first = with_outside(SMALL, "scrambled")
    own = federation(SMALL)
    assert (fed.shift, fed.scale) == (own.shift, own.scale) and (fed.x[:first] == own.x).all()
    test = np.sort(own.test.index)
    assert (fed.y[first:] == own.y[test]).all() and (fed.x[first:] != own.x[test]).any()
    assert (np.sort(fed.x[first:].reshape(len(test), -1)) == np.sort(own.x[test].reshape(len(test), -1))).all()


def test_auroc_by_hand_and_by_sklearn():
    from sklearn.metrics import roc_auc_score

    assert auroc(np.array([0, 1]), np.array([2, 3])) == 1 and auroc(np.array([1.0]), np.array([1.0])) == 0.5
    dice = np.random.default_rng(0)
    a, b = dice.integers(0, 5, 40), dice.integers(2, 7, 30)
    assert auroc(a, b) == pytest.approx(roc_auc_score([0] * 40 + [1] * 30, [*a, *b]))
