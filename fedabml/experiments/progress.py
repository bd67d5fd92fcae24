"""The progress of experiments: how many of their cells are finished, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..files.formats import clock
from ..runs.progress import Display, Notes, downloads, note, number, print_line
from .runner import Callbacks

if TYPE_CHECKING:
    from .cell import Cell, Result
    from .search import Trial


class Stopped(KeyboardInterrupt):
    """Ctrl-C stopped an experiment when `finished` of its `total` runs were finished. The same call goes on."""

    def __init__(self, finished: int, total: int):
        super().__init__(f"{finished} of {total} runs are finished.")
        self.finished, self.total = finished, total


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
        self.works |= {cell.identity: cell.estimated_rounds for cell in todo}
        self.expect([cell.estimated_rounds for cell in todo], finished)

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
        rounds_done = sum(self.progress.values())
        return clock((time.perf_counter() - self.began) / rounds_done * self.left) if rounds_done else "–"

    def round(self, cells: Sequence[Cell], round: float) -> None:
        """Show that cells which run together have finished a round or, after the last one, a part of their scoring."""
        cells = [cell for cell in cells if cell.identity not in self.over] or cells
        self.works |= {cell.identity: cell.estimated_rounds for cell in cells}
        self.progress |= {cell.identity: min(round, cell.estimated_rounds) for cell in cells}
        first, others = cells[0], f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        stage, rounds = "scoring", first.config.rounds
        if round < rounds:
            stage = f"round {round}/{rounds}"
        elif round > rounds:
            stage += f", {(round - rounds) / (first.estimated_rounds - rounds):.0%} done"
        now = f"{first.label}, seed {first.config.seed}{others}, {stage}"
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
        rounds_done = sum(self.progress.values())
        self.update_bar(completed=rounds_done, done=self.count, now=now.ljust(self.width), remaining=self.remaining)

    def line(self, text: str) -> None:
        """Print a plain line with the times."""
        self.last_line = time.perf_counter()
        if not self.quiet:
            elapsed = clock(self.last_line - self.began)
            print_line(f"{self.label}: {text}  elapsed {elapsed}  remaining {self.remaining}")


class SearchProgress(CellProgress):
    """The progress of a search, whose cells become known while it runs and whose trials are shown."""

    def __init__(self, quiet: bool):
        super().__init__("tuning", quiet)

    def expect(self, works: Sequence[float], finished: int) -> None:
        """Begin with cells of `works` rounds, the first `finished` of them done; a second call corrects the first."""
        super().expect(works[finished:], finished)

    def done(self, result: Result) -> None:
        """Count a finished cell."""
        self.cell_done(result)

    def trial(self, trial: Trial) -> None:
        """Show a trial that is finished, refused or confirmed."""
        result = f"{trial.measure} {number(trial.value)}  ({settings(trial)})"
        if trial.refused:
            result = f"refused {trial.refused}"
        elif trial.second is not None:
            result = f"confirmed, on the second seed {trial.measure} {number(trial.second)}"
        elif trial.error:
            result = f"diverged ({trial.error.split('. ')[0]})"
        self.report(f"{trial.algorithm}, trial {trial.number}: {result}", warning=bool(trial.error or trial.refused))


def settings(trial: Trial) -> str:
    """Return the hyperparameters of a trial in one line."""
    return ", ".join(f"{name}={'none' if value is None else value}" for name, value in trial.hyper.items())


@contextmanager
def followed(board: CellProgress, dataset: str, **displays: Callable[..., None]) -> Iterator[Callbacks]:
    """Yield callbacks that show downloads and then, on `board`, the progress of the cells.

    `displays` are further callbacks by name; they end the display of downloads. Ctrl-C raises `Stopped` once cells run.
    """
    with ExitStack() as download, board:

        def show(display: Callable[..., None], *event: Any) -> None:
            download.close()  # one bar at a time
            display(*event)

        try:
            yield Callbacks(
                download=download.enter_context(downloads(dataset, board.quiet)),
                note=(lambda text: None) if board.quiet else note,
                round=board.round,
                done=board.done,
                **{name: partial(show, display) for name, display in displays.items()},  # type: ignore[arg-type]
            )
        except KeyboardInterrupt:
            if not board.total:  # nothing has begun, so there is nothing to go on with
                raise
            raise Stopped(board.finished, board.total) from None
