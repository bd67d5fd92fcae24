"""The command line in this process, and the words of a run that takes a moment."""

import functools
import shlex

from typer import testing

from fedabml.cli import app

# typer would build every command from its signature at every call, which takes longer than most commands under test.
testing._get_command = functools.cache(testing._get_command)

MAX_WAIT = 3000  # seconds to wait for an event before a test is given up: a loaded machine may take very long
SMALL = shlex.split("--clients 10 --model mlr --rounds 3 --participation 0.5 --epochs 1 --batch-size 20")


def run(*words, code=0):
    """The result of `fedabml WORDS`, which must end with this exit code."""
    result = testing.CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result
