"""Threads that share out the clients of a round on a CPU.

A step of one client has too little work for all cores, and cores that wait for each other at every operation are
slow, the more so on a busy machine. So each thread takes clients of its own, and its operations run on one core.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..accel.process import stop_threads_with

S = TypeVar("S")
T = TypeVar("T")


class Gate:
    """A lock that many threads may share, or one have alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Condition(), 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Waits for whoever is alone."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._lock.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for all the others, who wait until it is over."""
        with self._lock:
            self._lock.wait_for(lambda: self._inside == 0)
            yield


_pools: dict[int, ThreadPoolExecutor] = {}  # by size
_LOCK = threading.Lock()


def _pool(size: int) -> ThreadPoolExecutor:
    """Threads that are kept until `dismiss`. The first of them sets torch's number of threads in the whole process."""
    with _LOCK:
        if size not in _pools:
            _pools[size] = ThreadPoolExecutor(size, "fedabml", torch.set_num_threads, (1,))
        return _pools[size]


def dismiss() -> bool:
    """Lets all threads go; returns whether there were any."""
    with _LOCK:
        pools = [*_pools.values()]
        _pools.clear()
    for pool in pools:
        pool.shutdown()
    return bool(pools)


stop_threads_with(dismiss)

if hasattr(os, "register_at_fork"):  # a child has no threads but its own, and nobody who would open the lock
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
    os.register_at_fork(after_in_child=_pools.clear)


def over(work: Callable[[S], T], items: Sequence[S], workers: int) -> Iterable[T]:
    """`work` of every item in their order, by so many threads; without gradients, as the engine takes its own."""
    if workers == 1 or len(items) == 1:
        return map(work, items)

    @torch.no_grad()
    def alone(item: S) -> T:
        return work(item)

    return _ordered(alone, items, workers)


def _ordered(work: Callable[[S], T], items: Sequence[S], workers: int) -> Iterator[T]:
    """The results as they are asked for, a few ahead. An error is raised when no thread is at work any more."""
    left, waiting = iter(items), deque[Future[T]]()
    submit = lambda: waiting.extend(_pool(workers).submit(work, item) for item in itertools.islice(left, 1))  # noqa: E731
    for _ in range(workers + 1):
        submit()
    try:
        while waiting:
            result = waiting.popleft().result()
            submit()
            yield result
            del result
    finally:
        for future in waiting:
            future.cancel()
        for future in waiting:
            if not future.cancelled():
                future.exception()
