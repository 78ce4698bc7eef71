"""Arrays on disk until they are needed: a recorded run is larger than the memory that a comparison needs.

One temporary file holds the arrays of one run. The file is unnamed from the start, so nothing remains however the
process ends. Each access maps an array read-only; the array takes memory while somebody holds it.

The file is in the folder for temporary files (``TMPDIR``), which must not be in memory itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import numpy as np

LEAST = 2**15
"""Arrays below this many bytes stay in memory: a map takes whole pages."""


def trim_heap() -> None:
    """Return freed memory to the system.

    The C library keeps freed blocks, and a run frees more than the next run needs. Does nothing without glibc.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache
def _trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None


@dataclass(frozen=True)
class Stored:
    """An array in a file, which stays open as long as this object exists."""

    file: IO[bytes]
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def array(self) -> np.ndarray:
        """A read-only map of the array."""
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        size = self.offset - start + int(np.prod(self.shape)) * self.dtype.itemsize
        return self._within(mmap.mmap(self.file.fileno(), size, access=mmap.ACCESS_READ, offset=start), start)

    def _within(self, mapped: mmap.mmap, start: int) -> np.ndarray:
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return np.frombuffer(mapped, np.uint8, size, self.offset - start).view(self.dtype).reshape(self.shape)


def map_together(many: Sequence[Stored]) -> list[np.ndarray]:
    """Arrays of one file in one map, which takes one file descriptor. Changes in place are private."""
    if not many:
        return []
    # One map for all: a process may hold 65,530 maps and often 1,024 descriptors, and a large model has more arrays.
    mapped = mmap.mmap(many[0].file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [stored._within(mapped, 0) for stored in many]


class Store:
    """A file of arrays. Arrays with the same bytes are written once."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._size = 0
        self._known: dict[bytes, int] = {}

    def keep(self, array: np.ndarray) -> Stored | np.ndarray:
        """Write an array of any dtype; a small array is returned unchanged. ``OSError`` if the disk is full."""
        if array.nbytes < LEAST or array.nbytes == 0:
            return array
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        # A module's output is the next module's input: many arrays come twice.
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if self._file is None:
            # The file has no name and outlives this call: the system frees it when no map or handle is left.
            self._file = tempfile.TemporaryFile(prefix="twinshard-parity-", buffering=0)  # noqa: SIM115 (see above)
        offset = self._known.get(digest)
        if offset is None:
            offset = self._known[digest] = self._size
            self._write(self._file, data)
        return Stored(self._file, offset, array.shape, array.dtype)

    def _write(self, file: IO[bytes], rest: memoryview) -> None:
        try:
            while rest:
                # ``pwrite`` writes at most 2 GB in one call, and less if the disk is nearly full.
                done = os.pwrite(file.fileno(), rest, self._size)
                self._size += done
                rest = rest[done:]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{tempfile.gettempdir()}: expected room for {len(rest)} more bytes of a recorded run, got "
                f"{error.strerror}: set TMPDIR to a folder on a larger disk",
            ) from error
        # Rounded up to whole cache lines, as allocators do.
        self._size += -self._size % 64

    def leaves(self, arrays: Mapping[str, np.ndarray] | None = None) -> StoredLeaves:
        """A new mapping that contains these arrays."""
        leaves = StoredLeaves(self)
        leaves.update(arrays or {})
        return leaves


class StoredLeaves(MutableMapping[str, np.ndarray]):
    """Arrays by name: written on assignment, mapped read-only on access."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, Stored | np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        kept = self._kept[name]
        return kept.array() if isinstance(kept, Stored) else kept

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self._kept[name] = self._store.keep(array)

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def location(self, name: str) -> Stored | np.ndarray:
        """The place of an array in the file, or the array itself if it is in memory."""
        return self._kept[name]

    def file_location(self, name: str) -> Stored:
        """The place of an array in the file. ``KeyError`` for an array in memory."""
        kept = self._kept[name]
        if not isinstance(kept, Stored):
            raise KeyError(f"{name}: expected an array in a file, got one of {kept.nbytes} bytes in memory")
        return kept

    @property
    def resident(self) -> int:
        """Bytes in memory."""
        return sum(kept.nbytes for kept in self._kept.values() if isinstance(kept, np.ndarray))

    def select(self, names: Mapping[str, object]) -> StoredLeaves:
        """The arrays among ``names``, in the order of ``names``, without another copy."""
        selected = StoredLeaves(self._store)
        selected._kept = {name: self._kept[name] for name in names if name in self._kept}
        return selected
