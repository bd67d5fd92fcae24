"""Requests that arrive within a few milliseconds are read and predicted as one batch, by one thread.

A network, and pandas, need hardly more time for thirty rows than for one, and one thread at a time needs no lock. Every
request gets the rows that it would get alone: a row's prediction depends on no other row. If a batch fails, its
requests are answered one by one, so that nobody's inputs spoil another's answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

M = TypeVar("M")
Columns = dict[str, Sequence[Any]]  # a prediction's columns by name, each with a value per row
MOST_BYTES = 1 << 20  # of a batch's bodies; a single larger request is a batch of its own


class Answer(NamedTuple):
    """A request's predictions, and the names of columns that were not used."""

    columns: Columns
    ignored: list[str]


@dataclass
class Job(Generic[M]):
    """One request: the model that it began with, its body and the kind of it, and the answer that it waits for."""

    model: M
    kind: str
    body: bytes
    answer: Future[Answer] = field(default_factory=Future)


class Batcher(Generic[M]):
    """A thread that answers the requests that wait.

    It waits at most `wait` seconds for further requests, and not at all if every request `in_flight` waits already.
    `answer(model, jobs)` returns the answers of jobs, in their order, an error for each that has none. If it raises an
    error itself, the jobs are answered one by one.
    """

    def __init__(
        self,
        answer: Callable[[M, Sequence[Job[M]]], list[Answer | Exception]],
        wait: float,
        in_flight: Callable[[], int],
    ) -> None:
        self._answer, self._wait, self._in_flight = answer, wait, in_flight
        self._jobs: deque[Job[M]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fedabml-predict", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closed

    def submit(self, model: M, kind: str, body: bytes) -> Future[Answer]:
        """Return the answer to come. One that is cancelled before its batch begins is not computed."""
        job = Job(model, kind, body)
        with self._changed:
            if self._closed:
                raise RuntimeError("The batcher is closed.")
            self._jobs.append(job)
            self._changed.notify()
        return job.answer

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._collect():
            jobs = [job for job in jobs if job.answer.set_running_or_notify_cancel()]
            if jobs:
                self._settle(jobs)

    def _collect(self) -> list[Job[M]]:
        """Wait for requests, and return those of one model that make a batch; none if the batcher is closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            end = time.monotonic() + self._wait
            while not self._closed and len(self._jobs) < self._in_flight():
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            jobs: list[Job[M]] = []
            size = 0
            while self._jobs and (not jobs or self._jobs[0].model is jobs[0].model):
                size += len(self._jobs[0].body)
                if jobs and size > MOST_BYTES:
                    break
                jobs.append(self._jobs.popleft())
            return jobs

    def _settle(self, jobs: Sequence[Job[M]]) -> None:
        """Give every request its answer, or the error that its own inputs raise."""
        try:
            answers = self._answer(jobs[0].model, jobs)
        except BaseException as error:  # whatever it is, the request must not wait forever
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
            else:
                for job in jobs:
                    self._settle([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)
