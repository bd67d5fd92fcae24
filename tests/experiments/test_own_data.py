"""A user's own folder or table in an experiment: read once, cells batched as lanes, the numbers of cells one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedabml
from fedabml.data import columns, folders, once, table
from fedabml.experiments import runner
from fedabml.experiments.cell import Cell
from fedabml.experiments.compare import compare, configs
from fedabml.experiments.comparison_page import render
from fedabml.experiments.comparison_tables import _clients, markdown
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper.newcomers import Newcomers
from fedabml.experiments.ranking import make
from fedabml.experiments.runner import execute
from fedabml.runs.config import RunConfig
from tests.cli.command import run

pd = pytest.importorskip("pandas")
SMALL = {"rounds": 2, "participation": 0.5, "model": "mlr", "dtype": "float64", "backend": "vmap", "device": "cpu"}
CLIENTS, ROWS = 6, 12


def samples(shift=0.0):
    rng = np.random.default_rng(3)
    x = rng.normal(shift, 1, (CLIENTS, ROWS, 4)).astype(np.float32)
    return x, (x.sum(-1) > np.arange(CLIENTS)[:, None] / 3).astype(np.int64)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "own"
    path.mkdir()
    for i, (x, y) in enumerate(zip(*samples(), strict=True)):
        np.savez(path / f"site{i}.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    return {"data": str(path)}


def write_csv(path, target="label", shift=0.0):
    x, y = samples(shift)
    frame = pd.DataFrame(x.reshape(-1, 4), columns=list("abcd"))
    frame["site"] = [f"site{i}" for i in range(CLIENTS) for _ in range(ROWS)]
    words = [("no", "yes")[v] for v in y.reshape(-1)]
    frame[target] = words if target == "label" else x.sum(-1).reshape(-1) * 100 + 5
    frame.to_csv(path, index=False)


@pytest.fixture
def csv(tmp_path):
    write_csv(tmp_path / "own.csv")
    return {"data": str(tmp_path / "own.csv"), "client_column": "site", "target_column": "label"}


@pytest.fixture
def amounts(tmp_path):
    write_csv(tmp_path / "amounts.csv", "amount")
    return {"data": str(tmp_path / "amounts.csv"), "client_column": "site", "target_column": "amount"}


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, in order."""
    found = []

    def counted(module, name):
        honest = getattr(module, name)

        def read(path, *args):
            found.append(Path(path).name)
            return honest(path, *args)

        monkeypatch.setattr(module, name, read)

    counted(folders, "read_client")
    counted(table, "read_frame")
    return found


def cells(own, algorithms=("fedabml", "fedavg-ft"), seeds=3, **more):
    return [
        Cell(name, RunConfig.of(SMALL, own, {"algorithm": name, "seed": seed}, more))
        for name in algorithms
        for seed in range(seeds)
    ]


@pytest.mark.parametrize("kind", ["folder", "csv", "amounts"])
@pytest.mark.parametrize("validation", [pytest.param(0.0, marks=pytest.mark.nightly), 0.3])
@pytest.mark.slow
def test_seeds_form_one_batch_with_the_numbers_of_each_alone(kind, validation, request, tmp_path, monkeypatch):
    own = request.getfixturevalue(kind)
    together = execute(cells(own, validation=validation), Ledger(tmp_path / "together"))
    assert [result.facts["together"] for result in together] == [3] * 6
    monkeypatch.setattr(runner, "TOGETHER", 1)
    alone = execute(cells(own, validation=validation), Ledger(tmp_path / "alone"))
    assert [result.facts["together"] for result in alone] == [1] * 6
    for one, other in zip(alone, together, strict=True):
        assert one.error is None and one.identity == other.identity
        assert one.facts["partition_hash"] == other.facts["partition_hash"]
        (a,), (b,) = one.scores, other.scores
        for name, value in a.summary.items():
            assert b.summary[name] == (value if value is None else pytest.approx(value, abs=1e-9, rel=1e-9)), name
        for name, values in a.clients.items():
            assert b.clients[name] == pytest.approx(values, abs=1.1e-5), name
    assert len({result.scores[0].summary["nll"] for result in alone}) == 6  # a seed makes a difference


def test_new_clients_of_a_table_are_scored_on_their_own_rows(csv, tmp_path, monkeypatch):
    """A study that scores other clients than it trained finds their samples in the array that runs share."""
    study = [Cell(c.label, c.config, study=Newcomers(0.5)) for c in cells(csv, ("fedavg-ft",), 2)]
    together = execute(study, Ledger(tmp_path / "together"))
    monkeypatch.setattr(runner, "TOGETHER", 1)
    alone = execute(study, Ledger(tmp_path / "alone"))
    assert [r.facts["together"] for r in together] == [2, 2] and [r.facts["together"] for r in alone] == [1, 1]
    for one, other in zip(alone, together, strict=True):
        assert [s.summary["nll"] for s in one.scores] == pytest.approx([s.summary["nll"] for s in other.scores])


@pytest.mark.slow
def test_tables_whose_features_differ_by_seed_are_not_batched(tmp_path):
    """A category is a column of its own for the seeds that train on five or more of its rows."""
    write_csv(tmp_path / "own.csv")
    frame = pd.read_csv(tmp_path / "own.csv")
    frame["ward"] = ["rare" if i % 6 == 0 and i < 60 else "usual" for i in range(len(frame))]
    frame.to_csv(tmp_path / "own.csv", index=False)
    own = {"data": str(tmp_path / "own.csv"), "client_column": "site", "target_column": "label", "test_share": 0.6}
    some = cells(own, ("fedavg",), 12)
    widths = [cell.config.federation().x.shape[1] for cell in some]
    found = execute(some, Ledger(tmp_path / "cells"))
    assert len({*widths}) == 2
    assert sorted(result.facts["together"] for result in found) == sorted(widths.count(w) for w in widths)
    assert [result.identity for result in found] != [] and all(result.error is None for result in found)


@pytest.mark.parametrize("kind", ["folder", "csv"])
@pytest.mark.slow
def test_a_comparison_reads_every_file_once_and_the_next_one_what_has_changed(kind, request, reads, tmp_path):
    own = request.getfixturevalue(kind)
    files = ["own.csv"] if kind == "csv" else [f"site{i}.npz" for i in range(CLIENTS)]
    rows = configs(["fedabml", "fedavg-ft"], SMALL | own)
    first = compare(rows, 3, out=tmp_path / "first")
    assert reads == files
    reads.clear()
    if kind == "csv":
        write_csv(tmp_path / "own.csv", shift=0.5)
    else:
        x, y = samples(0.5)
        np.savez(tmp_path / "own" / "site0.npz", x_train=x[0, :8], y_train=y[0, :8], x_test=x[0, 8:], y_test=y[0, 8:])
    second = compare(rows, 3, out=tmp_path / "second")
    assert reads == files
    assert first.rows[0].scores["nll"] != second.rows[0].scores["nll"]


@pytest.mark.parametrize("kind", ["csv", "frame"])
def test_a_comparison_parses_every_column_of_a_table_once(kind, csv, tmp_path, monkeypatch):
    parsed, honest = [], columns.numbers

    def counted(column, name):
        parsed.append(name)
        return honest(column, name)

    monkeypatch.setattr(columns, "numbers", counted)
    own = csv if kind == "csv" else csv | {"data": pd.read_csv(csv["data"])}
    fedabml.compare(algorithms=["fedavg", "fedavg-ft"], seeds=3, out=tmp_path / "out", **SMALL, **own)
    assert sorted(parsed) == list("abcd")


def test_nothing_is_held_when_no_experiment_runs(csv, folder, reads):
    config = RunConfig.of(SMALL, csv)
    assert config.federation() is not config.federation() and len(reads) == 2
    with once.reading_once():
        assert config.federation() is config.federation() and len(reads) == 3
        other = config.with_changes(seed=1).federation()
        assert other is not config.federation() and len(reads) == 3
        with once.reading_once():
            assert config.federation() is config.federation()
        one, two = (RunConfig.of(SMALL, folder, {"validation": 0.3, "seed": s}).federation() for s in (0, 1))
        assert one.x is two.x and one.hash != two.hash and len(reads) == 3 + CLIENTS
    assert not once._CACHE


def test_a_file_that_changes_within_an_experiment_is_read_again(csv, reads):
    config = RunConfig.of(SMALL, csv)
    with once.reading_once():
        before = config.federation().hash
        write_csv(csv["data"], shift=0.5)
        assert config.federation().hash != before and len(reads) == 2


OPTIONS = [
    ("csv", {"class_weights": "balanced"}),
    ("csv", {"class_weights": "3,1"}),
    ("amounts", {"noise_by_input": True}),
]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
@pytest.mark.slow
def test_options_of_the_likelihood_reach_every_run_of_a_comparison(kind, option, request, tmp_path, monkeypatch):
    """Class weights and noise by input change the numbers, and seeds side by side have those of each alone."""
    own = request.getfixturevalue(kind)
    plain, batched = (cells(own, ("fedavg-ft",), 2, validation=0.3, **more) for more in ({}, option))
    assert all(a.identity != b.identity for a, b in zip(plain, batched, strict=True))
    without = execute(plain, Ledger(tmp_path / "plain"))
    together = execute(batched, Ledger(tmp_path / "together"))
    assert [result.facts["together"] for result in together] == [2, 2]
    monkeypatch.setattr(runner, "TOGETHER", 1)
    for one, other, base in zip(execute(batched, Ledger(tmp_path / "alone")), together, without, strict=True):
        assert one.scores[0].summary["nll"] == pytest.approx(other.scores[0].summary["nll"], abs=1e-9, rel=1e-9)
        assert one.scores[0].summary["nll"] != pytest.approx(base.scores[0].summary["nll"], abs=1e-6)


FLAGS = [
    ("csv", "--class-weights balanced", {"class_weights": "balanced"}, "Class weights are for rows with one class"),
    ("amounts", "--noise-by-input", {"noise_by_input": True}, "noise_by_input is for a regression"),
]


@pytest.mark.parametrize(("kind", "flag", "key", "refusal"), FLAGS)
@pytest.mark.slow
def test_compare_and_tune_take_the_flags_of_the_likelihood(kind, flag, key, refusal, request, tmp_path):
    def words(own):
        data = f"--data {own['data']} --client-column site --target-column {own['target_column']} {flag} "
        return (data + "--algorithms fedavg-ft,local --rounds 2 --participation 0.5 --model mlr --device cpu").split()

    fitting = request.getfixturevalue(kind)
    other = request.getfixturevalue("amounts" if kind == "csv" else "csv")
    run("compare", *words(fitting), "--seeds", 2, "--out", tmp_path / "compared")
    run("tune", *words(fitting), "--trials", 2, "--out", tmp_path / "search")
    tuned = tmp_path / "search" / "tuned.toml"
    run("compare", "--algorithms", "fedavg-ft,local", "--config", tuned, "--seeds", 1, "--out", tmp_path / "table")
    for folder in ("compared", "table"):
        lines = (tmp_path / folder / "cells.jsonl").read_text().splitlines()
        assert lines and all(json.loads(line)["config"].items() >= key.items() for line in lines)
    for command in ("compare", "tune"):
        assert refusal in run(command, *words(other), "--out", tmp_path / f"other-{command}", code=2).output


def test_every_client_of_a_comparison_has_its_recall_and_auroc(csv, tmp_path):
    """Accuracy hides that a class is never found at a client: files, frame and page have every client's recall."""
    out = tmp_path / "out"
    own = csv | {"test_share": 0.5, "positive_class": "no"}
    found = fedabml.compare(algorithms=["fedavg", "local"], seeds=2, out=out, **SMALL, **own)
    trained = fedabml.train(RunConfig.of(SMALL, own).federation(), algorithm=fedabml.FedAvg(), **SMALL)
    frame = found.frame()
    first = frame[(frame.algorithm == "fedavg") & (frame.seed == 0)]
    for key in ("auroc", "recall", "precision", "rows[no]", "rows[yes]"):
        expected = trained.frame()[key]
        np.testing.assert_allclose(first[key].to_numpy(float), expected, atol=1e-5)
        written = pd.read_csv(out / "clients.csv")
        np.testing.assert_allclose(written[written.algorithm == "fedavg"][key].head(CLIENTS), expected, atol=1e-5)
    page = (out / "report.html").read_text("utf-8")
    assert "Recall of &#39;no&#39;" in page and "Rows of no" in page and "sensitivity are those of &#39;no&#39;" in page
    ledger = (out / "cells.jsonl").read_text("utf-8").splitlines()
    former = [json.loads(line) for line in ledger]  # as earlier versions wrote them, without a seal
    for line in former:
        del line["sealed"], line["sha256"], line["facts"]["class_names"]
        score = line["scores"][0]
        score["clients"] = {key: score["clients"][key] for key in ("accuracy", "nll")}
    old = {(line["label"], line["config"].get("seed", 0)): runner.Result.of(json.dumps(line)) for line in former}
    again = make({row.label: row.config for row in found.rows}, old, {}, found.seeds, True)
    assert "auroc" not in again.frame().columns and len(again.frame()) == len(frame)
    assert render(again, "") and len(list(_clients(again))) == len(frame)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_comparison_has_the_recall_and_precision_of_every_class(csv, seeds, tmp_path):
    """Accuracy hides that one of several classes is never found: files and page have every class, as those of train."""
    table = pd.read_csv(csv["data"])
    level = table[list("abcd")].sum(axis=1)
    table["label"] = np.select([level < -1, level < 1], ["low", "mid|dle"], "high")
    table.to_csv(csv["data"], index=False)
    out, own = tmp_path / "out", csv | {"test_share": 0.5}
    found = fedabml.compare(algorithms=["fedavg", "local"], seeds=seeds, out=out, **SMALL, **own)
    federations = [RunConfig.of(SMALL, own, {"seed": seed}).federation() for seed in range(seeds)]
    algorithm = fedabml.FedAvg(personal_epochs=0)
    trained = [fedabml.train(fed, algorithm=algorithm, seed=seed, **SMALL) for seed, fed in enumerate(federations)]
    details = [run.evaluation.details for run in trained]
    assert details[0]["class_names"] == ["high", "low", "mid|dle"]
    written = pd.read_csv(out / "table.csv").set_index("algorithm").loc["fedavg"]
    in_json = next(row for row in json.loads((out / "table.json").read_text())["rows"] if row["label"] == "fedavg")
    for key in ("recall", "precision"):
        means = np.mean([d[f"{key}_by_class"] for d in details], 0)
        for name, mean in zip(details[0]["class_names"], means, strict=True):
            assert written[f"{key}[{name}]"] == pytest.approx(mean, abs=1e-5) == in_json[f"{key}[{name}]"]
    text, page = (out / "table.md").read_text(), (out / "report.html").read_text()
    assert r"| algorithm | of the class | high | low | mid\|dle |" in text and "mid|dle" in page
    rows = np.mean([np.sum(d["confusion"], 1) for d in details], 0)
    assert f"| rows |  | {' | '.join(f'{n:,.0f}' for n in rows)} |" in text
    recall = next(line for line in text.splitlines() if line.startswith("| fedavg | recall %"))
    assert ("±" in recall) == (seeds > 1)
    lines = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    for line in lines:  # as earlier versions wrote them
        del line["sealed"], line["sha256"], line["scores"][0]["by_class"]
    old = {(line["label"], line["config"].get("seed", 0)): runner.Result.of(json.dumps(line)) for line in lines}
    again = make({row.label: row.config for row in found.rows}, old, {}, found.seeds, True)
    assert "## Classes" not in markdown(again, "") and "## Classes" in markdown(found, "")
