"""Files whose content is laid out before it is written, so that many threads write them, in any order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from bridge.formats.working import ChunkRecord

SYNC_BYTES = 256 << 20
"""Data is synced to disk, and then noted in the journal, whenever so much of it is new."""


class DataFile:
    """Places are reserved one after the other, then filled. An existing file is written over, not emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.end = 0

    def reserve(self, length: int, alignment: int = 1) -> int:
        """The place of the next `length` bytes, at a multiple of `alignment`. Not for several threads at once."""
        start = self.end + -self.end % alignment
        self.end = start + length
        return start

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Fill a reserved place, or a part of one. OSError when the disk is full, ValueError after `close`."""
        if self._descriptor < 0:
            raise ValueError(f"expected an open file {self.path}, got one that was closed")
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def write_parts(self, offset: int, parts: Iterable[bytes | memoryview]) -> None:
        """Fill a reserved place with parts that follow each other."""
        for part in parts:
            self.write(offset, part)
            offset += len(part)

    def sync(self) -> None:
        """Bring to disk what is written."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Let go of the file. Threads that write must have ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DataFiles:
    """The data files of one checkpoint. Chunks that `record` counts as written are noted in its journal once synced."""

    def __init__(self, record: ChunkRecord) -> None:
        self._record = record
        self._files: list[DataFile] = []
        self._lock = threading.Lock()
        self._unsynced = 0

    def open(self, path: Path) -> DataFile:
        """One more file. Before any is written to."""
        self._files.append(DataFile(path))
        return self._files[-1]

    def wrote(self, length: int) -> None:
        """Count so many bytes as written, all of their chunks in `record`; sync when there are many."""
        with self._lock:
            self._unsynced += length
            if self._unsynced < SYNC_BYTES:
                return
            self._unsynced = 0
        self.sync()

    def sync(self) -> None:
        """Bring to disk what is written, then note it in the journal."""
        written = self._record.take_written()
        for file in self._files:
            file.sync()
        self._record.synced(written)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()
