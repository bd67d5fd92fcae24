"""On real data, where the machine has them: a process of its own, as a person would start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FEDABML_DATA") or "nowhere")


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "fashionmnist.npz").exists(), reason="$FEDABML_DATA has no fashionmnist.npz")
@pytest.mark.nightly
def test_fashionmnist_learns_within_two_gibibytes(tmp_path):
    """The column of the paper's table, cut to 6 of its 100 rounds; memory does not grow with rounds."""
    words = "--dataset fashionmnist --clients 200 --classes-per-client 2 --model mlr --rounds 6 --lr 0.03"
    command = [sys.executable, "-m", "fedabml", "train", *words.split(), "--quiet", "--out", "run"]
    home = {"PYTHONPATH": str(Path(__file__).parents[2]), "FEDABML_DATA": str(FOLDER.resolve())}
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, **home})
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["peak_memory_bytes"] < 2 << 30
    assert summary["accuracy"] > 0.9 and summary["clients_scored"] == 200
