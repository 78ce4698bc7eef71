"""Small pieces of a data file on their way to the disk: neighbours are written as one.

    chunk 7 | chunk 8 | chunk 9 | ...        a thread hands them over one by one
    |            4 MiB             |         written at once, past the system's cache like a large chunk

Thousands of small writes through the cache have to be synced; see `data_file.py`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable
from typing import Final

from bridge.core.formats.files.data_file import BLOCK, DataFile

SMALL: Final = 1 << 20
"""Chunks of fewer bytes are gathered."""

_BYTES: Final = 4 << 20


class Gathered:
    """What one thread has handed over and is not in the file yet. `flush` may be called by any thread."""

    def __init__(self) -> None:
        # With room behind for one more piece, which `fill` needs to have whole.
        self._memory = memoryview(mmap.mmap(-1, _BYTES + 2 * SMALL))
        self._lock = threading.Lock()
        self._file: DataFile | None = None
        # Of the file. A byte is at the same place in its block in memory and in the file.
        self._start = self._end = 0

    def add(self, file: DataFile, offset: int, parts: Iterable[bytes | memoryview]) -> None:
        """Fill a reserved place of a file, sooner or later. OSError for what was handed over before, too."""
        with self._lock:
            self._begin(file, offset)
            for part in parts:
                self._append(memoryview(part).cast("B"))

    def fill(self, file: DataFile, offset: int, length: int, fill: Callable[[memoryview], bool]) -> bool:
        """The same for a piece of at most 2 * SMALL bytes that ``fill`` puts into the memory it is given.

        If that returns False, or raises, the piece is not handed over.
        """
        with self._lock:
            self._begin(file, offset)
            base = self._start - self._start % BLOCK
            if not fill(self._memory[offset - base : offset - base + length]):
                return False
            self._end += length
            left = self._end - base - _BYTES
            if left >= 0:
                self._end = base + _BYTES
                self._write()
                self._memory[:left] = self._memory[_BYTES : _BYTES + left]
                self._end += left
            return True

    def flush(self) -> None:
        """Write everything. OSError when the disk fails."""
        with self._lock:
            self._write()

    def _begin(self, file: DataFile, offset: int) -> None:
        if file is not self._file or offset != self._end:
            self._write()
            self._file, self._start, self._end = file, offset, offset

    def _append(self, part: memoryview) -> None:
        while part:
            base = self._start - self._start % BLOCK
            piece = part[: base + _BYTES - self._end]
            self._memory[self._end - base : self._end - base + len(piece)] = piece
            self._end += len(piece)
            part = part[len(piece) :]
            if self._end == base + _BYTES:
                self._write()

    def _write(self) -> None:
        if self._file is None or self._start == self._end:
            return
        base = self._start - self._start % BLOCK
        self._file.write(self._start, self._memory[self._start - base : self._end - base])
        self._start = self._end
