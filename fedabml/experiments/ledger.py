"""The ledger of an experiment: cells.jsonl, a line for every finished cell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from ..errors import InputError
from ..files.paths import folder_lock, open_append, read_bytes
from .cell import Cell, Result

MAX_LEDGER = 1 << 32  # bytes


class Unfinished(InputError):
    """Raised where runs are missing and none may be started."""


class Ledger:
    """The file of finished cells. A line that a crash cut short is dropped; its cell runs again.

    `also` are ledgers of other folders or machines, whose cells count as finished. Nothing is added to a ledger that is
    `closed`: `execute` raises `Unfinished` where it lacks a cell.
    """

    def __init__(
        self, path: str | os.PathLike[str], also: Sequence[str | os.PathLike[str]] = (), *, closed: bool = False
    ):
        self.path, self.closed = Path(path), closed
        self.results: dict[str, Result] = {}
        self.others: dict[str, Result] = {}
        for other in also:
            if not os.path.lexists(other):
                raise InputError(f"There is no file of finished cells '{other}'.")
            self.others |= Ledger(other).results
        self._end = self._lines = 0  # where the sound part of the file ends, and how many lines it has
        if os.path.lexists(self.path):
            self._read()

    def _read(self) -> None:
        """Read the lines that were added to the file since it was read last."""
        content = BytesIO(read_bytes(self.path, MAX_LEDGER)[self._end :])
        for number, line in enumerate(content, 1 + self._lines):  # lines end with \n and with nothing else
            if not line.endswith(b"\n"):
                break
            subject = f"'{self.path}', line {number}: this"
            try:
                result = Result.of(line.decode(), subject)
            except (InputError, ValueError, TypeError, LookupError, AttributeError) as error:
                is_explained = isinstance(error, InputError)
                reason = error if is_explained else f"{subject} is not a finished cell ({type(error).__name__})."
                raise InputError(f"{reason} Remove the line, and its cell is run again.") from error
            self.results[result.identity] = result
            self._end, self._lines = self._end + len(line), number

    def __contains__(self, cell: Cell) -> bool:
        return cell.identity in self.results or cell.identity in self.others

    def __getitem__(self, cell: Cell) -> Result:
        return self.results.get(cell.identity) or self.others[cell.identity]

    def add(self, result: Result) -> None:
        """Append a finished cell; it is on disk when this returns."""
        data = result.line().encode()
        with open_append(self.path) as file:
            file.truncate(self._end)  # the rest of a line that a crash cut short; nobody else writes, see `locked`
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._end, self._lines = self._end + len(data), self._lines + 1
        self.results[result.identity] = result

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file, so that no other process runs the same cells, and read what others have added before."""
        with folder_lock(self.path.parent, f".{self.path.name}.lock"):
            if self.path.exists():
                self._read()
            yield
