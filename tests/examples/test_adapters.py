"""What adapters save: the example's page has a row for all weights, for low-rank changes and for the head."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "adapters.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_smaller_the_adapter_the_smaller_are_traffic_files_and_memory(tmp_path):
    words = [sys.executable, SCRIPT, "--clients", "6", "--all", "2", "--layers", "3", "--out", tmp_path]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    text = (tmp_path / "adapters.md").read_text()
    rows = [line.split("|")[3:-1] for line in text.splitlines() if re.search(r"\d MiB", line) and "|" in line]
    units = {"MiB": 1 << 20, "KiB": 1 << 10}
    sizes = [
        [float(n.replace(",", "")) * units[unit] for n, unit in re.findall(r"([\d.,]+) (\w+)", "|".join(row))]
        for row in rows
    ]
    assert text in printed and [len(row) for row in sizes] == [5, 5, 5]
    whole, low_rank, head = sizes
    assert all(a > 5 * b for a, b in zip(whole, low_rank, strict=True))
    assert all(a > 5 * b for a, b in zip(whole, head, strict=True))
