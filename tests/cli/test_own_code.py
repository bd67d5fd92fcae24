"""A user's own algorithm and network on the command line: named with their file, by every command that needs them."""

import json
import sys

import numpy as np
import pytest

from fedabml import models
from fedabml.algorithms import REGISTRY
from tests.cli.command import run
from tests.files.test_user_code import FILE

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]
WORDS = ["--clients", 8, "--rounds", 1, "--participation", 1, "--epochs", 1, "--device", "cpu"]
OWN = ["--algorithm", "mine.py:Damped", "--model", "mine.py:Net"]


def forget():
    """Forget what was named before, as another process would."""
    REGISTRY.pop("Damped", None)
    models.USER_NETWORKS.clear()


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    yield tmp_path / "mine.py"
    forget()
    for name in [name for name in sys.modules if name.startswith("fedabml_user_code_")]:
        del sys.modules[name]


def test_own_code_is_named_again_by_every_command(mine, tmp_path):
    given = ["--set", "Damped.damping=0.7", "--set", "model_options.width=5"]
    output = run("train", *WORDS, *OWN, *given, "--out", "run").stdout
    assert "Damped on digits" in output
    assert "personalize run --data CLIENT.npz --algorithm mine.py:Damped --model mine.py:Net" in output
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["code"].keys() == {"Damped", "Net"} and "--model mine.py:Net" in config["command"]
    assert config["algorithm"]["hyper"]["damping"] == 0.7 and config["model_options"] == {"width": 5}
    rng = np.random.default_rng(0)
    np.savez("client.npz", x=rng.integers(0, 255, (20, 8, 8), dtype=np.uint8), y=np.arange(20) % 3)
    for words in (
        ["train", "--resume", "--out", "run", "--rounds", 2],
        ["evaluate", "run"],
        ["personalize", "run", "--data", "client.npz"],
    ):
        forget()
        error = run(*words, code=2).stderr
        assert "FILE.py:" in error and ("'Damped'" in error or "'Net'" in error), error
        forget()
        run(*words, *OWN)
    forget()
    assert "FILE.py:Net" in run("predict", "posterior.safetensors", "--data", "client.npz", code=2).stderr
    run("predict", "posterior.safetensors", "--data", "client.npz", "--model", "mine.py:Net")
    mine.write_text(FILE + "# changed\n")
    forget()
    error = run("train", "--resume", "--out", "run", "--rounds", 3, *OWN, code=2).stderr
    assert "code.Damped (was" in error and "code.Net (was" in error


COMMANDS = {
    "train": (["train"], ("model", "algorithm")),
    "compare": (["compare"], ("model", "algorithms")),
    "tune": (["tune"], ("model", "algorithms")),
    "evaluate": (["evaluate", "run"], ("model", "algorithm")),
    "personalize": (["personalize", "run", "--data", "c.npz"], ("model", "algorithm")),
    "predict": (["predict", "p.safetensors", "--data", "c.npz"], ("model",)),
    "serve": (["serve", "p.safetensors"], ("model",)),
}


@pytest.mark.parametrize(("command", "key"), [(name, key) for name, (_, keys) in COMMANDS.items() for key in keys])
@pytest.mark.parametrize("form", ["table", "top", "set"])
def test_a_toml_file_never_makes_code_run(mine, tmp_path, command, key, form):
    mine.write_text("open('ran', 'w').close()\n" + FILE)
    for place in ("run", "p.safetensors", "c.npz"):
        (tmp_path / place).touch()
    value = '["local", "mine.py:Damped"]' if key == "algorithms" else '"mine.py:Damped"'
    table, setting = f"[{command}]\n", f"{key.rstrip('s')}=mine.py:Damped"
    text = {"table": f"{table}{key} = {value}", "top": f"{key} = {value}", "set": f"{table}set = ['{setting}']"}[form]
    (tmp_path / "run.toml").write_text(text)
    error = run(*COMMANDS[command][0], "--config", "run.toml", code=2).stderr
    assert not (tmp_path / "ran").exists(), "the file has run"
    if form == "table" or (form, key) == ("top", "algorithms"):
        assert "runs only if a flag of this command names it: --" in error and "Remove the key from the file" in error


def test_a_flag_may_name_what_a_toml_file_may_not(mine, tmp_path):
    mine.write_text("raise SystemExit('this must not run')")
    (tmp_path / "run.toml").write_text('model = "mine.py:Net"\nclients = 8\n')
    error = run("train", "--config", "run.toml", code=2).stderr
    assert "runs only if a flag of this command names it: --model mine.py:Net" in error


def test_own_algorithms_are_compared_and_tuned(mine, tmp_path):
    names = ["--algorithms", "local,mine.py:Damped", "--model", "mine.py:Net"]
    output = run("compare", *names, *WORDS, "--seeds", 1, "--set", "Damped.damping=0.7", "--out", "c").stdout
    assert "Damped" in output
    cells = (tmp_path / "c/cells.jsonl").read_text()
    forget()
    assert "FILE.py:" in run("compare", "--resume", "--out", "c", code=2).stderr
    forget()
    assert "2 of 2 runs were finished before" in run("compare", "--resume", "--out", "c", *names).stdout
    assert (tmp_path / "c/cells.jsonl").read_text() == cells
    mine.write_text(FILE.replace("self.damping *", "0.5 * self.damping *"))
    forget()
    assert "2/2" in run("compare", "--resume", "--out", "c", *names).stdout, "changed code makes other cells"
    assert len((tmp_path / "c/cells.jsonl").read_text().splitlines()) == 4
    grid = ["--grid", "Damped.damping=0.4,0.9", "--set", "Damped.personal_epochs=1", "--trials", 2]
    output = run("tune", "--algorithms", "mine.py:Damped", "--model", "mine.py:Net", *WORDS, *grid, "--out", "t").stdout
    assert "--algorithms mine.py:Damped --model mine.py:Net" in output
    forget()
    words = ["--config", "t/tuned.toml", *OWN, "--out", "tuned"]
    run("train", *words)
    assert json.loads((tmp_path / "tuned/config.json").read_text())["algorithm"]["hyper"]["damping"] in (0.4, 0.9)
