"""Tuning: sound spaces, equal budgets, validation data alone, and a search that an interruption does not change."""

import csv
import dataclasses
import itertools
import json
import math
import shlex
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

import fedabml
from fedabml import data
from fedabml.algorithms import REGISTRY, make
from fedabml.algorithms.hyper import Range
from fedabml.engine.autotune import lane_bytes
from fedabml.errors import InputError
from fedabml.experiments import functions
from fedabml.experiments.cell import Cell, Result, Score
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.progress import SearchProgress
from fedabml.experiments.runner import Callbacks
from fedabml.experiments.search import Search, Trial
from fedabml.experiments.search_space import GRID, Points, around, own_grid, personal_options, read_grid, space
from fedabml.experiments.tune import tune
from fedabml.runs.config import RunConfig
from tests.algorithms.problem import federation, simulate
from tests.cli.command import run

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]

SMALL = RunConfig(
    clients=8, model="mlr", rounds=2, participation=0.5, epochs=1, batch_size=20, validation=0.2, device="cpu"
)
WORDS = shlex.split("--clients 8 --model mlr --rounds 2 --participation 0.5 --epochs 1 --batch-size 20 --device cpu")
QUICK = {"personal_epochs": 1, "personal_lr": 0.01}  # one personal option, so that a trial takes a moment
HELD = {"fedavg-ft": QUICK, "fedabml": QUICK | {"lam": 0.01}}


def short(trials):
    return [(t.algorithm, t.number, t.searched, t.personal, t.value, t.nll, t.error) for t in trials]


def body(path):
    """A TOML file without the comments that depend on its folder."""
    own = ("# Made by", "# Use it", "# sha256")
    return [line for line in path.read_text().splitlines() if not line.startswith(own)]


# -- what is searched ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_declared_fits_the_hyperparameter(name):
    fields = {f.name: f for f in dataclasses.fields(REGISTRY[name].kind)}
    for field in fields.values():
        values = field.metadata["tune"]
        if isinstance(values, Range):
            assert field.name not in GRID and values.low < values.high and (values.low > 0 or not values.log)
            assert field.metadata["low"] <= values.low and values.high <= field.metadata["high"]
            assert str(field.type).startswith("float")
        for value in () if isinstance(values, Range) else values:
            assert getattr(make(name, **{field.name: value}), field.name) == value
    assert "lr" in space(name) and ("average" in space(name)) == (name != "local")
    assert not {*GRID, *REGISTRY[name].defaults} & space(name).keys()


COMMON = ("lr", "average", "server_momentum", "server_lr", "personal_epochs", "personal_lr")


@pytest.mark.parametrize("name", COMMON)
def test_what_several_algorithms_have_is_searched_alike(name):
    kinds = [e.kind for e in REGISTRY.values() if not (e.kind is fedabml.Local and name in COMMON[1:3])]
    declared = {f.metadata["tune"] for kind in kinds for f in dataclasses.fields(kind) if f.name == name}
    assert len(declared) == 1 and None not in next(iter(declared))
    if name.endswith("lr"):
        assert declared == {space("fedabml")["rho"]} if name == "server_lr" else max(*declared.pop()[:5]) >= 0.3


@pytest.mark.parametrize("name", REGISTRY)
def test_no_default_lies_at_an_end_of_what_is_searched(name):
    search = Search(SMALL.with_changes(algorithm=name), {}, [100], 8)
    usual = {"personal_epochs": 5, "personal_lr": 0.03}
    given = trial(search, search.start, usual if usual in search.personal else search.personal[0])
    assert search.warnings(given) == []


def trial(search, searched, personal):
    return Trial(search.config.algorithm, 0, searched, personal, "accuracy", 0.5, 1.0, (0.5, -1.0), 1.0)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_point_of_every_space_makes_its_algorithm(name):
    search = Search(SMALL.with_changes(algorithm=name), {}, [100], 8)
    points = Points(search.space, search.start, seed=1, early=8)
    for batch in range(3):
        asked = points.propose(8)
        for point in asked:
            assert point.keys() == search.space.keys()
            assert search.cells(point)[0].config.algorithm_object().values().items() >= point.items()
        points.report([-math.inf if i == batch else point["lr"] for i, point in enumerate(asked)])


def test_points_begin_as_given_spread_outward_and_then_learn():
    ranges = {"lr": Range(1e-3, 1.0, log=True), "kind": ("a", "b", "c"), "nu": Range(-5.0, -3.0)}

    def search(count, batch):
        points, tried = Points(ranges, {"lr": 0.1, "kind": "b", "nu": -4.0}, seed=3, early=8), []
        while len(tried) < count:
            asked = points.propose(min(batch, count - len(tried)))
            points.report([-abs(math.log(p["lr"] / 0.02)) - (p["kind"] == "b") for p in asked])
            tried += asked
        return tried

    tried = search(32, 4)
    assert tried[0] == {"lr": 0.1, "kind": "b", "nu": -4.0}
    assert tried == search(32, 4) and tried[:18] == search(18, 4)
    for i, point in enumerate(tried[1:8], 1):
        low, high = 0.1 * 0.01 ** (i / 7), 0.1 * 10 ** (i / 7)
        assert 0.995 * low <= point["lr"] <= 1.005 * high and abs(point["nu"] + 4) <= i / 7
    kinds = [point["kind"] for point in around(ranges, tried[0], [0.25] * 64, seed=0)]
    assert [kinds.count(kind) / 64 for kind in "abc"] == pytest.approx([1 / 12, 10 / 12, 1 / 12], abs=0.03)
    far = [abs(math.log(p["lr"] / 0.02)) for p in tried]
    assert np.mean(far[16:]) < np.mean(far[1:8])
    assert all(p["lr"] == float(f"{p['lr']:.3g}") for p in tried)


def test_a_given_point_that_is_none_or_outside_has_points_around_it():
    ranges = {"lr": Range(1e-3, 1.0, log=True), "inner_lr": Range(1e-4, 1.0, log=True)}
    _, near, *_ = Points(ranges, {"lr": 7.0, "inner_lr": None}, seed=0, early=8).propose(8)
    assert 0.1 < near["lr"] <= 1.0 and 1e-3 < near["inner_lr"] < 0.1


def test_choices_alone_are_tried_once_each():
    choices = {"k": (1, 3, 5), "kind": ("a", "b")}
    tried = Points(choices, {"k": 3, "kind": "a"}, seed=0, early=8).propose(6)
    assert tried[0] == {"k": 3, "kind": "a"} and len({tuple(p.items()) for p in tried}) == 6
    held = Search(
        SMALL.with_changes(algorithm="fedavg"), {"lr": 0.1, "server_lr": 1.0, "server_momentum": 0.0}, [100], 8
    )
    assert held.space == {"average": (0.0, 0.8, 0.9)} and held.size(16) == 3


def test_a_given_point_outside_the_ranges_is_tried_all_the_same():
    points = Points({"lr": Range(1e-3, 0.3, log=True)}, {"lr": 7.0}, seed=0, early=2)
    assert points.propose(1) == [{"lr": 7.0}]
    points.report([0.5])
    assert 1e-3 <= points.propose(2)[1]["lr"] <= 0.3


def test_personal_options_are_one_grid_for_all():
    epochs, rates = (f.metadata["tune"] for f in dataclasses.fields(fedabml.FedAvg) if f.name in GRID)
    grid = [{"personal_epochs": 0}]
    grid += [{"personal_epochs": e, "personal_lr": r} for e, r in itertools.product(epochs, rates) if e]
    for name in ("fedavg-ft", "fedabml", "ditto", "local", "pfedbayes", "fedpop"):
        own = REGISTRY[name].kind()
        first, *others = personal_options(SMALL.with_changes(algorithm=name))
        assert first == {word: getattr(own, word) for word in GRID} and first in grid
        assert others == [option for option in grid if option != first]
    for name in ("fedavg", "fedprox", "scaffold"):  # what is scored is the shared model itself
        assert personal_options(SMALL.with_changes(algorithm=name)) == ({"personal_epochs": 0},)
    config = SMALL.with_changes(algorithm="fedabml", hyper=QUICK)
    assert personal_options(config, QUICK) == (QUICK,)
    assert [o["personal_epochs"] for o in personal_options(config, ["personal_lr"])] == [1, 0, 5, 20]
    own = config.with_changes(hyper={"personal_epochs": 2, "personal_lr": 0.007})
    assert personal_options(own)[0] == own.hyper and len(personal_options(own)) == len(grid) + 1
    wide = personal_options(config, grid={"personal_lr": (0.1, 1.0)})  # the epochs are as declared
    assert {o["personal_epochs"] for o in wide} == {*epochs} and {o.get("personal_lr", 1.0) for o in wide} == {0.1, 1.0}
    free = SMALL.with_changes(algorithm="fedavg-ft")
    assert personal_options(free, ["personal_lr", "personal_epochs"]) == ({"personal_epochs": 5, "personal_lr": 0.03},)


def test_a_search_over_fedpas_samples_knows_their_memory():
    setups = [SimpleNamespace(layout=SimpleNamespace(size=1000), activations=1), 1, 1, 4]
    few, many = (lane_bytes(setups[0], make("fedpa", samples=n), *setups[1:]) for n in (1, 8))
    assert many - few >= 7 * 3 * 1000 * 4  # a sample is held, shifted and chosen


def test_what_is_fixed_and_what_makes_a_variant_is_not_searched():
    own = {"average", "drift", "lr", "lam", "nu0", "posterior_std", "prior_std", "rho", "server_momentum"}
    assert space("fedabml").keys() == own and space("fedabml", HELD["fedabml"]).keys() == own - HELD["fedabml"].keys()
    assert "server_momentum" not in space("local")


@pytest.mark.parametrize(
    ("held", "word"),
    [({"lam": 0.0}, "lam > 0"), ({"lr": 2.0}, "lr_std between"), ({"personal_lr": 3.0}, "lr_std between")],
)
def test_a_choice_that_contradicts_what_is_held_is_left_out(held, word):
    search = Search(SMALL.with_changes(algorithm="fedabml", hyper=held), held, [100], 8)
    assert search.space.keys() == space("fedabml", held).keys() - {"posterior_std"}
    (output,) = search.notes
    assert output.startswith("fedabml: posterior_std = natural is not searched") and word in output
    free = Search(SMALL.with_changes(algorithm="fedabml", hyper={"lr": 2.0}), {}, [100], 8)
    assert "natural" in free.space["posterior_std"] and not free.notes  # with another lr, which is searched, it is fine


def test_contradictions_are_noted_and_nothing_left_is_one_trial():
    notes = []
    held = HELD["fedabml"] | {
        "average": 0.8,
        "drift": "none",
        "lam": 0.0,
        "lr": 0.03,
        "nu0": -4.0,
        "prior_std": "learned",
        "rho": 1.0,
        "server_momentum": 0.0,
    }
    fixed = {"fedabml": held, "local": QUICK | {"lr": 0.1}}
    found = tune(SMALL, ["fedabml", "local"], "out", fixed=fixed, callbacks=Callbacks(note=notes.append))
    assert [len(trials) for trials in found.trials.values()] == [1, 1] and found.best("fedabml")[0].hyper == QUICK
    assert len(notes) == 1 and "posterior_std = natural is not searched" in notes[0]
    assert tomllib.loads(found.file.read_text())["fedabml"] == held


# -- scores -------------------------------------------------------------------------------------------------------
def result(*scores, error=None, seconds=1.0):
    made = [Score({"personal_epochs": i}, {"accuracy": a, "nll": n}, {}) for i, (a, n) in enumerate(scores)]
    return Result("", "fedavg", {}, made, {"seconds": seconds}, error)


def test_a_trial_is_its_best_personal_option_by_the_mean_over_seeds():
    search = Search(SMALL.with_changes(algorithm="fedavg"), {}, [100, 101], 8)
    seeds = [result((0.8, 0.3), (0.9, 0.5), (0.6, 0.1)), result((0.8, 0.3), (0.6, 0.5), (1.0, 0.3))]
    best = search.trial(0, {"lr": 0.1}, seeds, "accuracy")
    assert (best.personal, best.value, best.nll, best.seconds) == ({"personal_epochs": 2}, 0.8, 0.2, 2.0)  # a tie
    assert best.hyper == {"lr": 0.1, "personal_epochs": 2}
    assert search.trial(0, {}, seeds[:1], "accuracy").personal == {"personal_epochs": 1}
    assert search.trial(0, {}, seeds[:1], "nll").personal == {"personal_epochs": 2}


def test_a_trial_with_a_seed_that_diverged_has_the_worst_rank():
    search = Search(SMALL.with_changes(algorithm="fedavg"), {}, [100, 101], 8)
    lost = search.trial(3, {"lr": 9.0}, [result((0.8, 0.3)), result(error="It diverged.")], "accuracy")
    assert (lost.value, lost.nll, lost.error, lost.number) == (None, None, "It diverged.", 3)
    poor = search.trial(4, {"lr": 0.1}, [result((0.0, 30.0))] * 2, "accuracy")
    assert lost.rank < poor.rank
    assert search.trial(5, {}, [result((0.5, math.inf))], "accuracy").error == "accuracy is not finite"


def test_time_left_of_a_search_counts_what_each_of_its_cells_takes():
    cell = Cell("fedavg", SMALL.with_changes(algorithm="fedavg"))
    with SearchProgress(quiet=True) as board:
        board.expect([cell.estimated_rounds, cell.estimated_rounds, 30.0], 1)
        assert (board.total, board.finished, board.rounds) == (3, 1, cell.estimated_rounds + 30)
        board.round([cell], 1)
        assert board.left == cell.estimated_rounds - 1 + 30
        board.round([cell], cell.estimated_rounds)
        assert board.left == 30 and board.rounds == cell.estimated_rounds + 30
        board.round([cell], cell.estimated_rounds + 1)  # one of a group that takes longer
        assert board.left == 30


# -- a search -----------------------------------------------------------------------------------------------------
def test_every_algorithm_gets_the_same_budget_and_the_best_goes_on(tmp_path):
    plans, reported = [], []
    callbacks = Callbacks(expect=lambda works, done: plans.append((works, done)), trial=reported.append)
    words = {"trials": 4, "batch": 3, "fixed": HELD, "callbacks": callbacks}
    found = tune(SMALL, ["fedavg", "fedavg-ft", "fedabml"], "out", **words)
    assert plans[0] == ([4.0] * 8 + [6.0] * 16, 0)  # two rounds and, of every second client's, one epoch or two
    assert [t for t in reported if t.second is None] == [
        dataclasses.replace(t, second=None, refused=None) for trials in found.trials.values() for t in trials
    ]
    assert [len(trials) for trials in found.trials.values()] == [4, 4, 4]
    assert len(Ledger(tmp_path / "out/cells.jsonl").results) == len(plans[-1][0])
    written = tomllib.loads(found.file.read_text())
    assert not {"algorithm", "validation", "device", "seed", "lr"} & written.keys()
    for name, trials in found.trials.items():
        assert trials[0].searched == {k: getattr(make(name), k) for k in trials[0].searched}  # as given
        (best,) = found.best(name)
        assert best.value == max(t.value for t in trials if not t.refused) and best.second is not None
        assert written[name] == HELD.get(name, {}) | best.hyper
    with open("out/trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["second_seed"] != "" for row in rows] == [
        t.second is not None for ts in found.trials.values() for t in ts
    ]
    assert len(rows) == 12 and {row["algorithm"] for row in rows} == {"fedavg", "fedavg-ft", "fedabml"}
    first = found.trials["fedavg"][0]
    assert (rows[0]["trial"], float(rows[0]["lr"]), rows[0]["error"]) == ("0", first.searched["lr"], "")
    assert rows[0]["value"] == f"{first.value:.6g}" and rows[0]["nu0"] == ""

    output = run("train", "--config", found.file, "--algorithm", "fedabml", "--dry-run").stdout
    assert f"lr={found.best('fedabml')[0].searched['lr']}" in output and "lam=0.01" in output and "8, with" in output
    assert "scored on         test data" in output


class Stop(Exception):
    """An interruption."""


@pytest.mark.parametrize("stop_at", [21, 27])  # in a confirmation, in a batch of the second algorithm
@pytest.mark.nightly
def test_a_search_that_was_interrupted_ends_as_one_that_was_not(tmp_path, stop_at):
    words = {"trials": 10, "batch": 2, "seeds": (100, 101)}
    names = ["fedavg", "scaffold"]
    whole = tune(SMALL, names, "whole", **words)
    finished = []

    def stop(result):
        finished.append(result.identity)
        if len(finished) == stop_at:
            raise Stop

    with pytest.raises(Stop):
        tune(SMALL, names, "parts", **words, callbacks=Callbacks(done=stop))
    assert not (tmp_path / "parts/tuned.toml").exists()
    again, begun = [], []
    words["callbacks"] = Callbacks(done=again.append, expect=lambda cells, done: begun.append((cells, done)))
    parts = tune(SMALL, names, "parts", **words, resume=True)
    assert begun[0][1] == stop_at and not {r.identity for r in again} & {*finished}
    assert len(begun[-1][0]) == len(again) + stop_at == len(Ledger(tmp_path / "whole/cells.jsonl").results)
    count = len(again)
    for name in whole.trials:
        assert short(parts.trials[name]) == short(whole.trials[name])
    assert body(parts.file) == body(whole.file)
    tune(SMALL, names, "parts", **words)  # a finished search: the same words change nothing
    assert len(again) == count


def test_a_longer_search_begins_with_the_shorter_one():
    words = {"batch": 4, "fixed": HELD}
    short_one = tune(SMALL, ["fedavg-ft"], "out", trials=9, **words)
    with pytest.raises(InputError, match=r"trials \(was 9, now 11\).*--resume"):
        tune(SMALL, ["fedavg-ft"], "out", trials=11, **words)
    long_one = tune(SMALL, ["fedavg-ft"], "out", trials=11, **words, resume=True)
    assert short(long_one.trials["fedavg-ft"][:9]) == short(short_one.trials["fedavg-ft"])
    assert len(long_one.trials["fedavg-ft"]) == 11


def test_other_settings_are_not_resumed(tmp_path):
    tune(SMALL, ["fedavg"], "out", trials=1)
    with pytest.raises(InputError, match=r"other settings: .*run.rounds \(was 2, now 3\)"):
        tune(SMALL.with_changes(rounds=3), ["fedavg"], "out", trials=1, resume=True)
    with pytest.raises(InputError, match=r"fixed.fedavg.average \(was unset, now 0.8\)"):
        tune(SMALL, ["fedavg"], "out", trials=1, fixed={"fedavg": {"average": 0.8}})
    with pytest.raises(InputError, match="holds nothing to resume"):
        tune(SMALL, ["fedavg"], "elsewhere", trials=1, resume=True)
    (tmp_path / "out/tune.json").write_text("{}")
    assert "not a request that fedabml tune wrote" in run("tune", "--resume", "--out", "out", code=2).stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    with pytest.raises(InputError, match="holds other files"):
        tune(SMALL, ["fedavg"], "mine", trials=1)


def test_test_data_are_never_read(monkeypatch):
    words = {"trials": 3, "fixed": HELD}
    clean = tune(SMALL, ["fedabml"], "clean", **words)
    real = data.load("digits")
    poison = np.full_like(real.x_test, 255)
    spoilt = dataclasses.replace(real, x_test=poison, y_test=real.y_test[::-1].copy())
    monkeypatch.setattr(data, "load", lambda *_, **__: spoilt)
    monkeypatch.setattr("fedabml.experiments.study.dataset", lambda *_: spoilt)
    fed = SMALL.federation()
    assert (fed.x[fed.test.index] == 255).all()
    poisoned = tune(SMALL, ["fedabml"], "poisoned", **words)
    assert short(poisoned.trials["fedabml"]) == short(clean.trials["fedabml"])
    assert body(poisoned.file) == body(clean.file)
    cells = Ledger("poisoned/cells.jsonl").results.values()
    assert {cell.facts["split"] for cell in cells} == {"val"}


def test_a_configuration_that_diverges_is_a_failed_trial():
    found = tune(SMALL, ["fedavg", "local"], "out", trials=3, fixed={"local": {"lr": 3e38, **QUICK}})
    assert all("finite" in t.error for t in found.trials["local"])
    assert found.best("local") == [] and len(found.best("fedavg", 5)) == sum(
        not t.refused for t in found.trials["fedavg"]
    )
    text = found.file.read_text()
    assert "local        every trial diverged" in text and "local" not in tomllib.loads(text)


def test_a_regression_goes_by_its_rmse(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for i in range(4):
        x = rng.normal(size=(40, 3)).astype("float32")
        y = (x @ [1.0, -1.0, i]).astype("float32")
        np.savez(tmp_path / f"sites/{i}.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    config = SMALL.with_changes(data="sites", clients=100)
    found = tune(config, ["fedavg-ft"], "out", trials=2, fixed=HELD)
    best = found.best("fedavg-ft", 2)
    assert found.measure == "rmse" and best[0].value <= best[1].value
    assert tomllib.loads(found.file.read_text())["data"] == str(tmp_path / "sites")
    words = "is decided by rmse, nll, mae, pinball, coverage, rmse_pooled, .*coverage_pooled; the measure is 'accuracy'"
    with pytest.raises(InputError, match=words):
        tune(config, ["fedavg-ft"], "other", trials=2, measure="accuracy")
    found = tune(config, ["fedavg-ft"], "covered", trials=3, measure="coverage", fixed=HELD)
    assert found.best("fedavg-ft")[0].value == min(
        (t.value for t in found.trials["fedavg-ft"]), key=lambda v: abs(v - 0.9)
    )


def rare_outcome(folder):
    """Write four sites, of whose rows about a sixth are positive."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(4):
        x = rng.normal(size=(200, 3)).astype("float32")
        y = (x[:, 0] + rng.normal(size=200) > 1.3).astype(int)
        np.savez(folder / f"{i}.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    return SMALL.with_changes(data=str(folder), clients=100, participation=1.0, validation=0.3)


def test_recall_and_accuracy_choose_other_settings(tmp_path):
    """The search and its confirmation go by the measure; by the NLL, the step size that finds most would be refused."""
    config, grid = rare_outcome(tmp_path / "sites"), {"lr": [0.01, 0.1, 1.0]}
    chosen = {}
    for measure in ("accuracy", "recall", "classwise_ece"):
        found = tune(config, ["fedavg"], measure, trials=3, measure=measure, values=grid)
        (best,) = found.best("fedavg")
        target = min if measure == "classwise_ece" else max
        assert best.value == target(t.value for t in found.trials["fedavg"])
        chosen[measure] = best.searched["lr"]
        confirmed = [r for r in Ledger(f"{measure}/cells.jsonl").results.values() if r.seed == 101]
        assert confirmed and all(len(r.scores[0].clients[measure]) == 4 for r in confirmed)
    assert chosen == {"accuracy": 1.0, "recall": 0.01, "classwise_ece": 1.0}


def test_a_measure_of_two_classes_is_refused_for_more():
    with pytest.raises(
        InputError, match=r"10 classes, and recall is .* The mean recall of all classes is balanced_acc"
    ):
        tune(SMALL, ["fedavg"], "out", trials=1, measure="recall")
    with pytest.raises(InputError, match=r"decided by accuracy, nll, ece, classwise_ece, .* is 'specificity'"):
        tune(SMALL, ["fedavg"], "out", trials=1, measure="specificity")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"config": SMALL.with_changes(validation=0.0)}, "a share of every client's training data must be held out"),
        ({"algorithms": ["fedavgg"]}, "no algorithm 'fedavgg'. Did you mean 'fedavg'"),
        ({"algorithms": []}, "at least one algorithm"),
        ({"seeds": []}, "at least one seed"),
        ({"trials": 0}, "trials"),
        ({"preset": "papper"}, "no preset 'papper'"),
        ({"algorithms": ["fedrep"]}, "no layer before its head"),  # logistic regression has none
        ({"fixed": {"fedavg": {"momentun": 0.9}}}, "no hyperparameter 'momentun'"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_is_written(tmp_path, words, match):
    words = {"config": SMALL, "algorithms": ["fedavg"], "out": "out"} | words
    with pytest.raises(InputError, match=match):
        tune(**words)
    assert not (tmp_path / "out").exists()


def test_without_optuna_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    output = run("tune", "--algorithms", "fedavg", *WORDS, code=2).stderr
    assert "pip install 'fedabml[tune]'" in output


def test_bad_words():
    error = lambda *words: run("tune", *WORDS, *words, code=2).stderr
    assert "all already names every algorithm" in error("--algorithms", "all,local")
    assert "for ditto, which is not among the named algorithms" in error(
        "--algorithms", "local", "--set", "ditto.lam=1"
    )
    assert "is not accepted here: use --seeds" in error("--algorithms", "local", "--set", "seed=1")


# -- the command --------------------------------------------------------------------------------------------------
def test_the_command_tunes_resumes_and_hands_over(tmp_path):
    held = ("--set", "fedavg-ft.personal_epochs=1", "--set", "fedavg-ft.personal_lr=0.01")
    for name, value in (("server_lr", 1.0), ("server_momentum", 0.0)):
        held += ("--set", f"fedavg-ft.{name}={value}", "--set", f"fedavg.{name}={value}")
    output = run("tune", "--algorithms", "fedavg-ft,fedavg", "--trials", 3, *WORDS, *held, "--lr", 0.05)
    assert "fedavg-ft: the best of 3 trials on validation data" in output.stdout  # three averages are left
    out = tmp_path / "runs/digits-tuning"
    assert (
        f"--config {out.relative_to(tmp_path)}/tuned.toml --algorithms fedavg-ft,fedavg --out runs/digits-tuned"
        in output.stdout
    )
    before = (out / "tuned.toml").read_text()
    assert (
        "seeds 100;" in before
        and "# trained on seed 101" in before
        and "# Made by: fedabml tune --algorithms fedavg-ft,fedavg --trials 3" in before
    )
    (out / "tuned.toml").unlink()
    assert run("tune", "--resume", "--quiet").output == ""
    assert (out / "tuned.toml").read_text() == before
    assert "run.rounds (was 2, now 5)" in run("tune", "--resume", "--rounds", 5, code=2).stderr
    table = tomllib.loads(before)
    assert table["fedavg-ft"]["lr"] == table["fedavg"]["lr"] == 0.05 and table["rounds"] == 2
    found = tmp_path / "runs/digits-tuning/tuned.toml"
    output = run("compare", "--config", found, "--algorithms", "fedavg-ft,fedavg", "--seeds", 2).stdout
    assert "fedavg-ft" in output and "8 clients" in output


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    class Impatient(SearchProgress):
        def done(self, result):
            super().done(result)
            if self.finished == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(functions, "SearchProgress", Impatient)
        output = run("tune", "--algorithms", "fedavg", "--trials", 4, "--batch", 1, *WORDS, code=130).stderr
    assert "3 of 8 runs are finished" in output and "fedabml tune --resume --out runs/digits-tuning" in output
    output = run("tune", "--resume").stdout
    assert "3 of 8 runs were finished before" in output and "4/8  fedavg, trial 3: accuracy" in output
    cells = len(Ledger(tmp_path / "runs/digits-tuning/cells.jsonl").results)
    assert f"{cells}/{cells}  fedavg, trial " in output and ": confirmed, on the second seed accuracy" in output


def test_a_preset_is_where_the_search_starts_and_a_file_is_what_it_holds(tmp_path):
    own = '[tune]\nalgorithms = ["fedprox", "scaffold"]\ntrials = 1\n'
    (tmp_path / "few.toml").write_text(f"rounds = 1\n[fedprox]\nmu = 0.3\n{own}")
    run("tune", *shlex.split("--preset paper --config few.toml --clients 8 --model mlr --device cpu"))
    with open(tmp_path / "runs/digits-tuning/trials.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["lr"], second["lr"], second["server_lr"]) == ("0.01", "0.01", "1.0") and "mu" not in first
    text = (tmp_path / "runs/digits-tuning/tuned.toml").read_text()
    assert "--preset paper" in text and "--set fedprox.mu=0.3" in text and "scaffold.lr" not in text
    assert tomllib.loads(text)["fedprox"] == {
        "lr": 0.01, "mu": 0.3, "average": 0.0, "server_momentum": 0.0, "personal_epochs": 0, "personal_lr": "none",
    }  # fmt: skip
    assert "rounds = 1" in text and "participation = 0.1" in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "mlr"])
@pytest.mark.nightly
def test_all_are_those_that_suit_the_network(tmp_path, model):
    free = [name for name, entry in REGISTRY.items() if "personal_epochs" not in entry.defaults]
    tables = "".join(f"[{name}]\npersonal_epochs = 1\npersonal_lr = 0.01\n" for name in free)
    options = "model_options = { hidden = [16] }\n" if model == "mlp" else ""
    (tmp_path / "run.toml").write_text(options + tables)
    output = run("tune", "--algorithms", "all", "--config", "run.toml", "--trials", 2, *WORDS, "--model", model)
    written = tomllib.loads((tmp_path / "runs/digits-tuning/tuned.toml").read_text())
    headless = {"fedrep", "fedbabu", "fedpop"} if model == "mlr" else set()
    assert written.keys() & REGISTRY.keys() == REGISTRY.keys() - headless
    assert all(f"{name} is left out" in output.stderr for name in headless)
    assert written.get("model_options", {}) == ({"hidden": [16]} if model == "mlp" else {})


def test_a_grid_is_searched_in_place_of_what_is_declared(tmp_path):
    values = read_grid(["lr=0.05,0.1", "personal_epochs=0,2", "personal_lr=0.01", "fedprox-ft.mu=0.1,0.2"])
    assert values == {
        "lr": [0.05, 0.1],
        "personal_epochs": [0, 2],
        "personal_lr": [0.01],
        "fedprox-ft": {"mu": [0.1, 0.2]},
    }
    assert read_grid(["fedabml.posterior_std=sgd,natural", "personal_lr=none,.01"]) == {
        "fedabml": {"posterior_std": ["sgd", "natural"]},
        "personal_lr": [None, 0.01],
    }
    found = tune(SMALL, ["fedavg-ft", "fedprox-ft"], tmp_path, trials=9, seeds=(3,), values=values)
    assert [(t.searched["lr"]) for t in found.trials["fedavg-ft"]] == [0.1, 0.05]
    pairs = {(t.searched["lr"], t.searched["mu"]) for t in found.trials["fedprox-ft"]}
    assert pairs == {(lr, mu) for lr in (0.05, 0.1) for mu in (0.1, 0.2)} and len(found.trials["fedprox-ft"]) == 4
    cells = [cell for cell in Ledger(tmp_path / "cells.jsonl").results.values() if cell.seed == 3]
    assert len(cells) == 6 and all([s.personal["personal_epochs"] for s in cell.scores] == [0, 2] for cell in cells)
    output = (tmp_path / "tuned.toml").read_text().splitlines()[0]
    assert "--grid lr=0.05,0.1" in output and "--grid fedprox-ft.mu=0.1,0.2" in output
    tuples = values | {"lr": (0.05, 0.1)}
    again = tune(SMALL, ["fedavg-ft", "fedprox-ft"], tmp_path, trials=9, seeds=(3,), values=tuples, resume=True)
    assert short(again.trials["fedavg-ft"]) == short(found.trials["fedavg-ft"])


def test_an_algorithm_without_the_grids_names_has_one_trial(tmp_path):
    words = {"trials": 4, "fixed": {"fedavg-ft": QUICK, "fedprox-ft": QUICK}}
    found = tune(SMALL, ["fedavg-ft", "fedprox-ft"], tmp_path, values={"mu": [0.1, 0.2]}, **words)
    assert [len(trials) for trials in found.trials.values()] == [1, 2]
    assert found.trials["fedavg-ft"][0].searched == {}


@pytest.mark.parametrize("word", ["lr", "lr=", "a.b.c=1", "=1"])
def test_bad_grids(word):
    with pytest.raises(InputError, match="--grid takes NAME=A,B,C"):
        read_grid([word])
    with pytest.raises(InputError, match="given already"):
        read_grid(["lr=1", "lr=2"])


@pytest.mark.parametrize(
    ("values", "fixed", "match"),
    [
        ({"lrr": [0.1]}, {}, "'lrr', which is no hyperparameter"),
        ({"fedavg-ft": {"mu": [0.1]}}, {}, "no hyperparameter 'mu'"),
        ({"lr": 0.1}, {}, "a list of values"),
        ({"lr": [0.1]}, {"fedavg-ft": {"lr": 0.2}}, "held at a value, and a grid has it"),
        ({"lr": [-1.0]}, {}, "lr"),
        ({"fedavg-ft": [0.1]}, {}, "'fedavg-ft' is an algorithm"),
        ({"fedrep": {"lr": [0.1]}}, {}, "fedrep, which is not among the algorithms"),
    ],
)
def test_a_grid_that_cannot_be_searched_is_refused(tmp_path, values, fixed, match):
    with pytest.raises(InputError, match=match):
        tune(SMALL, ["fedavg-ft"], tmp_path, trials=2, values=values, fixed=fixed)
    assert not (tmp_path / "cells.jsonl").exists()


def test_none_is_a_word_where_it_is_a_choice_and_a_blank_where_it_is_none():
    values = {"drift": [None, "control"], "personal_lr": [None, 0.01]}
    assert own_grid("fedabml", values) == {"drift": ("none", "control"), "personal_lr": (None, 0.01)}
    with pytest.raises(InputError, match="posterior"):
        own_grid("fedabml", {"posterior": [None]})


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.nightly
def test_whatever_is_searched_changes_something(name):
    fed = federation((60, 45, 9, 4)) if name == "fedpa" else None  # steps enough for samples after a while

    def state(**options):
        sim, _ = simulate(make(name, **options), fed=fed)
        kept = {f"{client}.{key}": value for client, own in sim.kept.states.items() for key, value in own.items()}
        return sim.shared | {f"average.{key}": value for key, value in sim.server.average.items()} | kept

    for key, values in space(name).items():
        pair = (values.low, 2 * values.low) if isinstance(values, Range) else (values[0], values[-1])
        one, other = (state(**{key: value}) for value in pair)
        assert one.keys() != other.keys() or any(not one[part].equal(other[part]) for part in one), key


@pytest.mark.parametrize(("name", "step"), [("pfedme", "inner_lr"), ("apfl", "alpha_lr")])
def test_a_step_size_that_follows_lr_is_searched_from_lr(name, step):
    search = Search(SMALL.with_changes(algorithm=name), {}, [100], 8)
    assert search.start[step] == search.config.algorithm_object().lr


def test_a_chosen_specificity_reaches_files_pages_and_searches(tmp_path, monkeypatch):
    """Train, compare and tune score sensitivity at the level; summary.json, table and page name it."""
    monkeypatch.chdir(tmp_path)
    config = rare_outcome(tmp_path / "sites")
    words = shlex.split("--data sites --model mlr --rounds 2 --participation 1 --epochs 1 --device cpu --lr 1")
    found = {}
    for level in (0.9, 0.5):
        said = run("train", *words, "--algorithm", "fedavg", "--specificity", level, "--out", f"run{level}").stdout
        assert f"a specificity of {100 * level:.0f}% or more" in " ".join(said.split())
        summary = json.loads((tmp_path / f"run{level}/summary.json").read_text())
        found[level] = summary["sensitivity"]
        assert summary["specificity"] == level
        assert (
            f"found with at most {100 - 100 * level:.0f}% false alarms"
            in (tmp_path / f"run{level}/report.html").read_text()
        )
    assert found[0.9] < found[0.5]
    fed = config.with_changes(validation=0.0).federation()
    options = {"rounds": 2, "participation": 1.0, "epochs": 1, "device": "cpu"}
    again = fedabml.train(fed, "mlr", fedabml.FedAvg(lr=1, personal_epochs=0), specificity=0.5, **options)
    assert again.summary["sensitivity"] == pytest.approx(found[0.5])
    resumed = run("train", "--resume", "--out", "run0.9", "--specificity", 0.5).stdout
    assert "a specificity of 50% or more" in " ".join(resumed.split())
    more = shlex.split("--algorithms fedavg,local --seeds 1 --specificity 0.5 --out table --quiet")
    run("compare", *words, *more)
    table = (tmp_path / "table/table.md").read_text()
    assert "sensitivity %" in table and "Sensitivity is at a specificity of 50% or more." in table
    strict, loose = (
        tune(config.with_changes(specificity=level), ["fedavg"], f"tuned{level}", trials=1, measure="sensitivity")
        for level in (None, 0.5)
    )
    assert strict.trials["fedavg"][0].value < loose.trials["fedavg"][0].value
    usual, chosen = (Cell("fedavg", config.with_changes(specificity=level)).identity for level in (None, 0.5))
    assert '"specificity":' not in usual and '"specificity": 0.5' in chosen
    with pytest.raises(InputError, match=r"specificity is a share, above 0 and at most 1, such as 0\.95; it is 95"):
        fedabml.train(fed, "mlr", specificity=95)
