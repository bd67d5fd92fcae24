"""A few cases of the campaigns of `tests.cli.fuzz`; its head says how to run hundreds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import MAX_WAIT


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("words", 1000), ("files", 1000)])
@pytest.mark.nightly
def test_strange_words_and_files_are_refused_in_time_and_little_memory(kind, first):
    program = [sys.executable, "-m", "tests.cli.fuzz", kind, "25", "--first", str(first)]
    found = subprocess.run(
        program, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=10 * MAX_WAIT, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "25 cases, 0 faults" in found.stdout
