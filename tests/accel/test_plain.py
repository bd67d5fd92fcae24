"""FEDABML_PLAIN=1 leaves every accelerator and every switch of the process out, and results agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedabml import accel
from fedabml.engine import autotune
from fedabml.vectors import Network
from tests.cli.command import MAX_WAIT

ROOT = Path(__file__).parents[2]
# Long enough for a step to be recorded, wide enough for a narrow layer and, with lower limits, for passes in C.
SCRIPT = """
import json, os, sys
import numpy as np
import fedabml
from fedabml.accel import fused_passes, fusible, mersenne
from fedabml.algorithms import make
import torch

fusible.LEAST, fused_passes.WORTH, mersenne.WORTH = 64, 1024, 1024
draw = np.random.default_rng(0)
rows = [(draw.normal(size=(24, 300)).astype(np.float32), draw.integers(0, 3, 24)) for _ in range(4)]
fed = fedabml.Federation.from_arrays(rows, rows, classes=3)
threads = torch.get_num_threads()
found = {}
for name in sys.argv[1:]:
    for dtype in ("float64", "float32"):
        run = fedabml.train(
            fed, "mlr", make(name), rounds=3, epochs=3 if dtype == "float64" else 1, participation=1.0, batch_size=8,
            device="cpu", dtype=dtype, backend="vmap",
        )
        found[f"{name} {dtype}"] = {k: v.double().flatten().tolist() for k, v in run.prior.shared.items()}
assert torch.get_num_threads() == threads and "OMP_WAIT_POLICY" not in os.environ
json.dump({"found": found, "compiler": "torch._dynamo" in sys.modules}, sys.stdout)
"""


def trained(names: list[str], plain: str, folder: Path) -> dict:
    """What the script prints for algorithms in a process of its own with a value of FEDABML_PLAIN."""
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(folder), "FEDABML_PLAIN": plain}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], env=env, capture_output=True, text=True, timeout=MAX_WAIT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["fedabml"], pytest.param(["ditto", "scaffold"], marks=pytest.mark.nightly)])
def test_results_agree_without_accelerators(names, tmp_path):
    fast, plain = trained(names, "", tmp_path), trained(names, "1", tmp_path)
    assert plain["compiler"] and not fast["compiler"]  # torch loads it wherever nobody prevents that
    for title, state in fast["found"].items():
        close = 1e-9 if "float64" in title else 1e-5
        for name, values in state.items():
            other = np.asarray(plain["found"][title][name])
            np.testing.assert_allclose(values, other, rtol=close, atol=close * np.abs(other).max(), err_msg=title)


def test_parts_are_left_out_by_name(monkeypatch):
    monkeypatch.setattr(accel, "_left_out", frozenset())
    assert all(map(accel.enabled, accel.PARTS))
    accel.leave_out(["recorder", "twister"])
    assert [part for part in accel.PARTS if not accel.enabled(part)] == ["recorder", "twister"]
    accel.leave_out(["1"])
    assert not any(map(accel.enabled, accel.PARTS))
    with pytest.raises(ValueError, match="names recorders; use 1, or some of recorder, passes"):
        accel.leave_out(["recorders"])


def test_a_word_that_is_no_part_is_one_line_and_code_2(tmp_path):
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(tmp_path), "FEDABML_PLAIN": "foo"}
    program = [sys.executable, "-m", "fedabml", "--version"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=MAX_WAIT, check=False)
    assert done.returncode == 2 and "FEDABML_PLAIN names foo" in done.stderr and "Traceback" not in done.stderr


def test_choices_of_backends_know_what_is_left_out(monkeypatch):
    network = Network(torch.nn.Linear(3, 2))
    monkeypatch.setattr(accel, "_left_out", frozenset())
    name = autotune._Trial(network, torch.zeros(2, 3)).name
    accel.leave_out(["threads"])
    assert autotune._Trial(network, torch.zeros(2, 3)).name != name
