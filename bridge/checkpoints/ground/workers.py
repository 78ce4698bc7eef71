"""The threads of a command: their number, results in order, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEFAULT_WORKERS = 4

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_LARGE = 4 << 20
_GLIBC_MAX = 32 << 20

_BATCH_BYTES, _BATCH_ITEMS = 8 << 20, 512

# Guards the number of users of glibc's threshold, which is per process.
_lock = threading.Lock()
_batch = threading.Lock()
_users = 0


def default_workers() -> int:
    """One per core of this process, at most 4: more are faster only with fast storage."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_WORKERS)


def ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """``function`` of each item, in order; at most ``workers`` items are in progress or waiting.

    The first error is raised in place of its result, and nothing is started after it. ValueError for workers < 1.
    """
    if workers < 1:
        raise ValueError(f"expected 1 worker or more, got {workers}")
    if workers == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) == workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def batches(items: Iterable[tuple[int, Item]]) -> Iterator[list[Item]]:
    """Batches of items, given with their bytes: handing a small item to a thread takes as long as its work.

    A batch ends with the item that fills 8 MiB, and has at most 512.
    """
    batch: list[Item] = []
    nbytes = 0
    for size, item in items:
        batch.append(item)
        nbytes += size
        if nbytes >= _BATCH_BYTES or len(batch) == _BATCH_ITEMS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def each(function: Callable[[Item], Result], batch: Sequence[Item]) -> list[Result]:
    """``function`` of each item of a batch, in order; only one thread at a time works on a batch of several.

    Inspecting a small tensor releases Python's lock a few times, for microseconds: too short for another thread to run,
    but long enough to wake it up. Comparing 20,000 tensors of 100 kB took one thread 3.1 s, and two 6.2 s (2 cores,
    2026-11-26).
    """
    if len(batch) == 1:
        return [function(batch[0])]
    with _batch:
        return [function(item) for item in batch]


@contextmanager
def large_buffers_returned() -> Iterator[None]:
    """While active, freed buffers of 4 MiB and more return to the system (glibc; elsewhere without effect).

    glibc takes a buffer below a threshold from a heap that shrinks only at its end, and raises the threshold to the
    size of every larger freed buffer, up to 32 MiB. Chunks have about that size and belong to many threads, so freed
    chunks accumulate: converting 1.3 GB was measured to need 260 to 390 MB instead of 120. Afterwards glibc's
    thresholds are at their maximum, as after freeing one buffer of 32 MiB.
    """
    global _users
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    # The threshold is per process: the last of several concurrent conversions restores it.
    with _lock:
        _users += 1
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                mallopt(_M_MMAP_THRESHOLD, _GLIBC_MAX)
                mallopt(_M_TRIM_THRESHOLD, 2 * _GLIBC_MAX)
