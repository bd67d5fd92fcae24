"""compare, tune and reproduce from Python: the same results as the commands, for a caller's own things, too."""

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from torch import nn

import fedabml
from fedabml.algorithms import REGISTRY
from fedabml.algorithms.hyper import hyper
from fedabml.errors import InputError
from fedabml.experiments import functions
from fedabml.experiments.progress import CellProgress, Stopped
from fedabml.experiments.study import module_hash
from tests.cli.command import run

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]
QUICK = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu"}
NAMES = ("ward a", "ward b", "<script>alert(1)</script>", "ward d")


def federation(seed=0):
    rng = np.random.default_rng(seed)

    def client(rows, sign):
        x = rng.normal(size=(rows, 3)).astype(np.float32)
        return x, (sign * x[:, 0] > 0).astype(np.int64)

    train, test = ([client(rows, 1 - 2 * (i % 2)) for i in range(4)] for rows in (12, 25))
    return fedabml.Federation.from_arrays(train, test, names=NAMES)


@dataclass(frozen=True)
class Damped(fedabml.FedAvg):
    """FedAvg whose server goes a part of the way."""

    damping: float = hyper(0.5, "share of the way", 0, 1, static=True, tune=(0.5, 1.0))

    def merge(self, shared, update, sampled, clients):
        new = super().merge(shared, update, sampled, clients)["mean"]
        return {"mean": shared["mean"] + self.damping * (new - shared["mean"])}


@pytest.fixture(autouse=True)
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_comparison_of_own_things_has_the_scores_that_training_gives(capsys):
    fed, module = federation(), nn.Sequential(nn.Linear(3, 2))
    own = Damped(lr=0.2, damping=0.7, personal_epochs=1)
    comparison = fedabml.compare(fed, module, [own, "local"], seeds=2, **QUICK)
    assert comparison.folder is None and len(comparison.warnings) == 1 and "batch of 50" in comparison.warnings[0]
    frame = comparison.frame()
    assert list(frame.columns)[:8] == ["algorithm", "seed", "client", "name", "n_train", "n_test", "accuracy", "nll"]
    assert {"auroc", "recall", "f1", "rows[0]", "rows[1]"} <= set(frame.columns)
    assert len(frame) == 2 * 2 * 4 and set(frame["name"]) == {*NAMES}
    assert set(frame.n_train) == {12} and set(frame.n_test) == {25}
    for seed in (0, 1):
        trained = fedabml.train(fed, module, own, **QUICK, seed=seed).frame()
        part = frame[(frame.algorithm == "Damped") & (frame.seed == seed)]
        np.testing.assert_allclose(part.accuracy, trained.accuracy, atol=1e-5)
        np.testing.assert_allclose(part.nll, trained.nll, atol=1e-4)
        assert list(part["name"]) == list(trained["name"]) and list(part.n_train) == list(trained.n_train)
    table = comparison.frame("algorithm")
    assert list(table.algorithm) == [*(row.label for row in comparison.rows), "base rate"]
    base = table.iloc[-1]
    assert base.nll == comparison.base["nll"] and base.accuracy == comparison.base["accuracy"] and not base.best
    assert table.accuracy[0] == pytest.approx(frame[frame.algorithm == table.algorithm[0]].accuracy.mean())
    assert comparison.best is comparison.rows[0]
    assert capsys.readouterr() == ("", "")  # silent by default
    with pytest.raises(InputError, match="by client or by algorithm, not by 'seed'"):
        comparison.frame("seed")


def test_the_command_and_the_function_give_the_same_numbers(tmp_path):
    words = ["--clients", 8, "--rounds", 1, "--participation", 1, "--epochs", 1, "--model", "mlr", "--device", "cpu"]
    run("compare", "--algorithms", "fedavg,local", *words, "--seeds", 2, "--out", tmp_path / "a")
    fedabml.compare(model="mlr", algorithms=["fedavg", "local"], clients=8, seeds=2, **QUICK, out=tmp_path / "b")
    cells = [[json.loads(line) for line in (tmp_path / name / "cells.jsonl").read_text().splitlines()] for name in "ab"]
    assert [cell["identity"] for cell in cells[0]] == [cell["identity"] for cell in cells[1]]
    assert [cell["scores"] for cell in cells[0]] == [cell["scores"] for cell in cells[1]]
    assert {file.name for file in (tmp_path / "a").iterdir()} == {file.name for file in (tmp_path / "b").iterdir()}


def test_a_comparison_goes_on_in_its_folder_and_refuses_other_data(tmp_path, monkeypatch):
    rows = {"small": fedabml.FedAvg(lr=0.01), "large": fedabml.FedAvg(lr=0.3)}
    options = {"model": "mlr", "algorithms": rows, "seeds": 1, "out": tmp_path / "c", **QUICK}

    class Impatient(CellProgress):
        def done(self, result):
            super().done(result)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(functions, "CellProgress", Impatient)
        with pytest.raises(Stopped, match="1 of 2 runs are finished"):
            fedabml.compare(federation(), **options)
    done = []
    monkeypatch.setattr(CellProgress, "done", lambda self, result: done.append(result.label))
    first = fedabml.compare(federation(), **options)
    assert len(done) == 1 and first.folder == tmp_path / "c" and (tmp_path / "c/report.html").exists()
    assert fedabml.compare(federation(), **options).frame().equals(first.frame()) and len(done) == 1
    with pytest.raises(InputError, match="has other data"):
        fedabml.compare(federation(1), **options)
    with pytest.raises(InputError, match=r"Call fedabml\.compare there"):
        functions.comparing.page(tmp_path / "c")


def test_a_frame_is_divided_as_a_table_is(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 3)), columns=[*"abc"]).round(3)
    frame["site"], frame["out"] = np.repeat(["p", "q", "r"], 30), np.where(frame.a > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    columns = {"client_column": "site", "target_column": "out", "test_share": 0.3}
    options = {"model": "mlr", "algorithms": ["fedavg"], "seeds": 2, **columns, **QUICK}
    of_frame, of_file = (fedabml.compare(data=data, **options).frame() for data in (frame, tmp_path / "t.csv"))
    pd.testing.assert_frame_equal(of_frame, of_file)
    with pytest.raises(InputError, match="A DataFrame needs client_column"):
        fedabml.compare(data=frame)


def test_a_search_gives_an_algorithm_to_train_with(tmp_path):
    pytest.importorskip("optuna")
    fed = federation()
    grid = {"lr": [0.01, 0.3], "personal_epochs": [1], "personal_lr": [0.1]}
    words = {"trials": 2, "grid": grid, "out": tmp_path / "t", **QUICK}
    tuned = fedabml.tune(fed, "mlr", [fedabml.FedAvg(momentum=0.5)], **words)
    trials = tuned.frame()
    assert trials.iloc[-1].algorithm == "base rate"
    assert (trials.iloc[-1].value, trials.iloc[-1].nll) == tuned.base
    trials = trials.iloc[:-1]
    best = trials.sort_values(["value", "nll"], ascending=[False, True]).iloc[0]  # ties: the NLL decides
    assert tuned.algorithm("fedavg-ft").lr == best.lr and tuned.algorithm("fedavg-ft").momentum == 0.5
    assert tuned.settings("fedavg-ft") == {"momentum": 0.5, "lr": best.lr, "personal_epochs": 1, "personal_lr": 0.1}
    assert tuned.file.read_text().startswith("# Made by") and "clients =" not in tuned.file.read_text()
    comparison = fedabml.compare(fed, algorithms=["fedavg-ft"], config=tuned.file, seeds=1)
    assert comparison.best.config.hyper == tuned.settings("fedavg-ft") and comparison.best.config.rounds == 1
    with pytest.raises(InputError, match="'fedabml' was not tuned"):
        tuned.settings("fedabml")
    again = fedabml.tune(fed, "mlr", [fedabml.FedAvg(momentum=0.5)], **words)
    assert again.frame().iloc[:-1].equals(trials)
    assert fedabml.tune(fed, "mlr", ["fedavg-ft"], trials=1, grid=grid, **QUICK).file is None


@pytest.mark.nightly
def test_an_experiment_of_the_paper_gives_its_records():
    findings = fedabml.reproduce("toy", quick=True, device="cpu")
    assert len(findings.frame()) == len(findings.records) and "closed_form" in findings.frame()
    assert "Toy" in repr(findings) and "<table>" in findings._repr_html_()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda fed: fedabml.compare(fed, clients=3), "'clients' chooses data, but the data are given already"),
        (lambda fed: fedabml.compare(fed, seed=3), "compare takes no 'seed': use seeds instead"),
        (lambda fed: fedabml.compare(fed, algorithms=["fedavg"], algorithm="local"), "use algorithms instead"),
        (lambda fed: fedabml.compare(fed, algorithms=[fedabml.FedAvg(lr=0.1), fedabml.FedAvg(lr=1)]), "Give labels"),
        (lambda fed: fedabml.compare(fed, algorithms=[3]), "An algorithm is a name, or an object"),
        (lambda fed: fedabml.compare(fed, algorithms=["fedavgg"]), "no algorithm 'fedavgg'. Did you mean 'fedavg'"),
        (lambda fed: fedabml.compare(fed, round=3), "There is no key or algorithm 'round'"),
        (lambda fed: fedabml.tune(fed, eval_every=2), "tune takes no 'eval_every'"),
        (lambda fed: fedabml.tune(fed, dataset="digits"), "'dataset' chooses data"),
        (lambda fed: fedabml.reproduce("table3"), "There is no experiment 'table3'. Did you mean"),
        (lambda fed: fedabml.reproduce("toy", protocol="none"), "There is no protocol 'none'"),
        (lambda fed: fedabml.reproduce("toy", part=(1, 2)), "needs a folder"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call, says):
    with pytest.raises(InputError, match=says):
        call(federation())


def test_progress_is_shown_where_it_is_asked_for(capsys):
    fed = federation()
    fedabml.train(fed, "mlr", fedabml.FedAvg(personal_epochs=1), **QUICK, progress=True)
    assert "training: round 1/1  loss" in capsys.readouterr().out
    seen = []
    fedabml.compare(fed, "mlr", ["fedavg"], seeds=1, **QUICK, progress=True)
    assert "comparing: 1/1  fedavg, seed 0: accuracy" in capsys.readouterr().out
    fedabml.train(fed, "mlr", fedabml.FedAvg(personal_epochs=1), **QUICK, progress=True, on_round=seen.append)
    assert seen[0]["round"] == 1


def test_what_a_notebook_shows_is_escaped_and_has_no_weights(tmp_path):
    fed = federation()
    trained = fedabml.train(fed, "mlr", fedabml.FedABML(personal_epochs=1), **QUICK)
    comparison = fedabml.compare(fed, "mlr", {"<b>x": "fedavg", "local": "local"}, seeds=1, **QUICK)
    posterior = trained.posterior(NAMES[2], validation=0.3)
    for each in (fed, trained, trained.prior, posterior, comparison):
        html = each._repr_html_()
        assert "<script" not in html and "<b>" not in html and len(html) < 20_000
        assert "tensor(" not in html and "array(" not in html
        assert len(repr(each)) <= 200
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in fed._repr_html_() and "&lt;b&gt;x" in comparison._repr_html_()
    values = [f"{v:.6g}" for v in fed.x.ravel()] + [f"{v:.6g}" for v in posterior.q.mean]
    shown = trained._repr_html_() + fed._repr_html_() + posterior._repr_html_()
    assert not [v for v in values if f">{v}<" in shown]


def test_the_identity_of_a_module_is_its_weights():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    assert module_hash(a) == module_hash(a) != module_hash(b)
    assert module_hash(nn.Sequential(a)) != module_hash(a)


def test_the_identity_of_a_module_of_torch_is_that_of_earlier_versions():
    module = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    nn.init.ones_(module[0].weight), nn.init.zeros_(module[0].bias)
    assert module_hash(module)[:16] == "b6f4bbf8bea0b449"


NET = """
from torch import nn
class Net(nn.Linear):
    power = 1
    def __init__(self, scale=1):
        super().__init__(3, 2)
        nn.init.ones_(self.weight), nn.init.zeros_(self.bias)
        self.scale = scale
    def forward(self, x):
        return [super(Net, self).forward(y) if y in {"a", "b", "c"} else 1 for y in x]
"""


def test_the_identity_of_a_module_is_its_code_too():
    def made(text, scale=1):  # a class without a file, as a notebook has it
        space = {"__name__": "notebook"}
        exec(text, space)
        return module_hash(space["Net"](scale))

    first = made(NET)
    assert made("\n\n" + NET + "x = 1\n") == first, "lines around a class are no part of it"
    others = {made(NET.replace("else 1", "else 2")), made(NET.replace("power = 1", "power = 2")), made(NET, 2)}
    assert len(others | {first}) == 4


def test_importing_fedabml_needs_no_pandas_and_no_rich():
    code = "import sys, fedabml; fedabml.train; fedabml.compare; print({'pandas', 'rich', 'IPython'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
