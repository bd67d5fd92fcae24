"""What the terminal shows: tables, notes, errors, and the progress of runs, experiments and downloads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..errors import short
from ..evaluation.measures import size
from ..runs.log import RunTimer, clock
from ..runs.request import resume_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from ..data.download import Progress as OnDownload
    from ..engine.rounds import Simulation
    from ..experiments.cell import Cell, Result
    from ..runs.prepare import Setup


# -- printing -------------------------------------------------------------------------------------------------------
def console(stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr; without a terminal it is wide enough for our tables."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def print_line(text: str = "") -> None:
    """Print a line without markup or wrapping, so that paths can be copied."""
    console().print(text, markup=False, soft_wrap=True)


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped at words."""
    console().print(text, markup=False)


def note(text: str) -> None:
    """Print a note to stderr."""
    console(stderr=True).print(f"Note: {text}", markup=False, soft_wrap=True, style="yellow")


def print_error(text: str, label: str = "Error: ") -> None:
    """Print an error to stderr, as one paragraph."""
    console(stderr=True).print(f"{label}{short(text, 4000)}", markup=False, soft_wrap=True, style="red")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None, numbers: bool = False) -> None:
    """Print a table; with `numbers` all columns except the first are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if title:
        console().print(title, style="bold", markup=False)
    grid = Table(box=box.SIMPLE_HEAD, show_header=any(head), show_edge=False, pad_edge=False)
    for i, word in enumerate(head):
        grid.add_column(Text(word), justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    console().print(grid)
    print_line()


def number(value: Any) -> str:
    """Return a measure with four digits, or a dash for None."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


# -- progress -------------------------------------------------------------------------------------------------------
class Display(ExitStack):
    """The base of progress displays: a live bar on a terminal, plain lines elsewhere, nothing if `quiet`.

    `close` leaves the bar as it stands.
    """

    def __init__(self, label: str, quiet: bool = False):
        super().__init__()
        self.label, self.quiet = label, quiet
        self.bar: Progress | None = None

    def open_bar(self, total: float, before: Sequence[str | ProgressColumn], **fields: Any) -> None:
        """Show a bar, unless there is no terminal; `before` are its columns between the bar and the elapsed time."""
        from rich.progress import BarColumn, Progress, TimeElapsedColumn

        if self.quiet or not console().is_terminal:
            return
        after = ("elapsed", TimeElapsedColumn(), "remaining {task.fields[remaining]}")
        columns = ("{task.description}", BarColumn(None), *before, *after)
        self.bar = self.enter_context(Progress(*columns, console=console(), expand=True))
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
        loss, left = f"{line['loss']:.4f}", clock(timer.left)
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


class CellProgress(Display):
    """The progress of an experiment's cells.

    The remaining time assumes that all remaining rounds take equally long; scoring is counted in rounds, too.
    """

    LONGEST_SILENCE = 30.0  # seconds after which a plain line reports the present round

    def __init__(self, label: str, quiet: bool = False):
        super().__init__(label, quiet)
        self.total = self.finished = 0
        self.began = self.last_line = time.perf_counter()
        self.rounds = 0.0  # rounds of all cells that were not finished at the start
        self.progress: dict[str, float] = {}  # finished rounds of the cells that have begun, by identity
        self.works: dict[str, float] = {}  # all rounds of these cells
        self.over: set[str] = set()  # identities of finished cells
        self.width = 0  # of the longest text in the bar, so that its length does not change

    def start(self, todo: Sequence[Cell], finished: int = 0) -> None:
        """Begin with the cells to run now; `finished` cells of the experiment were finished before."""
        self.works |= {cell.identity: cell.work for cell in todo}
        self.expect([cell.work for cell in todo], finished)

    def expect(self, works: Sequence[float], finished: int) -> None:
        """Begin with cells of `works` rounds each, or correct what was expected after `finished` cells."""
        begins = not self.total
        self.total, self.finished = finished + len(works), finished
        self.rounds = sum(self.progress.values()) + sum(works)
        if not begins:
            self.update_bar(total=max(self.rounds, 1))
            return
        self.began = time.perf_counter()
        if not self.quiet:
            self.enter_context(Notes())
            if finished:
                print_line(f"{finished} of {self.total} runs were finished before")
        if works:
            self.open_bar(max(self.rounds, 1), ("{task.fields[done]}  {task.fields[now]}",), done=self.count, now="")

    @property
    def count(self) -> str:
        """How many cells are finished, as 3/8."""
        return f"{self.finished}/{self.total}"

    @property
    def left(self) -> float:
        """How many rounds of all cells remain."""
        return self.rounds - sum(self.progress.values())

    @property
    def remaining(self) -> str:
        """The estimated time until the last cell is finished."""
        done = sum(self.progress.values())
        return clock((time.perf_counter() - self.began) / done * self.left) if done else "–"

    def round(self, cells: Sequence[Cell], round: float) -> None:
        """Show that cells which run together have finished a round or, after the last one, a part of their scoring."""
        cells = [cell for cell in cells if cell.identity not in self.over] or cells
        self.works |= {cell.identity: cell.work for cell in cells}
        self.progress |= {cell.identity: min(round, cell.work) for cell in cells}
        first, more = cells[0], f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        where, rounds = "scoring", first.config.rounds
        if round < rounds:
            where = f"round {round}/{rounds}"
        elif round > rounds:
            where += f", {(round - rounds) / (first.work - rounds):.0%} done"
        now = f"{first.label}, seed {first.config.seed}{more}, {where}"
        self.refresh(now)
        if not self.bar and time.perf_counter() - self.last_line > self.LONGEST_SILENCE:
            self.line(f"{self.count} done, now {now}")

    def done(self, result: Result) -> None:
        """Show that a cell is finished."""
        self.cell_done(result)
        scores = result.scores[0].summary if result.scores else {}
        text = "  ".join(f"{name} {number(scores[name])}" for name in ("accuracy", "rmse", "nll") if name in scores)
        if result.error:
            text = f"diverged ({result.error.split('. ')[0]})"
        self.report(f"{result.label}, seed {result.seed}: {text}", warning=bool(result.error))

    def cell_done(self, result: Result) -> None:
        """Count a finished cell."""
        self.finished += 1
        self.over.add(result.identity)
        self.progress[result.identity] = self.works.get(result.identity, 0.0)
        self.refresh()

    def report(self, text: str, warning: bool = False) -> None:
        """Print a plain line; beside a bar only warnings are printed."""
        if not self.bar:
            self.line(f"{self.count}  {text}")
        elif warning:
            self.bar.console.print(text, markup=False, style="yellow")

    def refresh(self, now: str = "") -> None:
        """Update the bar; `now` names what runs at present."""
        self.width = max(self.width, len(now))
        done = sum(self.progress.values())
        self.update_bar(completed=done, done=self.count, now=now.ljust(self.width), remaining=self.remaining)

    def line(self, text: str) -> None:
        """Print a plain line with the times."""
        self.last_line = time.perf_counter()
        if not self.quiet:
            elapsed = clock(self.last_line - self.began)
            print_line(f"{self.label}: {text}  elapsed {elapsed}  remaining {self.remaining}")

    def stop(self, out: Path, command: str) -> NoReturn:
        """End the program after Ctrl-C with code 130, and print how to go on with the experiment in `out`."""
        if not self.total:  # nothing has begun, so there is nothing to go on with
            raise KeyboardInterrupt
        self.close()
        again = resume_command(command, out)
        print_error(f"Stopped. {self.finished} of {self.total} runs are finished in '{out}'. To go on: {again}", "")
        raise typer.Exit(130)


@contextmanager
def downloads(what: str, quiet: bool = False) -> Iterator[OnDownload]:
    """Yield a callback for downloads: a bar on a terminal, a line for every quarter elsewhere."""
    if quiet:
        yield lambda done, total: None
    elif console().is_terminal:
        from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console()) as bar:
            task = bar.add_task(f"downloading {what}", total=None, visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
    else:
        printed = -1

        def on_download(done: int, total: int | None) -> None:
            nonlocal printed
            part = 4 * done // total if total else done // (1 << 26)
            if part != printed:
                printed = part
                print_line(f"downloading {what}: {size(done)}{f' of {size(total)}' if total else ''}")

        yield on_download
