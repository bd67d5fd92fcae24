"""The command line in this process, and the words of a run that takes a moment."""

import shlex

from typer.testing import CliRunner

from fedabml.cli import app

MOST = 3000  # seconds to wait for an event before a test is given up: a loaded machine may take very long
SMALL = shlex.split("--clients 10 --model mlr --rounds 3 --participation 0.5 --epochs 1 --batch-size 20")


def run(*words, code=0):
    """The result of `fedabml WORDS`, which must end with this exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result
