"""A data file that is uploaded to an object store while it is written: places are filled in any order, full parts sent.

    chunks written   |   0   |      1      |  2  |       3        | ...
    parts            |      1      |      2      |      3      |  ...        part 1 goes when chunks 0 and 1 are there

Only unsent parts are in memory: a few for each writing thread, since each thread fills consecutive places.
"""

from __future__ import annotations

import os
import stat
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol, Self

from bridge.core.formats.stores.listing import RemotePath
from bridge.core.formats.stores.numbered_parts import Parts
from bridge.core.formats.tensors.base import CheckpointError

PART: Final = 16 << 20
"""Bytes of a part, unless there would be too many parts."""

MOST_PARTS: Final = 9000
SENDING: Final = 4
"""Parts of a file that are in transit at once."""

Note = Sequence[Any]


class UploadFile:
    """A data file in a store; has the parts of `DataFile` that writers use.

    open_parts: opens the destination of parts of a given size. begin: called before the first part is sent.
    """

    def __init__(self, url: str, open_parts: Callable[[int], Parts], begin: Callable[[], None]) -> None:
        self.url = self.path = url
        self.end = 0
        self._open, self._begin = open_parts, begin
        self._parts: Parts | None = None
        self._part_size = 0
        self._size = 0
        self._gaps = array("Q")
        self._kept: dict[int, bytes] = {}
        self._filling: dict[int, tuple[bytearray, int]] = {}
        self._sent: set[int] = set()
        self._notes: list[tuple[int, int, Note]] = []
        # Several threads may write chunks of one part; the thread that completes the part sends it.
        self._lock = threading.Lock()
        # Writers wait here while so many parts are in transit, so that memory does not grow with the file.
        self._room = threading.BoundedSemaphore(SENDING)
        self._pool = ThreadPoolExecutor(SENDING, thread_name_prefix="upload")
        self._futures: list[Future[None]] = []
        self._error: BaseException | None = None

    @property
    def size(self) -> int:
        """The size of the file, as far as it is written."""
        return max(self._size, *(start + len(data) for start, data in self._kept.items()), 0)

    def reserve(self, length: int, alignment: int = 1) -> int:
        """The place of the next `length` bytes, at a multiple of `alignment`. Not for several threads at once."""
        start = self.end + -self.end % alignment
        if start > self.end:
            self._gaps.extend((self.end, start))
        self.end = start + length
        return start

    def truncate(self, size: int) -> None:
        """Set the final size of the file."""
        self.end = self._size = size

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Fill a place with a few bytes, which are kept for reading back."""
        self._kept[offset] = bytes(data)
        if self._parts is not None:
            self._fill(offset, memoryview(data))

    def write_parts(self, offset: int, parts: Iterable[bytes | memoryview]) -> None:
        """Fill a reserved place with consecutive pieces. OSError if the store has refused a part."""
        self._start()
        for part in parts:
            view = memoryview(part).cast("B")
            self._fill(offset, view)
            offset += len(view)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from one earlier `write`, or a part of them; the rest is in the store, and cannot be read."""
        for start, data in self._kept.items():
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return b""

    def note(self, offset: int, length: int, note: Note) -> None:
        """Register a note for the time when these bytes are in the store; see `noted`."""
        with self._lock:
            self._notes.append((offset, length, note))

    def noted(self) -> list[Note]:
        """Notes whose bytes have reached the store, each returned once."""
        with self._lock:
            done = [n for n in self._notes if self._holds(*n[:2])]
            self._notes = [n for n in self._notes if not self._holds(*n[:2])]
        return [note for _, _, note in done]

    def holds(self, offset: int, length: int) -> bool:
        """Whether the store has these bytes, from this attempt or an earlier one."""
        self._start()
        with self._lock:
            return self._holds(offset, length)

    def sync(self) -> None:
        """Does nothing: parts are in the store once they are sent."""

    def finish(self) -> None:
        """Send the rest, and make the object appear. OSError if the store refuses; CheckpointError for a gap."""
        self._start()
        assert self._parts is not None
        size = self.size
        with self._lock:
            left = sorted(self._filling)
        for number in left:
            buffer, filled = self._filling.pop(number)
            length = min(self._part_size, size - number * self._part_size)
            if filled != length:
                raise CheckpointError(
                    f"{self.url}: expected part {number + 1} of {length} bytes to be full, found {filled} written"
                )
            self._send(number, buffer[:length])
        self._wait()
        self._parts.finish(-(-size // self._part_size))
        self.stop()

    def close(self) -> None:
        """Does nothing: `finish` or `stop` ends the upload."""

    def stop(self) -> None:
        """Wait for parts in transit, and drop all others."""
        self._pool.shutdown(cancel_futures=True)
        self._filling.clear()

    def abort(self) -> None:
        """Make the store discard the parts."""
        if self._parts is not None:
            self._parts.abort()
        self.stop()

    def _start(self) -> None:
        """Decide the size of parts from the size of the file: all places are reserved by now."""
        with self._lock:
            if self._parts is not None:
                return
            self._begin()
            least = -(-max(self.end, self._size) // MOST_PARTS)
            self._part_size = max(PART, -(-least // PART) * PART)
            parts = self._open(self._part_size)
            # A part with another size does not belong to this file: only the last may be shorter.
            self._sent = {n - 1 for n, size in parts.sizes.items() if size == self._part_size}
            self._parts = parts
        for start, data in list(self._kept.items()):
            self._fill(start, memoryview(data))

    def _holds(self, offset: int, length: int) -> bool:
        last = -(-(offset + length) // self._part_size)
        return all(number in self._sent for number in range(offset // self._part_size, last))

    def _fill(self, offset: int, view: memoryview) -> None:
        if self._error is not None:
            raise self._error
        stop = offset + len(view)
        full = []
        with self._lock:
            self._size = max(self._size, stop)
            for number in range(offset // self._part_size, -(-stop // self._part_size)):
                if number in self._sent:
                    continue
                first = number * self._part_size
                low, high = max(offset, first), min(stop, first + self._part_size)
                if number not in self._filling:
                    self._filling[number] = bytearray(self._part_size), self._gap_bytes(first)
                buffer, filled = self._filling[number]
                buffer[low - first : high - first] = view[low - offset : high - offset]
                self._filling[number] = buffer, filled + high - low
                if filled + high - low == self._part_size:
                    full.append((number, self._filling.pop(number)[0]))
        for number, buffer in full:
            self._send(number, buffer)

    def _gap_bytes(self, first: int) -> int:
        """Bytes of a part that belong to no place."""
        gaps, stop = self._gaps, first + self._part_size
        # From the first gap that ends after the part's first byte.
        index = 2 * bisect_right(range(len(gaps) // 2), first, key=lambda gap: gaps[2 * gap + 1])
        total = 0
        while index < len(gaps) and gaps[index] < stop:
            total += min(gaps[index + 1], stop) - max(gaps[index], first)
            index += 2
        return total

    def _send(self, number: int, data: bytearray) -> None:
        assert self._parts is not None
        if self._parts.in_order:
            # The next part must not wait behind parts that wait for it.
            self._sent_now(number, data)
            self._wait()
            return
        self._room.acquire()
        try:
            future = self._pool.submit(self._sent_now, number, data)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        with self._lock:
            self._futures = [*(f for f in self._futures if not f.done()), future]

    def _sent_now(self, number: int, data: bytearray) -> None:
        assert self._parts is not None
        try:
            if self._error is None:
                self._parts.put(number + 1, data)
                with self._lock:
                    self._sent.add(number)
        except Exception as error:
            failure = OSError(f"cannot write {self.url}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._error = self._error or failure

    def _wait(self) -> None:
        for future in self._futures:
            future.result()
        if self._error is not None:
            raise self._error


class Folder(Protocol):
    """The files behind the paths. small: files in memory, by name; data: files that are sent while they are written."""

    url: str
    small: dict[str, bytes]
    data: dict[str, UploadFile]
    recalled: dict[tuple[str, int], int]
    earlier_names: list[str]

    def open_data(self, name: str) -> UploadFile:
        """A data file, by its path in the checkpoint."""


class UploadPath(RemotePath[Folder]):
    """A file or directory of an uploaded checkpoint; has only the parts of `pathlib.Path` that writers use."""

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        names = str(other).split("/") if str(other) else []
        return type(self)(self.store, (*self._path, *names))

    def __str__(self) -> str:
        return "/".join((self.store.url, *self._path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UploadPath) and str(self) == str(other)

    @property
    def relative(self) -> str:
        """The path relative to the checkpoint."""
        return "/".join(self._path)

    @property
    def name(self) -> str:
        return self._path[-1] if self._path else self.store.url.rpartition("/")[2]

    def relative_to(self, *_: Any, **__: Any) -> UploadPath:
        return _Relative(self.store, self._path)

    def open_data(self) -> UploadFile:
        """The data file of this name."""
        return self.store.open_data(self.relative)

    def exists(self, **_: object) -> bool:
        return self.is_file()

    def is_file(self, **_: object) -> bool:
        return self.relative in self.store.small or self.relative in self.store.data

    def is_dir(self, **_: object) -> bool:
        return not self.is_file()

    def mkdir(self, *_: object, **__: object) -> None:
        """Does nothing: a store has no directories."""

    def stat(self, **_: object) -> os.stat_result:
        data = self.store.data.get(self.relative)
        size = len(self.store.small[self.relative]) if data is None else data.size
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes written around chunks; see `UploadFile.read`."""
        return self.store.data[self.relative].read(start, stop - start)

    def read_bytes(self) -> bytes:
        return self.store.small[self.relative]

    def write_bytes(self, data: Any) -> int:
        self.store.small[self.relative] = bytes(data)
        return len(data)

    def write_text(self, data: str, *_: object, **__: object) -> int:
        return self.write_bytes(data.encode())

    def touch(self, *_: object, **__: object) -> None:
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.small.pop(self.relative, None)

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override] # an iterator, as pathlib's before Python 3.13
        """Files directly in a directory, including files of a resumed attempt."""
        names = dict.fromkeys((*self.store.small, *self.store.data, *self.store.earlier_names))
        start = f"{self.relative}/" if self._path else ""
        below = [name.removeprefix(start) for name in names if name.startswith(start)]
        return (self / name for name in below if "/" not in name)

    def rglob(self, *_: object, **__: object) -> Iterator[Self]:  # type: ignore[override] # as iterdir
        """All files."""
        return (
            type(self)(self.store, tuple(name.split("/"))) for name in (*self.store.small, *self.store.data)
        )


class _Relative(UploadPath):
    def __str__(self) -> str:
        return self.relative

    @property
    def parts(self) -> tuple[str, ...]:
        return self._path
