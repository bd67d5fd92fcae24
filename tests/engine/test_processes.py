"""One run in several processes: the same numbers, one voice, and no harm when a process dies. Loopback only."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fedabml import Federation, InputError, prepare
from fedabml.engine import checkpoint
from fedabml.engine import processes as distributed
from fedabml.engine.processes import ALONE, World
from fedabml.experiments.compare import compare
from fedabml.experiments.tune import tune
from fedabml.files.sealed import read_tensors
from fedabml.runs.folder import Folder
from fedabml.runs.train import _agreed
from tests.cli.command import MAX_WAIT, run
from tests.engine import many

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k not in distributed.NEEDED}
ENV = {**CLEAN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"}
TRAIN = shlex.split(
    "train --clients 10 --model mlp --set model_options.hidden=[40] --rounds 40 --participation 0.5 --epochs 1 "
    "--batch-size 20 --seed 3 --dtype float64 --device cpu --algorithm ditto"
)


def start(processes, *words, folder=None, launcher=()):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *launcher]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *map(str, words)], cwd=folder, env=ENV, **pipes)


def finish(processes, *words, folder=None, code=0, launcher=()):
    process = start(processes, *words, folder=folder, launcher=launcher)
    out, err = process.communicate(timeout=MAX_WAIT)
    assert process.returncode == code, (out, err)
    return out, err


def near(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-9, err_msg=name)


# -- in one process ---------------------------------------------------------------------------------------------------
def test_clients_are_dealt_evenly_and_all_of_them():
    world = World()
    world.size = 3
    counts = np.array([5, 1, 9, 4, 4, 7, 2])
    shares = world.assign_clients(range(7), counts)
    assert shares == [[2, 6], [4, 5], [0, 1, 3]] and [counts[own].sum() for own in shares] == [11, 11, 10]
    assert world.assign_clients([4], counts) == [[4], [], []]
    assert ALONE.assign_clients([3, 1], counts) == [[1, 3]]


def test_states_travel_as_bits():
    state = {"a": torch.tensor([[1.5, -0.0], [torch.nan, 3]], dtype=torch.float64), "n": torch.tensor(7)}
    back = checkpoint.unpacked(checkpoint.packed(dict(reversed(state.items())), state), state)
    assert back.keys() == state.keys() and all(back[k].shape == v.shape for k, v in state.items())
    assert all(
        torch.equal(back[k].reshape(-1).view(torch.uint8), v.reshape(-1).view(torch.uint8)) for k, v in state.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fingerprint_sees_one_bit(dtype):
    one = {"a": torch.randn(1000, dtype=dtype), "b": torch.tensor(0.1, dtype=dtype)}
    other = {"a": one["a"].clone(), "b": torch.nextafter(one["b"], torch.tensor(1.0, dtype=dtype))}
    of = lambda s: checkpoint.state_checksum(s, dtype, torch.device("cpu")).tolist()
    assert of(one) == of({k: v.clone() for k, v in one.items()}) != of(other)
    assert all(v == int(v) and 0 <= v < 65536 for v in of(one)) and of({}) == [0, 0, 0, 0]


@pytest.fixture
def two_of_us(monkeypatch):
    for name, value in zip(distributed.NEEDED, ("1", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)


def test_what_is_not_for_several_processes_is_refused(two_of_us, tmp_path):
    assert distributed.rank_and_size() == (1, 2)
    with pytest.raises(InputError, match="one process"):
        compare({}, out=tmp_path)
    with pytest.raises(InputError, match="one process"):
        tune(None, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_processes_take_the_first_ones_backend():
    """Each has measured for itself, and may have found another one faster."""

    class Second(World):
        rank, size, here = 1, 2, 2

        def broadcast_text(self, text):
            return "loop" if text == "vmap" else text  # process 0 has measured something else

        def sum(self, tensor):
            return tensor  # nobody differs

    samples = [(np.zeros((4, 3), np.float32), np.arange(4) % 2)] * 4
    setup = prepare(Federation.from_arrays(samples, samples), "mlr", device="cpu", backend="vmap")
    setup = _agreed(Second(), setup, 3)
    assert (setup.cohort.backend, setup.config["backend"], setup.cohort.executor.record) == ("loop", "loop", False)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("one", "2"), ("0", "0"), ("0", "")])
def test_a_strange_environment_is_an_input_error(two_of_us, monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(InputError, match="torchrun"):
        distributed.rank_and_size()


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert distributed.rank_and_size() == (0, 1) and distributed.world() is ALONE


# -- the same numbers -------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.nightly  # `make test` has one algorithm in two processes, below
def test_several_processes_get_what_one_gets(tmp_path):
    for name in many.RESUMED:
        many.train(name, tmp_path / name, rounds=2)
    finish(2, ROOT / "tests/engine/many.py", "equality", tmp_path)
    finish(3, ROOT / "tests/engine/many.py", "halves", tmp_path)
    whole = {name: many.numbers(many.train(name)) for name in many.CASES}
    whole["regression"] = many.numbers(many.train("fedabml", task="regression"))
    for name in [*whole, *(f"{name} resumed" for name in many.RESUMED)]:
        found = [np.load(tmp_path / f"{name}.{rank}.npz") for rank in range(3 if "resumed" in name else 2)]
        near(dict(found[0]), whole[name.removesuffix(" resumed")])
        for other in found[1:]:  # all processes have the same bits
            assert all(np.array_equal(other[k], found[0][k], equal_nan=True) for k in found[0])
    for name in many.RESUMED:  # begun by three, ended by one
        near(many.numbers(many.train(name, tmp_path / f"{name} half", resume=True)), whole[name])
        assert json.loads((tmp_path / f"{name} half/config.json").read_text())["processes"] == 1
    words = [json.loads((tmp_path / f"errors.{rank}.json").read_text()) for rank in range(2)]
    assert words[0] == words[1] and len(words[0]) == 4
    assert "round 1" in words[0][0] and "client-" in words[0][0] and "Personalising diverged" in words[0][1]
    assert "Process 1 differs from process 0 in seed, weights." in words[0][2]
    assert "In round 2 process(es) 1 no longer have the server's state" in words[0][3]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_process_with_too_little_memory(tmp_path):
    _, said = finish(2, ROOT / "tests/engine/many.py", "crowded", tmp_path)
    assert said.count("does not suffice for") == 1  # the resumed run knows
    assert Folder(tmp_path / "crowded").load_latest().chunk == 1
    whole = many.numbers(many.train("ditto", **many.SOME))
    for rank in range(2):
        near(dict(np.load(tmp_path / f"crowded.{rank}.npz")), whole)


# -- the command line -------------------------------------------------------------------------------------------------
def round_saved(run):
    return max((int(f.stem[6:]) for f in (run / "checkpoints").glob("round-*.safetensors")), default=0)


def wait_for_round(process, run, round):
    end = time.monotonic() + MAX_WAIT
    while round_saved(run) < round:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def workers(launcher):
    """The processes that a launcher started, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid:
                env = dict(e.partition("=")[::2] for e in (folder / "environ").read_text().split("\0"))
                found[int(env["RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue
    return found


def same_run(a, b):
    one, other = (read_tensors(folder / "shared.safetensors")[0] for folder in (a, b))
    near({k: v.numpy() for k, v in one.items()}, {k: v.numpy() for k, v in other.items()})
    rounds = [json.loads(line)["round"] for line in (b / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 41)) and not list(b.rglob(".*.part"))
    assert (a / "clients.csv").read_text() == (b / "clients.csv").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc")
@pytest.mark.nightly
def test_a_killed_process_stops_the_others_and_resume_goes_on(tmp_path):
    """Killed twice: once torchrun may start the run anew, the second time a person does."""
    whole = [sys.executable, "-m", "fedabml", *TRAIN, "--out", "whole", "-q"]
    subprocess.run(whole, cwd=tmp_path, env=ENV, check=True)
    process = start(2, "-m", "fedabml", *TRAIN, "--out", "my run", folder=tmp_path, launcher=["--max-restarts=1"])
    for rank, round in ((1, 4), (0, 16)):
        wait_for_round(process, tmp_path / "my run", round)
        os.kill(workers(process)[rank], signal.SIGKILL)
    out, err = process.communicate(timeout=MAX_WAIT)
    assert process.returncode and not (tmp_path / "my run/summary.json").exists()
    assert str(ROOT / "fedabml") not in err  # no traceback but torchrun's own
    first, second = re.findall("^Stopped.*", err, re.MULTILINE)
    assert re.search("Round [0-9]+ of 40 is saved in 'my run'. To go on, unless torchrun restarts it", first)
    assert "Every finished round is saved in 'my run'. To go on: fedabml train --resume --out 'my run'" in second
    log = (tmp_path / "my run/train.log").read_text()
    assert "resumed after" in log and "cpu, 2 processes" in log and out.count("round 1/40") == 1
    out, _ = finish(3, "-m", "fedabml", "train", "--resume", "--out", "my run", folder=tmp_path)
    assert out.count("report.html") == 1 and out.count("round 40/40") == 1
    same_run(tmp_path / "whole", tmp_path / "my run")


@pytest.mark.slow
@pytest.mark.nightly
def test_they_speak_with_one_voice(tmp_path):
    process = start(2, "-m", "fedabml", *TRAIN, "--out", "run", folder=tmp_path)
    wait_for_round(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=MAX_WAIT)
    said = re.findall("^Stopped[.] (?:Round [0-9]+ of 40|Every finished round) is saved", err, re.MULTILINE)
    assert len(said) == 1 and err.count("To go on") == 1, err
    for words, said in (([*TRAIN, "--out", "run"], "already holds a run"), (["train", "--flag"], "No such option")):
        _, err = finish(2, "-m", "fedabml", *words, folder=tmp_path, code=1)
        assert err.count(said) == 1, err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_process_0_has_the_last_word_if_it_takes_it(two_of_us, monkeypatch):
    """The other one waits for it, and speaks where it does not."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(distributed, "rank_and_size", lambda: (int(threading.current_thread().name[-3]), 2))
    first, second = (ThreadPoolExecutor(1, f"process {rank}") for rank in range(2))  # named "process 1_0"
    with first, second:
        waits = second.submit(distributed.should_report, "late", MAX_WAIT)
        time.sleep(0.1)
        assert not waits.done()
        assert first.submit(distributed.should_report, "late").result() is True
        assert waits.result() is False
        assert second.submit(distributed.should_report, "never", 0.1).result() is True


def test_commands_that_are_not_for_several_processes(two_of_us, one_thread_here, monkeypatch):
    monkeypatch.setattr(distributed, "should_report", lambda what: True)
    for words in (["compare", "--algorithms", "all"], ["tune"], ["demo"], ["data", "list"]):
        assert f"fedabml {words[0]} runs in one process" in run(*words, code=2).stderr
    assert run("train", "--dry-run").output == ""  # process 0 says it


# -- on a GPU ---------------------------------------------------------------------------------------------------------
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@GPU
def test_processes_with_a_gpu_of_their_own_sum_by_nccl():
    """One process is enough to see that the group is made, and that sums stay on the device."""
    script = """
import torch
from fedabml.engine.processes import Processes
ranks = Processes(0, 1, 0, 1)
ranks.use_device(torch.device(ranks.device_name("cuda")))
x = torch.arange(5.0, device="cuda", dtype=torch.float64)
total = ranks.sum(x)
assert ranks.fast is not None and total.is_cuda and torch.equal(total, x) and total is not x
assert ranks.minimum(3) == 3
"""
    finish(1, "--no-python", sys.executable, "-c", script)


@GPU
def test_two_processes_may_share_a_gpu(tmp_path):
    words = [word if word != "cpu" else "cuda" for word in TRAIN] + ["--rounds", "3", "--no-evaluate"]
    finish(2, "-m", "fedabml", *words, "--out", tmp_path / "two")
    run(*words, "--out", str(tmp_path / "one"))
    one, two = (read_tensors(tmp_path / name / "shared.safetensors")[0] for name in ("one", "two"))
    near({k: v.numpy() for k, v in one.items()}, {k: v.numpy() for k, v in two.items()})
