"""A million registered clients: a round costs what its cohort costs, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import numpy as np
import fedabml
from fedabml.algorithms import make
from fedabml.summary import peak_memory
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
def test_a_million_clients(tmp_path):
    words = [sys.executable, "-W", "error", "-c", SCRIPT, "1000000", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drawn"] == {"fedabml": [100, 100], "ditto": [100, 100]}
    assert found["peak"] < 2 << 30  # samples, rows and names of all clients, and the states of those drawn
    assert sum(f.stat().st_size for f in (tmp_path / "ditto").rglob("*") if f.is_file()) < 200 << 20
