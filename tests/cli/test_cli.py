"""The command line on good days: every command, from training to predictions, on images, tables and measurements."""

import csv
import json
import shlex

import numpy as np
import pandas as pd
import pytest
import torch
import typer

import fedabml
from fedabml.cli import app, demo
from fedabml.cli.train import scores
from fedabml.files.sealed import read_json, write_json
from fedabml.runs.config import RunConfig, read_toml, without_commands
from fedabml.version import code
from tests.cli.command import SMALL, run

pytestmark = pytest.mark.usefixtures("one_thread_here")


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def client(tmp_path):
    """A new client's file: the digits 3 and 5."""
    data = fedabml.load("digits")
    own, test = (np.isin(y, (3, 5)) for y in (data.y_train, data.y_test))
    parts = {"x_train": data.x_train[own], "y_train": data.y_train[own], "x_test": data.x_test[test]}
    np.savez(tmp_path / "client.npz", **parts, y_test=data.y_test[test])
    np.savez(tmp_path / "inputs.npz", x=data.x_test[test][:7])
    return tmp_path / "client.npz"


@pytest.mark.slow
def test_train_evaluate_personalize_predict(client, tmp_path):
    trained = said = run("train", *SMALL, "--eval-every", 2).stdout
    out = tmp_path / "runs" / "digits-fedabml-0"
    assert "round 1/3" in said and "round 3/3" in said and "accuracy" in said and "report.html" in said
    files = {"config.json", "metrics.jsonl", "summary.json", "clients.csv", "shared.safetensors", "report.html"}
    assert files | {"checkpoints", "train.log", "manifest.json", "partition.svg"} <= {f.name for f in out.iterdir()}
    summary = json.loads((out / "summary.json").read_text())
    words = "algorithm dataset model seed rounds clients accuracy nll ece brier accuracy_pooled accuracy_last10"
    words += " accuracy_worst_decile prior_accuracy bytes_up bytes_down seconds"
    assert set(words.split()) <= summary.keys()
    assert (summary["algorithm"], summary["dataset"], summary["model"]) == ("fedabml", "digits", "mlr")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    log = (out / "train.log").read_text().splitlines()
    assert len(log) == 4 and "round 2/3" in log[2] and "accuracy" in log[2]

    said = run("train", *SMALL, "--eval-every", 2, "--eval-clients", 4, "--no-eval-all", "--out", "few").stdout
    assert "(4 clients scored on test data)" in said
    assert "(4 clients)" in (tmp_path / "few" / "train.log").read_text().splitlines()[2]
    assert json.loads((tmp_path / "few" / "summary.json").read_text())["clients_scored"] == 4
    run("train", "--resume", "--out", "few", "--rounds", 4, "--eval-clients", 3)  # how a run is scored may change

    run("evaluate", out)
    again = json.loads((out / "evaluation.json").read_text())
    assert again["accuracy"] == summary["accuracy"] and again["nll"] == summary["nll"]
    assert len(rows(out / "evaluation.csv")) == 10
    run("evaluate", out, "--epochs", 0, "--out", tmp_path / "elsewhere")
    assert json.loads((tmp_path / "elsewhere" / "evaluation.json").read_text())["nll"] != summary["nll"]

    digest = fedabml.load_prior(out / "shared.safetensors").digest[:16]
    for prior, more in ((out, ()), (out / "shared.safetensors", ("--force",))):
        words = ("--data", client, "--out", "p.safetensors", "--epochs", 8, "--lr", 0.05, *more)
        said = run("personalize", prior, *words).stdout
        assert "accuracy" in said and "NLL" in said and "samples" in said and digest in said
    said = run("predict", "p.safetensors", "--data", "inputs.npz", "--out", "p.csv", "--samples", 4).stdout
    assert digest in said and digest in trained and digest in (out / "report.html").read_text()
    table = rows(tmp_path / "p.csv")
    measures = ["entropy", "mutual_information", "surprise"]
    assert list(table[0]) == ["row", "label", *(f"p_{i}" for i in range(10)), *measures]
    assert len(table) == 7
    for row in table:
        probs = np.array([float(row[f"p_{i}"]) for i in range(10)])
        assert row["label"] == str(probs.argmax()) and abs(probs.sum() - 1) < 1e-4
    run("predict", "p.safetensors", "--data", "inputs.npz", "--out", "q.csv", "--samples", 4)
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "q.csv").read_bytes()
    assert "predicts x_test" in run("predict", "p.safetensors", "--data", client).stderr


@pytest.mark.slow
def test_a_run_of_before_on_whole_float_targets_is_still_a_regression(tmp_path):
    (tmp_path / "own").mkdir()
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("f"), np.arange(8.0) % 4
    for name in "ab":
        np.savez(tmp_path / "own" / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = ("--data", "own", "--model", "mlr", "--participation", 1, "--quiet", "--out", "run")
    assert "--task" in run("train", *words, "--rounds", 1, code=2).stderr
    run("train", *words, "--rounds", 1, "--task", "regression")
    config = read_json(tmp_path / "run/config.json")
    del config["run"]["task"]
    write_json(tmp_path / "run/config.json", config)
    run("train", "--resume", "--out", "run", "--rounds", 2, "--quiet")
    run("evaluate", "run")


@pytest.mark.slow
def test_a_run_goes_on_with_the_defaults_that_it_was_begun_with(tmp_path):
    then = ("--set", "fedabml.server_momentum=0", "--set", "fedabml.average=0.5", "--quiet")
    run("train", *SMALL, "--out", "whole", "--rounds", 4, *then)
    run("train", *SMALL, "--out", "old", "--rounds", 2, *then)
    config = read_json(tmp_path / "old/config.json")
    del config["run"]["fedabml"]  # these were the defaults of an earlier version, which had no momentum
    del config["algorithm"]["hyper"]["server_momentum"]
    write_json(tmp_path / "old/config.json", config)
    run("train", "--resume", "--out", "old", "--rounds", 4, "--quiet")
    whole, old = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "old"))
    assert whole["nll"] == old["nll"]


@pytest.mark.slow
def test_resume_needs_the_folder_alone_and_may_go_further(tmp_path):
    run("train", *SMALL, "--out", "whole", "--rounds", 5, "--quiet")
    assert run("train", *SMALL, "--out", "parts", "--quiet").output == ""
    run("train", "--resume", "--out", "parts", "--rounds", 5)
    assert (tmp_path / "whole/shared.safetensors").read_bytes() == (tmp_path / "parts/shared.safetensors").read_bytes()
    assert "resumed after round 3 of 5" in (tmp_path / "parts/train.log").read_text()
    run("train", *SMALL, "--resume", "--out", "parts", "--rounds", 5)  # a finished run: the same words change nothing
    assert "already has 5 rounds" in run("train", "--resume", "--out", "parts", "--rounds", 4, code=2).stderr


@pytest.mark.slow
def test_resume_may_change_how_clients_are_personalised(tmp_path):
    run("train", *SMALL, "--out", "run", "--no-evaluate", "--quiet")
    evaluated = ["--set", "evaluate=true", "--set", "fedabml.personal_epochs=1"]
    run("train", "--resume", "--out", "run", *evaluated, "--quiet")
    assert json.loads((tmp_path / "run/summary.json").read_text())["accuracy"] > 0
    assert fedabml.load_prior(tmp_path / "run/shared.safetensors").algorithm.personal_epochs == 1


@pytest.mark.slow
def test_kept_states_are_evaluated_from_the_checkpoint(tmp_path):
    run("train", *SMALL, "--algorithm", "local", "--participation", 0.3, "--seed", 2, "--out", "run", "--quiet")
    run("evaluate", "run")
    scores = [json.loads((tmp_path / "run" / name).read_text())["nll"] for name in ("summary.json", "evaluation.json")]
    assert scores[0] == scores[1]
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.unlink()
    assert "that of round 3 is missing or damaged" in run("evaluate", "run", code=2).stderr


@pytest.mark.slow
def test_validation_data_are_scored_until_test_data_are_asked_for(tmp_path):
    run("train", *SMALL, "--validation", 0.25, "--out", "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["split"] == "val"
    assert "n_val" in rows(tmp_path / "run/clients.csv")[0]
    run("evaluate", "run", "--split", "test")
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["split"] == "test"


@pytest.mark.slow
def test_configuration_flags_and_set_in_that_order(tmp_path):
    (tmp_path / "run.toml").write_text(
        'clients = 10\nmodel = "mlp"\nrounds = 9\nseed = 4\n[model_options]\nhidden = [6]\n[fedabml]\nlam = 0.5\n'
        "[fedavg-ft]\nlr = 0.07\n"
    )
    words = ["--config", "run.toml", "--rounds", 8, "--set", "rounds=1", "--set", "fedabml.lam=0.25", "--lr", 0.01]
    run("train", *words, "--out", "run", "--quiet")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["rounds"], config["seed"], config["parameters"]) == (1, 4, 64 * 6 + 6 + 60 + 10)
    assert (config["algorithm"]["hyper"]["lam"], config["algorithm"]["hyper"]["lr"]) == (0.25, 0.01)
    assert config["command"].startswith("fedabml train") and "--set fedabml.lam=0.25" in config["command"]
    words = ["--config", "run.toml", "--lr", 0.01, "--algorithm", "fedavg-ft", "--set", "fedavg-ft.momentum=0.5"]
    said = run("train", *words, "--dry-run").stdout
    assert "momentum=0.5" in said and "lr=0.01" in said


def test_a_dry_run_tells_all_and_writes_nothing(tmp_path):
    said = run("train", *SMALL, "--dry-run").stdout
    for words in ("5 of 10", "650 parameters", "lam=0.01", "KiB up", "backend vmap", "runs/digits-fedabml-0", "8 per"):
        assert words in said
    assert "No run was started" in said and not list(tmp_path.iterdir())
    assert "0 B up, 0 B down" in run("train", *SMALL, "--algorithm", "local", "--dry-run").stdout


@pytest.mark.parametrize(("clients", "share"), [(10, 0.25), (10, 0.01), (3, 1), (50, 0.05)])
def test_a_dry_run_tells_the_engines_number_of_clients(clients, share):
    from fedabml.engine.server import draw_clients

    words = ["--clients", clients, "--participation", share, "--model", "mlr", "--partition", "iid"]
    sampled = len(draw_clients(clients, share, 0, 1))
    assert f"{sampled} of {clients} clients" in run("train", *words, "--dry-run").stdout


@pytest.mark.slow
def test_a_dry_run_of_a_resumed_run_has_its_backend_and_chunk(tmp_path):
    run("train", *SMALL, "--backend", "loop", "--chunk", 3, "--out", "run", "--quiet")
    for words in (["--backend", "loop", "--chunk", 3], []):
        said = run("train", "--resume", "--out", "run", *words, "--dry-run").stdout
        assert "backend loop, 3 client(s) at once" in said
    run("train", *SMALL, "--out", "other", "--quiet")
    config = read_json(tmp_path / "other/config.json")
    config["backend"], config["chunk"] = "loop", 4  # as found on another machine, where the flags were auto
    write_json(tmp_path / "other/config.json", config)
    assert "backend loop, 4 client(s)" in run("train", "--resume", "--out", "other", "--dry-run").stdout


@pytest.mark.slow
def test_one_configuration_serves_all_commands(client, tmp_path):
    (tmp_path / "run.toml").write_text(
        'dataset = "digits"\nclients = 10\nmodel = "mlr"\nrounds = 2\nepochs = 1\ndevice = "cpu"\n'
        '[fedabml]\nlam = 0.5\n[train]\nout = "run"\nquiet = true\n[evaluate]\nepochs = 0\nout = "scores"\n'
        f'[personalize]\ndata = "{client}"\nepochs = 7\nout = "p.safetensors"\n[predict]\nsamples = 3\nout = "p.csv"\n'
        '[inspect]\nshow = 2\nout = "look"\n[get]\nname = ["digits"]\n'
    )
    config = ["--config", "run.toml"]
    assert run("train", *config).output == ""
    assert json.loads((tmp_path / "run/config.json").read_text())["rounds"] == 2
    run("evaluate", "run", *config)
    assert json.loads((tmp_path / "scores/evaluation.json").read_text())["personal_epochs"] == 0
    run("personalize", "run", *config)
    run("personalize", "run", "--data", client, "--epochs", 7, "--out", "q.safetensors")
    run("personalize", "run", *config, "--epochs", 1, "--out", "r.safetensors")
    p, q, r = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "pqr")
    assert p == q != r  # the file's own table is heard, a flag overrules it, and a round's epochs are another thing
    run("predict", "p.safetensors", "--data", "inputs.npz", *config)
    run("predict", "p.safetensors", "--data", "inputs.npz", "--samples", 3, "--out", "q.csv")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "q.csv").read_bytes()
    said = run("data", "inspect", *config).stdout
    assert "10, with" in said and "client-1" in said and "client-2" not in said and (tmp_path / "look").is_dir()
    assert "5, with" in run("data", "inspect", "digits", *config, "--clients", 5, "--force").stdout
    assert "digits.npz" in run("data", "get", *config).stdout
    assert RunConfig.of(without_commands(read_toml("run.toml"))).rounds == 2


def test_the_dataset_of_a_configuration(tmp_path):
    (tmp_path / "run.toml").write_text('dataset = "digits"\nclients = 7\n')
    assert "digits.npz" in run("data", "get", "--config", "run.toml").stdout
    assert "7, with" in run("data", "inspect", "--config", "run.toml").stdout


@pytest.mark.slow
def test_a_live_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    said = run("train", *SMALL, "--out", "run").stdout
    assert "round" in said and "3/3" in said and "elapsed" in said and "remaining" in said


def test_a_batch_larger_than_a_clients_data_is_a_note():
    assert "larger than the data of every client" in run("train", *SMALL, "--batch-size", 999, "--out", "run").stderr


def test_pretrained_weights(tmp_path):
    from safetensors.torch import save_file

    module = fedabml.models.build("mlr", (1, 8, 8), 10, 77)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    run("train", *SMALL, "--pretrained", "w.safetensors", "--rounds", 0, "--out", "run", "--quiet")
    mean = fedabml.load_prior(tmp_path / "run/shared.safetensors").shared["mean"]
    assert torch.equal(mean, torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


@pytest.fixture
def patients(tmp_path):
    """A table with categories, gaps, names of classes, a measurement and a column of clients."""
    rng = np.random.default_rng(0)
    n = 120
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(["north", "south", "west"], n),
            "age": rng.normal(60, 10, n),
            "ward": rng.choice(["a", "b", None], n),
            "dose": rng.normal(0, 1, n),
        }
    )
    frame.loc[rng.choice(n, 15, replace=False), "age"] = np.nan
    score = frame["dose"] + (frame["ward"] == "a")
    frame["outcome"] = np.where(score + 0.1 * rng.normal(size=n) > 0, "well", "ill")
    frame["level"] = 5 + 2 * score + 0.1 * rng.normal(size=n)
    return frame


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.slow
def test_tables_end_to_end(patients, kind, tmp_path):
    write = {"csv": lambda f, p: f.to_csv(p, index=False), "parquet": lambda f, p: f.to_parquet(p)}[kind]
    write(patients.drop(columns="level"), tmp_path / f"all.{kind}")
    words = ["--client-column", "hospital", "--target-column", "outcome"]
    small = shlex.split("--model mlr --rounds 3 --participation 1 --batch-size 10 --lr 0.1")
    run("train", "--data", f"all.{kind}", *words, *small, "--out", "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["clients"], summary["dataset"]) == (3, "all") and summary["accuracy"] > 0.7
    write(patients.drop(columns=["hospital", "level"])[:40], tmp_path / f"new.{kind}")
    run("personalize", "run", "--data", f"new.{kind}", "--out", "p.safetensors")
    write(patients.drop(columns=["hospital", "level", "outcome"])[40:50], tmp_path / f"ask.{kind}")
    assert "not read" not in run("predict", "p.safetensors", "--data", f"ask.{kind}", "--out", "p.csv").stderr
    write(patients.drop(columns=["hospital", "outcome"])[40:50], tmp_path / f"more.{kind}")
    said = run("predict", "p.safetensors", "--data", f"more.{kind}", "--out", "m.csv")
    assert "was not trained on, so they are not read: 'level'" in said.stderr
    assert "alarms        " in said.stdout and " of 10 rows" in said.stdout
    table = rows(tmp_path / "p.csv")
    assert len(table) == 10 and {"label", "p_ill", "p_well", "entropy"} <= table[0].keys()
    assert {row["label"] for row in table} <= {"ill", "well"}
    assert "3, with" in run("data", "inspect", f"all.{kind}", *words).stdout
    own = patients[:40].drop(columns="hospital")
    posterior = fedabml.load_prior("run/shared.safetensors").personalize(own)  # the same from Python
    assert posterior.predict(f"ask.{kind}").decode() == [row["label"] for row in table]


@pytest.mark.slow
def test_regression_end_to_end(patients, tmp_path):
    patients.drop(columns="outcome").to_csv(tmp_path / "all.csv", index=False)
    words = "--client-column hospital --target-column level --model mlr --rounds 5 --participation 1 --batch-size 10"
    run("train", "--data", "all.csv", *words.split(), "--lr", 0.05, "--out", "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["task"] == "regression" and summary["rmse"] < 2 and 0 <= summary["coverage"] <= 1
    run("train", "--data", "all.csv", *words.split(), "--no-learn-noise", "--noise", 0.3, "--out", "fixed", "--quiet")
    input_spec = fedabml.load_prior(tmp_path / "fixed/shared.safetensors").input_spec
    assert input_spec.likelihood == fedabml.GaussianNoise(1, 0.3, False)
    one = patients[patients.hospital == patients.hospital.iloc[0]].drop(columns="outcome")
    one.to_csv(tmp_path / "one.csv", index=False)
    run("personalize", "run", "--data", "one.csv", "--out", "p.safetensors")
    run("predict", "p.safetensors", "--data", "all.csv", "--out", "p.csv")
    table = rows(tmp_path / "p.csv")
    assert list(table[0]) == ["row", "mean", "std", "model_std", "alarm", "score", "flags"]
    assert len(table) == len(patients)


def test_a_folder_of_clients(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "folder").mkdir()
    for name in "abc":
        x, y = rng.normal(size=(12, 4)).astype("f"), np.arange(12) % 3
        np.savez(tmp_path / "folder" / f"{name}.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    run("train", "--data", "folder", "--model", "mlr", "--rounds", 2, "--participation", 1, "--out", "run")
    assert [row["name"] for row in rows(tmp_path / "run/clients.csv")] == ["a", "b", "c"]
    said = run("personalize", "run", "--data", "folder/a.npz", "--batch-size", 4, "--seed", 3).stdout
    assert "accuracy" in said and (tmp_path / "posterior.safetensors").exists()
    assert "12" in run("data", "inspect", "folder").stdout


def test_clients_without_test_data_are_noticed_before_training(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in "ab":
        np.savez(tmp_path / "folder" / f"{name}.npz", x=np.eye(6, dtype="f"), y=np.arange(6) % 2)
    words = ["train", "--data", "folder", "--model", "mlr", "--rounds", 1, "--participation", 1, "--out", "run"]
    assert "--validation" in run(*words, code=2).stderr and not (tmp_path / "run").exists()
    run(*words, "--no-evaluate")
    run(*words[:-1], "held", "--validation", 0.3)


def test_data_list_get_and_inspect(tmp_path):
    said = run("data", "list", "--data-dir", "here").stdout
    assert "comes with fedabml" in said and "fedabml data get cifar10" in said
    assert "digits.npz" in run("data", "get", "digits").stdout
    said = run("data", "inspect", "digits", "--clients", 5, "--partition", "dirichlet", "--out", "look").stdout
    assert "client-4" in said and "10 classes" in said
    assert json.loads((tmp_path / "look/manifest.json").read_text())["partition"]["kind"] == "dirichlet-classes"
    assert (tmp_path / "look/partition.svg").read_text().startswith("<svg")


def test_algorithms_are_listed_and_shown():
    said = run("algorithms").stdout
    assert all(name in said for name in ("fedabml", "fedavg-ft", "local")) and "personal_epochs=0" in said
    said = run("algorithms", "fedabml").stdout
    refused = run("algorithms", "mine.py:FedDyn", code=2).stderr
    assert "is your own" in refused and "train --algorithm mine.py:FedDyn" in refused
    assert "q(w|φ_i)" in said and "λ: weight of the KL" in said and "natural | euclidean | amortised" in said


@pytest.mark.slow
def test_report_of_one_run_and_of_several(tmp_path):
    for seed in (0, 1):
        run("train", *SMALL, "--seed", seed, "--out", f"run{seed}", "--quiet")
    (tmp_path / "run0/report.html").unlink()
    run("report", "run0")
    run("report", "run0", "run1", "--out", "both.html", "--title", "Two seeds")
    assert (tmp_path / "run0/report.html").exists() and "Two seeds" in (tmp_path / "both.html").read_text()
    (tmp_path / "other").mkdir()
    for words, parts in (
        ("other", ("'other' is not", "config.json", "comparison.json", "reproduce.json")),
        (".", ("folder in it: run0, run1.",)),
        ("none", ("no folder 'none'",)),
    ):
        said = run("report", words, code=2).stderr
        assert said.startswith("Error: ") and said.count("\n") == 1 and all(part in said for part in parts)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_demo_compares_three_shows_unseen_digits_and_replaces_only_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        demo, "COMMON", demo.COMMON | {"rounds": 2, "eval_every": 0, "model": "mlr", "model_options": {}}
    )
    said = run("demo").stdout
    assert all(words in said for words in ("fedavg-ft", "local", "Brier", "entropy, digits never seen"))
    out = tmp_path / "runs/demo"
    page = (out / "report.html").read_text()
    for name in ("fedabml", "fedavg-ft"):
        assert f"Entropy, own classes and classes never seen: {name}" in page
    assert "Predictions of client-0 for single samples" in page and page.count(">is ") == 10 and "AUROC" in page
    assert not (out / "local/unseen.json").exists()
    (out / "mine.txt").write_text("keep")
    run("demo", "--quiet")
    assert (out / "report.html").exists() and (out / "mine.txt").read_text() == "keep"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("keep")
    assert "did not make" in run("demo", "--out", "other", code=2).stderr
    assert [f.name for f in (tmp_path / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_version_and_help_of_every_command():
    assert run("--version").stdout.strip() == f"fedabml {fedabml.__version__}, code {code()}"
    commands = shlex.split("demo train evaluate personalize predict report algorithms data")
    for words in [[], *([c] for c in commands), ["data", "list"], ["data", "get"], ["data", "inspect"]]:
        assert "Usage" in run(*words, "--help").stdout


def test_every_flag_is_described():
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        assert all(param.help for param in command.params if param.name != "help"), command.name
    assert len(commands) == 29


def test_switches_show_no_type_and_defaults_have_one_notation():
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        params = command.get_params(command.context_class(command, info_name=command.name))
        switches = [param for param in params if getattr(param, "is_flag", False)]
        assert "help" in {param.name for param in switches} and {param.metavar for param in switches} == {" "}
        assert not [param.name for param in params if "(default:" in (param.help or "")]
        repeated = [param for param in params if "[default: " in (param.help or "") and param.show_default]
        assert not repeated, command.name


@pytest.mark.slow
def test_a_table_at_a_site_is_one_clients_and_is_never_overwritten(tmp_path, monkeypatch):
    table = pd.DataFrame({"site": ["a", "b"] * 20, "x": np.arange(40) % 7, "y": ["no", "yes", "no", "no"] * 10})
    table.to_csv("t.csv", index=False)
    words = ["--data", "t.csv", "--client-column", "site", "--target-column", "y", "--model", "mlr", "--rounds", 1]
    run("train", *words, "--participation", 1, "--out", "run")
    result = run("personalize", "run", "--data", "t.csv", code=2)
    assert "2 clients in its column 'site'" in result.output
    table[table.site == "a"].to_csv("a.csv", index=False)
    before = (tmp_path / "a.csv").read_bytes()
    assert "would be overwritten" in run("personalize", "run", "--data", "a.csv", "--out", "a.csv", code=2).output
    run("personalize", "run", "--data", "a.csv", "--out", "p.safetensors")
    assert "would be overwritten" in run("predict", "p.safetensors", "--data", "a.csv", "--out", "a.csv", code=2).output
    assert (tmp_path / "a.csv").read_bytes() == before
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # a run knows where its data lie
    run("evaluate", tmp_path / "run")
    run("train", "--resume", "--out", tmp_path / "run", "--rounds", 2)


def test_the_table_shows_the_prior_with_and_without_the_label_level():
    summary = {"accuracy": 0.9, "nll": 0.3, "prior_accuracy": 0.4, "prior_nll": 1.2, "clients_scored": 12}
    assert scores(summary)[0] == ["", "personalised", "prior"]
    head, found = scores(summary | {"prior_level_accuracy": 0.7, "prior_level_nll": 0.6})
    assert head == ["", "personalised", "prior + label level", "prior"]
    assert ["accuracy, mean over clients", "0.9000", "0.7000", "0.4000"] in found


def test_the_table_shows_pooled_ranks_and_leaves_out_clients_with_few_rows_of_a_class():
    summary = {
        "auroc": 0.8,
        "auroc_pooled": 0.83,
        "auroc_all": 0.9,
        "clients_scored": 12,
        "nll": 0.3,
        "base_nll": 0.6,
    }
    summary |= {"base_auroc": 0.5, "base_auroc_all": 0.5, "base_auroc_pooled": 0.57, "clients_few_of_class": 3}
    head, found = scores(summary)
    assert head == ["", "personalised", "prior", "base rate"]
    assert ["AUROC, all samples pooled", "0.8300", "", "0.5700"] in found
    assert ["AUROC, mean over clients of 5+ rows per class", "0.8000", "", "0.5000"] in found
    assert ["clients with fewer than 5 rows of a class", "3 of 12", "", ""] in found
    assert not any("0.9000" in row for row in found)


def test_the_table_does_not_let_clients_of_few_rows_decide():
    summary = {"accuracy": 0.9, "accuracy_pooled": 0.8, "accuracy_worst_decile": 0.0, "clients_scored": 12}
    assert ["accuracy, worst tenth of clients", "0.0000", ""] in scores(summary | {"clients_small": 0})[1]
    large = summary | {"accuracy_worst_decile_all": 0.0}
    found = scores(large | {"clients_small": 3, "accuracy_worst_decile": 0.55})[1]
    assert found[0] == ["accuracy, all samples pooled", "0.8000", ""]
    assert ["accuracy, worst tenth of clients of 10 rows or more", "0.5500", ""] in found
    assert ["clients with fewer than 10 rows", "3 of 12", ""] in found
    none = scores(large | {"clients_small": 12, "accuracy_worst_decile": None})[1]
    assert ["accuracy, worst tenth of clients of 10 rows or more", "–", ""] in none
