"""Elements of a checkpoint to look at once, without memory of their own where that can be saved.

all of a tensor, up to 1 MiB    read into memory that each thread has
all of a tensor, larger         lent: read into memory that is used again
parts, and all that is decoded  read into a new array
"""

from __future__ import annotations

import threading
from functools import lru_cache

import numpy as np

from bridge.core.formats.tensors.base import (
    ORBAX_DTYPES,
    Box,
    CheckpointError,
    CheckpointReader,
    Loan,
    is_whole,
)

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


# The bits of the exponent, all of which are set in infinities and NaNs and in nothing else.
_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}
_NAN, _INFINITE = 1, 2


def count_not_finite(array: np.ndarray) -> tuple[int, int]:
    """(NaNs, infinities) in an array of any dtype of ORBAX_DTYPES; the parts of complex numbers count as two."""
    if is_whole(array.dtype):
        return 0, 0
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.itemsize // 2}")
    if flat.itemsize == 1:
        kinds = np.take(_kinds(flat.dtype.name), flat.view(np.uint8))
        return int(np.count_nonzero(kinds == _NAN)), int(np.count_nonzero(kinds == _INFINITE))
    bits = flat.view(f"u{flat.itemsize}")
    mask = bits.dtype.type(_EXPONENT[flat.dtype.name])
    chosen = (bits & mask) == mask
    if not chosen.any():
        return 0, 0
    special = bits[chosen]
    infinite = int(np.count_nonzero((special << 1) == (mask << 1)))
    return special.size - infinite, infinite


@lru_cache
def _kinds(name: str) -> np.ndarray:
    """Whether each bit pattern of a type of one byte is a NaN, an infinity or neither."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(ORBAX_DTYPES[name]).astype(np.float64)
    return np.where(np.isnan(values), _NAN, np.where(np.isinf(values), _INFINITE, 0)).astype(np.uint8)
