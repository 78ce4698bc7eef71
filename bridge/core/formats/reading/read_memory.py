"""Memory for the bytes of files: the caller's arrays, and buffers that are reused."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo

BLOCK = 8 << 20
"""Bytes of a file that are processed at once, so that little of the file is in memory."""

SCAN: Final = 1 << 20
"""Bytes that are read at a time if only a checksum is needed: they fit into the processor's cache."""

_POOLED: Final = 1 << 20
"""Loans of at least this many bytes reuse buffers: the system clears new memory page by page, which is slower than the
read."""
_MAX_BUFFERS: Final = 8
"""The most buffers that are kept."""

_PAGE: Final = 4096
_LARGE: Final = 64 << 10


def memory_for(nbytes: int, alignment: int = 64) -> np.ndarray:
    """New memory of so many bytes, as unsigned integers; MemoryError or ValueError if there is not enough.

    Large memory begins at a multiple of ``alignment``. Some processors copy a page several times more slowly into
    memory that begins up to 31 bytes further into its own page. NumPy's large arrays begin 16 bytes into a page, and
    tensors in files often begin with a page. ``tests/bench/bench_revisions.py`` measures conversions.
    """
    if nbytes < _LARGE:
        return np.empty(nbytes, np.uint8)
    memory = np.empty(nbytes + alignment - 1, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]


# One per thread: a shared buffer would need a lock around every use.
class Scratch(threading.local):
    """Each thread's memory for data that it inspects or passes on."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """So many bytes, valid until the next call. A buffer larger than BLOCK is not kept."""
        if nbytes > BLOCK:
            return memory_for(nbytes)
        if nbytes > self._memory.size:
            self._memory = memory_for(min(BLOCK, max(nbytes, SCAN)))
        return self._memory[:nbytes]


SCRATCH = Scratch()


class LoanBuffers:
    """Memory for loans, reused once a loan is returned. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        # The thread that has written a loan's data returns the loan.
        self._lock = threading.Lock()

    def take(self, nbytes: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
        """A buffer, and so many bytes of it; MemoryError if there is none.

        Buffers of at least ``_POOLED`` bytes begin at the same distance from a multiple of 4096 as ``offset``.
        """
        if nbytes < _POOLED:
            memory = memory_for(nbytes)
            return memory, memory
        buffer = self._buffer(nbytes + _PAGE)
        return buffer, buffer[offset % _PAGE :][:nbytes]

    def _buffer(self, nbytes: int) -> np.ndarray:
        with self._lock:
            fitting = [index for index, buffer in enumerate(self._free) if buffer.size >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda index: self._free[index].size))
            if self._free:
                self._free.pop(0)  # too small now or soon: memory stays at the size of concurrent loans
        return memory_for(-(-nbytes // _POOLED) * _POOLED, _PAGE)

    def give_back(self, buffer: np.ndarray) -> None:
        if buffer.size >= _POOLED:
            with self._lock:
                if len(self._free) < _MAX_BUFFERS:
                    self._free.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


def array_for(info: TensorInfo, box: Box, what: object) -> np.ndarray:
    """Memory for a box of a tensor. CheckpointError, beginning with `what`, when there is not enough."""
    try:
        nbytes = box.numel * info.dtype.itemsize
        return memory_for(nbytes).view(info.dtype).reshape(box.sizes)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"{what}: no memory for {box.numel} elements of tensor {info.name!r}, shape {info.shape}: {error}"
        ) from error
