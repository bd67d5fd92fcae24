"""Progress displays: live bars in terminals and notebooks, plain lines elsewhere.

`Display` is the base of all of them. This file has those of a run and of downloads, `experiments.progress` those of
experiments. A notebook shows bars if ipywidgets is installed, and plain lines otherwise.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..files.formats import clock, size
from .log import RunTimer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from ..data.download import Progress as OnDownload
    from ..engine.rounds import Simulation
    from .prepare import Setup

P = ParamSpec("P")
R = TypeVar("R")


def console(stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr; without a terminal it is wide enough for our tables."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def shows_bars(terminal: Console) -> bool:
    """Return whether a console can redraw a bar: a terminal, or a notebook with ipywidgets."""
    return terminal.is_terminal or (terminal.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


def print_line(text: str = "") -> None:
    """Print a line without markup or wrapping, so that paths can be copied."""
    console().print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a note to stderr."""
    console(stderr=True).print(f"Note: {text}", markup=False, soft_wrap=True, style="yellow")


def number(value: Any) -> str:
    """Return a measure with four digits, or a dash for None."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


@contextmanager
def drawn_to_the_end(bar: Progress) -> Iterator[Progress]:
    """Show a bar while the context is entered, and draw its final state.

    At its end rich leaves a notebook with the frame that its timer drew last, which may be a tenth of a second old.
    """
    with bar:
        try:
            yield bar
        finally:
            if bar.console.is_jupyter:
                bar.refresh()


class Display(ExitStack):
    """The base of progress displays: a live bar on a terminal or in a notebook, plain lines elsewhere.

    `close` leaves the bar as it stands.
    """

    def __init__(self, label: str, quiet: bool = False):
        super().__init__()
        self.label, self.quiet = label, quiet
        self.bar: Progress | None = None

    def open_bar(self, total: float, before: Sequence[str | ProgressColumn], **fields: Any) -> None:
        """Show a bar, unless there is no terminal; `before` are its columns between the bar and the elapsed time."""
        from rich.progress import BarColumn, Progress, TimeElapsedColumn

        if self.quiet or not shows_bars(console()):
            return
        after = ("elapsed", TimeElapsedColumn(), "remaining {task.fields[remaining]}")
        columns = ("{task.description}", BarColumn(None), *before, *after)
        self.bar = self.enter_context(drawn_to_the_end(Progress(*columns, console=console(), expand=True)))
        self.bar.add_task(self.label, total=total, remaining="–", **fields)

    def update_bar(self, **fields: Any) -> None:
        """Change what the bar shows."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], **fields)


class RunProgress(Display):
    """The progress of one run: its rounds, loss and time."""

    def __init__(self, quiet: bool = False, label: str = "training"):
        super().__init__(label, quiet)
        self.timer: RunTimer | None = None  # None: the first round has not begun

    def start(self, setup: Setup, sim: Simulation) -> None:
        """Begin, when the run's folder exists and the first round is about to begin."""
        from rich.progress import MofNCompleteColumn

        self.timer = RunTimer(setup, sim)
        for text in () if self.quiet else setup.notes:
            note(text)
        columns = ("round", MofNCompleteColumn(), "loss [bold]{task.fields[loss]}[/]")
        self.open_bar(self.timer.rounds, columns, completed=self.timer.saved, loss="–")
        self.callback(self.update_bar, description=self.label)

    def round(self, line: dict[str, Any]) -> None:
        """Show a round that is finished and saved; `line` is its line of metrics.jsonl."""
        assert self.timer
        timer, text = self.timer, self.timer.round(line)
        every = -(-timer.rounds // 25)
        if "note" in line and not self.quiet:
            note(line["note"])
        label = "scoring every client" if timer.saved == timer.rounds else self.label
        loss, left = f"{line['loss']:.4f}", clock(timer.seconds_left)
        self.update_bar(completed=timer.saved, description=label, loss=loss, remaining=left)
        if not (self.bar or self.quiet) and (
            timer.saved % every == 0 or timer.saved in (timer.first + 1, timer.rounds)
        ):
            print_line(f"{self.label}: {text}")


class Notes(logging.Handler):
    """A handler of the package's logger that prints what is logged from level INFO on, while it is entered."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())

    def __enter__(self) -> None:
        self.logger = logging.getLogger("fedabml")
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


@contextmanager
def downloads(subject: str, quiet: bool = False) -> Iterator[OnDownload]:
    """Yield a callback for downloads: a bar on a terminal, a line for every quarter elsewhere."""
    if quiet:
        yield lambda done, total: None
    elif shows_bars(console()):
        from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with drawn_to_the_end(Progress(*columns, console=console())) as bar:
            task = bar.add_task(f"downloading {subject}", total=None, visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
    else:
        printed = -1

        def on_download(done: int, total: int | None) -> None:
            nonlocal printed
            part = 4 * done // total if total else done // (1 << 26)
            if part != printed:
                printed = part
                print_line(f"downloading {subject}: {size(done)}{f' of {size(total)}' if total else ''}")

        yield on_download


def shows_progress(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate `train`: with `progress=True` it shows its rounds; its own callbacks are called, too."""

    @functools.wraps(call)
    def with_progress(*args: P.args, **options: P.kwargs) -> R:
        if options.get("progress") is not True:
            return call(*args, **options)
        with RunProgress() as board:
            for name, display in (("on_start", board.start), ("on_round", board.round)):
                options[name] = _both(display, options.get(name))
            return call(*args, **options)

    return with_progress


def _both(display: Callable[..., None], own: Any) -> Callable[..., None]:
    """Return a callback that calls a display, and the caller's own callback if there is one."""

    def callback(*event: Any) -> None:
        display(*event)
        if own is not None:
            own(*event)

    return callback
