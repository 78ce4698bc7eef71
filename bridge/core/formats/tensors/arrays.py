"""Arrays as bytes: the elements in row-major order, copied fast, their checksum, and which bytes hold a box."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from bridge.core.formats.tensors.crc32c import extend

NUMBER: Final = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")
"""NumPy's codes of numbers, without their byte order. np.dtype raises TypeError for others, such as b8."""


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """The elements in row-major order as one uint8 array; a copy only if they do not lie so already."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(as_integers(array))
    return array.reshape(-1).view(np.uint8)


def as_integers(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: NumPy copies those fast, and ml_dtypes element by element."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array


def array_checksum(*parts: np.ndarray, crc: int = 0) -> int:
    """CRC-32C of the elements of arrays, each in row-major order; copies one only if they do not lie so already.

    crc: the checksum of the elements before these.
    """
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        # The C extension takes read-only buffers.
        flat.flags.writeable = False
        crc = extend(crc, flat)
    return crc


def strides_of(shape: Sequence[int], dtype: np.dtype, order: Literal["C", "F"] = "C") -> tuple[int, ...]:
    """The strides in bytes of an array without gaps."""
    steps, step = [], dtype.itemsize
    for n in shape if order == "F" else reversed(shape):
        steps.append(step)
        step *= n
    return tuple(steps if order == "F" else reversed(steps))


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...], strides: tuple[int, ...], step: int = 1) -> bool:
    """Whether elements follow each other in row-major order, of strides whose last is `step`.

    Strides of axes of one index may be any.
    """
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True
