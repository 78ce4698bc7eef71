"""Files whose content is laid out before it is written, so that many threads can write in any order.

Large pieces bypass the system's cache, which has to be synced before a checkpoint is complete:

    |  head  |     whole blocks of at least 4096 bytes    |  tail  |
     cached    direct, out of aligned memory              cached

Writing and syncing 2 GB took 1.2 s this way, and 6.2 s through the cache (`dd` with oflag=direct, conv=fdatasync; a
virtual machine with 2 cores, 2026-11-23). If the file system has no direct writing, everything goes through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

BLOCK: Final = max(4096, mmap.PAGESIZE)
"""Direct writing needs offsets, lengths and memory addresses that are multiples of this number, on any disk.

It is a whole number of pages, so that no page of the cache contains both directly written bytes and a head or a tail.
"""

_DIRECT_BYTES: Final = 1 << 20
_BUFFER_BYTES: Final = 4 << 20
_OTHER_FILES: Final = 512


class _Buffers(threading.local):
    """A buffer for each thread that begins at a multiple of BLOCK."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _BUFFER_BYTES)
        self.array = np.frombuffer(self.memory, np.uint8)


_BUFFERS = _Buffers()


class DataFile:
    """Places are reserved one after the other, then filled. An existing file is overwritten, not truncated.

    Each file takes two descriptors; see `allow_open_files`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._direct = _open_direct(path)
        self.end = 0

    def reserve(self, length: int, alignment: int = 1) -> int:
        """The place of the next `length` bytes, at a multiple of `alignment`. Not for several threads at once."""
        start = self.end + -self.end % alignment
        self.end = start + length
        return start

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Fill a reserved place, or a part of one. OSError when the disk is full, ValueError after `close`.

        Data is written directly if its offset within a BLOCK is the same in memory and in the file; else it is copied.
        """
        view = memoryview(data)
        if self._descriptor < 0:
            raise ValueError(f"expected an open file {self.path}, got one that was closed")
        try:
            # O_DIRECT writes whole blocks from block-aligned memory. The bytes before the first and after the last
            # block go through the cache, which `sync` flushes.
            if len(view) >= _DIRECT_BYTES and self._direct is not None:
                first, last = -offset % BLOCK, len(view) - (offset + len(view)) % BLOCK
                _pwrite(self._descriptor, view[:first], offset)
                self._write_blocks(offset + first, view[first:last])
                _pwrite(self._descriptor, view[last:], offset + last)
            else:
                _pwrite(self._descriptor, view, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def write_parts(self, offset: int, parts: Iterable[bytes | memoryview]) -> None:
        """Fill a reserved place with parts that follow each other."""
        for part in parts:
            self.write(offset, part)
            offset += len(part)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of a reserved place; fewer if the file is shorter."""
        parts = []
        while length and (part := os.pread(self._descriptor, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def truncate(self, size: int) -> None:
        """Give the file this size."""
        os.truncate(self.path, size)

    def sync(self) -> None:
        """Sync the written bytes to disk."""
        # fdatasync also syncs the file's size, which reading needs, but not its times, which nothing needs.
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file. Threads that write must have ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _write_blocks(self, offset: int, view: memoryview) -> None:
        source = np.frombuffer(view, np.uint8)
        # A loan's memory has the same offset within a block as the place in the file, so large chunks need no copy.
        if source.ctypes.data % BLOCK == 0:
            self._write_piece(offset, view)
            return
        for start in range(0, len(source), _BUFFER_BYTES):
            piece = source[start : start + _BUFFER_BYTES]
            np.copyto(_BUFFERS.array[: len(piece)], piece)
            self._write_piece(offset + start, memoryview(_BUFFERS.memory)[: len(piece)])

    def _write_piece(self, offset: int, piece: memoryview) -> None:
        written = 0
        try:
            if self._direct is not None:
                written = os.pwrite(self._direct, piece, offset)
        except OSError as error:
            # Some file systems allow opening with O_DIRECT, but refuse writing.
            if error.errno != errno.EINVAL:
                raise
        # A disk that is almost full accepts a part of a piece: writing the rest raises an error here.
        _pwrite(self._descriptor, piece[written:], offset + written)


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | flag)
    except OSError:
        return None


def _pwrite(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def allow_open_files(count: int) -> None:
    """Let this process open so many additional files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


SMALL: Final = 1 << 20
"""Chunks of fewer bytes are gathered."""

_BYTES: Final = 4 << 20


class Gathered:
    """Data that one thread has handed over and that is not in the file yet. Any thread may call `flush`.

        chunk 7 | chunk 8 | chunk 9 | ...        a thread hands them over one by one
        |            4 MiB             |         written together, past the system's cache like a large chunk

    Otherwise thousands of small writes through the cache would have to be synced.
    """

    def __init__(self) -> None:
        # With room at the end for one more piece, which `fill` needs whole. Mapped memory begins at a page, as direct
        # writing requires; NumPy's memory begins anywhere.
        self._memory = memoryview(mmap.mmap(-1, _BYTES + 2 * SMALL))
        # `sync` flushes the data that all threads have gathered, from whichever thread calls it.
        self._lock = threading.Lock()
        self._file: DataFile | None = None
        # In the file. A byte has the same place within its block in memory and in the file.
        self._start = self._end = 0

    def add(self, file: DataFile, offset: int, parts: Iterable[bytes | memoryview]) -> None:
        """Fill a reserved place of a file, perhaps later. OSError also for data handed over earlier."""
        with self._lock:
            self._begin(file, offset)
            for part in parts:
                self._append(memoryview(part).cast("B"))

    def fill(self, file: DataFile, offset: int, length: int, fill: Callable[[memoryview], bool]) -> bool:
        """The same for a piece of at most 2 * SMALL bytes, which ``fill`` writes into the memory that it is given.

        If ``fill`` returns False, or raises, the piece is not handed over.
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
                # The piece extends beyond the 4 MiB that are written: its rest begins the next 4 MiB.
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
