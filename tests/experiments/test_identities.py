"""Stored results keep their identities: renaming a study, an algorithm or a hyperparameter must not orphan them."""

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedabml.algorithms import REGISTRY
from fedabml.experiments.cell import Cell, Result
from fedabml.experiments.compare import compare, configs
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper import EXPERIMENTS, Request
from fedabml.experiments.paper.experiment import Context
from fedabml.experiments.study import Study
from fedabml.models import build
from fedabml.runs.config import RunConfig

BENCHMARKS = ("Bundled", "Part")  # studies that are defined outside the package
RESULTS = Path(__file__).parents[2] / "results"


def ledgers():
    """Every file of finished cells under results/; other JSON lines there are races."""
    return [path for path in sorted(RESULTS.rglob("*.jsonl")) if b'"identity"' in path.read_bytes()[:1000]]


def known_studies():
    found, todo = {}, [Study]
    while todo:
        kind = todo.pop()
        found[kind.__name__] = kind
        todo += kind.__subclasses__()
    return found


@pytest.mark.parametrize("path", ledgers(), ids=lambda path: str(path.relative_to(RESULTS)))
@pytest.mark.slow
def test_a_stored_ledger_names_studies_algorithms_and_hyperparameters_of_today(path):
    studies = known_studies()
    for result in Ledger(path).results.values():
        config, _, *more = json.loads(result.identity)
        assert {*config[config["algorithm"]]} <= {f.name for f in fields(REGISTRY[config["algorithm"]].kind)}
        name, content = more[1] if len(more) > 1 and more[1] else ("Study", {})
        while name == "AllTraining":
            name, content = content
        if name not in BENCHMARKS:
            assert {*content} == {f.name for f in fields(studies[name])}


def test_a_result_is_read_back_with_its_identity():
    for path in ledgers()[:3]:
        for result in Ledger(path).results.values():
            assert Result.of(result.line()).identity == result.identity


def test_a_folder_of_a_model_is_identified_by_its_files(tmp_path):
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(b"one")
    cell = Cell("a", RunConfig(model=str(tmp_path)))
    first = cell.identity
    (tmp_path / "README.md").write_text("no part of the model")
    assert cell.identity == first
    weights.write_bytes(b"other")
    second = cell.identity
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert len({first, second, cell.identity}) == 3
    assert "model_files" not in Cell("a", RunConfig()).identity


def test_pretrained_weights_are_identified_by_their_content(tmp_path):
    weights = tmp_path / "w.safetensors"
    cell = Cell("a", RunConfig(pretrained=str(weights)))
    absent = cell.identity
    weights.write_bytes(b"one")
    first = cell.identity
    weights.rename(tmp_path / "moved")
    weights.write_bytes(b"two")
    assert len({absent, first, cell.identity}) == 3
    (tmp_path / "moved").replace(weights)
    assert cell.identity == first
    assert "pretrained_file" not in Cell("a", RunConfig()).identity


def test_a_comparison_trains_again_with_other_weights_at_the_same_path(tmp_path):
    """A folder that was finished with one file of weights does not pass its numbers off as those of another."""
    own = {"clients": 8, "rounds": 1, "model": "mlr", "device": "cpu", "pretrained": str(tmp_path / "w.safetensors")}
    rows, scores = configs(["fedavg"], own), []
    for value in (0.0, 0.5, 0.5):
        weights = {name: torch.full_like(t, value) for name, t in build("mlr", [1, 8, 8], 10).state_dict().items()}
        save_file({name: t * torch.arange(t.numel()).view(t.shape) for name, t in weights.items()}, own["pretrained"])
        comparison = compare(rows, 1, out=tmp_path / "out")
        scores.append(comparison.rows[0].scores["nll"])
    assert scores[0] != scores[1] == scores[2]
    assert len((tmp_path / "out" / "cells.jsonl").read_text().splitlines()) == 2


# Digests of the identities of the cells that the quick versions declare. A change orphans what users have finished.
DECLARED = {
    "toy": "feefca1e22b96de9",
    "remarks": "f1568575e6712e21",
    "bound": "176a55dfaca0f6fb",
    "table1": "4213f8fd53404a31",
    "table2": "80bc69cda51698cd",
    "uncertainty": "bfb230416ed8c71a",
    "sensitivity": "8362a54d2f309136",
    "fewdata": "9efb867b7ae12dce",
    "clients": "fb3d1b7dadd345db",
}


@pytest.mark.parametrize("name", DECLARED)
def test_an_experiment_declares_the_cells_that_it_declared(name):
    """`newcomer` was added on purpose: at its neutral value the identities are those of versions without it."""
    cells = EXPERIMENTS[name]().cells(Context(Request(name, quick=True, seeds=2), Path(), Path()))
    keeping = [cell for cell in cells if hasattr(cell.config.algorithm_object(), "newcomer")]
    assert all('"newcomer": "server"' in cell.identity for cell in keeping)
    cells = [
        replace(cell, config=cell.config.with_changes(hyper=cell.config.hyper | {"newcomer": "initial"}))
        if cell in keeping
        else cell
        for cell in cells
    ]
    assert hashlib.sha256("\n".join(cell.identity for cell in cells).encode()).hexdigest()[:16] == DECLARED[name]
