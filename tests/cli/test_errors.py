"""Bad input at the command line: one paragraph on stderr, exit code 2, no traceback, nothing lost or half-written."""

import json
import shutil
import urllib.error

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedabml.cli import app
from tests.cli.command import SMALL, run

# What Python writes for {"round": 3}: no file of such bytes may be read.
PICKLED = b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x05round\x94K\x03s."

pytestmark = pytest.mark.usefixtures("one_thread_here")


def refused(*words):
    """The paragraph of an error."""
    said = run(*words, code=2).stderr
    assert said.startswith("Error: ") and said.count("\n") == 1 and "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied before it is spoiled."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run("train", *SMALL, "--out", out, "--quiet")
    return out


@pytest.fixture
def spoiled(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def folder(tmp_path, **clients):
    (tmp_path / "folder").mkdir()
    for name, arrays in clients.items():
        np.savez(tmp_path / "folder" / f"{name}.npz", **arrays)
    return ["train", "--data", tmp_path / "folder", "--model", "mlr", "--validation", 0.5, "--out", tmp_path / "run"]


def good(n=8):
    return {"x": np.random.default_rng(0).normal(size=(n, 3)).astype("f"), "y": np.arange(n) % 2}


# -- names ------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "digit"], "Did you mean 'digits'"),
        (["--algorithm", "fedabl"], "Did you mean 'fedabml'"),
        (["--model", "resnet"], "Did you mean 'resnet18'"),
        (["--set", "fedabml.lamb=1"], "Did you mean 'lam'"),
        (["--set", "roundz=1"], "Did you mean 'rounds'"),
        (["--set", "fedabml.lam=much"], "must be a number"),
        (["--set", "rounds"], "NAME=VALUE"),
        (["--set", "fedabml.prior_step=naturel"], "Did you mean 'natural'"),
        (["--backend", "vmp"], "Did you mean 'vmap'"),
        (["--device", "gpu"], "no device 'gpu'"),
        (["--participation", "2"], "at most 1"),
        (["--rounds", "-1"], "0 or more"),
        (["--chunk", "0"], "1 or more"),
        (["--config", "none.toml"], "There is no file"),
        (["--algorithm", "fedavg-ft", "--set", "fedavg.lr=0.5", "--set", "fedavg.nonsense=3"], "run's is fedavg-ft"),
        (["--set", "personalize.epochs=3"], "no key or algorithm 'personalize'"),
    ],
)
@pytest.mark.slow
def test_wrong_words(words, said, tmp_path):
    assert said in refused("train", *SMALL, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[personalize]\nepoch = 3", "Did you mean 'epochs'"),
        ("sampels = 3", "neither 'personalize' nor a run has a key 'sampels'"),
        ("[personalize.epochs]\na = 1", "is a table"),
        ("epochs = ", "line 1"),
    ],
)
def test_configurations_of_other_commands(spoiled, tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    assert said in refused("personalize", spoiled, "--data", "c.npz", "--config", "c.toml")
    (tmp_path / "c.toml").write_text("[personalize]\nepochs = 2.5")
    assert "--epochs" in run("personalize", spoiled, "--data", "c.npz", "--config", "c.toml", code=2).stderr


def test_nothing_to_inspect_or_get():
    assert "what to inspect" in refused("data", "inspect")
    assert "Name a dataset" in refused("data", "get")


def test_a_table_of_another_algorithm_in_a_file_is_checked(tmp_path):
    (tmp_path / "c.toml").write_text("[fedavg]\nlrr = 1\n")
    assert "'fedavg' has no hyperparameter 'lrr'. Did you mean 'lr'" in refused("train", "--config", "c.toml")


def test_commands_and_options_that_are_not_there():
    assert "Did you mean 'train'" in run("trian", code=2).stderr
    assert "--rounds" in run("train", "--round", 3, code=2).stderr
    assert "Did you mean 'fedavg'" in refused("algorithms", "fedag")
    assert "Did you mean 'mnist'" in refused("data", "get", "mnst")


def test_the_debug_flag_shows_the_error_itself(monkeypatch):
    result = CliRunner().invoke(app, ["--debug", "train", "--dataset", "digit"])
    assert type(result.exception).__name__ == "InputError"
    monkeypatch.setenv("FEDABML_DEBUG", "1")
    assert type(CliRunner().invoke(app, ["train", "--dataset", "digit"]).exception).__name__ == "InputError"


# -- data -------------------------------------------------------
def test_a_dataset_that_is_not_here_and_no_network(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("FEDABML_DATA", str(tmp_path / "empty"))
    for words in (["train", "--dataset", "mnist"], ["data", "get", "mnist"], ["data", "inspect", "mnist"]):
        said = refused(*words)
        assert "fedabml data get mnist" in said and "FEDABML_DATA" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_foreign_truncated_and_pickled_client_files(tmp_path):
    words = folder(tmp_path, a=good())
    file = tmp_path / "folder" / "b.npz"
    np.savez(file, **good())
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello", PICKLED):
        file.write_bytes(content)
        assert "b.npz" in refused(*words)
    np.savez(file, x=np.array([{"a": 1}], object), y=np.array([0]))
    assert "never loads" in refused(*words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"x": np.full((8, 3), np.nan, "f")}, "NaN"),
        ({"x": np.full((8, 3), np.inf, "f")}, "infinity"),
        ({"y": np.arange(8) - 1}, "outside 0"),
        ({"y": np.linspace(0, 1, 8), "task": "classification"}, "whole numbers"),
        ({"x": np.zeros((0, 3), "f"), "y": np.zeros(0, int)}, "0 training samples"),
        ({"x": np.zeros((1, 3), "f"), "y": np.zeros(1, int)}, "1 training sample;"),
        ({"x": np.zeros((8, 5), "f")}, "shape"),
        ({"y": np.zeros(5, int)}, "Each sample needs its y"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path, spoil, said):
    task = ["--task", spoil.pop("task")] if "task" in spoil else []
    words = folder(tmp_path, a=good(), bad=good() | spoil)
    found = refused(*words, *task)
    assert said in found and "bad" in found
    assert not (tmp_path / "run").exists()


def test_small_clients_can_be_dropped(tmp_path):
    words = folder(tmp_path, a=good(), b=good(), tiny=good(1))
    assert "--drop-small" in refused(*words)
    run(*words, "--drop-small", "--rounds", 1)
    assert json.loads((tmp_path / "run/summary.json").read_text())["clients"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--classes-per-client", 11], "10"),
        (["--clients", 1000], "clients"),
        (["--clients", 0], "clients"),
        (["--partition", "dirichlet", "--dirichlet-alpha", 0], "alpha"),
        (["--validation", 1.5], "validation"),
    ],
)
def test_impossible_partitions(words, said, tmp_path):
    assert said in refused("train", *words)
    assert not list(tmp_path.iterdir())


def test_tables_without_their_columns(tmp_path):
    (tmp_path / "t.csv").write_text("who,x,y\na,1,0\na,2,1\na,3,0\n")
    assert "--client-column" in refused("train", "--data", "t.csv")
    assert "Did you mean 'who'" in refused("train", "--data", "t.csv", "--client-column", "wo", "--target-column", "y")
    assert "not a folder" in refused("train", "--data", "nowhere")


# -- runs, checkpoints, priors ----------------------------------
def test_a_folder_that_is_taken(spoiled, tmp_path):
    assert "--resume --out" in refused("train", *SMALL, "--out", spoiled)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("1")
    assert "its own folder" in refused("train", *SMALL, "--out", "thesis")
    (tmp_path / "file").write_text("1")
    assert "file" in refused("train", *SMALL, "--out", "file/run")
    assert (tmp_path / "file").read_text() == "1"


def test_resuming_with_another_configuration_names_the_keys(spoiled):
    before = (spoiled / "config.json").read_bytes()
    said = refused("train", "--resume", "--out", spoiled, "--clients", 12, "--lr", 0.5, "--set", "fedabml.k=2")
    assert "clients (was 10, now 12)" in said and "fedabml.lr (was unset, now 0.5)" in said and "fedabml.k" in said
    assert (spoiled / "config.json").read_bytes() == before
    assert "no config.json" in refused("train", "--resume", "--out", "nowhere")


def test_one_damaged_checkpoint_falls_back_to_the_round_before(spoiled, finished):
    last = spoiled / "checkpoints" / "round-000003.safetensors"
    last.write_bytes(last.read_bytes()[:200])
    (spoiled / "shared.safetensors").unlink()
    run("train", "--resume", "--out", spoiled)
    assert (spoiled / "shared.safetensors").read_bytes() == (finished / "shared.safetensors").read_bytes()
    assert len((spoiled / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, PICKLED])
def test_no_sound_checkpoint_is_an_error(spoiled, content):
    for file in (spoiled / "checkpoints").iterdir():
        file.write_bytes(content)
    assert "checkpoint" in refused("train", "--resume", "--out", spoiled)


def test_a_damaged_configuration_of_a_run(spoiled):
    text = (spoiled / "config.json").read_text()
    for content in (text[:100], "[]", "{}", '{"run": {"runds": 3}}'):
        (spoiled / "config.json").write_text(content)
        for words in (["train", "--resume", "--out", spoiled], ["evaluate", spoiled], ["data", "inspect", spoiled]):
            assert refused(*words)


def test_priors_and_posteriors_that_are_none(spoiled, tmp_path):
    torch.save({"mean": torch.zeros(3)}, tmp_path / "model.pt")
    (tmp_path / "cut.safetensors").write_bytes((spoiled / "shared.safetensors").read_bytes()[:500])
    np.savez(tmp_path / "c.npz", **good())
    assert "runs code" in refused("personalize", "model.pt", "--data", "c.npz")
    assert "truncated" in refused("personalize", "cut.safetensors", "--data", "c.npz")
    assert "no file" in refused("personalize", "nowhere.safetensors", "--data", "c.npz")
    assert "trained on uint8" in refused("personalize", spoiled, "--data", "c.npz")
    assert "not a posterior" in refused("predict", spoiled / "shared.safetensors", "--data", "c.npz")
    assert "Pickled weights" in refused("train", *SMALL, "--pretrained", "model.pt", "--out", "other")
    assert "was not trained on one" in refused("personalize", spoiled, "--data", "t.csv")
    assert not (tmp_path / "posterior.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", -1], "batch_size"),
        (["--batch-size", 0], "batch_size"),
        (["--epochs", -1], "at least 0"),
        (["--lr", -1], "at least 0"),
        (["--seed", -1], "seed"),
    ],
)
def test_personalising_with_impossible_numbers(spoiled, tmp_path, words, said):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "c.npz", x=rng.integers(0, 255, (9, 8, 8), np.uint8), y=np.arange(9))
    assert said in refused("personalize", spoiled, "--data", "c.npz", *words)
    assert not (tmp_path / "posterior.safetensors").exists()


@pytest.mark.parametrize(
    ("y_test", "said"),
    [
        (np.arange(3), "x_test has 5 rows, y_test has 3"),
        (np.arange(7), "x_test has 5 rows, y_test has 7"),
        (np.arange(5) + 0.5, "label 0.5"),
        (np.arange(5) + 9, "label 10"),
        (np.full(5, np.nan), "label nan"),
    ],
)
def test_bad_test_data_leave_no_posterior(spoiled, tmp_path, y_test, said):
    x = np.random.default_rng(0).integers(0, 255, (9, 8, 8), np.uint8)
    np.savez(tmp_path / "c.npz", x_train=x, y_train=np.arange(9), x_test=x[:5], y_test=y_test)
    assert said in refused("personalize", spoiled, "--data", "c.npz")
    assert not (tmp_path / "posterior.safetensors").exists()


def test_arrays_for_a_prior_that_reads_tables(tmp_path):
    (tmp_path / "t.csv").write_text("who,x,y\n" + "".join(f"{'ab'[i % 2]},{i},{i // 2 % 2}\n" for i in range(40)))
    words = ["--client-column", "who", "--target-column", "y", "--model", "mlr", "--rounds", 1, "--out", "run"]
    assert "--data CLIENT.csv" in run("train", "--data", "t.csv", *words).stdout
    np.savez(tmp_path / "c.npz", x=np.zeros((8, 1), "f"), y=np.arange(8) % 2)
    assert "Give the table itself" in refused("personalize", "run", "--data", "c.npz")
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i // 2 % 2}\n" for i in range(20)))
    run("personalize", "run", "--data", "a.csv")
    assert "Give the table itself" in refused("predict", "posterior.safetensors", "--data", "c.npz")


def test_a_dry_run_refuses_missing_test_data(tmp_path):
    words = [str(word) for word in folder(tmp_path, a=good(), b=good()) if word not in ("--validation", 0.5)]
    assert refused(*words, "--dry-run") == refused(*words)
    run(*words, "--no-evaluate", "--dry-run")


def test_a_run_that_is_not_finished_and_data_that_changed(spoiled, tmp_path):
    words = folder(tmp_path, a=good(), b=good())
    run(*words[:-1], tmp_path / "own", "--rounds", 1, "--quiet")
    np.savez(tmp_path / "folder" / "b.npz", **good(9))
    assert "have changed" in refused("evaluate", "own")
    (spoiled / "shared.safetensors").unlink()
    assert "--resume" in refused("evaluate", spoiled)
    (spoiled / "summary.json").unlink()
    assert "summary.json" in refused("report", spoiled)


def test_predictions_into_a_place_that_is_none(spoiled, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "c.npz", x=rng.integers(0, 255, (9, 8, 8), np.uint8), y=np.arange(9))
    run("personalize", spoiled, "--data", "c.npz", "--out", "p.safetensors")
    (tmp_path / "file").write_text("1")
    assert "file/p.csv" in refused("predict", "p.safetensors", "--data", "c.npz", "--out", "file/p.csv")
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 8, 8), np.uint8))
    assert "empty" in refused("predict", "p.safetensors", "--data", "empty.npz")
    np.savez(tmp_path / "z.npz", z=np.zeros(3))
    assert "no array x" in refused("predict", "p.safetensors", "--data", "z.npz")


def test_a_loss_that_explodes_keeps_the_last_good_round(tmp_path):
    said = refused("train", *SMALL, "--model", "mlp", "--lr", 1e20, "--out", "first", "--quiet")
    assert "round 1:" in said and "client-" in said and not list((tmp_path / "first").rglob("round-*"))
    said = refused("train", *SMALL, "--algorithm", "fedavg", "--lr", 1e36, "--rounds", 99, "--out", "later", "--quiet")
    rounds = sorted(int(f.stem[6:]) for f in (tmp_path / "later/checkpoints").glob("round-*"))
    assert rounds and f"round {rounds[-1] + 1}:" in said
    assert not list(tmp_path.rglob(".*"))
