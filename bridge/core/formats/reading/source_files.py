"""The files of a checkpoint, read by position into this process's memory.

    FileView     metadata: bytes by position, fetched in pages
    FileArray    elements: where they are. `copy` writes them into an array, `lend` into a buffer that is reused
    Span        small tensors: several at once, into existing memory

No file is mapped. If another process shortens a mapped file, or its disk fails, SIGBUS ends this process. With reads,
the result is a CheckpointError with file, tensor and byte. A file that changes between its first and its last read also
raises CheckpointError.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from operator import mul, sub
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bridge.core.formats.reading.read_memory import BLOCK, SCAN, SCRATCH, LoanBuffers
from bridge.core.formats.reading.regular_files import Stamp, change, open_regular, require_content
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.arrays import row_major
from bridge.core.formats.tensors.base import COPY_AGAIN, Box, CheckpointError, Loan

_PAGE_BEFORE: Final = 1 << 10
_PAGE: Final = 4 << 10
"""Bytes of metadata that are read together, including some before the wanted bytes: the end of one archive and the
start of the next fit in."""

_MAX_OPEN_FILES = 64
_LARGEST_POINTER = 1024
"""A Git LFS pointer has fewer bytes, by its specification."""

_GAP = 16 << 10
"""The most bytes between two pieces that are read along with them."""

_MOST_PARTS = 1000
"""Parts of memory that one read may fill: 1024 on Linux (`IOV_MAX`)."""

_BETWEEN = memoryview(bytearray(_GAP))


class Span(NamedTuple):
    """Bytes of a file from `start` on, and the memory that they should fill, one part after the other."""

    file: str
    start: int
    targets: tuple[memoryview, ...]


class FileArray(NamedTuple):
    """Elements in a file: the first at byte `start`, the others by `strides`, in bytes, of at least 0.

    what: their owner, for errors.
    """

    file: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    what: str

    def within(self, box: Box, outer: Box) -> FileArray:
        """The elements of a box; this array has the elements of the box `outer`, which contains the box."""
        if box == outer:
            return self
        offsets = map(sub, box.offsets, outer.offsets)
        return self._replace(start=self.start + sum(map(mul, offsets, self.strides)), shape=box.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last, gaps included. There is at least one element."""
        return self.dtype.itemsize + sum([(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)])

    @property
    def row_major(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        return row_major(self.shape, self.strides, self.dtype.itemsize)


class OpenFile:
    """A file that stays open for reading as long as this object is referenced."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = open_regular(path)
        self.stamp = Stamp.of(os.fstat(self.number))

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class SourceFiles:
    """A directory's files, here or in a store; the most recently used files stay open. Thread-safe.

    Every read raises CheckpointError if a file cannot be read, ends early, or has changed since it was first read;
    OSError if a store fails; ValueError after `close`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: OrderedDict[str, OpenFile] = OrderedDict()
        self._stamps: dict[str, Stamp] = {}
        # Made at the first loan: most files contain small tensors, which are read into the writer's memory.
        self._buffers: LoanBuffers | None = None
        # Protects the table of open files; reading happens outside the lock.
        self._lock = threading.Lock()
        self._closed = False

    def view(self, name: str, *ranges: tuple[int, int]) -> FileView:
        """A view of a file's metadata. ranges: what will be read, requested from a store all at once."""
        return FileView(self, name, ranges if isinstance(self.directory, StorePath) else ())

    def size(self, name: str) -> int:
        """The size of a file in bytes when it was first opened."""
        if isinstance(self.directory, StorePath):
            return (self.directory / name).stat().st_size
        return self.open(name, "").stamp.size

    def read(self, name: str, start: int, stop: int, what: str = "") -> bytes:
        """Bytes [start, stop) of a file. what: their owner, for errors."""
        if isinstance(self.directory, StorePath):
            self._require_open()
            data = (self.directory / name).read_range(start, stop)
            if start == 0:
                require_content(data, self._path(name, what))
            return data
        file = self.open(name, what)
        data = self.read_from(file, name, start, stop, what)
        # After the read: a file that was written to meanwhile has yielded a mixture of two contents.
        self._require_same(name, file, what)
        return data

    def open(self, name: str, what: str = "") -> OpenFile:
        """An open file, perhaps opened earlier."""
        with self._lock:
            file = self._opened.get(name)
            if file is not None:
                self._opened.move_to_end(name)
                return file
            self._require_open()  # closed files are not in the table of open files
            try:
                file = self._new(name)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path(name, what)}: cannot be opened: {error.strerror}"
                ) from error
            stamp = self._stamps.setdefault(name, file.stamp)
            if stamp != file.stamp:
                raise CheckpointError(change(self._path(name, what), stamp, file.stamp))
            if file.stamp.size <= _LARGEST_POINTER:
                require_content(self.read_from(file, name, 0, file.stamp.size), self._path(name, what))
            self._opened[name] = file
            # Dropped, not closed: another thread may still be reading from it.
            if len(self._opened) > _most_open():
                self._opened.popitem(last=False)
            return file

    def read_from(self, file: OpenFile, name: str, start: int, stop: int, what: str = "") -> bytes:
        """Bytes [start, stop) of an open file, without noticing changes."""
        parts: list[bytes] = []
        while start < stop:
            try:
                # pread has no position that threads share. With a mapped file, SIGBUS ends the process if somebody
                # shortens it.
                part = os.pread(file.number, stop - start, start)
            except OSError as error:
                raise self._failed(name, start, what, error) from error
            if not part:
                raise self._ended(name, file, stop, what)
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, name: str, start: int, target: memoryview, what: str = "") -> None:
        """Fill memory, whose items are bytes, with a file's bytes from `start` on."""
        if isinstance(self.directory, StorePath):
            self._require_open()
            (self.directory / name).fill(start, target)
            return
        file = self.open(name, what)
        done = 0
        while done < len(target):
            try:
                # Directly into the caller's memory; the call releases Python's lock.
                count = os.preadv(file.number, [target[done:]], start + done)
            except OSError as error:
                raise self._failed(name, start + done, what, error) from error
            if not count:
                raise self._ended(name, file, start + len(target), what)
            done += count
        self._require_same(name, file, what)

    def scan(self, name: str, start: int, stop: int, what: str = "") -> Iterator[memoryview]:
        """Bytes [start, stop) of a file in parts, each valid until the next request, in the thread's scratch memory."""
        for first in range(start, stop, SCAN):
            part = SCRATCH.take(min(SCAN, stop - first)).data
            self.fill(name, first, part, what)
            yield part

    def copy(self, target: np.ndarray, source: FileArray) -> None:
        """Copy elements into an array of their shape and dtype, or of unsigned integers of the same width."""
        if not source.nbytes:
            return
        if source.row_major and target.flags.c_contiguous:
            self.fill(source.file, source.start, target.reshape(-1).view(np.uint8).data, source.what)
            return
        span = source.span
        # A store gets all requests at once: several requests fetch its blocks in parallel.
        if span <= BLOCK or isinstance(self.directory, StorePath):
            memory = SCRATCH.take(span)
            self.fill(source.file, source.start, memory.data, source.what)
            target[...] = np.ndarray(source.shape, target.dtype, memory, 0, source.strides)
            return
        # Split in halves along the longest stride, until little of the file is in memory.
        shape, strides = source.shape, source.strides
        axis = max(range(len(shape)), key=lambda a: strides[a] if shape[a] > 1 else -1)
        half = shape[axis] // 2
        before, after = (slice(None),) * axis, shape[axis + 1 :]
        self.copy(target[(*before, slice(half))], source._replace(shape=(*shape[:axis], half, *after)))
        rest = source._replace(
            start=source.start + half * strides[axis], shape=(*shape[:axis], shape[axis] - half, *after)
        )
        self.copy(target[(*before, slice(half, None))], rest)

    def lend(self, source: FileArray, offset: int = 0) -> Loan | None:
        """Contiguous elements of a file, in memory that is reused once the loan is returned.

        offset: see `CheckpointReader.lend`.
        """
        if not (source.nbytes and source.row_major):
            return None
        nbytes = source.nbytes
        with self._lock:
            buffers = self._buffers = self._buffers or LoanBuffers()
        try:
            buffer, memory = buffers.take(nbytes, offset)
        except MemoryError as error:
            raise CheckpointError(
                f"{self._path(source.file, source.what)}: no memory for {nbytes} bytes"
            ) from error
        self.fill(source.file, source.start, memory.data, source.what)
        array = memory.view(source.dtype).reshape(source.shape)
        array.flags.writeable = False
        return Loan(array, partial(buffers.give_back, buffer))

    def read_into(self, pieces: Sequence[Span | None]) -> list[bool]:
        """Read pieces of files into memory; return whether each was read completely.

        Neighbours share one read: each read releases Python's lock, and a thread waits longer for the lock than the
        read of a small piece takes. In a store, no piece is read.
        """
        read = [False] * len(pieces)
        if isinstance(self.directory, StorePath):
            return read
        run: list[tuple[int, int]] = []
        vector: list[memoryview] = []
        name, start, stop = "", 0, 0
        for index, piece in enumerate(pieces):
            if piece is None:
                continue
            gap = piece.start - stop
            if run and not (piece.file == name and 0 <= gap <= _GAP and len(vector) < _MOST_PARTS):
                self._read_run(name, start, vector, run, read)
                run, vector = [], []
            if not run:
                name, start = piece.file, piece.start
            elif gap:
                vector.append(_BETWEEN[:gap])
            vector += piece.targets
            stop = piece.start + sum(map(len, piece.targets))
            run.append((index, stop))
        if run:
            self._read_run(name, start, vector, run, read)
        return read

    def close(self) -> None:
        """Release the files; arrays copied out stay valid."""
        with self._lock:
            self._closed = True
            self._opened.clear()
        if self._buffers is not None:
            self._buffers.clear()

    def _read_run(
        self, name: str, start: int, vector: list[memoryview], run: list[tuple[int, int]], whole: list[bool]
    ) -> None:
        file = self.open(name, "")
        try:
            # One read for neighbours and the bytes between: a call for each small tensor costs more than its bytes.
            end = start + os.preadv(file.number, vector, start)
        except OSError as error:
            raise self._failed(name, start, "", error) from error
        self._require_same(name, file, "")
        for index, stop in run:
            whole[index] = stop <= end

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the checkpoint {self.directory} was closed")

    def _new(self, name: str) -> OpenFile:
        while True:
            try:
                return OpenFile(self.directory / name)
            except OSError as error:
                # The process has too many files open; these files can be reopened later.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._opened:
                    raise
                self._opened.popitem(last=False)

    def _require_same(self, name: str, file: OpenFile, what: str) -> None:
        status = os.fstat(file.number)
        if (status.st_size, status.st_mtime_ns) != file.stamp:
            raise CheckpointError(change(self._path(name, what), file.stamp, Stamp.of(status)))

    def _ended(self, name: str, file: OpenFile, stop: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path(name, what)}: expected bytes up to {stop}, but the file ends at byte "
            f"{os.fstat(file.number).st_size}: was it shortened while it was read? {COPY_AGAIN}"
        )

    def _failed(self, name: str, start: int, what: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path(name, what)}: cannot be read at byte {start}: {error.strerror}")

    def _path(self, name: str, what: str) -> str:
        return f"{self.directory / name}: {what}" if what else str(self.directory / name)


class FileView:
    """A file's bytes by position: ``view[start:stop]``, fewer at the end of the file; `len` is its size.

    One page is read at a time, and the last two are kept, so that many small reads near each other cost one read. For
    one thread. Errors as in `SourceFiles`.
    """

    def __init__(self, files: SourceFiles, name: str, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._files, self._name = files, name
        self._file = None if isinstance(files.directory, StorePath) else files.open(name)
        self._size = files.size(name) if self._file is None else self._file.stamp.size
        self._kept = [(start, self._read(start, stop)) for start, stop in ranges]
        self._ranges = len(self._kept)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, stop = span.start, min(span.stop, self._size)
        if start >= stop:
            return b""
        for first, data in self._kept:
            if first <= start and stop <= first + len(data):
                return data[start - first : stop - first]
        if stop - start > _PAGE:
            return self._read(start, stop)
        first = max(0, start - _PAGE_BEFORE)
        data = self._read(first, max(stop, first + _PAGE))
        # An archive begins in one page and ends in another.
        self._kept[self._ranges :] = [*self._kept[self._ranges :][-1:], (first, data)]
        return data[start - first : stop - first]

    def unpack(self, layout: struct.Struct, position: int) -> tuple[Any, ...]:
        """The fields of a record from this byte on. CheckpointError if the file ends before their end."""
        data = self[position : position + layout.size]
        if len(data) != layout.size:
            raise CheckpointError(
                f"{self._files.directory / self._name}: expected {layout.size} bytes at {position}, but the file has "
                f"{self._size}: {COPY_AGAIN}"
            )
        return layout.unpack(data)

    def _read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self._size)
        if self._file is None:
            return self._files.read(self._name, start, stop)
        return self._files.read_from(self._file, self._name, start, stop)


def _most_open() -> int:
    """How many files are kept open: at most a quarter of the process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, soft // 4))
