"""The threads of a command: how many there are, results in order, and freed memory given back to the system."""

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

# For the count of users of glibc's threshold, which belongs to the process.
_lock = threading.Lock()
_batch = threading.Lock()
_users = 0


def default_workers() -> int:
    """As many as there are cores for this process, at most 4: more are faster only where storage is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_WORKERS)


def ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """``function`` of each item, in order; at most ``workers`` of them are in work or waiting.

    The first error is raised where its result would be, and nothing is begun after it. ValueError for workers < 1.
    """
    if workers < 1:
        raise ValueError(f"expected 1 worker or more, got {workers}")
    if workers == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # After an error, or when the caller stops asking: what has not begun is not begun.
            pool.shutdown(cancel_futures=True)


def batches(items: Iterable[tuple[int, Item]]) -> Iterator[list[Item]]:
    """Items that come with the bytes of each, small ones together: handing one to a thread takes as long as its work.

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
    """``function`` of each item of a batch, in order; of several, while no other thread does so with another batch.

    Looking at a small tensor lets go of Python's lock a few times, for microseconds: too short for another thread to
    come in, but long enough to wake it up. Comparing 20,000 tensors of 100 kB took one thread 3.1 s, and two 6.2 s (2
    cores, 2026-11-26).
    """
    if len(batch) == 1:
        return [function(batch[0])]
    with _batch:
        return [function(item) for item in batch]


@contextmanager
def large_buffers_returned() -> Iterator[None]:
    """While active, buffers of 4 MiB and more go back to the system when freed (glibc; elsewhere without effect).

    glibc takes a buffer below a threshold from a heap that shrinks only at its end, and raises the threshold to the
    size of every larger buffer freed, up to 32 MiB. Chunks are of about that size and belong to many threads, so freed
    ones pile up: converting 1.3 GB was measured to need 260 to 390 MB instead of 120. Afterwards glibc's thresholds are
    at their maximum, where freeing one buffer of 32 MiB would have taken them.
    """
    global _users
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    # The threshold belongs to the process: the last of several conversions at once restores it.
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
