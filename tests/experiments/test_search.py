"""A search's winner: it must survive another seed and all training data, and warns where it lies at an end."""

import csv
import json
import re
import shlex
import tomllib

import numpy as np
import pytest

from fedabml.algorithms.hyper import Range
from fedabml.errors import InputError
from fedabml.experiments.cell import Result, Score
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.runner import Callbacks
from fedabml.experiments.search import Search, Trial, _clear_loss
from fedabml.experiments.search_space import end_warning, own_grid, read_grid
from fedabml.experiments.tune import Tuned, tune
from fedabml.runs.config import RunConfig
from tests.cli.command import run

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]

SMALL = RunConfig(
    clients=8, model="mlr", rounds=2, participation=0.5, epochs=1, batch_size=20, validation=0.2, device="cpu"
)
WORDS = shlex.split("--clients 8 --model mlr --rounds 2 --participation 0.5 --epochs 1 --batch-size 20 --device cpu")


@pytest.mark.parametrize(("large", "value", "who"), [(0.6, 0.6, "of 10 rows or more"), (None, 0.1, "")])
def test_a_search_leaves_out_clients_of_few_rows_as_pages_do(large, value, who):
    key, search = "accuracy_worst_decile", Search(SMALL.with_changes(algorithm="fedavg"), {}, (100,), 1)
    summary = {
        key: 0.1,
        f"{key}_large": large,
        "nll": 0.5,
        f"base_{key}": 0.2,
        f"base_{key}_large": 0.3,
        "base_nll": 0.7,
    }
    result = Result.of(Result("[{}]", "fedavg", {}, [Score({}, summary, {})]).line())
    trial = search.trial(0, search.start, [result], key)
    assert (trial.value, trial.rank, trial.scored_clients, trial.base) == (value, (value, -0.5), who, (0.3, 0.7))
    tuned = Tuned({"fedavg": [trial]}, key, None)
    assert tuned.decided_by == (f"{key} of clients {who}" if who else key) and tuned.base == (0.3, 0.7)


@pytest.mark.parametrize("left_out", [{}, {"rmse": 0.5, "nll": 0.25, "base_rmse": 0.75, "base_nll": 0.125}])
def test_a_search_of_a_regression_counts_all_clients_as_cells_of_before_do(left_out):
    of_all = {"rmse": 1.0, "nll": 2.0, "base_rmse": 3.0, "base_nll": 4.0}
    summary = {f"{key}_all" if left_out else key: value for key, value in of_all.items()} | left_out
    search = Search(SMALL.with_changes(algorithm="fedavg"), {}, (100,), 1)
    clients = [{"rmse": [1.0 + far, 1.25 + far]} for far in (0.0, 9.0)]
    one, worse = (Result("", "fedavg", {}, [Score({}, summary, each)]) for each in clients)
    trial = search.trial(0, search.start, [one], "rmse")
    assert (trial.value, trial.rank, trial.scored_clients, trial.base) == (1.0, (-1.0, -2.0), "", (3.0, 4.0))
    assert Tuned({"fedavg": [trial]}, "rmse", None).decided_by == "rmse"
    worse.scores[0].clients["rmse"][0] = 10.5
    assert "rmse is 1.0000" in _clear_loss("rmse", worse, one)  # the mean of the clients that are compared


def test_a_search_by_recall_names_the_class():
    search, summary = Search(SMALL.with_changes(algorithm="fedavg"), {}, (100,), 1), {"recall": 0.5, "nll": 0.5}
    result = Result("", "fedavg", {}, [Score({}, summary, {})], {"class_names": ["no", "yes"]})
    trial = search.trial(0, search.start, [result], "recall")
    assert Tuned({"fedavg": [trial]}, "recall", None).decided_by == "recall of 'yes'"
    assert Tuned({"fedavg": [search.trial(0, {}, [result], "nll")]}, "nll", None).decided_by == "nll"


# A client has 144 rows without its validation rows, one minibatch, so that FedProx's pull is 0 whatever μ is. With all
# 180 it takes two steps, and μ = 8 turns the second round (1 − ημ = −7); μ = 3e38 overflows.
PROX = SMALL.with_changes(classes_per_client=10, batch_size=150, rounds=3, participation=1.0)
STILL = {"lr": 1.0, "average": 0.0, "server_momentum": 0.0}
WORDS_PROX = shlex.split("--clients 8 --classes-per-client 10 --model mlr --rounds 3 --participation 1 --epochs 1")
WORDS_PROX += shlex.split("--batch-size 150 --device cpu")


@pytest.mark.parametrize(("mu", "reason"), [(3e38, "finite"), (8.0, "clearly worse than")])
def test_a_winner_that_fails_on_all_training_data_gives_way_to_the_next_best(tmp_path, mu, reason):
    words = {"trials": 2, "values": {"mu": [mu, 0.1]}, "fixed": {"fedprox": STILL}}
    found = tune(PROX, ["fedprox"], "out", **words)
    first, second = found.trials["fedprox"]
    assert first.rank == second.rank and first.error is None  # the search sees no difference, and the first wins
    assert first.refused.startswith("on all training rows of seed 101: ") and reason in first.refused
    assert found.best("fedprox", 5) == [second] and second.second > 0.5
    text = found.file.read_text()
    assert tomllib.loads(text)["fedprox"]["mu"] == 0.1 and f"trial 0 was refused {first.refused}" in text
    with open("out/trials.csv", newline="") as file:
        assert [row["refused"] for row in csv.DictReader(file)] == [first.refused, ""]
    cells = Ledger("out/cells.jsonl").results.values()
    assert {cell.facts["split"] for cell in cells} == {"val"} and len(cells) == 6

    again = []
    callbacks = Callbacks(done=again.append)
    assert tune(PROX, ["fedprox"], "out", **words, callbacks=callbacks).trials == found.trials and not again
    run("tune", "--resume", "--out", "out", "--quiet")
    assert found.file.read_text() == text
    if mu > 8:
        train = ("train", "--config", found.file, "--algorithm", "fedprox", "--quiet")
        assert "finite" in run(*train, "--set", f"fedprox.mu={mu}", "--out", "runs/first", code=2).stderr
        run(*train, "--out", "runs/second")


def test_the_command_names_what_was_refused(tmp_path):
    held = [word for name, value in STILL.items() for word in ("--set", f"fedprox.{name}={value}")]
    output = run("tune", "--algorithms", "fedprox", *WORDS_PROX, *held, "--grid", "mu=3e38", "--out", "out")
    assert "1 refused" in output.stdout and "trial 0: refused on all training rows of seed 101" in output.stdout
    assert "fedprox: trial 0 was refused on all training rows of seed 101" in output.stderr
    text = (tmp_path / "out/tuned.toml").read_text()
    assert "fedprox      every trial diverged or was refused" in text and "fedprox" not in tomllib.loads(text)


def test_a_clear_loss_is_a_clear_loss_over_clients():
    def result(*clients):
        return Result("", "", {}, [Score({}, {"accuracy": np.mean(clients)}, {"accuracy": list(clients)})])

    first = result(*[0.9, 1.0] * 10)
    assert _clear_loss("accuracy", first, first) is None
    assert _clear_loss("accuracy", result(*[0.9, 1.0] * 9, 0.9, 0.9), first) is None  # one client's single row
    assert "accuracy is 0.5000, clearly worse than 0.9500" in _clear_loss("accuracy", result(*[0.4, 0.6] * 10), first)
    assert _clear_loss("accuracy", result(0.1), result(0.9)) is None  # of one client nothing is known


def test_a_search_of_an_earlier_version_is_refused_with_the_way(tmp_path):
    words = {"trials": 1, "fixed": {"fedavg": {"lr": 0.1}}}
    tune(SMALL, ["fedavg"], "out", **words)
    saved = json.loads((tmp_path / "out/tune.json").read_text())
    later = ("search", "sealed", "sha256")  # keys that earlier versions did not write
    (tmp_path / "out/tune.json").write_text(json.dumps({k: v for k, v in saved.items() if k not in later}))
    with pytest.raises(InputError, match=r"an earlier version.*tuned.toml can be used.*--finished out/cells.jsonl"):
        tune(SMALL, ["fedavg"], "out", **words, resume=True)


# -- choices at an end ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "values", "chosen", "flag"),
    [
        ("lr", Range(1e-3, 1.0, log=True), 0.8, "fedabml.lr=0.001..10"),
        ("lr", Range(1e-3, 1.0, log=True), 0.0011, "fedabml.lr=0.0001..1"),
        ("lr", Range(1e-3, 1.0, log=True), 7.0, "fedabml.lr=0.001..10"),
        ("lr", Range(1e-3, 1.0, log=True), 0.5, None),
        ("lr", (0.01, 0.1, 0.3), 0.3, "fedabml.lr=0.01..0.9"),
        ("nu0", Range(-5.0, -3.0), -4.95, "fedabml.nu0=-6..-3"),
        ("rho", Range(0.3, 2.0, log=True), 1.95, None),  # 2 is the largest ρ there is
        ("server_momentum", (0.0, 0.4, 0.7), 0.7, "fedabml.server_momentum=0..0.85"),
        ("server_momentum", (0.0, 0.4, 0.7), 0.0, None),
        ("server_momentum", (0.0, 0.4, 0.7), 0.4, None),
        ("personal_lr", (0.003, 0.01, 0.03, 0.1), 0.1, "fedabml.personal_lr=0.003,0.01,0.03,0.1,0.3"),
        ("personal_lr", (None, 0.003, 0.01), 0.003, "fedabml.personal_lr=0.001,0.003,0.01"),
        ("personal_lr", (None, 0.003), None, None),
        ("personal_epochs", (0, 1, 5, 20), 0, None),
        ("personal_epochs", (0, 1, 5, 20), 20, "fedabml.personal_epochs=0,1,5,20,60"),
        ("personal_epochs", (5,), 5, None),  # nothing was searched
        ("drift", ("none", "server"), "server", None),
        ("k", (1, 3, 5), 5, "fedabml.k=1..8"),
    ],
)
def test_a_choice_at_an_end_has_the_flag_to_widen(name, values, chosen, flag):
    text = end_warning("fedabml", name, values, chosen)
    assert text is None if flag is None else text.endswith(f" --grid {flag}") and f"{name} = {chosen} lies at" in text
    if flag:
        (wide,) = own_grid("fedabml", read_grid([flag])).values()
        low, *_, high = wide[:2] if isinstance(wide, Range) else wide
        old = values[:2] if isinstance(values, Range) else [v for v in values if v is not None]
        assert min(old) >= low and high >= max(old) and (low, high) != (min(old), max(old))


@pytest.mark.parametrize(
    ("epochs", "rate", "flags"),
    [
        (20, 0.3, ["personal_epochs=0,1,5,20,60", "personal_lr=0.003,0.01,0.03,0.1,0.3,0.9"]),
        (5, 0.3, ["personal_lr=0.003,0.01,0.03,0.1,0.3,0.9"]),
        (20, 0.03, []),  # larger steps were scored with as many epochs
        (20, 0.003, []),  # and fewer epochs with as small steps
        (1, 0.003, ["personal_lr=0.001,0.003,0.01,0.03,0.1,0.3"]),
        (0, None, []),
    ],
)
def test_how_far_personalising_goes_is_epochs_times_step_size(epochs, rate, flags):
    search = Search(SMALL.with_changes(algorithm="ditto"), {}, [100], 8)
    personal = {"personal_epochs": epochs} | ({"personal_lr": rate} if epochs else {})
    trial = Trial("ditto", 0, search.start, personal, "accuracy", 0.5, 1.0, (0.5, -1.0), 1.0)
    assert [text.split("--grid ditto.")[1] for text in search.warnings(trial)] == flags


def flags(text):
    return re.findall(r"--grid (\S+)", text)


def test_the_flag_of_a_warning_searches_further(tmp_path):
    words = ("--algorithms", "fedavg-ft", "--trials", 3, *WORDS)
    words += tuple(f"--set=fedavg-ft.{name}" for name in ("average=0", "server_momentum=0", "personal_epochs=5"))
    narrow = ("--grid", "fedavg-ft.lr=0.001..0.0011", "--grid", "fedavg-ft.personal_lr=0.001,0.002")
    output = run("tune", *words, *narrow, "--out", "narrow")
    rate, personal = "fedavg-ft.lr=0.001..0.011", "fedavg-ft.personal_lr=0.001,0.002,0.004"
    assert {rate, personal} <= {*flags(output.stderr)} and output.stderr.count("upper end of what was searched") >= 2
    text = (tmp_path / "narrow/tuned.toml").read_text()
    assert {rate, personal} <= {*flags("\n".join(text.splitlines()[1:]))}  # but the command itself
    assert "--grid fedavg-ft.lr=0.001..0.0011" in text.splitlines()[0]

    run("tune", *words, "--grid", rate, "--grid", personal, "--out", "wide")
    with open(tmp_path / "wide/trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert max(float(row["lr"]) for row in rows[1:]) > 0.0011
    assert len({row["server_lr"] for row in rows}) == 3  # what the flag does not name is searched as before
    assert {row["personal_lr"] for row in rows} == {"0.004"}
    assert run("tune", "--resume", "--out", "wide", "--quiet").output == ""


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("personal_lr=0.01..1", "has no range. Give a list"),
        ("lr=1..0.1", "must rise"),
        ("lr=0..1", "must begin above 0"),
        ("lr=a..b", "must be a number"),
        ("drift=none..server", "has no range"),
    ],
)
def test_a_bad_range_is_refused(word, match):
    with pytest.raises(InputError, match=match):
        own_grid("fedabml", read_grid([word]))


def test_a_range_is_given_from_python_too(tmp_path):
    wide = Range(0.002, 2.0, log=True)
    assert own_grid("fedabml", {"lr": wide}) == own_grid("fedabml", {"lr": "0.002..2"}) == {"lr": wide}
    fixed = {"fedavg": {"average": 0.0, "server_lr": 1.0, "server_momentum": 0.0}}
    found = tune(SMALL, ["fedavg"], tmp_path, trials=2, values={"fedavg": {"lr": wide}}, fixed=fixed)
    assert [t.searched.keys() for t in found.trials["fedavg"]] == [{"lr"}] * 2
    assert json.loads((tmp_path / "tune.json").read_text())["grid"] == {"fedavg": {"lr": "0.002..2"}}
    with pytest.raises(InputError, match="a list of values"):
        own_grid("fedabml", {"lr": "wide"})
