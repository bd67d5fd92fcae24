"""Who benefits: every client once, its gain with Student's interval, and harm only beyond it."""

import numpy as np
import pytest
from scipy import stats

from fedabml.experiments.benefits import benefit_cells, benefit_notes, benefit_records
from fedabml.experiments.cell import Result, Score
from fedabml.experiments.comparison_tables import explained, grid, markdown
from fedabml.experiments.ranking import make
from fedabml.runs.config import RunConfig

# Three clients over four seeds: one gains always, one loses always, one goes up and down.
ALONE = np.array([[0.5, 0.9, 0.7], [0.6, 0.9, 0.6], [0.5, 0.8, 0.7], [0.6, 0.9, 0.6]])
GAIN = np.array([[0.2, -0.1, 0.1], [0.21, -0.12, -0.1], [0.19, -0.11, -0.1], [0.2, -0.1, 0.08]])


def result(label, seed, values):
    summary = dict.fromkeys(("accuracy", "accuracy_worst_decile", "nll", "ece", "brier"), float(np.mean(values)))
    scores = [Score({}, summary, {"accuracy": list(values), "nll": list(values)})]
    facts = {"bytes_up": 1, "bytes_down": 2, "seconds": 3.0, "split": "test", "partition_hash": "x"}
    facts |= {"names": ["north", "south", "west"], "rows": [40 + seed, 30, 20], "train_rows": [160, 120 + seed, 80]}
    return (label, seed), Result("", label, {"seed": seed}, scores, facts)


def compared(seeds=4, same_clients=True):
    results = [result("local", s, ALONE[s]) for s in range(seeds)]
    results += [result("ours", s, ALONE[s] + GAIN[s]) for s in range(seeds)]
    rows = {"ours": RunConfig(algorithm="fedavg"), "local": RunConfig(algorithm="local")}
    return make(rows, dict(results), {}, range(seeds), same_clients)


def test_every_client_once_with_students_interval():
    found = compared().benefits("ours")
    assert [(each.client, each.verdict) for each in found] == [
        ("north", "gains"), ("west", "not significant"), ("south", "harmed"),
    ]  # fmt: skip
    for each, i in zip(found, (0, 2, 1), strict=True):
        low, high = stats.t.interval(0.95, 3, GAIN[:, i].mean(), stats.sem(GAIN[:, i]))
        assert (each.gain - each.half, each.gain + each.half) == pytest.approx((low, high))
        assert each.alone == pytest.approx(ALONE[:, i].mean()) and each.seeds == 4
    assert found[0].rows == 41.5 and [each.train_rows for each in found] == [160, 80, 121.5]
    assert compared().benefits("local") == []


def test_harm_is_counted_beyond_the_interval_only():
    """West is worse in two of four seeds, which is chance: it is not harmed."""
    comparison = compared()
    assert comparison.harmed_share("ours") == pytest.approx(1 / 3)
    assert comparison.rows[0].harm.worse == 6  # by however little, each seed counted
    ours = comparison.records("algorithm")[0]
    assert (ours["algorithm"], ours["worse"], ours["harmed"]) == ("ours", 6, pytest.approx(1 / 3))
    assert grid(comparison)[1][0][-1] == "33%"
    assert any("beyond chance" in line for line in explained(comparison))
    assert benefit_notes(comparison)[-1] == "ours: 1 of 3 clients gain, 1 are harmed."
    head, rows = benefit_cells(comparison)
    assert head == ["client", "train rows", "test rows", "alone: accuracy %", "gain by ours"]
    assert [[cell.text for cell in row[:3]] for row in rows] == [
        ["north", "160", "42"], ["west", "80", "20"], ["south", "122", "30"],
    ]  # fmt: skip
    assert rows[0][4].text.endswith("▲") and rows[2][4].text.endswith("▼") and "±" in rows[1][4].text
    page = markdown(comparison, "fedabml compare")
    assert "## Who benefits? Gains in accuracy\n" in page and "| north |" in page
    records = list(benefit_records(comparison))
    assert [(record["rows"], record["train_rows"]) for record in records] == [(41.5, 160), (20, 80), (30, 121.5)]
    assert [record["verdict"] for record in records] == ["gains", "not significant", "harmed"]


def test_without_enough_seeds_nothing_is_judged():
    comparison = compared(seeds=2)
    assert comparison.harmed_share("ours") is None and comparison.benefits("ours")[0].half is None
    assert "at least 3 seeds" in benefit_notes(comparison)[0]
    head, rows = grid(comparison)
    ours = next(row.harm for row in comparison.rows if row.label == "ours")
    assert head[-1] == "worse" and rows[0][-1] == f"{ours.share:.0%}"  # counted, but not called harmed
    assert comparison.records("algorithm")[0]["harmed"] is None


def test_clients_that_are_others_with_every_seed_are_not_averaged():
    comparison = compared(same_clients=False)
    assert comparison.benefits("ours") == [] and benefit_cells(comparison)[1] == []
    assert "--partition-seed 0" in benefit_notes(comparison)[0]
    assert any("harmed beyond chance is not known" in line for line in explained(comparison))
