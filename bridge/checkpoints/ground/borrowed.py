"""Elements of a checkpoint to look at once, without memory of their own where that can be saved.

all of a tensor, up to 1 MiB    read into memory that each thread has
all of a tensor, larger         lent: read into memory that is used again
parts, and all that is decoded  read into a new array
"""

from __future__ import annotations

import threading

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, Loan

_SMALL = 1 << 20


class Memory(threading.local):
    """What a thread reads small tensors into, two at a time: 2 MiB."""

    def __init__(self) -> None:
        self.first, self.second = (memoryview(bytearray(_SMALL)) for _ in range(2))


MEMORY = Memory()


def borrow(reader: CheckpointReader, name: str, box: Box, memory: memoryview) -> Loan:
    """The elements of a box, until they are given back or the next are borrowed into ``memory``, which is the thread's.

    Errors as `CheckpointReader.read`.
    """
    info = reader.tensors[name]
    # Of a part a reader may find out that it is not in one piece only when it is there, fetched from a store.
    if info.chunks == (box,):
        nbytes = info.nbytes
        if nbytes <= _SMALL:
            target = memory[:nbytes]
            try:
                (sums,) = reader.read_into([(name, target)])
            except (CheckpointError, OSError):
                sums = None  # `read` says why
            if sums is not None:
                return Loan(np.ndarray(box.sizes, info.dtype, target), _nothing, sums.crc32c)
        loan = reader.lend(name, box)
        if loan is not None:
            return loan
    return Loan(reader.read(name, box), _nothing)


def _nothing() -> None:
    """What is the thread's stays so."""
