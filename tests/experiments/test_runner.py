"""Cells side by side: the same numbers as one by one, and one that diverges takes nobody with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import fedabml
from fedabml.engine.rounds import Simulation, run_round
from fedabml.engine.samples import Data
from fedabml.errors import InputError
from fedabml.experiments import runner
from fedabml.experiments.cell import Cell
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper.newcomers import Newcomers
from fedabml.experiments.runner import Callbacks, execute
from fedabml.runs.config import RunConfig

SMALL = {"clients": 8, "rounds": 2, "participation": 0.5, "model": "mlr", "dtype": "float64"}


def cell(algorithm="fedabml", seed=0, personal=({},), **hyper):
    config = RunConfig.of({**SMALL, "algorithm": algorithm, "seed": seed, algorithm: hyper})
    return Cell(algorithm, config, personal)


def run(cells, path):
    return execute(cells, Ledger(path))


@pytest.mark.slow
def test_together_as_one_by_one(tmp_path, monkeypatch):
    options = ({"personal_epochs": 0}, {"personal_epochs": 2, "personal_lr": 0.02})
    cells = [cell(seed=s, lr=lr, personal=options) for s in (0, 1) for lr in (0.05, 0.02)] + [cell("ditto", lr=0.05)]
    together = run(cells, tmp_path / "together.jsonl")
    assert [r.facts["together"] for r in together] == [4, 4, 4, 4, 1]
    monkeypatch.setattr(runner, "TOGETHER", 1)
    alone = run(cells, tmp_path / "alone.jsonl")
    assert [r.facts["together"] for r in alone] == [1] * 5
    for a, b in zip(alone, together, strict=True):
        assert a.identity == b.identity and a.facts["partition_hash"] == b.facts["partition_hash"]
        assert len(a.scores) == (2 if a.label == "fedabml" else 1)
        for one, other in zip(a.scores, b.scores, strict=True):
            assert one.personal == other.personal
            assert one.summary["nll"] == pytest.approx(other.summary["nll"], abs=1e-9)
            measures = {"accuracy", "nll", "auroc", "average_precision", "balanced_accuracy", "f1"}
            assert one.clients.keys() == other.clients.keys() == (set() if a.label == "fedabml" else measures)
            for name in one.clients:  # of every client only where there is one option: a search has many
                values = (np.array(each.clients[name], float) for each in (one, other))  # None is NaN
                np.testing.assert_allclose(*values, atol=1.1e-5)
    assert len({r.scores[1].summary["nll"] for r in alone[:4]}) == 4


@pytest.mark.slow
def test_runs_with_other_frozen_weights_are_not_side_by_side(tmp_path, monkeypatch):
    """The frozen weights of a network by name are drawn from the seed, and a batched program reads those of one run."""
    frozen = {**SMALL, "rounds": 1, "model": "mlp", "model_options": {"hidden": [4]}, "train": "head"}
    frozen |= {"backend": "vmap", "algorithm": "fedavg"}
    options = [{"seed": 0}, {"seed": 0, "fedavg": {"lr": 0.2}}, {"seed": 1}]
    cells = [Cell("a", RunConfig.of(frozen | option)) for option in options]
    together = run(cells, tmp_path / "together.jsonl")
    assert [r.facts["together"] for r in together] == [2, 2, 1]
    monkeypatch.setattr(runner, "TOGETHER", 1)
    alone = run(cells, tmp_path / "alone.jsonl")
    for a, b in zip(alone, together, strict=True):
        assert a.scores[0].summary["nll"] == pytest.approx(b.scores[0].summary["nll"], abs=1e-9)


@pytest.mark.nightly
@pytest.mark.slow
def test_options_that_differ_in_epochs_are_scored_on_one_way(tmp_path):
    """The same numbers as of each alone, in the order in which they were asked for; some are asked for twice."""
    epochs = (3, 0, 1, 5, 1)  # 5 is the default, too
    options = [{"personal_epochs": e, "personal_lr": lr} for lr in (0.02, 0.05) for e in epochs] + [{}]
    (whole,) = run([cell(lr=0.05, personal=tuple(options))], tmp_path / "whole.jsonl")
    assert [score.personal for score in whole.scores] == options
    assert [score.summary["prior_nll"] is not None for score in whole.scores] == [True] + [False] * 10  # the first's
    for i in (0, 1, 4, 7, 10):  # both step sizes, no epoch, one, three and the default
        (one,) = run([cell(lr=0.05, personal=(options[i],))], tmp_path / f"{i}.jsonl")
        assert one.scores[0].summary["nll"] == pytest.approx(whole.scores[i].summary["nll"], abs=1e-12)


def test_what_may_not_go_together_does_not():
    cells = [cell(), cell(s=3), cell("fedavg"), cell(lam=0.5), cell(seed=4), cell(momentum=0.5)]
    assert [len(group) for group in runner.groups(cells)] == [3, 1, 1, 1]
    option = lambda epochs, lr: ({"personal_epochs": epochs, "personal_lr": lr},)
    options = [cell(personal=option(*way)) for way in ((1, 0.1), (2, 0.1), (1, 0.2), (1, None))]
    assert [len(group) for group in runner.groups(options)] == [2, 1, 1]


def test_runs_of_other_data_are_not_taken_for_one_batch():
    a, b = (
        fedabml.Federation.from_arrays([(np.full((4, 2), v, np.float32), np.arange(4) % 2)] * 2) for v in (1.0, 2.0)
    )
    one, other, third = (
        Simulation(
            fedabml.prepare(f, "mlr", fedabml.FedAvg(**h), participation=1, epochs=1, device="cpu", chunk=4).cohort
        )
        for f, h in ((a, {}), (b, {}), (a, {"momentum": 0.5}))
    )
    for wrong in (other, third):
        with pytest.raises(ValueError, match="side by side"):
            run_round([one, wrong])
    place = torch.device("cpu"), torch.float32
    assert Data.of(a, *place) is one.cohort.data
    plain = dataclasses.replace(a, shift=a.shift + 1)  # the same arrays, seen otherwise
    assert Data.of(plain, *place) is not one.cohort.data


@pytest.mark.slow
def test_two_processes_do_not_write_one_ledger(tmp_path):
    first, second = Ledger(tmp_path / "cells"), Ledger(tmp_path / "cells")

    def write_too(result):
        with pytest.raises(InputError, match="Another process is at work"):
            execute([cell("local")], second)

    pair = [cell("fedavg", seed=s, lr=0.05 + 0.01 * s) for s in (0, 1)]
    assert len(execute(pair, first, Callbacks(done=write_too))) == len(Ledger(tmp_path / "cells").results) == 2
    execute([cell("local")], Ledger(tmp_path / "cells"))
    assert len(Ledger(tmp_path / "cells").results) == 3


@pytest.mark.slow
def test_a_cell_that_diverges_is_a_result_and_costs_the_others_nothing(tmp_path):
    rounds = []
    cells = [cell("fedavg", lr=0.05), cell("fedavg", lr=1e307), cell("fedavg", lr=0.05, seed=1)]
    on_round = lambda group, t: rounds.append((len(group), t))
    found = execute(cells, Ledger(tmp_path / "cells"), Callbacks(round=on_round))
    assert [r.error is None for r in found] == [True, False, True]
    assert "diverged" in found[1].error and not found[1].scores
    assert found[0].scores[0].summary["accuracy"] == run(cells[:1], tmp_path / "alone")[0].scores[0].summary["accuracy"]
    assert rounds[:2] == [(3, 1), (3, 2)] and rounds[-1] == (
        3,
        pytest.approx(cells[0].estimated_rounds),
    )  # trained, scored
    personal = [cell("fedavg-ft", lr=0.05, personal=({"personal_epochs": 3, "personal_lr": 1e307},)), cell("fedavg-ft")]
    wrong, right = run(personal, tmp_path / "personal")
    assert "Personalising diverged" in wrong.error and right.error is None
    options = ({"personal_epochs": 3, "personal_lr": 1e307}, {"personal_epochs": 1, "personal_lr": 0.01})
    (mixed,) = run([cell("fedavg-ft", lr=0.05, personal=options)], tmp_path / "mixed")
    assert mixed.error is None and "diverged" in mixed.scores[0].error and not mixed.scores[0].summary
    assert mixed.scores[1].error is None and mixed.scores[1].summary["accuracy"] > 0


@pytest.mark.slow
def test_scoring_is_reported_by_parts_and_never_backwards(tmp_path):
    personal = ({"personal_epochs": 0}, {"personal_epochs": 3}, {"personal_epochs": 1, "personal_lr": 0.02})
    study, reported = Newcomers(0.5, sizes=(2, 4)), []
    one = dataclasses.replace(cell("fedavg-ft", lr=0.05, personal=personal), study=study)
    one = dataclasses.replace(one, config=one.config.with_changes(chunk=1))  # each client alone, so each is reported
    execute([one], Ledger(tmp_path / "cells"), Callbacks(round=lambda group, t: reported.append(t)))
    rounds, new = one.config.rounds, one.config.clients // 2
    after = reported[rounds:]
    assert reported[:rounds] == list(range(1, rounds + 1)) and after == sorted(after)
    assert len(after) == 2 * 2 * 2 * new and after[-1] == pytest.approx(
        one.estimated_rounds
    )  # two sizes, two draws, two ways
    first, second = after[new - 1] - rounds, after[2 * new - 1] - after[new - 1]
    assert first == pytest.approx(2 * second)  # three epochs and predictions, one and predictions
    reported.clear()
    first, second = runner._part_callbacks(one, [1, 3], reported.append)
    for part, share in ((first, 0.5), (first, 1.0), (second, 0.5), (second, 0.1), (second, 1.0)):  # one is repeated
        part(share)
    assert reported == pytest.approx(
        [rounds + part * (one.estimated_rounds - rounds) for part in (1 / 8, 1 / 4, 5 / 8, 5 / 8, 1)]
    )


def test_cells_of_other_folders_are_not_run_again(tmp_path):
    (first,) = run([cell("fedavg", lr=0.05)], tmp_path / "there")
    ledger, sizes = Ledger(tmp_path / "here", [tmp_path / "there"]), []
    wanted = [cell("fedavg", lr=0.05), cell("fedavg", lr=0.02)]
    results = execute(wanted, ledger, Callbacks(round=lambda group, t: sizes.append(len(group))))
    assert {*sizes} == {1} and results == [*ledger.results.values()] and results[0] == first
    assert Ledger(tmp_path / "here").results == ledger.results  # the folder has all of its own
    with pytest.raises(InputError, match="no file of finished cells"):
        Ledger(tmp_path / "here", [tmp_path / "nowhere"])
