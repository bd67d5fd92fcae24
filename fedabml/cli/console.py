"""What a person sees: tables, notes, errors, and how a run or a download is getting on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from ..errors import short
from ..evaluation.measures import size
from ..runs.log import Pace, clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ..data.download import Progress as Hear
    from ..engine.rounds import Simulation
    from ..experiments.cell import Cell, Result
    from ..runs.prepare import Setup


def console(stderr: bool = False) -> Console:
    """A console on the present stdout or stderr; where that is no terminal, wide enough for our tables."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def say(text: str = "") -> None:
    """A line as it is: no markup, no wrapping, so that paths can be copied."""
    console().print(text, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """A paragraph, wrapped at words."""
    console().print(text, markup=False)


def note(text: str) -> None:
    """A note to stderr."""
    console(stderr=True).print(f"Note: {text}", markup=False, soft_wrap=True, style="yellow")


def complain(text: str, label: str = "Error: ") -> None:
    """An error, one paragraph, to stderr."""
    console(stderr=True).print(f"{label}{short(text, 4000)}", markup=False, soft_wrap=True, style="red")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None, numbers: bool = False) -> None:
    """Prints a table; with `numbers` all columns but the first are set to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if title:
        console().print(title, style="bold", markup=False)
    made = Table(box=box.SIMPLE_HEAD, show_header=any(head), show_edge=False, pad_edge=False)
    for i, word in enumerate(head):
        made.add_column(Text(word), justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    console().print(made)
    say()


def number(value: Any) -> str:
    """A measure, or a dash where there is none."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


class Notes(logging.Handler):
    """Shows what the package logs while an experiment is followed, from `begin` to `end`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.logger, self.before = logging.getLogger("fedabml"), logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a record."""
        note(record.getMessage())

    def begin(self) -> None:
        """Listens to the package's logger, from the level INFO on."""
        if self not in self.logger.handlers:
            self.before = self.logger.level
            self.logger.setLevel(logging.INFO)
            self.logger.addHandler(self)

    def end(self) -> None:
        """Leaves the logger as it was."""
        if self in self.logger.handlers:
            self.logger.removeHandler(self)
            self.logger.setLevel(self.before)


class Watch:
    """Follows a run: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool = False, label: str = "training"):
        self.quiet, self.label = quiet, label
        self.pace: Pace | None = None  # None: no round was about to begin
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], description=self.label)
            self.bar.stop()
        self.bar = None

    def start(self, setup: Setup, sim: Simulation) -> None:
        """The run's folder is there and the first round is about to begin."""
        self.pace = Pace(setup, sim)
        for text in () if self.quiet else setup.notes:
            note(text)
        if not self.quiet and console().is_terminal:
            self.bar = self._bar(self.pace)

    def _bar(self, pace: Pace) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/] elapsed"),
            TimeElapsedColumn(),
            TextColumn("remaining {task.fields[remaining]}"),
            console=console(),
            expand=True,
        )
        bar.add_task(self.label, total=pace.rounds, completed=pace.saved, loss="–", remaining="–")
        bar.start()
        return bar

    def round(self, line: dict[str, Any]) -> None:
        """A round is finished and saved."""
        assert self.pace
        pace, words = self.pace, self.pace.round(line)
        every = -(-pace.rounds // 25)
        if "note" in line and not self.quiet:
            note(line["note"])
        if self.bar:
            label = "scoring every client" if pace.saved == pace.rounds else self.label
            loss, task = f"{line['loss']:.4f}", self.bar.task_ids[0]
            self.bar.update(task, completed=pace.saved, description=label, loss=loss, remaining=clock(pace.left))
        elif not self.quiet and (pace.saved % every == 0 or pace.saved in (pace.first + 1, pace.rounds)):
            say(f"{self.label}: {words}")


class Board:
    """Follows the cells of an experiment: a live bar on a terminal, plain lines elsewhere.

    Time left is told from the rounds that are left, scoring counted in rounds, too, as if all took equally long.
    """

    PATIENCE = 30.0  # seconds without a plain line, after which one says what is going on

    def __init__(self, label: str, quiet: bool = False):
        self.label, self.quiet = label, quiet
        self.total = self.finished = 0
        self.began = self.spoke = time.perf_counter()
        self.left: dict[str, float] = {}  # by cell, the rounds to go
        self.over: set[str] = set()  # cells that are finished
        self.rounds = 0.0  # of all that were not finished at the start
        self.bar: Progress | None = None
        self.room = 0  # for what runs now, so that the bar does not dance
        self.notes = Notes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self.notes.end()
        if self.bar:
            self.bar.stop()
        self.bar = None

    def start(self, todo: Sequence[Cell], finished: int = 0) -> None:
        """The cells to run now, and how many of the experiment were finished before."""
        self._begin({cell.identity: cell.work for cell in todo}, finished)

    def _begin(self, todo: dict[str, float], finished: int) -> None:
        """The same, by the rounds of every cell."""
        self.total, self.finished, self.began = finished + len(todo), finished, time.perf_counter()
        self.left = dict(todo)
        self.rounds = sum(self.left.values())
        if not self.quiet:
            self.notes.begin()
        if finished and not self.quiet:
            say(f"{finished} of {self.total} runs were finished before")
        if todo and not self.quiet and console().is_terminal:
            self.bar = self._bar()

    def _bar(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[done]}  {task.fields[now]}  elapsed"),
            TimeElapsedColumn(),
            TextColumn("remaining {task.fields[remaining]}"),
            console=console(),
            expand=True,
        )
        bar.add_task(self.label, total=max(self.rounds, 1), done=self._done(), now="", remaining="–")
        bar.start()
        return bar

    def _done(self) -> str:
        return f"{self.finished}/{self.total}"

    def round(self, cells: Sequence[Cell], round: float) -> None:
        """The cells that run together have finished a round or, after the last, a part of their scoring."""
        cells = [cell for cell in cells if cell.identity not in self.over] or cells
        self.left |= {cell.identity: max(0.0, cell.work - round) for cell in cells}
        first, more = cells[0], f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        where, rounds = "scoring", first.config.rounds
        if round < rounds:
            where = f"round {round}/{rounds}"
        elif round > rounds:
            where += f", {(round - rounds) / (first.work - rounds):.0%} done"
        now = f"{first.label}, seed {first.config.seed}{more}, {where}"
        if self.bar:
            self._update(now=now)
        elif not self.quiet and time.perf_counter() - self.spoke > self.PATIENCE:
            self._line(f"{self._done()} done, now {now}")

    def done(self, result: Result) -> None:
        """A cell is finished."""
        self.finished += 1
        self.over.add(result.identity)
        self.left.pop(result.identity, None)
        summary = result.scores[0].summary if result.scores else {}
        said = (
            f"diverged ({result.error.split('. ')[0]})"
            if result.error
            else "  ".join(f"{name} {number(summary[name])}" for name in ("accuracy", "rmse", "nll") if name in summary)
        )
        words = f"{result.label}, seed {result.seed}: {said}"
        if self.bar:
            self._update(now="")
            if result.error:
                self.bar.console.print(words, markup=False, style="yellow")
        elif not self.quiet:
            self._line(f"{self._done()}  {words}")

    def _update(self, now: str) -> None:
        assert self.bar
        done, self.room = self.rounds - sum(self.left.values()), max(self.room, len(now))
        words = {"done": self._done(), "now": now.ljust(self.room), "remaining": self._remaining()}
        self.bar.update(self.bar.task_ids[0], completed=done, **words)  # type: ignore[arg-type]

    def _line(self, words: str) -> None:
        self.spoke = time.perf_counter()
        say(f"{self.label}: {words}  elapsed {clock(self.spoke - self.began)}  remaining {self._remaining()}")

    def _remaining(self) -> str:
        left = sum(self.left.values())
        done = self.rounds - left
        return clock((time.perf_counter() - self.began) / done * left) if done else "–"


@contextmanager
def downloads(what: str, quiet: bool = False) -> Iterator[Hear]:
    """A listener for downloads: a bar on a terminal, a line for every quarter elsewhere."""
    if quiet:
        yield lambda done, total: None
    elif console().is_terminal:
        from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console()) as bar:
            task = bar.add_task(f"downloading {what}", total=None, visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
    else:
        told = [-1]

        def hear(done: int, total: int | None) -> None:
            part = 4 * done // total if total else done // (1 << 26)
            if part != told[0]:
                told[0] = part
                say(f"downloading {what}: {size(done)}{f' of {size(total)}' if total else ''}")

        yield hear
