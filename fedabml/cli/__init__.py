"""The command line: a thin face over the public functions. Torch is imported by the commands that need it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..accel import own_process
from ..engine import processes
from ..errors import InputError, TrainingError
from ..version import __version__
from . import about, bench, compare, data, demo, doctor, reproduce, train, tune, use
from .console import complain

UsageError: Any = typer.BadParameter.__base__  # click's, wherever typer has it from


class Face(TyperGroup):
    """Errors that a person can cause are one paragraph and exit code 2; Ctrl-C is 130."""

    def make_context(self, *words: Any, **options: Any) -> Any:
        try:
            return super().make_context(*words, **options)
        except KeyboardInterrupt:  # which click would turn into code 1
            raise SystemExit(130) from None

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (InputError, TrainingError, MemoryError, OSError, RuntimeError, OverflowError, UnicodeError) as error:
            sentence = _sentence(error)
            if sentence is None or ctx.params.get("debug") or os.environ.get("FEDABML_DEBUG"):
                raise
            if processes.should_report(train.STOPPED if isinstance(error, processes.PeerLost) else sentence):
                complain(sentence)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            if processes.rank_and_size()[1] == 1:  # else torchrun, or a process that failed, has said why
                complain("Stopped.", "")
            raise typer.Exit(130) from None
        except UsageError as error:
            if processes.should_report(error.format_message()):
                raise
            raise typer.Exit(error.exit_code) from error


def _sentence(error: BaseException) -> str | None:
    """What to tell a person; None for errors that are ours and not theirs."""
    if isinstance(error, InputError | TrainingError):
        return str(error)
    if isinstance(error, MemoryError) or "not enough memory" in str(error) or "out of memory" in str(error):
        return "There is not enough memory. A smaller --chunk runs fewer clients at once; a smaller batch helps too."
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}."
    if isinstance(error, RecursionError | OverflowError | UnicodeError):
        # The last net: readers have limits of their own, and say which file it is.
        reason = f"{type(error).__name__}: {error}"
        return f"Something that was given is too deep, too large or no text ({reason}). --debug shows where."
    return None


app = typer.Typer(
    cls=Face,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedabml {__version__}")
        raise typer.Exit


@app.callback()
def face(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (also: FEDABML_DEBUG=1).")
    ] = False,
) -> None:
    """Personalised federated learning: a shared prior, and for every client a posterior of its own.

    **First steps:** `fedabml demo` trains on embedded data and takes about a minute. Then `fedabml train --help`.

    **The usual way:** `train` makes a run folder with a prior; `personalize` turns the prior and a client's data into
    that client's posterior; `predict` uses the posterior, and says how sure it is. `fedabml COMMAND --help` says more.
    """
    if ctx.invoked_subcommand != "train":
        processes.refuse(f"fedabml {ctx.invoked_subcommand}")


TRAINING, USING, KNOWING = "Train", "Use what was trained", "Look things up"
app.command(rich_help_panel=TRAINING)(demo.demo)
app.command(rich_help_panel=TRAINING)(train.train)
app.command(rich_help_panel=TRAINING)(compare.compare)
app.command(rich_help_panel=TRAINING)(tune.tune)
app.command(rich_help_panel=TRAINING)(reproduce.reproduce)
app.command(rich_help_panel=USING)(use.evaluate)
app.command(rich_help_panel=USING)(use.personalize)
app.command(rich_help_panel=USING)(use.predict)
app.command(rich_help_panel=USING)(about.report)
app.command(rich_help_panel=KNOWING)(about.algorithms)
app.command(rich_help_panel=KNOWING)(doctor.doctor)
app.command(rich_help_panel=KNOWING)(bench.bench)
app.add_typer(data.app, name="data", rich_help_panel=KNOWING)


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):  # names of classes and symbols must not break a narrow locale
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    own_process()
    try:
        app(prog_name="fedabml")
    except SystemExit as end:
        if (
            end.code and processes.rank_and_size()[1] > 1
        ):  # one of several that fails must not wait for the others to leave
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise
