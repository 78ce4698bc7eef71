"""Elements of a checkpoint that are inspected once, without allocating memory where possible.

all of a tensor, up to 1 MiB    read into the thread's memory
all of a tensor, larger         lent: read into reusable memory
parts, and decoded data         read into a new array
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
    """A thread's memory for small tensors, two at a time: 2 MiB."""

    def __init__(self) -> None:
        self.first, self.second = (memoryview(bytearray(_SMALL)) for _ in range(2))


MEMORY = Memory()


def borrow(reader: CheckpointReader, name: str, box: Box, memory: memoryview) -> Loan:
    """The elements of a box, valid until they are returned or the next are borrowed into ``memory``, the thread's own.

    Errors as in `CheckpointReader.read`.
    """
    info = reader.tensors[name]
    # A reader may notice only after fetching a part from a store that the part is not contiguous.
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
    """Does nothing: the thread's memory stays with the thread."""


# The exponent's bits, which are all set exactly in infinities and NaNs.
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
    """Whether each bit pattern of a one-byte type is a NaN, an infinity or neither."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(ORBAX_DTYPES[name]).astype(np.float64)
    return np.where(np.isnan(values), _NAN, np.where(np.isinf(values), _INFINITE, 0)).astype(np.uint8)
