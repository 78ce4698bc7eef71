"""Bytes of objects, fetched in blocks by many requests at once; recently used blocks stay in memory.

    wanted       |      a      | b |        |  c  |
    blocks    |  0   |  1   |  2   |  3   |  4   |        a: 0 to 2 at once; b: nothing new; c: 3 and 4

Small neighbouring tensors come with one block, and sequential reads get several blocks at once. Memory: BUDGET for the
blocks that stay, and READ_AHEAD blocks for each waiting thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Final

from bridge.core.formats.stores.store import FileSystem

BLOCK: Final = 8 << 20
"""Bytes of a request. A request costs time in itself, as much as transferring some of these bytes."""

BUDGET: Final = 128 << 20
"""Bytes of the blocks that stay in memory."""

_MIN_BLOCK: Final = 1 << 20
_READERS: Final = 16
READ_AHEAD: Final = 4
"""Blocks that are fetched at once."""

ATTEMPTS: Final = 4
_PAUSE: Final = 0.1
_FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
"""Read errors that a retry does not change; file systems raise the last one for unsupported operations."""


class FileRanges:
    """Bytes of the files in a store. Thread-safe.

    sizes: of the files, by store name. urls: names for errors.
    """

    def __init__(self, system: FileSystem, sizes: Mapping[str, int], urls: Mapping[str, str]) -> None:
        self._system, self._sizes, self._urls = system, sizes, urls
        large = sum(size > _MIN_BLOCK for size in sizes.values())
        # Many files that are read concurrently need one block each.
        self.block = max(min(BLOCK, BUDGET // (2 * max(1, large))), min(BLOCK, _MIN_BLOCK))
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._pending: set[tuple[str, int]] = set()
        self._held = 0
        self._ends: deque[tuple[str, int]] = deque(maxlen=_READERS)
        self._small: dict[str, bytes] = {}
        # Threads that need the same block wait for the thread that fetches it.
        self._ready = threading.Condition()

    def close(self) -> None:
        """Drop all blocks."""
        with self._ready:
            self._blocks.clear()
            self._small.clear()
            self._held = 0

    def small(self, name: str, together: Sequence[str]) -> bytes:
        """The content of a file that is read whole and cached; `together`: files to fetch with it, all at once."""
        with self._ready:
            if name in self._small:
                return self._small[name]
            wanted = [n for n in dict.fromkeys((name, *together)) if n not in self._small]
            fetched = self._fetch([(n, 0, self._sizes[n]) for n in wanted])
            self._small.update((n, d) for n, d in zip(wanted, fetched, strict=True) if len(d) <= self.block)
            return fetched[0]

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill memory with the bytes from `start` on. OSError if the store does not provide them."""
        stop = start + len(target)
        with self._ready:
            # A read that begins where another ended counts as sequential: a scan of small tensors waits for few blocks.
            scan = any(0 <= start - end < _MIN_BLOCK for file, end in self._ends if file == name)
            self._ends.append((name, stop))
        if stop > self._sizes[name]:
            raise OSError(
                f"{self._urls[name]}: expected {stop} bytes or more, the listing says {self._sizes[name]}"
            )
        number, last = start // self.block, -(-stop // self.block)
        while number < last:
            for block, data in self._some(name, number, last, scan):
                low, high = max(start, block * self.block), min(stop, (block + 1) * self.block)
                target[low - start : high - start] = data[
                    low - block * self.block : high - block * self.block
                ]
                number = block + 1

    def _some(self, name: str, number: int, last: int, scan: bool) -> list[tuple[int, bytes]]:
        """The next blocks: some from memory, or some fetched now."""
        with self._ready:
            # Another thread is fetching this block: waiting costs less than a second request.
            while (name, number) in self._pending:
                self._ready.wait()
            here = []
            while number < last and (name, number) in self._blocks:
                self._blocks.move_to_end((name, number))
                here.append((number, self._blocks[name, number]))
                number += 1
            if here:
                return here
            end = min(number + READ_AHEAD, -(-self._sizes[name] // self.block) if scan else last)
            claimed = [number]
            for other in range(number + 1, end):
                if (name, other) in self._blocks or (name, other) in self._pending:
                    break
                claimed.append(other)
            self._pending.update((name, block) for block in claimed)
        try:
            size = self._sizes[name]
            fetched = self._fetch([(name, b * self.block, min((b + 1) * self.block, size)) for b in claimed])
        except BaseException:
            # Marked as absent again, so that a waiting thread tries, and gets its own error if the store still fails.
            with self._ready:
                self._pending.difference_update((name, block) for block in claimed)
                self._ready.notify_all()
            raise
        with self._ready:
            self._keep(name, dict(zip(claimed, fetched, strict=True)))
        return [(b, data) for b, data in zip(claimed, fetched, strict=True) if b < last]

    def _keep(self, name: str, blocks: Mapping[int, bytes]) -> None:
        for number, data in blocks.items():
            self._blocks[name, number] = data
            self._held += len(data)
        while self._held > BUDGET and len(self._blocks) > 1:
            self._held -= len(self._blocks.popitem(last=False)[1])
        self._pending.difference_update((name, block) for block in blocks)
        self._ready.notify_all()

    def _fetch(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Fetch ranges of files, all at once; failed ranges are retried after growing pauses."""
        fetched: dict[int, bytes] = {n: b"" for n, (_, start, stop) in enumerate(wanted) if start == stop}
        for attempt in range(ATTEMPTS):
            left = [n for n in range(len(wanted)) if n not in fetched]
            if not left:
                break
            names, starts, stops = zip(*(wanted[n] for n in left), strict=True)
            error: BaseException | None = None
            for n, got in zip(left, self._ask(names, starts, stops), strict=True):
                name, start, stop = wanted[n]
                what = f"cannot read {self._urls[name]}"
                if isinstance(got, BaseException):
                    error_type = FileNotFoundError if isinstance(got, FileNotFoundError) else OSError
                    error = error_type(f"{what}: {type(got).__name__}: {got}")
                    error.__cause__ = got
                    if isinstance(got, _FINAL) or not isinstance(got, Exception):
                        raise error
                elif len(got) != stop - start:
                    error = OSError(
                        f"{self._urls[name]}: expected {stop - start} bytes at {start}, got {len(got)}: did the "
                        "object change during the read?"
                    )
                else:
                    fetched[n] = got
            if error is not None:
                if attempt == ATTEMPTS - 1:
                    raise error
                # Wait longer each time for a store that throttles: 0.1, 0.2 and 0.4 seconds.
                time.sleep(_PAUSE * 2**attempt)
        return [fetched[n] for n in range(len(wanted))]

    def _ask(
        self, names: Sequence[str], starts: Sequence[int], stops: Sequence[int]
    ) -> Sequence[bytes | BaseException]:
        try:
            answers: Sequence[bytes | BaseException] = self._system.cat_ranges(
                list(names), list(starts), list(stops), on_error="return"
            )
            return answers
        except Exception as error:
            # For file systems that raise any exception type that they are given.
            return [error] * len(names)
