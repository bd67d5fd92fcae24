"""The command line: a thin layer over the public functions. The commands that need torch import it themselves."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ..accel import own_process
from ..engine import processes
from ..errors import InputError, TrainingError
from ..version import __version__, code
from . import about, bench, compare, data, demo, doctor, federation, reproduce, serve, train, tune, use
from .console import print_error
from .options import Command, Group

UsageError: Any = typer.BadParameter.__base__  # click's, wherever typer has it from


class Program(Group):
    """The group of commands. It prints an error that a person can cause as one paragraph, with exit code 2."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt:  # click would turn it into exit code 1
            raise SystemExit(130) from None

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (InputError, TrainingError, MemoryError, OSError, RuntimeError, OverflowError, UnicodeError) as error:
            message = _message(error)
            if message is None or ctx.params.get("debug") or os.environ.get("FEDABML_DEBUG"):
                raise
            if processes.should_report(train.STOPPED if isinstance(error, processes.PeerLost) else message):
                print_error(message)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            if processes.rank_and_size()[1] == 1:  # otherwise torchrun or the process that failed reports why
                print_error("Stopped.", "")
            raise typer.Exit(130) from None
        except UsageError as error:
            if processes.should_report(error.format_message()):
                raise
            raise typer.Exit(error.exit_code) from error


def _message(error: BaseException) -> str | None:
    """Return the message for an error that a person can cause; None for an error of the program."""
    if isinstance(error, InputError | TrainingError):
        return str(error)
    if isinstance(error, MemoryError) or "not enough memory" in str(error) or "out of memory" in str(error):
        return "There is not enough memory. Give a smaller --chunk (fewer clients at once) or --batch-size."
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}."
    if isinstance(error, RecursionError | OverflowError | UnicodeError):
        # The last resort: readers have their own limits and name the file.
        reason = f"{type(error).__name__}: {error}"
        return f"An input is nested too deeply, too large or not text ({reason}). --debug shows where."
    return None


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        print(f"fedabml {__version__}, code {code()}")  # two builds of one version may differ in their code
        raise typer.Exit


@app.callback()
def program(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and a digest of the code."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, as FEDABML_DEBUG=1 does.")
    ] = False,
) -> None:
    """Personalised federated learning: a shared prior, and for every client a posterior of its own.

    **First steps:** `fedabml demo` trains on embedded data and takes about a minute. Then see `fedabml train --help`.

    **A typical use:** `train` writes a run folder with a prior. `personalize` turns the prior and a client's data into
    that client's posterior. `predict` uses the posterior and reports the uncertainty of each prediction.
    """
    if ctx.invoked_subcommand != "train":
        processes.refuse(f"fedabml {ctx.invoked_subcommand}")


COMMANDS = {
    "Train": (demo.demo, train.train, compare.compare, tune.tune, reproduce.reproduce),
    "Use a trained prior": (use.evaluate, use.personalize, use.predict, serve.serve, about.report),
    "Inspect": (about.algorithms, doctor.doctor, bench.bench),
}
for panel, commands in COMMANDS.items():
    for function in commands:
        app.command(cls=Command, rich_help_panel=panel)(function)
app.add_typer(data.app, name="data", rich_help_panel="Inspect")
app.add_typer(federation.app, name="federation", rich_help_panel="Train")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # a locale without Unicode must not break names and symbols
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        own_process()
    except InputError as error:  # $FEDABML_PLAIN
        print_error(str(error))
        sys.exit(2)
    try:
        app(prog_name="fedabml")
    except SystemExit as end:
        if end.code and processes.rank_and_size()[1] > 1:  # a rank that fails must not wait for the others to leave
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise
