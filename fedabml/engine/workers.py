"""How the clients of a round are shared out: in chunks that fit in memory, among threads of a CPU.

A step of one client has too little work for all cores, and cores that wait for each other at every operation are slow,
the more so on a busy machine. So each thread takes clients of its own, and its operations run on one core.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ..accel.process import stop_threads_with
from ..errors import InputError
from .executor import Executor

log = logging.getLogger("fedabml")
S = TypeVar("S")
T = TypeVar("T")
# How libraries without an error of their own report a lack of memory: the driver, cuBLAS and cuDNN, torch on a host.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")


# -- chunks -----------------------------------------------------------------------------------------------------------
@dataclass
class ChunkLimit:
    """How many clients run at once: one number for a cohort and all that are made from it by other options."""

    size: int

    def set(self, size: int) -> None:
        """Let at most `size` clients run at once from now on."""
        self.size = size


class Chunked(Protocol):
    """The attributes of a cohort that `fit_in_memory` needs."""

    executor: Executor
    limit: ChunkLimit

    @property
    def device(self) -> torch.device: ...


def chunks(clients: Sequence[Sequence[int]], size: int, workers: int = 1) -> Iterator[dict[int, list[int]]]:
    """Yield the clients of several runs by the number of the run, at most `size` at a time in all threads together."""
    pairs = [(run, int(client)) for run, run_clients in enumerate(clients) for client in run_clients]
    size = max(1, -(-min(size, len(pairs)) // workers))
    for begin in range(0, len(pairs), size):
        part: dict[int, list[int]] = {}
        for run, client in pairs[begin : begin + size]:
            part.setdefault(run, []).append(client)
        yield part


def fit_in_memory(cohorts: Sequence[Chunked], clients: int, run_chunk: Callable[[int], T]) -> T:
    """Return `run_chunk(chunk)` for `clients` clients, repeated with half the chunk while memory is too small.

    The chunk that fits is the cohorts' from then on. Once in a run the work is repeated with the same chunk after all
    captured programs were dropped: they may be what fills the memory, or another process filled it for a while.
    """
    while True:
        try:
            return run_chunk(cohorts[0].limit.size)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)):
                raise
            reason = str(error).splitlines()[0]
        # Outside of the handler, because the error holds the device's tensors.
        graphs_held = any(cohort.executor.graphs for cohort in cohorts)
        if graphs_held and cohorts[0].executor.may_release():
            _release(cohorts)
            log.info("The memory of %s was full (%s): captured programs are dropped.", cohorts[0].device, reason)
        else:
            _halve(cohorts, min(clients, cohorts[0].limit.size), reason)


def _release(cohorts: Sequence[Chunked]) -> None:
    """Drop captured programs, and forget which could not be captured: memory may have been too small for them."""
    for cohort in cohorts:
        cohort.executor.forget()
    gc.collect()
    if cohorts[0].device.type == "cuda":
        torch.cuda.empty_cache()


def _halve(cohorts: Sequence[Chunked], lanes: int, reason: str) -> None:
    device = cohorts[0].device
    if lanes <= 1:
        raise InputError(
            f"The memory of {device} does not suffice for one client alone ({reason}). A smaller batch_size, fewer "
            "weight samples (s) or a smaller model needs less; --device cpu takes the host's memory."
        )
    for cohort in cohorts:
        cohort.limit.set(min(cohort.limit.size, lanes // 2))
    _release(cohorts)  # programs for sizes that will not come again
    log.warning(
        "The memory of %s does not suffice for %d clients at once (%s): the run goes on with %d.",
        *(device, lanes, reason, lanes // 2),
    )


# -- threads ----------------------------------------------------------------------------------------------------------
_pools: dict[int, ThreadPoolExecutor] = {}  # by size
_LOCK = threading.Lock()


def _pool(size: int) -> ThreadPoolExecutor:
    """Return threads that live until `dismiss`. The first sets torch's number of threads in the whole process."""
    with _LOCK:
        if size not in _pools:
            _pools[size] = ThreadPoolExecutor(size, "fedabml", torch.set_num_threads, (1,))
        return _pools[size]


def dismiss() -> bool:
    """End all threads; return whether there were any."""
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


def map_in_threads(work: Callable[[S], T], items: Sequence[S], workers: int) -> Iterable[T]:
    """Return `work` of every item in their order, by `workers` threads, without gradients: the engine takes its own."""
    if workers == 1 or len(items) == 1:
        return map(work, items)
    return _map_ordered(torch.no_grad()(work), items, workers)


def _map_ordered(work: Callable[[S], T], items: Sequence[S], workers: int) -> Iterator[T]:
    """Yield the results in order, a few computed ahead. An error is raised once no thread is at work any more."""
    remaining_items, submitted = iter(items), deque[Future[T]]()

    def submit(count: int) -> None:
        submitted.extend(_pool(workers).submit(work, item) for item in itertools.islice(remaining_items, count))

    submit(workers + 1)
    try:
        while submitted:
            result = submitted.popleft().result()
            submit(1)
            yield result
            del result
    finally:
        for future in submitted:
            future.cancel()
        wait(submitted)
