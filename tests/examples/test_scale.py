"""What registered clients cost: the example's table has a row per algorithm and number of clients."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "scale.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_what_registered_clients_cost(tmp_path):
    words = [sys.executable, SCRIPT, "--clients", "120", "--out", tmp_path]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    text = (tmp_path / "scale.md").read_text()
    assert text in printed and "| 120 | fedabml |" in text and "| 120 | ditto |" in text
