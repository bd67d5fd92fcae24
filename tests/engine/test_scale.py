"""A million registered clients: a round costs what its cohort costs, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.cli.command import MAX_WAIT

SCRIPT = """
import json, sys
import numpy as np
import fedabml
from fedabml.algorithms import make
from fedabml.runs.summary import peak_memory
clients, folder = int(sys.argv[1]), sys.argv[2]
g = np.random.default_rng(0)
x = np.lib.format.open_memmap(f"{folder}/x.npy", mode="w+", dtype=np.float32, shape=(4 * clients, 8))
for i in range(0, len(x), 1 << 20):
    x[i : i + (1 << 20)] = g.normal(size=x[i : i + (1 << 20)].shape)
del x
x = np.load(f"{folder}/x.npy", mmap_mode="r")
fed = fedabml.Federation.from_owners(x, g.integers(0, 3, len(x)), np.repeat(np.arange(clients), 4))
lines = {}
for name in ("fedabml", "ditto"):
    run = fedabml.train(fed, "mlp", make(name), model_options={"hidden": (16,)}, rounds=2, participation=100 / clients,
                        epochs=1, evaluate=False, device="cpu", out=f"{folder}/{name}")
    lines[name] = [len(line["clients"]) for line in run.history]
print(json.dumps({"peak": peak_memory(), "drawn": lines}))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_million_clients(tmp_path):
    words = [sys.executable, "-W", "error", "-c", SCRIPT, "1000000", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MAX_WAIT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drawn"] == {"fedabml": [100, 100], "ditto": [100, 100]}
    assert found["peak"] < 2 << 30  # samples, rows and names of all clients, and the states of those drawn
    assert sum(f.stat().st_size for f in (tmp_path / "ditto").rglob("*") if f.is_file()) < 200 << 20


KEPT = """
import json, sys
import numpy as np
import fedabml
from pathlib import Path
from fedabml.algorithms import make
from fedabml.engine import client_states
way, folder, clients = sys.argv[1], sys.argv[2], 100_000
if way == "file":
    client_states.host_memory = lambda: (1 << 30, 1 << 20)
g = np.random.default_rng(0)
x, y = g.normal(size=(2 * clients, 99)).astype(np.float32), g.integers(0, 10, 2 * clients)
fed = fedabml.Federation.from_owners(x, y, np.repeat(np.arange(clients), 2))
resident = lambda: int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024
held = []
run = fedabml.train(fed, "mlr", make("scaffold"), rounds=12, participation=0.02, epochs=1, evaluate=False,
                    device="cpu", backend="vmap", chunk=500, on_round=lambda line: held.append(resident()))
seen = len({c for line in run.history for c in line["clients"]})
weights = {k: v.double().sum().item() for k, v in run.prior.shared.items()}
print(json.dumps({"grown": held[-1] - held[1], "seen": seen, "loss": run.history[-1]["loss"], "sums": weights}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.nightly
def test_what_a_hundred_thousand_clients_keep_takes_no_memory(tmp_path):
    """SCAFFOLD's 4 kB a client: 20,000 of them in memory are 85 MB, and nothing where they lie in a file."""
    found = {}
    for way in ("memory", "file"):
        words = [sys.executable, "-c", KEPT, way, str(tmp_path)]
        given_back = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072"}  # or a process keeps what it has freed
        done = subprocess.run(words, capture_output=True, text=True, timeout=MAX_WAIT, env=given_back)
        assert done.returncode == 0, done.stderr[-2000:]
        found[way] = json.loads(done.stdout.splitlines()[-1])
    grown = {way: words.pop("grown") for way, words in found.items()}
    assert found["memory"] == found["file"] and found["file"]["seen"] > 20_000
    assert grown["memory"] > 60 << 20 and grown["file"] < 16 << 20
