"""Work by several threads whose results come in order, with a bounded number of them waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
            pool.shutdown(cancel_futures=True)
