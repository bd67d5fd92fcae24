"""Requests that arrive within a few milliseconds are predicted as one batch, by one thread.

A network needs hardly more time for thirty rows than for one, and one thread at a time needs no lock. Every request
gets the rows that it would get alone: a row's prediction depends on no other row. If a batch fails, its requests are
predicted one by one, so that nobody's inputs spoil another's answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..runs.input_spec import Inputs
from ..runs.outputs import output_columns
from ..runs.prior import Posterior

Columns = dict[str, Sequence[Any]]  # a prediction's columns by name, each with a value per row
Predict = Callable[[Posterior, Inputs], Columns]
MOST_ROWS = 1024  # rows of a batch; a single larger request is a batch of its own


@dataclass
class Job:
    """One request's inputs, the posterior that read them, and the answer that it waits for."""

    posterior: Posterior
    inputs: Inputs
    answer: Future[Columns] = field(default_factory=Future)


class Batcher:
    """A thread that predicts the requests that wait.

    It waits at most `wait` seconds for further requests, and not at all if every request `in_flight` waits already.
    `on_batch(requests, rows)` is called for every batch.
    """

    def __init__(
        self, predict: Predict, wait: float, in_flight: Callable[[], int], on_batch: Callable[[int, int], None]
    ) -> None:
        self._predict, self._wait, self._in_flight, self._on_batch = predict, wait, in_flight, on_batch
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fedabml-predict", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closed

    def submit(self, posterior: Posterior, inputs: Inputs) -> Future[Columns]:
        """Return the prediction to come. An answer that is cancelled before its batch begins is not computed."""
        job = Job(posterior, inputs)
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
                self._on_batch(len(jobs), sum(len(job.inputs.x) for job in jobs))
                self._answer(jobs)

    def _collect(self) -> list[Job]:
        """Wait for requests, and return those of one posterior that make a batch; none if the batcher is closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            end = time.monotonic() + self._wait
            while not self._closed and len(self._jobs) < self._in_flight() and self._rows() < MOST_ROWS:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            jobs: list[Job] = []
            rows = 0
            while self._jobs and (not jobs or self._jobs[0].posterior is jobs[0].posterior):
                rows += len(self._jobs[0].inputs.x)
                if jobs and rows > MOST_ROWS:
                    break
                jobs.append(self._jobs.popleft())
            return jobs

    def _rows(self) -> int:
        return sum(len(job.inputs.x) for job in self._jobs)

    def _answer(self, jobs: Sequence[Job]) -> None:
        """Give every request its answer, or the error that its own inputs raise."""
        try:
            columns = self._predict(jobs[0].posterior, join([job.inputs for job in jobs]))
        except BaseException as error:  # whatever it is, the request must not wait forever
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
                return
            for job in jobs:
                self._answer([job])
            return
        start = 0
        for job in jobs:
            end = start + len(job.inputs.x)
            job.answer.set_result({name: values[start:end] for name, values in columns.items()})
            start = end


def join(parts: Sequence[Inputs]) -> Inputs:
    """Return the inputs of several requests as one."""
    if len(parts) == 1:
        return parts[0]
    columns = None
    if parts[0].columns is not None:
        every = [part.columns or {} for part in parts]
        columns = {name: np.concatenate([each[name] for each in every]) for name in every[0]}
    return Inputs(np.concatenate([part.x for part in parts]), columns)


def predictor(samples: int | None, seed: int, device: str) -> Predict:
    """Return the function that predicts a batch with these options."""

    def predict(posterior: Posterior, inputs: Inputs) -> Columns:
        p = posterior.predict_inputs(inputs, samples, seed, device)
        return output_columns(p, posterior.input_spec)

    return predict
