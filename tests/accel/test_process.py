"""Library calls leave a process as they found it, in threads, after a fork, and whatever torch's defaults are."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import fedabml
from fedabml import models, rng
from fedabml.accel import process
from tests.cli.command import MAX_WAIT

ROOT = Path(__file__).parents[2]

SETUP = """
import gc, locale, logging, os, random, signal, sys, threading, warnings

def state():
    import numpy, torch
    flags = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
    return {
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "log": [(n, logging.getLogger(n).level, list(logging.getLogger(n).handlers)) for n in (None, "fedabml")],
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "random": random.getstate(), "numpy": str(numpy.random.get_state()), "torch": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), [t.name for t in threading.enumerate()]),
        "later threads": later(torch.get_num_threads),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "flags": [(n, getattr(f, n)) for f in flags for n in ("deterministic", "benchmark", "allow_tf32", "enabled",
                  "allow_bf16_reduced_precision_reduction") if hasattr(f, n)],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiler": ("torch._dynamo" in sys.modules, "_dynamo" in vars(torch)),
        "other": (sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(), locale.setlocale(locale.LC_ALL, None),
                  sys.excepthook, sys.getswitchinterval(), os.getcwd(), torch.is_inference_mode_enabled()),
    }

def later(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found
"""
CALLS = """
import numpy as np
rows = [(np.random.default_rng(i).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2) for i in range(4)]
fed = fedabml.Federation.from_arrays(rows, rows)
words = {"rounds": 8, "participation": 1.0, "batch_size": 5, "device": "cpu"}
run = fedabml.train(fed, "mlr", fedabml.FedABML(), **words)
posterior = run.prior.personalize(*rows[0])
posterior.predict(rows[0][0])
posterior.save("posterior.safetensors")
fedabml.load_posterior("posterior.safetensors").predict(rows[0][0])
"""


def ran(script, folder):
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=MAX_WAIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_a_process_is_the_same_after_training_as_before(tmp_path):
    script = f"""{SETUP}
import torch
before = state()
import fedabml
{CALLS}
from fedabml.accel import process
from fedabml.engine import workers
from fedabml.experiments.compare import compare, configs
small = {{"dataset": "digits", "clients": 8, "rounds": 2, "participation": 1.0, "model": "mlr", "device": "cpu"}}
compare(configs(["fedabml", "fedavg"], small), 1, out="comparison")
with process.borrowed():  # two threads, whatever this machine has chosen
    assert [*workers.map_in_threads(lambda i: torch.get_num_threads(), range(3), 2)] == [1, 1, 1]
after = state()
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
print("same")
"""
    assert ran(script, tmp_path).split() == ["same"]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_environment_is_the_same_where_torch_is_imported_by_us(tmp_path):
    """Yet torch's threads sleep while they wait, as OpenMP was told while torch was imported."""
    script = """
import os
before = dict(os.environ)
import fedabml
assert dict(os.environ) == before
fedabml.train
import sys
assert "torch" in sys.modules and dict(os.environ) == before
"""
    ran(script, tmp_path)
    own = "import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'; import fedabml; fedabml.train; "
    assert ran(own + "print(os.environ['OMP_WAIT_POLICY'])", tmp_path).split() == ["ACTIVE"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
@pytest.mark.slow
@pytest.mark.nightly
def test_a_forked_child_trains_as_its_parent_does(tmp_path):
    script = f"""
import os, sys, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
import fedabml
from fedabml.engine import workers
from fedabml.engine.rounds import Simulation
{CALLS}
setup = fedabml.prepare(fed, "mlr", fedabml.FedABML(), epochs=1, backend="vmap", workers=2, **words)

def loss():
    return Simulation(setup.cohort).step()["loss"]

mine = loss()  # outside of a call: the threads stay
assert workers._pools
pid = os.fork()
if pid == 0:
    same = loss() == mine and fedabml.train(fed, "mlr", fedabml.FedABML(), **words).summary["nll"] == run.summary["nll"]
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert ran(script, tmp_path).split() == ["0"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
@pytest.mark.slow
def test_a_child_forked_while_another_thread_is_in_a_call_has_the_users_settings(tmp_path):
    script = """
import os, threading, torch, warnings
warnings.simplefilter("ignore")
import fedabml
from fedabml.accel.process import borrowed
torch.set_default_dtype(torch.float64)
inside, leave = threading.Event(), threading.Event()

def call():
    with borrowed():
        inside.set()
        leave.wait()

thread = threading.Thread(target=call)
thread.start()
inside.wait()
assert torch.get_default_dtype() == torch.float32
pid = os.fork()
if pid == 0:
    before = torch.get_default_dtype()
    with borrowed():
        within = torch.get_default_dtype()
    os._exit((before, within, torch.get_default_dtype()) != (torch.float64, torch.float32, torch.float64))
leave.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.get_default_dtype())
"""
    assert ran(script, tmp_path).split() == ["0", "torch.float64"]


@pytest.mark.slow
@pytest.mark.nightly
def test_torchs_threads_sleep_whichever_module_is_imported_first(tmp_path):
    script = """
import os, sys

class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch())
"""
    for module in ("fedabml.algorithms.base", "fedabml.experiments.compare"):
        assert ran(f"{script}\nimport {module}", tmp_path).split() == ["PASSIVE"], module


CASES = [
    ("mlr", (1, 28, 28), 10, {}),
    ("mlp", (7,), 3, {"hidden": (5, 4, 3)}),
    ("mlp", (20,), 1, {"hidden": ()}),
    ("cnn", (1, 16, 16), 3, {"channels": (3, 4), "hidden": (5,)}),
    ("cnn100", (3, 32, 32), 100, {}),
    ("resnet18", (3, 32, 32), 10, {}),
]


@pytest.mark.parametrize(("name", "shape", "outputs", "options"), CASES)
def test_initial_weights_are_those_of_torchs_own_generator(name, shape, outputs, options, monkeypatch):
    """Published results began with them."""
    seed = rng.number(5, rng.INIT) & 0x7FFFFFFF
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = models.MODELS[name](shape, outputs, **options).state_dict()
    before = torch.get_rng_state()
    built = models.build(name, shape, outputs, 5, **options).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            again = models.build(name, shape, outputs, 5, **options).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for key, value in plain.items():
        for other in (built[key], again[key]):
            assert other.dtype == torch.float32 and other.device.type == "cpu" and torch.equal(value, other), key


def test_threads_start_from_the_weights_of_their_own_seeds():
    wanted = {seed: models.build("mlp", (30,), 4, seed).state_dict() for seed in range(8)}
    together = threading.Barrier(4)

    def built(seed):
        together.wait()
        return seed, models.build("mlp", (30,), 4, seed).state_dict()

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(built, [seed for _ in range(12) for seed in range(8)])]
    for seed, weights in found:
        assert all(torch.equal(weights[key], wanted[seed][key]) for key in weights)


def federation():
    rng = np.random.default_rng(1)
    rows = [(rng.normal(size=(12, 4)).astype(np.float32), rng.integers(0, 3, 12)) for _ in range(5)]
    return fedabml.Federation.from_arrays(rows, rows, classes=3), rows


def numbers(algorithm, seed=0):
    fed, rows = federation()
    words = {"rounds": 3, "participation": 0.6, "batch_size": 5, "device": "cpu", "backend": "vmap", "chunk": 5}
    run = fedabml.train(fed, "mlp", algorithm, seed=seed, model_options={"hidden": (6,)}, **words)
    posterior = run.prior.personalize(*rows[0])
    return [run.summary["nll"], run.summary["loss"], *posterior.predict(rows[0][0]).probs.ravel().tolist()]


@pytest.mark.parametrize("algorithm", [fedabml.FedABML(), fedabml.FedAvg()])
@pytest.mark.slow
def test_results_do_not_depend_on_torchs_defaults(algorithm):
    plain = numbers(algorithm)
    try:
        torch.set_default_dtype(torch.float64)
        assert numbers(algorithm) == plain
        assert torch.get_default_dtype() == torch.float64
        with torch.device("meta"):
            assert numbers(algorithm) == plain
            assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_training_in_threads_is_training_one_after_another():
    wanted = [numbers(fedabml.FedAvg(), seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda seed: numbers(fedabml.FedAvg(), seed), [0, 1, 2] * 2)]
    assert found == wanted * 2


def test_a_model_is_not_blamed_for_what_another_thread_draws():
    class Busy(torch.nn.Linear):
        def forward(self, x):
            other = threading.Thread(target=torch.rand, args=(1,))
            other.start()
            other.join()
            return super().forward(x)

    fed, _ = federation()
    assert fedabml.prepare(fed, Busy(4, 3), device="cpu", backend="loop").config["model"] == "Busy"


def test_calls_that_overlap_give_back_what_the_first_has_found():
    try:
        torch.set_default_dtype(torch.float64)
        first, second = process.borrowed(), process.borrowed()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float32
        second.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# -- warnings -------------------------------------------------------------------------------------------------------
SLOW = "performance drop because we have not yet implemented the batching rule"


class Slow(torch.nn.Linear):
    """A module with an operation that torch batches by a loop, and a warning of its own."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        warnings.warn("a warning of the user's", stacklevel=1)
        return super().forward(x.detach()).renorm(2, 0, 1.0)


@pytest.mark.usefixtures("one_thread_here")
@pytest.mark.parametrize("algorithm", [fedabml.FedABML(personal_epochs=1), fedabml.FedAvg(personal_epochs=1)])
def test_warnings_of_slow_batching_do_not_leak(algorithm):
    generator = np.random.default_rng(0)
    clients = [(generator.normal(size=(6, 3)), np.arange(6) % 2) for _ in range(3)]
    fed = fedabml.Federation.from_arrays(clients, clients)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        run = fedabml.train(fed, Slow(), algorithm, rounds=1, participation=1.0, epochs=1, device="cpu", backend="vmap")
        run.prior.personalize(*clients[0]).predict(clients[0][0])
        assert warnings.filters == before
    texts = [str(each.message) for each in seen]
    assert not [text for text in texts if SLOW in text] and "a warning of the user's" in texts
    with pytest.warns(UserWarning, match=SLOW):  # a user's own call still warns
        torch.vmap(lambda x: x.renorm(2, 0, 1.0))(torch.ones(2, 3, 3))
