"""The command line as a process: killed, interrupted, without a terminal, on a full disk, and quick to start."""

import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import MAX_WAIT
from tests.tiers import nightly_but

ROOT = Path(__file__).resolve().parents[2]
# Bits are the same for the same number of threads, so the whole file uses one.
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
FEDABML = [sys.executable, "-m", "fedabml"]
TRAIN = shlex.split(
    "train --clients 10 --model mlp --set model_options.hidden=[40] --rounds 40 --participation 0.5 --epochs 1 "
    "--batch-size 20 --seed 3"
)


def hears():
    """A shell's background jobs, and so these tests in one, ignore Ctrl-C; the process to be stopped must not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder, *words, **options):
    command = [*FEDABML, *map(str, words)]
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": hears} | options
    return subprocess.Popen(command, cwd=folder, env=ENV, **words)


def finish(folder, *words, **options):
    process = start(folder, *words, **options)
    out, err = process.communicate(timeout=MAX_WAIT)
    return process.returncode, out, err


def wait_for_round(process, run, round):
    """Until a round is saved; says which round was."""
    end = time.monotonic() + MAX_WAIT
    while time.monotonic() < end:
        saved = [int(f.stem[6:]) for f in (run / "checkpoints").glob("round-*.safetensors")]
        if saved and max(saved) >= round:
            return max(saved)
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError(f"round {round} did not come")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["fedabml", "local"])
def test_killed_twice_and_resumed_is_bit_equal(tmp_path, algorithm):
    words = [*TRAIN, "--algorithm", algorithm]
    whole = start(tmp_path, *words, "--out", "whole", "--quiet")
    chance = random.Random()  # another moment every time: any must do
    command = [*words, "--out", "parts", "--quiet"]
    for round in (chance.randrange(1, 12), chance.randrange(14, 26)):
        process = start(tmp_path, *command)
        wait_for_round(process, tmp_path / "parts", round)
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "parts/summary.json").exists()
        command = ["train", "--resume", "--out", "parts", "--quiet"]
    code, out, err = finish(tmp_path, *command)
    assert (code, out, err) == (0, "", "")
    assert whole.communicate(timeout=MAX_WAIT) == ("", "")
    for name in ("shared.safetensors", "clients.csv", "manifest.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    rounds = [json.loads(line)["round"] for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 41))
    assert not list((tmp_path / "parts").rglob(".*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("word", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_ctrl_c_says_how_to_go_on(tmp_path, word):
    process = start(tmp_path, *TRAIN, "--rounds", "100000", "--out", "my run")
    saved = wait_for_round(process, tmp_path / "my run", 3)
    process.send_signal(word)
    out, err = process.communicate(timeout=MAX_WAIT)
    assert process.returncode == 130 and "Traceback" not in err
    stopped = re.match("Stopped. Round ([0-9]+) of 100000 is saved", err)
    assert stopped, err
    assert "round 1/100000" in out and out.count("\n") <= saved + 3  # no terminal: plain lines, no bar
    assert "\x1b" not in out + err
    command = err.strip().partition("To go on: ")[2]
    assert shlex.split(command) == ["fedabml", "train", "--resume", "--out", "my run"]
    last = int(stopped[1]) + 3
    code, out, _ = finish(tmp_path, *shlex.split(command)[1:], "--rounds", last)
    assert code == 0 and f"round {last}/{last}" in out and "report.html" in out
    log = (tmp_path / "my run/train.log").read_text().splitlines()
    assert sum(f"round {last}/{last}" in line for line in log) == 1
    resumed = re.search(f"resumed after round ([0-9]+) of {last}", "\n".join(log))
    assert resumed and 0 <= int(resumed[1]) - int(stopped[1]) <= 1  # one round may be saved and not yet reported


@pytest.mark.slow
def test_a_full_disk_is_a_paragraph_and_leaves_nothing_half_written(tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    words = [*TRAIN, "--set", "model_options.hidden=[200]", "--out", "run"]
    code, _, err = finish(tmp_path, *words, preexec_fn=small_files)
    assert code == 2 and "Traceback" not in err and "round-000001.safetensors" in err
    assert not list((tmp_path / "run").rglob(".*.part")) and not list((tmp_path / "run").rglob("round-*"))
    code, _, err = finish(tmp_path, "train", "--resume", "--out", "run", "--rounds", "1")
    assert code == 0, err


def test_help_does_not_wait_for_torch():
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fedabml.cli import app\n"
        "for words in ('--help', 'train --help', 'compare --help', 'tune --help', 'data get --help', '--version'):\n"
        "    assert CliRunner().invoke(app, words.split()).exit_code == 0\n"
        "print(sorted({'torch', 'numpy', 'pandas', 'safetensors'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, timeout=MAX_WAIT)
    assert result.stdout.strip() == "[]", result.stderr


def test_completion_knows_the_names(tmp_path):
    words = {"_FEDABML_COMPLETE": "complete_bash", "COMP_WORDS": "fedabml train --algorithm fedav", "COMP_CWORD": "3"}
    program = "import sys; sys.argv = ['fedabml']; from fedabml.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**ENV, **words}, capture_output=True, text=True, timeout=MAX_WAIT
    )
    assert result.stdout.split() == ["fedavg", "fedavg-ft"], result.stderr


@pytest.mark.parametrize(
    "module", nightly_but({"typer", "torch"}, ["fedabml.errors", "typer", "fedabml.runs.config", "numpy", "torch"])
)
@pytest.mark.slow
def test_ctrl_c_while_the_program_is_imported_is_130_and_no_traceback(tmp_path, module):
    watched = [sys.executable, "-X", "importtime", "-m", "fedabml", *TRAIN]
    process = subprocess.Popen(watched, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    for line in process.stderr:
        if line.split("|")[-1].strip() == module:
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=MAX_WAIT)[1]
    assert process.returncode == 130 and "Traceback" not in rest and "Stopped." in rest
