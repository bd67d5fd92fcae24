"""The study of tied prior widths: its fixed points, its server's step, and the figures that the page takes from it."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import tied_widths

    return tied_widths


def test_tied_empirical_bayes_finds_each_blocks_width_where_rows_are_many(study):
    """With λ = 1 it finds τ; with λ → 0 it finds τ² + 1/P, which in the narrowest block is 20% more variance."""
    for covariance in ("full", "diagonal"):
        found = study.fixed_point(100, covariance, rounds=100)
        assert all(low == high == pytest.approx(1, abs=0.1) for low, high in found)
    assert 1.05 < study.fixed_point(100, "full", 0.01, rounds=100)[0][0] < 1.15


def test_with_fewer_rows_than_weights_a_mean_field_leaves_width_to_one_block_alone(study):
    narrow, middle, wide = (low for low, _ in study.fixed_point(6, "diagonal"))
    assert max(narrow, middle) < 0.35 and wide > 0.9


def test_the_server_gives_every_layer_the_mean_of_what_its_weights_say(study):
    algorithm = study.Tied(form="moments", rho_std=1.0)
    algorithm.groups[:] = [3, 2]
    shared = {"mean": torch.zeros(5).double(), "logstd": torch.zeros(5).double()}
    update = {"mean": torch.full((5,), 0.5).double(), "second": torch.tensor([1.0, 2, 3, 4, 6]).double()}
    merged = algorithm.merge(shared, update, 4, 4)
    torch.testing.assert_close(torch.exp(2 * merged["logstd"]), torch.tensor([1.75] * 3 + [4.75] * 2).double())


def test_a_row_has_the_weights_that_enter_a_unit_and_a_bias_vector_is_one(study):
    layout = study.Layout(("0.weight", "0.bias"), ((2, 3), (2,)))
    assert study.rows(layout) == [3, 3, 2]
    algorithm = study.Tied(by="row", rho_std=1.0)
    algorithm.init(torch.zeros(8).double(), layout)
    tied = algorithm.tied(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 9]))
    torch.testing.assert_close(tied, torch.tensor([2.0] * 3 + [5.0] * 3 + [8.0] * 2))


@pytest.mark.parametrize(
    ("task", "kind"),
    [("digits", "tied"), ("blocks", "tied"), ("fashionmnist", "tied"), ("digits", "rows"), ("fashionmnist", "rows")],
)
def test_the_page_has_the_figures_of_the_records(study, task, kind):
    lines = [
        json.loads(line)
        for line in (ROOT / "results/research/tied-widths.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    own = [line for line in lines if line["task"] == task]
    page = (ROOT / "docs/research.md").read_text(encoding="utf-8").splitlines()
    rows = [f"| {task} | {row} |" for row in study.table(own, kind)]
    assert len(rows) == len(study.SIZES) and set(rows) <= set(page)


@pytest.mark.parametrize("task", ["digits", "blocks", "fashionmnist"])
def test_the_command_prints_the_tables_of_finished_records(study, task, tmp_path, monkeypatch, capsys):
    records = tmp_path / "records.jsonl"
    records.write_bytes((ROOT / "results/research/tied-widths.jsonl").read_bytes())
    monkeypatch.setattr("sys.argv", ["tied_widths.py", task, "--out", str(records)])
    study.main()
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    assert set(study.table([line for line in lines if line["task"] == task])) <= set(printed)
