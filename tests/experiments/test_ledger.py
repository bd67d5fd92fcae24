"""Cells and their ledger: what is finished is on disk, is read back, and is never run again."""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

from fedabml.algorithms import REGISTRY, FedABML
from fedabml.errors import InputError
from fedabml.experiments import runner
from fedabml.experiments.cell import Cell, Result, Score
from fedabml.experiments.compare import configs
from fedabml.experiments.ledger import Ledger, Unfinished
from fedabml.experiments.runner import Callbacks, execute
from fedabml.files.sealed import parse_sealed
from fedabml.runs.config import RunConfig, read_toml

SMALL = RunConfig(clients=6, model="mlr", rounds=2, participation=0.5, epochs=1, batch_size=20)


def cells(count=4):
    return [Cell("fedabml", SMALL.with_changes(seed=seed)) for seed in range(count)]


def result(cell, **fields):
    score = Score({}, {"accuracy": 0.5}, {"accuracy": [0.5, None]})
    return Result(cell.identity, cell.label, cell.config.to_dict(), [score], {"seconds": 1.0}, **fields)


@pytest.fixture
def played(monkeypatch):
    """Cells are played, not trained: a list of the seeds that ran; seed 99 is the kill."""
    ran = []

    def play(group, on_round):
        for cell in group:
            if cell.config.seed == 99:
                raise KeyboardInterrupt
            ran.append(cell.config.seed)
            on_round([cell], 1)
            yield result(cell)

    monkeypatch.setattr(runner, "run_together", play)
    return ran


def test_what_makes_a_cell_the_same():
    same = Cell("fedabml", SMALL)
    for change in ({"device": "cpu"}, {"backend": "loop"}, {"chunk": 3}, {"data_dir": "x"}, {"eval_every": 1}):
        assert Cell("fedabml", SMALL.with_changes(**change)).identity == same.identity
    for change in ({"seed": 1}, {"rounds": 3}, {"hyper": {"lam": 0.5}}, {"algorithm": "local"}, {"dtype": "float64"}):
        assert Cell("fedabml", SMALL.with_changes(**change)).identity != same.identity
    assert Cell("other", SMALL).identity == same.identity, "what a row is called decides no number"
    assert Cell("fedabml", SMALL, ({"personal_epochs": 1},)).identity != same.identity


def test_a_result_is_read_back_as_it_was(tmp_path):
    ledger, (first, second, *_) = Ledger(tmp_path / "deep" / "cells.jsonl"), cells()
    ledger.add(result(first))
    ledger.add(result(second, error="Training diverged."))
    again = Ledger(ledger.path)
    assert again.results == ledger.results and list(again.results) == [first.identity, second.identity]
    assert again[first].scores[0].clients["accuracy"] == [0.5, None] and again[second].error == "Training diverged."
    assert (again[first].seed, again[second].seed) == (0, 1) and cells()[2] not in again
    assert RunConfig.of(again[second].config) == second.config


def test_measures_of_earlier_versions_have_the_keys_of_today(tmp_path):
    ledger, first = Ledger(tmp_path / "cells.jsonl"), cells()[0]
    score = Score({}, {"auroc": 0.9, "auroc_large": 0.8, "base_auroc": 0.5, "base_auroc_large": 0.4, "nll": 1.0}, {})
    ledger.add(dataclasses.replace(result(first), scores=[score]))
    today = {"auroc": 0.8, "auroc_all": 0.9, "base_auroc": 0.4, "base_auroc_all": 0.5, "nll": 1.0}
    assert Ledger(ledger.path)[first].scores[0].summary == today


def test_a_line_that_has_its_label_in_its_identity_is_still_good(tmp_path):
    cell = cells()[0]
    line = parse_sealed(result(cell).line(), "")  # and without a seal, as lines were written then
    line["identity"] = json.dumps(["a row", *json.loads(cell.identity)], sort_keys=True)
    (tmp_path / "cells.jsonl").write_text(json.dumps(line) + "\n")
    assert Ledger(tmp_path / "cells.jsonl")[cell].identity == cell.identity


def test_nobody_undoes_what_another_has_added(tmp_path, played):
    """A ledger that was read before another process added to the file, and one of cells from elsewhere."""
    path, other = tmp_path / "cells.jsonl", tmp_path / "other.jsonl"
    execute(cells(3), Ledger(other))
    execute(cells(1), Ledger(path))
    early = Ledger(path, [other])
    execute(cells(2), Ledger(path))
    before = path.read_bytes()
    closed = Ledger(path, [other], closed=True)
    assert [r.seed for r in execute(cells(3), closed)] == [0, 1, 2] and path.read_bytes() == before
    with pytest.raises(Unfinished, match="Runs are missing"):
        execute(cells(4), closed)
    with Ledger(path).locked(), pytest.raises(InputError, match="Another process"):
        execute(cells(3), early)
    assert path.read_bytes() == before
    played.clear()
    assert [r.seed for r in execute(cells(4), early)] == [0, 1, 2, 3] and played == [3]
    assert path.read_bytes().startswith(before)
    assert sorted(r.seed for r in Ledger(path).results.values()) == [0, 1, 2, 3]


def test_a_line_cut_short_is_dropped_and_its_cell_runs_again(tmp_path, played):
    path = tmp_path / "cells.jsonl"
    execute(cells(3), Ledger(path))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (last + 1, last + 40, len(whole) - 1):  # the last is whole but for its end of line
        path.write_bytes(whole[:end])
        ledger = Ledger(path)
        assert len(ledger.results) == 2
        played.clear()
        assert [r.seed for r in execute(cells(3), ledger)] == [0, 1, 2] and played == [2]
        assert path.read_bytes() == whole


def test_bytes_that_are_no_text_at_the_end(tmp_path):
    path, ledger = tmp_path / "cells.jsonl", Ledger(tmp_path / "cells.jsonl")
    ledger.add(result(cells()[0]))
    path.write_bytes(path.read_bytes() + b"\x00\xff\xfe")
    assert len(Ledger(path).results) == 1


@pytest.mark.parametrize("line", ["", "{", "[]", '{"identity": "x"}', '{"who": 1, "scores": []}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    path, ledger = tmp_path / "cells.jsonl", Ledger(tmp_path / "cells.jsonl")
    for cell in cells(2):
        ledger.add(result(cell))
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{second}\n")
    with pytest.raises(InputError, match=r"cells.jsonl', line 2: .*Remove the line"):
        Ledger(path)
    path.write_text(f"{first}\n{second}\n")
    assert len(Ledger(path).results) == 2


def test_a_changed_line_is_refused_and_named(tmp_path):
    path, ledger = tmp_path / "cells.jsonl", Ledger(tmp_path / "cells.jsonl")
    for cell in cells(3):
        ledger.add(result(cell))
    whole = path.read_text()
    second = whole.splitlines()[1]
    for old, new in (("0.5", "0.6"), ("a", "\r"), ('"sha256"', '"sha257"')):
        changed = second.replace(old, new, 1)
        assert changed != second
        path.write_text(whole.replace(second, changed), newline="")
        with pytest.raises(InputError, match=r"cells.jsonl', line 2: .*Remove the line"):
            Ledger(path)
        assert path.read_text() != whole


def test_nothing_is_run_twice(tmp_path, played):
    ledger, rounds, done = Ledger(tmp_path / "cells.jsonl"), [], []
    doubled = [*cells(2), *cells(2)]
    on_round = lambda group, round: rounds.append(({cell.config.seed for cell in group}, round))
    execute(doubled, ledger, Callbacks(round=on_round, done=done.append))
    assert sorted(played) == [0, 1] and len(done) == 2 and {round for _, round in rounds} == {1}
    assert execute(doubled, Ledger(ledger.path)) == [*done, *done] and sorted(played) == [0, 1]
    assert [r.seed for r in execute(cells(3), Ledger(ledger.path))] == [0, 1, 2] == sorted(played)


def test_an_interruption_costs_only_what_was_running(tmp_path, played):
    path = tmp_path / "cells.jsonl"
    killer = Cell("fedabml", SMALL.with_changes(seed=99))
    with pytest.raises(KeyboardInterrupt):
        execute([*cells(2), killer, *cells(4)[2:]], Ledger(path))
    assert [json.loads(line)["config"].get("seed", 0) for line in path.read_text().splitlines()] == [0, 1]
    assert [r.seed for r in execute(cells(4), Ledger(path))] == [0, 1, 2, 3] == played


@pytest.mark.slow
def test_real_cells(tmp_path):
    personal = ({"personal_epochs": 0}, {"personal_epochs": 2})
    calm = Cell("fedavg", SMALL.with_changes(algorithm="fedavg"), personal)
    wild = Cell("wild", SMALL.with_changes(algorithm="fedavg", hyper={"lr": 1e38}), personal)
    ledger, rounds = Ledger(tmp_path / "cells.jsonl"), []
    on_round = lambda group, round: rounds.append(round)
    found = {r.label: r for r in execute([calm, wild], ledger, Callbacks(round=on_round))}
    fine, lost = found["fedavg"], found["wild"]
    assert fine.error is None and [score.personal for score in fine.scores] == [*personal]
    assert fine.scores[0].summary["accuracy"] < fine.scores[1].summary["accuracy"]
    assert not fine.scores[0].clients  # every client's own score is kept where there is a single option
    assert fine.facts["bytes_up"] > 0 and fine.facts["partition_hash"] and fine.facts["split"] == "test"
    assert "diverged" in lost.error and not lost.scores and lost.facts["partition_hash"] == fine.facts["partition_hash"]
    assert {1, 2} <= set(rounds) and max(rounds) == pytest.approx(calm.estimated_rounds)
    again = []
    execute([calm, wild], Ledger(ledger.path), Callbacks(done=again.append))
    assert not again  # one that diverged is finished, too


def test_a_default_that_is_spelled_out_makes_no_other_cell():
    """A cell is known by what is computed: of a version with other defaults, nothing is taken for the same."""
    plain = RunConfig(algorithm="fedabml")
    defaults = {"s": FedABML().s, "lr": FedABML().lr}
    assert Cell("a", plain).identity == Cell("a", plain.with_changes(hyper=defaults)).identity
    assert Cell("a", plain).identity != Cell("a", plain.with_changes(hyper={"s": FedABML().s + 1})).identity
    assert Cell("a", plain).identity == Cell("a", plain.with_changes(lr=FedABML().lr)).identity


def test_cells_of_before_a_hyperparameter_came_are_cells_of_now():
    plain = Cell("a", RunConfig(algorithm="fedavg-ft"))
    explicit = Cell("a", RunConfig(algorithm="fedavg-ft", hyper={"lr_decay": 1.0, "server_lr": 1.0}))
    assert plain.identity == explicit.identity and "lr_decay" not in plain.identity
    for name in ("lr_decay", "server_lr"):
        other = Cell("a", RunConfig(algorithm="fedavg-ft", hyper={name: 0.9}))
        assert other.identity != plain.identity and f'"{name}": 0.9' in other.identity


RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The cells and settings of earlier searches, whose identities must stay what they were."""
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(RESULTS / "archive.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


def missing(settings, cells, seeds, older=False):
    """The labels of the cells that published settings name and a published ledger lacks.

    Settings that are `older` than the option `newcomer` mean what it was then.
    """
    given, ledger = read_toml(settings), Ledger(cells)
    systems = [name for name, value in given.items() if isinstance(value, dict)]
    for name in systems if older else ():
        if "newcomer" in {field.name for field in dataclasses.fields(REGISTRY[name].kind)}:
            given[name] = {"newcomer": "initial", **given[name]}
    made = [
        Cell(name, config.with_changes(seed=seed)) for name, config in configs(systems, given).items() for seed in seeds
    ]
    return [cell.label for cell in made if cell not in ledger]


@pytest.mark.parametrize("column", ["cifar10-2", "cifar10-5", "emnist", "fashionmnist", "cifar100-5", "cifar100-20"])
def test_published_cells_are_those_of_the_published_settings(column):
    """A default that changes must not change which cells are finished."""
    folder, seeds = RESULTS / "table1" / column, range(5) if column.startswith("cifar100") else range(10, 15)
    assert missing(folder / "settings.toml", folder / "cells.jsonl", seeds) == []


@pytest.mark.parametrize(
    ("settings", "cells", "seeds"),
    [
        ("rivals/fashionmnist", "rivals/fashionmnist-compare", range(5)),
        ("rivals/emnist", "rivals/emnist-compare", range(5)),
        ("table1/cifar10-2", "table1/cifar10-2-compare", range(5)),
        ("table1/cifar10-5", "table1/cifar10-5-compare", range(5)),
        ("momentum/cifar10-5", "momentum/cifar10-5-compare", range(5, 10)),
    ],
)
def test_archived_cells_are_those_of_the_archived_settings(archive, settings, cells, seeds):
    assert missing(archive / f"{settings}.toml", archive / f"{cells}.jsonl", seeds, older=True) == []


def test_cells_of_the_estimators_keep_their_identities():
    ledger = Ledger(RESULTS / "research" / "estimators.jsonl")
    config = RunConfig(dataset="emnist", clients=150, classes_per_client=3, rounds=100, validation=0.2)
    hyper = {"lr": 0.12, "lam": 0.0107, "nu0": -3.5, "personal_epochs": 20, "personal_lr": 0.01, "server_momentum": 0.0}
    for estimator, s, antithetic in [
        ("weight", 2, False),
        ("weight", 2, True),
        ("local", 1, False),
        ("flipout", 1, False),
    ]:
        own = hyper | {"estimator": estimator, "s": s, "antithetic": antithetic}
        assert all(Cell("", config.with_changes(hyper=own, seed=seed)) in ledger for seed in (100, 101, 102)), own


def test_a_stored_dirichlet_is_the_draw_that_it_was(tmp_path):
    """Earlier versions stored 'dirichlet' for the draw per client: such cells serve that draw, and no other."""
    config = RunConfig(algorithm="fedavg", partition="dirichlet-clients", clients=5)
    cell, usual = Cell("x", config), Cell("x", config.with_changes(partition="dirichlet"))
    assert usual.config.partition == "dirichlet-classes" and cell.identity != usual.identity
    word = lambda text: text.replace("dirichlet-clients", "dirichlet")
    old = Result(word(cell.identity), "x", {**config.to_dict(), "partition": "dirichlet"})
    (tmp_path / "cells.jsonl").write_text(old.line().strip() + "\n")
    ledger = Ledger(tmp_path / "cells.jsonl")
    assert cell in ledger and usual not in ledger
    assert RunConfig.of(ledger[cell].config) == config
