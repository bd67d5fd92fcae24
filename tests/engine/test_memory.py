"""Too little memory: fewer clients at once, or their states in a file; the results are those of enough memory."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedabml
import fedabml.evaluation.scoring as scoring
from fedabml import FedABML, FedAvg, InputError
from fedabml.algorithms import make
from fedabml.engine import client, policy
from fedabml.engine import client_states as keeping
from fedabml.engine import samples as data
from fedabml.engine.client_states import Shelf
from fedabml.engine.executor import Executor
from fedabml.engine.rounds import Simulation, run_round
from fedabml.engine.samples import Data
from fedabml.engine.workers import ChunkLimit, fit_in_memory
from fedabml.evaluation.scoring import TrainedRun, evaluate_after
from fedabml.runs.folder import Folder
from tests.cli.command import MAX_WAIT
from tests.tiers import nightly_but

SIZES = (9, 20, 14, 7, 31, 4, 12, 8)


def federation():
    g = np.random.default_rng(0)
    client = lambda n: (g.normal(size=(n, 4)).astype(np.float32), g.integers(0, 3, n))
    return fedabml.Federation.from_arrays([client(n) for n in SIZES], [client(5) for _ in SIZES], classes=3)


def train(out=None, algorithm=None, rounds=3, **options):
    words = {"participation": 1.0, "epochs": 1, "batch_size": 8, "seed": 3, "device": "cpu", "eval_every": 2}
    words |= {"model_options": {"hidden": (4,)}, "backend": "vmap"}
    return fedabml.train(federation(), "mlp", algorithm or FedABML(), rounds=rounds, out=out, **(words | options))


class Device:
    """A device on which only so many lanes fit; `room` may change, and calls are counted."""

    def __init__(self, monkeypatch, room, place=client, name="client_round"):
        self.room, self.sizes = room, []
        real = getattr(place, name)

        def limited(lanes, *args):
            self.sizes.append(len(lanes))
            if len(lanes) > self.room:
                raise torch.OutOfMemoryError(f"Tried to allocate {len(lanes)} lanes.\nAnd more words.")
            return real(lanes, *args)

        monkeypatch.setattr(place, name, limited)


def assert_same(a, b):
    strip = lambda run: [{k: v for k, v in line.items() if k != "seconds"} for line in run.history]
    assert strip(a) == strip(b)
    assert all(torch.equal(v, b.prior.shared[k]) for k, v in a.prior.shared.items())
    assert all(np.array_equal(v, b.evaluation.clients[k], equal_nan=True) for k, v in a.evaluation.clients.items())


def _of_memory(caplog):
    """Return the warnings about memory, and nothing else."""
    return [record.message for record in caplog.records if "does not suffice" in record.message]


@pytest.mark.parametrize("name", nightly_but({"fedabml"}, ["fedabml", "scaffold", "local"]))
@pytest.mark.slow
def test_the_chunk_is_halved_until_it_fits(monkeypatch, caplog, name):
    small = train(algorithm=make(name), chunk=2)
    device = Device(monkeypatch, 3)
    with caplog.at_level(logging.WARNING, "fedabml"):
        found = train(algorithm=make(name), chunk=100)
    assert_same(small, found)
    notes = _of_memory(caplog)
    assert (
        len(notes) == 2
        and "8 clients at once (Tried to allocate 8 lanes.)" in notes[0]
        and "goes on with 4" in notes[0]
    )
    assert "goes on with 2" in notes[1] and "cpu" in notes[1] and "more words" not in notes[0]
    assert device.sizes[:3] == [8, 4, 2] and set(device.sizes[2:]) == {2} and found.summary["chunk"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"local"}, ["fedabml", "local"]))
def test_so_it_is_when_clients_are_scored(monkeypatch, caplog, name):
    plain = train(algorithm=make(name), eval_every=1)
    device = Device(monkeypatch, 3, scoring, "personalize_after")
    found = train(algorithm=make(name), eval_every=1)
    assert len(_of_memory(caplog)) == 2 and device.sizes[:3] == [8, 4, 2] and set(device.sizes[2:]) == {2}
    for a, b in zip(plain.history, found.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], 1e-4) and a["eval"]["nll"] == pytest.approx(b["eval"]["nll"], 1e-3)
    for k, v in plain.evaluation.clients.items():
        np.testing.assert_allclose(v, found.evaluation.clients[k], 1e-3, 1e-4)


@pytest.mark.slow
def test_so_it_is_when_the_prior_itself_is_scored(monkeypatch, caplog):
    """The server's own model gets fewer samples at once, which changes no score."""
    monkeypatch.setattr(scoring, "FEW", 4)
    enough = train()
    real, sizes = scoring.outputs, []

    def limited(lanes, model, rows, *args):
        if len(lanes) == 1 and len(rows) == 1 and len(rows[0]) > 10:  # all clients' samples are 40
            sizes.append(len(rows[0]))
            raise torch.OutOfMemoryError("Tried to allocate too much.")
        return real(lanes, model, rows, *args)

    monkeypatch.setattr(scoring, "outputs", limited)
    with caplog.at_level(logging.WARNING, "fedabml"):
        found = train()
    assert sizes and _of_memory(caplog)
    for name, value in enough.evaluation.clients.items():
        np.testing.assert_allclose(found.evaluation.clients[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_round_that_fails_midway_is_done_anew(monkeypatch, caplog):
    """The second chunk fails, when the first has been trained: its clients must not be trained twice."""
    small, large = (train(algorithm=make("scaffold"), chunk=chunk, rounds=1) for chunk in (2, 4))
    real, calls = client.client_round, []

    def limited(lanes, *args):
        calls.append(len(lanes))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return real(lanes, *args)

    monkeypatch.setattr(client, "client_round", limited)
    found = train(algorithm=make("scaffold"), chunk=4, rounds=1)
    assert calls == [4, 4, 2, 2, 2, 2] and caplog.text.count("does not suffice") == 1
    assert_same(small, found)
    for k, v in large.prior.shared.items():
        torch.testing.assert_close(v, found.prior.shared[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "halved"),
    [
        (torch.OutOfMemoryError("full"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (TypeError("out of memory"), False),
    ],
)
@pytest.mark.slow
def test_what_counts_as_too_little_memory(error, halved):
    cohort = SimpleNamespace(limit=ChunkLimit(6), device=torch.device("cpu"), executor=Executor())
    cohort.executor.graphs["step"] = cohort.executor.pool = object()
    cohort.executor.refused.add("other step")

    def work(chunk):
        if chunk > 3:
            raise error
        return chunk

    if not halved:
        with pytest.raises(type(error)):
            fit_in_memory([cohort], 100, work)
        assert cohort.limit.size == 6 and cohort.executor.graphs
        return
    assert fit_in_memory([cohort], 100, work) == cohort.limit.size == 3
    assert not cohort.executor.graphs and not cohort.executor.refused and cohort.executor.pool is None


@pytest.mark.slow
def test_what_was_captured_is_given_back_once_before_fewer_run_at_once(caplog):
    cohort = SimpleNamespace(limit=ChunkLimit(6), device=torch.device("cpu"), executor=Executor())
    held, tried = cohort.executor.graphs, []

    def work(chunk):
        tried.append((chunk, len(held)))
        if held or len(tried) == 4:
            raise torch.OutOfMemoryError("full")
        return chunk

    held["step"] = object()
    assert fit_in_memory([cohort], 100, work) == cohort.limit.size == 6 and tried == [(6, 1), (6, 0)]
    assert not caplog.records
    held["step"] = object()  # now it fills the memory again and again
    assert fit_in_memory([cohort], 100, work) == cohort.limit.size == 1 and tried[2:] == [(6, 1), (3, 0), (1, 0)]
    assert len(caplog.records) == 2


@pytest.mark.slow
def test_a_client_alone_that_does_not_fit_is_an_input_error(monkeypatch, tmp_path):
    device = Device(monkeypatch, 8)
    train(tmp_path, rounds=1)
    device.room = 0
    with pytest.raises(InputError, match=r"cpu does not suffice for one client alone \(Tried .*smaller batch_size"):
        train(tmp_path, rounds=2, resume=True)
    assert Folder(tmp_path).load_latest().round == 1
    assert device.sizes[-4:] == [8, 4, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.nightly
def test_a_resumed_run_goes_on_with_the_chunk_that_fitted(monkeypatch, tmp_path, chunk):
    device = Device(monkeypatch, 8)
    train(tmp_path / "whole", chunk=chunk, rounds=1)
    device.room = 3
    train(tmp_path / "whole", chunk=chunk, rounds=2, resume=True)
    device.room, device.sizes = 8, []  # there is room again, but the bits are to be the same
    found = train(tmp_path / "whole", chunk=chunk, rounds=4, resume=True)
    assert set(device.sizes) == {2}
    device.sizes = []
    real = Simulation.draw

    def draw(sim):
        device.room = 3 if sim.round == 1 else 8
        return real(sim)

    monkeypatch.setattr(Simulation, "draw", draw)
    assert_same(train(chunk=chunk, rounds=4), found)
    assert device.sizes[:4] == [8, 8, 4, 2] and set(device.sizes[3:]) == {2}


@pytest.mark.slow
def test_runs_side_by_side(monkeypatch, caplog):
    """Two runs share a batch; with too little memory they are what they are alone."""
    fed, words = federation(), {"participation": 1.0, "epochs": 1, "batch_size": 8, "device": "cpu", "backend": "vmap"}
    setups = [fedabml.prepare(fed, "mlr", FedAvg(lr=lr), **words) for lr in (0.1, 0.2)]
    make_sims = lambda: [Simulation(s.cohort) for s in setups]
    setups[0].cohort.limit.set(16)
    wide = make_sims()
    run_round(wide)
    Device(monkeypatch, 5)
    sims = make_sims()
    lines = run_round(sims)
    assert [s.cohort.chunk for s in sims] == [4, 4] and len(caplog.records) == 2
    for a, b, line in zip(wide, sims, lines, strict=True):
        assert line["round"] == 1
        torch.testing.assert_close(a.shared["mean"], b.shared["mean"])
    copies = [s.cohort.using(FedAvg(personal_epochs=1)) for s in sims]
    Device(monkeypatch, 2, scoring, "personalize_after")
    epochs = copies[0].algorithm.personal_epochs
    entries = [TrainedRun(c, s.theta, s.kept_for) for c, s in zip(copies, sims, strict=True)]
    (scores,) = evaluate_after((epochs,), entries, prior=epochs)
    assert [s.summary["clients_scored"] for s in scores] == [8, 8]
    assert [s.cohort.chunk for s in sims] == [2, 2]  # a copy with other options has the same device


# -- what clients keep ----------------------------------------------------------------------------------------------
def state(value):
    return {"w": torch.full((3,), value), "steps": torch.tensor([int(value)]), "n": torch.tensor(value).double()}


def test_a_shelf_is_a_dictionary_of_states(tmp_path):
    shelf = Shelf(state(0.0), 1000, tmp_path)
    assert not shelf and 3 not in shelf and "3" not in shelf and 1000 not in shelf and -1 not in shelf
    expected = {}
    for number, value in ((999, 1.5), (0, 2.5), (7, -1e-40), (0, 3.5)):
        shelf[number] = expected[number] = state(value)
    assert list(shelf) == [0, 7, 999] and len(shelf) == 3
    for number, own in shelf.items():
        for name, tensor in expected[number].items():
            assert torch.equal(own[name], tensor) and own[name].dtype == tensor.dtype
    shelf[0]["w"].zero_()  # a copy
    assert shelf[0]["w"].tolist() == [3.5] * 3
    del shelf[7]
    for missing in (7, 8, 1000):
        with pytest.raises(KeyError):
            shelf[missing]
    with pytest.raises(KeyError):
        del shelf[7]
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left after a crash


def test_a_shelf_without_room_says_what_to_do(tmp_path, monkeypatch):
    shelf = Shelf(state(0.0), 10, tmp_path)

    class Full:
        def seek(self, place): ...

        def write(self, row):
            raise OSError(errno.ENOSPC, "No space left on device")

    shelf.file = Full()
    with pytest.raises(InputError, match=rf"cannot be written to a file in '{tmp_path}': No space left.*TMPDIR"):
        shelf[0] = state(1.0)
    assert 0 not in shelf
    monkeypatch.setattr(keeping.tempfile, "TemporaryFile", lambda dir: Full().write(None))
    with pytest.raises(InputError, match="No space left"):
        Shelf(state(0.0), 10, tmp_path)
    monkeypatch.undo()  # a folder that is not here, but on the machine of process 0, gives way to a temporary one
    assert Shelf(state(0.0), 10, tmp_path / "elsewhere").folder == keeping.tempfile.gettempdir()


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"scaffold"}, ["scaffold", "local", "ditto"]))
def test_states_in_a_file_are_those_in_memory(tmp_path, monkeypatch, name):
    words = {"algorithm": make(name), "participation": 0.5, "rounds": 5}
    plain = train(tmp_path / "plain", **words)
    made = []
    monkeypatch.setattr(keeping, "host_memory", lambda: (1000, 10))
    monkeypatch.setattr(keeping, "Shelf", lambda *args: made.append(Shelf(*args)) or made[-1])
    assert_same(plain, train(tmp_path / "whole", **words))
    assert len(made) == 1 and len(made[0]) == 8 and made[0].folder == str(tmp_path / "whole")
    train(tmp_path / "half", **words | {"rounds": 3})
    assert_same(plain, train(tmp_path / "half", **words, resume=True))
    assert len(made) == 3  # filled from the checkpoint
    for run in ("plain", "whole", "half"):
        assert not list((tmp_path / run).glob(".*")) and not list((tmp_path / run).glob("tmp*"))
    kept = [dict(Folder(tmp_path / run).load_latest().kept) for run in ("plain", "whole", "half")]
    for other in kept[1:]:
        assert other.keys() == kept[0].keys()
        assert all(torch.equal(t, other[c][n]) for c, own in kept[0].items() for n, t in own.items())


def test_what_fits_stays_in_memory(monkeypatch):
    """Eight clients keep 35 floats each: a file is used where that is more than a quarter of what is free."""
    for free, kind in ((4 * 8 * 35 * 4, dict), (4 * 8 * 35 * 4 - 1, Shelf), (0, dict)):
        monkeypatch.setattr(keeping, "host_memory", lambda free=free: (1 << 40, free))
        setup = fedabml.prepare(
            federation(),
            "mlp",
            make("scaffold"),
            device="cpu",
            participation=0.5,
            epochs=1,
            model_options={"hidden": (4,)},
        )
        assert setup.config["parameters"] == 35
        sim = Simulation(setup.cohort)
        sim.step()
        assert type(sim.kept.states) is kind


# -- the estimate of what a client takes ----------------------------------------------------------------------------
PEAK = """
import gc, json, os, sys
from pathlib import Path
import numpy as np
import torch
import fedabml
from fedabml.engine.rounds import Simulation
torch.set_num_threads(1)
model, lanes, cases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
shape, classes = {"mlr": ((1, 28, 28), 10), "mlp": ((1, 28, 28), 62), "cnn": ((3, 32, 32), 10)}[model]
x = np.random.default_rng(0).integers(0, 255, (50 * lanes, *shape), dtype=np.uint8)
fed = fedabml.Federation.from_owners(x, np.arange(len(x)) % classes, np.repeat(np.arange(lanes), 50))
for estimator, s in cases:  # each in a process of its own, which need not import anything
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
algorithm = fedabml.FedAvg() if estimator == "none" else fedabml.FedABML(s=s, estimator=estimator)
setup = fedabml.prepare(fed, model, algorithm, participation=1.0, epochs=1, device="cpu", backend="vmap", chunk=lanes)
sim = Simulation(setup.cohort)
resident = lambda word: int(Path("/proc/self/status").read_text().split(word)[1].split()[0]) * 1024
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = resident("VmRSS:")
sim.step()
print(json.dumps([estimator, s, (resident("VmHWM:") - before) / lanes, setup.lane_bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not count the peak anew")
@pytest.mark.parametrize(("model", "lanes"), [("mlr", 256), ("mlp", 64), ("cnn", 8)])
@pytest.mark.nightly
def test_the_memory_of_a_client_is_known_to_a_factor_of_two(model, lanes):
    cases = [("none", 1), ("weight", 2), ("local", 1), ("local", 2), ("flipout", 2)]
    words = [sys.executable, "-c", PEAK, model, str(lanes), json.dumps(cases)]
    tight = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed is given back
    done = subprocess.run(words, capture_output=True, text=True, timeout=MAX_WAIT, env=os.environ | tight)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(estimator, s) for estimator, s, *_ in found] == cases
    assert all(0.5 < estimated / measured < 2 for *_, measured, estimated in found), found


# -- samples on the host --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("local", [pytest.param(1 << 28, marks=pytest.mark.nightly), 0])
@pytest.mark.parametrize("task", ["images", pytest.param("regression", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_samples_on_the_host_give_the_same_run(monkeypatch, task, local):
    g = np.random.default_rng(0)

    def client(n):
        if task == "images":
            return g.integers(0, 256, (n, 1, 5, 5), dtype=np.uint8), g.integers(0, 3, n)
        return g.normal(size=(n, 4)).astype(np.float32), g.normal(size=(n, 2))

    fed = fedabml.Federation.from_arrays([client(n) for n in SIZES], [client(n % 4) for n in SIZES])
    words = {"rounds": 2, "participation": 0.5, "epochs": 2, "batch_size": 8, "device": "cpu", "eval_every": 1}
    runs, moved, real = [], [], Data._moved
    monkeypatch.setattr(
        policy, "DEFAULT", policy.Policy(normalized_bytes=local)
    )  # normalised once for all epochs, or on the way
    monkeypatch.setattr(Data, "_moved", lambda self, index: moved.append(len(index)) or real(self, index))
    for large in (False, True):
        monkeypatch.setattr(data, "too_large", lambda samples, device, large=large: large)
        data._ALIVE.clear()
        notes = []
        start = lambda setup, sim, notes=notes: notes.extend(setup.notes)
        algorithm = FedABML(augment="crop" if task == "images" else "none")
        runs.append(fedabml.train(fed, "mlr", algorithm, chunk=3, on_start=start, **words))
        assert any("stay on the host" in note for note in notes) == large and bool(moved) == large
    assert_same(*runs)
    clients = runs[0].history[0]["clients"]  # the first round moves its clients' samples once, chunk by chunk
    assert moved[:2] == [sum(fed.train.counts[clients[:3]]), fed.train.counts[clients[3]]]


def test_what_is_too_large_for_a_device(monkeypatch):
    samples = torch.zeros(100, dtype=torch.uint8)
    assert not data.too_large(samples, torch.device("cpu"))
    for free, large in ((100, False), (99, True)):
        monkeypatch.setattr(data, "free_bytes", lambda device, free=free: free)  # half of what is free
        assert data.too_large(samples, torch.device("cuda")) == large


# -- on a GPU -------------------------------------------------------------------------------------------------------
FRESH = "FEDABML_TEST_FRESH"  # in the environment of a process that runs one test alone
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def on_gpu(**options):
    g = np.random.default_rng(0)
    client = lambda n: (g.integers(0, 256, (n, 1, 28, 28), dtype=np.uint8), g.integers(0, 10, n))
    fed = fedabml.Federation.from_arrays([client(n) for n in range(40, 72)], [client(8) for _ in range(32)])
    words = {"rounds": 3, "participation": 1.0, "epochs": 1, "device": "cuda"}
    return fedabml.train(fed, "mlp", FedABML(personal_epochs=1), **(words | options))


@needs_gpu
def test_a_gpu_that_is_too_small():
    """In a process of its own: graphs of other tests hold memory for as long as they live."""
    node = f"{__file__}::test_a_gpu_that_is_too_small_for_this_process"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", node]
    done = subprocess.run(words, env=os.environ | {FRESH: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


@needs_gpu
@pytest.mark.skipif(FRESH not in os.environ, reason="the test before runs it in a process of its own")
def test_a_gpu_that_is_too_small_for_this_process(caplog):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (384 << 20)) / total)
    try:
        found = on_gpu(chunk=32, evaluate=False)
        scored = on_gpu(chunk=32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    notes = [int(r.message.split()[-1].rstrip(".")) for r in caplog.records if "does not suffice" in r.message]
    assert notes and notes[: len(notes) // 2] == notes[len(notes) // 2 :]  # the same of both runs
    assert not [r for r in caplog.records if "CUDA graph" in r.message]
    small = on_gpu(chunk=min(notes), evaluate=False)
    assert all(torch.equal(v, small.prior.shared[k]) for k, v in found.prior.shared.items())
    assert all(torch.equal(v, scored.prior.shared[k]) for k, v in found.prior.shared.items())
    assert scored.summary["clients_scored"] == 32


@needs_gpu
def test_samples_on_the_host_of_a_gpu(monkeypatch):
    plain = on_gpu()
    monkeypatch.setattr(data, "too_large", lambda samples, device: True)
    found = on_gpu()
    for k, v in plain.prior.shared.items():
        torch.testing.assert_close(v, found.prior.shared[k], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plain.evaluation.clients["nll"], found.evaluation.clients["nll"], rtol=1e-3)
